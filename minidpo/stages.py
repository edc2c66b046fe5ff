"""28. The stages: SFT and DPO from files to an adapter.

Here the chapters meet: episodes become dialogues, dialogues rows, rows scores, scores a loss, and the trainer
does the rest. What can be seen to be wrong without the model is said before it is loaded. Read by: the
scripts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from minidpo import lora, pretrained
from minidpo.agent import episode_messages
from minidpo.chat import Chat, Dialogue
from minidpo.checkpointing import switch
from minidpo.config import DPOCommand, SFTCommand
from minidpo.episodes import Episode, read
from minidpo.files import digest
from minidpo.losses import preference_metrics, sft_loss, turn_weights
from minidpo.options import DPO, Machine
from minidpo.pairs import make_pairs, until_difference
from minidpo.qwen2 import Qwen2
from minidpo.reference import cached, key
from minidpo.rows import Batch, batch_logps, check_context, collate, pack, row_weights
from minidpo.runs import Run
from minidpo.scores import scores
from minidpo.trainer import train
from minidpo.variants import LOSSES, Loss, nll_term


def device_and_dtype(machine: Machine) -> tuple[torch.device, torch.dtype]:
    """Where to run, and in what. Raises ValueError for a device that is not there."""
    name = machine.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device {name!r} is none: use cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but PyTorch sees no GPU; use --machine.device cpu")
    dtype = machine.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    return device, getattr(torch, dtype)


def open_base(source: str, machine: Machine) -> tuple[Qwen2, Chat]:
    """Base model and its chat."""
    device, dtype = device_and_dtype(machine)
    folder = pretrained.locate(source)
    chat = Chat.load(folder)  # before the weights: a missing tokenizer is found at once
    model = pretrained.load(folder, dtype, device)
    switch(model, machine.recompute)
    return model, chat


def open_policy(source: str, adapter: Path | None, machine: Machine) -> tuple[Qwen2, Chat]:
    """A policy that is to act: base, adapter merged into it, no gradients."""
    model, chat = open_base(source, machine)
    if adapter is not None:
        lora.load(model, adapter)
        lora.merge(model)
    return model.requires_grad_(False).eval(), chat


def policy_name(source: str | Path, model: Qwen2) -> str:
    """What its episodes are signed with: where it was loaded from, and which weights these were."""
    return f"{source}@{pretrained.fingerprint(model.state_dict())[:12]}"


def dialogues_of(episodes: Sequence[Episode], chat: Chat, limit: int) -> list[Dialogue]:
    """Token ids and turns of each episode; refuses, by name, what cannot be learned from."""
    dialogues = [chat.dialogue(episode_messages(episode)) for episode in episodes]
    check_context(dialogues, [f"{e.task} seed {e.seed} episode {e.index}" for e in episodes], limit)
    return dialogues


def drawn(step: int, batch: int, n: int, seed: int) -> list[int]:
    """Which of n examples step `step` (from 0) uses: epoch after epoch, each in an order of its own."""
    places = range(step * batch, (step + 1) * batch)
    orders = {epoch: numpy.random.default_rng([seed, epoch]).permutation(n)
              for epoch in {place // n for place in places}}
    return [int(orders[place // n][place % n]) for place in places]


class SFTBatch(NamedTuple):
    rows: Batch
    step_tokens: int  # that the agent wrote in the whole step
    tokens: int


def sft_batches(dialogues: Sequence[Dialogue], device: torch.device, micro_tokens: int) -> Iterator[SFTBatch]:
    """A step's dialogues as micro-batches that know how many tokens the whole step has."""
    written = sum(turn >= 0 for dialogue in dialogues for turn in dialogue.turns)
    for part in pack([len(dialogue.ids) for dialogue in dialogues], micro_tokens):
        rows = collate([dialogues[i] for i in part], device)
        yield SFTBatch(rows, written, rows.tokens)


def sft(config: SFTCommand) -> dict:
    """LoRA adapters from demonstrations; only solved episodes count. Returns the last step's log."""
    episodes = [episode for episode in read(config.data) if episode.solved]
    if not episodes:
        raise ValueError(f"{config.data}: no solved episode in it, so nothing to imitate")
    run = Run(config.out, {**asdict(config), "data_sha256": digest(config.data)})
    if run.finished:
        return run.records()[-1]
    model, chat = open_base(config.model, config.machine)
    base = pretrained.fingerprint(model.state_dict())
    dialogues = dialogues_of(episodes, chat, model.config.max_position_embeddings)
    lora.attach(model, config.lora, torch.Generator().manual_seed(config.seed))
    print(lora.describe(model))
    device, options = model.head_weight.device, config.sft

    def batches(step: int):
        picked = [dialogues[i] for i in drawn(step, options.batch, len(dialogues), config.seed)]
        return sft_batches(picked, device, config.machine.micro_tokens)

    def objective(batch: SFTBatch):
        rows = batch.rows
        logp = scores(batch_logps(model, rows), rows.row, row_weights(rows, "sum"), rows.rows)
        return sft_loss(logp, batch.step_tokens), {}

    optimizer = torch.optim.AdamW(lora.parameters(model), lr=options.lr, weight_decay=options.weight_decay)
    train(run, model, [optimizer], options.steps, batches, objective, options.warmup, options.clip,
          config.seed, options.save_every, "SFT")
    lora.save(model, run.folder / "adapter", config.model, base)
    run.finish()
    return run.records()[-1]


