"""The study in numbers: success rates over seeds, and rows compared on the instances that both played.

Pure functions of the lines that run.py records; document.py writes them down.
"""

from statistics import mean, stdev
from typing import NamedTuple

from minidpo.config import DPO

from benchmarks.study.grid import ALONE, BASE
from envs.miniwob.tasks import SUITES
from minidpo.data.pairs import NEEDS_GOLDEN
from minidpo.learning.preferences import pair_loss_of
from minidpo.results.success import mcnemar_exact

Study = dict[str, dict[int, dict]]  # row ("arm") -> seed -> line
T95 = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
)  # Student's t for 1 to 9 degrees, 97.5 %


class Spread(NamedTuple):
    """A mean over seeds and its 95 % interval; one seed has no interval."""

    mean: float
    low: float | None
    high: float | None
    seeds: int

    def word(self) -> str:
        """The verdict on a difference: `no difference` unless its interval leaves out 0."""
        return verdict(self.mean, self.low is not None and (self.low > 0 or self.high < 0))


class Comparison(NamedTuple):
    """Instances won, lost and played by both rows, each once a seed; and each seed's gain in points."""

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

    def word(self) -> str:
        """The verdict on a gain. p does not cover how trainings differ, so the interval of the seeds' gains
        must leave out 0, too; one seed has none, and its verdict is of that training alone."""
        if self.p >= 0.01:
            return "no difference"
        gains = spread([*self.gains])
        return (
            verdict(gains.mean, True)
            if gains.low is None or gains.low > 0 or gains.high < 0
            else ("0 in the interval")
        )


def verdict(gain: float, clear: bool) -> str:
    """`better` or `worse` if the gain is clear; `no difference` means that these episodes show none."""
    return ("better" if gain > 0 else "worse") if clear else "no difference"


def studied(lines: list[dict]) -> Study:
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


def solved(line: dict, suite: str) -> dict[str, str]:
    """Each task's verdicts as a string of 0 and 1; {} if not played. `report` is a part of `demo`."""
    played = line.get("demo" if suite == "report" else suite, {"solved": {}})["solved"]
    return {task: played[task] for task in played if suite != "report" or task in SUITES["report"]}


def student_t(degrees: int) -> float:
    """The 97.5 % point of Student's t (Abramowitz and Stegun 1964, 26.7.5; from 10 degrees on 0.2 % at most
    too low, and below those from a table).

    >>> round(student_t(1), 2), round(student_t(14), 2), round(student_t(10**6), 2)
    (12.71, 2.14, 1.96)
    """
    z = 1.959964
    return (
        T95[degrees - 1]
        if degrees <= len(T95)
        else (z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2))
    )


def spread(values: list[float]) -> Spread:
    """Mean ± t · s / √n of the values of n seeds."""
    n = len(values)
    if n == 1:
        return Spread(values[0], None, None, 1)
    half = student_t(n - 1) * stdev(values) / n**0.5
    return Spread(mean(values), mean(values) - half, mean(values) + half, n)


def share(rates: list[float]) -> Spread | None:
    """The `spread` of rates, its interval cut at 0 and 1; None if there are no rates."""
    found = spread(rates) if rates else None
    if found is None or found.low is None:
        return found
    return found._replace(low=max(0.0, found.low), high=min(1.0, found.high))


def success(study: Study, arm: str, suite: str) -> Spread | None:
    """Success rate over the row's seeds; None if the suite was not played."""
    played = filter(
        None, ("".join(solved(line, suite).values()) for line in study.get(arm, {}).values())
    )
    return share([verdicts.count("1") / len(verdicts) for verdicts in played])


def compared(
    study: Study, before: str | None, after: str, suite: str = "demo"
) -> Comparison | None:
    """`after` against `before` on the instances of their common seeds; None if they have no seed in common.

    Raises ValueError if the two were evaluated on different instances.
    """
    won, lost, n, gains = 0, 0, 0, ()
    for seed in sorted(study.get(before, {}).keys() & study.get(after, {}).keys()):
        first, last = (solved(study[arm][seed], suite) for arm in (before, after))
        if not first or not last:
            continue
        if any(len(first.get(task, "")) != len(last.get(task, "")) for task in first | last):
            raise ValueError(
                f"{before} and {after}, seed {seed}, were evaluated on different instances"
            )
        couples = [couple for task in first for couple in zip(first[task], last[task], strict=True)]
        gained, given_up = couples.count(("0", "1")), couples.count(("1", "0"))
        won, lost, n = won + gained, lost + given_up, n + len(couples)
        gains += (100 * (gained - given_up) / len(couples),)
    return Comparison(won, lost, n, gains) if n else None


