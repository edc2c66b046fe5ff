"""DMPO: direct multi-turn preference optimisation (Shi et al. 2024, arXiv:2406.14868).

    π_0   imitates the demonstrations
    each round: π plays every demonstrated instance once
                the demonstration ≻ a failure, using only noisy failures or only the others
                π ← DPO with each turn weighted by φ(t, N), equation 17, reference: the round's start

Differs from the paper: a rule decides what is noisy (an unusable or a repeated action); the paper's clean
setting also cuts losers to the winner's length.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from minidpo.algorithms.rounds import Demonstrated
from minidpo.data.episodes import instances_of
from minidpo.data.pairs import contrast, is_noisy
from minidpo.experiment import Experiment, Policy
from minidpo.learning.dpo import DPO
from minidpo.learning.sft import SFT
from minidpo.system.ranges import Positive


@dataclass(frozen=True)
class DMPO(Demonstrated):
    """DMPO: ETO's pairs of whole episodes under a loss that weighs earlier turns more."""

    demonstrations: Positive[int] = 50
    group: Positive[int] = 1
    losers: Literal["all", "noisy", "clean"] = "noisy"
    "which failures are rejected: all; those with unusable or repeated actions; those without"
    sft: SFT = SFT(epochs=3, batch=64, lr=2e-5, warmup=0.03)
    dpo: DPO = DPO(
        loss="dmpo", epochs=3, batch=32, lr=1e-6, warmup=0.1, constant=True, beta=0.1, gamma=0.7
    )


def dmpo(run: Experiment, o: DMPO) -> Iterator[Policy]:
    demonstrations = run.demonstrations(o.demonstrations)
    demonstrated = instances_of(demonstrations)
    policy = run.sft(demonstrations, o.sft)
    yield policy
    for number in range(o.rounds):
        played = run.play(policy, demonstrated, o.group, index=o.group * number)
        if o.losers != "all":
            played = [e for e in played if e.solved or is_noisy(e) == (o.losers == "noisy")]
        policy = run.dpo(policy, contrast(demonstrations, played), o.dpo)
        yield policy
