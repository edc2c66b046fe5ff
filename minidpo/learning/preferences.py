"""Preferences: from pairs of episodes to what a step of any preference loss needs.

The pairs of an instance are edges between the leaves of one tree: an episode is computed once, however many
pairs it is in. The loss reads four scores a pair: the policy's from the tree of this step, the reference's
from the cache. KTO also reads a baseline z₀: the scores of trajectories behind another instance's prompt.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from minidpo.config import DPO, LossParameters
from minidpo.data.batch import Batch, batch_scores, batches_within, collate
from minidpo.data.pairs import NothingToLearn, cut_at_token
from minidpo.data.prompt import dialogues_of
from minidpo.data.tree import Group, grow_groups
from minidpo.learning.loss_table import LOSSES, Loss
from minidpo.memory.machine import Machine
from minidpo.model.chat import Chat, Dialogue
from minidpo.model.decoder import Transformer
from minidpo.objective.losses import preference_metrics
from minidpo.objective.variants import kto_baseline, nll_term
from minidpo.system.processes import all_gather, rank_parts, sum_over_ranks
from minidpo.system.tensors import to_device


class PairLoss(NamedTuple):
    """A loss with all its numbers chosen, and where its pairs are cut."""

    loss: Loss
    parameters: LossParameters
    nll: float  # weight of `nll_term` beside it
    until: str  # "end", "turn" or "token" (`data/pairs`)


def pair_loss_of(options: DPO, has_reference: bool = False) -> PairLoss:
    """The loss asked for. Refuses an unknown one, and parameters, a cut or a reference that do not fit it."""
    if options.loss not in LOSSES:
        raise ValueError(f"no loss is called {options.loss!r}; there are {', '.join(LOSSES)}")
    loss = LOSSES[options.loss]
    given, defaults = options.given(), loss.defaults.given()
    if unread := [name.replace("_", "-") for name in given if name not in defaults]:
        raise ValueError(
            f"--dpo.{unread[0]} is not a parameter of the loss {options.loss}, which has "
            f"{', '.join(defaults)}: leave it out, or choose another --dpo.loss"
        )
    if has_reference and not loss.needs_reference:
        raise ValueError(f"the loss {options.loss} reads no reference: leave reference out")
    until = options.until or ("end" if options.pairs == "unpaired" else loss.until)
    if options.pairs == "unpaired" and until != "end":
        raise ValueError(
            f"--dpo.until {until} cuts where two episodes differ, but --dpo.pairs unpaired "
            "compares none: leave it out"
        )
    if until == "token" and loss.until != "token":
        raise ValueError(
            "--dpo.until token cuts one side only, so what the two share would not cancel in "
            f"the scores of {options.loss}: use turn or end"
        )
    return PairLoss(loss, LossParameters(**{**defaults, **given}), options.nll, until)


class Preferences(NamedTuple):
    """Pairs as token ids. A trajectory that is in several pairs stands here once."""

    dialogues: list[Dialogue]
    names: list[str]
    instances: list[tuple[str, int]]  # of each dialogue
    pairs: list[tuple[int, int]]  # chosen, rejected: numbers of dialogues
    solved: list[bool]  # of each pair, whether the chosen was: only then it is imitated as well

    def largest_tree(self, machine: Machine) -> int:
        """Tokens of the largest tree that a step may meet."""
        return largest_tree(self, self.pairs, machine)


def pair_dialogues(pairs: Sequence, chat: Chat, limit: int, system: str) -> tuple[list[Dialogue], list[str]]:
    """Token ids and turns of each pair's chosen and rejected, in turn, and their names. Of a dagger pair only
    the last answers count: on the chosen side the agent's steps before the expert's answer are given; so they
    are on the rejected side, too, or they would not cancel."""
    dialogues, names = dialogues_of(
        [e for pair in pairs for e in (pair.chosen, pair.rejected)], chat, limit, system
    )
    for n, pair in enumerate(pairs):
        if pair.source == "dagger":
            ids, turns = dialogues[2 * n + 1]
            last = max(turns)
            dialogues[2 * n + 1] = Dialogue(ids, [0 if turn == last else -1 for turn in turns])
    return dialogues, names


def tokenise(pairs: Sequence, chat: Chat, limit: int, until: str) -> Preferences:
    """Pairs as token ids, cut here if `until` is token; at a turn they are cut before. Refuses, by name, what
    no loss can tell apart."""
    sides = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
    dialogues, names = pair_dialogues(pairs, chat, limit)
    if until == "token":
        for c in range(0, len(dialogues), 2):
            dialogues[c + 1] = cut_at_token(dialogues[c], dialogues[c + 1])
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
        if numbers[c] == numbers[c + 1] and pairs[c // 2].source != "unpaired":
            raise ValueError(
                f"{names[c]} and {names[c + 1]} are the same tokens: leave that pair out"
            )
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


def instance_trees(data, units: Sequence[Sequence[int]], machine: Machine) -> list[Group]:
    """The trees of data's dialogues and instances. units: pairs or single trajectories, by number."""
    return grow_groups(
        units, [dialogue.ids for dialogue in data.dialogues], data.instances, machine.split_above
    )


