"""38. The stages: SFT and DPO from files to an adapter.

Here the chapters meet: episodes become dialogues, trees, scores, a loss, and the trainer does the rest. What
can be seen to be wrong without the model is said before it is loaded. Next: 39 explain.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy
import torch
from torch import Tensor

from minidpo.config import DPO, DPOCommand, Optimizer, SFTCommand
from minidpo.data.episodes import read
from minidpo.data.pairs import NEEDS_GOLDEN, NothingToLearn, Pair, Unpaired, make_pairs, noisy, unpaired
from minidpo.data.prompt import dialogues_of
from minidpo.data.tree import Budget, batch_scores
from minidpo.learning import trl_files
from minidpo.learning.imitation import SFTBatch, imitated, sft_batches, sft_objective
from minidpo.learning.preferences import (
    PairBatch,
    Preferences,
    mismatched,
    pair_batches,
    pair_loss,
    score_all,
    settings_of,
    sizes,
    step_baseline,
    trees_of,
)
from minidpo.learning.reference import cached, key
from minidpo.learning.trainer import check_finite, train
from minidpo.memory import lora
from minidpo.memory.adamw8bit import AdamW8bit
from minidpo.memory.loading import open_chat, open_model
from minidpo.memory.machine import Machine
from minidpo.memory.plan import Load, check_memory, dpo_load, sft_load
from minidpo.model import checkpoint
from minidpo.model.chat import Chat
from minidpo.model.decoder import Qwen2
from minidpo.system import processes
from minidpo.system.files import file_sha256, write_text
from minidpo.system.run_folder import RunFolder
from minidpo.system.tensors import fingerprint


def optimizer_of(options: Optimizer, model: Qwen2) -> torch.optim.Optimizer:
    """AdamW for the adapter, its moments in 32 bits or in 8."""
    kind = {"adamw": torch.optim.AdamW, "adamw8bit": AdamW8bit}[options.optimizer]
    return kind(lora.parameters(model), lr=options.lr, weight_decay=options.weight_decay)


def drawn(step: int, batch: int, n: int, seed: int, group: Sequence | None = None) -> list[int]:
    """Which of n examples step `step` (from 0) uses: epoch after epoch, each in an order of its own.

    With `group`, a label for each example, an epoch takes groups in a random order and each as a whole: what
    shares its beginning meets in a step.
    """
    places = range(step * batch, (step + 1) * batch)
    orders = {}
    for epoch in {place // n for place in places}:
        order = numpy.random.default_rng([seed, epoch]).permutation(n).tolist()
        if group is not None:
            first: dict = {}  # of each label its first place in the order
            for place, i in enumerate(order):
                first.setdefault(group[i], place)
            order.sort(key=lambda i: first[group[i]])
        orders[epoch] = order
    return [orders[place // n][place % n] for place in places]


def sft(config: SFTCommand) -> dict:
    """LoRA adapters from episodes that are imitated. Returns the last step's log."""
    options = config.sft
    keep_start(config)
    in_ids = dialogues_of
    if trl_files.hold(config.data):
        episodes, in_ids = trl_files.demonstrations_in(config.data, options), trl_files.dialogues_of
        weights = [1.0] * len(episodes)
    else:
        episodes, weights = imitated([e for path in config.data for e in read(path)], options)
    if not episodes:
        raise NothingToLearn(f"{' '.join(map(str, config.data))}: no solved episode in it to be imitated")
    run = RunFolder(config.out, {**asdict(config), "data_sha256": [file_sha256(path) for path in config.data],
                           "adapter_sha256": digests_of(config.adapter)})
    if run.finished:
        return settled(run)
    chat, limit = open_chat(config.model)
    dialogues, names = in_ids(episodes, chat, limit)
    longest = max(len(dialogue.ids) for dialogue in dialogues)
    shape = lora.read_config(config.adapter) if config.adapter else config.lora
    if shape.dropout:
        processes.refuse_torchrun("dropout is drawn a micro-batch at a time, and would be drawn otherwise")
    check_memory(config.model, shape, config.machine, options.optimizer, lambda m: sft_load(m, longest))
    model = open_model(config.model, config.machine)
    base = fingerprint(model.state_dict())
    if config.adapter:
        lora.load(model, config.adapter)
    else:
        lora.attach(model, shape, torch.Generator().manual_seed(config.seed))
    print(lora.describe(model))
    device = model.head_weight.device

    def batches(step: int) -> Iterator[SFTBatch]:
        picked = drawn(step, options.batch, len(dialogues), config.seed)
        return sft_batches(dialogues, names, weights, picked, device, config.machine.micro_tokens)

    train(run, model.train(), [optimizer_of(options, model)], options.steps, batches,
          lambda batch: batch_scores(model, batch.trees), sft_objective, options.warmup, options.clip,
          config.seed, options.save_every, "SFT")
    processes.on_rank_0(lora.save, model, run.folder / "adapter", config.model, base)
    processes.on_rank_0(run.finish)
    return told(run)


