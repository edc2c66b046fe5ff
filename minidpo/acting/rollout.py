"""Rollouts: one policy plays many episodes at once, each in its own environment.

An episode is a loop: look, ask the policy, act. Each page that waits for an answer is a row of the sampler, which
writes one token in every such row at each step. Meanwhile the other pages act, in their own process. With packed
weights an answer depends only on its own episode (`model/sampling`). So the same jobs give the same episodes
whichever page is faster, and after a kill only the missing ones are played.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence

import torch

from envs.protocol import ActionError, Env, EnvError, Outcome, World
from minidpo.acting.jobs import Job
from minidpo.acting.policies import Policy, Reply, RunningEpisode
from minidpo.data.episodes import Cost, Episode, Turn, grouped, in_a_loop
from minidpo.data.prompt import understand
from minidpo.system import processes

ENV_TRIES = 3
"How often an episode is tried before it is given up because the environment fails."


async def play(
    envs: Sequence[Env],
    jobs: Iterable[Job],
    policy: Policy,
    on_episode: Callable[[Episode], None],
    world: World,
) -> list[tuple[Job, EnvError]]:
    """Play the jobs; `on_episode` gets each episode as it ends.

    If its environment fails, an episode is tried again, ENV_TRIES times in all. The last try is made alone, because
    a page that crashes the browser ends all other episodes in it. Returns the jobs that were given up, each with
    its last error.
    """
    alone = []
    waiting = grouped(jobs, lambda job: job.task)
    task_of_page: list[str | None] = [None] * len(envs)
    began = time.perf_counter()
    durations = defaultdict(list)  # by task: seconds of its episodes

    def work_a_page(task: str) -> float:
        """The remaining work of a task, divided by the pages that play it, with one more."""
        elapsed = time.perf_counter() - began
        return work(len(waiting[task]), durations[task], elapsed) / (1 + task_of_page.count(task))

    async def play_jobs(page: int) -> None:
        while any(waiting.values()):
            # Loading another task's page takes as long as ten clicks, so a page stays with its task until
            # no episode of it is left.
            if not waiting.get(task_of_page[page]):
                left = [task for task in waiting if waiting[task]]
                task_of_page[page] = max(left, key=work_a_page)
            job = waiting[task_of_page[page]].pop(0)
            for _ in range(ENV_TRIES - 1):
                if not await try_episode(job, page):
                    break
            else:
                alone.append(job)

    async def try_episode(job: Job, page: int) -> EnvError | None:
        """Play an episode. Returns the error if the environment failed."""
        try:
            episode = await play_once(envs[page], page, job, policy, world)
        except EnvError as error:
            return error
        durations[job.task].append(episode.cost.model_s + episode.cost.browser_s)
        on_episode(episode)
        return None

    pages = [asyncio.create_task(play_jobs(page)) for page in range(len(envs))]
    threads = torch.get_num_threads()
    # leave a core to the browser: a matrix product waits for its slowest thread
    if policy.spare_core:
        torch.set_num_threads(max(1, min(threads, processes.cores() - 1)))
    try:
        await asyncio.gather(*pages)
        return [(job, error) for job in alone if (error := await try_episode(job, 0))]
    finally:
        torch.set_num_threads(threads)
        waiting.clear()
        for task in pages:
            task.cancel()
        await asyncio.gather(*pages, return_exceptions=True)


def work(jobs: int, seconds: Sequence[float], elapsed: float) -> float:
    """An estimate of how many seconds a task's waiting jobs take, if its finished episodes took `seconds`. If none
    has finished, each job counts as long as the time that has passed, so tasks with long episodes begin early.

    >>> work(3, [1.0, 2.0], elapsed=9.0), work(3, [], elapsed=9.0)
    (4.5, 30.0)
    """
    return jobs * (sum(seconds) / len(seconds) if seconds else 1 + elapsed)


async def play_once(env: Env, page: int, job: Job, policy: Policy, world: World) -> Episode:
    """Play one episode. Raises EnvError if the environment fails."""
    seconds = {"model": 0.0, "browser": 0.0}

    async def timed(name: str, call: Awaitable):
        began = time.perf_counter()
        result = await call
        seconds[name] += time.perf_counter() - began
        return result

    episode = RunningEpisode(job, await timed("browser", env.reset(job.task, job.seed)))
    turns, prompt_tokens = episode.turns, 0
    while episode.observation.outcome is None and len(turns) < job.limit:
        if world.shows_state and len(turns) > len(job.forced) and in_a_loop(turns):
            break
        if len(turns) < len(job.forced):
            reply = Reply(job.forced[len(turns)])
        else:
            reply = await timed("model", policy.answer(page, episode))
        if reply is None:
            break
        seen = episode.observation
        try:
            action = understand(reply.text, world)
            episode.observation = await timed("browser", env.step(action))
            name, error = world.render(action), episode.observation.error
        except ActionError as problem:
            name, error = None, str(problem)
        turns.append(Turn(seen.text, reply.text, name, error, reply.ids, reply.logps))
        prompt_tokens = reply.prompt_tokens
    last, written = episode.observation, [len(turn.ids or ()) for turn in turns]
    # The last prompt contains all pages, and all answers except the last.
    cost = Cost(
        prompt_tokens - sum(written[:-1]),
        sum(written),
        round(seconds["model"], 4),
        round(seconds["browser"], 4),
    )
    return Episode(
        job.task,
        job.seed,
        job.index,
        last.instruction,
        tuple(turns),
        str(last.outcome or Outcome.LIMIT),
        last.reward,
        policy.name,
        policy.sampling,
        cost,
        forced=min(len(job.forced), len(turns)),
        shots=job.shots,
    )
