"""Self-play: no demonstrations at all (Song et al. 2024, arXiv:2403.02502, section on self-play).

    the base model plays a group of episodes on each of some instances
    π_0   imitates those that were solved
    each round: as EF-DPO

Differs from the paper: pairs are own successes over own failures, where the paper takes the best sample as the
golden episode; equal successes on one instance are imitated once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from minidpo.algorithms.rounds import Rounds
from minidpo.data.pairs import outcome_pairs
from minidpo.data.selection import distinct, solved
from minidpo.experiment import Experiment, Policy
from minidpo.learning.dpo import DPO
from minidpo.learning.sft import SFT
from minidpo.system.ranges import Positive


@dataclass(frozen=True)
class SelfPlay(Rounds):
    """Self-play: imitate the base model's own successes, then DPO on own outcomes."""

    instances: Positive[int] = 24
    "instances of each task explored in a round"
    sft: SFT = SFT(lr=2e-4)
    dpo: DPO = DPO()


def self_play(run: Experiment, o: SelfPlay) -> Iterator[Policy]:
    played = run.play(run.base, run.instances(o.instances), o.group)
    policy = run.sft(distinct(solved(played)), o.sft)
    yield policy
    for _ in range(o.rounds):
        played = run.play(policy, run.instances(o.instances), o.group)
        policy = run.dpo(policy, outcome_pairs(played), o.dpo)
        yield policy
