"""docs/tasks.md says what the code says."""

from envs.miniwob import table
from envs.miniwob.experts.by_task import EXPERTS, WITHOUT
from envs.miniwob.tasks import SUITES


def test_the_table_of_tasks_is_the_codes():
    written = table.PATH.read_text(encoding="utf-8")
    assert table.markdown() == written, "out of date: run python -m envs.miniwob.table"


def test_of_each_task_without_an_expert_it_is_said_why():
    assert sorted(task for tasks in WITHOUT for task in tasks) == sorted(
        set(SUITES["all"]) - EXPERTS.keys()
    )
