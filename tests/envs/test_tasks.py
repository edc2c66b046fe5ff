"""Tasks: names, suites and seeds; the registered list is the package's own."""

import itertools
import re
from pathlib import Path

import pytest

from envs.miniwob import tasks
from envs.miniwob.experts.by_task import EXPERTS


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


def test_seeds_of_different_uses_never_meet():
    assert [*tasks.SEEDS] == ["base", "demos", "rollouts", "validation", "test"]
    for one, other in itertools.combinations(tasks.SEEDS.values(), 2):
        assert len(one) == 1_000_000 and (one.stop <= other.start or other.stop <= one.start)


def test_resolve_takes_suites_and_tasks_once_each_in_order():
    assert tasks.resolve("report, click-link,click-button") == (
        "click-button",
        "login-user",
        "click-link",
    )
    assert tasks.resolve("all") == tasks.SUITES["all"]


@pytest.mark.parametrize(
    "names, message",
    [
        ("click-buton", "did you mean click-button"),
        ("zzz", "suites are report, demo"),
        (" ,", "no task in"),
    ],
)
def test_an_unknown_name_is_refused_with_the_way_out(names, message):
    with pytest.raises(ValueError, match=message):
        tasks.resolve(names)


def test_closeness_counts_only_where_the_page_pays_by_it():
    assert tasks.THRESHOLD("click-checkboxes") == tasks.THRESHOLD("find-greatest") == 1.0
    assert 0.5 < tasks.THRESHOLD("circle-center") < 1.0


def test_the_published_list_and_the_experts_are_suites():
    assert len(tasks.SUITES["webgum-56"]) == len(set(tasks.SUITES["webgum-56"])) == 56
    assert set(tasks.SUITES["expert"]) == set(EXPERTS)
