"""Every task of every world as a `gymnasium` environment, text in and text out.

    import gymnasium, envs.gym
    env = gymnasium.make("minidpo/miniwob-click-button-v0")
    observation, info = env.reset(seed=7)
    observation, reward, terminated, truncated, info = env.step('CLICK(ref="1")')

`minidpo/WORLD-TASK-v0` is a task of any world, such as `minidpo/scienceworld-boil-v0`. The packages of a world are
imported when an environment is reset; one line says what is missing.

All MiniWoB++ environments of a process share one Chromium, which ends with the last `close()`. Environments work in
any thread and in a notebook. Use `AsyncVectorEnv(..., shared_memory=False)`, because Gymnasium's shared memory cannot
hold text of arbitrary characters.
"""

import asyncio
import atexit
import dataclasses
import os
import re
import string
import threading
from collections.abc import Coroutine
from typing import Any, ClassVar, TypeVar

import gymnasium
from gymnasium import error, spaces

import envs
from envs.actions import Action, ActionError, render
from envs.miniwob.browser.shared import SHARED
from envs.miniwob.tasks import SEEDS
from envs.protocol import SPLITS, EnvError, Observation, Outcome, World

MOST = 2**16  # characters in a text; pages are cut at 6,000
T = TypeVar("T")


class AnyText(spaces.Text):
    """Text of any characters, because pages are not limited to an alphabet."""

    def __init__(self, seed: int | None = None):
        super().__init__(MOST, min_length=0, charset=string.printable[:95], seed=seed)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= MOST

    @property
    def is_np_flattenable(self) -> bool:
        return False  # characters have no index here

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class ActionText(AnyText):
    """Any text is accepted, though most is no usable action. A sample clicks on one of the first elements."""

    def sample(self, mask: None = None, probability: None = None) -> str:
        return render(Action("CLICK", ref=str(self.np_random.integers(1, 10))))


class ExampleText(AnyText):
    """Any text is accepted, though most is no usable action. A sample is the example in the world's prompt."""

    def __init__(self, world: World):
        super().__init__()
        self.example = re.search(r"^action: (.+)$", world.system_prompt, re.MULTILINE)[1]

    def sample(self, mask: None = None, probability: None = None) -> str:
        return self.example


class Place:
    """An environment of a world, used without `await`, because its event loop has its own thread. It ends with
    `close`, or with the process."""

    def __init__(self, world: World):
        """Raises ValueError in one line if the world cannot be played on this machine."""
        world.require()
        self._process, self._loop = os.getpid(), asyncio.new_event_loop()
        # a daemon thread, because Python joins all others before it calls the `atexit` functions
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._opened = world.open(1)
        (self.env,) = self.run(self._opened.__aenter__())
        atexit.register(self._at_exit)

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of a call of the environment."""
        if self._process != os.getpid():  # a forked process has no such thread
            call.close()
            raise EnvError(
                "this environment belongs to the parent process; make a new one after a fork"
            )
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def close(self) -> None:
        """Close the environment and end its thread."""
        self.run(self._opened.__aexit__(None, None, None))
        atexit.unregister(self._at_exit)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _at_exit(self) -> None:
        if self._process == os.getpid():
            self.close()


class Tab:
    """A page of the shared Chromium."""

    def __init__(self):
        self.env = SHARED.open()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of a call of the environment."""
        return SHARED.run(self.env, call)

    def close(self) -> None:
        """Close the page."""
        SHARED.close(self.env)


