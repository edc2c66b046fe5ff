"""BabyAI: what is told of what is seen, the six actions, and the bot as the expert."""

import asyncio
import random

import numpy
import pytest

import envs
from envs.protocol import ActionError, Outcome

try:
    WORLD = envs.world("babyai")
    WORLD.require()
except ValueError as missing:
    pytest.skip(str(missing), allow_module_level=True)

from minigrid.core.world_object import Ball, Box, Door, Key, Wall

from envs.babyai.actions import ACTIONS, parse
from envs.babyai.bot import Adviser
from envs.babyai.rooms import Rooms
from envs.babyai.sight import look, thought
from minidpo.data.episodes import Turn, in_a_loop


def room(**things):
    """A room of 6 x 6 floors, empty but for these, in which the agent stands at x3y5 and faces north."""
    rooms = Rooms()
    asyncio.run(rooms.reset("GoToObj", 0))
    grid = rooms.grid
    for x in range(1, 7):
        for y in range(1, 7):
            grid.grid.set(x, y, None)
    for place, thing in things.items():
        grid.grid.set(int(place[1]), int(place[3]), thing)
    grid.agent_pos, grid.agent_dir = (3, 5), 3
    return rooms


def walk(task, seed, choose, most=1000):
    """All observations, and the actions, until the end or until `choose(actions so far)` is None."""

    async def play():
        rooms = Rooms()
        seen, done = [await rooms.reset(task, seed)], []
        while seen[-1].outcome is None and len(done) < most and (action := choose(done)):
            done.append(action)
            seen.append(await rooms.step(action))
        return seen, done

    return asyncio.run(play())


def bot(task, seed):
    return walk(task, seed, Adviser(task, seed).advice)


def test_it_tells_what_is_ahead_and_beside_and_not_what_is_hidden():
    """The agent is at (3, 5). North of it are a ball and a wall from side to side, which hides a box; behind it is
    another box, and a key stands to the right."""
    wall = {f"x{x}y2": Wall() for x in range(1, 7)}
    things = {"x2y3": Ball("red"), "x5y5": Key("blue"), "x3y1": Box("grey"), "x3y6": Box("green")}
    rooms = room(**wall, **things)
    assert look(rooms.grid, 7).split("\n") == [
        "blue key: 2 right",
        "red ball: 2 ahead, 1 left",
        "wall: 3 ahead",
        "wall: 3 left",
        "facing: north",
        "walked: 7",
        "carrying: nothing",
    ]
    rooms = room(x3y4=Door("green", is_locked=True))
    assert "locked green door: 1 ahead" in look(rooms.grid, 7)


def test_what_changes_nothing_says_so_and_what_changes_something_does_not():
    rooms = room(x3y4=Ball("red"), x4y5=Wall())

    def step(action):
        return asyncio.run(rooms.step(action))

    for action, works in (
        ("move forward", False),
        ("toggle", False),
        ("drop", False),
        ("pick up", True),
        ("pick up", False),
        ("move forward", True),
        ("turn right", True),
        ("drop", True),
        ("drop", False),
        ("turn left", True),
    ):
        before = look(rooms.grid, rooms.walked)
        seen = step(action)
        assert (seen.error is None) == works == (seen.text != before), action
        assert works or "1 ahead" in seen.error


def test_a_strict_level_is_failed_with_the_wrong_thing():
    rooms = Rooms()
    first = asyncio.run(rooms.reset("PickupDistDebug", 0))
    wrong = Box("red") if "box" not in first.instruction else Ball("red")
    rooms.grid.grid.set(*rooms.grid.front_pos, wrong)
    seen = asyncio.run(rooms.step("pick up"))
    assert (seen.outcome, seen.reward) == (Outcome.FAILED, 0.0)


@pytest.mark.parametrize("text", ["Turn  left.", "`turn left`", '"TURN LEFT"'])
def test_an_action_is_one_of_six_however_it_is_written(text):
    assert parse(text) == "turn left"


