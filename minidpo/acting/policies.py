"""Policies: who answers a page. A language model or a scripted expert; either can be printed for a viewer."""

import asyncio
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy
from tqdm import tqdm

from envs.protocol import Action, Decision, Expert, Observation, World
from minidpo.acting.jobs import Job, child_seed
from minidpo.data.episodes import Turn
from minidpo.data.prompt import next_prompt, write
from minidpo.memory.context import Context, ContextOptions
from minidpo.memory.loading import open_policy
from minidpo.memory.packing import pack, saves_time
from minidpo.model.chat import Chat, Message
from minidpo.model.decoder import Transformer
from minidpo.model.sampling import Request, Sampler
from minidpo.system.ranges import Checked, NotNegative, Positive, Share

# weights. Beside nano's 2.4 M the pages take 0.9 of a core (benchmarks/rollout.py), beside 135 M hardly any
SPARE_CORE_BELOW = 20_000_000


@dataclass
class RunningEpisode:
    """An episode that has begun and not ended."""

    job: Job
    observation: Observation
    turns: list[Turn] = field(default_factory=list)
    forgotten: int = 0
    "Turns before these, for which the context has no room."


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
    spare_core: bool
    "Whether a core is left to the world, because its pages take about as long as the answers."

    async def answer(self, page: int, episode: RunningEpisode) -> Reply | None:
        """What to do, on page number `page`; None if the context is full or a script knows no step."""


# ---- a model ----


@dataclass(frozen=True)
class Sampling(Checked):
    """How a model answers."""

    temperature: NotNegative[float] = 1.0
    "of the sampler; 0 is greedy"
    temperatures: tuple[float, ...] = ()
    "in place of one: dealt out in turn to the episodes of each instance, by their number"
    top_p: Share[Positive[float]] = 1.0
    "keep the most probable tokens up to this mass"
    max_new_tokens: Positive[int] = 96
    "tokens an answer may have"

    def __post_init__(self):
        super().__post_init__()
        if any(not 0 <= t < math.inf for t in self.temperatures):
            raise ValueError(f"temperatures must be finite and at least 0, got {self.temperatures}")
        if self.temperatures and self.temperature != Sampling.temperature:
            raise ValueError("temperatures names that of each episode: leave temperature out")
        if self.top_p < 1 and not any(self.temperatures or (self.temperature,)):
            raise ValueError(
                f"top_p {self.top_p:g} does nothing at temperature 0, which takes the likeliest "
                "token: leave top_p out, or raise the temperature"
            )

    def record(self, seed: int) -> dict:
        """How an episode was sampled, as it is written down with it."""
        drawn = {"temperature": self.temperature}
        if self.temperatures:
            drawn = {"temperatures": list(self.temperatures)}
        return {**drawn, "top_p": self.top_p, "seed": seed, "max_new_tokens": self.max_new_tokens}


@dataclass(frozen=True, kw_only=True)
class PlayOptions(ContextOptions):
    """What is played, what is shown before it, and whether somebody watches."""

    tasks: str = "demo"
    "suites of the world or task names, separated by commas"
    shots: NotNegative[int] = 0
    "solved examples of its task before each episode in its prompt"
    examples: Path | None = None
    "with shots: demonstrations of these tasks, as collect.py --policy expert writes them"
    watch: bool = False
    "open the browser, act slowly, print thoughts and actions; one page, unless machine.pages is set"

    def __post_init__(self):
        super().__post_init__()
        if bool(self.shots) != (self.examples is not None):
            raise ValueError(
                "shots says how many examples, examples from which file: give both, or neither"
            )


def model_policy(
    context: Context,
    adapter: Path | None,
    sampling: Sampling,
    *,
    pages: int,
    watch: bool = False,
) -> Policy:
    """The base model with an adapter, on so many pages. `watch`: its answers are printed."""
    machine = replace(context.machine, pages=pages)
    model, chat, identity = open_policy(context.model, adapter, machine)
    name = f"{adapter or context.model}@{identity}"
    policy = ModelPolicy(
        model, chat, name, context.world.system_prompt, sampling, seed=context.seed, pages=pages
    )
    return PrintingPolicy(policy) if watch else policy


