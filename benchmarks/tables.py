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

import re
import sys
from collections import Counter
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
    share,
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
from minidpo.results.success import mcnemar_exact  # noqa: E402
from minidpo.system.files import read_json  # noqa: E402

Table = tuple[list[str], list[list[str]]]  # head, rows
MARK = re.compile(r"(<!-- table (.*?)\s?-->\n).*?(<!-- end -->)", re.DOTALL)
INSTANCES = {"all": 10, "webgum-56": 25}  # held-out instances of each task of MiniWoB++
V1 = "v1 (cf007b6)"


def filled(text: str) -> str:
    """The text with all its marked tables as they are now. Raises ValueError for a name that is no table."""

    def table(match: re.Match) -> str:
        name, *words = match[2].split()
        if name == "figures":
            template = match[2].removeprefix("figures").strip()
            return match[1] + template.format_map(Results()) + "\n" + match[3]
        if name == "tasks":  # envs/miniwob/table.py fills it
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
    interval = "" if found.low is None else f" ({100 * found.low:.1f} - {100 * found.high:.1f})"
    return f"{100 * found.mean:.1f}{interval}"


def counted(solved: int, n: int) -> str:
    """The same of n instances, with Wilson's interval."""
    return rate(Spread(solved / n, *wilson(solved, n)))


def points(found: Spread) -> str:
    return f"{found.mean:+.1f} ({found.low:+.1f} to {found.high:+.1f})"


def gain(found: Comparison | None) -> str:
    return "-" if found is None else f"{found.points:+.1f}, p = {found.p:.2g}"


def seeds_of(lines: dict[int, dict]) -> str:
    """Which seeds, as "1 - 3" or "1, 4, 5"."""
    seeds = sorted(lines)
    in_a_row = len(seeds) > 2 and seeds == list(range(seeds[0], seeds[-1] + 1))
    return f"{seeds[0]} - {seeds[-1]}" if in_a_row else ", ".join(map(str, seeds))


# ---- the studies ----


def rows_of(name: str, *rows: str) -> Table:
    """Success of a study's rows."""
    study, suites = studied(lines_of(name)), SUITES_OF[name]
    head = ["row", "seeds", "golden", "explored", *(f"{suite}, %" for suite in suites)]
    head += ["steps", "usable, %", "against its start", f"against `{BASE}`"]
    head += [f"{suites[-1]}, against its start", "training, s"]
    table = []
    for row in rows or study:
        lines = study[row]
        played = [line[suites[0]] for line in lines.values()]
        turns = sum(each["turns"] for each in played)
        episodes = sum(len(text) for each in played for text in each["solved"].values())
        table.append(
            [
                f"`{row}`",
                seeds_of(lines),
                *needs(study, row),
                *(rate(success(study, row, suite)) for suite in suites),
                f"{turns / episodes:.2f}",
                f"{100 * sum(each['usable'] for each in played) / max(1, turns):.1f}",
                gain(compared(study, start_of(row), row, suites[0])),
                gain(None if row == BASE else compared(study, BASE, row, suites[0])),
                gain(compared(study, start_of(row), row, suites[-1])),
                seconds(lines),
            ]
        )
    return head, table


def lines_of(name: str) -> list[dict]:
    """The lines of a study. Suite `report`, the tasks that the EF-DPO report names, is a part of `demo`."""
    lines = recorded(name)
    for line in lines:
        if "demo" in line:
            solved = line["demo"]["solved"]
            line["report"] = {"solved": {task: solved[task] for task in SUITES["report"]}}
    return lines


def against(name: str, before: str, suite: str, *rows: str) -> Table:
    """A study's rows against one of them, on the instances of their common seeds."""
    study, table = studied(recorded(name)), []
    for row in rows:
        found = compared(study, before, row, suite)
        interval = spread(found.gains)
        up = f"{sum(each > 0 for each in found.gains)}/{len(found.gains)}"
        over = "-" if interval.low is None else f"{interval.low:+.1f} to {interval.high:+.1f}"
        cells = [f"{found.points:+.1f}", f"{found.p:.2g}", f"{found.n:,}", up, over, verdict(found)]
        table.append([f"`{row}`", *cells])
    head = ["row", f"points over `{before}`", "p", "n", "seeds up", "95 % over seeds", "verdict"]
    return head, table


