"""PPO: trains an adapter and a value function on the agent's own episodes, in several passes over them.

A turn is one action, with one advantage for all its tokens. V is read from the state that predicts the turn's
first token, so γ and λ count decisions, whatever the length of an answer (like the utterance-level critic of
ArCHer, Zhou et al. 2024, arXiv:2402.19446; Ouyang et al. 2022 have a value for each token). Each pass computes
values and advantages anew (Andrychowicz et al. 2021, arXiv:2006.05990, section 3.5). A new head predicts 0, so
it matters from the second pass on; the next round starts with the head of the last. The KL is in the loss: in
the reward of recorded rollouts it would be the KL of the policy that played, which usually is the reference.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minidpo.data.batch import Batch, read_states
from minidpo.data.episodes import Episode
from minidpo.learning.policy_gradient import PolicyGradient, RolloutBatch, clipped_objective
from minidpo.learning.reference import key
from minidpo.learning.rollouts import (
    Rollouts,
    entries_once,
    entry_batches,
    entry_values,
    logps_before,
)
from minidpo.learning.trainer import StepSettings, train
from minidpo.learning.training_run import (
    example_indices,
    finish,
    finished,
    in_steps,
    open_learner,
    optimizer_of,
)
from minidpo.memory import lora
from minidpo.memory.context import Context
from minidpo.memory.loading import open_chat
from minidpo.memory.machine import Machine
from minidpo.model import scalar_head
from minidpo.model.decoder import Transformer
from minidpo.model.head import token_logps
from minidpo.model.scalar_head import ScalarHead
from minidpo.objective.policy_gradient import adapted_coefficient, gae, group_advantages, value_loss
from minidpo.system.ranges import NotNegative, Positive, Share
from minidpo.system.run_folder import RunFolder
from minidpo.system.tensors import fingerprint

VALUE_CLIP = 0.2  # how far a value may usefully move from what it was when its pass began


@dataclass(frozen=True)
class PPO(PolicyGradient):
    """PPO: policy gradients with a value function in place of groups."""

    epochs: Positive[float] = 4.0
    kl: NotNegative[float] = 0.05
    kl_target: Positive[float | None] = 0.02
    "nats a token: kl grows while the KL to the reference is above this, else it shrinks (None: kl is constant)"
    gamma: Share[float] = 1.0
    "discount of rewards, a turn"
    lam: Share[float] = 0.95
    "λ of GAE: 1 uses only the rewards, 0 only the value of the next page"
    value_weight: Positive[float] = 0.1
    "weight of the value's loss beside the policy's"


def ppo(
    run: RunFolder,
    context: Context,
    episodes: Sequence[Episode],
    options: PPO,
    *,
    start: Path,
    reference: Path | None = None,
    rewards: Sequence[Tensor],
) -> Path:
    """Train the adapter `start` on episodes that it played, and the value head beside it.

    rewards: of each turn, (turns,) for each episode. reference: the adapter to which the KL is measured; None:
    `start`. Returns the trained adapter's folder, with the head. Schulman et al. 2017,
    arXiv:1707.06347. Differs from the paper: one value for each turn; advantages are scaled to mean 0 and variance 1
    over a pass, and values are clipped, as in its authors' code; a KL to the reference (Ouyang et al. 2022).
    """
    if run.finished:
        return finished(run)
    data = Rollouts.of(episodes, *open_chat(context.model), context.world.system_prompt)
    options = in_steps(options, len(episodes))
    policy, machine = open_learner(
        run, context, options, data.largest_tree, start, reference, "both"
    )
    head = ScalarHead(policy)
    head.load(lora.located(start, (*lora.FILES, scalar_head.FILE)), "value")
    old, ref = logps_before(run, policy, data, episodes, machine, start, reference)
    # all that a pass's values depend on, apart from the number of the pass
    began_with = {"rewards": rewards, "old": old, "ref": ref, "head": [head.weight[0]]}
    began = fingerprint({name: torch.cat(list(parts)) for name, parts in began_with.items()})
    weights = f"{run.base} {replace(options, save_every=1)} {context.seed} {began}"
    passes: dict[int, Targets] = {}  # of the current pass, by its number

    def targets_at(step: int) -> Targets:
        number, done = divmod(step * options.batch, len(episodes))
        if number not in passes:
            name = f"values-{number}.safetensors"
            path = run.folder / name
            if done >= options.batch and not path.is_file():  # the policy has moved since then
                raise ValueError(
                    f"{path} is gone, the values that this pass began with: delete {run.state}, too"
                )
            wanted = key(weights, data.dialogues, name)
            read = partial(entry_values, policy, head, machine)
            values = entries_once(path, wanted, data, policy, machine, read)
            passes.clear()
            passes[number] = make_targets(data, values, rewards, options)
        return passes[number]

    def step_batches(step: int) -> Iterator[ValuedBatch]:
        picked = example_indices(
            step, options.batch, len(episodes), context.seed, labels=data.instances
        )
        # from the log of earlier steps, so that a killed run goes on with the same weight
        kl = adapted_weight(options, run.steps_so_far()[:step])
        in_this_step, device = replace(options, kl=kl), policy.head_weight.device
        targets = targets_at(step)
        return valued_batches(data, picked, targets, (old, ref), in_this_step, machine, device)

    model = nn.ModuleDict({"policy": policy, "head": head})
    train(
        run,
        model,
        optimizer_of(options, model),
        batches=step_batches,
        score=lambda batch: entry_scores(policy, head, machine, batch.trees),
        objective=ppo_objective,
        settings=StepSettings(options, context.seed, "PPO"),
    )
    run.call(head.save, run.folder / "adapter", "value")
    return finish(run, policy, context.model)


def after_last_turn(rewards: Sequence[float], episodes: Sequence[Episode]) -> list[Tensor]:
    """The reward of each turn, (turns,) for each episode: the episode's reward at its last turn, else 0.

    >>> from minidpo.data.episodes import Turn
    >>> after_last_turn([1.0], [Episode("t", 1, 0, "", (Turn("", "a", None),) * 3, "solved", 1.0, "")])
    [tensor([0., 0., 1.])]
    """
    paid = [torch.zeros(len(e.turns)) for e in episodes]
    for of_turns, reward in zip(paid, rewards, strict=True):
        of_turns[-1] = reward
    return paid


class Targets(NamedTuple):
    """The targets of a pass. A column has a number for each token that the agent wrote, (written,) an episode."""

    advantages: list[Tensor]
    starts: list[Tensor]  # 1 where a turn begins, else 0
    values: list[Tensor]  # V before the token when the pass began
    returns: list[Tensor]  # what V should be where the turn begins
    variance: float  # of all turns' returns


def make_targets(
    data: Rollouts,
    values: Sequence[Tensor],
    rewards: Sequence[Tensor],
    options: PPO,
    *,
    whiten: bool = True,
) -> Targets:
    """GAE of each episode; values: (written,) for each, rewards: (turns,) for each.

    whiten: scale the advantages of all turns to mean 0 and variance 1.
    """
    turns = [torch.tensor(dialogue.written) for dialogue in data.dialogues]
    starts = [turn.diff(prepend=turn.new_tensor([-1])) != 0 for turn in turns]
    before = [value[start] for value, start in zip(values, starts)]  # (turns,)
    advantages = [gae(r, value, options.gamma, options.lam) for r, value in zip(rewards, before)]
    returns = [advantage + value for advantage, value in zip(advantages, before)]
    if whiten:
        together = torch.cat(advantages)
        white = group_advantages(together, torch.zeros(len(together), dtype=torch.long))
        advantages = list(white.split([len(advantage) for advantage in advantages]))
    return Targets(
        data.by_token(advantages),
        [start.float() for start in starts],
        list(values),
        data.by_token(returns),
        torch.cat(returns).var(correction=0).item(),
    )


class ValuedBatch(NamedTuple):
    """A micro-batch of rollouts, with the targets of its M entries."""

    rollouts: RolloutBatch
    start: Tensor  # (M,)
    old_value: Tensor  # (M,)
    returns: Tensor  # (M,)
    variance: float
    step_turns: int  # in the whole step
    options: PPO  # `kl` is the weight in this step
    names: list[str]  # of each score
    trees: Batch


def valued_batches(
    data: Rollouts,
    picked: Sequence[int],
    targets: Targets,
    logps: tuple[Sequence[Tensor], Sequence[Tensor]],
    options: PPO,
    machine: Machine,
    device: torch.device,
) -> Iterator[ValuedBatch]:
    """A step's episodes, by number, in micro-batches.

    logps: the columns of the policy that played and of the reference.
    """
    step_turns = sum(int(targets.starts[d].sum()) for d in set(picked))
    columns = (targets.advantages, *logps, targets.starts, targets.values, targets.returns)
    for trees, names, written, *entries in entry_batches(data, picked, columns, machine, device):
        yield ValuedBatch(
            RolloutBatch(trees, names, written, *entries[:3]),
            *entries[3:],
            targets.variance,
            step_turns,
            options,
            names * 2,
            trees,
        )


def ppo_objective(batch: ValuedBatch, scores: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's part of the step's loss, policy and value together, and of the logged numbers."""
    options, (logps, values) = batch.options, scores.chunk(2)
    loss, numbers = clipped_objective(options, batch.rollouts, logps, weigh_kl=True)
    losses = batch.start * value_loss(values, batch.old_value, batch.returns, VALUE_CLIP)
    explained = batch.start * (batch.variance - (values.detach() - batch.returns) ** 2)
    numbers |= {
        "value_loss": losses.sum() / batch.step_turns,
        "explained_variance": explained.sum() / batch.step_turns / (batch.variance or math.inf),
        "kl_weight": torch.full_like(logps, options.kl).sum() / batch.rollouts.step_tokens,
    }
    return loss + options.value_weight * numbers["value_loss"], numbers


def entry_scores(policy: Transformer, head: ScalarHead, machine: Machine, trees: Batch) -> Tensor:
    """log π of every token that the agent wrote, then V before every one: (2M,), in the order of `entry_logps`."""

    def read(hidden: Tensor, n: Tensor | slice) -> Tensor:  # (n,C) -> (n,2)
        logps = token_logps(hidden, policy.head_weight, trees.targets[n])
        return torch.stack([logps, head(hidden)], dim=1)

    return read_states(policy, trees, read, machine.walk_above)[trees.column].t().flatten()


def adapted_weight(options: PPO, log: Sequence[dict]) -> float:
    """The KL's weight after the logged steps, adapted after each to its KL."""
    weight = options.kl
    for record in log if options.kl_target else ():
        weight = adapted_coefficient(weight, record["kl_to_reference"], options.kl_target)
    return weight
