"""BabyAI (Chevalier-Boisvert et al. 2019, arXiv:1810.08272): minigrid's levels, told in words.

    task: go to the red ball
    page:
    red ball: 3 ahead, 2 left
    wall: 5 ahead
    facing: east
    walked: 12
    carrying: nothing

AgentGym (Xi et al. 2024, arXiv:2406.04151) tells the levels in words as well. Differs: an action here is one of
minigrid's six. AgentGym has "go to red ball 1" besides, which walks all the way in one turn, so that little of
an episode is left to learn from; minigrid's bot, the expert, acts by the six.

The reward is 1.0 for a solved mission and 0.0 for a failed one; minigrid's own is 1 - 0.9 · steps / max_steps.
A seed is minigrid's seed. The bot knows the mission and what the agent has seen so far, which one observation
does not tell, so its next action comes with the observation, as `golden`. Read in this order: `levels`, `sight`
(what the agent sees, in words), `bot`, then this file.
"""

import contextlib
import io
from collections.abc import AsyncIterator, Sequence

import gymnasium
import minigrid  # noqa: F401 - registers the levels

from envs.babyai.bot import ACTIONS, Bot
from envs.babyai.levels import LEVELS, SEEDS, SUITES, gym_id
from envs.babyai.sight import look, name, thought
from envs.protocol import ActionError, Decision, Env, Observation, Outcome, World

SYSTEM_PROMPT = """You walk through rooms and do a task. You see what is before you, in steps. Answer:
thought: where the things of the task are, then what you do
action: move forward
or turn left, turn right, pick up, drop, toggle (opens a door or a box); these act on what is 1 ahead"""


class Rooms(Env):
    """A level of minigrid."""

    async def reset(self, task: str, seed: int) -> Observation:
        """Build the rooms. minigrid draws from a generator of its own, which the seed starts."""
        self.grid = gymnasium.make(gym_id(task), disable_env_checker=True).unwrapped
        with contextlib.redirect_stdout(io.StringIO()):  # minigrid prints which rooms it rejects
            self.grid.reset(seed=seed)
        self.grid.max_steps = 10**9  # step_limit ends an episode
        self.bot, self.walked = Bot(self.grid), 0
        return self._observation(golden=self.bot.advise(None))

    async def step(self, action: str) -> Observation:
        """Do it. What changes nothing costs a turn, and the observation says what is in the way."""
        before = self._state()
        place = self.grid.agent_pos
        _, reward, is_over, _, _ = self.grid.step(ACTIONS[action])
        self.walked += self.grid.agent_pos != place
        error = None
        if self._state() == before:
            ahead = self.grid.grid.get(*self.grid.front_pos)
            error = f"{action} did nothing: {name(ahead)} is 1 ahead"
        if not is_over:
            return self._observation(error=error, golden=self.bot.advise(action))
        outcome = Outcome.SOLVED if reward > 0 else Outcome.FAILED
        return self._observation(outcome=outcome, reward=float(reward > 0), error=error)

    def _observation(self, **rest) -> Observation:
        return Observation(self.grid.mission, look(self.grid, self.walked), **rest)

    def _state(self) -> tuple:
        """All that one action can change."""
        ahead = self.grid.grid.get(*self.grid.front_pos)
        return (
            self.grid.agent_pos,
            self.grid.agent_dir,
            self.grid.carrying,
            ahead and ahead.encode(),
        )


def parse(text: str) -> str:
    """The action that a text means. Raises ActionError and nothing else.

    >>> parse("`Turn left`.")
    'turn left'
    """
    action = " ".join(text.lower().strip(" \t\r\n`.\"'").split())
    if action not in ACTIONS:
        raise ActionError(f"an action is one of {', '.join(ACTIONS)}; got {text.strip()[:40]!r}")
    return action


def expert(seen: Observation, done: list[str]) -> Decision:
    """What minigrid's bot does next. Raises LookupError where it knows no way on."""
    if seen.golden is None:
        raise LookupError("the bot knows no way on")
    return Decision(thought(seen.instruction, seen.text, seen.golden), seen.golden)


class BabyAI(World):
    """The levels as `minidpo` sees them."""

    name = "babyai"
    suites, seeds = SUITES, SEEDS
    system_prompt = SYSTEM_PROMPT
    experts = dict.fromkeys(LEVELS, expert)
    parse, render = staticmethod(parse), staticmethod(str)

    def step_limit(self, task: str) -> int:
        """One and a half times what the bot needs for nearly all seeds; see `levels`."""
        return LEVELS[task]

    @contextlib.asynccontextmanager
    async def open(self, places: int, watch: bool = False) -> AsyncIterator[Sequence[Env]]:
        """Rooms for each place, in this process: a step takes a millisecond."""
        yield [Rooms() for _ in range(places)]


WORLD = BabyAI()
