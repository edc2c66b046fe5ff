"""Preferences: from pairs of episodes to what a step of any preference loss needs.

The pairs of an instance are edges between the leaves of one tree: an episode is computed once, however many
pairs it is in. The loss reads four scores a pair: the policy's from the tree of this step, the reference's
from the cache.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from minidpo.config import DPO, LossParameters
from minidpo.data import prompt, trl_files
from minidpo.data.batch import Batch, Budget, batch_scores, collate, pack, to_device
from minidpo.data.pairs import cut
from minidpo.data.tree import Group, grow_groups
from minidpo.learning.loss_table import LOSSES, Loss
from minidpo.model.chat import Chat, Dialogue
from minidpo.model.decoder import Qwen2
from minidpo.objective.losses import preference_metrics
from minidpo.objective.variants import nll_term
from minidpo.system.processes import rank_parts, sum_over_ranks


class PairLoss(NamedTuple):
    """A loss with all its numbers chosen."""

    loss: Loss
    parameters: LossParameters
    nll: float = 0.0  # weight of `nll_term` beside it


def pair_loss_of(options: DPO) -> PairLoss:
    """The loss that is asked for. Refuses an unknown loss and parameters that are not its own."""
    if options.loss not in LOSSES:
        raise ValueError(f"no loss is called {options.loss!r}; there are {', '.join(LOSSES)}")
    loss = LOSSES[options.loss]
    given, defaults = options.given(), loss.defaults.given()
    for name in given:
        if name not in defaults:
            raise ValueError(f"--dpo.{name.replace('_', '-')} is not a parameter of the loss {options.loss}, "
                             f"which has {', '.join(defaults)}: leave it out, or choose another --dpo.loss")
    return PairLoss(loss, LossParameters(**{**defaults, **given}), options.nll)


def where_cut(options: DPO, reference: object = None) -> str:
    """Where `data/pairs.cut` cuts: "end", "turn" or "token". Refuses what does not suit the loss."""
    loss = pair_loss_of(options).loss
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


class Preferences(NamedTuple):
    """Pairs as token ids. A trajectory that is in several pairs stands here once."""

    dialogues: list[Dialogue]
    names: list[str]
    instances: list[tuple[str, int]]  # of each dialogue
    pairs: list[tuple[int, int]]  # chosen, rejected: numbers of dialogues
    solved: list[bool]  # of each pair, whether the chosen was: only then it is imitated as well

    @property
    def ids(self) -> list[list[int]]:
        """The token ids of each dialogue."""
        return [dialogue.ids for dialogue in self.dialogues]

    def largest_tree(self, budget: int) -> int:
        """Tokens of the largest tree, if all pairs met in one step."""
        return max(len(group.tree.ids) for group in grow_groups(self.pairs, self.ids, self.instances, budget))


def tokenise(pairs: Sequence, chat: Chat, limit: int, until: str) -> Preferences:
    """Pairs of episodes or of conversations as token ids, cut where `until` says.

    Raises ValueError, by name, for what no loss can tell apart or the model cannot read.
    """
    sides = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
    room = trl_files if isinstance(sides[0], trl_files.Conversation) else prompt
    dialogues, names = room.dialogues_of(sides, chat, limit)
    if until == "token":
        for c in range(0, len(dialogues), 2):
            dialogues[c:c + 2] = cut(dialogues[c], dialogues[c + 1], "token")
    data = Preferences([], [], [], [], [pair.chosen.solved for pair in pairs])
    number_of: dict[tuple, int] = {}
    numbers = []
    for side, dialogue, name in zip(sides, dialogues, names):
        key = (side.instance, tuple(dialogue.ids), tuple(dialogue.turns))
        if key not in number_of:
            number_of[key] = len(number_of)
            data.dialogues.append(dialogue)
            data.names.append(name)
            data.instances.append(side.instance)
        numbers.append(number_of[key])
    for c in range(0, len(numbers), 2):
        if numbers[c] == numbers[c + 1]:
            raise ValueError(f"{names[c]} and {names[c + 1]} are the same tokens: no loss can prefer one of "
                             "them")
        data.pairs.append((numbers[c], numbers[c + 1]))
    return data


class PairBatch(NamedTuple):
    """A micro-batch: some of the step's pairs, in their trees."""

    trees: Batch
    names: list[str]  # of each score
    chosen: Tensor  # (P,) which score
    rejected: Tensor  # (P,)
    ref_chosen: Tensor  # (P,) reference scores
    ref_rejected: Tensor  # (P,)
    solved: Tensor  # (P,) 1 where the chosen was solved, else 0
    baseline: Tensor | None  # () KTO's, of the whole step
    step_pairs: int  # in the whole step
    tokens: int

    def to(self, device: torch.device) -> "PairBatch":
        tensors = {name: to_device(value, device) for name, value in self._asdict().items()
                   if isinstance(value, Tensor)}
        return self._replace(trees=self.trees.to(device), **tensors)


