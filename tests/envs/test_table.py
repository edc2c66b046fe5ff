"""docs/tasks.md says what the code says."""

import asyncio
import re

import pytest

from envs.miniwob import table
from envs.miniwob.experts.by_task import EXPERTS, WITHOUT
from envs.miniwob.tasks import SUITES

ROW = re.compile(r"^\| (\S+) \|.*(?<!\\)\| (.*) \|$", re.MULTILINE)
ANEW = "out of date, write it anew: python -m envs.miniwob.table"


def test_the_table_of_tasks_is_the_codes():
    """Byte for byte, but for the examples, which only the pages know."""
    written = table.PATH.read_text(encoding="utf-8")
    examples = {task: example for task, example in ROW.findall(written) if task in SUITES["all"]}
    assert examples.keys() == set(SUITES["all"]), ANEW
    assert table.markdown(examples) == written, ANEW


def test_of_each_task_without_an_expert_it_is_said_why():
    assert sorted(task for tasks in WITHOUT for task in tasks) == sorted(
        set(SUITES["all"]) - EXPERTS.keys()
    )


@pytest.mark.slow
def test_its_examples_are_the_pages():
    assert table.markdown(asyncio.run(table.ask())) == table.PATH.read_text(encoding="utf-8"), ANEW
