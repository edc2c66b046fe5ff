"""The Gymnasium environments: the library's own checks, seeds, ends, and one browser for all of them."""

import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gymnasium
import pytest
from gymnasium import error
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from process_tree import alive, children, wait_for

import envs
from envs.gym import MiniWoBEnv, WorldEnv
from envs.miniwob.browser.shared import SHARED
from envs.miniwob.tasks import SEEDS, STEP_LIMIT, SUITES
from envs.protocol import EnvError

BUTTON = "minidpo/miniwob-click-button-v0"


def chromiums(parent: int | None = None) -> list[int]:
    """The processes of this one's browsers."""
    below = children(parent or os.getpid())
    return [
        pid for pid, command in below.items() if "--type=" in command or "playwright" in command
    ]


def drivers() -> int:
    """How many browsers this process runs."""
    return sum("playwright/driver" in command for command in children(os.getpid()).values())


def ref_of(line: str) -> str:
    return line.rpartition("[")[2].rstrip("]")


def right(observation: dict) -> str:
    """The action that solves click-button."""
    name = observation["instruction"].split('"')[1]
    line = next(
        line for line in observation["page"].splitlines() if line.startswith(f'button "{name}"')
    )
    return f'CLICK(ref="{ref_of(line)}")'


def solve(seed: int) -> tuple[dict, float]:
    """A whole episode in an environment of its own: what was seen first, and the reward."""
    with gymnasium.make(BUTTON) as env:
        observation, _ = env.reset(seed=seed)
        return observation, env.step(right(observation))[1]


@pytest.fixture(scope="module")
def kept():
    """Environments that keep the browser up from test to test: none, or one."""
    kept = []
    yield kept
    for env in kept:
        env.close()


@pytest.fixture
def up(kept):
    """A browser is up already: to start one takes longer than most of what is tested here."""
    if not kept:
        kept.append(MiniWoBEnv("click-button"))
        kept[0].reset(seed=0)


@pytest.fixture
def down(kept):
    """No browser is up."""
    while kept:
        kept.pop().close()
    wait_for(lambda: not chromiums())


@pytest.fixture
def env(up):
    with MiniWoBEnv("click-button") as env:
        yield env


@pytest.mark.parametrize("render_mode", [None, "png"])
def test_gymnasiums_own_checker_has_nothing_to_say(up, render_mode):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with gymnasium.make(BUTTON, render_mode=render_mode) as env:
            check_env(env.unwrapped)


def test_every_task_is_registered():
    registered = {name for name in gymnasium.registry if name.startswith("minidpo/")}
    every = [(name, task) for name in envs.names() for task in envs.world(name).suites["all"]]
    assert registered == {f"minidpo/{name}-{task}-v0" for name, task in every}
    assert {f"minidpo/miniwob-{task}-v0" for task in SUITES["all"]} < registered
    assert gymnasium.make("envs.gym:" + BUTTON).unwrapped.task == "click-button"


def test_a_seed_is_an_instance_of_the_split_and_no_seed_draws_one(env):
    one, info = env.reset(seed=7)
    assert info["seed"] == SEEDS["rollouts"][7]
    drawn = [env.reset()[1]["seed"] for _ in range(3)]
    assert len(set(drawn)) == 3 and set(drawn) <= set(SEEDS["rollouts"])
    again, _ = env.reset(seed=1_000_007)
    assert again == one and [env.reset()[1]["seed"] for _ in range(3)] != drawn
    env.reset(seed=7)
    assert [env.reset()[1]["seed"] for _ in range(3)] == drawn
    assert env.reset(seed=7, options={"split": "test"})[1]["seed"] == SEEDS["test"][7]


def test_reward_is_one_exactly_when_solved(env):
    observation, info = env.reset(seed=0)
    assert info == {
        "task": "click-button",
        "seed": SEEDS["rollouts"][0],
        "turns": 0,
        "outcome": None,
        "raw_reward": 0.0,
    }
    _, *end, info = env.step(right(observation))
    assert end == [1.0, True, False]
    assert (info["outcome"], info["raw_reward"], info["turns"]) == ("solved", 1.0, 1)
    observation, _ = env.reset(seed=0)
    buttons = [line for line in observation["page"].splitlines() if line.startswith("button")]
    wrong = next(ref for ref in map(ref_of, buttons) if f'"{ref}"' not in right(observation))
    _, *end, info = env.step(f'CLICK(ref="{wrong}")')
    assert end == [0.0, True, False] and (info["outcome"], info["raw_reward"]) == ("failed", -1.0)


