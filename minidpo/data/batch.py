"""Batches: trees side by side as tensors, with the weights W that turn their log-probs into scores.

A batch holds the positions that predict the agent's tokens, and the entries of W: each says how much one
token's log-prob counts in one trajectory's score. The model runs once over all trees; the vocabulary head
runs only where the agent wrote.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minidpo.data.tree import Tree, ancestors, grow
from minidpo.memory.depth_first import read_depth_first
from minidpo.memory.machine import row_length
from minidpo.model.chat import Dialogue
from minidpo.model.decoder import Transformer
from minidpo.model.head import token_logps
from minidpo.objective.scores import dmpo_weights, mean_weights, scores, sum_weights


class Batch(NamedTuple):
    """B trees side by side, padded on the right; the N tokens that count; the M entries of W."""

    ids: Tensor  # (B,T)
    positions: Tensor  # (B,T)
    ends: Tensor | None  # (B,T); None if no tree has a branch, so that causal attention is enough
    predict: Tensor  # (N,) the position before each token, in the flattened (B*T) positions
    targets: Tensor  # (N,) the token
    column: Tensor  # (M,) of each entry, which of the N tokens
    row: Tensor  # (M,) of each entry, which score; trajectories are numbered through all trees
    weight: Tensor  # (M,)
    rows: int
    tokens: int  # without padding


def collate(
    groups: Iterable[Sequence[Dialogue]],
    score: str = "sum",
    gamma: float | None = None,
    means: Sequence[int] = (),
    trees: Sequence[Tree] | None = None,
) -> Batch:
    """One tree for each group of trajectories, on the CPU, and W with a row for each trajectory.

    score: "sum", "mean" or "dmpo" (with gamma): the kind of weights (`objective/scores`). means: trajectories
    that get a second row, after all others, with the weights of a mean. trees: the groups' trees, if they are
    grown already, with paths in the order of each group.

    >>> b = collate([[Dialogue([5, 6, 7], [-1, 0, 0]), Dialogue([5, 6, 8], [-1, 0, 0])]])
    >>> b.ids.tolist(), b.predict.tolist(), b.targets.tolist(), b.column.tolist(), b.row.tolist()
    ([[5, 6, 7, 8]], [0, 1, 1], [6, 7, 8], [0, 1, 0, 2], [0, 0, 1, 1])
    """
    groups = list(groups)
    trees = trees or [grow([dialogue.ids for dialogue in group]) for group in groups]
    B, T = len(trees), row_length(max(len(tree.ids) for tree in trees))
    ids = torch.zeros(B, T, dtype=torch.long)  # padding is token 0, which nothing ever reads
    positions = torch.arange(T).repeat(B, 1)
    ends = torch.arange(1, T + 1).repeat(B, 1)
    for b, tree in enumerate(trees):
        length = len(tree.ids)
        ids[b, :length] = torch.tensor(tree.ids)
        positions[b, :length] = torch.tensor(tree.depths)
        ends[b, :length] = torch.tensor(tree.ends)
    branched = any(end != len(tree.ids) for tree in trees for end in tree.ends)

    predict, targets, column, row, turn = map(torch.tensor, _written(groups, trees, T))
    n = sum(map(len, groups))
    written = torch.ones_like(row, dtype=torch.bool)  # every entry is the agent's
    mean = mean_weights(written, row, n)
    if score == "dmpo":
        weight = dmpo_weights(written, row, n, turn, gamma)
    else:
        weight = {"sum": sum_weights(written, row, n), "mean": mean}[score]
    columns, rows, weights = [column], [row], [weight]
    for extra, trajectory in enumerate(means, n):
        own = row == trajectory
        columns.append(column[own])
        rows.append(torch.full_like(row[own], extra))
        weights.append(mean[own])
    return Batch(
        ids,
        positions,
        ends if branched else None,
        predict,
        targets,
        torch.cat(columns),
        torch.cat(rows),
        torch.cat(weights),
        rows=n + len(means),
        tokens=sum(len(tree.ids) for tree in trees),
    )


def _written(
    groups: list[Sequence[Dialogue]], trees: Sequence[Tree], T: int
) -> tuple[list[int], ...]:
    """The agent's tokens: a batch's `predict` and `targets`, then column, row and turn of W's entries."""
    columns: dict[int, int] = {}  # of each token, by its place in the flattened batch
    predict, targets, column, row, turns = [], [], [], [], []
    n = 0
    for b, (group, tree) in enumerate(zip(groups, trees)):
        for dialogue, path in zip(group, tree.paths):
            for t, turn in enumerate(dialogue.turns):
                if turn < 0:
                    continue
                place = b * T + path[t]
                if place not in columns:  # else another trajectory has it already
                    columns[place] = len(columns)
                    predict.append(b * T + path[t - 1])
                    targets.append(dialogue.ids[t])
                column.append(columns[place])
                row.append(n)
                turns.append(turn)
            n += 1
    return predict, targets, column, row, turns


def batch_logps(model: Transformer, batch: Batch, walk_above: int = sys.maxsize) -> Tensor:
    """log π of the batch's N tokens, (N,), in nats; walk_above: as in `read_states`."""

    def read(hidden: Tensor, n: Tensor | slice) -> Tensor:
        return token_logps(hidden, model.head_weight, batch.targets[n])

    return read_states(model, batch, read, walk_above)


def read_states(
    model: Transformer, batch: Batch, read: Callable, walk_above: int = sys.maxsize
) -> Tensor:
    """Apply `read` to the N hidden states that predict the agent's tokens.

    read(hidden (n,C), which of the N these are) -> (n,...). Returns (N,...). A batch of one tree with more than
    `walk_above` tokens is computed depth first (`memory/depth_first`) and read a segment at a time.
    """
    if batch.ends is not None and len(batch.ids) == 1 and batch.tokens > walk_above:
        padded = batch.ids, batch.positions, batch.ends
        unpadded = (tensor[0, : batch.tokens] for tensor in padded)
        return read_depth_first(model, *unpadded, batch.predict, read)
    mask = None if batch.ends is None else ancestors(batch.ends)
    hidden = model(batch.ids, batch.positions, mask).flatten(0, 1)[batch.predict]  # (N,C)
    return read(hidden, slice(None))


def batch_scores(model: Transformer, batch: Batch, walk_above: int = sys.maxsize) -> Tensor:
    """W @ logp: the batch's scores, (rows,), in nats. walk_above: as in `batch_logps`."""
    logps = batch_logps(model, batch, walk_above)[batch.column]  # (M,)
    return scores(logps, batch.row, batch.weight, batch.rows)


def batches_within(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Batches of trees, by number, of at most `budget` tokens with padding; trees of similar length go together.

    A tree longer than the budget gets a batch of its own: nothing is cut or dropped.

    >>> batches_within([3, 9, 4], budget=8)
    [[0, 2], [1]]
    """
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * row_length(lengths[i]) <= budget:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches
