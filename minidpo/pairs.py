"""16. Pairs: a success is preferred to a failure of the same instance, and of nothing else.

Reward differences across instances say how hard a page is, not how well it was played. So episodes are
grouped by (task, seed), and only a group with both verdicts yields pairs. What the two have in common
cancels in the loss; where they first differ is the decision that the verdict is about. Next: 17 tree.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from minidpo.chat import Dialogue
from minidpo.episodes import Episode


@dataclass(frozen=True)
class Pair:
    """chosen ≻ rejected on one instance; the reward of the first is higher."""

    chosen: Episode
    rejected: Episode

    def __post_init__(self):
        c, r = self.chosen, self.rejected
        if c.instance != r.instance:
            raise ValueError("a pair needs one instance, "
                             f"got {c.task} seed {c.seed} and {r.task} seed {r.seed}")
        if not (c.solved and not r.solved):
            raise ValueError(f"{c.task} seed {c.seed}: the chosen must be solved and the rejected not, "
                             f"got {c.outcome} and {r.outcome}")


def words(episode: Episode) -> tuple[str, ...]:
    """All that the agent said: two episodes that agree in it are the same to the model."""
    return tuple(turn.answer for turn in episode.turns)


def divergence(a: Episode, b: Episode) -> int:
    """The first turn, from 0, in which the two agents said something else; before it all is the same."""
    for n, (left, right) in enumerate(zip(words(a), words(b))):
        if left != right:
            return n
    return min(len(a.turns), len(b.turns))


def until_divergence(pair: Pair) -> Pair:
    """Both episodes cut behind the first turn in which they differ: what came later has other causes."""
    keep = divergence(pair.chosen, pair.rejected) + 1
    return Pair(*(replace(episode, turns=episode.turns[:keep]) for episode in (pair.chosen, pair.rejected)))


def make_pairs(episodes: Sequence[Episode], per_instance: int, seed: int, until: str = "end") -> list[Pair]:
    """Up to `per_instance` pairs from each instance that was both solved and not, in a seeded random order.

    Whole episodes count as often as they were played. No success is used twice before all successes of its
    instance were used once, and no failure before all failures. `until`: "turn" cuts both behind the first
    turn in which they differ, "end" and "token" leave them whole (for "token", `until_difference` cuts the
    rejected where the tokens are known). Raises ValueError when no instance has
    both verdicts.
    """
    if until not in ("end", "turn", "token"):
        raise ValueError(f"until must be end, turn or token, got {until!r}")
    groups: dict[tuple[str, int], list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.instance, []).append(episode)
    pairs: list[Pair] = []
    for instance, group in groups.items():
        solved = [e for e in group if e.solved and e.turns]
        unsolved = [e for e in group if not e.solved and e.turns]
        shuffle = random.Random(f"{seed} {instance}").shuffle
        shuffle(solved)
        shuffle(unsolved)
        left = [Pair(*both) for both in product(solved, unsolved) if words(both[0]) != words(both[1])]
        if until == "turn":  # cut short, pairs that differed later only have become one
            cut = map(until_divergence, left)
            left = list({(words(pair.chosen), words(pair.rejected)): pair for pair in cut}.values())
        used: Counter = Counter()
        for _ in range(min(per_instance, len(left))):
            best = min(left, key=lambda pair: used[pair.chosen.index] + used[pair.rejected.index])
            used.update((best.chosen.index, best.rejected.index))
            left.remove(best)
            pairs.append(best)
    if not pairs:
        always = sum(all(e.solved for e in group) for group in groups.values())
        raise ValueError(f"all {len(groups)} groups were solved or failed every time ({always} solved, "
                         f"{len(groups) - always} failed): nothing to prefer; try more instances, larger "
                         "groups, a higher temperature, or a better start (more SFT)")
    random.Random(seed).shuffle(pairs)
    return pairs


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
