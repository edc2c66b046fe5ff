"""20. Rollouts: agents on pages, one model that writes for all of them.

Each page plays one episode after the other: look, ask the policy, act. A page that waits for its answer is a
row of the sampler, which writes a token in all of them at each step; meanwhile the other pages act, in a
process of their own. A page stays with its task while there is something left to play. What an agent says
depends on nothing but its own episode (chapter 8: in fp32, packed), so the same jobs are the same episodes,
whichever page was faster, and a run that was killed goes on with those that are missing. Next: 21 tracking.
"""

import asyncio
import hashlib
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

import numpy
import torch

from envs.actions import ActionError, render
from envs.protocol import Env, EnvError, Observation, Outcome
from minidpo.agent import SYSTEM, conversation, page, understand
from minidpo.chat import Chat, Message
from minidpo.episodes import Cost, Episode, Turn
from minidpo.packing import pack
from minidpo.qwen2 import Qwen2
from minidpo.sampling import Request, Sampler

T = TypeVar("T")
ENV_TRIES = 3  # how often an episode is begun in all: its environment may fail twice before it is given up


class Job(NamedTuple):
    """One episode to play."""

    task: str
    seed: int
    index: int  # within the group of the same (task, seed)
    limit: int  # turns
    forced: tuple[str, ...] = ()  # answers to begin with; the policy is asked behind them


@dataclass
class Live:
    """An episode under way."""

    job: Job
    observation: Observation
    turns: list[Turn] = field(default_factory=list)


class Said(NamedTuple):
    """An answer, and its tokens where a model sampled it."""

    answer: str
    ids: tuple[int, ...] | None = None
    logps: tuple[float, ...] | None = None
    prompt_tokens: int = 0


class Policy(Protocol):
    name: str
    sampling: dict

    async def answer(self, page: int, live: Live) -> Said | None:
        """What to do on this page; None if the conversation no longer fits the model's context."""


def child_seed(*what) -> int:
    """A 64-bit seed from any values, the same on every machine and in every process.

    >>> child_seed(1, "click-link", 7) == child_seed(1, "click-link", 7) != child_seed(1, "click-link", 8)
    True
    """
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8], "big")


class ModelPolicy:
    """A model that samples its answers, each from a random stream of its own: (seed, job, turn).

    One for each page but a lone one: the model is packed then (chapter 13), and not to be trained or saved.
    """

    def __init__(self, model: Qwen2, chat: Chat, name: str, temperature: float, top_p: float = 1.0,
                 seed: int = 0, max_new_tokens: int = 96, max_context: int = 4096, pages: int = 16):
        self.chat, self.name, self.seed = chat, name, seed
        self.max_new_tokens, self.max_context = max_new_tokens, max_context
        self.sampling = {"temperature": temperature, "top_p": top_p, "seed": seed,
                         "max_new_tokens": max_new_tokens}
        system = chat.dialogue([Message("system", SYSTEM)]).ids
        model = pack(model) if pages > 1 else model  # packing slows a product with a single row
        self.sampler = Sampler(model, pages, chat.end, temperature, top_p, prefix=system)
        self.busy_s = 0.0  # how long the model has been at work
        self._asked: dict[int, tuple[Request, bool]] = {}
        self._answers: dict[int, asyncio.Future] = {}
        self._work: asyncio.Task | None = None

    async def answer(self, page: int, live: Live) -> Said | None:
        ids = self._prompt(live)
        if len(ids) + self.max_new_tokens > self.max_context:
            return None
        self._asked[page] = Request(ids, self._uniforms(live)), not live.turns
        self._answers[page] = asyncio.get_running_loop().create_future()
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._write())
        try:
            out = await self._answers[page]
        except asyncio.CancelledError:
            self._asked.pop(page, None)
            self._answers.pop(page, None)
            raise
        return Said(self.chat.decode(out.ids), out.ids, tuple(round(x, 6) for x in out.logps), len(ids))

    async def _write(self) -> None:
        """Step after step while somebody waits; what the pages have to say comes in between two steps."""
        try:
            while self._answers:
                began = time.perf_counter()
                while self._asked:
                    page, (request, first) = self._asked.popitem()
                    self.sampler.ask(page, request, share=first)  # a group's episodes begin with the same one
                finished = self.sampler.step()
                self.busy_s += time.perf_counter() - began
                for page, answer in finished.items():
                    waiting = self._answers.pop(page, None)  # none: the page has given up
                    if waiting is not None and not waiting.done():
                        waiting.set_result(answer)
                await asyncio.sleep(0)
        except Exception as error:
            self._asked.clear()
            while self._answers:
                if not (waiting := self._answers.popitem()[1]).done():
                    waiting.set_exception(error)

    def _prompt(self, live: Live) -> tuple[int, ...]:
        error = live.turns[-1].error if live.turns else None
        now = page(live.observation.text, error, None if live.turns else live.observation.instruction)
        return tuple(self.chat.prompt([*conversation(live.observation.instruction, live.turns), now]))

    def _uniforms(self, live: Live) -> tuple[float, ...]:
        job = live.job
        stream = numpy.random.Generator(numpy.random.Philox(
            child_seed(self.seed, job.task, job.seed, job.index, len(live.turns))))
        return tuple(stream.random(self.max_new_tokens).tolist())


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
