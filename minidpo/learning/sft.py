"""Supervised fine-tuning: LoRA adapters from episodes that are imitated.

`sft` reads as the algorithm. Behind it stand the choice of episodes and a step's batches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from minidpo.config import SFT, SFTCommand
from minidpo.data import trl_files
from minidpo.data.batch import Batch, batch_scores, batches_within, collate
from minidpo.data.episodes import Episode, by_instance, read_all
from minidpo.data.pairs import NothingToLearn, check_prompts
from minidpo.data.prompt import dialogues_of
from minidpo.learning.selection import by_expert, capped, selected_by_reward, valued_episodes
from minidpo.learning.trainer import StepSettings, train
from minidpo.learning.training_run import (
    example_indices,
    finish,
    in_steps,
    open_run,
    optimizers_of,
    refuse_for_conversations,
    resync_finished,
)
from minidpo.memory import lora
from minidpo.memory.loading import open_chat, open_to_train, to_compute
from minidpo.memory.plan import sft_load
from minidpo.model.chat import Dialogue
from minidpo.objective.losses import advantage_weights, sft_loss, value_weights
from minidpo.system import processes
from minidpo.system.tensors import to_device


def sft(config: SFTCommand) -> dict:
    """Train an adapter to say what was said in the episodes. Returns the last step's log."""
    options = config.sft
    episodes, weights, by_turn = load_demonstrations(config)
    run = open_run(config, config.data)
    if run.finished:
        return resync_finished(run)
    shape = lora.read_config(config.adapter) if config.adapter else config.lora
    asked = replace(
        config.lora, targets=tuple(sorted(config.lora.targets))
    )  # as `read_config` has them
    if config.adapter and config.lora != lora.LoRAConfig() and asked != shape:
        raise ValueError(
            f"--adapter {config.adapter} has a shape of its own: leave out lora's options"
        )
    data = Demonstrations(*dialogues_of(episodes, *open_chat(config.model)), weights, by_turn)
    options = in_steps(options, len(data.dialogues))
    machine = to_compute(config.machine, config.adapter)
    if (
        shape.dropout
    ):  # is drawn a micro-batch at a time, so the free memory must not decide on these
        processes.refuse_torchrun(
            "dropout is drawn a micro-batch at a time, and would be drawn otherwise"
        )
        machine = replace(machine, micro_tokens=machine.pass_tokens())
        run.drawn = str(machine.micro_tokens)
    longest = max(len(dialogue.ids) for dialogue in data.dialogues)
    policy, machine, run.base = open_to_train(
        config.model, machine, shape, options.optimizer, lambda m: sft_load(m, longest)
    )
    if config.adapter:
        lora.load(policy, config.adapter, run.base)
    else:
        lora.attach(policy, shape, torch.Generator().manual_seed(config.seed))
    print(lora.describe(policy))

    def step_batches(step: int) -> Iterator[SFTBatch]:
        picked = example_indices(step, options.batch, len(data.dialogues), config.seed)
        return sft_batches(data, picked, policy.head_weight.device, machine.micro_tokens)

    train(
        run,
        policy.train(),
        optimizers_of(options, policy),
        batches=step_batches,
        score=lambda batch: batch_scores(policy, batch.trees),
        objective=sft_objective,
        settings=StepSettings(options, config.seed, "SFT"),
    )
    return finish(run, policy, config.model)


class Demonstrations(NamedTuple):
    """What is imitated, as token ids, with what each counts."""

    dialogues: list[Dialogue]
    names: list[str]
    weights: list[float]
    by_turn: Sequence[Tensor] = ()  # (turns,) of each, weights beside these; (): all turns alike