def keep_start(config: SFTCommand | DPOCommand) -> None:
    """Refuse a run folder whose adapter/ is what the run starts from."""
    if config.adapter and config.adapter.resolve() == (config.out / "adapter").resolve():
        raise ValueError(f"--out {config.out} would overwrite the adapter that it starts from: give another")


def settled(run: RunFolder) -> dict:
    """Of a run that is finished: nothing is trained again. Returns the last step's log."""
    processes.on_rank_0(run.resync_finished)
    return told(run, ", done already (another --out trains again)")


def told(run: RunFolder, more: str = "") -> dict:
    """Say where the adapter is. Returns the last step's log."""
    last = run.records()[-1]
    print(f"{run.folder / 'adapter'}: {last['step']} steps, loss {last['loss']:.4f}{more}")
    return last


def digests_of(adapter: Path | None) -> list[str] | None:
    """Of an adapter's files."""
    return None if adapter is None else [file_sha256(checkpoint.locate(adapter, lora.FILES) / name)
                                         for name in lora.FILES]


def where_cut(options: DPO, reference: object = None) -> str:
    """Where pairs are cut. Refuses what does not go with the loss or with the cut, whatever the data."""
    loss = settings_of(options).loss
    if reference and not loss.needs_reference:
        raise ValueError(f"the loss {options.loss} reads no reference: leave reference out")
    until = options.until or ("end" if options.pairs == "unpaired" else loss.until)
    if options.pairs == "unpaired" and until != "end":
        raise ValueError(f"--dpo.until {until} cuts where two episodes differ, but --dpo.pairs unpaired "
                         "compares none: leave it out")
    if until == "token" and loss.until != "token":
        raise ValueError("--dpo.until token cuts one side only, so what the two share would not cancel in "
                         f"the scores of {options.loss}: use turn or end")
    return until


def pairs_of(config: DPOCommand, until: str) -> list[Pair] | list[Unpaired] | list[trl_files.Preferred]:
    """The pairs that are asked for, from the files named."""
    options = config.dpo
    if trl_files.hold(config.data):
        if config.golden or config.export:
            raise ValueError(f"--{'golden' if config.golden else 'export'} needs episodes, as collect.py "
                             "writes them, and --data holds conversations: leave it out")
        return trl_files.preferences_in(config.data, options)
    episodes = [episode for path in config.data for episode in read(path)]
    if (options.pairs in NEEDS_GOLDEN) != (config.golden is not None):
        raise ValueError(f"--dpo.pairs {options.pairs} " + ("takes no --golden" if config.golden else
                         "needs --golden FILE: solved episodes of the same instances"))
    if options.pairs == "unpaired":
        kept = [e for e in episodes if e.solved or not (options.clean and noisy(e))]
        return unpaired(kept, config.seed)
    golden = read(config.golden) if config.golden else []
    if golden and not {e.instance for e in golden if e.solved} & {e.instance for e in episodes}:
        raise ValueError(f"{config.golden}: no solved episode of an instance that was explored: collect.py "
                         "--policy expert makes them, for the same --tasks, --first and --instances")
    return make_pairs(episodes, options.pairs_per_instance, config.seed, until, options.pairs, golden,
                      options.pairs_per_task, options.clean, options.dense)


