"""35. Preference: from pairs of episodes to what a step of any preference loss needs.

The pairs of an instance are edges between the leaves of one tree: an episode is computed once, however many
pairs it is in. What the loss reads is four scores a pair, the policy's from the tree of this step, the
reference's from the cache; KTO also reads a baseline, which is measured before the step. Next:
36 conversations.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from minidpo.config import DPO
from minidpo.data.pairs import NothingToLearn, Pair, Unpaired
from minidpo.data.prompt import dialogues_of
from minidpo.data.tree import Batch, Budget, batch_scores, collate, grow, moved, pack, split
from minidpo.model.chat import Chat, Dialogue
from minidpo.model.decoder import Qwen2
from minidpo.objective.losses import preference_metrics
from minidpo.objective.scores import turn_weights
from minidpo.objective.variants import LOSSES, Loss, kto_baseline, nll_term
from minidpo.system.processes import rank_parts, sum_over_ranks


class Settings(NamedTuple):
    """A loss with all its numbers chosen."""

    loss: Loss
    parameters: dict[str, float]
    gamma: float | None = None  # DMPO's, of its turn weights
    nll: float = 0.0  # weight of `nll_term` beside it


def settings_of(options: DPO) -> Settings:
    """The loss that is asked for. Refuses unknown losses and parameters not its own."""
    if options.loss not in LOSSES:
        raise ValueError(f"no loss is called {options.loss!r}; there are {', '.join(LOSSES)}")
    loss = LOSSES[options.loss]
    names = {name: None for entry in LOSSES.values() for name in (*entry.parameters, *entry.score_parameters)}
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    known = {**loss.parameters, **loss.score_parameters}
    for name in given:
        if name not in known:
            raise ValueError(f"--dpo.{name.replace('_', '-')} is not a parameter of the loss {options.loss}, "
                             f"which has {', '.join(known)}: leave it out, or choose another --dpo.loss")
    values = {**known, **given}
    gamma = values.pop("gamma", None)
    if gamma is not None:
        turn_weights(1, gamma)  # a parameter out of range is refused here
    logp = torch.full((1,), -1.0)
    baseline = {"baseline": 0.0} if loss.needs_baseline else {}
    loss.function(logp, logp, logp, logp, **values, **baseline)  # and here
    return Settings(loss, values, gamma, options.nll)


class Preferences(NamedTuple):
    """Pairs as token ids. A trajectory that is in several pairs stands here once."""

    dialogues: list[Dialogue]
    names: list[str]
    instances: list[tuple[str, int]]  # of each dialogue
    pairs: list[tuple[int, int]]  # chosen, rejected: numbers of dialogues
    solved: list[bool]  # of each pair, whether the chosen was: only then it is to be imitated as well

    @classmethod
    def of(cls, pairs: Sequence[Pair | Unpaired], chat: Chat, limit: int, until: str) -> "Preferences":
        """Raises ValueError, by name, for what no loss can tell apart or the model cannot read."""
        both = [episode for pair in pairs for episode in (pair.chosen, pair.rejected)]
        return cls.joined(pairs, *dialogues_of(both, chat, limit), until)

    @classmethod
    def joined(cls, pairs: Sequence, dialogues: list[Dialogue], names: list[str],
               until: str) -> "Preferences":
        """The same from dialogues and their names: the chosen and the rejected of each pair in turn."""
        both = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
        if until == "token":
            for c in range(0, len(dialogues), 2):
                dialogues[c + 1] = until_difference(*dialogues[c:c + 2])
        found: dict[tuple, int] = {}
        kept = cls([], [], [], [], [pair.chosen.solved for pair in pairs])
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


def until_difference(chosen: Dialogue, rejected: Dialogue) -> Dialogue:
    """The rejected dialogue, cut behind the first token in which it differs from the chosen.

    All before that token is the same in both and cancels in the loss; the token is the mistake. What follows
    it is well-formed text after a wrong word, and pushing that down unlearns writing. Where it is the pages
    that differ first, no token is known to be the mistake, and the rejected stays whole.

    >>> until_difference(Dialogue([1, 5, 7, 8], [-1, 0, 0, 0]), Dialogue([1, 5, 6, 8], [-1, 0, 0, 0]))
    Dialogue(ids=[1, 5, 6], turns=[-1, 0, 0])
    """
    both = enumerate(zip(chosen.ids, rejected.ids), 1)
    end = next((t for t, (left, right) in both if left != right), len(rejected.ids))
    if rejected.turns[end - 1] < 0:
        return rejected
    return Dialogue(rejected.ids[:end], rejected.turns[:end])


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


def trees_of(units: Sequence[Sequence[int]], data: Preferences, budget: int) -> list[list[int]]:
    """Units (pairs or single trajectories, as numbers of dialogues) by number, in trees: one an instance,
    more where its tree would have more than `budget` tokens."""
    by_instance: dict[tuple[str, int], list[int]] = {}
    for i, unit in enumerate(units):
        by_instance.setdefault(data.instances[unit[0]], []).append(i)
    return [[members[i] for i in tree] for members in by_instance.values()
            for tree in split([[data.dialogues[d].ids for d in units[i]] for i in members], budget)]


def sizes(groups: Sequence[Sequence[int]], data: Preferences) -> list[int]:
    """Tokens of the tree of each group of dialogues."""
    return [len(grow([data.dialogues[d].ids for d in group]).ids) for group in groups]


def pair_batches(data: Preferences, picked: Sequence[int], ref: Tensor, settings: Settings, budget: Budget,
                 device: torch.device, baseline: Tensor | None = None) -> Iterator[PairBatch]:
    """A step's pairs as micro-batches within the budget; ref (dialogues,): reference scores."""
    units = [data.pairs[p] for p in picked]
    trees = trees_of(units, data, budget.tree)
    members = [list(dict.fromkeys(d for i in tree for d in units[i])) for tree in trees]  # their dialogues
    for part in rank_parts(pack(lengths := sizes(members, data), budget.batch), lengths):
        which = [d for t in part for d in members[t]]
        row = {place: n for n, place in enumerate((t, d) for t in part for d in members[t])}
        chosen, rejected = ([row[t, units[i][side]] for t in part for i in trees[t]] for side in (0, 1))
        solved = [float(data.solved[picked[i]]) for t in part for i in trees[t]]
        batch = collate(([data.dialogues[d] for d in members[t]] for t in part), settings.loss.score,
                        settings.gamma, means=chosen if settings.nll else ())
        names = [data.names[d] for d in (*which, *(which[c] for c in chosen if settings.nll))]
        ref_of = ref[which]
        tensors = (torch.tensor(chosen), torch.tensor(rejected), ref_of[chosen], ref_of[rejected],
                   torch.tensor(solved))
        yield PairBatch(batch.to(device), names, *(moved(tensor, device) for tensor in tensors),
                        baseline, len(picked), batch.tokens)


