"""minigrid's bot as an expert: what to do next, whatever the agent did before."""

import contextlib
from functools import lru_cache

from minigrid.core.actions import Actions
from minigrid.utils.baby_ai_bot import BabyAIBot, DisappearedBoxError

from envs.babyai.actions import ACTIONS
from envs.babyai.rooms import build
from envs.babyai.sight import thought
from envs.protocol import Decision, Observation

SEARCHES = 100  # for one action; the bot's walks through 87 levels, 20 seeds each, took at most 6


class Lost(Exception):
    """The bot plans without end."""


class Bot(BabyAIBot):
    """The bot of the BabyAI paper. It sees the mission and remembers every cell that the agent has seen.

    Where the agent did not follow it, it may fail or swap the same two subgoals for ever. Then it has no advice.
    """

    is_lost = False

    def advise(self, done: str | None) -> str | None:
        """The next action after the one done; None where the bot knows none."""
        self.searches, action = 0, Actions.done
        if not self.is_lost:
            with contextlib.suppress(Lost, DisappearedBoxError, AssertionError):
                action = self.replan(None if done is None else Actions(ACTIONS.index(done)))
        self.is_lost = action == Actions.done
        return None if self.is_lost else ACTIONS[action]

    def _breadth_first_search(self, *args, **options):
        self.searches += 1
        if self.searches > SEARCHES:
            raise Lost
        return super()._breadth_first_search(*args, **options)


class Adviser:
    """An instance's expert. It repeats what the agent did in rooms of its own and asks the bot there.

    The bot knows what the agent has seen so far, which one observation does not tell.
    """

    def __init__(self, task: str, seed: int):
        self.instance = task, seed
        self._begin()

    def __call__(self, seen: Observation, done: list[str]) -> Decision:
        """What the bot does next. Raises LookupError where it knows no way on."""
        action = self.advice(done)
        if action is None:
            raise LookupError("the bot knows no way on")
        return Decision(thought(seen.instruction, seen.text, action), action)

    def advice(self, done: list[str]) -> str | None:
        """The bot's next action after these. It goes on from what was done last time if that is where these begin."""
        if done[: len(self.done)] != self.done[: len(done)]:
            self._begin()
        for action in done[len(self.done) :]:
            self.grid.step(ACTIONS.index(action))
            self.done.append(action)
            self.advices.append(self.bot.advise(action))
        return self.advices[len(done)]

    def _begin(self) -> None:
        self.grid = build(*self.instance)
        self.bot, self.done = Bot(self.grid), []
        self.advices = [self.bot.advise(None)]  # after none of the actions done, after one, ...


@lru_cache(64)  # more than are played at a time
def adviser(task: str, seed: int) -> Adviser:
    """The expert of an instance."""
    return Adviser(task, seed)
