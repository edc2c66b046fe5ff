"""A training run of any learner: the order of its examples, its length, its end.

`in_steps` turns epochs into steps, `example_indices` says which examples each step reads, `optimizer_of` makes
the optimizer, `finish` saves the adapter.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy
import torch
from torch import nn

from minidpo.learning.trainer import Optimizer
from minidpo.memory import lora
from minidpo.memory.adamw8bit import AdamW8bit
from minidpo.memory.context import Context
from minidpo.memory.loading import open_to_train, to_compute
from minidpo.memory.machine import Machine
from minidpo.memory.plan import dpo_load
from minidpo.model.decoder import Transformer
from minidpo.system.run_folder import RunFolder, records


def example_indices(
    step: int, batch: int, n: int, seed: int, *, labels: Sequence | None = None
) -> list[int]:
    """Which of n examples step `step` (from 0) uses: epoch after epoch, each in its own random order. With
    `labels`, one for each example, an epoch takes all examples of a label in a row, and the labels in random
    order, so that examples with a common prefix meet in a step."""
    places = range(step * batch, (step + 1) * batch)
    orders = {}
    for epoch in {place // n for place in places}:
        generator = numpy.random.default_rng([seed, epoch])
        order = orders[epoch] = generator.permutation(n).tolist()
        if labels is not None:
            names = list(dict.fromkeys(labels))
            rank_of = dict(zip(names, generator.permutation(len(names)).tolist()))
            order.sort(key=lambda i: rank_of[labels[i]])
    return [orders[place // n][place % n] for place in places]


def in_steps(options: Optimizer, examples: int) -> Optimizer:
    """The same options with epochs and the share of warm-up converted to steps, both rounded up.

    The batch is at most the number of examples: a larger one would count some twice. Prints a line if training
    ends before its warm-up does.

    >>> from minidpo.learning.sft import SFT
    >>> chosen = in_steps(SFT(epochs=3, batch=64, warmup=0.03), 1_000)
    >>> chosen.steps, chosen.warmup
    (47, 2)
    """
    batch = min(options.batch, examples)
    steps = options.steps or rounded_up(options.epochs * examples / batch)
    is_share = options.warmup < 1
    warmup = rounded_up(options.warmup * steps) if is_share else int(options.warmup)
    if steps < warmup:
        print(
            f"{warmup} steps of warm-up in a training of {steps}: the rate ends at {steps / warmup:.0%} of "
            f"{options.lr:g}; lower warmup or raise steps"
        )
    return replace(options, steps=steps, warmup=warmup, batch=batch)


def rounded_up(number: float) -> int:
    """The next whole number; 0.07 * 100, which is a little more than 7 in binary, stays 7."""
    return math.ceil(round(number, 9))


def open_learner(
    run: RunFolder,
    context: Context,
    options: Optimizer,
    largest_tree: Callable[[Machine], int],
    start: Path,
    reference: Path | None = None,
    heads: str = "vocabulary",
) -> tuple[Transformer, Machine]:
    """The base model, and the machine with passes that fit beside it and an adapter of the shape of `start`.

    largest_tree: tokens of the largest tree of a step. heads: as in `dpo_load`.
    """
    policy, machine, run.base = open_to_train(
        context.model,
        to_compute(context.machine, start, reference),
        lora.read_config(start),
        options.optimizer,
        lambda machine: dpo_load(machine, largest_tree(machine), heads),
    )
    return policy, machine


def optimizer_of(options: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW for all trainable parameters, with moments in 32 bits or in 8."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    trained.sort(key=lambda item: "lora_" not in item[0])  # a head comes last
    kind = {"adamw": torch.optim.AdamW, "adamw8bit": AdamW8bit}[options.optimizer]
    return kind([p for _, p in trained], lr=options.lr, weight_decay=options.weight_decay)


def finish(run: RunFolder, policy: Transformer, source: str) -> Path:
    """Save the adapter of the base `source` and finish the run. Returns the adapter's folder."""
    run.call(lora.save, policy, run.folder / "adapter", source, run.base)
    run.finish()
    return finished(run)


def finished(run: RunFolder) -> Path:
    """The adapter of a finished run; prints the last line of its log. Raises ValueError if the adapter is gone or
    damaged."""
    adapter = run.folder / "adapter"
    if not all((adapter / name).is_file() for name in lora.FILES):
        raise ValueError(
            f"{run.folder} is done, but its adapter is gone: delete {run.folder / 'done'}, and "
            "the same command makes it again"
        )
    lora.read_weights(adapter)
    run.resync_finished()
    log = records(run.folder)
    loss = f"loss {log[-1]['loss']:.4f}" if log else "nothing was changed"
    print(f"{adapter}: {len(log)} steps, {loss}")
    return adapter
