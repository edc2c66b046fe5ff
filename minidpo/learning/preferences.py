"""Preferences: from pairs of episodes to the batches and the loss of a step.

The pairs of an instance are edges between the leaves of one tree, so an episode is computed once, however many
pairs it is in. The loss reads four scores a pair: the policy's from the tree of this step, the reference's
from the cache. KTO also reads a baseline z₀, from the scores of trajectories after another instance's prompt.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minidpo.data.batch import Batch, batch_scores
from minidpo.data.pairs import NothingToLearn, cut_at_token
from minidpo.data.prompt import dialogues_of
from minidpo.learning.loss_table import Loss, LossParameters
from minidpo.learning.micro_batches import collate_groups, largest_tree, micro_batches, over_all
from minidpo.memory.machine import Machine
from minidpo.model.chat import Chat, Dialogue
from minidpo.model.decoder import Transformer
from minidpo.objective.losses import preference_metrics
from minidpo.objective.variants import kto_baseline, nll_term
from minidpo.system.tensors import to_device


class PairLoss(NamedTuple):
    """A loss with all its parameters, and where its pairs are cut."""

    loss: Loss
    parameters: LossParameters
    nll: float  # weight of `nll_term` beside it
    until: str  # "end", "turn" or "token" (`data/pairs`)


class Preferences(NamedTuple):
    """Pairs as token ids. A trajectory that is in several pairs is stored once."""

    dialogues: list[Dialogue]
    names: list[str]
    instances: list[tuple[str, int]]  # of each dialogue
    pairs: list[tuple[int, int]]  # chosen, rejected: numbers of dialogues
    solved: list[bool]  # of each pair, whether the chosen was solved: only then NLL imitates it

    def largest_tree(self, machine: Machine) -> int:
        """Tokens of the largest tree that a step may have."""
        return largest_tree(self, self.pairs, machine)


def pair_dialogues(
    pairs: Sequence, chat: Chat, limit: int, system: str
) -> tuple[list[Dialogue], list[str]]:
    """Token ids and turns of all chosen and rejected, alternately, and their names."""
    sides = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
    return dialogues_of(sides, chat, limit, system)


def tokenise(pairs: Sequence, chat: Chat, limit: int, system: str, until: str) -> Preferences:
    """Pairs as token ids, cut here if `until` is "token" (`choose` has cut them already if it is "turn"). Raises
    ValueError that names a pair with the same tokens on both sides."""
    data = Preferences([], [], [], [], [])
    number_of: dict[tuple, int] = {}  # of a dialogue, by its instance, ids and turns

    def add(side, dialogue: Dialogue) -> int:
        key = side.instance, tuple(dialogue.ids), tuple(dialogue.turns)
        if key not in number_of:
            number_of[key] = len(number_of)
            data.dialogues.append(dialogue)
            data.names.append(side.name)
            data.instances.append(side.instance)
        return number_of[key]

    dialogues, _ = pair_dialogues(pairs, chat, limit, system)
    for pair, chosen, rejected in zip(pairs, dialogues[::2], dialogues[1::2]):
        if until == "token":
            rejected = cut_at_token(chosen, rejected)
        numbers = add(pair.chosen, chosen), add(pair.rejected, rejected)
        if numbers[0] == numbers[1] and pair.source != "unpaired":
            raise ValueError(
                f"{pair.chosen.name} and {pair.rejected.name} are the same tokens: leave that pair out"
            )
        data.pairs.append(numbers)
        data.solved.append(pair.chosen.solved)
    return data


class PairBatch(NamedTuple):
    """A micro-batch: some of the step's pairs, in their trees."""

    trees: Batch
    names: list[str]  # of each score
    chosen: Tensor  # (P,) the place of its score
    rejected: Tensor  # (P,)
    ref_chosen: Tensor  # (P,) reference scores
    ref_rejected: Tensor  # (P,)
    solved: Tensor  # (P,) 1 where the chosen was solved, else 0
    baseline: Tensor | None  # () KTO's, of the whole step
    step_pairs: int  # in the whole step


