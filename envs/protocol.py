"""What a world promises, and the environments in it.

An episode is `reset(task, seed)`, then `step(action)` until `outcome` is set. The same task, seed and actions
give the same episode. An action that cannot be carried out as given does nothing, or what it can, and `error`
says so. A broken environment raises `EnvError`, so it can never be mistaken for a reward of 0.

`tests/envs/test_worlds.py` checks these promises for every world, and `envs/toy` is a small one to read.
"""

import enum
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

Action = Hashable
"Whatever the world's `parse` returns."


class ActionError(ValueError):
    """The text is not an action; the message says what is wrong, in one line that the agent reads."""


class EnvError(RuntimeError):
    """The environment itself failed (browser died, deadline passed): neither data nor a reward."""


class Outcome(enum.StrEnum):
    """How an episode ended. LIMIT is set by the code that runs episodes, never by a world."""

    SOLVED = "solved"
    FAILED = "failed"
    LIMIT = "limit"


@dataclass(frozen=True)
class Observation:
    """What a person sees, in words, and how the episode stands."""

    instruction: str
    "The task in a sentence, one line or more."
    text: str
    'What a person sees and can use, one element a line: `button "Submit" [3]`.'
    outcome: Outcome | None = None
    "None while the episode runs."
    reward: float = 0.0
    "The world's raw reward so far, which an episode has when a limit ends it; 0.0 where only the end is paid."
    error: str | None = None
    "Why the last action could not be carried out as given, or what the world kept the page from; else None."


class Env(Protocol):
    """One place in which one episode runs at a time."""

    async def reset(self, task: str, seed: int) -> Observation:
        """Start the instance (task, seed). Raises EnvError if the world cannot be had."""

    async def step(self, action: Action) -> Observation:
        """Carry out one action and look again. Raises EnvError if the episode cannot go on."""


class Camera(Env, Protocol):
    """An environment that can be photographed for a report."""

    async def screenshot(self) -> bytes:
        """A PNG of what a person sees now."""

    async def marks(self, action: Action) -> list[list[int]]:
        """Left, top, width and height, on the picture, of what the action is about to use."""


class Decision(NamedTuple):
    """An expert's answer; any record with these two fields will do."""

    thought: str
    action: Action


Expert = Callable[[Observation, list[Action]], Decision]
"(observation, actions done so far in this episode) -> decision. Raises ValueError or LookupError where it is lost."

MISTAKES = {
    "ended too early": "it ended the task where something was still to be done",
    "wrong text": "it typed or chose something else in the right element",
    "wrong action": "it did something else to the right element",
    "wrong element": "it used another element than the expert would have",
}


SPLITS = ("demos", "rollouts", "validation", "test")
"Of a task's instances; a world may have more."


class World(Protocol):
    """Tasks, their seeds and rewards, and how an agent speaks about them.

    A world derives from this class. It needs the fields and `step_limit`, `parse`, `render` and `open`.
    """

    name: str
    suites: Mapping[str, tuple[str, ...]]
    "Lists of tasks by name; `all` names every task."
    seeds: Mapping[str, Sequence[int]]
    "The seeds of demos, rollouts, validation and test, which are disjoint; see `instances`."
    system_prompt: str
    "What the agent is told first. It holds an example of an answer: a line `action: ...`."
    experts: Mapping[str, Expert] | Collection[str]
    "Scripted demonstrators by task, for the tasks that have one; or these tasks alone, and `expert` gives them."
    shows_state: bool = True
    "Whether `text` tells where things stand. Then whoever does the same on the same text three times has ended."

    def instances(self, task: str, split: str) -> Sequence[int]:
        """The seeds of a task in a split; a world whose tasks differ in them overrides it. Raises KeyError for a
        split that there is not."""
        return self.seeds[split]

    def expert(self, task: str, seed: int) -> Expert:
        """The demonstrator of an instance; a world that knows a solution of each overrides it."""
        return self.experts[task]

    def step_limit(self, task: str) -> int:
        """The actions an episode of the task may take."""

    def parse(self, text: str) -> Action:
        """The action that a text means. Raises ActionError and nothing else."""

    def render(self, action: Action) -> str:
        """The action as one line of text: parse(render(action)) == action."""

    def open(self, places: int, watch: bool = False) -> AbstractAsyncContextManager[Sequence[Env]]:
        """So many environments. `watch`: people can see what happens."""

    def mistake(self, seen: Observation, done: Action, wanted: Action, ended: bool) -> str:
        """A key of MISTAKES: how what was done differs from the expert's action. `ended`: it failed with it."""
        return "wrong action"

    def pictures(self, places: int) -> AbstractAsyncContextManager[Sequence[Camera]] | None:
        """Environments that can be photographed; None if this world shows nothing."""
        return None

    def require(self, watch: bool = False) -> None:
        """Raises ValueError, in one line, if the world cannot be played on this machine."""