def collate_groups(data, groups: Sequence[Group], *weights) -> Batch:
    """Trees that are grown already as one batch, on the CPU; weights: as in `data/batch.collate`."""
    members = [[data.dialogues[d] for d in group.trajectories] for group in groups]
    return collate(members, *weights, trees=[group.tree for group in groups])


def largest_tree(data, units: Sequence[Sequence[int]], machine: Machine) -> int:
    """Tokens of the largest tree of some of these units; where it goes depth first, of its longest path."""
    trees = [group.tree for group in instance_trees(data, units, machine)]
    largest = max(
        len(tree.ids) if len(tree.ids) <= machine.walk_above else max(map(len, tree.paths))
        for tree in trees
    )
    split = len(trees) > len({data.instances[unit[0]] for unit in units})
    return (
        max(largest, machine.tree_tokens) if split else largest
    )  # a step's own units may fill a tree


def micro_batches(data, units: Sequence[Sequence[int]], machine: Machine) -> list[list[Group]]:
    """This process's batches of a step's trees, each grown once here."""
    groups = instance_trees(data, units, machine)
    lengths = [len(group.tree.ids) for group in groups]
    budget = machine.pass_tokens()
    # a tree that goes depth first is alone in its batch
    packed = batches_within(
        [n if n <= machine.walk_above else max(n, budget) for n in lengths], budget
    )
    return [[groups[g] for g in part] for part in rank_parts(packed, lengths)]


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
        chosen, rejected, solved = [], [], []  # of each pair; the first two: which score
        for group in groups:
            row_of = {d: row for row, d in enumerate(group.trajectories, len(dialogues))}
            dialogues += group.trajectories
            for pair in (picked[unit] for unit in group.units):
                chosen.append(row_of[data.pairs[pair][0]])
                rejected.append(row_of[data.pairs[pair][1]])
                solved.append(float(data.solved[pair]))
        means = chosen if settings.nll else []
        trees = collate_groups(data, groups, settings.loss.score, settings.parameters.gamma, means)
        names = [data.names[d] for d in (*dialogues, *(dialogues[row] for row in means))]
        batch = PairBatch(
            trees,
            names,
            torch.tensor(chosen),
            torch.tensor(rejected),
            ref[dialogues][chosen],
            ref[dialogues][rejected],
            torch.tensor(solved),
            None,
            len(picked),
        )
        yield to_device(batch, device)._replace(baseline=baseline)  # which is on the device already