def by_round(name: str, *rows: str) -> Table:
    """Success on validation after each round: the mean over seeds, and the round kept by each seed."""
    study = studied(recorded(name))
    longest = max(len(line["validation"]) for row in rows for line in study[row].values())
    table = []
    for row in rows:
        lines = study[row].values()
        curves = [line["validation"] for line in lines]
        after = [[curve[n] for curve in curves if n < len(curve)] for n in range(longest)]
        kept = ", ".join(str(line["kept_round"]) for line in lines)
        table.append([f"`{row}`", seeds_of(study[row]), *(rate(share(r)) for r in after), kept])
    rounds = [f"round {n}" for n in range(1, longest)]
    return ["row", "seeds", "first policy", *rounds, "kept"], table


def pages_of(name: str) -> Table:
    """A row's page, and what it changes in configs/NAME.toml."""
    homes = {first: row for row, first in FIRST.items()}
    table = []
    for row in studied(recorded(name)):
        page, changes = ROWS[name].get(homes.get(row, row), (V1, ""))
        table.append([f"`{row}`", page, f"`{changes}`" if changes else ""])
    return ["row", "page", "options"], table


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


def seconds(lines: dict[int, dict]) -> str:
    """Seconds of a row's own learner, the mean over seeds."""
    found = []
    for line in lines.values():
        stages = line.get("seconds", {})
        own = line["config"]["learn"] if "config" in line else "dpo"
        found += [stages[own]] if own in stages else []
    return f"{fmean(found):.0f}" if found else "-"


def demo_rounds() -> Table:
    """The recorded runs of `make demo`: validation after SFT and each round, and the last policy held out."""
    curves = (
        ("DPO", "bfloat16", "demo-{}"),
        ("DPO", "float32", "demo-{}-float32"),
        ("GRPO", "float32", "smollm2_grpo-rounds-{}"),
    )
    table = []
    for learner, dtype, name in curves:
        for seed in (1, 2, 3):
            path = RESULTS / f"{name.format(seed)}.json"
            if path.is_file():
                result = read_json(path)
                last = list(result["agents"].values())[-1]["all"]["success"]
                shares = [f"{100 * each:.1f}" for each in (*result["validation"], last)]
                table.append([learner, dtype, str(seed), *shares])
    return ["learner", "computed in", "seed", "SFT", "round 1", "round 2", "held out"], table


# ---- all of MiniWoB++ ----


def whole() -> dict:
    """The line of the agents that learned all tasks with an expert."""
    return next(line for line in recorded("miniwob") if line["part"] == "whole")


def solved(verdicts: dict[str, str], tasks: Sequence[str], count: int) -> str:
    return "".join(verdicts[task][:count] for task in tasks)


def miniwob_gains() -> Table:
    """What each agent adds to those that it began with and to SFT: points with the interval over families."""
    line, table = whole(), []
    for agent in [*line["agents"]][1:]:
        for before in dict.fromkeys([*line["made"].get(agent, {"after": []})["after"], "sft"]):
            cells = []
            for suite, count in INSTANCES.items():
                couple = line["agents"][before], line["agents"][agent]
                found = over_families(task_gains([couple], SUITES[suite], count))
                pairs = Counter(zip(*(solved(each, SUITES[suite], count) for each in couple)))
                p = mcnemar_exact(pairs["1", "0"], pairs["0", "1"])
                cells.append(f"{points(found)}, p = {p:.1g}")
            table.append([f"`{agent}`", f"`{before}`", *cells])
    return ["agent", "adds to", "all 125 tasks", "`webgum-56`"], table


def miniwob_agents() -> Table:
    """How each agent was made."""
    line, table = whole(), []
    for agent in line["agents"]:
        made = line["made"].get(agent, {"after": [], "how": "SFT", "learned": ""})
        learned = ", ".join(filter(None, ["5 demonstrations a task", made["learned"]]))
        after = ", ".join(f"`{other}`" for other in made["after"]) or "the base"
        table.append([f"`{agent}`", after, made["how"], learned])
    return ["agent", "began with", "and then", "learned from"], table