def pair_batches(data: Preferences, picked: Sequence[int], ref: Tensor, settings: PairLoss, budget: Budget,
                 device: torch.device, baseline: Tensor | None = None) -> Iterator[PairBatch]:
    """A step's micro-batches. picked: numbers in `data.pairs`; ref: (dialogues,) scores."""
    groups = grow_groups([data.pairs[p] for p in picked], data.ids, data.instances, budget.tree)
    lengths = [len(group.tree.ids) for group in groups]
    for part in rank_parts(pack(lengths, budget.batch), lengths):
        batch = _pair_batch(data, picked, [groups[g] for g in part], ref, settings)
        yield batch.to(device)._replace(baseline=baseline)


def _pair_batch(data: Preferences, picked: Sequence[int], groups: Sequence[Group], ref: Tensor,
                settings: PairLoss) -> PairBatch:
    """The pairs of some groups as one batch, on the CPU; a group's units are places in `picked`."""
    dialogues = [d for group in groups for d in group.trajectories]  # of each score, by number
    row_of = {place: row for row, place in enumerate((g, d) for g, group in enumerate(groups)
                                                     for d in group.trajectories)}
    members = [(g, picked[unit]) for g, group in enumerate(groups) for unit in group.units]
    chosen = [row_of[g, data.pairs[p][0]] for g, p in members]
    rejected = [row_of[g, data.pairs[p][1]] for g, p in members]
    solved = torch.tensor([float(data.solved[p]) for _, p in members])
    trees = collate([[data.dialogues[d] for d in group.trajectories] for group in groups],
                    settings.loss.score, settings.parameters.gamma, means=chosen if settings.nll else (),
                    trees=[group.tree for group in groups])
    names = [data.names[d] for d in (*dialogues, *(dialogues[c] for c in chosen if settings.nll))]
    ref = ref[dialogues]
    return PairBatch(trees, names, torch.tensor(chosen), torch.tensor(rejected), ref[chosen], ref[rejected],
                     solved, None, len(picked), trees.tokens)


def pair_loss(settings: PairLoss, batch: PairBatch, scores: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's part of the step's loss, and of what is logged."""
    four = (scores[batch.chosen], scores[batch.rejected], batch.ref_chosen, batch.ref_rejected)
    losses = settings.loss.call(four, settings.parameters, batch.baseline)  # (P,)
    if settings.nll:
        losses = losses + batch.solved * nll_term(scores[-len(losses):], settings.nll)
    beta = 1.0 if settings.parameters.beta is None else settings.parameters.beta
    numbers = preference_metrics(*four, beta)
    if not settings.loss.needs_reference:
        del numbers["mean_drop"]
    if settings.loss.needs_baseline:
        numbers["kto_baseline"] = batch.baseline.expand(len(losses))
    shares = {name: values.sum() / batch.step_pairs for name, values in numbers.items()}
    return losses.sum() / batch.step_pairs, shares


@torch.no_grad()
def score_all(model: Qwen2, data: Preferences, settings: PairLoss, budget: Budget) -> Tensor:
    """The model's score of every trajectory, (dialogues,), on its device.

    Here all trajectories of an instance stand in one tree, in a step those of its pairs: the same numbers up
    to rounding.
    """
    units = [(d,) for d in range(len(data.dialogues))]
    groups = grow_groups(units, data.ids, data.instances, budget.tree)
    lengths = [len(group.tree.ids) for group in groups]
    device = model.head_weight.device
    values = torch.zeros(len(data.dialogues), device=device)
    parts = rank_parts(pack(lengths, budget.batch), lengths)
    for part in tqdm(parts, "scoring", unit="batch", delay=2, leave=False):
        members = [[data.dialogues[d] for d in groups[g].trajectories] for g in part]
        batch = collate(members, settings.loss.score, settings.parameters.gamma,
                        trees=[groups[g].tree for g in part])
        numbers = torch.tensor([d for g in part for d in groups[g].trajectories])
        values[to_device(numbers, device)] = batch_scores(model, batch.to(device)).to(values.dtype)
    sum_over_ranks(values)  # each process has put in its own
    return values
