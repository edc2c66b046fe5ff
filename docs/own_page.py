"""EF-DPO with help: an expert shows the instances that the agent never solved.

    π_0   imitates a few golden episodes of each task
    each round: π plays a group of episodes on each of some new instances
                pairs: of one instance, solved ≻ failed; where all failed, the expert's episode ≻ each of them
                π ← DPO on these pairs, reference: the round's start

Differs from EF-DPO: the expert's episodes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from minidpo.data.episodes import by_instance
from minidpo.data.pairs import contrast, outcome_pairs
from minidpo.experiment import Experiment, Policy
from minidpo.learning.dpo import DPO
from minidpo.learning.sft import SFT


@dataclass(frozen=True)
class Helped:
    """EF-DPO, and an expert's episode of each instance that the agent never solved."""

    demonstrations: int = 5
    "golden episodes of each task"
    rounds: int = 1
    "how often to explore and train"
    instances: int = 24
    "instances of each task explored in a round"
    group: int = 8
    "episodes of each instance"
    sft: SFT = SFT(steps=100)
    dpo: DPO = DPO(epochs=3)


def helped(run: Experiment, o: Helped) -> Iterator[Policy]:
    policy = run.sft(run.demonstrations(o.demonstrations), o.sft)
    yield policy
    for _ in range(o.rounds):
        played = run.play(policy, run.instances(o.instances), o.group)
        groups = by_instance(played).items()
        hopeless = [instance for instance, group in groups if not any(e.solved for e in group)]
        golden = run.experts(hopeless) if hopeless else []
        policy = run.dpo(policy, outcome_pairs(played) + contrast(golden, played), o.dpo)
        yield policy
