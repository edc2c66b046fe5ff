"""A level of minigrid as an environment."""

import contextlib
import io

import gymnasium
import minigrid  # noqa: F401 - registers the levels
from minigrid.minigrid_env import MiniGridEnv

from envs.babyai.actions import ACTIONS
from envs.babyai.levels import gym_id
from envs.babyai.sight import look, name
from envs.protocol import Env, Observation, Outcome


def build(task: str, seed: int) -> MiniGridEnv:
    """The rooms of an instance. minigrid draws from a generator of its own, which the seed starts."""
    grid = gymnasium.make(gym_id(task), disable_env_checker=True).unwrapped
    with contextlib.redirect_stdout(io.StringIO()):  # minigrid prints which rooms it rejects
        grid.reset(seed=seed)
    grid.max_steps = 10**9  # step_limit ends an episode
    # minigrid's own picture of each step would take half of the step's time
    grid.gen_obs = lambda: None
    return grid


class Rooms(Env):
    """The rooms in which an agent walks."""

    async def reset(self, task: str, seed: int) -> Observation:
        """Build the rooms."""
        self.grid, self.walked = build(task, seed), 0
        return self._observation()

    async def step(self, action: str) -> Observation:
        """Do it. What changes nothing costs a turn, and the observation says what is in the way."""
        before = self._state()
        place = self.grid.agent_pos
        _, reward, is_over, _, _ = self.grid.step(ACTIONS.index(action))
        self.walked += self.grid.agent_pos != place
        error, outcome = None, None
        if self._state() == before:
            ahead = self.grid.grid.get(*self.grid.front_pos)
            error = f"{action} did nothing: {name(ahead)} is 1 ahead"
        if is_over:
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
