"""ETO: exploration-based trajectory optimisation (Song et al. 2024, arXiv:2403.02502, Algorithm 1).

    π_0   imitates the demonstrations
    each round: π plays every demonstrated instance once
                pair it with the demonstration: the one with more reward ≻ the other
                π ← DPO on these pairs, reference: the round's start

Appendix C contrasts steps: π continues from golden steps, and the action that led to success ≻ one that did
not. `contrast` chooses between whole episodes, steps, and both.

Differs from the paper: a LoRA adapter in place of all weights; beta and learning rate are the same in all
rounds, where the authors' script changes them from the second on; the best round on validation is kept, not the
last; an action that also led to a success is not rejected.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from minidpo.algorithms.rounds import Demonstrated
from minidpo.data.episodes import instances_of
from minidpo.data.pairs import contrast, stepwise_pairs
from minidpo.experiment import Experiment, Policy
from minidpo.learning.dpo import DPO
from minidpo.learning.sft import SFT
from minidpo.system.ranges import Positive


@dataclass(frozen=True)
class ETO(Demonstrated):
    """ETO: SFT on demonstrations, then DPO on demonstrations against own attempts at their instances."""

    demonstrations: Positive[int] = 50
    rounds: Positive[int] = 3
    group: Positive[int] = 1
    contrast: Literal["episodes", "steps", "mixture"] = "episodes"
    "what is compared: whole episodes; the next action after golden steps (appendix C); both"
    sft: SFT = SFT(epochs=3, batch=64, lr=2e-5, warmup=0.03)
    dpo: DPO = DPO(epochs=3, batch=32, lr=1e-6, warmup=0.1, constant=True, beta=0.1)


def eto(run: Experiment, o: ETO) -> Iterator[Policy]:
    demonstrations = run.demonstrations(o.demonstrations)
    demonstrated = instances_of(demonstrations)
    policy = run.sft(demonstrations, o.sft)
    yield policy
    for number in range(o.rounds):
        first = o.group * number  # other samples than in the round before
        pairs = []
        if o.contrast != "steps":
            played = run.play(policy, demonstrated, o.group, index=first)
            pairs += contrast(demonstrations, played)
        if o.contrast != "episodes":
            played = run.play(policy, demonstrated, o.group, index=first, golden=demonstrations)
            pairs += stepwise_pairs(demonstrations, played)
        policy = run.dpo(policy, pairs, o.dpo)
        yield policy
