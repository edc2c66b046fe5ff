"""Writes docs/tasks.md, a table of every task.

    python -m envs.miniwob.table

All columns but the examples are read from the code, and a test compares them. The examples are the pages' own
instructions on the first seed of `validation`.
"""

import asyncio
import re
import sys
import textwrap
from pathlib import Path

from envs.miniwob.browser.driver import Browser
from envs.miniwob.experts.by_task import EXPERTS, WITHOUT
from envs.miniwob.tasks import BY_THE_CLOCK, RELOAD, SEEDS, STEP_LIMIT, SUITES, THRESHOLD
from envs.protocol import EnvError

PATH = Path(__file__).parents[2] / "docs" / "tasks.md"
HEAD = """\
# Tasks

All {tasks} tasks of the suite `all`, {experts} of them with a scripted expert.
`python -m envs.miniwob.table` writes this page.

- expert: whether `collect.py --policy expert` can play it;
- steps: how many actions an episode may take;
- solved from: the raw reward from which an instance is solved, 1 unless the page pays for closeness;
- reload: whether the page is loaded anew for each episode, because a reset in place leaves something behind;
- suites: those besides `all` and `expert` (the tasks that have an expert): `report`, the two tasks that the
  EF-DPO report names (`login-user` in place of its `fill-form-v1`, which MiniWoB++ does not have); `demo`,
  which `make demo-nano` trains on; `webgum-56`, the list that WebN-T5, WebGUM and AutoWebGLM report on;
- example: the instruction of seed {seed}, the first of `validation`.

{missing}

{moving}

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
    """The whole page; `examples` holds the last cell of each task's row."""
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
    missing = _paragraph(
        "Without an expert are ",
        [f"{' and '.join(tasks)}: {why}" for tasks, why in WITHOUT.items()],
    )
    moving = _paragraph(
        "An episode need not be the same again where the page moves by the wall clock: ",
        [f"{task}, {what}" for task, what in BY_THE_CLOCK.items()],
    )
    head = HEAD.format(
        tasks=len(rows),
        experts=len(EXPERTS),
        seed=SEEDS["validation"][0],
        missing=missing,
        moving=moving,
    )
    return head + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _paragraph(begin: str, items: list[str]) -> str:
    return textwrap.fill(begin + "; ".join(items) + ".", 110, break_on_hyphens=False)


async def ask() -> dict[str, str]:
    """The instruction of each task's page on the first seed of `validation`, as a cell."""
    async with Browser(pages=1) as browser:
        (env,) = browser.envs
        seen = {task: await env.reset(task, SEEDS["validation"][0]) for task in SUITES["all"]}
        return {task: cell(each.instruction) for task, each in seen.items()}


def main() -> int:
    """Write the page. Returns the exit code: 0, or 2 after printing one line about what is missing."""
    try:
        PATH.write_text(markdown(asyncio.run(ask())), encoding="utf-8")
    except EnvError as error:
        print(error, file=sys.stderr)
        return 2
    print(PATH)
    return 0


if __name__ == "__main__":
    sys.exit(main())
