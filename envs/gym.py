"""Every MiniWoB++ task as a `gymnasium` environment, text in and text out.

    import gymnasium, envs.gym
    env = gymnasium.make("minidpo/miniwob-click-button-v0")
    observation, info = env.reset(seed=7)
    observation, reward, terminated, truncated, info = env.step('CLICK(ref="1")')

All environments of a process share one Chromium, which ends with the last `close()`. They work in any thread
and in a notebook. Use `AsyncVectorEnv(..., shared_memory=False)`, because Gymnasium's shared memory cannot
hold text of arbitrary characters.
"""

import dataclasses
import string
from typing import Any, ClassVar

import gymnasium
from gymnasium import error, spaces

from envs import resolve
from envs.actions import Action, ActionError, parse, render
from envs.miniwob import WORLD
from envs.miniwob.browser.shared import SHARED
from envs.miniwob.tasks import SEEDS, STEP_LIMIT, SUITES
from envs.protocol import Observation, Outcome

MOST = 2**16  # characters of a text; a page is cut at 6,000


class AnyText(spaces.Text):
    """Text of arbitrary characters, because a page's words are not limited to an alphabet."""

    def __init__(self, seed: int | None = None):
        super().__init__(MOST, min_length=0, charset=string.printable[:95], seed=seed)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= MOST

    @property
    def is_np_flattenable(self) -> bool:
        return False  # a character has no index

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class ActionText(AnyText):
    """Any text is an action, though mostly an unusable one. A sample clicks on one of the first elements."""

    def sample(self, mask: None = None, probability: None = None) -> str:
        return render(Action("CLICK", ref=str(self.np_random.integers(1, 10))))


class MiniWoBEnv(gymnasium.Env[dict[str, str], str]):
    """One task; an episode is one instance of it.

    Observation: `instruction`, `page` (what a person sees, one element a line) and `error` (why the last
    action could not be carried out, or empty). Action: text in the grammar of `envs.actions`; unusable text
    costs a turn and raises nothing. Reward: 1.0 in the step that solves the task, else 0.0. `terminated`: the
    page has given its verdict. `truncated`: STEP_LIMIT(task) turns without a verdict. `info`: task, seed (of
    the instance, see `reset`), turns, outcome (None, "solved", "failed", "limit") and raw_reward (the page's
    own). A broken browser raises EnvError, a RuntimeError. `render()` returns the observation as an agent
    reads it ("ansi") or the bytes of a screenshot ("png").
    """

    metadata: ClassVar = {"render_modes": ["ansi", "png"], "render_fps": 1}

    def __init__(self, task: str, split: str = "rollouts", render_mode: str | None = None):
        """Opens nothing yet. Raises ValueError for an unknown task, split or render mode."""
        if task not in SUITES["all"]:
            resolve(WORLD, task)  # says which task was meant
            raise ValueError(f"{task!r} is a suite, an environment has one task")
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(
                f"render_mode is one of {self.metadata['render_modes']}, got {render_mode!r}"
            )
        self.task, self.split, self.render_mode = task, _known(split), render_mode
        self.observation_space = spaces.Dict(
            {name: AnyText() for name in ("instruction", "page", "error")}
        )
        self.action_space = ActionText()
        self._page = None
        self._seed, self._turns, self._seen, self._over, self._closed = 0, 0, None, False, False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        """Start instance number `seed` (modulo a million) of the split; without a seed a random one.

        `options={"split": "test"}` takes the instance from another split. Its seed is SEEDS[split][number],
        as in collect.py and evaluate.py.
        """
        if self._closed:
            raise error.ClosedEnvironmentError(
                f"reset() after close() of {self.task}: make a new one"
            )
        super().reset(seed=seed)
        options = dict(options or {})
        seeds = SEEDS[_known(options.pop("split", self.split))]
        if options:
            raise ValueError(f"the only option is split, got {', '.join(map(repr, options))}")
        number = self.np_random.integers(len(seeds)) if seed is None else seed
        self._seed, self._turns, self._seen = seeds[int(number) % len(seeds)], 0, None
        if self._page is None:
            self._page = SHARED.open()
        return self._show(SHARED.run(self._page, self._page.reset(self.task, self._seed)))

    def step(self, action: str):
        """Take one turn. Raises ResetNeeded if no episode runs and TypeError if the action is not text."""
        if self._seen is None or self._over:
            raise error.ResetNeeded(
                f"step() of {self.task} without a running episode: call reset() first"
            )
        if not isinstance(action, str):
            raise TypeError(f'an action is a text like CLICK(ref="1"), got {type(action).__name__}')
        before, self._seen = self._seen, None  # if the browser breaks, the episode has ended
        try:
            seen = SHARED.run(self._page, self._page.step(parse(action)))
        except ActionError as problem:
            seen = dataclasses.replace(before, error=str(problem))
        self._turns += 1
        observation, info = self._show(seen)
        reward = float(seen.outcome is Outcome.SOLVED)
        return observation, reward, seen.outcome is not None, info["outcome"] == Outcome.LIMIT, info

    def render(self) -> str | bytes | None:
        """The picture or text that `render_mode` names; None without a render mode."""
        if self.render_mode is None:
            return None
        if self._seen is None:
            raise error.ResetNeeded(f"render() of {self.task} before reset()")
        if self.render_mode == "png":
            return SHARED.run(self._page, self._page.screenshot())
        trouble = f"error: {self._seen.error}\n" if self._seen.error else ""
        return f"task: {self._seen.instruction}\n{trouble}page:\n{self._seen.text}"

    def close(self) -> None:
        """Close the page. A second call does nothing."""
        page, self._page, self._seen, self._closed = self._page, None, None, True
        if page is not None:
            SHARED.close(page)

    def _show(self, seen: Observation) -> tuple[dict[str, str], dict[str, Any]]:
        outcome = seen.outcome or (Outcome.LIMIT if self._turns >= STEP_LIMIT(self.task) else None)
        self._seen, self._over = seen, outcome is not None
        info = {
            "task": self.task,
            "seed": self._seed,
            "turns": self._turns,
            "outcome": outcome and str(outcome),
            "raw_reward": seen.reward,
        }
        return {"instruction": seen.instruction, "page": seen.text, "error": seen.error or ""}, info


def _known(split: str) -> str:
    if split not in SEEDS:
        raise ValueError(f"unknown split {split!r}, the splits are {', '.join(SEEDS)}")
    return split


for _task in SUITES["all"]:
    gymnasium.register(f"minidpo/miniwob-{_task}-v0", "envs.gym:MiniWoBEnv", kwargs={"task": _task})