def test_an_unusable_action_costs_a_turn_and_the_next_observation_says_why(env):
    first, _ = env.reset(seed=0)
    seen, *end, info = env.step("click the button")
    assert seen == {
        **first,
        "error": "an action looks like CLICK(ref=\"3\"), got 'click the button'",
    }
    assert end == [0.0, False, False] and info["turns"] == 1
    seen, *_ = env.step('CLICK(ref="77")')
    assert seen == {**first, "error": "there is no [77]"}
    with pytest.raises(TypeError, match="an action is a text like CLICK.*got int"):
        env.step(3)


def test_an_episode_is_truncated_at_the_tasks_limit_and_has_then_ended(env):
    env.reset(seed=0)
    ends = [env.step('PRESS(key="Shift")')[1:] for _ in range(STEP_LIMIT("click-button"))]
    assert [end[:3] for end in ends] == [(0.0, False, False)] * (len(ends) - 1) + [
        (0.0, False, True)
    ]
    assert ends[-1][-1]["outcome"] == "limit"
    with pytest.raises(error.ResetNeeded, match="call reset"):
        env.step("WAIT()")
    solved, _ = env.reset(seed=0)
    for _ in ends[1:]:
        env.step("")
    assert env.step(right(solved))[1:4] == (1.0, True, False)  # in the last turn


def test_threads_share_one_browser_and_see_what_each_would_alone(down):
    with MiniWoBEnv("click-test") as first, ThreadPoolExecutor(4) as threads:
        first.reset(seed=0)
        before = drivers()
        together = list(threads.map(solve, range(6)))
        assert before == drivers() == 1
    wait_for(lambda: not chromiums())
    assert {reward for _, reward in together} == {1.0}
    assert together[0] == solve(seed=0)


def test_the_browser_goes_with_the_last_environment(down):
    three = [gymnasium.make(BUTTON) for _ in range(3)]
    for env in three:
        env.reset(seed=0)
    assert drivers() == 1 and len(SHARED._open) == 3
    for env in three:
        assert drivers() == 1
        env.close()
        env.close()
    wait_for(lambda: not chromiums())


@pytest.mark.parametrize(
    "given, message",
    [({"task": "click-buton"}, "did you mean click-button"), ({"task": "demo"}, "one task"),
     ({"task": "click-button", "split": "train"}, "the splits are base, demos"),
     ({"task": "click-button", "render_mode": "human"}, "render_mode is one of")],
)  # fmt: skip
def test_what_cannot_be_made_is_refused_with_the_way_out(given, message):
    with pytest.raises(ValueError, match=message):
        MiniWoBEnv(**given)


def test_a_browser_that_breaks_for_good_ends_the_episode_without_a_reward(env, monkeypatch):
    async def broken(self, action):
        raise EnvError("it is gone")

    env.reset(seed=0)
    with monkeypatch.context() as patch:
        patch.setattr("envs.miniwob.browser.driver.MiniWoB.step", broken)
        with pytest.raises(RuntimeError, match="it is gone"):
            env.step("WAIT()")
    with pytest.raises(error.ResetNeeded):
        env.step("WAIT()")
    observation, _ = env.reset(seed=0)
    assert env.step(right(observation))[1] == 1.0


