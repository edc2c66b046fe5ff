"""Fills the table of docs/tasks.md from the code: every task, and what differs between tasks.

    python -m envs.miniwob.table
"""

import sys
from collections.abc import Iterable
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
    for steps in sorted({STEP_LIMIT(task) for task in tasks} - {USUAL_STEPS}):
        found.append((f"{steps} steps", [task for task in tasks if STEP_LIMIT(task) == steps]))
    for reward in sorted({THRESHOLD(task) for task in tasks} - {USUAL_THRESHOLD}):
        found.append(
            (f"solved from {reward:g}", [task for task in tasks if THRESHOLD(task) == reward])
        )
    found.append(("reloaded", sorted(RELOAD)))
    found += [(f"no expert: {reason}", without) for without, reason in WITHOUT.items()]
    found += [(f"wall clock: {what}", [task]) for task, what in BY_THE_CLOCK.items()]
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