def miniwob_ladder() -> Table:
    """Our agents among published ones (results/miniwob_published.json), by list and success."""
    line, ladder = whole(), []
    for who, weights, learned, tasks, percent, differs in read_json(
        RESULTS / "miniwob_published.json"
    )["rows"]:
        ladder.append((tasks, percent, [who, weights, learned, tasks, f"{percent:.1f}", differs]))
    learned = {row[0]: row[3] for row in miniwob_agents()[1]}
    for suite, count in INSTANCES.items():
        for agent, verdicts in line["agents"].items():
            text = solved(verdicts, SUITES[suite], count)
            cell = counted(text.count("1"), len(text))
            row = [f"**minidpo, {agent}**", "0.135 B", learned[f"`{agent}`"], suite, cell]
            percent = 100 * text.count("1") / len(text)
            ladder.append((suite, percent, [*row, f"n = {len(text):,}, 1 seed"]))
    head = ["who", "weights", "learned from", "tasks", "success, %", "how it differs, source"]
    return head, [row for *_, row in sorted(ladder, key=lambda each: each[:2])]


def miniwob_sampled() -> Table:
    """The first held-out instances of each task at temperature 1, and the same ones greedily."""
    line, table = whole(), []
    for suite in reversed(INSTANCES):
        for agent, sampled in line["sampled"].items():
            count = min(len(sampled["solved"][task]) for task in SUITES[suite])
            texts = [
                solved(verdicts, SUITES[suite], count)
                for verdicts in (sampled["solved"], line["agents"][agent])
            ]
            n = len(texts[0])
            cells = [counted(texts[0].count("1"), n), f"{100 * texts[1].count('1') / n:.1f}"]
            table.append([agent, suite, *cells, f"{n:,}"])
    return ["agent", "tasks", "at temperature 1, %", "greedily, %", "instances"], table


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
    return ["run", "SFT steps, rounds, a round", "tasks", "SFT, %", "gain, points"], table


def miniwob_causes() -> Table:
    """How many held-out episodes failed for which cause."""
    causes = whole()["causes"]
    table = [
        [name, *(str(of_agent.get(name, "")) for of_agent in causes.values()), meaning]
        for name, meaning in CAUSES.items()
        if any(name in of_agent for of_agent in causes.values())
    ]
    return ["cause", *causes, "meaning"], table


def miniwob_tasks() -> Table:
    """Success on every task in per cent."""
    line, table = whole(), []
    for task in SUITES["all"]:
        texts = [verdicts[task] for verdicts in line["agents"].values()]
        shares = [f"{100 * text.count('1') / len(text):.0f}" for text in texts]
        table.append([task, "yes" if task in line["trained_on"] else "", *shares])
    return ["task", "learned", *line["agents"]], table


def miniwob_cost() -> Table:
    """Validation and core-hours of each part."""
    table = []
    for line in recorded("miniwob"):
        hours = sum(line["seconds"].values()) * line["cores"] / 3600
        curve = ", ".join(f"{100 * each:.1f}" for each in line.get("validation", ()))
        table.append([line["part"], str(line["seed"]), curve, f"{hours:.1f}", line["machine"]])
    return ["part", "seed", "validation: SFT, then each round", "core-hours", "machine"], table


SUITES_OF = {
    "study": ("demo", "report", "unseen"),
    "learners": ("greedy", "sampled"),
}
TABLES: dict[str, Callable[..., Table]] = {
    "rows": rows_of,
    "against": against,
    "rounds": by_round,
    "pages": pages_of,
    "demo-rounds": demo_rounds,
    "miniwob-agents": miniwob_agents,
    "miniwob-gains": miniwob_gains,
    "miniwob-ladder": miniwob_ladder,
    "miniwob-sampled": miniwob_sampled,
    "miniwob-unseen": miniwob_unseen,
    "miniwob-causes": miniwob_causes,
    "miniwob-tasks": miniwob_tasks,
    "miniwob-cost": miniwob_cost,
}


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main() -> None:
    if sys.argv[1:] == ["--list"]:
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
