"""RFT: imitate what succeeded (Yuan et al. 2023, arXiv:2308.01825; filtered and weighted behaviour cloning).

    π_0   imitates the demonstrations
    each round: π plays a group of episodes on each of some new instances
                filtered:  a new π imitates the demonstrations and all successes so far
                advantage: π imitates all its episodes, each weighted by exp((verdict - group mean) / τ)

The weighted form is reward-weighted regression with a baseline (Peng et al. 2019, arXiv:1910.00177).
Differs from the paper: several rounds; equal successes on one instance are imitated once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from minidpo.algorithms.rounds import Exploring
from minidpo.data.selection import distinct, solved, weights_by_advantage
from minidpo.experiment import Experiment, Policy
from minidpo.learning.sft import SFT
from minidpo.system.ranges import Positive


@dataclass(frozen=True)
class RFT(Exploring):
    """RFT: SFT on demonstrations, then on own episodes, filtered or weighted by their verdict."""

    weighting: Literal["filtered", "advantage"] = "filtered"
    "filtered: only successes, trained from the base; advantage: all episodes by their advantage, continuing from π"
    temperature: Positive[float] = 0.5
    "τ of the advantage weighting: near 0 only the best count, if large all count equally"
    imitation: SFT = SFT(lr=2e-4)


def rft(run: Experiment, o: RFT) -> Iterator[Policy]:
    demonstrations = run.demonstrations(o.demonstrations)
    policy = run.sft(demonstrations, o.sft)
    yield policy
    successes = []
    for _ in range(o.rounds):
        played = run.play(policy, run.instances(o.instances), o.group)
        if o.weighting == "filtered":
            successes += solved(played)
            policy = run.sft(distinct([*demonstrations, *successes]), o.imitation)
        else:
            spoken = [e for e in played if e.turns]
            weights = weights_by_advantage(spoken, o.temperature)
            policy = run.sft(spoken, o.imitation, weights=weights, start=policy)
        yield policy
