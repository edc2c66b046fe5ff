"""PPO: an adapter and a value function from the agent's own episodes, in several passes over them.

A turn is one action with one advantage, for all its tokens: V is read off the state that predicts its first
token. So γ and λ count decisions, whatever the length of an answer (as the utterance-level critic of ArCHer,
Zhou et al. 2024, arXiv:2402.19446; Ouyang et al. 2022 have a value a token). Each pass makes values and
advantages anew (Andrychowicz et al. 2021, arXiv:2006.05990, section 3.5), so a new head, which says 0, counts
from the second on; a loop's next round begins with the head of the last. The KL is in the loss: in the reward
of recorded rollouts it would be that of the policy that played, which as a rule is the reference.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minidpo.config import PPO, PPOCommand
from minidpo.data.batch import Batch, read_states
from minidpo.data.episodes import Episode, read_all
from minidpo.data.pairs import NothingToLearn
from minidpo.learning.grpo import RolloutBatch, clipped_objective
from minidpo.learning.reference import key
from minidpo.learning.rollouts import (
    Rollouts,
    entries_once,
    entry_batches,
    entry_values,
    group_numbers,
    logps_before,
    own_rollouts,
)
from minidpo.learning.selection import valued_episodes
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
from minidpo.memory.machine import Machine
from minidpo.memory.plan import dpo_load
from minidpo.model import scalar_head
from minidpo.model.decoder import Transformer
from minidpo.model.head import token_logps
from minidpo.model.scalar_head import ScalarHead
from minidpo.objective.policy_gradient import adapted_coefficient, gae, group_advantages, value_loss
from minidpo.system import processes
from minidpo.system.files import file_sha256
from minidpo.system.run_folder import records


def ppo(config: PPOCommand) -> dict:
    """Train an adapter and a value head on the adapter's rollouts. Returns the last step's log."""
    options = config.ppo
    episodes, rewards = load_rollouts(config.data, options)
    before = lora.located(config.adapter, (*lora.FILES, scalar_head.FILE))
    heads = [file_sha256(path) for path in before.glob(scalar_head.FILE)]
    run = open_run(config, config.data, {"head_sha256": heads}, reference=config.reference)
    if run.finished:
        return resync_finished(run)
    data = Rollouts.of(episodes, *open_chat(config.model))
    options = in_steps(options, len(episodes))
    machine = to_compute(config.machine, config.adapter, config.reference)
    shape = lora.read_config(config.adapter)
    policy, machine, run.base = open_to_train(
        config.model,
        machine,
        shape,
        options.optimizer,
        lambda m: dpo_load(m, data.largest_tree(m), "both"),
    )
    head = ScalarHead(policy)
    head.load(before, "value")
    processes.on_rank_0(run.begin)
    old, ref = logps_before(config, run, policy, data=data, episodes=episodes, machine=machine)
    print(lora.describe(policy))

    def values_file(
        number: int,
    ) -> Path:  # of a pass; a run killed in the middle of it goes on from there
        return run.folder / f"values-{number}.safetensors"

    @lru_cache(maxsize=1)
    def targets_of(number: int) -> Targets:
        weights = f"{run.base} {replace(options, save_every=1)} {config.seed} " + " ".join(
            str(run.config[f"{name}_sha256"]) for name in ("adapter", "head", "reference")
        )
        path = values_file(number)
        values = entries_once(
            policy,
            data,
            machine,
            partial(entry_values, policy, head, machine),
            path,
            key(weights, data.dialogues, path.name),
        )
        return make_targets(data, values, rewards, options)

    def step_batches(step: int) -> Iterator[ValuedBatch]:
        picked = example_indices(
            step, options.batch, len(episodes), config.seed, labels=data.instances
        )
        number, done = divmod(step * options.batch, len(episodes))
        if done >= options.batch and not (lost := values_file(number)).is_file():
            raise ValueError(
                f"{lost} is gone, the values that this pass began with: delete {run.state}, too"
            )
        log = records(run.folder)[:step] if processes.rank() == 0 else []
        weight = processes.all_gather(kl_weight(options, log))[0]
        return valued_batches(
            data,
            picked,
            targets_of(number),
            (old, ref),
            replace(options, kl=weight),
            machine,
            head.weight.device,
        )

    model = nn.ModuleDict({"policy": policy, "head": head})
    train(
        run,
        model,
        optimizers_of(options, model),
        batches=step_batches,
        score=lambda batch: entry_scores(policy, head, batch.rollouts.trees, machine),
        objective=ppo_objective,
        settings=StepSettings(options, config.seed, "PPO", group_numbers(episodes)),
    )
    processes.on_rank_0(head.save, run.folder / "adapter", "value")
    return finish(run, policy, config.model)


def load_rollouts(files: Sequence[Path], options: PPO) -> tuple[list[Episode], list[Tensor]]:
    """The agent's own episodes and their `turn_rewards`. With step rewards the files hold continuations, too,
    and episodes that lack them are left out. Raises NothingToLearn if none is left or all ended alike."""
    played, names = read_all(files), " ".join(map(str, files))
    whole = own_rollouts(
        [e for e in played if not (options.step_weight and e.forced) or e.relabelled], files
    )
    valued = (
        valued_episodes(played, files, "ppo.step-weight")
        if options.step_weight
        else [(e, ()) for e in whole]
    )
    if len({v for _, values in valued for v in values} or {e.solved for e, _ in valued}) < 2:
        raise NothingToLearn(
            f"{names}: all episodes were solved, or none, so no turn was better than "
            "another: explore more, or other tasks"
        )
    return [e for e, _ in valued], [turn_rewards(e, values, options) for e, values in valued]


def turn_rewards(episode: Episode, values: Sequence[float], options: PPO) -> Tensor:
    """What each turn of an episode is paid: r_t = α·[solved, after the last] + β·(γ·V_{t+1} - V_t), (turns,).

    α, β: `outcome_weight`, `step_weight`. values: the `step_values`, turns + 1 numbers, the last the verdict;
    () where β = 0. With γ = 1 they add up to (α + β)·[solved] - β·V_0, and no turn changes V_0: so what
    is best stays best (potentials; Ng, Harada and Russell 1999), and each turn is told what it did. Values by
    continuations: IPR, arXiv:2406.11176. Differs: no paper's; a mixture of outcome and step reward.
    """
    paid = torch.zeros(len(episode.turns))
    paid[-1] = options.outcome_weight * episode.solved
    if options.step_weight:
        value = torch.tensor(values)
        paid += options.step_weight * (options.gamma * value[1:] - value[:-1])
    return paid


class Targets(NamedTuple):
    """What a pass aims at; of each episode a number for each token that was written, (written,)."""

    advantages: list[Tensor]
    starts: list[Tensor]  # 1 where a turn begins, else 0
    values: list[Tensor]  # V before the token when the pass began
    returns: list[Tensor]  # what V is to be where its turn begins
    variance: float  # of the returns of all turns


def make_targets(
    data: Rollouts, values: Sequence[Tensor], rewards: Sequence[Tensor], options: PPO
) -> Targets:
    """GAE of each episode; values: (written,) of each, rewards: (turns,)."""
    turns = [torch.tensor(dialogue.written) for dialogue in data.dialogues]
    starts = [turn.diff(prepend=turn.new_tensor([-1])) != 0 for turn in turns]
    before = [value[start] for value, start in zip(values, starts)]  # (turns,)
    advantages = [
        gae(reward, value, options.gamma, options.lam) for reward, value in zip(rewards, before)
    ]
    returns = [advantage + value for advantage, value in zip(advantages, before)]
    if options.whiten:  # all turns as one group: minus the mean, over the std
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
    options: PPO  # with the KL's weight in this step
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
    """A step's episodes, by number, in micro-batches; logps: of the policy that played and of the reference,
    (written,) of each episode."""
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
    """The micro-batch's part of the step's loss, the policy's and the value's, and of what is logged."""
    options, (logps, values) = batch.options, scores.chunk(2)
    loss, numbers = clipped_objective(options, batch.rollouts, logps, weigh_kl=True)
    losses = batch.start * value_loss(values, batch.old_value, batch.returns, options.value_clip)
    explained = batch.start * (batch.variance - (values.detach() - batch.returns) ** 2)
    numbers |= {
        "value_loss": losses.sum() / batch.step_turns,
        "explained_variance": explained.sum() / batch.step_turns / (batch.variance or math.inf),
        "kl_weight": torch.full_like(logps, options.kl).sum() / batch.rollouts.step_tokens,
    }
    return loss + options.value_weight * numbers["value_loss"], numbers


def kl_weight(options: PPO, log: Sequence[dict]) -> float:
    """The KL's weight behind the steps in the log, adapted to the KL of each; so it outlives a kill."""
    weight = options.kl
    for record in log if options.kl_target else ():
        weight = adapted_coefficient(weight, record["kl_to_reference"], options.kl_target)
    return weight


def entry_scores(policy: Transformer, head: ScalarHead, trees: Batch, machine: Machine) -> Tensor:
    """log π of each token that the agent wrote, then V before it, (2M,), as `entry_logps` has the first."""

    def read(hidden: Tensor, n: Tensor | slice) -> Tensor:  # (n,C) -> (n,2)
        return torch.stack(
            [token_logps(hidden, policy.head_weight, trees.targets[n]), head(hidden)], dim=1
        )

    return read_states(policy, trees, read, machine.walk_above)[trees.column].t().flatten()
