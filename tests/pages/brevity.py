"""Brevity: the shortest success of an instance is preferred to its failures.

    π_0   imitates the demonstrations
    each round: π plays a group of episodes on each of some new instances
                pairs: of one instance, the solved episode with the fewest turns ≻ each failed one
                π ← DPO on these pairs
"""

from collections.abc import Iterator
from dataclasses import dataclass

from minidpo.algorithms.rounds import Exploring
from minidpo.data.episodes import by_instance
from minidpo.data.pairs import Pair
from minidpo.experiment import Experiment, Policy
from minidpo.learning.dpo import DPO


@dataclass(frozen=True)
class Brevity(Exploring):
    """SFT, then DPO on the shortest own successes."""

    dpo: DPO = DPO(beta=0.1, until="turn")


def brevity(run: Experiment, o: Brevity) -> Iterator[Policy]:
    policy = run.sft(run.demonstrations(o.demonstrations), o.sft)
    yield policy
    for _ in range(o.rounds):
        pairs = []
        for group in by_instance(run.play(policy, run.instances(o.instances), o.group)).values():
            solved = sorted((e for e in group if e.solved), key=lambda e: len(e.turns))
            pairs += [Pair(best, e) for best in solved[:1] for e in group if not e.solved]
        policy = run.dpo(policy, pairs, o.dpo)
        yield policy
