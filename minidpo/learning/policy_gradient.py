"""Policy gradients: trains an adapter on its own episodes, each turn weighted by its advantage.

GRPO, Dr. GRPO, RLOO and GiGPO differ only in the advantage. There are no pairs and no value function: an
episode is compared with those of the same instance; GiGPO also compares turns on the same page. Several steps
use the same rollouts, so the loss has the ratio to the policy that played, and clips it. The training code
itself computes that policy's log-probs before the first step, where every ratio is 1 up to rounding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from minidpo.data.batch import Batch
from minidpo.data.episodes import Episode, by_instance
from minidpo.data.pairs import NothingToLearn
from minidpo.data.selection import verdicts
from minidpo.learning.rollouts import Rollouts, entry_batches, entry_logps, logps_before
from minidpo.learning.trainer import Optimizer, StepSettings, train
from minidpo.learning.training_run import (
    example_indices,
    finish,
    finished,
    in_steps,
    open_learner,
    optimizer_of,
)
from minidpo.memory.context import Context
from minidpo.memory.loading import open_chat
from minidpo.objective.policy_gradient import (
    clipped_loss,
    entropy,
    group_advantages,
    kl_k3,
    leave_one_out_advantages,
    state_advantages,
)
from minidpo.objective.scores import check_parameters
from minidpo.system.ranges import NotNegative, Positive, Share
from minidpo.system.run_folder import RunFolder


@dataclass(frozen=True)
class PolicyGradient(Optimizer):
    """Several steps on the agent's own episodes, weighted by their advantage."""

    epochs: Positive[float] = 1.0
    batch: Positive[int] = 64
    lr: Positive[float] = 2e-4
    low: Share[float] = 0.2
    "a token whose ratio to the policy that played has fallen by this share is pushed down no further"
    high: NotNegative[float] = 0.2
    "a token whose ratio has risen by this share is pushed up no further"
    kl: NotNegative[float] = 0.0
    "weight of an added KL to the reference; for ppo, its weight at the first step"

    def __post_init__(self):
        super().__post_init__()
        check_parameters(low=self.low)


def policy_gradient(
    run: RunFolder,
    context: Context,
    episodes: Sequence[Episode],
    options: PolicyGradient,
    *,
    start: Path,
    reference: Path | None = None,
    advantages: Sequence[Tensor],
) -> Path:
    """Train the adapter `start` on episodes that it played. Returns the trained adapter's folder.

    advantages: (turns,) of each episode. reference: the adapter to which the KL is measured; None: `start`.
    """
    if run.finished:
        return finished(run)
    data = Rollouts.of(episodes, *open_chat(context.model), context.world.system_prompt)
    advantage = data.by_token(advantages)
    options = in_steps(options, len(episodes))
    policy, machine = open_learner(run, context, options, data.largest_tree, start, reference)
    old, ref = logps_before(run, policy, data, episodes, machine, start, reference)
    columns = advantage, old, ref

    def step_batches(step: int) -> Iterator[RolloutBatch]:
        picked = example_indices(
            step, options.batch, len(episodes), context.seed, labels=data.instances
        )
        for parts in entry_batches(data, picked, columns, machine, policy.head_weight.device):
            yield RolloutBatch(*parts)

    train(
        run,
        policy,
        optimizer_of(options, policy),
        batches=step_batches,
        score=lambda batch: entry_logps(policy, machine, batch.trees),
        objective=lambda batch, logps: clipped_objective(options, batch, logps),
        settings=StepSettings(options, context.seed, "policy gradient"),
    )
    return finish(run, policy, context.model)


class RolloutBatch(NamedTuple):
    """A micro-batch, as `entry_batches` makes it."""

    trees: Batch
    names: list[str]  # of each entry
    step_tokens: int  # entries in the whole step
    advantage: Tensor  # (M,)
    old: Tensor  # (M,) log π of the policy that played
    ref: Tensor  # (M,) log π of the reference