def load_demonstrations(config: SFTCommand) -> tuple[list, list[float], list[Tensor]]:
    """The episodes or conversations to imitate, each with its weight, and of weighting value with those of
    its turns; NothingToLearn if there is none."""
    options = config.sft
    if trl_files.are_trl_files(config.data):
        selecting = options.changed("weighting", "select", "per_instance", "per_task", "distinct")
        refuse_for_conversations([f"sft.{option}" for option in selecting])
        conversations = trl_files.read_demonstrations(config.data)
        return conversations, [1.0] * len(conversations), []
    played = read_all(config.data)
    if options.weighting == "value":
        episodes, by_turn = valued(played, config.data)
        if not episodes:
            raise NothingToLearn(
                f"{' '.join(map(str, config.data))}: each step has the value 0, so none is "
                "worth imitating: explore more, or easier tasks"
            )
        return episodes, [1.0] * len(episodes), by_turn
    episodes, weights = imitated(played, options, config.seed)
    if not episodes:
        has_threshold = options.weighting == "reward" or options.select != "threshold"
        raise NothingToLearn(
            f"{' '.join(map(str, config.data))}: none of {len(played)} episodes is to be "
            f"imitated, the highest reward is {max(e.reward for e in played):g}: explore "
            "more" + ", lower the threshold or raise the ratio" * has_threshold
        )
    return episodes, weights, []


def imitated(
    episodes: Sequence[Episode], options: SFT, seed: int = 1
) -> tuple[list[Episode], list[float]]:
    """The episodes to imitate, each with its weight. Of one that is relabelled, and was solved from there,
    the expert's first answer alone: the others answer to states that no agent reached."""
    episodes = [
        e.up_to(e.forced + 1) if e.relabelled else e
        for e in episodes
        if not e.relabelled or (e.solved and len(e.turns) > e.forced)
    ]
    if options.distinct:  # of relabelled ones one answer counts, so they stand apart
        ranked = sorted(episodes[::-1], key=lambda e: (by_expert(e), e.reward))
        first_ids = set({(e.instance, e.said, e.relabelled): id(e) for e in ranked}.values())
        episodes = [e for e in episodes if id(e) in first_ids]
    chosen = [e for e in episodes if e.turns and (e.solved or options.weighting == "advantage")]
    if options.weighting == "reward" or options.select != "threshold":
        chosen = selected_by_reward(episodes, options, seed=seed)
    chosen = capped(chosen, options.per_instance, options.per_task, seed=seed)
    if options.weighting == "reward":
        return chosen, [e.reward for e in chosen]
    if options.weighting == "solved" or not chosen:
        return chosen, [1.0] * len(chosen)
    check_prompts(chosen)
    number = {instance: n for n, instance in enumerate(by_instance(chosen))}
    reward = torch.tensor([float(e.solved) for e in chosen])
    group = torch.tensor([number[e.instance] for e in chosen])
    return chosen, advantage_weights(reward, group, options.temperature).tolist()


def valued(played: Sequence[Episode], files: Sequence[Path]) -> tuple[list[Episode], list[Tensor]]:
    """The `valued_episodes`, solved or not, of which a turn counts, with their turns' `value_weights`."""
    found = [
        (e, weights)
        for e, values in valued_episodes(played, files, "sft.weighting value")
        if (weights := value_weights(torch.tensor(values))).any()
    ]
    return [e for e, _ in found], [weights for _, weights in found]


class SFTBatch(NamedTuple):
    """A micro-batch: trees of a single trajectory each."""

    trees: Batch
    weights: Tensor  # of each score
    names: list[str]
    step_tokens: int  # that the agent wrote in the whole step


def sft_batches(
    data: Demonstrations, picked: Sequence[int], device: torch.device, micro_tokens: int
) -> Iterator[SFTBatch]:
    """The dialogues picked for a step as micro-batches that know how many tokens the whole step has."""
    written = sum(len(data.dialogues[i].written) for i in picked)
    lengths = [len(data.dialogues[i].ids) for i in picked]
    for part in processes.rank_parts(batches_within(lengths, micro_tokens), lengths):
        trees = collate([data.dialogues[picked[n]]] for n in part)
        if (
            data.by_turn
        ):  # W's entries follow the tokens that were written, trajectory by trajectory
            entries = [
                data.by_turn[i][data.dialogues[i].written] for i in (picked[n] for n in part)
            ]
            trees = trees._replace(weight=trees.weight * torch.cat(entries))
        weights = torch.tensor([data.weights[picked[n]] for n in part])
        names = [data.names[picked[n]] for n in part]
        yield to_device(SFTBatch(trees, weights, names, written), device)


def sft_objective(batch: SFTBatch, scores: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's part of the step's loss."""
    return sft_loss(batch.weights * scores, batch.step_tokens), {}