def pair_loss(settings: Settings, batch: PairBatch, scores: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's part of the step's loss, and of what is logged."""
    loss, parameters, _, nll = settings
    four = (scores[batch.chosen], scores[batch.rejected], batch.ref_chosen, batch.ref_rejected)
    baseline = {"baseline": batch.baseline} if loss.needs_baseline else {}
    each = loss.function(*four, **parameters, **baseline)  # (P,)
    if nll:
        each = each + batch.solved * nll_term(scores[-len(each):], nll)
    numbers = preference_metrics(*four, parameters.get("beta", 1.0))
    if not loss.needs_reference:
        del numbers["mean_drop"]
    if loss.needs_baseline:
        numbers["kto_baseline"] = batch.baseline.expand(len(each))
    shares = {name: values.sum() / batch.step_pairs for name, values in numbers.items()}
    return each.sum() / batch.step_pairs, shares


@torch.no_grad()
def score_all(model: Qwen2, data: Preferences, settings: Settings, budget: Budget) -> Tensor:
    """The model's score of every trajectory, (dialogues,), on its device.

    All trajectories of an instance stand in one tree, in a step's tree those of its pairs: the same numbers
    up to rounding.
    """
    trees = trees_of([(d,) for d in range(len(data.dialogues))], data, budget.tree)
    device = model.head_weight.device
    values = torch.zeros(len(data.dialogues), device=device)
    parts = rank_parts(pack(lengths := sizes(trees, data), budget.batch), lengths)
    for part in tqdm(parts, "scoring", unit="batch", delay=2, leave=False):
        batch = collate(([data.dialogues[d] for d in trees[t]] for t in part), settings.loss.score,
                        settings.gamma)
        which = torch.tensor([d for t in part for d in trees[t]])
        values[moved(which, device)] = batch_scores(model, batch.to(device)).to(values.dtype)
    sum_over_ranks(values)  # each rank has put in its own
    return values


def mismatched(data: Preferences, limit: int) -> Preferences:
    """Each trajectory behind the first prompt of another one: what KTO's baseline is measured on."""
    begin = [next(t for t, turn in enumerate(d.turns) if turn >= 0) for d in data.dialogues]
    own = [tuple(d.ids[:t]) for d, t in zip(data.dialogues, begin)]
    prompts = list(dict.fromkeys(own))  # two instances may begin alike: it is prompts that must differ
    if len(prompts) < 2:
        raise NothingToLearn("KTO's baseline reads answers behind another instance's prompt, but all pairs "
                             "have the same one: explore more instances")
    other = {prompt: list(prompts[n - 1]) for n, prompt in enumerate(prompts)}
    return data._replace(dialogues=[
        Dialogue((other[prompt] + d.ids[t:])[:limit], ([-1] * len(other[prompt]) + d.turns[t:])[:limit])
        for d, t, prompt in zip(data.dialogues, begin, own)])


def step_baseline(model: Qwen2, others: Preferences, ref: Tensor, picked: Sequence[int], settings: Settings,
                  budget: Budget) -> Tensor:
    """KTO's z₀, (), from the `mismatched` trajectories of a step's pairs and their reference scores."""
    which = list(dict.fromkeys(d for p in picked for d in others.pairs[p]))
    some = Preferences([others.dialogues[d] for d in which], [others.names[d] for d in which],
                       [others.instances[d] for d in which], pairs=[], solved=[])
    return kto_baseline(score_all(model, some, settings, budget), ref[moved(torch.tensor(which), ref.device)])
