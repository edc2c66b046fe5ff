"""Fills the marked tables in README and docs from benchmarks/results/. Numbers only: sentences are written by hand.

    python benchmarks/tables.py          write all tables anew
    python benchmarks/tables.py --list   the tables that there are

A document asks for a table by its name and what it is to hold, or by a template of its own, in which {RESULT[FIGURE]}
is a figure of results/RESULT.json:

    <!-- table rows study sft dpo rft -->
    <!-- end -->

    <!-- table figures
    | what | MiB |
    |---|---|
    | our head | {head_memory[ours_4096_mib]:,.0f} |
    -->
    <!-- end -->
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.rates import (  # noqa: E402
    RESULTS,
    Comparison,
    Spread,
    Study,
    compared,
    over_families,
    recorded,
    spread,
    studied,
    success,
    task_gains,
    verdict,
)
from benchmarks.study import BASE, FIRST, ROWS  # noqa: E402
from envs.miniwob.tasks import SUITES  # noqa: E402
from minidpo.acting.causes import CAUSES  # noqa: E402
from minidpo.data.interval import wilson  # noqa: E402
from minidpo.system.files import read_json  # noqa: E402
from minidpo.system.result_file import read_result  # noqa: E402

Table = tuple[list[str], list[list[str]]]  # head, rows
MARK = re.compile(r"(<!-- table (.*?)\s?-->\n).*?(<!-- end -->)", re.DOTALL)
INSTANCES = {"all": 10, "webgum-56": 25}  # held-out instances of each task of MiniWoB++
V1 = "v1"  # commit cf007b6


def filled(text: str) -> str:
    """The text with all its marked tables as they are now. Raises ValueError for a name that is no table."""

    def table(match: re.Match) -> str:
        name, *words = match[2].split()
        if name == "figures":
            template = match[2].removeprefix("figures").strip()
            return match[1] + template.format_map(Results()) + "\n" + match[3]
        if name == "tasks":  # by envs/miniwob/table.py, because its examples are on the pages
            return match[0]
        if name not in TABLES:
            raise ValueError(f"no table is called {name!r}; there are {', '.join(TABLES)}")
        head, rows = TABLES[name](*words)
        lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
        return match[1] + "\n".join(lines) + "\n" + match[3]

    return MARK.sub(table, text)


class Results(dict):
    """Results by name, read when they are asked for; figures stand beside a result's other entries."""

    def __missing__(self, name: str) -> dict:
        result = read_json(RESULTS / f"{name}.json")
        return result | result.get("figures", {})


# ---- cells ----


def rate(found: Spread | None) -> str:
    """A share in per cent, with its interval."""
    if found is None:
        return "-"
    interval = "" if found.low is None else f" ({100 * found.low:.1f}–{100 * found.high:.1f})"
    return f"{100 * found.mean:.1f}{interval}"


def counted(solved: int, n: int) -> str:
    """The same of n instances, with Wilson's interval."""
    return rate(Spread(solved / n, *wilson(solved, n)))


def points(found: Spread) -> str:
    interval = "" if found.low is None else f" ({found.low:+.1f} to {found.high:+.1f})"
    return f"{found.mean:+.1f}{interval}"


def gain(found: Comparison | None) -> str:
    """Points with their interval over seeds, in bold if the verdict is better or worse."""
    if found is None:
        return "-"
    cell = points(spread(found.gains))
    return f"**{cell}**" if verdict(found) in ("better", "worse") else cell


def seeds_of(lines: dict[int, dict]) -> str:
    """Which seeds, as "1 - 3" or "1, 4, 5"."""
    seeds = sorted(lines)
    in_a_row = len(seeds) > 2 and seeds == list(range(seeds[0], seeds[-1] + 1))
    return f"{seeds[0]} - {seeds[-1]}" if in_a_row else ", ".join(map(str, seeds))


# ---- runs that anyone can enter ----


