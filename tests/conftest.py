"""What all tests share: how hard hypothesis tries, what is slow, where the reference values are.

Several processes run the tests (`make test`), often waiting for browsers, so each has one thread. This is set
here, before anything imports torch, and inherited by the programs that tests start.
"""

import asyncio
import gc
import os
from pathlib import Path

import pytest
from hypothesis import settings

pytest_plugins = ["minidpo.laws.plugin"]  # where minidpo is installed, pyproject.toml brings it

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

settings.register_profile("ci", derandomize=True, max_examples=100, deadline=None)
settings.register_profile("deep", max_examples=5_000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")


def pytest_collection_modifyitems(config, items):
    # A worker takes a file at a time. The largest files first, or one worker ends alone with a long one.
    size = {path: path.stat().st_size for path in {item.path for item in items}}
    items.sort(key=lambda item: -size[item.path])
    from torch import cuda  # here: torch reads OMP_NUM_THREADS as it is imported

    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))
        if "gpu" in item.keywords and not cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # else each search for garbage walks all that was imported: two fifths of test_loss_laws


@pytest.fixture(scope="session")
def oracles():
    """The folder of reference values, made by independent implementations and kept outside the repository."""
    folder = Path(
        os.environ.get("MINIDPO_ORACLES", Path(__file__).parents[2] / "shared" / "oracles")
    )
    if not folder.is_dir():
        pytest.skip(f"no reference values at {folder}: set MINIDPO_ORACLES")
    return folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """What `toy`'s learners start from. Tests write elsewhere."""
    import toy

    return toy.prepare(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def run():
    """Runs a coroutine; all of a file in one event loop."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def env(run):
    """A page of a file's own Chromium."""
    from envs.miniwob.browser.driver import Browser

    chromium = Browser(pages=1)
    run(chromium.__aenter__())
    yield chromium.envs[0]
    run(chromium.__aexit__(None, None, None))


@pytest.fixture(scope="session")
def shelf_base(tmp_path_factory):
    """A model that opens any box of the toy world. Tests write elsewhere."""
    import shelf

    return shelf.base(tmp_path_factory.mktemp("shelf") / "base")
