"""An agent for your own program: a model with its adapter, asked one page at a time. Nothing here is async.

from minidpo import Agent
agent = Agent("smollm2", "runs/demo/adapter")
agent.predict('Click on the "OK" button.', 'button "OK" [1]').action  # 'CLICK(ref="1")'
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import envs
from envs.protocol import ActionError, Outcome, World
from minidpo.acting.policies import ModelPolicy, Sampling, uniform_stream
from minidpo.data.episodes import Episode, Turn, in_a_loop
from minidpo.data.pairs import Pair
from minidpo.data.prompt import as_shots, next_prompt, thought, understand
from minidpo.learning.explain import tokens_of, written_logps
from minidpo.learning.preferences import pair_dialogues
from minidpo.memory.loading import open_policy
from minidpo.memory.machine import Machine
from minidpo.model.sampling import Request
from minidpo.system.command_line import at_home

GREEDY = Sampling(temperature=0.0)
DEFAULT_MACHINE = Machine()


class TooLong(ValueError):
    """A conversation, and room for the answer, that the model cannot read."""


class Prediction(NamedTuple):
    """An answer: its thought, its action in canonical form, all of it and its tokens. Where it has no usable
    action, `action` is None, `error` says why and `text` what was said instead: a model that was not trained
    for it, such as smollm2 without an adapter, seldom answers in the form that the world's prompt asks for."""

    thought: str
    action: str | None
    text: str
    ids: tuple[int, ...]
    error: str | None = None


class Explanation(NamedTuple):
    """What an agent thinks of a pair: (text, log π in nats) of each token that the two sides wrote."""

    chosen: list[tuple[str, float]]
    rejected: list[tuple[str, float]]

    @property
    def margin(self) -> float:
        """log π(chosen) - log π(rejected): above 0 if the agent would rather say the chosen."""
        return sum(logp for _, logp in self.chosen) - sum(logp for _, logp in self.rejected)


class Agent:
    """A policy that answers at once: greedily, or with a temperature by `seed` and conversation.

        Agent("minidpo/nano", sampling=Sampling(temperature=1.0, top_p=0.9), seed=2)

    `minidpo.acting.policies.Sampling`. One seed answers a conversation the same each time, another may not.
    """

    def __init__(
        self,
        model: str = "smollm2",
        adapter: str | Path | None = None,
        *,
        seed: int = 1,
        sampling: Sampling = GREEDY,
        machine: Machine = DEFAULT_MACHINE,
        shots: Sequence[Episode] = (),
        world: World | None = None,
    ):
        """Load `model` (folder, hub id, GGUF file, smollm2), with an adapter. `shots`: solved episodes
        that stand before each task, for an adapter that learned after them. `world`: whose prompt and
        actions it speaks; None: MiniWoB++'s. Raises ValueError."""
        if sampling.temperatures:
            raise ValueError(
                "an agent answers at one temperature, it plays no group: leave out temperatures"
            )
        model = os.path.expanduser(model)
        folder = None if adapter is None else at_home(Path(adapter))
        loaded, self.chat, identity = open_policy(model, folder, replace(machine, pages=1))
        self.name, self.sampling, self.seed = f"{adapter or model}@{identity}", sampling, seed
        self.shots, self.world = as_shots(shots), world or envs.world("miniwob")
        policy = ModelPolicy(
            loaded, self.chat, self.name, self.world.system_prompt, sampling, seed=seed, pages=1
        )
        self.sampler, self.model = policy.sampler, policy.sampler.model
        self.limit = policy.max_context

    def predict(self, instruction: str, page: str, turns: Sequence[Turn] = ()) -> Prediction:
        """What to do on this page, given the turns before it. Raises TooLong."""
        system = self.world.system_prompt
        ids = tuple(self.chat.prompt(next_prompt(instruction, turns, page, system, self.shots)))
        if len(ids) + self.sampling.max_new_tokens > self.limit:
            raise TooLong(
                f"the conversation has {len(ids)} tokens and the answer may have "
                f"{self.sampling.max_new_tokens}, but the model reads at most {self.limit}"
            )
        uniforms = uniform_stream(self.sampling.max_new_tokens, self.seed, ids)
        self.sampler.ask(0, Request(ids, uniforms))
        answers = {}
        while not answers:
            answers = self.sampler.step()
        ids, text = answers[0].ids, self.chat.decode(answers[0].ids)
        try:
            action = self.world.render(understand(text, self.world))
            return Prediction(thought(text), action, text, ids)
        except ActionError as problem:
            return Prediction(thought(text), None, text, ids, str(problem))

    def act(self, env, seed: int | None = None) -> Episode:
        """Play an episode in a Gymnasium environment of `envs.gym`. Returns its record. The outcome is
        "solved", "failed", or "limit": no steps left, the text too long, or the agent in a loop."""
        seen, info = env.reset(seed=seed)
        instruction, turns = seen["instruction"], []
        while info["outcome"] is None and not (self.world.shows_state and in_a_loop(turns)):
            try:
                said = self.predict(instruction, seen["page"], turns)
            except TooLong:
                break
            page = seen["page"]
            # "" costs a turn, as any unusable answer
            seen, _, _, _, info = env.step(said.action or "")
            error = said.error or seen["error"] or None
            turns.append(Turn(page, said.text, said.action, error, said.ids))
        return Episode(
            info["task"],
            info["seed"],
            0,
            instruction,
            tuple(turns),
            info["outcome"] or str(Outcome.LIMIT),
            info["raw_reward"],
            self.name,
            self.sampling.record(self.seed),
            shots=self.shots,
        )

    def explain(self, pair: Pair) -> Explanation:
        """The log-probs of both sides' own tokens. Raises ValueError for a side that is too long.

        solved, failed = agent.act(env, seed=0), other.act(env, seed=0)  # or two of data.episodes.read
        agent.explain(Pair(solved, failed)).margin  # minidpo.data.pairs.Pair, which wants this order
        """
        sides, _ = pair_dialogues([pair], self.chat, self.limit, self.world.system_prompt)
        explained = []
        for side, logps in zip(sides, written_logps(self.model, sides)):
            tokens = tokens_of(self.chat, side, logps, logps)
            explained.append([(token.text, token.after) for token in tokens if token.turn >= 0])
        return Explanation(*explained)
