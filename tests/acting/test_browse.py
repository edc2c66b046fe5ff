"""An agent on any page: what it does is shown, asked for, and written down."""

import io
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from unittest.mock import Mock

import pytest
from listening import Site

import envs
from envs.protocol import EnvError
from envs.web.visit import Web
from minidpo.acting import browse
from minidpo.acting.browse import Browse, visit
from minidpo.acting.policies import Reply
from minidpo.data.episodes import read
from minidpo.memory.context import Context
from minidpo.memory.machine import Machine

WORLD = envs.world("miniwob")
CONTEXT = Context("minidpo/nano", WORLD, machine=Machine(device="cpu"))
FORM = "<form action=/sent method=post><label>Name <input name=name></label> <button>Submit</button></form>"


@pytest.fixture(scope="module")
def site():
    with Site({"/form": FORM, "/sent": "<p>Thank you</p>"}) as site:
        yield site


class Script:
    """Says what it is given to say, and then nothing usable; `fits` turns go into its context."""

    name, sampling, spare_core = "script", {}, True

    def __init__(self, *answers, fits=99):
        self.answers, self.fits, self.shown, self.numbers = list(answers), fits, [], []

    async def answer(self, page, episode):
        if len(episode.turns) >= self.fits:
            return None
        self.shown.append(episode.observation)
        self.numbers.append(episode.forgotten + len(episode.turns))
        return Reply(self.answers.pop(0) if self.answers else "hm")


def says(*words):
    """Stands for the user: says these words, one a preview."""
    words = list(words)

    async def ask(question):
        ask.questions.append(question)
        return words.pop(0)

    ask.questions = []
    return ask


NAME = 'thought: the name\naction: TYPE(ref="1", text="Lina")'
SUBMIT = 'thought: send\naction: CLICK(ref="2")'
WAIT = "action: WAIT()"


def visited(run, site, tmp_path, policy, ask=None, path="/form", **options):
    asked = Browse(url=f"{site.origin}{path}", goal="Sign up as Lina.", out=tmp_path, **options)
    site.seen.clear()
    return run(visit(asked, WORLD, policy, ask))


def test_a_visit_is_written_down_with_its_pictures(run, site, tmp_path, capsys):
    for number, path in enumerate(("/form", "/form#again")):  # of two URLs, and in one folder
        episode = visited(run, site, tmp_path, Script(NAME, SUBMIT, WAIT), path=path, steps=3)
        assert (episode.outcome, episode.index) == ("limit", number)
        assert [turn.error for turn in episode.turns] == [None] * 3
        assert "POST /sent name=Lina" in site.seen
        names = [f"{number}-{step}.png" for step in ("01", "02", "03", "end")]
        assert all((tmp_path / name).read_bytes()[:4] == b"\x89PNG" for name in names)
    assert read(tmp_path / "episode.jsonl")[1] == episode
    assert episode.turns[2].observation == 'text "Thank you"'
    told = capsys.readouterr().out
    assert (
        'CLICK(ref="2")   button "Submit" [2]' in told and "thinking" not in told
    )  # this is no terminal


def test_who_is_asked_sees_the_whole_action(run, site, tmp_path, capsys):
    words = "word " * 150
    policy = Script(f'action: TYPE(ref="1", text="{words}end")')
    visited(run, site, tmp_path, policy, says(""), steps=1)
    assert f'{words}end")' in capsys.readouterr().out


def test_what_the_user_refuses_does_not_happen_and_the_agent_is_told(
    run, site, tmp_path, monkeypatch
):
    monkeypatch.setattr(browse, "web_page", lambda url, goal, watch: envs.web_page(url, goal))
    policy, ask = Script(SUBMIT, SUBMIT, SUBMIT), says("s", "no", "stop", "s", "q", "")
    episode = visited(run, site, tmp_path, policy, ask, steps=9, watch=True)
    assert ask.questions == ["Enter acts, s skips, q quits: "] * 5 + [
        "Press Enter to close the window: "
    ]
    assert (
        episode.outcome == "stopped"
        and [turn.action for turn in episode.turns] == ['CLICK(ref="2")'] * 2
    )
    assert [turn.error for turn in episode.turns] == ["the user refused this action"] * 2
    assert not any("sent" in asked for asked in site.seen)
    assert len({seen.text for seen in policy.shown}) == 1


@pytest.mark.parametrize(
    "options, asking",
    [({"yes": True, "watch": True}, browse.pause), ({"watch": True}, browse.ask_user)],
)
def test_who_watches_is_asked_or_given_time_and_a_visit_that_is_stopped_is_over(
    options, asking, site, tmp_path, monkeypatch
):
    async def visit(options, world, policy, ask):
        assert ask is asking
        raise KeyboardInterrupt

    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for name, stand_in in (("visit", visit), ("model_policy", Mock())):
        monkeypatch.setattr(browse, name, stand_in)
    with pytest.raises(KeyboardInterrupt, match="another visit"):
        browse.browse(Browse(url=site.origin, goal="Look.", out=tmp_path, **options), CONTEXT)


def test_an_agent_that_has_no_action_left_has_stopped(run, site, tmp_path):
    episode = visited(run, site, tmp_path, Script(WAIT, "hm", WAIT), steps=9)
    assert episode.outcome == "stopped" and [turn.action is None for turn in episode.turns] == [
        0,
        1,
        0,
        1,
        1,
    ]


