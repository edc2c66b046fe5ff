"""17. Trees: trajectories with common beginnings as one row, in which each token stands once.

All episodes of an instance share the system prompt, the task, the first page, often the first actions. Their
union is laid out depth first: a token's position is its depth, and it sees its ancestors only. In this order
the descendants of token k are the tokens behind it up to `ends[k]`, so the mask is two comparisons, and one
forward pass gives the log-probs of every trajectory as each alone would have them. A demonstration by
itself is the tree without branches, so there is one kind of batch for all training. Next: 18 reference.
"""

from collections.abc import Iterable, Sequence
from os.path import commonprefix
from typing import NamedTuple

import torch
from torch import Tensor

from minidpo.model.chat import Dialogue
from minidpo.model.decoder import Qwen2
from minidpo.model.head import token_logps
from minidpo.objective.scores import dmpo_weights, mean_weights, scores, sum_weights


class Tree(NamedTuple):
    """T tokens, depth first, and where in them each trajectory runs."""

    ids: list[int]  # (T,)
    depths: list[int]  # (T,) how many tokens stand before it in its trajectories
    ends: list[int]  # (T,) the first token behind it that is not its descendant
    paths: list[list[int]]  # of each trajectory the tokens, from the root on


def grow(trajectories: Sequence[Sequence[int]]) -> Tree:
    """The tree of some rows of token ids, in whatever order they come.

    >>> tree = grow([[5, 6, 9], [5, 6, 7, 8], [5, 6, 9]])
    >>> tree.ids, tree.depths, tree.ends, tree.paths
    ([5, 6, 7, 8, 9], [0, 1, 2, 3, 2], [5, 5, 4, 4, 5], [[0, 1, 4], [0, 1, 2, 3], [0, 1, 4]])
    """
    ids: list[int] = []
    depths: list[int] = []
    ends: list[int] = []
    paths: list[list[int]] = [[] for _ in trajectories]
    path: list[int] = []
    before: Sequence[int] = []
    # Sorted, a trajectory shares with the one before it all that it shares with any before it; so what is
    # new goes to the end, and the branch that it leaves is finished.
    for i in sorted(range(len(trajectories)), key=lambda i: trajectories[i]):
        new = trajectories[i]
        shared = len(commonprefix([before, new]))
        for token in path[shared:]:
            ends[token] = len(ids)
        path = path[:shared] + list(range(len(ids), len(ids) + len(new) - shared))
        ids += new[shared:]
        depths += range(shared, len(new))
        ends += [0] * (len(new) - shared)
        paths[i], before = path, new
    for token in path:
        ends[token] = len(ids)
    return Tree(ids, depths, ends, paths)


