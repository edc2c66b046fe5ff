"""37. Imitation: which episodes are learned by heart, how much each counts, and a step's share of them.

Next: 38 stages.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minidpo.config import SFT
from minidpo.data.episodes import Episode
from minidpo.data.pairs import by_instance, words
from minidpo.data.tree import Batch, collate, moved, pack
from minidpo.model.chat import Dialogue
from minidpo.objective.losses import advantage_weights, sft_loss
from minidpo.system.processes import rank_parts


def imitated(episodes: Sequence[Episode], options: SFT) -> tuple[list[Episode], list[float]]:
    """The episodes to imitate, each with its weight."""
    kept = [e for e in episodes if e.turns and (e.solved or options.weighting == "advantage")]
    if options.distinct:
        kept = list({(e.instance, words(e)): e for e in kept}.values())
    if options.weighting == "solved" or not kept:
        return kept, [1.0] * len(kept)
    number = {instance: n for n, instance in enumerate(by_instance(kept))}
    reward = torch.tensor([float(e.solved) for e in kept])
    group = torch.tensor([number[e.instance] for e in kept])
    return kept, advantage_weights(reward, group, options.temperature).tolist()


class SFTBatch(NamedTuple):
    trees: Batch
    weights: Tensor  # of each score
    names: list[str]
    step_tokens: int  # that the agent wrote in the whole step
    tokens: int


def sft_batches(dialogues: Sequence[Dialogue], names: Sequence[str], weights: Sequence[float],
                picked: Sequence[int], device: torch.device, micro_tokens: int) -> Iterator[SFTBatch]:
    """The dialogues picked for a step as micro-batches that know how many tokens the whole step has."""
    written = sum(turn >= 0 for i in picked for turn in dialogues[i].turns)
    lengths = [len(dialogues[i].ids) for i in picked]
    for part in rank_parts(pack(lengths, micro_tokens), lengths):
        trees = collate([dialogues[picked[n]]] for n in part)
        weight = moved(torch.tensor([weights[picked[n]] for n in part]), device)
        yield SFTBatch(trees.to(device), weight, [names[picked[n]] for n in part], written, trees.tokens)


def sft_objective(batch: SFTBatch, scores: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's part of the step's loss."""
    return sft_loss(batch.weights * scores, batch.step_tokens), {}
