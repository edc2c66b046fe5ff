"""19. Rollouts: agents on pages, all pages and one batched model busy together.

Time goes in ticks: all waiting agents answer in one batch, then all pages act at once, and a page whose
episode has ended takes the next job. Nothing depends on which page was faster, so the same jobs give the
same episodes. Jobs run in blocks that are drained before the next begins: a run that was killed repeats its
unfinished block from the start, with the same batches and hence the same numbers, and keeps what it had not
yet written. Next: 20 runs.
"""

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy

from envs.actions import ActionError, render
from envs.protocol import Env, EnvError, Observation, Outcome
from minidpo.agent import SYSTEM, conversation, page, understand
from minidpo.chat import Chat, Message
from minidpo.episodes import Episode, Turn
from minidpo.kvcache import Past
from minidpo.qwen2 import Qwen2
from minidpo.sampling import Request, generate, read

ENV_TRIES = 3  # how often an episode is begun in all: its environment may fail twice before it is given up


class Job(NamedTuple):
    """One episode to play."""

    task: str
    seed: int
    index: int  # within the group of the same (task, seed)
    limit: int  # turns


@dataclass
class Live:
    """An episode under way."""

    job: Job
    observation: Observation
    turns: list[Turn] = field(default_factory=list)
    past: Past | None = None
    tries: int = 1


class Said(NamedTuple):
    """An answer, and its tokens where a model sampled it."""

    answer: str
    ids: tuple[int, ...] | None = None
    logps: tuple[float, ...] | None = None


class Policy(Protocol):
    name: str
    sampling: dict

    def answer(self, lives: Sequence[Live]) -> list[Said | None]:
        """One answer for each episode; None where the conversation no longer fits the model's context."""


def child_seed(*what) -> int:
    """A 64-bit seed from any values, the same on every machine and in every process.

    >>> child_seed(1, "click-link", 7) == child_seed(1, "click-link", 7) != child_seed(1, "click-link", 8)
    True
    """
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8], "big")


class ModelPolicy:
    """A model that samples its answers, each from a random stream of its own: (seed, job, turn)."""

    def __init__(self, model: Qwen2, chat: Chat, name: str, temperature: float, top_p: float = 1.0,
                 seed: int = 0, max_new_tokens: int = 96, max_context: int = 4096):
        self.model, self.chat, self.name = model, chat, name
        self.temperature, self.top_p, self.seed = temperature, top_p, seed
        self.max_new_tokens, self.max_context = max_new_tokens, max_context
        self.sampling = {"temperature": temperature, "top_p": top_p, "seed": seed,
                         "max_new_tokens": max_new_tokens}
        self.prefix: Past | None = None  # the system prompt, which all episodes begin with: read once

    def answer(self, lives: Sequence[Live]) -> list[Said | None]:
        if self.prefix is None:
            ids = tuple(self.chat.dialogue([Message("system", SYSTEM)]).ids)
            _, cache = read(self.model, [ids], [None], 0)
            self.prefix = cache.row(0, len(ids))
        prompts = [self._prompt(live) for live in lives]
        fits = [i for i, ids in enumerate(prompts) if len(ids) + self.max_new_tokens <= self.max_context]
        requests = [Request(prompts[i], self._uniforms(lives[i]), lives[i].past or self.prefix) for i in fits]
        said: list[Said | None] = [None] * len(lives)
        for i, out in zip(fits, generate(self.model, requests, self.chat.end, self.temperature, self.top_p)):
            lives[i].past = out.past
            said[i] = Said(self.chat.decode(out.ids), out.ids, tuple(round(x, 6) for x in out.logps))
        return said

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
               failed: Callable[[Job, EnvError], None], block: int = 256,
               skip: frozenset = frozenset()) -> None:
    """Play all jobs, block by block, and hand each finished episode to `done`, always in the same order.

    `skip` holds the (task, seed, index) that a file has already: a block with nothing missing is not
    played, of any other block all episodes come again. An environment failure begins the episode again,
    ENV_TRIES times in all; then `failed` is told and nothing is recorded.
    """
    jobs = list(jobs)
    for at in range(0, len(jobs), block):
        part = jobs[at:at + block]
        if any(job[:3] not in skip for job in part):
            await _play_block(envs, part, policy, done, failed)


async def _play_block(envs, jobs, policy, done, failed) -> None:
    waiting = list(reversed(jobs))  # the next job is at the end
    slots: list[Live | None] = [None] * len(envs)

    async def begin(i: int, job: Job, tries: int = 1) -> None:
        try:
            slots[i] = Live(job, await envs[i].reset(job.task, job.seed), tries=tries)
        except EnvError as error:
            await again(i, job, tries, error)

    async def again(i: int, job: Job, tries: int, error: EnvError) -> None:
        if tries < ENV_TRIES:
            await begin(i, job, tries + 1)
        else:
            slots[i] = None
            failed(job, error)

    async def act(i: int, live: Live, said: Said) -> None:
        before = live.observation
        try:
            action = understand(said.answer)
            live.observation = await envs[i].step(action)
            name, error = render(action), live.observation.error
        except ActionError as problem:
            name, error = None, str(problem)
        except EnvError as problem:
            await again(i, live.job, live.tries, problem)
            return
        live.turns.append(Turn(before.text, said.answer, name, error, said.ids, said.logps))

    while True:
        free = [i for i, live in enumerate(slots) if live is None]
        starts = [(i, waiting.pop()) for i in free[:len(waiting)]]
        await asyncio.gather(*(begin(i, job) for i, job in starts))
        busy = [(i, live) for i, live in enumerate(slots) if live is not None]
        if not busy:
            if waiting:
                continue
            return
        answers = policy.answer([live for _, live in busy])
        await asyncio.gather(*(act(i, live, said) for (i, live), said in zip(busy, answers) if said))
        for (i, live), said in zip(busy, answers):
            # where the environment failed `live` is as it was before, so not over
            if said is None or live.observation.outcome or len(live.turns) >= live.job.limit:
                slots[i] = None
                done(_finish(live, policy))


def _finish(live: Live, policy: Policy) -> Episode:
    job, last = live.job, live.observation
    return Episode(job.task, job.seed, job.index, last.instruction, tuple(live.turns),
                   str(last.outcome or Outcome.LIMIT), last.reward, policy.name, policy.sampling)