def test_a_process_that_forgets_to_close_leaves_no_chromium():
    code = """if True:
        import gymnasium, envs.gym
        env = gymnasium.make("minidpo/miniwob-click-button-v0")
        env.reset(seed=0)
        print("up", flush=True)
        input()"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as python:
        assert python.stdout.readline() == "up\n"
        below = chromiums(python.pid)
        assert below
        _, errors = python.communicate("\n", timeout=30)
    assert python.returncode == 0 and errors == ""
    wait_for(lambda: not alive(below))


@pytest.mark.parametrize(
    "vector",
    [SyncVectorEnv, lambda make: AsyncVectorEnv(make, shared_memory=False)],
    ids=["one process", "a process each"],
)
def test_it_runs_in_vectors_even_while_this_process_has_a_browser(env, vector):
    expected = [env.reset(seed=seed)[0] for seed in (3, 4)]
    both = vector([lambda: gymnasium.make(BUTTON)] * 2)
    seen, _ = both.reset(seed=[3, 4])
    assert [{name: seen[name][i] for name in seen} for i in (0, 1)] == expected
    assert both.step([right(each) for each in expected])[1].tolist() == [1.0, 1.0]
    both.close()
    assert env.reset(seed=3)[0] == expected[0]


# ---- worlds without a browser ----

TEXT = {"toy": "open-three", "textcraft": "depth-2", "babyai": "GoToRedBall"}


@pytest.fixture(params=TEXT)
def text_world(request):
    world = envs.world(request.param)
    try:
        world.require()
    except ValueError as missing:
        pytest.skip(str(missing))
    return world


def golden(env, seed, split="rollouts"):
    """Observations, rewards and ends of an episode by the expert, and its last info."""
    world = env.unwrapped.world
    seen, info = env.reset(seed=seed, options={"split": split})
    expert, done, turns = world.expert(info["task"], info["seed"]), [], []
    while info["outcome"] is None:
        action = expert(envs.protocol.Observation(seen["instruction"], seen["page"]), done).action
        done.append(action)
        seen, *end, info = env.step(world.render(action))
        turns.append((seen, *end))
    return turns, info


def test_gymnasiums_checker_has_nothing_to_say_of_other_worlds(text_world):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        name = f"minidpo/{text_world.name}-{TEXT[text_world.name]}-v0"
        with gymnasium.make(name, render_mode="ansi") as env:
            check_env(env.unwrapped, skip_close_check=True)
            assert env.reset(seed=1)[0]["page"] in env.render()


def test_an_episodes_rewards_sum_up_to_the_worlds_own(text_world):
    with WorldEnv(text_world.name, TEXT[text_world.name]) as env:
        turns, info = golden(env, 3, "test")
        assert info["outcome"] == "solved" and info["turns"] == len(turns)
        assert info["seed"] == text_world.instances(TEXT[text_world.name], "test")[3]
        assert sum(turn[1] for turn in turns) == pytest.approx(info["raw_reward"]) == 1.0
        assert [turn[2:] for turn in turns] == [(False, False)] * (len(turns) - 1) + [(True, False)]
        again, _ = env.reset(seed=3, options={"split": "test"})
        seen, *end, info = env.step("hm")
        assert seen == {**again, "error": seen["error"]} and seen["error"]
        assert end == [0.0, False, False] and info["turns"] == 1
        with pytest.raises(TypeError, match="a text like"):
            env.step(3)


def test_a_world_goes_to_its_limit_and_in_threads_and_processes(text_world):
    name, task = text_world.name, TEXT[text_world.name]

    def whole(seed):
        with WorldEnv(name, task) as env:
            return golden(env, seed)

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(whole, (1, 2))) == [whole(1), whole(2)]
    with WorldEnv(name, task) as env:
        first = env.reset(seed=4)[0]
        limit = text_world.step_limit(task)
        assert [env.step("hm")[3] for _ in range(limit)] == [False] * (limit - 1) + [True]
        make = [lambda: gymnasium.make(f"minidpo/{name}-{task}-v0")]
        vector = AsyncVectorEnv(make, shared_memory=False)
        assert vector.reset(seed=[4])[0]["page"][0] == first["page"]
        vector.close()


@pytest.mark.parametrize(
    "given, message",
    [({"world": "toys", "task": "open-one"}, "did you mean toy"),
     ({"world": "toy", "task": "open-on"}, "did you mean open-one"),
     ({"world": "toy", "task": "open-one", "split": "base"}, "the splits are demos"),
     ({"world": "toy", "task": "open-one", "render_mode": "png"}, "render_mode is one of")],
)  # fmt: skip
def test_a_world_that_cannot_be_made_is_refused_with_the_way_out(given, message):
    with pytest.raises(ValueError, match=message):
        WorldEnv(**given)


def test_without_a_worlds_package_its_tasks_are_registered_and_a_line_says_what_is_missing():
    """Nor does a process that forgets to close say anything more."""
    code = """if True:
        import sys
        for package in ("textcraft", "scienceworld", "textworld_express", "py4j"):
            sys.modules[package] = None
        import gymnasium, envs.gym
        toy = gymnasium.make("minidpo/toy-open-one-v0")
        toy.reset(seed=0)
        try:
            gymnasium.make("minidpo/scienceworld-boil-v0").reset(seed=0)
        except ValueError as error:
            print(error)"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], text=True, capture_output=True
    )
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.count("\n") == 1 and "scienceworld" in done.stdout