def pair_loss(
    settings: PairLoss, batch: PairBatch, scores: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's part of the step's loss, and of what is logged."""
    four = (scores[batch.chosen], scores[batch.rejected], batch.ref_chosen, batch.ref_rejected)
    losses = settings.loss.of_scores(settings.parameters, batch.baseline)(*four)  # (P,)
    if settings.nll:  # the last scores are the chosen's means (`pair_batches`)
        losses = losses + batch.solved * nll_term(scores[-len(losses) :], settings.nll)
    beta = (
        1.0 if settings.parameters.beta is None else settings.parameters.beta
    )  # for the log alone
    numbers = preference_metrics(*four, beta)
    if not settings.loss.needs_reference:
        del numbers["mean_drop"]
    if settings.loss.needs_baseline:
        numbers["kto_baseline"] = batch.baseline.expand(len(losses))
    shares = {name: values.sum() / batch.step_pairs for name, values in numbers.items()}
    return losses.sum() / batch.step_pairs, shares


def score_all(
    model: Transformer, data: Preferences, settings: PairLoss, machine: Machine
) -> Tensor:
    """The model's score of every trajectory, (dialogues,), on its device. Here all trajectories of an
    instance stand in one tree, in a step those of its pairs: the same numbers up to rounding."""
    return over_all(
        data,
        [1] * len(data.dialogues),
        model,
        machine,
        lambda trees: batch_scores(model, trees, machine.walk_above),
        settings.loss.score,
        settings.parameters.gamma,
    )


@torch.no_grad()
def over_all(
    data, lengths: Sequence[int], model: Transformer, machine: Machine, read, *weights
) -> Tensor:
    """What read(batch) gives for all trajectories, lengths[d] numbers for trajectory d; batches are collated
    with these weights. Returns (sum of lengths,) in the order of the trajectories, on the model's device."""
    device, begins = model.head_weight.device, torch.tensor([0, *lengths]).cumsum(0)
    values = torch.zeros(sum(lengths), device=device)
    parts = micro_batches(data, [(d,) for d in range(len(lengths))], machine)
    for groups in tqdm(parts, "scoring", unit="batch", delay=2, leave=False):
        places = torch.cat(
            [begins[d] + torch.arange(lengths[d]) for g in groups for d in g.trajectories]
        )
        batch = to_device(collate_groups(data, groups, *weights), device)
        values[to_device(places, device)] = read(batch).to(values.dtype)
    all_gather(
        None, phase=True
    )  # waits as long as the slowest process may take for all of its share
    sum_over_ranks(values)  # each process has put in its own
    return values


def mismatched(data: Preferences, limit: int) -> Preferences:
    """For KTO's baseline, each trajectory behind another one's first prompt, at most `limit` tokens of it."""
    begins = [next(t for t, turn in enumerate(d.turns) if turn >= 0) for d in data.dialogues]
    own_prompts = [tuple(d.ids[:t]) for d, t in zip(data.dialogues, begins)]
    prompts = list(dict.fromkeys(own_prompts))  # two instances may begin alike: prompts must differ
    if len(prompts) < 2:
        raise NothingToLearn(
            "KTO's baseline reads answers behind another instance's prompt, but all pairs "
            "have the same one: explore more instances"
        )
    other_prompt = {prompt: list(prompts[n - 1]) for n, prompt in enumerate(prompts)}
    return data._replace(
        dialogues=[
            Dialogue((other + d.ids[t:])[:limit], ([-1] * len(other) + d.turns[t:])[:limit])
            for d, t, other in zip(data.dialogues, begins, map(other_prompt.get, own_prompts))
        ]
    )


def step_baseline(
    model: Transformer,
    data: Preferences | None,
    ref: Tensor | None,
    picked: Sequence[int],
    settings: PairLoss,
    machine: Machine,
) -> Tensor | None:
    """z₀, (), of a step's `mismatched` trajectories and their reference scores, or None without them."""
    if data is None:
        return None
    numbers = list(dict.fromkeys(d for p in picked for d in data.pairs[p]))
    of_step = Preferences(
        [data.dialogues[d] for d in numbers],
        [data.names[d] for d in numbers],
        [data.instances[d] for d in numbers],
        pairs=[],
        solved=[],
    )
    return kto_baseline(
        score_all(model, of_step, settings, machine),
        to_device(ref[numbers], model.head_weight.device),
    )
