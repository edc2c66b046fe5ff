"""KTO: each episode is judged alone, desirable if it was solved and undesirable if not.

    π_0   imitates a few golden episodes of each task
    each round: π plays a group of episodes on each of some new instances
                π ← KTO on all successes and all failures, reference: the round's start

Ethayarajh et al. 2024, arXiv:2402.01306. Differs from the paper: the rarer kind is repeated until there are as
many as of the other. On `nano` it gained as much as DPO (docs/learners.md, `kto-unpaired`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from minidpo.algorithms.ef_dpo import EFDPO
from minidpo.data.pairs import unpaired
from minidpo.experiment import Experiment, Policy
from minidpo.learning.dpo import DPO


@dataclass(frozen=True)
class KTO(EFDPO):
    """KTO: SFT on a few demonstrations, then each own episode as desirable or undesirable."""

    dpo: DPO = DPO(loss="kto")


def kto(run: Experiment, o: KTO) -> Iterator[Policy]:
    policy = run.sft(run.demonstrations(o.demonstrations), o.sft)
    yield policy
    for _ in range(o.rounds):
        played = run.play(policy, run.instances(o.instances), o.group)
        policy = run.dpo(policy, unpaired(played, run.seed), o.dpo)
        yield policy
