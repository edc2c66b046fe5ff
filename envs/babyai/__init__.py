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
A seed is minigrid's seed. Read in this order: `levels`, `actions`, `sight` (what the agent sees, in words),
`rooms`, `bot` (the expert), then this file. Modules that need minigrid are imported where they are used.
"""

import contextlib
from collections.abc import AsyncIterator, Sequence

from envs import packages
from envs.babyai.actions import parse
from envs.babyai.levels import LEVELS, SEEDS, SUITES
from envs.protocol import Env, Expert, World

SYSTEM_PROMPT = """You walk through rooms and do a task. You see what is before you, in steps. Answer:
thought: where the things of the task are, then what you do
action: move forward
or turn left, turn right, pick up, drop, toggle (opens a door or a box); these act on what is 1 ahead"""


class BabyAI(World):
    """The levels as `minidpo` sees them."""

    name = "babyai"
    suites, seeds = SUITES, SEEDS
    system_prompt = SYSTEM_PROMPT
    experts = tuple(LEVELS)
    parse, render = staticmethod(parse), staticmethod(str)
    require = staticmethod(lambda watch=False: packages.require("minigrid", "3.2.0"))

    def expert(self, task: str, seed: int) -> Expert:
        """minigrid's bot."""
        from envs.babyai.bot import adviser

        return adviser(task, seed)

    def step_limit(self, task: str) -> int:
        """One and a half times what the bot needs for nearly all seeds; see `levels`."""
        return LEVELS[task]

    @contextlib.asynccontextmanager
    async def open(self, places: int, watch: bool = False) -> AsyncIterator[Sequence[Env]]:
        """Rooms for each place, in this process: a step takes a millisecond."""
        from envs.babyai.rooms import Rooms

        yield [Rooms() for _ in range(places)]


WORLD = BabyAI()
