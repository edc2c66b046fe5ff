"""16. Pairs: what is preferred to what, within one task instance and nowhere else.

Reward differences across instances say how hard a page is, not how well it was played. So episodes are
grouped by (task, seed). SOURCES says where the pairs of a group come from: the agent's own successes and
failures (EF-DPO), a golden episode against its failures (ETO), two ways on from one step (ETO's step-wise
contrast), or all of them. What the two have in common cancels in the loss; where they first differ is the
decision that the verdict is about. Next: 17 tree.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

from minidpo.data.episodes import Episode


class NothingToLearn(ValueError):
    """These episodes have no two sides to prefer one of, or none to imitate."""


@dataclass(frozen=True)
class Pair:
    """chosen ≻ rejected on one instance: only the chosen is solved or, failures both, it came nearer."""

    chosen: Episode
    rejected: Episode
    source: str = "outcome"

    def __post_init__(self):
        c, r = self.chosen, self.rejected
        if c.instance != r.instance:
            raise ValueError("a pair needs one instance, "
                             f"got {c.task} seed {c.seed} and {r.task} seed {r.seed}")
        if self.source == "progress":
            if c.solved or r.solved or None in (c.progress, r.progress) or c.progress <= r.progress:
                raise ValueError(f"{c.task} seed {c.seed}: both must have failed, the chosen come nearer, "
                                 f"got {c.outcome} at {c.progress} and {r.outcome} at {r.progress}")
        elif not (c.solved and not r.solved):
            raise ValueError(f"{c.task} seed {c.seed}: the chosen must be solved and the rejected not, "
                             f"got {c.outcome} and {r.outcome}")

    def provenance(self) -> dict:
        """Where it came from, for the record: which two episodes, by whom, and by which rule."""
        sides = {name: {"task": e.task, "seed": e.seed, "policy": e.policy, "index": e.index,
                        "forced": e.forced, "outcome": e.outcome, "reward": e.reward, "progress": e.progress,
                        "turns": len(e.turns)}
                 for name, e in (("chosen", self.chosen), ("rejected", self.rejected))}
        return {"source": self.source, **sides}


@dataclass(frozen=True)
class Unpaired:
    """A success and a failure that stand side by side and are not compared: KTO judges each alone."""

    chosen: Episode
    rejected: Episode
    source: str = "unpaired"
    provenance = Pair.provenance


def words(episode: Episode) -> tuple[str, ...]:
    """All that the agent said: two episodes that agree in it are the same to the model."""
    return tuple(turn.answer for turn in episode.turns)


def divergence(a: Episode, b: Episode) -> int:
    """The first turn, from 0, in which the two agents said something else; before it all is the same."""
    return common(words(a), words(b))


def common(one: Sequence, other: Sequence) -> int:
    """How many items both begin with.

    >>> common("page", "pages"), common("page", "pace")
    (4, 2)
    """
    differing = (n for n, (left, right) in enumerate(zip(one, other)) if left != right)
    return next(differing, min(len(one), len(other)))


def until_divergence(pair: Pair) -> Pair:
    """Both episodes cut behind the first turn in which they differ: what came later has other causes."""
    return cut(pair, divergence(pair.chosen, pair.rejected) + 1)


def cut(pair: Pair, turns: int) -> Pair:
    """The first turns of both."""
    sides = (replace(episode, turns=episode.turns[:turns]) for episode in (pair.chosen, pair.rejected))
    return Pair(*sides, pair.source)


def different(pairs: Sequence[Pair]) -> list[Pair]:
    """Of pairs in which the same is said, one."""
    return list({(words(pair.chosen), words(pair.rejected)): pair for pair in pairs}.values())


def noisy(episode: Episode) -> bool:
    """Whether an action was unusable or impossible, or, but for waiting, repeated on an unchanged page.

    DMPO's noisy setting trains on such losers, its clean one does not (Shi et al. 2024, arXiv:2406.14868).
    """
    return (any(turn.error is not None for turn in episode.turns)
            or any(a.action == b.action != "WAIT()" and a.observation == b.observation
                   for a, b in pairwise(episode.turns)))


def _free(group: Sequence[Episode]) -> list[Episode]:
    """Those that the agent played from the first step on."""
    return [episode for episode in group if not episode.forced]


def outcome(group: Sequence[Episode], golden: Sequence[Episode]) -> list[Pair]:
    """The agent's successes ≻ its failures (EF-DPO)."""
    solved, failed = ([e for e in _free(group) if e.solved == verdict] for verdict in (True, False))
    return [Pair(*both) for both in product(solved, failed)]


def expert(group: Sequence[Episode], golden: Sequence[Episode]) -> list[Pair]:
    """A golden episode of the instance ≻ the agent's failures. ETO: Song et al. 2024, arXiv:2403.02502."""
    return [Pair(*both, "expert") for both in product(golden, [e for e in _free(group) if not e.solved])]


def stepwise(group: Sequence[Episode], golden: Sequence[Episode]) -> list[Pair]:
    """After the same golden steps, an action from which the page was solved ≻ one from which it was not.

    ETO, appendix C: `forced` steps were given, the action behind them was the agent's own choice and the rest
    its own doing; the golden episode's own next action is one that leads to a solution. Both sides end with
    the action compared. Differs from the paper: one step is drawn for each instance, and an action that led
    to a success as well, whatever was thought before it, is no mistake and is not rejected.
    """
    pairs, begun = [], {}
    for episode in group:
        if len(episode.turns) > episode.forced:
            begun.setdefault(words(episode)[:episode.forced], []).append(episode)
    for given, here in sorted(begun.items(), key=lambda item: len(item[0])):
        t = len(given)
        shown = [e for e in golden if len(e.turns) > t and words(e)[:t] == given]  # there may be several ways
        good = [e for e in here if e.solved] + shown
        led = {e.turns[t].action for e in good} - {None}
        bad = [e for e in here if not e.solved and e.turns[t].action not in led]
        pairs += [cut(Pair(*both, "stepwise"), t + 1) for both in product(good, bad)]
    return different(pairs)


