"""`python -m envs.miniwob.table` fills the table of docs/tasks.md: every task, and what differs between tasks."""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from envs.miniwob.experts.by_task import WITHOUT
from envs.miniwob.tasks import BY_THE_CLOCK, RELOAD, STEP_LIMIT, SUITES, THRESHOLD

PATH = Path(__file__).parents[2] / "docs" / "tasks.md"
BEGIN, END = "<!-- table tasks -->\n", "<!-- end -->\n"
USUAL_STEPS, USUAL_THRESHOLD = 15, 1


def rows() -> list[tuple[str, Iterable[str]]]:
    """The table's rows: a property, and the tasks that have it."""
    tasks = SUITES["all"]
    found: list[tuple[str, Iterable[str]]] = [
        (f"`{suite}`, {len(SUITES[suite])}", SUITES[suite])
        for suite in ("report", "demo", "webgum-56")
    ]
    others = [task for task in tasks if task not in SUITES["webgum-56"]]
    found.append((f"the other {len(others)}", others))
    steps, rewards = grouped(STEP_LIMIT, tasks), grouped(THRESHOLD, tasks)
    found += [(f"{n} steps", steps[n]) for n in sorted(steps) if n != USUAL_STEPS]
    found += [(f"solved from {r:g}", rewards[r]) for r in sorted(rewards) if r != USUAL_THRESHOLD]
    found.append(("reloaded", sorted(RELOAD)))
    found += [(f"no expert: {reason}", without) for without, reason in WITHOUT.items()]
    found += [(f"wall clock: {what}", [task]) for task, what in BY_THE_CLOCK.items()]
    return found


def grouped(number_of: Callable[[str], float], tasks: Iterable[str]) -> dict[float, list[str]]:
    """The tasks with each number.

    >>> grouped(len, ["bat", "ox", "ant"])
    {3: ['bat', 'ant'], 2: ['ox']}
    """
    found: dict[float, list[str]] = {}
    for task in tasks:
        found.setdefault(number_of(task), []).append(task)
    return found


def markdown() -> str:
    """The page with its table filled."""
    before, _, rest = PATH.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    table = "".join(f"| {what} | {', '.join(tasks)} |\n" for what, tasks in rows())
    return f"{before}{BEGIN}| | tasks |\n|---|---|\n{table}{END}{after}"


def main() -> int:
    """Fill the table. Returns the exit code."""
    PATH.write_text(markdown(), encoding="utf-8")
    print(PATH)
    return 0


if __name__ == "__main__":
    sys.exit(main())
