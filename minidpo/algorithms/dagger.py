"""DAgger: the expert's answers in the states that the agent reaches (Ross et al. 2011, arXiv:1011.0686).

    π_0   imitates the demonstrations
    each round: π plays some new instances; the experts answer in states that it reached
                a new π imitates the demonstrations and all these answers so far

Differs from the paper: a state from which the expert does not solve the page is not imitated.
On SmolLM2: +8.7 points over SFT, 20 below DPO (docs/learners.md, `dagger`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from minidpo.algorithms.rounds import Exploring
from minidpo.data.selection import answers_of_experts, distinct
from minidpo.experiment import Experiment, Policy
from minidpo.learning.sft import SFT
from minidpo.system.ranges import Positive


@dataclass(frozen=True)
class DAgger(Exploring):
    """DAgger: imitate the experts' answers in states that the agent reached."""

    group: Positive[int] = 1
    states: Positive[int] = 1
    "states of each instance in which the expert is asked"
    imitation: SFT = SFT(lr=2e-4)


def dagger(run: Experiment, o: DAgger) -> Iterator[Policy]:
    imitated = run.demonstrations(o.demonstrations)
    policy = run.sft(imitated, o.sft)
    yield policy
    for _ in range(o.rounds):
        played = run.play(policy, run.instances(o.instances), o.group)
        imitated = imitated + answers_of_experts(run.ask_experts(played, o.states))
        policy = run.sft(distinct(imitated), o.imitation)
        yield policy
