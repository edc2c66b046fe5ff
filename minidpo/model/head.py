"""Log-probs of tokens from the vocabulary head, one piece of the logits at a time.

Logits and their gradient are the largest tensors of a training step, and an objective needs only the log-prob
of each written token. So the logits are made in pieces, and made again in backward.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LOGITS = 2**25  # that exist at once: 128 MiB in float32, 220 tokens of Qwen2's vocabulary
# weights of a quantised head that exist at once: 8 and 32 MiB in bf16
TILE, GPU_TILE = 2**22, 2**24


def token_logps(
    hidden: Tensor, weight, targets: Tensor, chunk: int | None = None, rows: int | None = None
) -> Tensor:
    """log softmax(hidden @ weightᵀ)[target] of each token, in nats.

    hidden (T,C): the states at the positions that *predict* the tokens. weight (V,C): the head, as `tiles`
    takes it. targets (T,) int64. Returns (T,). Products run in the inputs' dtype, the log-softmax in float32
    (float64 if the inputs are). At most chunk x rows of the (T,V) logits exist at once, by default LOGITS of
    them; backward computes them again. A frozen head gets no gradient.

    >>> token_logps(torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [1.0]]), torch.tensor([0, 1]))
    tensor([-0.6931, -0.3133])
    """
    rows = tile_rows(weight) if rows is None else rows
    chunk = max(1, LOGITS // max(1, rows)) if chunk is None else chunk
    return _TokenLogps.apply(hidden, weight, targets, chunk, rows)


class _TokenLogps(torch.autograd.Function):
    """`token_logps`; backward makes each piece's logits again instead of keeping them."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight, targets: Tensor, chunk: int, rows: int) -> Tensor:
        real = torch.promote_types(hidden.dtype, torch.float32)
        # of each token so far: the largest logit, the sum of exp(logit - largest), the target's logit
        largest = torch.full_like(targets, -torch.inf, dtype=real)
        total, target_logit = torch.zeros_like(largest), torch.zeros_like(largest)
        for first, tile in tiles(weight, rows):
            inside, column = _within(targets, first, len(tile))
            for t in _slices(len(targets), chunk):
                logits = (hidden[t] @ tile.t()).to(real)  # (t,rows)
                target_logit[t] += torch.where(inside[t], logits.gather(1, column[t])[:, 0], 0.0)
                top = torch.maximum(largest[t], logits.amax(1))
                sums = logits.sub_(top[:, None]).exp_().sum(1)  # in place: one buffer, not three
                total[t] = total[t] * (largest[t] - top).exp() + sums
                largest[t] = top
        quantised = not isinstance(weight, Tensor)
        ctx.save_for_backward(hidden, targets, largest, total, None if quantised else weight)
        ctx.quantised, ctx.pieces = weight if quantised else None, (chunk, rows)
        return (target_logit - largest) - total.log()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logps: Tensor):
        """∂logp/∂logits = onehot(target) - softmax(logits)."""
        hidden, targets, largest, total, weight = ctx.saved_tensors
        weight, (chunk, rows) = ctx.quantised if weight is None else weight, ctx.pieces
        wants_hidden, wants_weight, *_ = ctx.needs_input_grad
        # float32 even if the head is bfloat16, where many small addends would vanish; autograd casts it back
        grad_hidden = torch.zeros_like(hidden, dtype=total.dtype) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=total.dtype) if wants_weight else None
        for first, tile in tiles(weight, rows):
            inside, column = _within(targets, first, len(tile))
            for t in _slices(len(targets), chunk):
                logits = (hidden[t] @ tile.t()).to(total.dtype)
                # (t,rows), not yet divided by its sum
                softmax = logits.sub_(largest[t, None]).exp_()
                grad = grad_logps[t, None]
                grad_logits = softmax.mul_(-grad / total[t, None])
                grad_logits.scatter_add_(1, column[t], torch.where(inside[t, None], grad, 0.0))
                grad_logits = grad_logits.to(hidden.dtype)
                if wants_hidden:
                    grad_hidden[t] += grad_logits @ tile  # (t,C)
                if wants_weight:
                    grad_weight[first : first + len(tile)] += (
                        grad_logits.t() @ hidden[t]
                    )  # (rows,C)
        return grad_hidden, grad_weight, None, None, None


def _slices(n: int, size: int) -> Iterator[slice]:
    return (slice(first, first + size) for first in range(0, n, size))


def _within(targets: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Which targets (T,) are among these rows of the head, (T,), and their column there, (T,1); else 0."""
    column = targets - first
    inside = (column >= 0) & (column < rows)
    return inside, torch.where(inside, column, 0)[:, None]


def tiles(weight, rows: int | None = None) -> Iterator[tuple[int, Tensor]]:
    """A head in pieces of `rows` rows: the index of the first row, and the piece.

    weight (V,C): a tensor, or a quantised matrix (`memory/nf4`), a tensor only where it is sliced.

    >>> [(first, len(piece)) for first, piece in tiles(torch.zeros(5, 2), rows=2)]
    [(0, 2), (2, 2), (4, 1)]
    """
    rows = rows or tile_rows(weight)
    for first in range(0, len(weight), rows):
        yield first, weight[first : first + rows]


def tile_rows(weight) -> int:
    """How many rows of a head to use at once: all of a plain matrix, TILE weights of a quantised one."""
    if isinstance(weight, Tensor):
        return len(weight)
    return max(1, (GPU_TILE if weight.device.type == "cuda" else TILE) // weight.shape[1])
