"""GRPO and its relatives: an adapter from its own episodes, each weighed by its advantage over others.

No pairs and no value function: an episode is compared with those of the same instance (`group_advantages`),
with GiGPO a turn also with those on the same page. Several steps use the same rollouts, so the loss has the
ratio to the policy that played and clips it. That policy's log-probs are made by the code that trains, before
the first step: at that step every ratio is 1 up to the rounding of trees of other shapes.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from minidpo.config import GRPO, GRPOCommand, PolicyGradient
from minidpo.data.batch import Batch
from minidpo.data.episodes import Episode, by_instance, read_all
from minidpo.data.pairs import NothingToLearn
from minidpo.learning.rollouts import (
    Rollouts,
    entry_batches,
    entry_logps,
    group_numbers,
    logps_before,
    own_rollouts,
)
from minidpo.learning.trainer import StepSettings, train
from minidpo.learning.training_run import (
    example_indices,
    finish,
    in_steps,
    open_run,
    optimizers_of,
    resync_finished,
)
from minidpo.memory import lora
from minidpo.memory.loading import open_chat, open_to_train, to_compute
from minidpo.memory.plan import dpo_load
from minidpo.objective.policy_gradient import (
    clipped_loss,
    entropy,
    group_advantages,
    kl_k3,
    leave_one_out_advantages,
    state_advantages,
)
from minidpo.system import processes


def grpo(config: GRPOCommand) -> dict:
    """Train an adapter on its own rollouts. Returns the last step's log."""
    options = config.grpo
    played = read_all(config.data)
    episodes = mixed_groups(played, config.data)
    run = open_run(config, config.data, reference=config.reference)
    if run.finished:
        return resync_finished(run)
    data = Rollouts.of(episodes, *open_chat(config.model))
    advantages = data.by_token(turn_advantages(episodes, options))
    options = in_steps(options, len(episodes))
    machine = to_compute(config.machine, config.adapter, config.reference)
    policy, machine, run.base = open_to_train(
        config.model,
        machine,
        lora.read_config(config.adapter),
        options.optimizer,
        lambda m: dpo_load(m, data.largest_tree(m)),
    )
    processes.on_rank_0(run.begin)
    old, ref = logps_before(config, run, policy, data=data, episodes=episodes, machine=machine)
    print(lora.describe(policy))

    def step_batches(step: int) -> Iterator[RolloutBatch]:
        picked = example_indices(
            step, options.batch, len(data.dialogues), config.seed, labels=data.instances
        )
        return (
            RolloutBatch(*parts)
            for parts in entry_batches(
                data, picked, (advantages, old, ref), machine, policy.head_weight.device
            )
        )

    train(
        run,
        policy,
        optimizers_of(options, policy),
        batches=step_batches,
        score=lambda batch: entry_logps(policy, batch.trees, machine),
        objective=lambda batch, logps: clipped_objective(options, batch, logps),
        settings=StepSettings(
            options,
            config.seed,
            options.advantage.upper(),
            group_numbers([e for e in played if e.turns]),
        ),
    )
    return finish(run, policy, config.model)


def mixed_groups(episodes: Sequence[Episode], files: Sequence[Path]) -> list[Episode]:
    """The episodes of instances that were solved at times and failed at times; the others have no advantage.
    GiGPO's paper keeps instances that were always solved, too: there the shorter way from a state has one.
    Here all learners read the same. Raises NothingToLearn without any, ValueError as `own_rollouts` does."""
    groups = by_instance(own_rollouts(episodes, files))
    mixed = [group for group in groups.values() if len({e.solved for e in group}) > 1]
    print(f"{len(mixed)} of {len(groups)} groups have both outcomes")
    if not mixed:
        raise NothingToLearn(
            f"{' '.join(map(str, files))}: no instance was both solved and failed, so no "
            "episode has an advantage: explore more instances, or at a higher temperature"
        )
    return [episode for group in mixed for episode in group]


def turn_advantages(episodes: Sequence[Episode], options: GRPO) -> list[Tensor]:
    """The advantage of each turn of each episode, (turns,) each."""
    number = {instance: n for n, instance in enumerate(by_instance(episodes))}
    reward = torch.tensor([float(e.solved) for e in episodes])
    group = torch.tensor([number[e.instance] for e in episodes])
    if options.advantage == "rloo":
        advantage = leave_one_out_advantages(reward, group)
    else:
        advantage = group_advantages(reward, group, scale=options.advantage == "grpo")
    turns = [len(e.turns) for e in episodes]
    episode = torch.arange(len(episodes)).repeat_interleave(torch.tensor(turns))
    if options.advantage != "gigpo":
        return list(advantage[episode].split(turns))
    seen: dict[tuple, int] = {}
    state = torch.tensor(
        [
            seen.setdefault((e.instance, turn.observation), len(seen))
            for e in episodes
            for turn in e.turns
        ]
    )
    returns = torch.cat(
        [
            float(e.solved) * options.gamma ** torch.arange(len(e.turns) - 1.0, -1, -1)
            for e in episodes
        ]
    )
    return list(
        state_advantages(advantage, episode, returns, state, options.state_weight).split(turns)
    )


class RolloutBatch(NamedTuple):
    """A micro-batch, as `entry_batches` makes it."""

    trees: Batch
    names: list[str]  # of each entry
    step_tokens: int  # entries of the whole step
    advantage: Tensor  # (M,)
    old: Tensor  # (M,) log π of the policy that played
    ref: Tensor  # (M,) of the reference


def clipped_objective(
    options: PolicyGradient, batch: RolloutBatch, logps: Tensor, *, weigh_kl: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's part of the step's loss, a mean over all tokens that the agent wrote, and the log.

    That is the mean of TRL's `bnpo` and `dapo`, for RLOO too, where TRL has one ratio a sequence. GRPO has a
    mean of episodes' means. Its k3 stands alone as in its paper; `weigh_kl`, for PPO: it is weighed by the
    ratio, as TRL's by default, so its gradient is that of KL(π(·|s) ‖ π_ref(·|s)), summed over the states
    that were played. What a token does to later states is not counted, as with a KL in the reward it would.
    """
    ratio, kl = (logps - batch.old).exp(), kl_k3(logps, batch.ref)
    losses = clipped_loss(logps, batch.old, batch.advantage, options.low, options.high)
    if options.kl:
        losses = losses + options.kl * (ratio * kl if weigh_kl else kl)
    pushed_up = batch.advantage > 0
    clipped = (pushed_up & (ratio > 1 + options.high)) | (
        (batch.advantage < 0) & (ratio < 1 - options.low)
    )
    # the policy as it is now would have written these tokens `ratio` times as often
    numbers = {
        "kl_to_reference": ratio * kl,
        "clip_share": clipped.to(kl.dtype),
        "entropy": entropy(logps.detach(), batch.old),
        "ratio": ratio,
    }
    return (
        losses.sum() / batch.step_tokens,
        {name: values.sum() / batch.step_tokens for name, values in numbers.items()},
    )
