"""29. Preference: from a file of rollouts to an adapter that prefers its successes.

The pairs of an instance are edges between the leaves of one tree: each of its episodes is computed once,
however many pairs it is in. What the loss reads is four scores a pair, the policy's from the tree of this
step, the reference's from the cache; KTO also reads a baseline, which is measured before the step. Next: 30
pretraining.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import NamedTuple

import torch
from torch import Tensor

from minidpo import lora, pretrained
from minidpo.chat import Chat, Dialogue
from minidpo.config import DPOCommand
from minidpo.episodes import read
from minidpo.files import digest
from minidpo.losses import preference_metrics, turn_weights
from minidpo.options import DPO
from minidpo.pairs import Pair, make_pairs, until_difference
from minidpo.qwen2 import Qwen2
from minidpo.reference import cached, key
from minidpo.runs import Run
from minidpo.stages import dialogues_of, drawn, open_base
from minidpo.trainer import check_finite, train
from minidpo.tree import Batch, batch_scores, collate, grow, moved, pack, split
from minidpo.variants import LOSSES, Loss, kto_kl, nll_term


class Objective(NamedTuple):
    """A loss with all its numbers chosen."""

    loss: Loss
    parameters: dict[str, float]
    gamma: float | None = None  # DMPO's, of its turn weights
    nll: float = 0.0  # weight of `nll_term` beside it


def objective_of(options: DPO) -> Objective:
    """The loss that is asked for. Refuses unknown losses and parameters not its own."""
    if options.loss not in LOSSES:
        raise ValueError(f"no loss is called {options.loss!r}; there are {', '.join(LOSSES)}")
    loss = LOSSES[options.loss]
    names = {name: None for entry in LOSSES.values() for name in (*entry.parameters, *entry.score_parameters)}
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    known = {**loss.parameters, **loss.score_parameters}
    for name in given.keys() - known.keys():
        raise ValueError(f"--dpo.{name.replace('_', '-')} is not a parameter of the loss {options.loss}, "
                         f"which has {', '.join(known)}")
    values = {**known, **given}
    gamma = values.pop("gamma", None)
    if gamma is not None:
        turn_weights(1, gamma)  # a parameter out of range is refused here
    one = torch.zeros(1)
    kl = {"kl": 0.0} if loss.needs_kl else {}
    loss.function(one - 1, one - 1, one - 1, one - 1, **values, **kl)  # and here
    return Objective(loss, values, gamma, options.nll)


class Preferences(NamedTuple):
    """Pairs as token ids. A trajectory that is in several pairs stands here once."""

    dialogues: list[Dialogue]
    names: list[str]
    instances: list[tuple[str, int]]  # of each dialogue
    pairs: list[tuple[int, int]]  # chosen, rejected: numbers of dialogues

    @classmethod
    def of(cls, pairs: Sequence[Pair], chat: Chat, limit: int, until: str) -> "Preferences":
        """Raises ValueError, by name, for what no loss can tell apart or the model cannot read."""
        both = [episode for pair in pairs for episode in (pair.chosen, pair.rejected)]
        dialogues, names = dialogues_of(both, chat, limit)
        if until == "token":
            for c in range(0, len(dialogues), 2):
                dialogues[c + 1] = until_difference(*dialogues[c:c + 2])
        found: dict[tuple, int] = {}
        kept = cls([], [], [], [])
        numbers = []
        for episode, dialogue, name in zip(both, dialogues, names):
            same = (episode.instance, tuple(dialogue.ids), tuple(dialogue.turns))
            if same not in found:
                found[same] = len(found)
                kept.dialogues.append(dialogue)
                kept.names.append(name)
                kept.instances.append(episode.instance)
            numbers.append(found[same])
        for chosen, rejected, one, other in zip(numbers[::2], numbers[1::2], names[::2], names[1::2]):
            if chosen == rejected:
                raise ValueError(f"{one} and {other} are the same tokens: no loss can prefer one of them")
            kept.pairs.append((chosen, rejected))
        return kept


class PairBatch(NamedTuple):
    """A micro-batch: some of the step's pairs, in their trees."""

    trees: Batch
    names: list[str]  # of each score
    chosen: Tensor  # (P,) which score
    rejected: Tensor  # (P,)
    ref_chosen: Tensor  # (P,) reference scores
    ref_rejected: Tensor  # (P,)
    kl: Tensor | None  # () KTO's baseline, of the whole step
    step_pairs: int  # in the whole step
    tokens: int


