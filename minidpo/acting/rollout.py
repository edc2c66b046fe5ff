"""20. Rollouts: agents on pages, one model that writes for all of them.

Each page plays one episode after the other: look, ask the policy, act. A page that waits for its answer is a
row of the sampler, which writes a token in all of them at each step; meanwhile the other pages act, in a
process of their own. A page stays with its task while there is something left to play. What an agent says
depends on nothing but its own episode (chapter 8: in fp32, packed), so the same jobs are the same episodes,
whichever page was faster, and a run that was killed goes on with those that are missing. Next: 21 tracking.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

import torch

from envs.actions import ActionError, render
from envs.protocol import Env, EnvError, Outcome
from minidpo.acting.policies import Job, Live, Policy, Said
from minidpo.data.episodes import Cost, Episode, Turn
from minidpo.data.prompt import understand

T = TypeVar("T")
ENV_TRIES = 3  # how often an episode is begun in all: its environment may fail twice before it is given up


async def play(envs: Sequence[Env], jobs: Iterable[Job], policy: Policy, done: Callable[[Episode], None],
               failed: Callable[[Job, EnvError], None], skip: frozenset = frozenset()) -> None:
    """Play the jobs whose (task, seed, index) is not in `skip`; `done` gets their episodes as they end.

    An environment failure begins the episode again, ENV_TRIES times in all; then `failed` is told and
    nothing is recorded.
    """
    waiting: dict[str, deque[Job]] = {}
    for job in jobs:
        if job[:3] not in skip:
            waiting.setdefault(job.task, deque()).append(job)
    at: list[str | None] = [None] * len(envs)  # the task of each page

    async def one_after_another(page: int) -> None:
        while any(waiting.values()):
            if not waiting.get(at[page]):
                # Loading another task's page takes as long as ten clicks: so to where most is left to do.
                at[page] = max(waiting, key=lambda task: len(waiting[task]) / (1 + at.count(task)))
            episode = await _play(envs[page], page, waiting[at[page]].popleft(), policy, failed)
            if episode is not None:
                done(episode)

    pages = [asyncio.create_task(one_after_another(page)) for page in range(len(envs))]
    before = torch.get_num_threads()
    # One core is the browser's: a matrix product waits for the slowest of its threads.
    torch.set_num_threads(max(1, min(before, (os.cpu_count() or 2) - 1)))
    try:
        await asyncio.gather(*pages)
    finally:
        torch.set_num_threads(before)
        waiting.clear()
        for page in pages:
            page.cancel()
        await asyncio.gather(*pages, return_exceptions=True)


async def _play(env: Env, page: int, job: Job, policy: Policy, failed) -> Episode | None:
    for tries in range(1, ENV_TRIES + 1):
        try:
            return await _episode(env, page, job, policy)
        except EnvError as error:
            if tries == ENV_TRIES:
                failed(job, error)
    return None


class Clock:
    """Seconds spent waiting for what is awaited through it."""

    def __init__(self):
        self.seconds = 0.0

    async def __call__(self, call: Awaitable[T]) -> T:
        began = time.perf_counter()
        try:
            return await call
        finally:
            self.seconds += time.perf_counter() - began


async def _episode(env: Env, page: int, job: Job, policy: Policy) -> Episode:
    browser, model = Clock(), Clock()
    live = Live(job, await browser(env.reset(job.task, job.seed)))
    read = 0
    while live.observation.outcome is None and len(live.turns) < job.limit:
        given = job.forced[len(live.turns):]
        said = Said(given[0]) if given else await model(policy.answer(page, live))
        if said is None:
            break
        before = live.observation
        try:
            action = understand(said.answer)
            live.observation = await browser(env.step(action))
            name, error = render(action), live.observation.error
        except ActionError as problem:
            name, error = None, str(problem)
        live.turns.append(Turn(before.text, said.answer, name, error, said.ids, said.logps))
        read = said.prompt_tokens
    last, written = live.observation, [len(turn.ids or ()) for turn in live.turns]
    cost = Cost(read - sum(written[:-1]), sum(written), round(model.seconds, 4), round(browser.seconds, 4))
    return Episode(job.task, job.seed, job.index, last.instruction, tuple(live.turns),
                   str(last.outcome or Outcome.LIMIT), last.reward, policy.name, policy.sampling, cost,
                   min(len(job.forced), len(live.turns)))
