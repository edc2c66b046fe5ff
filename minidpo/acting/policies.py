"""Policies: who answers a page. A language model or a scripted expert; either can be printed for a viewer."""

import asyncio
import hashlib
import random
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy
import torch
from tqdm import tqdm

from envs.actions import Action, parse, render
from envs.miniwob.experts.by_task import EXPERTS
from envs.miniwob.experts.decisions import Decision, Expert
from envs.miniwob.experts.habits import clumsy
from envs.protocol import Observation
from minidpo.config import CollectCommand, Sampling
from minidpo.data.episodes import Turn
from minidpo.data.prompt import SYSTEM, next_prompt, write
from minidpo.memory.loading import open_policy
from minidpo.memory.packing import pack
from minidpo.model.chat import Chat, Message
from minidpo.model.decoder import Transformer
from minidpo.model.sampling import Request, Sampler

# weights. Beside nano's 2.4 M the pages take 0.9 of a core (benchmarks/rollout.py), beside 135 M hardly any
SPARE_CORE_BELOW = 20_000_000


class Job(NamedTuple):
    """One episode to play."""

    task: str
    seed: int
    index: int  # number within the group: the episodes of the same (task, seed)
    limit: int  # turns the episode may take
    forced: tuple[
        str, ...
    ] = ()  # answers that are given in the first turns; then the policy is asked
    shots: tuple[
        str, ...
    ] = ()  # of solved examples: what they show and say, in turn, before the task

    @property
    def key(self) -> tuple[str, int, int]:
        return self.task, self.seed, self.index

    @property
    def instance(self) -> tuple[str, int]:
        return self.task, self.seed


@dataclass
class RunningEpisode:
    """An episode that has begun and not ended."""

    job: Job
    observation: Observation
    turns: list[Turn] = field(default_factory=list)
    forgotten: int = 0  # turns before these, which the context has no room for


class Reply(NamedTuple):
    """A policy's answer, with its tokens and their log-probs where a model sampled it."""

    text: str
    ids: tuple[int, ...] | None = None
    logps: tuple[float, ...] | None = None
    prompt_tokens: int = 0


class Policy(Protocol):
    """Who answers. `name` and `sampling` are written into each episode that the policy plays."""

    name: str
    sampling: dict
    spare_core: (
        bool  # whether a core is left to the browser: its pages take about as long as the answers
    )

    async def answer(self, page: int, episode: RunningEpisode) -> Reply | None:
        """What to do, on page number `page`; None if the context is full or a script knows no step."""


def make_policy(command: CollectCommand, tasks: Iterable[str] = ()) -> Policy:
    """The policy that a command asks for: experts, or a model; where somebody watches, its answers are
    printed. An expert's raises ValueError if one of these tasks has none."""
    if command.policy != "model":
        require_experts(tasks)
        policy: Policy = ExpertPolicy(
            command.noise, command.seed, relabels=command.policy == "dagger"
        )
    else:
        model, chat, identity = open_policy(command.model, command.adapter, command.machine)
        name = f"{command.adapter or command.model}@{identity[:12]}"
        pages = command.machine.page_count(command.watch)
        policy = ModelPolicy(model, chat, name, command.sampling, seed=command.seed, pages=pages)
    return PrintingPolicy(policy) if command.watch else policy


def require_experts(tasks: Iterable[str]) -> None:
    """Raises ValueError if one of these tasks has no scripted expert."""
    if missing := [task for task in tasks if task not in EXPERTS]:
        raise ValueError(
            f"no scripted expert for {', '.join(missing[:5])}: take the tasks that have "
            "one, --tasks expert (docs/tasks.md says which)"
        )


def child_seed(*what) -> int:
    """A 64-bit seed from any values, the same on every machine and in every process.

    >>> child_seed(1, "click-link", 7) == child_seed(1, "click-link", 7) != child_seed(1, "click-link", 8)
    True
    """
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8], "big")