def trees_of(units: Sequence[Sequence[int]], data: Preferences, budget: int) -> list[list[int]]:
    """Units (pairs or single trajectories, as numbers of dialogues) by number, in trees: one an instance,
    more where its tree would have more than `budget` tokens."""
    by_instance: dict[tuple[str, int], list[int]] = {}
    for i, unit in enumerate(units):
        by_instance.setdefault(data.instances[unit[0]], []).append(i)
    return [[members[i] for i in tree] for members in by_instance.values()
            for tree in split([[data.dialogues[d].ids for d in units[i]] for i in members], budget)]


def pair_batches(data: Preferences, picked: Sequence[int], ref: Tensor, objective: Objective, budget: int,
                 device: torch.device, kl: Tensor | None = None) -> Iterator[PairBatch]:
    """A step's pairs as micro-batches of at most `budget` tokens; ref (dialogues,): reference scores."""
    units = [data.pairs[p] for p in picked]
    trees = trees_of(units, data, budget)
    members = [list(dict.fromkeys(d for i in tree for d in units[i])) for tree in trees]  # their dialogues
    sizes = [len(grow([data.dialogues[d].ids for d in group]).ids) for group in members]
    for part in pack(sizes, budget):
        which = [d for t in part for d in members[t]]
        row = {place: n for n, place in enumerate((t, d) for t in part for d in members[t])}
        chosen, rejected = ([row[t, units[i][side]] for t in part for i in trees[t]] for side in (0, 1))
        batch = collate(([data.dialogues[d] for d in members[t]] for t in part), objective.loss.score,
                        objective.gamma, means=chosen if objective.nll else ())
        names = [data.names[d] for d in (*which, *(which[c] for c in chosen if objective.nll))]
        ref_of = ref[which]
        tensors = (torch.tensor(chosen), torch.tensor(rejected), ref_of[chosen], ref_of[rejected])
        yield PairBatch(batch.to(device), names, *(moved(tensor, device) for tensor in tensors), kl,
                        len(picked), batch.tokens)


