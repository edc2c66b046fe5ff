"""`--watch`: a person sees what the agent does, and it does the same as without."""

import os
import shutil
import subprocess
import threading

import pytest

import envs
from minidpo.acting.collect import play_to_file
from minidpo.acting.jobs import make_jobs
from minidpo.acting.policies import ExpertPolicy
from minidpo.data.episodes import read
from minidpo.memory.context import Context

WORLD = envs.world("miniwob")
JOBS = make_jobs(WORLD, [("login-user", 3_000_000)])
# the upper edge of the frame as the screen holds it: blue, green, red, opaque
FRAME = bytes((0, 90, 255, 255)) * 18


def play(out, watch):
    policy, context = ExpertPolicy(WORLD, 1), Context("", WORLD)
    play_to_file(policy, JOBS, out, context=context, title="watched", watch=watch)
    return read(out)


@pytest.fixture
def display(tmp_path, monkeypatch):
    """A screen that nobody sees: the file of its pixels."""
    if shutil.which("Xvfb") is None:
        pytest.skip("no Xvfb here, so no window can be opened: apt-get install xvfb")
    read_end, write_end = os.pipe()
    screen = ["-screen", "0", "800x700x24", "-fbdir", str(tmp_path)]
    server = subprocess.Popen(
        ["Xvfb", "-displayfd", str(write_end), *screen],
        pass_fds=[write_end],
        stderr=subprocess.DEVNULL,
    )
    os.close(write_end)
    with os.fdopen(read_end) as said:
        monkeypatch.setenv("DISPLAY", f":{said.readline().strip()}")
    yield tmp_path / "Xvfb_screen0"
    server.kill()
    server.wait()


def test_what_is_watched_is_framed_on_the_screen_and_ends_as_without(display, tmp_path):
    seen, over = [], threading.Event()

    def look():
        while not over.wait(0.2):
            seen.append(FRAME in display.read_bytes())

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        watched = play(tmp_path / "watched.jsonl", watch=True)
    finally:
        over.set()
        watcher.join()
    assert watched == play(tmp_path / "alone.jsonl", watch=False)
    assert {episode.outcome for episode in watched} == {"solved"}
    assert any(seen) and not all(seen)
    assert sum(episode.cost.browser_s for episode in watched) > 3  # actions, a second each


def test_a_window_on_a_display_that_is_gone_is_an_error_of_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("DISPLAY", ":987")
    with pytest.raises(ValueError, match=r"^[^\n]*:987$"):
        play(tmp_path / "a.jsonl", watch=True)


def test_a_machine_that_has_no_display_or_no_browser_is_refused(tmp_path, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="display"):
        WORLD.require(watch=True)
    WORLD.require()
    monkeypatch.setenv("MINIDPO_CHROMIUM", str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match=r"^[^\n]*MINIDPO_CHROMIUM[^\n]*$"):
        WORLD.require()
