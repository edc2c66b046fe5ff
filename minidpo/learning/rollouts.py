"""Rollouts: an agent's own episodes as token ids, with numbers for each token that it wrote.

Policy gradients, PPO and reward models read these. The episodes of an instance share one tree. A column holds
one number for each token that the agent wrote; a token that several episodes share has one number in each.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from minidpo.data.batch import Batch, batch_logps, read_states
from minidpo.data.episodes import Episode, player_of
from minidpo.data.pairs import check_prompts
from minidpo.data.prompt import dialogues_of
from minidpo.data.selection import is_expert
from minidpo.learning.micro_batches import collate_groups, largest_tree, micro_batches, over_all
from minidpo.learning.reference import cached, identity, key
from minidpo.learning.trainer import check_finite
from minidpo.memory import lora
from minidpo.memory.machine import Machine
from minidpo.model.chat import Chat, Dialogue
from minidpo.model.decoder import Transformer
from minidpo.model.scalar_head import ScalarHead
from minidpo.system.run_folder import RunFolder
from minidpo.system.tensors import to_device

OTHER_AGENT = 0.3  # mean gap in nats a token; bf16 play and fp32 training differ only by hundredths


class Rollouts(NamedTuple):
    """An agent's episodes as token ids."""

    dialogues: list[Dialogue]
    names: list[str]
    instances: list[tuple[str, int]]

    @classmethod
    def of(cls, episodes: Sequence[Episode], chat: Chat, limit: int, system: str) -> "Rollouts":
        return cls(*dialogues_of(episodes, chat, limit, system), [e.instance for e in episodes])

    def largest_tree(self, machine: Machine) -> int:
        """Tokens of the largest tree that a step may have."""
        return largest_tree(self, [(d,) for d in range(len(self.names))], machine)

    def by_token(self, of_turns: Sequence[Tensor]) -> list[Tensor]:
        """A column from numbers of turns, (turns,) for each episode: each token gets its turn's number."""
        return [
            numbers[torch.tensor(dialogue.written)]
            for numbers, dialogue in zip(of_turns, self.dialogues, strict=True)
        ]


def entry_batches(
    data: Rollouts,
    picked: Sequence[int],
    columns: Sequence[Sequence[Tensor]],
    machine: Machine,
    device: torch.device,
) -> Iterator[tuple]:
    """A step's episodes, by number, in micro-batches.

    Yields the trees, the name of each entry, the number of entries in the whole step, then each column's numbers,
    (M,). An episode that is twice in a step, at the end of one epoch and the start of the next, counts once.
    """
    picked = list(dict.fromkeys(picked))
    step_entries = sum(len(data.dialogues[d].written) for d in picked)
    for groups in micro_batches(data, [(d,) for d in picked], machine):
        inside = [d for group in groups for d in group.trajectories]
        names = [data.names[d] for d in inside for _ in data.dialogues[d].written]
        trees = to_device(collate_groups(data, groups), device)
        numbers = [to_device(torch.cat([column[d] for d in inside]), device) for column in columns]
        yield trees, names, step_entries, *numbers


def entry_logps(model: Transformer, machine: Machine, trees: Batch) -> Tensor:
    """log π of each token that the agent wrote, (M,), episode by episode."""
    return batch_logps(model, trees, machine.walk_above)[trees.column]


def entry_values(model: Transformer, head: ScalarHead, machine: Machine, trees: Batch) -> Tensor:
    """The head's number of the state before each token that counts, (M,), in the order of `entry_logps`."""
    values = read_states(model, trees, lambda hidden, _: head(hidden), machine.walk_above)
    return values[trees.column]


def entries_once(
    path: Path,
    wanted: str,
    data: Rollouts,
    policy: Transformer,
    machine: Machine,
    score: Callable[[Batch], Tensor],
) -> list[Tensor]:
    """A column of the numbers that `score` gives, read from `path` if its key is `wanted`, or computed and written
    there."""
    lengths = [len(dialogue.written) for dialogue in data.dialogues]

    def compute() -> Tensor:
        values = over_all(data, lengths, policy, machine, score)
        check_finite(torch.stack([part.sum() for part in values.split(lengths)]), data.names)
        return values

    return list(cached(path, wanted, compute).split(lengths))


def logps_before(
    run: RunFolder,
    policy: Transformer,
    data: Rollouts,
    episodes: Sequence[Episode],
    machine: Machine,
    start: Path,
    reference: Path | None,
) -> tuple[list[Tensor], list[Tensor]]:
    """log π of the written tokens under the agent that played, `start`, and under the reference: two columns.

    Without a reference both are the same column. They are kept in the run's folder. Leaves the policy at
    `start`. Raises ValueError if another agent played the episodes.
    """
    run.begin()

    def logps_of(adapter: Path, name: str) -> list[Tensor]:
        lora.switch_adapter(policy, adapter, run.base)
        weights = identity(policy, run.base, lora.read_config(adapter))
        wanted = key(weights, data.dialogues, "tokens")
        score = partial(entry_logps, policy, machine)
        return entries_once(run.folder / name, wanted, data, policy, machine, score)

    ref = logps_of(reference, "reference.safetensors") if reference else None
    old = logps_of(start, "rollouts.safetensors")
    check_player(episodes, old, start)
    print(lora.describe(policy))
    return old, ref or old


def check_player(episodes: Sequence[Episode], old: Sequence[Tensor], adapter: Path) -> None:
    """Raises ValueError if another agent than this adapter played the episodes: ratios to it would mean nothing.

    Compares the log-probs that were recorded in play with the adapter's own, (written,) for each episode.
    """
    gaps = []
    for episode, logps in zip(episodes, old, strict=True):
        played = torch.tensor([logp for turn in episode.turns for logp in turn.logps or ()])
        if played.shape == logps.shape:
            gaps.append((played - logps.cpu()).abs())
    gap = torch.cat(gaps).mean().item() if gaps else 0.0
    if gap > OTHER_AGENT:
        raise ValueError(
            f"these rollouts were played by another agent than {adapter}: its log-probs are "
            f"{gap:.1f} nats a token from the recorded ones; name the adapter that played"
        )


def own_rollouts(episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes with at least one turn, if a policy gradient may learn from them.

    Raises ValueError for an episode that was not played by the agent alone or not sampled at T = 1, and if
    several agents played or prompts differ.
    """
    neutral = {"temperature": 1, "top_p": 1, "temperatures": []}
    for episode in episodes:
        if episode.forced or is_expert(episode):
            raise ValueError(
                f"{episode.name}: not all of it was played by the agent: policy gradients need its "
                "own rollouts from the start, as collect.py --adapter writes them"
            )
        if neutral | episode.sampling != episode.sampling | neutral:
            raise ValueError(
                f"{episode.name}: sampled with {episode.sampling}, but policy gradients take it for "
                "a sample of the policy itself: collect at temperature 1, top-p 1"
            )
    players = {player_of(e.policy)[0] for e in episodes}
    if len(players) > 1:
        raise ValueError(
            f"played by {len(players)} agents, but an episode is compared with the agent's own: give "
            "the rollouts of one"
        )
    check_prompts(episodes)
    return [episode for episode in episodes if episode.turns]
