"""A world for tests of acting: it can be slow, it can break, and it has a grammar of its own."""

import asyncio
import contextlib
import re
from collections import Counter

from envs.protocol import ActionError, Decision, EnvError, Observation, Outcome, World
from minidpo.acting.jobs import Job, child_seed
from minidpo.acting.policies import Reply
from minidpo.acting.rollout import play
from minidpo.memory.context import Context
from minidpo.memory.machine import Machine


class Stairs:
    """Steps 1, 2, 3 are to be taken in this order; step 4 ends it badly.

    It breaks as often as `broken` says for (seed, "reset" or "step", steps taken).
    """

    def __init__(self, slowness: int = 0, broken: Counter | None = None):
        self.slowness, self.broken = slowness, Counter() if broken is None else broken

    async def reset(self, task: str, seed: int) -> Observation:
        self.task, self.seed, self.at, self.outcome = task, seed, 0, None
        return await self._look("reset")

    async def step(self, action: int) -> Observation:
        assert self.outcome is None, "the episode is over"
        if action not in (1, 2, 3, 4):
            return await self._look("step", "there is no such step")
        self.at += action == self.at + 1
        if action == 4:
            self.outcome = Outcome.FAILED
        elif self.at == 3:
            self.outcome = Outcome.SOLVED
        return await self._look("step")

    async def _look(self, moment: str, error: str | None = None) -> Observation:
        for _ in range(self.slowness + 1):
            await asyncio.sleep(0)
        if self.broken[self.seed, moment, self.at]:
            self.broken[self.seed, moment, self.at] -= 1
            raise EnvError("the stairs broke")
        text = "".join(f"step {n}\n" for n in range(self.at + 1, 5))
        reward = float(self.outcome == Outcome.SOLVED)
        return Observation(f"Climb {self.seed}.", text, self.outcome, reward, error)


def expert(seen: Observation, done: list[int]) -> Decision:
    return Decision("up", int(seen.text[5]))


class StairsWorld(World):
    """The stairs under several names, which are tasks."""

    name = "stairs"
    suites = {"all": ("stairs", "a", "b", "c")}
    seeds = {"rollouts": range(100), "test": range(100, 200)}
    system_prompt = "Climb.\naction: CLIMB 1"
    experts = {"stairs": expert}

    def step_limit(self, task):
        return 8

    def parse(self, text):
        if found := re.fullmatch(r"CLIMB (\d+)", text):
            return int(found[1])
        raise ActionError("say CLIMB and a number")

    def render(self, action):
        return f"CLIMB {action}"

    @contextlib.asynccontextmanager
    async def open(self, places, watch=False):
        yield [Stairs() for _ in range(places)]


WORLD = StairsWorld()
CONTEXT = Context("tiny", WORLD, machine=Machine(pages=2))
STEPS = tuple(f"action: CLIMB {n}" for n in (1, 2, 3))
JOBS = [Job("stairs", seed, index, 8) for seed in range(5) for index in range(2)]


class Script:
    """Mostly the next step, sometimes nonsense, by (job, turn) alone; remembers what it was shown."""

    name, spare_core = "script", True

    def __init__(self, choices=("next", "next", "next", "4", "9", "hm")):
        self.choices, self.shown, self.pages, self.sampling = choices, [], set(), {"seed": 7}

    async def answer(self, page, episode):
        self.pages.add(page)
        errors = [turn.error for turn in episode.turns]
        self.shown.append((episode.job, episode.observation.text, errors))
        choice = self.choices[child_seed(episode.job, len(episode.turns)) % len(self.choices)]
        if choice == "next":
            choice = episode.observation.text[5]
        return Reply("hm" if choice == "hm" else f"action: CLIMB {choice}")


def run(envs, jobs=JOBS, policy=None):
    """(episodes, failures) of the jobs."""
    episodes = []
    failures = asyncio.run(play(envs, jobs, policy or Script(), episodes.append, WORLD))
    return sorted(episodes, key=lambda episode: episode.key), failures