class Batch(NamedTuple):
    """B trees side by side, padded on the right; the N tokens in them that count; W by its entries."""

    ids: Tensor  # (B,T)
    positions: Tensor  # (B,T)
    ends: Tensor | None  # (B,T), or None if no tree has a branch: then plain causal attention does
    predict: Tensor  # (N,) index into the flattened (B*T) positions: the one before the token
    targets: Tensor  # (N,) the token
    column: Tensor  # (M,) of each entry of W: which of the N tokens
    row: Tensor  # (M,) which score; trajectories are numbered through all trees
    weight: Tensor  # (M,)
    rows: int
    tokens: int  # without padding

    def to(self, device: torch.device) -> "Batch":
        return self._replace(**{name: moved(value, device) for name, value in self._asdict().items()
                                if isinstance(value, Tensor)})


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """tensor on the device; from pinned memory, or the copy would wait for all that the GPU has to do yet."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def collate(groups: Iterable[Sequence[Dialogue]], score: str = "sum", gamma: float | None = None,
            means: Sequence[int] = ()) -> Batch:
    """One tree for each group of trajectories, on the CPU, and W: a row for each trajectory.

    score: its weights are "sum", "mean" (chapter 1) or "dmpo" with gamma (chapter 2). means: trajectories
    that get a second row, behind all others, with the weights of a mean.

    >>> b = collate([[Dialogue([5, 6, 7], [-1, 0, 0]), Dialogue([5, 6, 8], [-1, 0, 0])]])
    >>> b.ids.tolist(), b.predict.tolist(), b.targets.tolist(), b.column.tolist(), b.row.tolist()
    ([[5, 6, 7, 8]], [0, 1, 1], [6, 7, 8], [0, 1, 0, 2], [0, 0, 1, 1])
    """
    groups = list(groups)
    trees = [grow([dialogue.ids for dialogue in group]) for group in groups]
    B, T = len(trees), max(len(tree.ids) for tree in trees)
    ids = torch.zeros(B, T, dtype=torch.long)  # padding is token 0, which nothing ever reads
    positions, ends = torch.arange(T).repeat(B, 1), torch.arange(1, T + 1).repeat(B, 1)
    for b, tree in enumerate(trees):
        for padded, values in ((ids, tree.ids), (positions, tree.depths), (ends, tree.ends)):
            padded[b, :len(values)] = torch.tensor(values)
    branched = any(end != len(tree.ids) for tree in trees for end in tree.ends)
    predict, targets, column, row, turns = map(torch.tensor, _written(groups, trees, T))
    n, written = sum(map(len, groups)), torch.ones_like(row, dtype=torch.bool)
    mean = mean_weights(written, row, n)
    weight = (mean if score == "mean" else sum_weights(written, row, n) if score == "sum" else
              dmpo_weights(written, row, n, turns, gamma))
    entries = [(column, row, weight)]
    for extra, trajectory in enumerate(means, n):
        own = row == trajectory
        entries.append((column[own], torch.full_like(row[own], extra), mean[own]))
    column, row, weight = map(torch.cat, zip(*entries))
    return Batch(ids, positions, ends if branched else None, predict, targets, column, row, weight,
                 rows=n + len(means), tokens=sum(len(tree.ids) for tree in trees))


def _written(groups: list[Sequence[Dialogue]], trees: list[Tree], T: int) -> tuple[list[int], ...]:
    """What the agent wrote: a batch's `predict` and `targets`, then column, row and turn of W's entries."""
    columns: dict[int, int] = {}  # by the token's place in the flattened batch
    predict, targets, column, row, turns = [], [], [], [], []
    paths = [(dialogue, path, b * T) for b, (group, tree) in enumerate(zip(groups, trees))
             for dialogue, path in zip(group, tree.paths)]
    for n, (dialogue, path, start) in enumerate(paths):
        for t, turn in enumerate(dialogue.turns):
            if turn >= 0:
                place = start + path[t]
                if place not in columns:  # else another trajectory has it already
                    columns[place] = len(columns)
                    predict.append(start + path[t - 1])
                    targets.append(dialogue.ids[t])
                column.append(columns[place])
                row.append(n)
                turns.append(turn)
    return predict, targets, column, row, turns


def ancestors(ends: Tensor) -> Tensor:
    """Which keys each query may read, (B,T,T) bool for ends (B,T): its ancestors and itself.

    >>> ancestors(torch.tensor([[3, 2, 3]]))[0].int()  # 1 and 2 are children of 0
    tensor([[1, 0, 0],
            [1, 1, 0],
            [1, 0, 1]], dtype=torch.int32)
    """
    place = torch.arange(ends.shape[1], device=ends.device)
    key, query = place[None, None, :], place[None, :, None]
    return (key <= query) & (query < ends[:, None, :])


def batch_logps(model: Qwen2, batch: Batch) -> Tensor:
    """log π of the batch's N tokens, (N,), in nats."""
    mask = None if batch.ends is None else ancestors(batch.ends)
    hidden = model(batch.ids, batch.positions, mask).flatten(0, 1)[batch.predict]  # (N,C)
    return token_logps(hidden, model.head_weight, batch.targets)


def batch_scores(model: Qwen2, batch: Batch) -> Tensor:
    """W @ logp: the batch's scores, (rows,), in nats."""
    return scores(batch_logps(model, batch)[batch.column], batch.row, batch.weight, batch.rows)


class Budget(NamedTuple):
    """How many tokens may go through the model at once."""

    batch: int  # of trees side by side, padding included
    tree: int  # of one tree: a group that has more is split


def split(units: Iterable[Sequence[Sequence[int]]], budget: int) -> list[list[int]]:
    """Units (a trajectory, a pair) by number, in trees of at most `budget` tokens, in the order they come.

    Each unit lands in one tree, whole: a pair whose own tree is larger than the budget has it for itself.

    >>> split([[[1, 2], [1, 3]], [[1, 2], [1, 4]], [[1, 2], [5]]], budget=4)  # 3, 4 and 3 tokens
    [[0, 1], [2]]
    """
    trees: list[list[int]] = []
    nodes: dict[tuple[int, int], int] = {}

    def add(unit: Sequence[Sequence[int]]) -> None:
        for ids in unit:
            node = -1
            for token in ids:
                node = nodes.setdefault((node, token), len(nodes))

    for i, unit in enumerate(units):
        add(unit)
        if not trees or len(nodes) > budget:
            nodes.clear()
            add(unit)
            trees.append([])
        trees[-1].append(i)
    return trees


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of trees in batches of at most `budget` tokens with padding, trees of like length together.

    A tree longer than the budget gets a batch of its own: nothing is cut or dropped.

    >>> pack([3, 9, 4], budget=8)
    [[0, 2], [1]]
    """
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * lengths[i] <= budget:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def check_trajectories(dialogues: Sequence[Dialogue], names: Sequence[str], limit: int) -> None:
    """Refuse, by name, a trajectory in which the agent wrote nothing or that is too long for the model."""
    for dialogue, name in zip(dialogues, names, strict=True):
        if not any(turn >= 0 for turn in dialogue.turns):
            raise ValueError(f"{name}: the agent wrote nothing in it, so there is nothing to learn from")
        if dialogue.turns[0] >= 0:
            raise ValueError(f"{name}: it begins with a token of the agent, which nothing can predict; "
                             "a trajectory begins with a prompt")
        if len(dialogue.ids) > limit:
            raise ValueError(f"{name}: {len(dialogue.ids)} tokens, but the model reads at most {limit}")
