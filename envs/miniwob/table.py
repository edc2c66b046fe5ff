"""Fills the table of docs/tasks.md, which has every task.

    python -m envs.miniwob.table

All columns but the examples are read from the code, and a test compares them. The examples are the pages' own
instructions on the first seed of `validation`.
"""

import asyncio
import re
import sys
from pathlib import Path

from envs.miniwob.browser.driver import Browser
from envs.miniwob.experts.by_task import EXPERTS
from envs.miniwob.tasks import RELOAD, SEEDS, STEP_LIMIT, SUITES, THRESHOLD
from envs.protocol import EnvError

PATH = Path(__file__).parents[2] / "docs" / "tasks.md"
BEGIN, END = "<!-- table tasks -->\n", "<!-- end -->\n"
HEAD = """\
| task | expert | steps | solved from | reload | suites | example |
|---|---|---|---|---|---|---|
"""


def cell(text: str) -> str:
    r"""Any text as a cell of a Markdown table.

    >>> cell('Click  <a> | "*"')
    'Click \\<a> \\| "\\*"'
    """
    return re.sub(r"([\\|<*_`\[])", r"\\\1", " ".join(text.split()))


def markdown(examples: dict[str, str]) -> str:
    """The page with its table filled; `examples` holds the last cell of each task's row."""
    rows = [
        [
            task,
            "yes" if task in EXPERTS else "",
            f"{STEP_LIMIT(task)}",
            f"{THRESHOLD(task):g}",
            "yes" if task in RELOAD else "",
            ", ".join(suite for suite in ("report", "demo", "webgum-56") if task in SUITES[suite]),
            examples[task],
        ]
        for task in SUITES["all"]
    ]
    before, _, rest = PATH.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    table = HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return before + BEGIN + table + END + after


async def ask() -> dict[str, str]:
    """The instruction of each task's page on the first seed of `validation`, as a cell."""
    async with Browser(pages=1) as browser:
        (env,) = browser.envs
        seen = {task: await env.reset(task, SEEDS["validation"][0]) for task in SUITES["all"]}
        return {task: cell(each.instruction) for task, each in seen.items()}


def main() -> int:
    """Fill the table. Returns the exit code: 0, or 2 after printing one line about what is missing."""
    try:
        PATH.write_text(markdown(asyncio.run(ask())), encoding="utf-8")
    except EnvError as error:
        print(error, file=sys.stderr)
        return 2
    print(PATH)
    return 0


if __name__ == "__main__":
    sys.exit(main())
