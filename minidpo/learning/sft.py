"""Supervised fine-tuning: trains a LoRA adapter to imitate episodes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from minidpo.data.batch import Batch, batch_scores, collate
from minidpo.data.prompt import dialogues_of
from minidpo.learning.micro_batches import passes_within, with_fixed_passes
from minidpo.learning.trainer import Optimizer, StepSettings, train
from minidpo.learning.training_run import (
    example_indices,
    finish,
    finished,
    in_steps,
    optimizer_of,
)
from minidpo.memory import lora
from minidpo.memory.context import Context
from minidpo.memory.loading import open_chat, open_to_train, to_compute
from minidpo.memory.plan import sft_load
from minidpo.model.chat import Dialogue
from minidpo.objective.losses import sft_loss
from minidpo.system.run_folder import RunFolder
from minidpo.system.tensors import to_device


@dataclass(frozen=True)
class SFT(Optimizer):
    """Supervised fine-tuning: episodes are imitated."""


def sft(
    run: RunFolder,
    context: Context,
    episodes: Sequence,
    options: SFT,
    *,
    weights: Sequence[float] | None = None,
    start: Path | None = None,
    shape: lora.LoRAConfig = lora.LoRAConfig(),
) -> Path:
    """Train an adapter to give the answers in the episodes. Returns its folder.

    weights: how much each episode counts; None: all equally. start: the adapter to continue from, with its
    shape; None: a new one of `shape`. The loss is a mean over all tokens that the agent wrote in a step.
    """
    if run.finished:
        return finished(run)
    chat, limit = open_chat(context.model)
    dialogues, names = dialogues_of(episodes, chat, limit, context.world.system_prompt)
    data = Demonstrations(dialogues, names, weights or [1.0] * len(names))
    options = in_steps(options, len(dialogues))

    machine = to_compute(context.machine, start)
    shape = lora.read_config(start) if start else shape
    if shape.dropout:
        machine = with_fixed_passes(machine)
        run.drawn = str(machine.micro_tokens)
    longest = max(len(dialogue.ids) for dialogue in dialogues)
    policy, machine, run.base = open_to_train(
        context.model, machine, shape, options.optimizer, lambda m: sft_load(m, longest)
    )
    if start:
        lora.load(policy, start, run.base)
    else:
        lora.attach(policy, shape, torch.Generator().manual_seed(context.seed))
    print(lora.describe(policy))
    device = policy.head_weight.device

    def step_batches(step: int) -> Iterator[SFTBatch]:
        picked = example_indices(step, options.batch, len(dialogues), context.seed)
        return sft_batches(data, picked, device, machine.micro_tokens)

    train(
        run,
        policy.train(),
        optimizer_of(options, policy),
        batches=step_batches,
        score=lambda batch: batch_scores(policy, batch.trees),
        objective=sft_objective,
        settings=StepSettings(options, context.seed, "SFT"),
    )
    return finish(run, policy, context.model)


class Demonstrations(NamedTuple):
    """What is imitated, as token ids, and how much each counts."""

    dialogues: list[Dialogue]
    names: list[str]
    weights: Sequence[float]


class SFTBatch(NamedTuple):
    """A micro-batch: trees of one trajectory each."""

    trees: Batch
    weights: Tensor  # of each score
    names: list[str]
    step_tokens: int  # written by the agent in the whole step


def sft_batches(
    data: Demonstrations, picked: Sequence[int], device: torch.device, micro_tokens: int
) -> Iterator[SFTBatch]:
    """The dialogues picked for a step as micro-batches that know how many tokens the whole step has."""
    written = sum(len(data.dialogues[i].written) for i in picked)
    lengths = [len(data.dialogues[i].ids) for i in picked]
    for part in passes_within(lengths, micro_tokens):
        trees = collate([data.dialogues[picked[n]]] for n in part)
        weights = torch.tensor([data.weights[picked[n]] for n in part])
        names = [data.names[picked[n]] for n in part]
        yield to_device(SFTBatch(trees, weights, names, written), device)


def sft_objective(batch: SFTBatch, scores: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's part of the step's loss."""
    return sft_loss(batch.weights * scores, batch.step_tokens), {}