def progress(group: Sequence[Episode], golden: Sequence[Episode]) -> list[Pair]:
    """Where nothing was solved: the failure that came nearer ≻ the other, if page or form say how near."""
    failed = [e for e in _free(group) if e.progress is not None] if not any(e.solved for e in group) else []
    return [Pair(a, b, "progress") for a, b in product(failed, failed) if a.progress > b.progress]


SOURCES = {"outcome": (outcome,), "expert": (expert,), "stepwise": (stepwise,),
           "mixture": (outcome, expert, stepwise)}
NEEDS_GOLDEN = ("expert", "stepwise", "mixture")


def make_pairs(episodes: Sequence[Episode], per_instance: int, seed: int, until: str = "end",
               source: str = "outcome", golden: Sequence[Episode] = (), per_task: int | None = None,
               clean: bool = False, dense: bool = False) -> list[Pair]:
    """Up to `per_instance` pairs from each instance that has two sides, in a seeded random order.

    Whole episodes count as often as they were played. Sources take turns; within one, no success is used
    twice before all successes of its instance were, and no failure before all failures. `until`: "turn" cuts
    both behind the first turn in which they differ, "end" and "token" leave them whole (for "token",
    `until_difference` cuts the rejected where the tokens are known). `golden`: solved episodes of the same
    instances, for the sources that need them. `per_task`: pairs of a task at most, as evenly from its
    instances as can be. `clean`: without `noisy` failures. `dense`: `progress` is a source besides. Raises
    NothingToLearn when no pair can be made.
    """
    if until not in ("end", "turn", "token"):
        raise ValueError(f"until must be end, turn or token, got {until!r}")
    sources = SOURCES[source] + ((progress,) if dense else ())
    golden_of = by_instance([episode for episode in golden if episode.solved and episode.turns])
    groups = by_instance(episodes)
    ranked: list[tuple[int, Pair]] = []  # its place among the pairs of its instance
    for instance, group in groups.items():
        shuffle = random.Random(f"{seed} {instance}").shuffle
        solved = [e for e in group if e.solved and e.turns]
        unsolved = [e for e in group if not e.solved and e.turns and not (clean and noisy(e))]
        shuffle(solved)
        shuffle(unsolved)
        left = [pair for make in sources for pair in make(solved + unsolved, golden_of.get(instance, []))
                if words(pair.chosen) != words(pair.rejected)]
        if until == "turn":  # cut short, pairs that differed later only have become one
            left = different([until_divergence(pair) for pair in left])
        ranked += enumerate(_in_turn(left, per_instance))
    if not ranked:
        always = sum(all(e.solved for e in group) for group in groups.values())
        never = sum(not any(e.solved for e in group) for group in groups.values())
        raise NothingToLearn(f"no pair in {len(groups)} groups ({always} solved every time, {never} never): "
                              "nothing to prefer; try more instances, larger groups, a higher temperature, "
                              "or a better start (more SFT)")
    pairs = [pair for _, pair in ranked]
    if per_task is not None:
        pairs = []
        for task in dict.fromkeys(pair.chosen.task for _, pair in ranked):
            own = [(rank, pair) for rank, pair in ranked if pair.chosen.task == task]
            random.Random(f"{seed} {task}").shuffle(own)
            pairs += [pair for _, pair in sorted(own, key=lambda both: both[0])[:per_task]]
    random.Random(seed).shuffle(pairs)
    return pairs


def _in_turn(left: list[Pair], count: int) -> list[Pair]:
    """The first `count` of an instance's pairs: sources in turn, of each what was used least so far."""
    used: Counter = Counter()
    taken: list[Pair] = []

    def wear(pair: Pair) -> tuple[int, int]:
        return used[pair.source], sum(used[e.policy, e.forced, e.index] for e in (pair.chosen, pair.rejected))

    for _ in range(min(count, len(left))):
        best = min(left, key=wear)
        used.update([best.source, *((e.policy, e.forced, e.index) for e in (best.chosen, best.rejected))])
        left.remove(best)
        taken.append(best)
    return taken


def by_instance(episodes: Sequence[Episode]) -> dict[tuple[str, int], list[Episode]]:
    """The groups: episodes of each (task, seed), in the order they come."""
    groups: dict[tuple[str, int], list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.instance, []).append(episode)
    return groups


def unpaired(episodes: Sequence[Episode], seed: int) -> list[Unpaired]:
    """All successes as desirable and all failures as undesirable examples, side by side in two columns.

    The rarer kind comes again until there are as many as of the other: each kind has the same weight. Which
    two meet is nothing to the loss; those of an instance do where they can, because they share tokens.
    """
    sides = {kind: [e for e in _free(episodes) if e.solved == kind and e.turns] for kind in (True, False)}
    if not all(sides.values()):
        raise NothingToLearn("all episodes were solved, or none: KTO needs both kinds")
    both, alone = [], {True: [], False: []}
    for group in by_instance([*sides[True], *sides[False]]).values():
        good, bad = [e for e in group if e.solved], [e for e in group if not e.solved]
        both += map(Unpaired, good, bad)
        alone[True] += good[len(bad):]
        alone[False] += bad[len(good):]
    draw = random.Random(seed)
    for n in range(max(map(len, alone.values()))):
        both.append(Unpaired(*(alone[kind][n] if n < len(alone[kind]) else draw.choice(sides[kind])
                               for kind in (True, False))))
    draw.shuffle(both)
    return both
