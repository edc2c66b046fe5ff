"""Statistics of recorded runs: success over training seeds, and two rows compared on the same instances.

A study's line is one run: `{"arm": row, "seed": seed, suite: {"solved": {task: "0110..."}, ...}}`. The verdicts of
a task stand in the same order for every row and seed.
"""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, mean, stdev
from typing import NamedTuple

from envs.miniwob.experts.by_task import EXPERTS
from minidpo.results.success import mcnemar_exact

RESULTS = Path(__file__).parent / "results"
Study = dict[str, dict[int, dict]]  # row -> seed -> line
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # 1 to 9 degrees, 97.5 %
SIBLINGS = {
    "drag-circle": "drag-shapes",
    "drag-single-shape": "drag-shapes",
    "multi-orderings": "multi-layouts",
    "enter-time": "enter-date",
    "click-shape": "count-shape",
    "identify-shape": "count-shape",
    "text-editor": "highlight-text",
    "simple-algebra": "simple-arithmetic",
    "phone-book": "social-media",
}


class Spread(NamedTuple):
    """A mean over seeds and its 95 % interval, which one seed does not have."""

    mean: float
    low: float | None
    high: float | None


class Comparison(NamedTuple):
    """Instances won, lost and played by both rows, once for each seed, and each seed's gain in points."""

    won: int
    lost: int
    n: int
    gains: tuple[float, ...]

    @property
    def points(self) -> float:
        return 100 * (self.won - self.lost) / self.n

    @property
    def p(self) -> float:
        return mcnemar_exact(self.lost, self.won)


def recorded(name: str) -> list[dict]:
    """The lines of results/NAME.jsonl."""
    path = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def studied(lines: Sequence[dict]) -> Study:
    """Lines by row and seed, seeds in order. Raises ValueError if a run was recorded twice."""
    study: Study = {}
    for line in sorted(lines, key=lambda line: line["seed"]):
        seeds = study.setdefault(line["arm"], {})
        if line["seed"] in seeds:
            raise ValueError(
                f"{line['arm']}, seed {line['seed']}, was recorded twice: delete a line"
            )
        seeds[line["seed"]] = line
    return study


