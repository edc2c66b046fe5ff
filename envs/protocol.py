"""What an environment shows and what it promises.

An episode is `reset(task, seed)`, then `step(action)` until `outcome` is set. The same task, seed and actions
give the same episode. An action that cannot be carried out as given does nothing, or what it can, and `error`
says so. A broken browser raises `EnvError`, so it can never be mistaken for a reward of 0.
"""

import enum
from dataclasses import dataclass
from typing import Protocol

from envs.actions import Action


class Outcome(enum.StrEnum):
    """How an episode ended. LIMIT is set by the code that runs episodes, never by a page."""

    SOLVED = "solved"
    FAILED = "failed"
    LIMIT = "limit"


@dataclass(frozen=True)
class Observation:
    """What a person sees, in words, and how the episode stands."""

    instruction: str
    "The page's own task sentence, one line or more."
    text: str
    'What a person sees and can use, one element a line: `button "Submit" [3]`.'
    outcome: Outcome | None = None
    "None while the episode runs."
    reward: float = 0.0
    "The page's raw reward, without time decay; 0.0 while the episode runs."
    error: str | None = None
    "Why the last action could not be carried out as given, or what the world kept the page from; else None."


class EnvError(RuntimeError):
    """The environment itself failed (browser died, deadline passed): neither data nor a reward."""


class Env(Protocol):
    """One place in which one episode runs at a time."""

    async def reset(self, task: str, seed: int) -> Observation:
        """Start the instance (task, seed). Raises EnvError if no browser can be had."""

    async def step(self, action: Action) -> Observation:
        """Carry out one action and look again. Raises EnvError if the episode cannot go on."""
