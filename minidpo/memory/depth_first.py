"""Depth first: a tree of trajectories scored one path at a time, so memory follows its longest path.

A tree's segments are its runs without a branch. Going down, a segment reads keys and values of those above.
Going up, its own graph is run backward, with the gradients that its children sent to its keys and values, and
freed. So only the graphs of one path from the root are alive. The loss needs all scores before their
gradient is known: the tree is walked twice, and each token computed once more than in a whole tree.
The idea is AReaL's tree training in its depth-first mode (github.com/inclusionAI/AReaL).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minidpo.model.attention import Mask, attend
from minidpo.model.decoder import Transformer
from minidpo.system.tensors import to_device


class PathCache:
    """Keys and values (1,K,t,D) of one segment a layer, behind those of the segments above it.

    For a block it is what a `KVCache` is. What the segments above hold are leaves of their own graphs: their
    gradients are added up until a segment's own backward pass takes them.
    """

    def __init__(self, above: Sequence["PathCache"], layers: int):
        self.above = above
        self.new: list[tuple[Tensor, Tensor] | None] = [None] * layers
        self.leaves: list[tuple[Tensor, Tensor]] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        if not self.leaves:  # when a block runs again, what it makes would keep its whole graph
            self.new[layer] = k, v
        path = [*(segment.leaves[layer] for segment in self.above), (k, v)]
        keys, values = (torch.cat(pieces, dim=2) for pieces in zip(*path))
        return attend(q, keys, values, mask)

    def close(self) -> None:
        """Let segments below read this one."""
        self.leaves = [
            tuple(t.detach().requires_grad_(t.requires_grad) for t in pair) for pair in self.new
        ]


def read_depth_first(
    model: Transformer,
    ids: Tensor,
    positions: Tensor,
    ends: Tensor,
    predict: Tensor,
    read: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """What `read` makes of N states of one tree, (N,...), as `data/batch.read_states` has it, to rounding.

    ids, positions and ends (T,) are the tree's (`data/tree`); predict (N,) is the batch's. read(hidden (n,C),
    numbers of these states (n,)) -> (n,...). Backward adds the gradient to that of the parameters of the
    model and of `read`, and gives none to anything else.
    """
    # the result needs a gradient
    anchor = next((p for p in model.parameters() if p.requires_grad), ids)
    return _DepthFirst.apply(anchor, model, (ids, positions, ends.tolist(), predict.tolist(), read))


class _DepthFirst(torch.autograd.Function):
    """The walk without gradients, and in backward the walk with them."""

    @staticmethod
    def forward(ctx, anchor: Tensor, model: Transformer, tree: tuple) -> Tensor:
        ctx.model, ctx.tree = model, tree
        return walk(model, *tree)

    @staticmethod
    def backward(ctx, grad: Tensor):
        with torch.enable_grad():
            walk(ctx.model, *ctx.tree, grad)
        return None, None, None


def segment_end(ends: Sequence[int], first: int) -> int:
    """Where the run of only children that begins at token `first` ends.

    >>> segment_end([5, 5, 4, 4, 5], 0), segment_end([5, 5, 4, 4, 5], 2)  # the tree of `data/tree.grow`
    (2, 4)
    """
    place = first + 1
    while place < ends[first] and ends[place] == ends[first]:
        place += 1
    return place


def walk(
    model: Transformer,
    ids: Tensor,
    positions: Tensor,
    ends: Sequence[int],
    predict: Sequence[int],
    read: Callable[[Tensor, Tensor], Tensor],
    grad: Tensor | None = None,
) -> Tensor:
    """What is read, (N,...). With its gradient, a segment's graph is run backward after all below it."""
    result = None

    def visit(first: int, seen: int, above: list[PathCache]) -> None:
        nonlocal result
        last = segment_end(ends, first)
        cache = PathCache(above, len(model.model.layers))
        visible = torch.ones(last - first, seen + last - first, dtype=torch.bool, device=ids.device)
        hidden = model(
            ids[None, first:last],
            positions[None, first:last],
            visible[None].tril(seen),
            cache=cache,
        )[0]
        cache.close()
        here = [(n, place - first) for n, place in enumerate(predict) if first <= place < last]
        # from the host: no GPU waits
        pairs = to_device(torch.tensor(here, dtype=torch.long).view(-1, 2), ids.device)
        entries, states = pairs.T
        value = read(hidden[states], entries)
        if result is None:
            result = value.new_zeros(len(predict), *value.shape[1:])
        result[entries] = value.detach()
        child = last
        while child < ends[first]:
            visit(child, seen + last - first, [*above, cache])  # noqa: F821 (deleted below)
            child = ends[child]
        if grad is not None:
            outputs = []
            if value.requires_grad and here:
                outputs.append((value, grad[entries].to(value.dtype)))
            for pair, leaves in zip(cache.new, cache.leaves):
                outputs += [
                    (new, leaf.grad) for new, leaf in zip(pair, leaves) if leaf.grad is not None
                ]
            if outputs:
                torch.autograd.backward(*map(list, zip(*outputs)))

    first = 0
    while first < len(ends):  # a forest if the trajectories share no first token
        visit(first, 0, [])
        first = ends[first]
    del visit  # it calls itself, so what it holds, the model too, would live until the cyclic collector runs
    return result