def pair_loss(objective: Objective, batch: PairBatch, scores: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's part of the step's loss, and of what is logged."""
    loss, parameters, _, nll = objective
    four = (scores[batch.chosen], scores[batch.rejected], batch.ref_chosen, batch.ref_rejected)
    kl = {"kl": batch.kl} if loss.needs_kl else {}
    each = loss.function(*four, **parameters, **kl)  # (P,)
    if nll:
        each = each + nll_term(scores[-len(each):], nll)
    numbers = preference_metrics(*four, parameters.get("beta", 1.0))
    if not loss.needs_reference:
        del numbers["kl"]
    if loss.needs_kl:
        numbers["kto_kl"] = batch.kl.expand(len(each))
    shares = {name: values.sum() / batch.step_pairs for name, values in numbers.items()}
    return each.sum() / batch.step_pairs, shares


@torch.no_grad()
def score_all(model: Qwen2, data: Preferences, objective: Objective, budget: int) -> Tensor:
    """The model's score of every trajectory, (dialogues,), on its device, in trees as in training."""
    trees = trees_of([(d,) for d in range(len(data.dialogues))], data, budget)
    sizes = [len(grow([data.dialogues[d].ids for d in tree]).ids) for tree in trees]
    device = model.head_weight.device
    values = torch.zeros(len(data.dialogues), device=device)
    for part in pack(sizes, budget):
        batch = collate(([data.dialogues[d] for d in trees[t]] for t in part), objective.loss.score,
                        objective.gamma)
        which = torch.tensor([d for t in part for d in trees[t]])
        values[moved(which, device)] = batch_scores(model, batch.to(device)).to(values.dtype)
    return values


def mismatched(data: Preferences, limit: int) -> Preferences:
    """Each trajectory behind the first prompt of another instance: what KTO's baseline is measured on."""
    instances = list(dict.fromkeys(data.instances))
    if len(instances) < 2:
        raise ValueError("KTO's baseline reads answers behind the prompt of another instance, but all pairs "
                         "are of one: explore more instances")
    begin = [next(t for t, turn in enumerate(d.turns) if turn >= 0) for d in data.dialogues]
    prompts = {i: d.ids[:t] for i, d, t in zip(data.instances, data.dialogues, begin)}
    other = {i: prompts[instances[n - 1]] for n, i in enumerate(instances)}
    return data._replace(dialogues=[
        Dialogue((other[i] + d.ids[t:])[:limit], ([-1] * len(other[i]) + d.turns[t:])[:limit])
        for i, d, t in zip(data.instances, data.dialogues, begin)])


def baseline(model: Qwen2, others: Preferences, ref: Tensor, picked: Sequence[int], objective: Objective,
             budget: int) -> Tensor:
    """KTO's z₀, (), from the `mismatched` trajectories of a step's pairs and their reference scores."""
    which = list(dict.fromkeys(d for p in picked for d in others.pairs[p]))
    some = Preferences(*([values[d] for d in which] for values in others[:3]), [])
    return kto_kl(score_all(model, some, objective, budget), ref[moved(torch.tensor(which), ref.device)])


def dpo(config: DPOCommand) -> dict:
    """Train the adapter on pairs of rollouts. Returns the last step's log."""
    options, budget = config.dpo, config.machine.micro_tokens
    objective = objective_of(options)
    loss = objective.loss
    cancels = loss.score == "sum" and not loss.needs_kl  # what chosen and rejected have in common
    until = options.until or ("token" if cancels else "turn")
    if until == "token" and not cancels:
        raise ValueError("--dpo.until token cuts one side only, so what the two share would not cancel in "
                         f"the scores of {options.loss}: use turn or end")
    lora.read_config(config.adapter)  # is there one?
    pairs = make_pairs(read(config.data), options.pairs_per_instance, config.seed, until)
    run = Run(config.out, {**asdict(config), "data_sha256": digest(config.data)})
    if run.finished:
        return run.records()[-1]
    model, chat = open_base(config.model, config.machine)
    base = pretrained.fingerprint(model.state_dict())
    limit, device = model.config.max_position_embeddings, model.head_weight.device
    data = Preferences.of(pairs, chat, limit, until)
    others = mismatched(data, limit) if loss.needs_kl else None
    lora.load(model, config.adapter)
    model.eval()  # no dropout: policy and reference are the same function at step 0
    print(lora.describe(model))
    print(f"{len(pairs)} pairs of {len(data.dialogues)} trajectories, {len(set(data.instances))} instances")
    start = pretrained.fingerprint(lora.adapter_tensors(model))

    def reference(of: Preferences, name: str) -> Tensor:
        wanted = key(f"{base} {start}", of.dialogues, f"{loss.score} {objective.gamma}")

        def compute() -> Tensor:
            values = score_all(model, of, objective, budget)
            check_finite(values, of.names)
            return values

        return cached(run.folder / f"{name}.safetensors", wanted, compute)

    ref = reference(data, "reference") if loss.needs_reference else torch.zeros(len(data.dialogues))
    ref_others = reference(others, "reference-kl").to(device) if loss.needs_kl else None

    def batches(step: int) -> Iterator[PairBatch]:
        picked = drawn(step, options.batch, len(data.pairs), config.seed,
                       [data.instances[chosen] for chosen, _ in data.pairs])
        kl = baseline(model, others, ref_others, picked, objective, budget) if loss.needs_kl else None
        return pair_batches(data, picked, ref, objective, budget, device, kl)

    optimizer = torch.optim.AdamW(lora.parameters(model), lr=options.lr, weight_decay=options.weight_decay)
    train(run, model, [optimizer], options.steps, batches,
          lambda batch: batch_scores(model, batch.trees),
          lambda batch, scores: pair_loss(objective, batch, scores), options.warmup, options.clip,
          config.seed, options.save_every, options.loss.upper())
    lora.save(model, run.folder / "adapter", config.model, base)
    run.finish()
    return run.records()[-1]