def preferences(pairs: Sequence, chat: Chat, limit: int, until: str) -> Preferences:
    """What a step needs of `pairs_of`'s pairs."""
    from_file = isinstance(pairs[0], trl_files.Preferred)
    return (trl_files.preferences_of if from_file else Preferences.of)(pairs, chat, limit, until)


def dpo(config: DPOCommand) -> dict:
    """Train the adapter on pairs of rollouts. Returns the last step's log."""
    options = config.dpo
    budget = Budget(config.machine.micro_tokens, config.machine.tree_tokens)
    settings = settings_of(options)
    loss, until = settings.loss, where_cut(options, config.reference)
    if config.export:
        return trl_files.write_pairs(pairs_of(config, until), config.out / "pairs-trl.jsonl", until)
    shape = lora.read_config(config.adapter)
    held_to = lora.read_config(config.reference) if config.reference else shape
    keep_start(config)
    pairs = pairs_of(config, until)
    inputs = (*config.data, *([config.golden] if config.golden else []))
    run = RunFolder(config.out, {**asdict(config), "data_sha256": [file_sha256(path) for path in inputs],
                           "adapter_sha256": digests_of(config.adapter),
                           "reference_sha256": digests_of(config.reference)})
    if run.finished:
        return settled(run)
    chat, limit = open_chat(config.model)
    data = preferences(pairs, chat, limit, until)
    others = mismatched(data, limit) if loss.needs_baseline else None

    def load_of(machine: Machine) -> Load:
        trees = trees_of(data.pairs, data, machine.tree_tokens)
        members = [list({d for i in tree for d in data.pairs[i]}) for tree in trees]
        return dpo_load(machine, max(sizes(members, data)))

    check_memory(config.model, shape, config.machine, options.optimizer, load_of)
    model = open_model(config.model, config.machine)
    base, device = fingerprint(model.state_dict()), model.head_weight.device
    lora.load(model, config.reference or config.adapter)
    model.eval()  # no dropout: where they are one adapter, policy and reference are one function at step 0
    processes.on_rank_0(run.begin)
    processes.on_rank_0(write_text, run.folder / "pairs.jsonl",
                   "".join(json.dumps(pair.provenance()) + "\n" for pair in pairs))
    sources = ", ".join(f"{n} {name}" for name, n in Counter(pair.source for pair in pairs).items())
    print(f"{len(pairs)} pairs ({sources}) of {len(data.dialogues)} trajectories, "
          f"{len(set(data.instances))} instances")
    scored = fingerprint(lora.adapter_tensors(model))

    def reference(of: Preferences, name: str) -> Tensor:
        weights = f"{base} {model.config} {scored} {held_to}"
        wanted = key(weights, of.dialogues, f"{loss.score} {settings.gamma}")

        def compute() -> Tensor:
            values = score_all(model, of, settings, budget)
            check_finite(values, of.names)
            return values

        return cached(run.folder / f"{name}.safetensors", wanted, compute, processes.rank() == 0)

    ref = reference(data, "reference") if loss.needs_reference else torch.zeros(len(data.dialogues))
    ref_others = reference(others, "reference-baseline").to(device) if loss.needs_baseline else None

    if config.reference:
        lora.detach(model)
        lora.load(model, config.adapter)
        model.eval()  # the new layers, too, without dropout
    print(lora.describe(model))
    instances = [data.instances[chosen] for chosen, _ in data.pairs]

    def batches(step: int) -> Iterator[PairBatch]:
        picked = drawn(step, options.batch, len(data.pairs), config.seed, instances)
        baseline = None
        if loss.needs_baseline:
            baseline = step_baseline(model, others, ref_others, picked, settings, budget)
        return pair_batches(data, picked, ref, settings, budget, device, baseline)

    train(run, model, [optimizer_of(options, model)], options.steps, batches,
          lambda batch: batch_scores(model, batch.trees),
          lambda batch, scores: pair_loss(settings, batch, scores), options.warmup, options.clip,
          config.seed, options.save_every, options.loss.upper())
    processes.on_rank_0(lora.save, model, run.folder / "adapter", config.model, base)
    processes.on_rank_0(run.finish)
    return told(run)
