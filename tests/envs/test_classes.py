"""Environment classes of TRL's kind as worlds; tests/envs/test_worlds.py has the promises of every world."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import envs
from envs.protocol import EnvError, Outcome

ROOT = Path(__file__).parents[2]
CLASS = '''
class Room:
    """A room."""

    rows = [{"door": n} for n in range(10)]

    def reset(self, door, **row):
        self.door, self.found = door, 0.0

    def open(self, door: int, slowly: bool | None = None) -> str:
        """Open a door."""
        if door < 0:
            raise ValueError("no such\\ndoor")
        if door > 99:
            raise ConnectionError("the house is gone")
        self.found = 5.0 if door == self.door else 1.0

    def get_reward(self):
        return self.found
'''


@pytest.fixture
def room(tmp_path):
    """(text in the class, text that takes its place) -> the world."""

    def made(before="", after="", rows=""):
        path = tmp_path / "room.py"
        path.write_text(CLASS.replace(before, after) if before else CLASS)
        return envs.world(f"{path}:Room{rows}")

    return made


def seen(world, *actions, seed=3):
    """All observations of an episode."""

    async def played():
        async with world.open(1) as (env,):
            first = await env.reset("Room", seed)
            return [first] + [await env.step(world.parse(text)) for text in actions]

    return asyncio.run(played())


def test_the_prompt_has_the_docstrings_and_types(room):
    prompt = room().system_prompt
    assert prompt.startswith("A room.\n") and "action: open(door=1, slowly=true)\n" in prompt
    assert (
        "open(door: integer, slowly: boolean or null (may be left out))\n    Open a door." in prompt
    )
    assert "finish()" in prompt


def test_a_tool_s_exception_is_told_and_costs_nothing_else(room):
    first, refused, there = seen(room(), "open(-1)", "open(3)")
    assert refused.error == "no such door" and refused.text == first.text and refused.reward == 0
    assert (there.error, there.reward, there.outcome) == (None, 5.0, None)


@pytest.mark.parametrize("solved_at, outcome", [(5.0, Outcome.SOLVED), (6.0, Outcome.FAILED)])
def test_the_agent_ends_the_episode_and_the_reward_says_how(room, solved_at, outcome):
    world = room("    rows", f"    solved_at = {solved_at}\n    rows")
    assert seen(world, "open(3)", "finish()")[-1].outcome is outcome


def test_done_ends_the_episode(room):
    world = room('"""Open a door."""', '"""Open a door."""\n        self.done = True')
    assert [one.outcome for one in seen(world, "open(3)")] == [None, Outcome.SOLVED]


@pytest.mark.parametrize(
    "before, after",
    [
        ("", ""),
        ("self.door, self.found = door, 0.0", "raise RuntimeError('no house')"),
        ("return self.found", "return 'much'"),
    ],
)
def test_a_class_that_breaks_is_no_reward(room, before, after):
    world = room(before, after)
    with pytest.raises(EnvError) as error:
        seen(world, "open(100)")
    assert "\n" not in str(error.value)


def test_a_stop_iteration_is_told_and_keeps_nobody_waiting(room):
    world = room("self.found = 5.0 if door", "next(iter([]))\n        self.found = 5.0 if door")
    assert "StopIteration" in seen(world, "open(3)")[-1].error


def test_rows_come_from_a_file_too(room, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"door": n, "prompt": f"Door {n}."}) + "\n" for n in range(20))
    )
    assert seen(room(rows=f":{path}"))[0].instruction == "Door 3."
    assert len(room('[{"door": n} for n in range(10)]', '"rows.jsonl"').rows) == 20


@pytest.mark.parametrize(
    "before, after, why",
    [
        ('"""Open a door."""', "", "open has no docstring"),
        ("door: int", "door", "door"),
        ("door: int", "door: set", "door must be"),
        ("door: int", "door: Nothing", "Nothing"),
        ("door: int", "*door: int", "door"),
        ("def get_reward", "def reward", "get_reward"),
        ("def open", "def _open", "public method"),
        ("range(10)", "range(3)", "rows"),
        ("reset(self, door, **row)", "reset(self, wall, **row)", "row 1: "),
        ('{"door": n}', '{"door": n, "prompt": 3}', "row 1: "),
        ('[{"door": n} for n in range(10)]', '"nowhere.jsonl"', "nowhere.jsonl"),
        ("class Room", "class Hall", "has no class 'Room'"),
        ("class Room", "1 / 0\nclass Room", "ZeroDivisionError"),
    ],
)
def test_a_class_that_can_be_no_world_is_refused_in_a_line(room, before, after, why):
    with pytest.raises(ValueError, match=why) as error:
        room(before, after)
    assert "\n" not in str(error.value)


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere.py: no such file"):
        envs.world(f"{tmp_path}/nowhere.py:Room")


@pytest.mark.slow
def test_the_class_in_the_docs_is_learned(tmp_path):
    text = (ROOT / "docs" / "other-programs.md").read_text()
    (tmp_path / "guess.py").write_text(re.search(r"```python\n(class.*?)```", text, re.S)[1])
    commands = re.search(r"```\n(python collect.*?)```", text, re.S)[1].replace("\\\n", "")
    for command in commands.splitlines():
        program, *words = command.removeprefix("python ").split()
        words = [str(ROOT / word) if word == "minidpo/nano" else word for word in words]
        done = subprocess.run(
            [sys.executable, ROOT / program, *words], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "guess" / "result.json").is_file()
