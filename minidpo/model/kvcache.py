"""4. The key/value cache: what a decoder has read stays read.

A page's episode is one growing text, so the keys and values of everything before the newest observation are
kept from turn to turn and only new tokens go through the model. Rows are left-aligned: row b holds
`lengths[b]` tokens, new ones are written behind them, and whatever lies further right is never visible and
soon overwritten. What several episodes begin with lives on as a `Past`, which is copied into their rows: a
group's first prompt is computed once. Next: 5 qwen2.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64  # columns: whole SIMD vectors on every processor, so no kernel has a scalar remainder


class Past(NamedTuple):
    """A beginning: keys and values, each (L,K,T,D). Never written to, so it can be shared."""

    keys: Tensor
    values: Tensor

    @property
    def length(self) -> int:
        """How many tokens it holds.

        >>> Past(torch.zeros(2, 1, 5, 4), torch.zeros(2, 1, 5, 4)).length
        5
        """
        return self.keys.shape[2]


def attend_blocks(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """softmax(q·kᵀ/√D + mask)·v for one new token a row, and no bit of it depends on the number of columns.

    q (B,H,1,D); keys and values (n,B,K,W,D), n blocks of W columns; mask (B,1,1,n·W), -inf where a column is
    hidden. Returns (B,K,H/K,D).

    The longest row decides n, so nothing that n reaches may change another row. Products have a fixed shape,
    (H/K) x D by D x W and back; the maximum is exact in any order; weights are summed over W; blocks are
    added one after the other, and a hidden block adds exactly 0.

    >>> q, kv, mask = torch.ones(1, 2, 1, 4), torch.ones(2, 2, 1, 1, 8, 4), torch.zeros(1, 1, 1, 16)
    >>> mask[..., 5:] = -torch.inf
    >>> torch.equal(attend_blocks(q, *kv, mask), attend_blocks(q, *kv[:, :1], mask[..., :8]))
    True
    """
    n, B, K, W, D = keys.shape
    if B * K == 1:  # a single product is no batch to MKL: it splits it over threads and adds up in another order
        return attend_blocks(q.repeat(2, 1, 1, 1), keys.repeat(1, 2, 1, 1, 1), values.repeat(1, 2, 1, 1, 1),
                             mask.repeat(2, 1, 1, 1))[:1]
    q = (q / D**0.5).reshape(B * K, -1, D)  # heads that share keys are queries of one matrix
    keys, values = keys.flatten(1, 2), values.flatten(1, 2)  # (n,B·K,W,D), no copy: rows are contiguous
    scores = q.new_empty(n, B * K, q.shape[1], W)
    for j in range(n):
        torch.bmm(q, keys[j].mT, out=scores[j])
    scores.view(n, B, -1, W).add_(mask.view(B, n, 1, W).transpose(0, 1))
    weights = scores.sub_(scores.amax(-1, keepdim=True).amax(0)).exp_()
    sums = weights.sum(-1, keepdim=True)  # (n,B·K,H/K,1)
    y, total = torch.bmm(weights[0], values[0]), sums[0]
    for j in range(1, n):
        y, total = y.baddbmm_(weights[j], values[j]), total + sums[j]
    return (y / total).view(B, K, -1, D)


class KVCache:
    """Keys and values of B rows, (L,n,B,K,W,D): n blocks of W columns; lengths (B,). A pass sees `columns`.

    In fp32 on a CPU a block has 64 columns, and one new token a row attends block by block (`attend_blocks`).
    Elsewhere all columns are one block, for PyTorch's own attention.
    """

    def __init__(self, keys: Tensor, values: Tensor, lengths: Tensor, in_blocks: bool):
        self.keys, self.values, self.lengths, self.in_blocks = keys, values, lengths, in_blocks
        self.columns = 0  # kept on the host: reading it must not wait for the device

    @classmethod
    def empty(cls, rows: int, like: tuple[int, int, int], dtype, device) -> "KVCache":
        """Rows that hold nothing yet, of a model with (L, K, D) = `like`."""
        L, K, D = like
        in_blocks = torch.device(device).type == "cpu" and dtype in (torch.float32, torch.float64)
        shape = (L, 0, rows, K, BLOCK, D) if in_blocks else (L, 1, rows, K, 0, D)
        nothing = torch.zeros(shape, dtype=dtype, device=device)
        return cls(nothing, nothing, torch.zeros(rows, dtype=torch.long, device=device), in_blocks)

    def look(self, columns: int) -> None:
        """From now on a pass sees so many columns, in whole blocks; missing memory is made."""
        dim, unit = (1, BLOCK) if self.in_blocks else (4, 1)
        wanted, have = -(-columns // unit), self.keys.shape[dim]
        if wanted > have:  # half as much again: growing copies everything, so it must not happen each time
            more = list(self.keys.shape)
            more[dim] = max(wanted, have * 3 // 2) - have
            self.keys, self.values = (torch.cat((old, old.new_zeros(more)), dim)
                                      for old in (self.keys, self.values))
        self.columns = wanted * unit

    def rows(self, first: int, end: int) -> "KVCache":
        """These rows as a cache of their own, in the same memory."""
        rows = slice(first, end)
        part = KVCache(self.keys[:, :, rows], self.values[:, :, rows], self.lengths[rows], self.in_blocks)
        part.columns = self.columns
        return part

    def swap(self, a: int, b: int, length: int) -> None:
        """Rows a and b change places, with the first `length` tokens of each."""
        there, here = [a, b], [b, a]
        n, W = self._blocks_of(length)
        for memory in (self.keys, self.values):
            memory[:, :n, there, :, :W] = memory[:, :n, here, :, :W]
        self.lengths[there] = self.lengths[here]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write T new tokens, (B,K,T,D) each, behind every row.

        Lengths do not move: all layers write at the same place, then `advance` moves them once.
        """
        B, _, T, _ = keys.shape
        at, W = self.positions(T), self.keys.shape[4]
        row = torch.arange(B, device=keys.device)[:, None]
        self.keys[layer][at // W, row, :, at % W] = keys.transpose(1, 2)  # an indexed write sees (B,T,K,D)
        self.values[layer][at // W, row, :, at % W] = values.transpose(1, 2)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """The columns of this layer that a pass sees: keys and values, (B,K,S,D) each."""
        return tuple(memory[layer].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :self.columns]  # one block: a view
                     for memory in (self.keys, self.values))

    def attend(self, layer: int, q: Tensor, mask: Tensor | None) -> Tensor:
        """What one new token a row reads here, (B,H,1,D) for queries (B,H,1,D) and a mask (B,1,1,S)."""
        if self.in_blocks:
            n = self.columns // BLOCK
            return attend_blocks(q, self.keys[layer, :n], self.values[layer, :n], mask).view(q.shape)
        keys, values = self.read(layer)
        shared = q.reshape(len(q), keys.shape[1], -1, q.shape[3])  # heads that share keys: queries of one head
        return F.scaled_dot_product_attention(shared, keys, values, attn_mask=mask).reshape(q.shape)

    def visible(self, T: int) -> Tensor:
        """Which keys each of T new queries may read, (B,T,S): all of its row up to and with itself.

        Built by hand because SDPA's `is_causal` aligns top-left when there are fewer queries than keys.
        """
        key = torch.arange(self.columns, device=self.lengths.device)
        return key <= self.positions(T)[:, :, None]

    def positions(self, T: int) -> Tensor:
        """Positions of T new tokens a row, (B,T)."""
        return self.lengths[:, None] + torch.arange(T, device=self.lengths.device)

    def advance(self, counts: Tensor | int) -> None:
        """Count so many new tokens a row, (B,) or all the same, as read; what lies behind is forgotten."""
        self.lengths += counts

    def put(self, b: int, past: Past) -> None:
        """Row b begins anew with this; there has to be room."""
        n, W = self._blocks_of(past.length)
        for memory, held in ((self.keys, past.keys), (self.values, past.values)):
            padded = F.pad(held, (0, 0, 0, n * W - past.length))  # what lies behind is never visible
            memory[:, :n, b, :, :W] = padded.unflatten(2, (n, W)).transpose(1, 2)
        self.lengths[b] = past.length

    def take(self, b: int, length: int) -> Past:
        """A copy of the first `length` tokens of row b."""
        n, _ = self._blocks_of(length)
        return Past(*(memory[:, :n, b].transpose(1, 2).flatten(2, 3)[:, :, :length].clone()
                      for memory in (self.keys, self.values)))

    def _blocks_of(self, length: int) -> tuple[int, int]:
        """How many blocks so many tokens lie in, and how many columns of each."""
        return (-(-length // BLOCK), BLOCK) if self.in_blocks else (1, length)
