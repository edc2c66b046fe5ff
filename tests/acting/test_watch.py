"""`--watch`: a person sees and reads what the agent does, and it does the same as without."""

import json
import os
import shutil
import subprocess
import threading
from dataclasses import replace

import pytest

from envs.miniwob.browser.remote import RemoteBrowser, check_display
from minidpo.acting import collect, policies
from minidpo.acting.collect import make_jobs, play_to_file
from minidpo.acting.policies import ExpertPolicy
from minidpo.config import CollectCommand, EvaluateCommand
from minidpo.data.episodes import read
from minidpo.memory.machine import Machine
from minidpo.results import evaluate

WANTED = make_jobs({"login-user": 1, "click-button": 1}, "validation", 0, 1)
FRAME = (
    bytes((0, 90, 255, 255)) * 18
)  # its upper edge as the screen holds it: blue, green, red, opaque


@pytest.fixture
def display(tmp_path, monkeypatch):
    """A screen that nobody sees: the file of its pixels."""
    if shutil.which("Xvfb") is None:
        pytest.skip("no Xvfb here, so no window can be opened: apt-get install xvfb")
    read_end, write_end = os.pipe()
    server = subprocess.Popen(
        [
            "Xvfb",
            "-displayfd",
            str(write_end),
            "-screen",
            "0",
            "800x700x24",
            "-fbdir",
            str(tmp_path),
        ],
        pass_fds=[write_end],
        stderr=subprocess.DEVNULL,
    )
    os.close(write_end)
    with os.fdopen(read_end) as said:
        monkeypatch.setenv("DISPLAY", f":{said.readline().strip()}")
    yield tmp_path / "Xvfb_screen0"
    server.kill()
    server.wait()


def test_what_is_watched_is_framed_on_the_screen_and_ends_as_without(display, tmp_path, capsys):
    seen, over = [], threading.Event()

    def look():
        while not over.wait(0.2):
            seen.append(FRAME in display.read_bytes())

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        play_to_file(
            ExpertPolicy(0.0, 1), WANTED, tmp_path / "watched.jsonl", 1, "watched", watch=True
        )
    finally:
        over.set()
        watcher.join()
    play_to_file(ExpertPolicy(0.0, 1), WANTED, tmp_path / "alone.jsonl", 2, "alone")
    assert read(tmp_path / "watched.jsonl") == read(tmp_path / "alone.jsonl")
    assert {episode.outcome for episode in read(tmp_path / "alone.jsonl")} == {"solved"}
    assert any(seen) and not all(seen)
    actions = 4  # three to log in, one click
    assert sum(episode.cost.browser_s for episode in read(tmp_path / "watched.jsonl")) > actions


def test_a_window_on_a_display_that_is_gone_is_an_error_of_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("DISPLAY", ":987")
    with pytest.raises(ValueError, match=r"^--watch: no window can be opened on the display :987$"):
        play_to_file(ExpertPolicy(0.0, 1), WANTED, tmp_path / "a.jsonl", 1, "watched", watch=True)


def test_what_the_agent_thinks_and_does_is_printed_and_one_page_is_opened(
    tmp_path, monkeypatch, capsys
):
    opened = []
    monkeypatch.setattr(
        collect,
        "RemoteBrowser",
        lambda pages, headless: opened.append((pages, headless)) or RemoteBrowser(pages),
    )

    class Careless(ExpertPolicy):
        async def answer(self, page, episode):
            reply = await super().answer(page, episode)
            return reply if episode.turns else reply._replace(text="I'd rather\nnot")

    monkeypatch.setattr(policies, "ExpertPolicy", Careless)
    monkeypatch.setenv("DISPLAY", ":0")
    for machine in (Machine(), Machine(pages=2)):
        collect.collect(
            CollectCommand(
                policy="expert",
                tasks="click-button",
                split="validation",
                instances=1,
                group=1,
                watch=True,
                machine=machine,
                out=tmp_path / f"{machine.pages}.jsonl",
            )
        )
    assert opened == [(1, False), (2, False)]
    told = capsys.readouterr().out
    button = 'click-button seed 3000000: Click on the "Submit" button.\n  I\'d rather\n  not\n'
    assert button in told and "\n  error: no action found: end the answer with" in told
    assert "turn 2\n  error:" in told and '\n  action: CLICK(ref="3")\n' in told
    assert told.count("click-button seed 3000000: solved\n") == 2


@pytest.mark.parametrize(
    "command", [CollectCommand(), EvaluateCommand()], ids=["collect", "evaluate"]
)
def test_without_a_display_it_is_refused_before_anything_is_loaded(command, tmp_path, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(policies, "open_policy", lambda *_: pytest.fail("the model was loaded"))
    run = collect.collect if isinstance(command, CollectCommand) else evaluate.evaluate
    with pytest.raises(
        ValueError, match="^--watch opens a window, but this machine has no display"
    ):
        run(replace(command, watch=True, out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    check_display()


def test_a_collection_tells_how_it_goes_in_a_file_and_goes_on_with_it(tmp_path):
    """A line each fifty episodes and at the end, and what was played before a kill counts."""
    wanted = make_jobs({"click-button": 60}, "validation", 0, 1)
    for some, steps in ((wanted[:20], [20]), (wanted, [20, 50, 60])):
        play_to_file(ExpertPolicy(0.6, 1), some, tmp_path / "a.jsonl", 4, "some")
        lines = [
            json.loads(line) for line in (tmp_path / "a.metrics.jsonl").read_text().splitlines()
        ]
        assert [line["step"] for line in lines] == steps
    play_to_file(
        ExpertPolicy(0.6, 1), wanted, tmp_path / "a.jsonl", 4, "some"
    )  # nothing new to tell
    assert len((tmp_path / "a.metrics.jsonl").read_text().splitlines()) == 3
    solved = sum(episode.solved for episode in read(tmp_path / "a.jsonl"))
    assert lines[-1]["solved"] == solved and lines[-1]["success"] == solved / 60 and 0 < solved < 60
    assert lines[-1]["failed"] == 60 - solved and lines[-1]["seconds"] > 0
