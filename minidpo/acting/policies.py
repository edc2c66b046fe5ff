"""Policies: who answers a page. A model, a script, or either of them printed for a person who watches."""

import asyncio
import hashlib
import random
import time
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy
from tqdm import tqdm

from envs.actions import parse, render
from envs.miniwob.experts.by_task import EXPERTS
from envs.miniwob.experts.habits import clumsy
from envs.protocol import Observation
from minidpo.data.episodes import Turn
from minidpo.data.prompt import SYSTEM, conversation, page, write
from minidpo.memory.packing import pack
from minidpo.model.chat import Chat, Message
from minidpo.model.decoder import Qwen2
from minidpo.model.sampling import Request, Sampler


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


class ExpertPolicy:
    """The scripted experts as a policy; with noise, each episode has its own stream of slips."""

    def __init__(self, noise: float, seed: int):
        self.noise, self.seed = noise, seed
        self.name = f"clumsy {noise}" if noise else "expert"
        self.sampling = {"noise": noise, "seed": seed}

    async def answer(self, page: int, live: Live) -> Said:
        job, expert = live.job, EXPERTS[live.job.task]
        if self.noise:
            stream = random.Random(child_seed(self.seed, job.task, job.seed, job.index, len(live.turns)))
            expert = clumsy(expert, self.noise, stream)
        decision = expert(live.observation, [parse(turn.action) for turn in live.turns if turn.action])
        return Said(write(decision.thought, render(decision.action)))


class Told:
    """A policy whose answers are printed, for a person who watches."""

    def __init__(self, policy: Policy):
        self.policy, self.name, self.sampling = policy, policy.name, policy.sampling

    async def answer(self, page: int, live: Live) -> Said | None:
        said = await self.policy.answer(page, live)
        begin = f"turn {len(live.turns) + 1}" if live.turns else live.observation.instruction
        lines = [f"error: {live.turns[-1].error}"] if live.turns and live.turns[-1].error else []
        lines += said.answer.splitlines() if said else ["no answer: the model can't read any more"]
        tqdm.write("\n  ".join([f"{live.job.task} seed {live.job.seed}: {begin}", *lines]))
        return said