def entries() -> Table:
    """The runs that results/entries.json names: model, command and so on from there, figures from their result.json."""
    table = []
    for entry in read_json(RESULTS / "entries.json")["rows"]:
        result = read_result(RESULTS / f"{entry['result']}.json")
        agents = [*result["agents"].values()]
        first, left = agents[0]["all"], agents[-1]["all"]
        found = result.get("comparison", {"only_after": 0, "only_before": 0})
        curve = result["validation"]
        curve = curve.values() if isinstance(curve, dict) else curve
        table.append(
            [
                result["date"],
                entry["model"],
                entry["algorithm"],
                result.get("commit") or "-",
                str(result["seed"]),
                ", ".join(f"{100 * success:.1f}" for success in curve),
                f"{first['n']:,}",
                rate(Spread(first["success"], first["low"], first["high"])),
                rate(Spread(left["success"], left["low"], left["high"])),
                f"{found['only_after']} / {found['only_before']}",
                f"{sum(result['seconds'].values()) / 60:.0f}",
                result["machine"].removeprefix("Linux x86_64, "),
                entry["command"],
                f"`{entry['result']}`",
            ]
        )
    head = ["date", "model", "algorithm", "commit", "seed", "validation, %", "n", "before, %"]
    head += ["after, %", "won / lost", "minutes", "hardware", "command", "result file"]
    return head, table


# ---- the studies ----


def rows_of(name: str, *rows: str) -> Table:
    """Success of a study's rows, and their gains over the policy that they began with and over `dpo`."""
    study, (suite, other) = studied(recorded(name)), SUITES_OF[name]
    head = ["row", "today", "seeds", "golden", "explored", f"{suite}, %", "over its start"]
    head += [f"over `{BASE}`", f"{other}, %"]
    table = []
    for row in rows or study:
        elsewhere = success(study, row, other)
        table.append(
            [
                f"`{row}`",
                page_of(name, row),
                seeds_of(study[row]),
                *needs(study, row),
                rate(success(study, row, suite)),
                gain(compared(study, start_of(row), row, suite)),
                gain(None if row == BASE else compared(study, BASE, row, suite)),
                f"{100 * elsewhere.mean:.1f}" if elsewhere else "-",
            ]
        )
    return head, table


def page_of(name: str, row: str) -> str:
    """The algorithm that runs a row today (`benchmarks/study.py command` prints how), or v1."""
    homes = {first: row for row, first in FIRST.items()}
    return ROWS[name].get(homes.get(row, row), (V1, ""))[0]


def needs(study: Study, row: str) -> tuple[str, str]:
    """Golden episodes (or answers) and explored ones, a task. v1's lines tell them by their settings."""
    line = next(iter(study[row].values()))
    if "golden" in line:
        return f"{line['golden']:.4g}", f"{line['explored']:.4g}"
    home = {first: row for row, first in FIRST.items()}.get(row, row).replace("sft-best", BASE)
    config = next(iter(study[home].values()))["config"]
    learn = config["dpo"]["pairs"] if config["learn"] == "dpo" else config["learn"]
    rounds = 0 if row.startswith("sft") else config["rounds"]
    shown = learn in ("expert", "eto", "stepwise", "mixture", "segments")
    if learn == "dagger":
        shown = config["states"]
    explored = rounds + (config["demonstrations"] == 0)  # self-play explores before it imitates
    golden = config["demonstrations"] + rounds * config["instances"] * shown
    return str(golden), str(explored * config["instances"] * config["group"])


def start_of(row: str) -> str:
    """The row of the policy that a row began with."""
    if row.startswith("sft"):
        return "sft" if row == "sft-best" else ""
    return FIRST.get(row, "sft")


# ---- all of MiniWoB++ ----


def whole() -> dict:
    """The line of the agents that learned all tasks with an expert."""
    return next(line for line in recorded("miniwob") if line["part"] == "whole")


def solved(verdicts: dict[str, str], tasks: Sequence[str], count: int) -> str:
    return "".join(verdicts[task][:count] for task in tasks)


def miniwob_agents() -> Table:
    """How each agent was made, its success, and the points over `sft` with their interval over families."""
    line, table = whole(), []
    for agent, verdicts in line["agents"].items():
        made = line["made"].get(agent, {"after": [], "how": "SFT", "learned": ""})
        golden = re.findall(r"([\d,]+) golden", made["learned"])
        cells = []
        for suite, count in INSTANCES.items():
            text = solved(verdicts, SUITES[suite], count)
            gains = task_gains([(line["agents"]["sft"], verdicts)], SUITES[suite], count)
            cells.append(counted(text.count("1"), len(text)))
            cells.append("-" if agent == "sft" else points(over_families(gains)))
        after = ", ".join(f"`{other}`" for other in made["after"]) or "the base"
        table.append([f"`{agent}`", after, made["how"], "".join(golden) or "0", *cells])
    head = ["agent", "began with", "and then", "golden episodes"]
    for suite in INSTANCES:
        head += [f"{suite}, %", "points over `sft`"]
    return head, table