class WorldEnv(gymnasium.Env[dict[str, str], str]):
    """One task of a world; an episode is one instance of it.

    Observation: `instruction`, `page` (what a person sees) and `error` (why the last action could not be carried out,
    or empty). Action: text in the world's grammar; unusable text costs a turn and raises nothing. Reward: the increase
    of the world's own reward, so that an episode's rewards add up to it. `terminated`: the world has given its verdict.
    `truncated`: step_limit(task) turns without a verdict. `info`: task, seed (of the instance, see `reset`), turns,
    outcome (None, "solved", "failed", "limit") and raw_reward (the world's own, so far). If the world breaks, EnvError
    is raised, a RuntimeError. `render()` returns the observation as an agent reads it ("ansi").
    """

    metadata: ClassVar = {"render_modes": ["ansi"], "render_fps": 1}
    splits: ClassVar[tuple[str, ...]] = SPLITS

    def __init__(
        self, world: str, task: str, split: str = "rollouts", render_mode: str | None = None
    ):
        """Opens nothing yet. Raises ValueError if world, task, split or render mode is unknown."""
        self.world = envs.world(world)
        if task not in self.world.suites["all"]:
            envs.resolve(self.world, task)  # says which task was meant
            raise ValueError(f"{task!r} is a suite, but an environment has one task")
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(
                f"render_mode is one of {self.metadata['render_modes']}, got {render_mode!r}"
            )
        self.task, self.split, self.render_mode = task, self._known(split), render_mode
        self.observation_space = spaces.Dict(
            {name: AnyText() for name in ("instruction", "page", "error")}
        )
        self.action_space = ExampleText(self.world)
        self._place: Place | Tab | None = None
        self._seed, self._turns, self._seen, self._over, self._closed = 0, 0, None, False, False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        """Start instance number `seed` of the split (modulo the number of instances); a random one without a seed.

        `options={"split": "test"}` takes the instance from another split. The instance's own seed is the world's
        instances(task, split)[number], as in collect.py and evaluate.py. Raises ValueError if the world cannot be
        played here.
        """
        if self._closed:
            raise error.ClosedEnvironmentError(
                f"reset() after close() of {self.task}: make a new one"
            )
        super().reset(seed=seed)
        options = dict(options or {})
        split = self._known(options.pop("split", self.split))
        seeds = self.world.instances(self.task, split)
        if options:
            raise ValueError(f"the only option is split, got {', '.join(map(repr, options))}")
        number = self.np_random.integers(len(seeds)) if seed is None else seed
        self._seed, self._turns, self._seen = seeds[int(number) % len(seeds)], 0, None
        if self._place is None:
            self._place = self._open()
        return self._show(self._place.run(self._place.env.reset(self.task, self._seed)))

    def step(self, action: str):
        """Take one turn. Raises ResetNeeded if no episode runs and TypeError if the action is not text."""
        if self._seen is None or self._over:
            raise error.ResetNeeded(
                f"step() of {self.task} without a running episode: call reset() first"
            )
        if not isinstance(action, str):
            example = ExampleText(self.world).example
            raise TypeError(f"an action is a text like {example}, got {type(action).__name__}")
        before, self._seen = self._seen, None  # if the world breaks now, the episode is over
        try:
            seen = self._place.run(self._place.env.step(self.world.parse(action)))
        except ActionError as problem:
            seen = dataclasses.replace(before, error=str(problem))
        self._turns += 1
        reward = self._reward(before if self._turns > 1 else None, seen)
        observation, info = self._show(seen)
        return observation, reward, seen.outcome is not None, info["outcome"] == Outcome.LIMIT, info

    def render(self) -> str | bytes | None:
        """The observation as text; None without a render mode."""
        if self.render_mode is None:
            return None
        if self._seen is None:
            raise error.ResetNeeded(f"render() of {self.task} before reset()")
        trouble = f"error: {self._seen.error}\n" if self._seen.error else ""
        return f"task: {self._seen.instruction}\n{trouble}page:\n{self._seen.text}"

    def close(self) -> None:
        """Close the environment. A second call does nothing."""
        place, self._place, self._seen, self._closed = self._place, None, None, True
        if place is not None:
            place.close()

    def _open(self) -> "Place | Tab":
        return Place(self.world)

    def _reward(self, before: Observation | None, seen: Observation) -> float:
        """The reward of a step. `before` is None in the first step, which also gets the reward at the start."""
        return seen.reward - (before.reward if before else 0.0)

    def _known(self, split: str) -> str:
        if split not in self.splits:
            raise ValueError(f"unknown split {split!r}, the splits are {', '.join(self.splits)}")
        return split

    def _show(self, seen: Observation) -> tuple[dict[str, str], dict[str, Any]]:
        at_limit = self._turns >= self.world.step_limit(self.task)
        outcome = seen.outcome or (Outcome.LIMIT if at_limit else None)
        self._seen, self._over = seen, outcome is not None
        info = {
            "task": self.task,
            "seed": self._seed,
            "turns": self._turns,
            "outcome": outcome and str(outcome),
            "raw_reward": seen.reward,
        }
        return {"instruction": seen.instruction, "page": seen.text, "error": seen.error or ""}, info


class MiniWoBEnv(WorldEnv):
    """One task of MiniWoB++. Reward: 1.0 in the step that solves the task, else 0.0. `render` also gives pictures."""

    metadata: ClassVar = {"render_modes": ["ansi", "png"], "render_fps": 1}
    splits = tuple(SEEDS)

    def __init__(self, task: str, split: str = "rollouts", render_mode: str | None = None):
        """Opens nothing yet. Raises ValueError if task, split or render mode is unknown."""
        super().__init__("miniwob", task, split, render_mode)
        self.action_space = ActionText()

    def render(self) -> str | bytes | None:
        """The picture or the text, by `render_mode`; None without a render mode."""
        if self.render_mode == "png" and self._seen is not None:
            return self._place.run(self._place.env.screenshot())
        return super().render()

    def _open(self) -> Tab:
        return Tab()

    def _reward(self, before: Observation | None, seen: Observation) -> float:
        return float(seen.outcome is Outcome.SOLVED)


def register() -> None:
    """Register all tasks by name; no world's package is imported."""
    for name in envs.names():
        for task in envs.world(name).suites["all"]:
            entry, given = "envs.gym:WorldEnv", {"world": name, "task": task}
            if name == "miniwob":
                entry, given = "envs.gym:MiniWoBEnv", {"task": task}
            gymnasium.register(f"minidpo/{name}-{task}-v0", entry, kwargs=given)


register()