def test_an_agent_whose_context_is_full_forgets_what_was_first(run, site, tmp_path, capsys):
    policy = Script(*[WAIT] * 4, fits=2)
    assert len(visited(run, site, tmp_path, policy, steps=4).turns) == 4
    assert policy.numbers == [0, 1, 2, 3]  # of the turns, which random numbers go by
    assert "the agent forgets its first 1 turns" in capsys.readouterr().out
    assert visited(run, site, tmp_path, Script(fits=0)).outcome == "stopped"
    assert "this page alone" in capsys.readouterr().out


def test_what_was_done_is_written_down_where_the_page_is_not_seen_again(
    run, site, tmp_path, monkeypatch
):
    real = Web.step

    async def breaks(self, action):
        await real(self, action)
        raise EnvError("the browser is gone")

    monkeypatch.setattr(Web, "step", breaks)
    with pytest.raises(EnvError, match="the browser is gone"):
        visited(run, site, tmp_path, Script(SUBMIT, WAIT), steps=3)
    (turn,) = read(tmp_path / "episode.jsonl")[0].turns
    assert (turn.action, turn.error) == ('CLICK(ref="2")', "the visit ended here")


def test_what_is_printed_cannot_steer_a_terminal():
    assert browse.plain("a\x1b[2J\nb\u202e\r\x9bc") == "a?[2J b? ?c"


def test_what_a_page_says_before_it_fails_cannot_either(site, tmp_path, monkeypatch):
    monkeypatch.setattr(browse, "model_policy", Mock())
    monkeypatch.setattr(browse, "visit", Mock(side_effect=EnvError("the page said \x9b2J")))
    with pytest.raises(ValueError, match=r"the page said \?2J$"):
        browse.browse(Browse(url=site.origin, goal="Look.", out=tmp_path, yes=True), CONTEXT)


CLOSED = """
import asyncio, os, signal, sys
from minidpo.acting import browse
from minidpo.acting.browse import Browse
from minidpo.memory.context import Context
import envs

async def visit(options, world, policy, ask):
    try:
        os.kill(os.getpid(), getattr(signal, sys.argv[2]))
        await asyncio.sleep(9)
    finally:
        print("what was done is written", flush=True)

browse.visit, browse.model_policy = visit, lambda *_, **__: None
context = Context("", envs.world("miniwob"))
browse.browse(Browse(url=sys.argv[1], goal="Look.", yes=True), context)
"""


def test_a_visit_whose_terminal_is_closed_is_written_down(site):
    ended = subprocess.run(
        [sys.executable, "-c", CLOSED, site.origin, "SIGHUP"], capture_output=True, text=True
    )
    assert ended.stdout == "what was done is written\n" and "another visit" in ended.stderr


@pytest.mark.parametrize(
    "url, told",
    [
        ("example.org", "file://"),
        ("file:///no/such.html", "No such file"),
        ("file://login.html", "file:///"),
        ("http://[::1", "IPv6"),
        ("http://127.0.0.1:9/", "127.0.0.1"),
    ],
)
def test_what_cannot_be_visited_is_said_before_anything_is_opened(url, told, tmp_path):
    with pytest.raises(ValueError, match=re.escape(told)) as error:
        no_model = replace(CONTEXT, model="no model is opened")
        browse.browse(Browse(url=url, goal="Look.", out=tmp_path / "out", yes=True), no_model)
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_without_a_terminal_somebody_must_have_said_yes(site, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(ValueError, match="--yes"):
        browse.browse(Browse(url=site.origin, goal="Look.", out=tmp_path), CONTEXT)


PROGRAM = """
import sys, pathlib, envs
from minidpo.acting.browse import Browse, browse
from minidpo.memory.context import Context
from minidpo.memory.machine import Machine
context = Context("minidpo/nano", envs.world("miniwob"), machine=Machine(device="cpu"))
browse(Browse(url=sys.argv[1], goal="Sign up as Lina.", out=pathlib.Path(sys.argv[2])), context)
"""


def test_the_shipped_model_acts_on_a_page_when_the_user_lets_it(site, tmp_path):
    """Through a terminal: one action skipped, one let pass, then enough."""
    site.seen.clear()
    terminal, end = pty.openpty()
    words = [sys.executable, "-c", PROGRAM, f"{site.origin}/form", str(tmp_path)]
    process = subprocess.Popen(words, stdin=end, stdout=end, stderr=subprocess.STDOUT)
    os.close(end)
    told = ""
    for reply in (b"s\n", b"\n", b"q\n"):
        while not told.endswith("quits: "):
            told += os.read(terminal, 4096).decode()
        os.write(terminal, reply)
        told += "\n"
    assert re.search(r"     thinking \.\.\.\r +\r  1  ", told)
    while process.poll() is None:
        try:
            told += os.read(terminal, 4096).decode()
        except OSError:  # the other end is closed
            break
    assert process.wait(30) == 0, told
    (episode,) = read(tmp_path / "episode.jsonl")
    assert episode.outcome == "stopped" and "stopped after 2 steps" in told
    assert (
        episode.turns[0].error == "the user refused this action" and episode.turns[1].error is None
    )
    assert all(turn.action and turn.ids for turn in episode.turns)