def loss_settings(options: DPO) -> tuple[Loss, dict[str, float], float | None]:
    """The chosen loss, its parameters, DMPO's gamma. Refuses unknown losses and parameters not its own."""
    if options.loss not in LOSSES:
        raise ValueError(f"no loss is called {options.loss!r}; there are {', '.join(LOSSES)}")
    loss = LOSSES[options.loss]
    given = {name: value for name in ("beta", "gamma", "label_smoothing", "target_margin", "odds_weight",
                                      "penalty_weight") if (value := getattr(options, name)) is not None}
    known = {**loss.parameters, **loss.score_parameters}
    for name in given.keys() - known.keys():
        raise ValueError(f"--dpo.{name.replace('_', '-')} is not a parameter of the loss {options.loss}, "
                         f"which has {', '.join(known)}")
    values = {**known, **given}
    gamma = values.pop("gamma", None)
    if gamma is not None:
        turn_weights(1, gamma)  # a parameter out of range is refused here
    one = torch.zeros(1)
    loss.function(one - 1, one - 1, one - 1, one - 1, **values)  # and here
    return loss, values, gamma


class DPOBatch(NamedTuple):
    rows: Batch
    chosen: Tensor  # (P,) which row
    rejected: Tensor  # (P,)
    ref_chosen: Tensor  # (P,) reference scores
    ref_rejected: Tensor
    step_pairs: int  # in the whole step
    tokens: int


def dpo(config: DPOCommand) -> dict:
    """Train the adapter on pairs of rollouts. Returns the last step's log."""
    options = config.dpo
    loss, parameters, gamma = loss_settings(options)
    until = options.until or ("token" if loss.score == "sum" else "turn")
    if until == "token" and loss.score != "sum":
        raise ValueError("--dpo.until token cuts one side only, so what the two share would not cancel in "
                         f"the scores of {options.loss}: use turn or end")
    lora.read_config(config.adapter)  # is there one?
    pairs = make_pairs(read(config.data), options.pairs_per_instance, config.seed, until)
    run = Run(config.out, {**asdict(config), "data_sha256": digest(config.data)})
    if run.finished:
        return run.records()[-1]
    model, chat = open_base(config.model, config.machine)
    base = pretrained.fingerprint(model.state_dict())
    device = model.head_weight.device
    episodes = [episode for pair in pairs for episode in (pair.chosen, pair.rejected)]
    dialogues = dialogues_of(episodes, chat, model.config.max_position_embeddings)
    if until == "token":
        for c in range(0, len(dialogues), 2):
            dialogues[c + 1] = until_difference(*dialogues[c:c + 2])
    lora.load(model, config.adapter)
    print(lora.describe(model))
    print(f"{len(pairs)} pairs from {len({pair.chosen.instance for pair in pairs})} instances")

    def score(rows: Batch, logps: Tensor) -> Tensor:
        return scores(logps, rows.row, row_weights(rows, loss.score, gamma), rows.rows)

    @torch.no_grad()
    def reference() -> Tensor:
        values = torch.zeros(len(dialogues))
        for part in pack([len(d.ids) for d in dialogues], config.machine.micro_tokens):
            rows = collate([dialogues[i] for i in part], device)
            values[torch.tensor(part)] = score(rows, batch_logps(model, rows)).cpu()
        return values

    model.eval()
    start = pretrained.fingerprint(lora.adapter_tensors(model))
    ref = torch.zeros(len(dialogues))  # SimPO and ORPO read none
    if loss.needs_reference:
        wanted = key(f"{base} {start}", dialogues, f"{loss.score} {gamma}")
        ref = cached(run.folder / "reference.safetensors", wanted, reference)

    def batches(step: int):
        picked = drawn(step, options.batch, len(pairs), config.seed)
        longest = [max(len(dialogues[2 * p].ids), len(dialogues[2 * p + 1].ids)) for p in picked]
        for part in pack(longest, config.machine.micro_tokens // 2):
            which = [2 * picked[i] + side for i in part for side in (0, 1)]
            rows = collate([dialogues[d] for d in which], device)
            index = torch.arange(0, len(which), 2, device=device)
            yield DPOBatch(rows, index, index + 1, ref[which[::2]].to(device),
                           ref[which[1::2]].to(device), options.batch, rows.tokens)

    def objective(batch: DPOBatch):
        logps = batch_logps(model, batch.rows)
        policy = score(batch.rows, logps)
        four = (policy[batch.chosen], policy[batch.rejected], batch.ref_chosen, batch.ref_rejected)
        each = loss.function(*four, **parameters)
        if options.nll:
            mean = scores(logps, batch.rows.row, row_weights(batch.rows, "mean"), batch.rows.rows)
            each = each + nll_term(mean[batch.chosen], options.nll)
        numbers = preference_metrics(*four, parameters.get("beta", 1.0))
        if not loss.needs_reference:
            del numbers["kl"]
        shares = {name: values.sum() / batch.step_pairs for name, values in numbers.items()}
        return each.sum() / batch.step_pairs, shares

    optimizer = torch.optim.AdamW(lora.parameters(model), lr=options.lr, weight_decay=options.weight_decay)
    train(run, model, [optimizer], options.steps, batches, objective, options.warmup, options.clip,
          config.seed, options.save_every, options.loss.upper())
    lora.save(model, run.folder / "adapter", config.model, base)
    run.finish()
    return run.records()[-1]