class ModelPolicy:
    """A model that samples its answers, each from a random stream of its own: (seed, job, turn).

    Where that saves time, the model's weights are packed (`memory/packing`); such a model can neither train nor
    be saved. A conversation may have as many tokens as the model has positions.
    """

    def __init__(
        self,
        model: Transformer,
        chat: Chat,
        name: str,
        system_prompt: str,
        sampling: Sampling,
        *,
        seed: int = 0,
        pages: int = 16,
    ):
        self.chat, self.name, self.seed = chat, name, seed
        self.system_prompt = system_prompt
        weights = sum(tensor.numel() for tensor in model.state_dict().values())
        self.spare_core = weights < SPARE_CORE_BELOW
        self.max_new_tokens = sampling.max_new_tokens
        self.max_context = model.config.max_position_embeddings
        if self.max_new_tokens >= self.max_context:
            raise ValueError(
                f"max_new_tokens must be below {self.max_context}, all that the model reads"
            )
        self.sampling = sampling.record(seed)
        self.temperatures = sampling.temperatures or (None,)  # None: the sampler's
        if saves_time(model, pages):
            model = pack(model)
        system = chat.dialogue([Message("system", system_prompt)]).ids
        self.sampler = Sampler(
            model, pages, chat.end, sampling.temperature, sampling.top_p, prefix=system
        )
        self._replies: dict[int, asyncio.Future] = {}  # by page
        self._writing: asyncio.Task | None = None

    async def answer(self, page: int, episode: RunningEpisode) -> Reply | None:
        seen, turns = episode.observation, episode.turns
        messages = next_prompt(
            seen.instruction, turns, seen.text, self.system_prompt, episode.job.shots
        )
        ids = tuple(self.chat.prompt(messages))
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
        except Exception as error:
            # the waiting pages raise it, whatever it is, or they would wait for ever
            while self._replies:
                if not (reply := self._replies.popitem()[1]).done():
                    reply.set_exception(error)

    def _uniforms(self, episode: RunningEpisode) -> tuple[float, ...]:
        turn = episode.forgotten + len(episode.turns)
        return uniform_stream(self.max_new_tokens, self.seed, *episode.job.key, turn)


def uniform_stream(count: int, *seed) -> tuple[float, ...]:
    """So many uniform numbers, one for each token of an answer; the stream is that of these values alone."""
    stream = numpy.random.Generator(numpy.random.Philox(child_seed(*seed)))
    return tuple(stream.random(count).tolist())


# ---- a script ----


def expert_policy(
    context: Context, tasks: Iterable[str], *, relabels: bool = False, watch: bool = False
) -> Policy:
    """The world's experts. Raises ValueError if one of these tasks has none."""
    world = context.world
    missing = [task for task in dict.fromkeys(tasks) if task not in world.experts]
    if missing:
        raise ValueError(
            f"no scripted expert for {', '.join(missing[:5])}: take tasks of {world.name} that have one"
        )
    policy = ExpertPolicy(world, context.seed, relabels)
    return PrintingPolicy(policy) if watch else policy


class ExpertPolicy:
    """The scripted experts as a policy.

    relabels: in states that an agent reached (`Job.forced`), with no answer where an expert knows none.
    DAgger: Ross et al. 2011, arXiv:1011.0686. Each state is played on to the end, so the world judges the
    answer. Differs from the paper: a state from which the expert does not solve is not imitated.
    """

    spare_core = True

    def __init__(self, world: World, seed: int, relabels: bool = False):
        self.world, self.seed, self.relabels = world, seed, relabels
        self.name = "dagger" if relabels else "expert"
        self.sampling = {"seed": seed} if relabels else {"noise": 0.0, "seed": seed}

    def expert(self, episode: RunningEpisode) -> Expert:
        """The expert that answers this turn."""
        return self.world.expert(*episode.job.instance)

    async def answer(self, page: int, episode: RunningEpisode) -> Reply | None:
        expert, job = self.expert(episode), episode.job
        done = [self.world.parse(turn.action) for turn in episode.turns if turn.action]
        if self.relabels or job.forced:  # where another agent went, it may know no page
            decision = expert_decision(expert, episode.observation, done)
        else:
            try:
                decision = expert(episode.observation, done)
            except (ValueError, LookupError, StopIteration) as error:  # ends the episode alone
                why = f"{job.task} seed {job.seed}: the expert knows no way on: {error!r}"
                print(why, file=sys.stderr)
                return None
        return decision and Reply(write(decision.thought, self.world.render(decision.action)))


def expert_decision(expert: Expert, seen: Observation, done: list[Action]) -> Decision | None:
    """What an expert would do; None on a page that it does not know."""
    try:
        return expert(seen, done)
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration, ArithmeticError):
        return None  # experts are written for the pages that they themselves come to


# ---- either, printed ----


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
        text = reply.text if reply else "no answer: context full, or no expert's step here"
        lines += text.splitlines()
        tqdm.write("\n  ".join([f"{job.task} seed {job.seed}: {title}", *lines]))
        return reply
