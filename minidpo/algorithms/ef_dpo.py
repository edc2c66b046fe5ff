"""EF-DPO: a few demonstrations, then preferences from the agent's own verdicts.

    π_0   imitates a few golden episodes of each task
    each round: π plays a group of episodes on each of some new instances
                pairs: of one instance, solved ≻ failed
                π ← DPO on these pairs, reference: the round's start
                (`average`: π ← the mean of its weights before and after)

Source: the report "EF-DPO" (Qwen2-7B-Instruct, 5 demonstrations, 100 SFT and 50 DPO steps, beta 0.1, one
round). Differs from the report: several rounds are possible, each on new instances. The mean of weights:
Wortsman et al. 2022, arXiv:2109.01903 (WiSE-FT).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from minidpo.algorithms.rounds import Exploring
from minidpo.data.pairs import outcome_pairs
from minidpo.experiment import Experiment, Policy
from minidpo.learning.dpo import DPO


@dataclass(frozen=True)
class EFDPO(Exploring):
    """EF-DPO: SFT on a few demonstrations, then DPO on the agent's successes over its failures."""

    average: bool = False
    "keep the mean of the weights before and after each round, which is half a step"
    dpo: DPO = DPO(steps=50, beta=0.1)


def ef_dpo(run: Experiment, o: EFDPO) -> Iterator[Policy]:
    demonstrations = run.demonstrations(o.demonstrations)
    policy = run.sft(demonstrations, o.sft)
    yield policy
    for _ in range(o.rounds):
        played = run.play(policy, run.instances(o.instances), o.group)
        trained = run.dpo(policy, outcome_pairs(played), o.dpo)
        policy = run.average(policy, trained) if o.average else trained
        yield policy
