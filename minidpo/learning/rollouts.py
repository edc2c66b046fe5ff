"""Rollouts: an agent's own episodes as token ids, and what is known of each token that it wrote.

GRPO, PPO and reward models read these. Episodes of an instance stand in one tree. A number
for each token that the agent wrote is a column; a token that several episodes wrote is an entry of each.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from minidpo.config import GRPOCommand, PPOCommand
from minidpo.data.batch import Batch, batch_logps, read_states
from minidpo.data.episodes import Episode
from minidpo.data.information import answer_information, diversity
from minidpo.data.pairs import check_prompts
from minidpo.data.prompt import dialogues_of
from minidpo.learning.preferences import collate_groups, largest_tree, micro_batches, over_all
from minidpo.learning.reference import cached, identity, key
from minidpo.learning.selection import by_expert, one_agent
from minidpo.learning.trainer import check_finite
from minidpo.memory import lora
from minidpo.memory.machine import Machine
from minidpo.model.chat import Chat, Dialogue
from minidpo.model.decoder import Transformer
from minidpo.model.scalar_head import ScalarHead
from minidpo.system.run_folder import RunFolder
from minidpo.system.tensors import to_device

OTHER_AGENT = (
    0.3  # nats a token, in the mean; acting in bf16 and training in fp32 differ by hundredths
)


class Rollouts(NamedTuple):
    """An agent's episodes as token ids."""

    dialogues: list[Dialogue]
    names: list[str]
    instances: list[tuple[str, int]]

    @classmethod
    def of(cls, episodes: Sequence[Episode], chat: Chat, limit: int) -> "Rollouts":
        return cls(*dialogues_of(episodes, chat, limit), [e.instance for e in episodes])

    def largest_tree(self, machine: Machine) -> int:
        """Tokens of the largest tree that a step may meet."""
        return largest_tree(self, [(d,) for d in range(len(self.names))], machine)

    def by_token(self, of_turns: Sequence[Tensor]) -> list[Tensor]:
        """A column made of numbers a turn: each written token gets its turn's. of_turns: (turns,) of each
        episode."""
        return [
            numbers[torch.tensor(d.written)]
            for numbers, d in zip(of_turns, self.dialogues, strict=True)
        ]


def own_rollouts(episodes: Sequence[Episode], files: Sequence[Path]) -> list[Episode]:
    """Those in which something was said. ValueError for an episode that was not all the agent's own or not
    sampled at T = 1, and if several agents or prompts are among them."""
    if given := next((e for e in episodes if e.forced or by_expert(e)), None):
        raise ValueError(
            f"{given.name}: not all of it was played by the agent: policy gradients need its "
            "own rollouts from the start, as collect.py --adapter writes them"
        )
    neutral = {
        "temperature": 1,
        "top_p": 1,
        "temperatures": [],
    }  # the distribution neither sharpened nor cut
    if given := next((e for e in episodes if neutral | e.sampling != e.sampling | neutral), None):
        raise ValueError(
            f"{given.name}: sampled with {given.sampling}, but policy gradients take it for a "
            "sample of the policy itself: collect at temperature 1, top-p 1"
        )
    one_agent(episodes, files)
    check_prompts(episodes)
    return [episode for episode in episodes if episode.turns]


def group_numbers(episodes: Sequence[Episode]) -> dict[str, float]:
    """What is logged of the rollouts, where it can be told: their `diversity`, and `answer_information` in
    nats, which falls to 0 when the agent no longer looks at the page. All episodes count that are given."""
    unlike, information = diversity(episodes), answer_information(episodes)
    return unlike | ({} if information is None else {"answer_information": information})


def entry_batches(
    data: Rollouts,
    picked: Sequence[int],
    columns: Sequence[Sequence[Tensor]],
    machine: Machine,
    device: torch.device,
) -> Iterator[tuple]:
    """A step's episodes, by number, in micro-batches: trees, the name of each entry, the entries of the whole
    step, then each column's numbers, (M,). An episode that a step meets twice, at the end of an epoch and at
    the beginning of the next, counts once."""
    picked = list(dict.fromkeys(picked))
    written = sum(len(data.dialogues[d].written) for d in picked)
    for groups in micro_batches(data, [(d,) for d in picked], machine):
        inside = [d for group in groups for d in group.trajectories]
        names = [data.names[d] for d in inside for _ in data.dialogues[d].written]
        yield (
            to_device(collate_groups(data, groups), device),
            names,
            written,
            *(to_device(torch.cat([column[d] for d in inside]), device) for column in columns),
        )


def entry_logps(model: Transformer, trees: Batch, machine: Machine) -> Tensor:
    """log π of each token that the agent wrote, (M,), episode by episode; a shared one stands for each."""
    return batch_logps(model, trees, machine.walk_above)[trees.column]


def entry_values(model: Transformer, head: ScalarHead, machine: Machine, trees: Batch) -> Tensor:
    """The head's number before each token that counts, (M,), in the order of `entry_logps`."""
    return read_states(model, trees, lambda hidden, _: head(hidden), machine.walk_above)[
        trees.column
    ]


def logps_before(
    config: GRPOCommand | PPOCommand,
    run: RunFolder,
    policy: Transformer,
    *,
    data: Rollouts,
    episodes: Sequence[Episode],
    machine: Machine,
) -> tuple[list[Tensor], list[Tensor]]:
    """log π of what was written, (written,) of each episode, by the agent that played, and by the reference:
    the same agent, unless another is named. From the run's files, or computed and kept there. The policy is
    the one that played from then on."""

    def logps_of(adapter: Path, name: str) -> list[Tensor]:
        lora.switch_adapter(policy, adapter, run.base)
        wanted = key(
            identity(policy, run.base, lora.read_config(adapter)), data.dialogues, "tokens"
        )
        return entries_once(
            policy,
            data,
            machine,
            lambda trees: entry_logps(policy, trees, machine),
            run.folder / name,
            wanted,
        )

    ref = logps_of(config.reference, "reference.safetensors") if config.reference else []
    old = logps_of(config.adapter, "rollouts.safetensors")
    check_player(episodes, old, config.adapter)
    return old, ref or old


def check_player(episodes: Sequence[Episode], old: Sequence[Tensor], adapter: Path) -> None:
    """Raise ValueError if what was recorded in playing, log π of each token, is far from what this adapter
    says, (written,) of each episode: then another agent played, and a ratio to this one means nothing."""
    recorded = [
        torch.tensor([logp for turn in e.turns for logp in turn.logps or ()]) for e in episodes
    ]
    gaps = [
        (played - logps.cpu()).abs()
        for played, logps in zip(recorded, old, strict=True)
        if played.shape == logps.shape
    ]
    if gaps and (gap := torch.cat(gaps).mean().item()) > OTHER_AGENT:
        raise ValueError(
            f"these rollouts were played by another agent than --adapter {adapter}: its log-"
            f"probs are {gap:.1f} nats a token from the recorded ones; name the one that played"
        )


def entries_once(
    policy: Transformer,
    data: Rollouts,
    machine: Machine,
    score: Callable[[Batch], Tensor],
    path: Path,
    wanted: str,
) -> list[Tensor]:
    """A number for each token that was written in each episode, as `score` gives them for a batch: from the
    file in `path`, if its key is `wanted`, or computed and kept there."""
    lengths = [len(dialogue.written) for dialogue in data.dialogues]

    def compute() -> Tensor:
        values = over_all(data, lengths, policy, machine, score)
        check_finite(torch.stack([part.sum() for part in values.split(lengths)]), data.names)
        return values

    return list(cached(path, wanted, compute).split(lengths))
