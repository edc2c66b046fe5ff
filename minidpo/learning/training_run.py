"""The life of a training run, whatever is learned: its settings, the order of examples, its end.

`open_run` gives the folder, which knows its inputs by content; `in_steps` turns epochs to steps,
`example_indices` says what each step reads, `optimizers_of` moves what trains, `finish` saves the adapter.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy
import torch
from torch import nn

from minidpo.config import Optimizer, PairsCommand, RolloutsCommand, SFTCommand
from minidpo.memory import lora
from minidpo.memory.adamw8bit import AdamW8bit
from minidpo.model.decoder import Transformer
from minidpo.system import processes
from minidpo.system.files import file_sha256
from minidpo.system.run_folder import RunFolder, records


def open_run(
    config: SFTCommand | PairsCommand | RolloutsCommand,
    inputs: Sequence[Path],
    more_sha256: Mapping[str, list[str] | None] | None = None,
    **adapters: Path | None,
) -> RunFolder:
    """The run's folder, which knows its inputs by content; adapters: others than the one it starts from.
    Raises ValueError if it holds another run, or what this one reads."""
    adapters = {"adapter": config.adapter, **adapters}
    keep_inputs(config.out, *inputs, *adapters.values())
    settings = {
        **asdict(config),
        **(more_sha256 or {}),
        "data_sha256": [file_sha256(path) for path in inputs],
        **{f"{name}_sha256": adapter_sha256(adapter) for name, adapter in adapters.items()},
    }
    return RunFolder(config.out, settings, defaults=asdict(type(config)()))


def keep_inputs(out: Path, *given: Path | None) -> None:
    """Raise ValueError if a run in `out` would overwrite one of the files or adapters that it is given."""
    written = [(out / name).resolve() for name in ("adapter", "pairs.jsonl", "metrics.jsonl")]
    if lost := [path for path in given if path and path.resolve() in written]:
        raise ValueError(f"--out {out} would overwrite {lost[0]}, which it reads: give another")


def adapter_sha256(adapter: Path | None) -> list[str] | None:
    """SHA-256 of an adapter's files."""
    return (
        None
        if adapter is None
        else [file_sha256(lora.located(adapter) / name) for name in lora.FILES]
    )


def refuse_for_conversations(given: Sequence[str]) -> None:
    """Raises ValueError if an option is given that only episodes can answer."""
    if given:
        raise ValueError(
            f"--{given[0].replace('_', '-')} needs episodes, as collect.py writes them, and "
            "--data holds conversations: leave it out"
        )


def example_indices(
    step: int, batch: int, n: int, seed: int, *, labels: Sequence | None = None
) -> list[int]:
    """Which of n examples step `step` (from 0) uses: epoch after epoch, each in an order of its own. With
    `labels`, one for each example, an epoch takes the examples of a label together, labels in a random order,
    however many examples they have: what shares its beginning meets in a step."""
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
    """The same options with epochs and warm-up ratio as steps, both rounded up, and a batch of at most as
    many examples as there are: a larger one would count some of them twice. A warm-up that training does not
    reach the end of is told.

    >>> from minidpo.config import SFT
    >>> chosen = in_steps(SFT(epochs=3, batch=64, warmup_ratio=0.03), 1_000)
    >>> chosen.steps, chosen.warmup
    (47, 2)
    >>> in_steps(SFT(epochs=0.07, batch=1, warmup=0), 100).steps
    7
    """

    def up(share: float) -> int:
        return math.ceil(round(share, 9))  # 0.07 * 100 is a little more than 7

    batch = min(options.batch, examples)
    steps = options.steps if options.epochs is None else up(options.epochs * examples / batch)
    warmup = options.warmup if options.warmup_ratio is None else up(options.warmup_ratio * steps)
    if 0 < steps < warmup:
        print(
            f"{warmup} steps of warm-up in a training of {steps}: the rate ends at {steps / warmup:.0%} of "
            f"{options.lr:g}; lower warmup or raise steps"
        )
    return replace(options, steps=steps, warmup=warmup, batch=batch)


def optimizers_of(options: Optimizer, model: nn.Module) -> list[torch.optim.Optimizer]:
    """AdamW for what trains, an adapter and perhaps a head, its moments in 32 bits or in 8."""
    numbers = {"lr": options.lr, "weight_decay": options.weight_decay}
    adapter = [p for name, p in model.named_parameters() if p.requires_grad and "lora_" in name]
    rest = [p for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name]
    kind = {"adamw": torch.optim.AdamW, "adamw8bit": AdamW8bit}[options.optimizer]
    return [kind([*adapter, *rest], **numbers)]


def finish(run: RunFolder, policy: Transformer, source: str) -> dict:
    """Save the adapter of the base `source` and finish the run. Returns the last step's log."""
    processes.on_rank_0(lora.save, policy, run.folder / "adapter", source, run.base)
    processes.on_rank_0(run.finish)
    return print_summary(run)


def resync_finished(run: RunFolder) -> dict:
    """Bring paths and tracker of a finished run up to date. Returns the last step's log."""
    require_adapter(run)
    processes.on_rank_0(run.resync_finished)
    return print_summary(run, ", done already (another --out trains again)")


def require_adapter(run: RunFolder) -> None:
    """Raises ValueError if the adapter of a finished run is gone."""
    if not (run.folder / "adapter" / lora.CONFIG).is_file():
        raise ValueError(
            f"{run.folder} is done, but its adapter is gone: delete {run.folder / 'done'}, and "
            "the same command makes it again"
        )


def print_summary(run: RunFolder, more: str = "") -> dict:
    """Print where the adapter is. Returns the last step's log."""
    log = records(run.folder)
    loss = f"loss {log[-1]['loss']:.4f}" if log else "nothing was changed"
    print(f"{run.folder / 'adapter'}: {len(log)} steps, {loss}{more}")
    return log[-1] if log else {"step": 0}