def miniwob_ladder(*agents: str) -> Table:
    """Some of our agents among published ones (results/miniwob_published.json), by list and success."""
    line, ladder = whole(), []
    for who, weights, learned, tasks, percent, differs in read_json(
        RESULTS / "miniwob_published.json"
    )["rows"]:
        ladder.append((tasks, percent, [who, weights, learned, tasks, f"{percent:.1f}", differs]))
    for suite, count in INSTANCES.items():
        for agent in agents:
            text = solved(line["agents"][agent], SUITES[suite], count)
            made = line["made"].get(agent, {"learned": ""})
            learned = ", ".join(filter(None, ["5 demonstrations a task", made["learned"]]))
            row = [f"**minidpo, {agent}**", "0.135 B", learned, suite]
            row += [counted(text.count("1"), len(text)), f"n = {len(text):,}, 1 seed"]
            ladder.append((suite, 100 * text.count("1") / len(text), row))
    head = ["who", "weights", "learned from", "tasks", "success, %", "how it differs, source"]
    return head, [row for *_, row in sorted(ladder, key=lambda each: each[:2])]


def miniwob_unseen() -> Table:
    """Tasks never trained on, by run and over all: SFT's success and what training on other tasks changed."""
    lines = [line for line in recorded("miniwob") if line["part"] != "whole"]
    table = []
    for name, some in [*((f"{e['part']}, seed {e['seed']}", [e]) for e in lines), ("all", lines)]:
        couples = [tuple(line["agents"].values())[:2] for line in some]
        tasks = list(dict.fromkeys(task for before, _ in couples for task in before))
        sft = [
            before[t].count("1") / len(before[t])
            for t in tasks
            for before, _ in couples
            if t in before
        ]
        found = over_families(task_gains(couples, tasks, INSTANCES["all"]))
        recipe = ", ".join(map(str, some[0]["recipe"])) if len(some) == 1 else ""
        table.append([name, recipe, str(len(tasks)), f"{100 * fmean(sft):.1f}", points(found)])
    return ["run", "SFT steps, rounds, each round", "tasks", "SFT, %", "gain, points"], table


def miniwob_causes(*agents: str) -> Table:
    """How many held-out episodes of some agents failed for which cause."""
    causes = whole()["causes"]
    table = [
        [name, *(str(causes[agent].get(name, 0)) for agent in agents), meaning]
        for name, meaning in CAUSES.items()
        if any(name in causes[agent] for agent in agents)
    ]
    return ["cause", *(f"`{agent}`" for agent in agents), "meaning"], table


def miniwob_tasks(before: str, after: str) -> Table:
    """All tasks with their success in per cent before and after, by their success after."""
    line = whole()
    lowest = {"100": 100, "75 to 99": 75, "50 to 74": 50, "1 to 49": 1, "0": 0}
    bands: dict[str, list[str]] = {band: [] for band in lowest}
    for task in SUITES["all"]:
        texts = [line["agents"][agent][task] for agent in (before, after)]
        first, last = (100 * text.count("1") / len(text) for text in texts)
        band = next(band for band, percent in lowest.items() if last >= percent)
        star = "" if task in line["trained_on"] else "\\*"
        change = "" if band in ("100", "0") and first == last else f" {first:.0f}→{last:.0f}"
        bands[band].append(f"{task}{star}{change}")
    rows = [[band, str(len(tasks)), ", ".join(tasks)] for band, tasks in bands.items()]
    return [f"`{after}`, %", "tasks", f"in per cent, `{before}`→`{after}` where not the same"], rows


SUITES_OF = {"study": ("demo", "unseen"), "learners": ("greedy", "sampled")}
TABLES: dict[str, Callable[..., Table]] = {
    "entries": entries,
    "rows": rows_of,
    "miniwob-agents": miniwob_agents,
    "miniwob-ladder": miniwob_ladder,
    "miniwob-unseen": miniwob_unseen,
    "miniwob-causes": miniwob_causes,
    "miniwob-tasks": miniwob_tasks,
}


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="list the tables and write none")
    if parser.parse_args().list:
        for name, function in TABLES.items():
            print(f"{name:16} {function.__doc__.splitlines()[0]}")
        return
    for path in documents():
        text = path.read_text(encoding="utf-8")
        if filled(text) != text:
            path.write_text(filled(text), encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