def clipped_objective(
    options: PolicyGradient, batch: RolloutBatch, logps: Tensor, *, weigh_kl: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's part of the step's loss, a mean over all tokens that the agent wrote, and the log.

    TRL calls this mean `bnpo` and `dapo`; GRPO's paper takes a mean of episodes' means. GRPO adds k3 without a
    ratio, as in its paper. `weigh_kl`, for PPO, weights it by the ratio; then its gradient is that of
    KL(π(·|s) ‖ π_ref(·|s)), summed over the states that were played. It does not count how a token changes later
    states; a KL in the reward would.
    """
    ratio, kl = (logps - batch.old).exp(), kl_k3(logps, batch.ref)
    losses = clipped_loss(logps, batch.old, batch.advantage, options.low, options.high)
    if options.kl:
        losses = losses + options.kl * (ratio * kl if weigh_kl else kl)
    clipped = (batch.advantage > 0) & (ratio > 1 + options.high)
    clipped |= (batch.advantage < 0) & (ratio < 1 - options.low)
    numbers = {
        # the policy as it is now would have written these tokens `ratio` times as often
        "kl_to_reference": ratio * kl,
        "clip_share": clipped.to(kl.dtype),
        "entropy": entropy(logps.detach(), batch.old),
        "ratio": ratio,
    }
    log = {name: values.sum() / batch.step_tokens for name, values in numbers.items()}
    return losses.sum() / batch.step_tokens, log


# ---- advantages: (turns,) of each episode; the reward is the verdict, 1 or 0 ----


def grpo_advantages(episodes: Sequence[Episode]) -> list[Tensor]:
    """(R - mean) / std over the instance's episodes, for all turns. Shao et al. 2024, arXiv:2402.03300."""
    return for_all_turns(group_advantages(*verdicts(episodes)), episodes)


def dr_grpo_advantages(episodes: Sequence[Episode]) -> list[Tensor]:
    """R - mean over the instance's episodes. Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783."""
    return for_all_turns(group_advantages(*verdicts(episodes), scale=False), episodes)


def rloo_advantages(episodes: Sequence[Episode]) -> list[Tensor]:
    """R - mean over the instance's other episodes. Ahmadian et al. 2024 (RLOO), arXiv:2402.14740."""
    return for_all_turns(leave_one_out_advantages(*verdicts(episodes)), episodes)


def gigpo_advantages(
    episodes: Sequence[Episode], gamma: float = 0.95, state_weight: float = 1.0
) -> list[Tensor]:
    """Dr. GRPO's, plus `state_weight` times each turn's advantage among those on the same page of the instance.

    A turn's return is the verdict, discounted by `gamma` once for each later turn. Feng et al. 2025 (GiGPO),
    arXiv:2505.10978.
    """
    turns = [len(e.turns) for e in episodes]
    episode = torch.arange(len(episodes)).repeat_interleave(torch.tensor(turns))
    states = [(e.instance, turn.observation) for e in episodes for turn in e.turns]
    number = {state: n for n, state in enumerate(dict.fromkeys(states))}
    state = torch.tensor([number[state] for state in states])
    turns_left = [torch.arange(n - 1.0, -1, -1) for n in turns]
    returns = torch.cat([e.solved * gamma**left for e, left in zip(episodes, turns_left)])
    advantage = group_advantages(*verdicts(episodes), scale=False)
    of_turns = state_advantages(advantage, episode, returns, state, state_weight)
    return list(of_turns.split(turns))


def for_all_turns(numbers: Tensor, episodes: Sequence[Episode]) -> list[Tensor]:
    """Each episode's number, of (B,), repeated for all its turns."""
    return [number.expand(len(e.turns)) for number, e in zip(numbers, episodes, strict=True)]


def mixed_groups(episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes of instances that were both solved and failed; all others have advantage 0.

    GiGPO's paper keeps instances that were always solved, where a shorter way from a state has an advantage. We
    give all advantages the same episodes. Raises NothingToLearn if there are none.
    """
    groups = by_instance(e for e in episodes if e.turns).values()
    mixed = [group for group in groups if len({e.solved for e in group}) > 1]
    print(f"{len(mixed)} of {len(groups)} groups have both outcomes")
    if not mixed:
        raise NothingToLearn(
            "no instance was both solved and failed, so no episode has an advantage: explore more "
            "instances, or at a higher temperature"
        )
    return [episode for group in mixed for episode in group]
