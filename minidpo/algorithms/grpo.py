"""GRPO and its relatives: policy gradients that compare an episode with the agent's others of the instance.

    π_0   imitates the demonstrations
    each round: π plays a group of episodes on each of some new instances
                A = how much better an episode was than its group
                π ← steps on -min(ρA, clip(ρ)A) + kl·KL(π ‖ π_0), where ρ is the ratio to the policy that played

    advantage   A of a turn                                       source
    grpo        (R - mean) / std of the group                     Shao et al. 2024, arXiv:2402.03300
    dr-grpo     R - mean                                          Liu et al. 2025, arXiv:2503.20783
    rloo        R - mean of the others                            Ahmadian et al. 2024, arXiv:2402.14740
    gigpo       R - mean, and the same among turns on one page    Feng et al. 2025, arXiv:2505.10978

R is the page's verdict, 1 or 0. Differs from the papers: the loss is a mean over all tokens of a step; groups
without both outcomes are left out, for GiGPO, too; RLOO has a clipped ratio for each token.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from minidpo.algorithms.rounds import Exploring
from minidpo.data.episodes import Episode
from minidpo.experiment import Experiment, Policy
from minidpo.learning.policy_gradient import (
    PolicyGradient,
    dr_grpo_advantages,
    gigpo_advantages,
    grpo_advantages,
    mixed_groups,
    rloo_advantages,
)
from minidpo.system.ranges import NotNegative, Positive, Share

ADVANTAGES = {"grpo": grpo_advantages, "dr-grpo": dr_grpo_advantages, "rloo": rloo_advantages}


@dataclass(frozen=True)
class Groups(Exploring):
    """What GRPO and its relatives have in common."""

    rounds: Positive[int] = 2
    gradient: PolicyGradient = PolicyGradient()


@dataclass(frozen=True)
class GRPO(Groups):
    """GRPO, Dr. GRPO and RLOO."""

    advantage: Literal["grpo", "dr-grpo", "rloo"] = "grpo"
    "what an episode is compared with; grpo: its group's mean, divided by the std; dr-grpo: without the std; rloo: \
the others' mean"


@dataclass(frozen=True)
class GiGPO(Groups):
    """GiGPO: also compares turns on the same page."""

    gamma: Share[float] = 0.95
    "discount of the verdict for turns before the last"
    state_weight: NotNegative[float] = 1.0
    "weight of a turn's advantage among those on the same page"


def grpo(run: Experiment, o: GRPO) -> Iterator[Policy]:
    yield from _rounds(run, o, ADVANTAGES[o.advantage])


def gigpo(run: Experiment, o: GiGPO) -> Iterator[Policy]:
    yield from _rounds(run, o, lambda e: gigpo_advantages(e, o.gamma, o.state_weight))


def _rounds(
    run: Experiment, o: Groups, advantages_of: Callable[[Sequence[Episode]], list[Tensor]]
) -> Iterator[Policy]:
    policy = run.sft(run.demonstrations(o.demonstrations), o.sft)
    reference = policy if o.gradient.kl else None
    yield policy
    for _ in range(o.rounds):
        played = run.play(policy, run.instances(o.instances), group=o.group, on_policy=True)
        mixed = mixed_groups(played)
        policy = run.policy_gradient(
            policy, mixed, o.gradient, advantages=advantages_of(mixed), reference=reference
        )
        yield policy