def test_other_text_is_refused_with_the_six():
    with pytest.raises(ActionError) as error:
        parse("go to red ball 1")
    assert all(action in str(error.value) for action in ACTIONS) and "\n" not in str(error.value)


def test_a_thought_tells_the_things_of_the_task_and_no_others():
    text = "red ball: 2 ahead\ngreen key: 1 ahead\nopen red door: 3 left\ncarrying: nothing"
    said = thought(
        "put the green key next to a red door, then pick up a blue object", text, "pick up"
    )
    assert "green key: 1 ahead" in said and "open red door: 3 left" in said and "ball" not in said
    assert "no blue object" in said and said.endswith("I pick up green key")


SOME = ("GoToRedBall", "OpenDoorsOrderN2", "PutNextS4N1", "UnlockPickup", "GoToSeqS5R2")


@pytest.mark.parametrize("task", SOME)
def test_the_bot_solves_by_the_six_actions_within_the_limit(task):
    for seed in range(3):
        seen, done = bot(task, seed)
        assert seen[-1].outcome == Outcome.SOLVED and seen[-1].reward == 1.0
        assert len(done) <= WORLD.step_limit(task)
        assert not any(page.error or page.reward for page in seen[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("task", WORLD.suites["all"])
def test_the_bot_solves_every_level_and_never_in_a_loop(task):
    solved = 0
    for seed in range(WORLD.seeds["test"][0], WORLD.seeds["test"][0] + 20):
        seen, done = bot(task, seed)
        turns = [Turn(page.text, "", action, None) for page, action in zip(seen, done)]
        looped = any(in_a_loop(turns[: n + 1]) for n in range(len(turns)))
        solved += (
            seen[-1].outcome == Outcome.SOLVED
            and not looped
            and len(done) <= WORLD.step_limit(task)
        )
    assert solved >= 19


def test_a_bot_that_would_plan_for_ever_gives_up_and_the_episode_goes_on():
    seen, done = bot("UnlockToUnlock", 4)  # one of the levels that are left out for this
    assert len(done) < 5 and seen[-1].outcome is None
    with pytest.raises(LookupError):
        Adviser("UnlockToUnlock", 4)(seen[-1], done)


def test_the_bot_advises_a_bad_walker_or_is_silent_and_raises_nothing():
    rng = random.Random(1)
    for task in SOME:
        _, done = walk(task, 1, lambda done: rng.choice(ACTIONS), most=60)
        adviser = Adviser(task, 1)
        assert {adviser.advice(done[:n]) for n in range(len(done))} <= {*ACTIONS, None}


def test_the_advice_after_some_actions_does_not_depend_on_what_was_asked_before():
    rng = random.Random(2)
    for task in SOME:
        done = [[], rng.choices(ACTIONS, k=30), rng.choices(ACTIONS, k=30)]
        done += [done[1][:12], done[1][:12] + done[2]]
        alone = [Adviser(task, 3).advice(actions) for actions in done]
        one = Adviser(task, 3)
        for number in rng.choices(range(5), k=20):
            assert one.advice(done[number]) == alone[number]


def test_a_model_walks_without_the_bot(monkeypatch):
    monkeypatch.setattr("envs.babyai.bot.Bot.advise", None)
    walk("UnlockPickup", 0, lambda done: "move forward", most=3)


def test_all_chance_is_the_seed_and_nothing_is_printed(capsys):
    random.seed(1)
    numpy.random.seed(1)
    states = random.getstate(), numpy.random.get_state()[1].tolist()
    first = [bot("GoToSeqS5R2", seed) for seed in range(3)]
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == states
    random.seed(2)
    numpy.random.seed(2)
    assert [bot("GoToSeqS5R2", seed) for seed in (2, 1, 0)] == first[::-1]
    assert capsys.readouterr().out == ""
