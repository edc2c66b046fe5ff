"""What all tests share: how hard hypothesis tries, what is slow, where the reference values lie.

Two processes run the tests on two cores (`make test`), so each has one thread: set here, before anything
imports torch, and inherited by the programs that tests start.
"""

import os
from pathlib import Path

import pytest
from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

settings.register_profile("ci", derandomize=True, max_examples=100, deadline=None)
settings.register_profile("deep", max_examples=5_000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")


def pytest_collection_modifyitems(config, items):
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))


@pytest.fixture(scope="session")
def oracles():
    """The folder of reference values, made by independent implementations and kept outside the repository."""
    folder = Path(os.environ.get("MINIDPO_ORACLES", Path(__file__).parents[2] / "shared" / "oracles"))
    if not folder.is_dir():
        pytest.skip(f"no reference values at {folder}: set MINIDPO_ORACLES")
    return folder