class ModelPolicy:
    """A model that samples its answers, each from a random stream of its own: (seed, job, turn).

    With more than one page, or in bf16, the model's weights are packed for speed (`memory/packing`); such a
    model can neither train nor be saved. A conversation may have as many tokens as the model has positions.
    """

    def __init__(
        self,
        model: Transformer,
        chat: Chat,
        name: str,
        sampling: Sampling,
        *,
        seed: int = 0,
        pages: int = 16,
    ):
        self.chat, self.name, self.seed = chat, name, seed
        self.spare_core = (
            sum(tensor.numel() for tensor in model.state_dict().values()) < SPARE_CORE_BELOW
        )
        self.max_new_tokens = sampling.max_new_tokens
        self.max_context = model.config.max_position_embeddings
        if self.max_new_tokens >= self.max_context:
            raise ValueError(
                f"max_new_tokens must be below {self.max_context}, all that the model reads"
            )
        self.sampling = sampling.record(seed)
        self.temperatures = sampling.temperatures or (None,)  # None: the sampler's
        # In fp32 a single row is slower packed: the shipped model alone wrote 48 tokens in 933 ms, not 487,
        # on one thread of an AMD EPYC, and in 1796 ms, not 1054, on two (fastest of 20 and of 6).
        model = pack(model) if pages > 1 or model.head_weight.dtype == torch.bfloat16 else model
        system = chat.dialogue([Message("system", SYSTEM)]).ids
        self.sampler = Sampler(
            model, pages, chat.end, sampling.temperature, sampling.top_p, prefix=system
        )
        self._replies: dict[int, asyncio.Future] = {}  # by page
        self._writing: asyncio.Task | None = None

    async def answer(self, page: int, episode: RunningEpisode) -> Reply | None:
        seen, turns = episode.observation, episode.turns
        ids = tuple(
            self.chat.prompt(next_prompt(seen.instruction, turns, seen.text, episode.job.shots))
        )
        if len(ids) + self.max_new_tokens > self.max_context:
            if episode.job.shots and not turns:
                raise ValueError(
                    f"{episode.job.task}: examples and first page take {len(ids)} tokens, more "
                    f"than {self.max_context - self.max_new_tokens}: ask for fewer --shots"
                )
            return None
        temperature = self.temperatures[episode.job.index % len(self.temperatures)]
        self.sampler.ask(page, Request(ids, self._uniforms(episode), temperature))
        self._replies[page] = asyncio.get_running_loop().create_future()
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        try:
            sampled = await self._replies[page]
        finally:  # where the rollout ends, nobody waits for this answer any more
            self._replies.pop(page, None)
        logps = tuple(round(logp, 6) for logp in sampled.logps)
        return Reply(self.chat.decode(sampled.ids), sampled.ids, logps, len(ids))

    async def _write(self) -> None:
        """Write a token for every waiting page at each step; between two steps the pages may go on."""
        try:
            while self._replies:
                for page, sampled in self.sampler.step().items():
                    reply = self._replies.pop(page, None)  # None: the page has given up
                    if reply is not None and not reply.done():
                        reply.set_result(sampled)
                await asyncio.sleep(0)
        except (
            Exception
        ) as error:  # the waiting pages raise it, whatever it is, or they would wait for ever
            while self._replies:
                if not (reply := self._replies.popitem()[1]).done():
                    reply.set_exception(error)

    def _uniforms(self, episode: RunningEpisode) -> tuple[float, ...]:
        """A uniform number for each token of the answer; the stream is the turn's own."""
        seed = child_seed(self.seed, *episode.job.key, episode.forgotten + len(episode.turns))
        stream = numpy.random.Generator(numpy.random.Philox(seed))
        return tuple(stream.random(self.max_new_tokens).tolist())


class ExpertPolicy:
    """The scripted experts as a policy; with noise, each turn has its own random stream of slips.

    relabels: in states that an agent reached (`Job.forced`), with no answer where an expert knows none.
    DAgger: Ross et al. 2011, arXiv:1011.0686. Each state is played on to the end, so the page judges the
    answer. Differs from the paper: a state from which the expert does not solve is not imitated.
    """

    def __init__(self, noise: float, seed: int, relabels: bool = False):
        self.noise, self.seed, self.relabels, self.spare_core = noise, seed, relabels, True
        self.name = "dagger" if relabels else f"clumsy {noise}" if noise else "expert"
        self.sampling = {"seed": seed} if relabels else {"noise": noise, "seed": seed}

    async def answer(self, page: int, episode: RunningEpisode) -> Reply | None:
        expert = EXPERTS[episode.job.task]
        if self.noise:
            stream = random.Random(child_seed(self.seed, *episode.job.key, len(episode.turns)))
            expert = clumsy(expert, self.noise, stream)
        done = [parse(turn.action) for turn in episode.turns if turn.action]
        if self.relabels or episode.job.forced:  # where another agent went, it may know no page
            decision = expert_decision(expert, episode.observation, done)
        else:
            try:
                decision = expert(episode.observation, done)
            except (
                ValueError,
                LookupError,
                StopIteration,
            ) as error:  # it ends the episode, not a collection
                decision, name = None, f"{episode.job.task} seed {episode.job.seed}"
                print(f"{name}: the expert knows no way on: {error!r}", file=sys.stderr)
        return decision and Reply(write(decision.thought, render(decision.action)))


def expert_decision(
    expert: Expert | None, seen: Observation, done: list[Action]
) -> Decision | None:
    """What an expert would do; None without one, or on a page that it does not know."""
    try:
        return expert(seen, done)
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration, ArithmeticError):
        return None  # experts are written for the pages that they themselves come to


class PrintingPolicy:
    """A policy whose answers are printed, for a person who watches."""

    def __init__(self, policy: Policy):
        self.policy, self.name, self.sampling = policy, policy.name, policy.sampling
        self.spare_core = policy.spare_core

    async def answer(self, page: int, episode: RunningEpisode) -> Reply | None:
        reply = await self.policy.answer(page, episode)
        job, turns = episode.job, episode.turns
        title = f"turn {len(turns) + 1}" if turns else episode.observation.instruction
        lines = [f"error: {turns[-1].error}"] if turns and turns[-1].error else []
        lines += (
            reply.text.splitlines()
            if reply
            else ["no answer: context full, or no expert's step here"]
        )
        tqdm.write("\n  ".join([f"{job.task} seed {job.seed}: {title}", *lines]))
        return reply
