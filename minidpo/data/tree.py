"""Prefix trees: trajectories with common prefixes in one row that holds each shared token once.

All episodes of a task instance share the system prompt, the task and the first page, and often the first
actions. Their union is laid out depth first. A token's position is its depth, and it sees only its ancestors.
In this order the descendants of token k are k+1 .. ends[k]-1, so the attention mask is two comparisons, and
one forward pass gives every trajectory the log-probs that it would have alone. A single demonstration is a
tree without branches, so all training uses one kind of batch (`data/batch`).
"""

from bisect import bisect
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def common(left: Sequence, right: Sequence) -> int:
    """The length of the longest common prefix.

    >>> common("page", "pages"), common("page", "pace")
    (4, 2)
    """
    differing = (n for n, (a, b) in enumerate(zip(left, right)) if a != b)
    return next(differing, min(len(left), len(right)))


class Tree(NamedTuple):
    """T tokens, depth first, and where each trajectory runs through them."""

    ids: list[int]  # (T,)
    depths: list[int]  # (T,) how many tokens precede it in its trajectories
    ends: list[int]  # (T,) the first later token that is not its descendant
    paths: list[list[int]]  # of each trajectory, the places of its tokens, from the root on


def grow(trajectories: Sequence[Sequence[int]]) -> Tree:
    """The tree of some rows of token ids; the order of the rows does not matter.

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
    # In sorted order a trajectory shares most with the one before it. So its new tokens are appended, and the
    # branch that it leaves is complete.
    for i in sorted(range(len(trajectories)), key=lambda i: trajectories[i]):
        trajectory = trajectories[i]
        shared = common(before, trajectory)
        for token in path[shared:]:
            ends[token] = len(ids)
        new = len(trajectory) - shared
        path = path[:shared] + list(range(len(ids), len(ids) + new))
        ids += trajectory[shared:]
        depths += range(shared, len(trajectory))
        ends += [0] * new  # until the branch is complete
        paths[i], before = path, trajectory
    for token in path:  # the last branch
        ends[token] = len(ids)
    return Tree(ids, depths, ends, paths)


def ancestors(ends: Tensor) -> Tensor:
    """Which keys each query may read: its ancestors and itself. (B,T,T) bool for ends (B,T).

    >>> ancestors(torch.tensor([[3, 2, 3]]))[0].int()  # 1 and 2 are children of 0
    tensor([[1, 0, 0],
            [1, 1, 0],
            [1, 0, 1]], dtype=torch.int32)
    """
    place = torch.arange(ends.shape[1], device=ends.device)
    key, query = place[None, None, :], place[None, :, None]
    return (key <= query) & (query < ends[:, None, :])


class Group(NamedTuple):
    """Trajectories of one instance in one tree, and their units: pairs or single trajectories."""

    tree: Tree
    trajectories: list[int]  # their numbers, in the order of the tree's paths
    units: list[int]  # the numbers of the units


def grow_groups(
    units: Sequence[Sequence[int]],
    trajectories: Sequence[Sequence[int]],
    instances: Sequence[tuple[str, int]],
    budget: int,
) -> list[Group]:
    """One tree for each instance, or several where its tree would have more than `budget` tokens.

    units: the numbers of the trajectories of each unit; trajectories: their token ids; instances: one for each
    trajectory. A unit is never split: one that exceeds the budget by itself gets a tree of its own.

    >>> rows = [[1, 2], [1, 3], [1, 4], [5]]
    >>> [group.units for group in grow_groups([[0, 1], [0, 2], [0, 3]], rows, [("task", 7)] * 4, budget=4)]
    [[0, 1], [2]]
    """
    by_instance: dict[tuple[str, int], list[int]] = {}
    for number, unit in enumerate(units):
        by_instance.setdefault(instances[unit[0]], []).append(number)
    groups = []
    for members in by_instance.values():
        for part in _split(members, units, trajectories, budget):
            inside = list(dict.fromkeys(t for number in part for t in units[number]))
            groups.append(Group(grow([trajectories[t] for t in inside]), inside, part))
    return groups


def _split(
    members: Sequence[int],
    units: Sequence[Sequence[int]],
    trajectories: Sequence[Sequence[int]],
    budget: int,
) -> list[list[int]]:
    """The units of an instance, in order, in parts whose trees have at most `budget` tokens."""
    parts: list[list[int]] = []
    rows: list[Sequence[int]] = []  # of the current part, sorted
    size = 0  # tokens of its tree
    for number in members:
        new = [trajectories[t] for t in units[number]]
        size += _insert(rows, new)
        if not parts or size > budget:
            parts.append([])
            rows = []
            size = _insert(rows, new)
        parts[-1].append(number)
    return parts


def _insert(rows: list[Sequence[int]], new: Sequence[Sequence[int]]) -> int:
    """Insert token rows into sorted `rows`. Returns how many tokens the rows' tree gains."""
    gained = 0
    for row in new:
        at = bisect(rows, row)
        neighbours = rows[max(0, at - 1) : at + 1]  # one of these shares the longest prefix
        gained += len(row) - max((common(row, near) for near in neighbours), default=0)
        rows.insert(at, row)
    return gained