def at_round(study: Study, arm: str, number: int) -> dict[int, float]:
    """Mean validation success after a round (0: of the first policy), by seed."""
    return {
        seed: line["validation"][number]
        for seed, line in study.get(arm, {}).items()
        if number < len(line.get("validation", []))
    }


def difference(before: dict[int, float], after: dict[int, float]) -> Spread | None:
    """`after` minus `before` over their common seeds; None without any."""
    common = sorted(before.keys() & after.keys())
    return spread([after[seed] - before[seed] for seed in common]) if common else None


def first_policy(arm: str) -> bool:
    """Whether a row evaluates the policy that a loop begins with, before it learns any preference."""
    return arm == "sft" or arm.startswith("sft-")


def sft_of(arm: str) -> str | None:
    """The row of the policy that a row began with. `sft-best` is `sft` with several tries."""
    if first_policy(arm):
        return "sft" if arm == "sft-best" else None
    return f"sft-{arm}" if arm in ALONE else "sft"


def home_of(arm: str) -> str:
    """The row whose run made the policy of `arm`."""
    alone = next((alone for alone in ALONE if arm in (alone, f"sft-{alone}")), None)
    return alone or (BASE if first_policy(arm) else arm)


def config_of(study: Study, arm: str) -> dict | None:
    """The settings of the run that made a row's policy; None if that run is not recorded."""
    return next(iter(study[home_of(arm)].values()))["config"] if home_of(arm) in study else None


def cut(study: Study, arm: str) -> str | None:
    """Where a row's pairs are cut: end, turn or token; None if it makes no pairs or was not recorded."""
    config = config_of(study, arm)
    pairs = config and config["learn"] == "dpo" and not first_policy(arm)
    return pair_loss_of(DPO(**config["dpo"])).until if pairs else None


def cut_elsewhere(study: Study, before: str, arms) -> dict[str, list[str]]:
    """The rows that cut their pairs elsewhere than `before` does, by where they cut them."""
    usual, elsewhere = cut(study, before), {}
    for arm in arms:
        where = cut(study, arm)
        if None not in (usual, where) and where != usual:
            elsewhere.setdefault(where, []).append(arm)
    return elsewhere


def needs(study: Study, arm: str) -> tuple[int, int] | None:
    """Golden episodes (or answers) and the most explored ones, a task; None if the row was not recorded."""
    config = config_of(study, arm)
    if config is None:
        return None
    rounds = 0 if first_policy(arm) else config["rounds"]
    pairs = config["dpo"]["pairs"] if config["learn"] == "dpo" else config["learn"]
    # of each explored instance a golden episode, or the expert's answers in so many states
    shown = (config["states"] or config["group"]) if pairs == "dagger" else pairs in NEEDS_GOLDEN
    selfplay = (
        0 if config["demonstrations"] else 1
    )  # a first exploration in place of demonstrations
    return (
        config["demonstrations"] + rounds * config["instances"] * shown,
        (rounds + selfplay) * config["instances"] * config["group"],
    )


def recipes(study: Study, golden: int = 5) -> dict[str, float]:
    """Mean on the demo suite of each row that needs no oracle and at most `golden` golden episodes a task."""
    return {
        arm: success(study, arm, "demo").mean
        for arm in study
        if not arm.endswith("-best") and (needs(study, arm) or (golden + 1,))[0] <= golden
    }


def figures(lines: list[dict]) -> dict[str, float]:
    """The flat figures of results/study.json: rates as shares of 1, gains in points."""
    study, found = studied(lines), {}
    for arm in study:
        name, demo, unseen = (
            arm.replace("-", "_"),
            success(study, arm, "demo"),
            success(study, arm, "unseen"),
        )
        found |= {f"{name}_demo_mean": demo.mean, f"{name}_seeds": demo.seeds}
        if demo.low is not None:
            found |= {f"{name}_demo_low": demo.low, f"{name}_demo_high": demo.high}
        if unseen:
            found[f"{name}_unseen_mean"] = unseen.mean
        if gain := compared(study, sft_of(arm), arm):
            found |= {f"{name}_vs_sft_points": gain.points, f"{name}_vs_sft_p": gain.p}
    return found
