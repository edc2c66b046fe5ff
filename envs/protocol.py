"""What a world and its environments promise.

An episode is `reset(task, seed)`, then `step(action)` until `outcome` is set. The same task, seed and actions
give the same episode. If an action cannot be carried out as given, it is carried out as far as possible or not at
all, and `error` says why. A broken environment raises `EnvError`, so it is never mistaken for a reward of 0.

`tests/envs/test_worlds.py` checks these promises for every world; `envs/toy` is a small world to read.
"""

import enum
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

Action = Hashable
"Whatever the world's `parse` returns."


class ActionError(ValueError):
    """The text is not an action. The message says why, in one line that the agent reads."""


class EnvError(RuntimeError):
    """The environment itself failed (browser died, deadline passed). The episode is no data and has no reward."""


class Outcome(enum.StrEnum):
    """How an episode ended. LIMIT is set by the code that runs episodes, never by a world."""

    SOLVED = "solved"
    FAILED = "failed"
    LIMIT = "limit"


@dataclass(frozen=True)
class Observation:
    """What a person sees, in words, and the state of the episode."""

    instruction: str
    "The task in words, in one or more lines."
    text: str
    'What a person sees and can use, one element per line: `button "Submit" [3]`.'
    outcome: Outcome | None = None
    "None while the episode runs."
    reward: float = 0.0
    "The world's raw reward so far; an episode keeps it when a limit ends it. 0.0 where only the end is rewarded."
    error: str | None = None
    "Why the last action could not be carried out as given, or what the page was prevented from doing; else None."


class Env(Protocol):
    """A place in which one episode runs at a time."""

    async def reset(self, task: str, seed: int) -> Observation:
        """Start the instance (task, seed). Raises EnvError if that is impossible."""

    async def step(self, action: Action) -> Observation:
        """Carry out one action and look again. Raises EnvError if the episode cannot continue."""


class Camera(Env, Protocol):
    """An environment that can be photographed for a report."""

    async def screenshot(self) -> bytes:
        """A PNG of what a person sees now."""

    async def marks(self, action: Action) -> list[list[int]]:
        """Left, top, width and height in the picture of each element that the action is about to use."""


class Decision(NamedTuple):
    """An expert's answer. Any record with these two fields can be used."""

    thought: str
    action: Action


Expert = Callable[[Observation, list[Action]], Decision]
"(observation, actions so far in this episode) -> decision. Raises ValueError or LookupError if it knows no action."

MISTAKES = {
    "ended too early": "it ended the task where something was still to be done",
    "wrong text": "it typed or chose something else in the right element",
    "wrong action": "it did something else to the right element",
    "wrong element": "it used another element than the expert would have",
}


SPLITS = ("demos", "rollouts", "validation", "test")
"The splits of a task's instances; a world may have more."


class World(Protocol):
    """Tasks with their seeds and rewards, and the language of their observations and actions.

    A world derives from this class and defines the fields and `step_limit`, `parse`, `render` and `open`.
    """

    name: str
    suites: Mapping[str, tuple[str, ...]]
    "Lists of tasks by name; `all` names every task."
    seeds: Mapping[str, Sequence[int]]
    "The seeds of demos, rollouts, validation and test, all different; see `instances`."
    system_prompt: str
    "The first message to the agent. It contains an example of an answer: a line `action: ...`."
    experts: Mapping[str, Expert] | Collection[str]
    "Scripted demonstrators of the tasks that have one; or only the names of these tasks, if `expert` is overridden."
    shows_state: bool = True
    "Whether `text` shows the whole state. If so, an agent that does the same on the same text three times is stopped."

    def instances(self, task: str, split: str) -> Sequence[int]:
        """The seeds of a task in a split; overridden by a world whose tasks have different seeds. Raises KeyError for
        an unknown split."""
        return self.seeds[split]

    def expert(self, task: str, seed: int) -> Expert:
        """The demonstrator of an instance; overridden by a world that knows a solution of each instance."""
        return self.experts[task]

    def step_limit(self, task: str) -> int:
        """The most actions in an episode of the task."""

    def parse(self, text: str) -> Action:
        """The action in a text. Raises ActionError and nothing else."""

    def render(self, action: Action) -> str:
        """The action as one line of text: parse(render(action)) == action."""

    def open(self, places: int, watch: bool = False) -> AbstractAsyncContextManager[Sequence[Env]]:
        """`places` environments. watch: in a window in which people can see what happens."""

    def mistake(self, seen: Observation, done: Action, wanted: Action, ended: bool) -> str:
        """A key of MISTAKES: how an action differs from the expert's. ended: the episode failed with this action."""
        return "wrong action"

    def pictures(self, places: int) -> AbstractAsyncContextManager[Sequence[Camera]] | None:
        """Environments that can be photographed; None if this world has no pictures."""
        return None

    def require(self, watch: bool = False) -> None:
        """Raise ValueError in one line if the world cannot be played on this machine."""
