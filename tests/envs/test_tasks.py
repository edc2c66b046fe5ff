"""Tasks: names, suites and seeds; the registered list is the package's own."""

import re
from pathlib import Path

from envs.miniwob import tasks


def test_all_is_what_the_package_registers():
    text = Path(tasks.HTML.parent / "registration.py").read_text()
    names = re.findall(r'id="miniwob/([\w.-]+)-v1"', text)
    registered = {name for name in names if not name.startswith("flight.")}
    assert set(tasks.SUITES["all"]) == registered and len(registered) == 125


def test_every_table_speaks_of_tasks_that_exist():
    every = set(tasks.SUITES["all"])
    assert (
        set(tasks.SUITES["report"]) < set(tasks.SUITES["demo"]) < every
        and len(tasks.SUITES["demo"]) == 12
    )
    assert every > tasks.RELOAD
    assert set(tasks._STEP_LIMITS) < every and set(tasks._THRESHOLDS) < every


def test_closeness_counts_only_where_the_page_pays_by_it():
    assert tasks.THRESHOLD("click-checkboxes") == tasks.THRESHOLD("find-greatest") == 1.0
    assert 0.5 < tasks.THRESHOLD("circle-center") < 1.0