def student_t(degrees: int) -> float:
    """The 97.5 % point of Student's t (Abramowitz and Stegun 1964, 26.7.5; at most 0.2 % too low).

    >>> round(student_t(1), 2), round(student_t(14), 2), round(student_t(10**6), 2)
    (12.71, 2.14, 1.96)
    """
    if degrees <= len(T95):
        return T95[degrees - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def spread(values: Sequence[float]) -> Spread:
    """Mean ± t · s / √n of the values of n seeds."""
    n, middle = len(values), mean(values)
    if n == 1:
        return Spread(middle, None, None)
    half = student_t(n - 1) * stdev(values) / n**0.5
    return Spread(middle, middle - half, middle + half)


def share(rates: Sequence[float]) -> Spread | None:
    """The `spread` of rates, its interval cut at 0 and 1; None without rates."""
    found = spread(rates) if rates else None
    if found is None or found.low is None:
        return found
    return found._replace(low=max(0.0, found.low), high=min(1.0, found.high))


def success(study: Study, row: str, suite: str) -> Spread | None:
    """Success of a row over its seeds; None if none played the suite."""
    played = ["".join(line[suite]["solved"].values()) for line in of(study, row, suite).values()]
    return share([verdicts.count("1") / len(verdicts) for verdicts in played])


def of(study: Study, row: str, suite: str) -> dict[int, dict]:
    """The lines of a row that have this suite, by seed."""
    return {seed: line for seed, line in study.get(row, {}).items() if suite in line}


def compared(study: Study, before: str, after: str, suite: str) -> Comparison | None:
    """`after` against `before` on the instances of their common seeds; None if they have no seed in common.

    Raises ValueError if the two were played on different instances.
    """
    first, last = of(study, before, suite), of(study, after, suite)
    won, lost, n, gains = 0, 0, 0, []
    for seed in sorted(first.keys() & last.keys()):
        a, b = first[seed][suite]["solved"], last[seed][suite]["solved"]
        if {task: len(text) for task, text in a.items()} != {
            task: len(text) for task, text in b.items()
        }:
            raise ValueError(f"{before} and {after}, seed {seed}, played different instances")
        couples = [couple for task in a for couple in zip(a[task], b[task])]
        gained, given_up = couples.count(("0", "1")), couples.count(("1", "0"))
        won, lost, n = won + gained, lost + given_up, n + len(couples)
        gains.append(100 * (gained - given_up) / len(couples))
    return Comparison(won, lost, n, tuple(gains)) if n else None


def verdict(found: Comparison) -> str:
    """better or worse if p < 0.01 and the interval of the seeds' gains leaves out 0; else open or no difference.

    p does not cover how trainings differ, so an interval with 0 leaves the question open. One seed has none, and
    its verdict is of that training alone.
    """
    gains = spread(found.gains)
    if found.p >= 0.01:
        return "no difference"
    if gains.low is not None and gains.low <= 0 <= gains.high:
        return "open"
    return "better" if gains.mean > 0 else "worse"


# ---- families of tasks ----


def families(tasks: Sequence[str]) -> list[list[str]]:
    """The tasks in families, in their order. Siblings: the first two words of their names agree, or the same
    expert solves them, or SIBLINGS says so.

    >>> families(["click-tab-2-hard", "multi-orderings", "click-tab", "multi-layouts", "click-collapsible-2"])
    [['click-tab-2-hard', 'click-tab', 'click-collapsible-2'], ['multi-orderings', 'multi-layouts']]
    """
    found: list[tuple[set, list[str]]] = []
    for task in tasks:
        words = "-".join(SIBLINGS.get(task, task).split("-")[:2])
        marks, members = {words, EXPERTS.get(task, words)}, [task]
        for other in [family for family in found if family[0] & marks]:
            found.remove(other)
            marks, members = marks | other[0], other[1] + members
        found.append((marks, members))
    return sorted((members for _, members in found), key=lambda family: tasks.index(family[0]))


def split(tasks: Sequence[str], number: int, parts: int = 4) -> tuple[list[str], list[str]]:
    """Tasks to train on and tasks to hold out, by whole families: of `parts` shares the one with this number.

    The families are shuffled once and dealt out, the largest first, each to the smallest share so far.
    """
    groups = families(sorted(tasks))
    if len(groups) < parts:
        raise ValueError(f"{len(groups)} families of tasks make no {parts} shares: name more tasks")
    random.Random(0).shuffle(groups)
    shares: list[list[str]] = [[] for _ in range(parts)]
    for group in sorted(groups, key=lambda group: -len(group)):
        min(shares, key=len).extend(group)
    held_out = set(shares[number - 1])
    return [task for task in tasks if task not in held_out], [
        task for task in tasks if task in held_out
    ]


def task_gains(
    couples: Sequence[tuple[dict, dict]], tasks: Sequence[str], count: int
) -> dict[str, float]:
    """Each task's gain in points on its first `count` instances, from one agent's verdicts to another's: the
    mean over the couples that played it."""
    gains = {}
    for task in tasks:
        played = [(a[task][:count], b[task][:count]) for a, b in couples if task in a]
        gains[task] = fmean(100 * (b.count("1") - a.count("1")) / len(a) for a, b in played)
    return gains


def over_families(gains: dict[str, float]) -> Spread:
    """The mean of the tasks' gains with its 95 % interval over families: those are drawn whole, because the
    tasks of one are alike, as are the instances of a task, which McNemar's test takes for independent."""
    gain, drawn = fmean(gains.values()), families(sorted(gains))
    apart = [sum(gains[task] - gain for task in family) for family in drawn]
    n, half = len(drawn), 100.0  # of one family nothing is known
    if n > 1:
        half = student_t(n - 1) * math.sqrt(n / (n - 1) * sum(a * a for a in apart)) / len(gains)
    return Spread(gain, gain - half, gain + half)