def pair_batches(
    data: Preferences,
    picked: Sequence[int],
    ref: Tensor,
    settings: PairLoss,
    machine: Machine,
    device: torch.device,
    baseline: Tensor | None = None,
) -> Iterator[PairBatch]:
    """A step's pairs, by their numbers in `data.pairs`, in micro-batches; ref: (dialogues,) scores."""
    for groups in micro_batches(data, [data.pairs[p] for p in picked], machine):
        dialogues: list[int] = []  # of each score
        pairs: list[int] = []
        chosen, rejected = [], []  # of each pair, the places of its scores
        for group in groups:
            row_of = {d: row for row, d in enumerate(group.trajectories, len(dialogues))}
            dialogues += group.trajectories
            for pair in (picked[unit] for unit in group.units):
                pairs.append(pair)
                chosen.append(row_of[data.pairs[pair][0]])
                rejected.append(row_of[data.pairs[pair][1]])
        means = chosen if settings.nll else []
        dialogues += [dialogues[row] for row in means]
        batch = PairBatch(
            collate_groups(data, groups, settings.loss.score, settings.parameters.gamma, means),
            [data.names[d] for d in dialogues],
            torch.tensor(chosen),
            torch.tensor(rejected),
            ref[[data.pairs[pair][0] for pair in pairs]],
            ref[[data.pairs[pair][1] for pair in pairs]],
            torch.tensor([float(data.solved[pair]) for pair in pairs]),
            None,
            len(picked),
        )
        yield to_device(batch, device)._replace(baseline=baseline)  # it is on the device already


def pair_loss(
    settings: PairLoss, batch: PairBatch, scores: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's part of the step's loss, and of the logged numbers."""
    four = (scores[batch.chosen], scores[batch.rejected], batch.ref_chosen, batch.ref_rejected)
    losses = settings.loss.of_scores(settings.parameters, batch.baseline)(*four)  # (P,)
    if settings.nll:  # the last scores are the chosen's means (`pair_batches`)
        losses = losses + batch.solved * nll_term(scores[-len(losses) :], settings.nll)
    numbers = preference_metrics(*four, settings.parameters.beta or 1.0)
    if not settings.loss.needs_reference:
        del numbers["mean_drop"]
    if settings.loss.needs_baseline:
        numbers["kto_baseline"] = batch.baseline.expand(len(losses))
    shares = {name: values.sum() / batch.step_pairs for name, values in numbers.items()}
    return losses.sum() / batch.step_pairs, shares


def score_all(
    model: Transformer, data: Preferences, settings: PairLoss, machine: Machine
) -> Tensor:
    """The model's score of every trajectory, (dialogues,), on its device. A tree holds all trajectories of an
    instance here, but in a step only those of its pairs: the numbers are the same up to rounding."""
    return over_all(
        data,
        [1] * len(data.dialogues),
        model,
        machine,
        lambda trees: batch_scores(model, trees, machine.walk_above),
        settings.loss.score,
        settings.parameters.gamma,
    )


def mismatched(data: Preferences, limit: int) -> Preferences:
    """For KTO's baseline: each trajectory after another one's first prompt, cut at `limit` tokens."""
    begins = [min(t for t, turn in enumerate(d.turns) if turn >= 0) for d in data.dialogues]
    own_prompts = [tuple(d.ids[:t]) for d, t in zip(data.dialogues, begins)]
    prompts = list(dict.fromkeys(own_prompts))  # two instances may begin alike: prompts must differ
    if len(prompts) < 2:
        raise NothingToLearn(
            "KTO's baseline reads answers behind another instance's prompt, but all pairs "
            "have the same one: explore more instances"
        )
    other_prompt = {prompt: list(prompts[n - 1]) for n, prompt in enumerate(prompts)}
    dialogues = []
    for dialogue, t, own in zip(data.dialogues, begins, own_prompts):
        other = other_prompt[own]
        ids = [*other, *dialogue.ids[t:]]
        turns = [-1] * len(other) + dialogue.turns[t:]
        dialogues.append(Dialogue(ids[:limit], turns[:limit]))
    return data._replace(dialogues=dialogues)


def step_baseline(
    model: Transformer,
    data: Preferences | None,
    ref: Tensor | None,
    picked: Sequence[int],
    settings: PairLoss,
    machine: Machine,
) -> Tensor | None:
    """z₀, (), of a step, from its `mismatched` trajectories (`data`) and their reference scores; None without."""
    if data is None:
        return None
    numbers = list(dict.fromkeys(d for p in picked for d in data.pairs[p]))
    of_step = data._replace(
        dialogues=[data.dialogues[d] for d in numbers],
        instances=[data.instances[d] for d in numbers],
    )
    policy = score_all(model, of_step, settings, machine)
    return kto_baseline(policy, to_device(ref[numbers], policy.device))
