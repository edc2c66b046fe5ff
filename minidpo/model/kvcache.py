"""Attention and its cache: keys and values of tokens that the model has read are kept.

A page's episode is one growing text. Its keys and values stay from turn to turn, so only new tokens go
through the model. Row b holds `lengths[b]` tokens, left-aligned. New tokens are written behind them. Columns
further right are never visible and soon overwritten. A beginning that several episodes share is kept as a
`Past` and copied into their rows, so a group's first prompt is computed once.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64  # columns: whole SIMD vectors on every processor, so no kernel has a scalar remainder


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q·kᵀ/√D + mask)·v, (B,H,T,D), for q (B,H,T,D), k and v (B,K,S,D). Vaswani et al. 2017, Eq. 1.

    Query head h reads key/value head h // (H/K). mask (B,1,T,S) holds 0 and -inf; None means causal.
    """
    H, K = q.shape[1], k.shape[1]
    grouped = H != K
    if grouped and q.is_cuda and (mask is not None or q.itemsize > 2):
        # CUDA's kernel for masks and for fp32 has no grouped heads; SDPA would keep all T x S weights
        k, v = k.repeat_interleave(H // K, dim=1), v.repeat_interleave(H // K, dim=1)
        grouped = False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)


class Past(NamedTuple):
    """The beginning of a text: keys and values, each (L,K,T,D). Never written to, so rows can share it."""

    keys: Tensor
    values: Tensor

    @property
    def length(self) -> int:
        """How many tokens it holds."""
        return self.keys.shape[2]


class KVCache:
    """Keys and values of B rows, (L,n,B,K,W,D) in n blocks of W columns; lengths (B,). A pass sees `columns`.

    In fp32 on a CPU a block has 64 columns, and one new token a row attends block by block (`attend_blocks`).
    Elsewhere all columns are one block, for PyTorch's own attention.
    """

    def __init__(self, keys: Tensor, values: Tensor, lengths: Tensor, in_blocks: bool):
        self.keys, self.values, self.lengths, self.in_blocks = keys, values, lengths, in_blocks
        self.columns = 0  # kept on the host: reading it must not wait for the device

    @classmethod
    def empty(cls, rows: int, dims: tuple[int, int, int], dtype, device) -> "KVCache":
        """Rows without tokens, for a model with (L, K, D) = `dims`."""
        L, K, D = dims
        in_blocks = torch.device(device).type == "cpu" and dtype in (torch.float32, torch.float64)
        shape = (L, 0, rows, K, BLOCK, D) if in_blocks else (L, 1, rows, K, 0, D)
        nothing = torch.zeros(shape, dtype=dtype, device=device)
        return cls(nothing, nothing, torch.zeros(rows, dtype=torch.long, device=device), in_blocks)

    def show(self, columns: int) -> None:
        """Let each pass from now on see so many columns, in whole blocks; memory grows if needed."""
        dim, unit = (1, BLOCK) if self.in_blocks else (4, 1)
        wanted, available = -(-columns // unit), self.keys.shape[dim]
        if wanted > available:  # half as much again: growing copies everything
            extra = list(self.keys.shape)
            extra[dim] = max(wanted, available * 3 // 2) - available
            self.keys = torch.cat((self.keys, self.keys.new_zeros(extra)), dim)
            self.values = torch.cat((self.values, self.values.new_zeros(extra)), dim)
        self.columns = wanted * unit

    def rows(self, first: int, end: int) -> "KVCache":
        """Rows first .. end-1 as a cache of their own, in the same memory."""
        rows = slice(first, end)
        view = KVCache(self.keys[:, :, rows], self.values[:, :, rows], self.lengths[rows], self.in_blocks)
        view.columns = self.columns
        return view

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write T new tokens, (B,K,T,D) each, behind every row.

        Lengths stay: all layers write at the same place, then `advance` moves the lengths once.
        """
        B, _, T, _ = keys.shape
        column, W = self.positions(T), self.keys.shape[4]
        row = torch.arange(B, device=keys.device)[:, None]
        self.keys[layer][column // W, row, :, column % W] = keys.transpose(1, 2)  # (B,T,K,D)
        self.values[layer][column // W, row, :, column % W] = values.transpose(1, 2)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """The columns of this layer that a pass sees: keys and values, (B,K,S,D) each."""
        keys = self.keys[layer].permute(1, 2, 0, 3, 4).flatten(2, 3)  # a view, if there is one block
        values = self.values[layer].permute(1, 2, 0, 3, 4).flatten(2, 3)
        return keys[:, :, :self.columns], values[:, :, :self.columns]

    def attend(self, layer: int, q: Tensor, mask: Tensor | None) -> Tensor:
        """`attend` of T new tokens a row over what this layer holds, (B,H,T,D), for q (B,H,T,D)."""
        return self.attend_one(layer, q, mask) if q.shape[2] == 1 else attend(q, *self.read(layer), mask)

    def attend_one(self, layer: int, q: Tensor, mask: Tensor | None) -> Tensor:
        """`attend` of one new token a row, (B,H,1,D), for q (B,H,1,D) and mask (B,1,1,S)."""
        if self.in_blocks:
            n = self.columns // BLOCK
            return attend_blocks(q, self.keys[layer, :n], self.values[layer, :n], mask).view(q.shape)
        keys, values = self.read(layer)
        grouped = q.reshape(len(q), keys.shape[1], -1, q.shape[3])  # queries of one head
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(q.shape)

    def visible(self, T: int) -> Tensor:
        """Which keys each of T new queries may read, (B,T,S): those of its row up to itself.

        Built by hand because SDPA's `is_causal` aligns top-left when there are fewer queries than keys.
        """
        key = torch.arange(self.columns, device=self.lengths.device)
        return key <= self.positions(T)[:, :, None]

    def positions(self, T: int) -> Tensor:
        """Positions of T new tokens a row, (B,T)."""
        return self.lengths[:, None] + torch.arange(T, device=self.lengths.device)

    def advance(self, counts: Tensor | int) -> None:
        """Count new tokens as read, (B,) or one number for all rows. What lies behind them is forgotten."""
        self.lengths += counts

    def copy_in(self, b: int, past: Past) -> None:
        """Row b begins anew with `past`; enough columns must be there."""
        n, W = self._blocks_of(past.length)
        for memory, beginning in ((self.keys, past.keys), (self.values, past.values)):
            padded = F.pad(beginning, (0, 0, 0, n * W - past.length))  # the padding is never visible
            memory[:, :n, b, :, :W] = padded.unflatten(2, (n, W)).transpose(1, 2)
        self.lengths[b] = past.length

    def copy_out(self, b: int, length: int) -> Past:
        """A copy of the first `length` tokens of row b."""
        n, _ = self._blocks_of(length)
        return Past(*(memory[:, :n, b].transpose(1, 2).flatten(2, 3)[:, :, :length].clone()
                      for memory in (self.keys, self.values)))

    def swap(self, a: int, b: int, length: int) -> None:
        """Rows a and b change places, with the first `length` tokens of each."""
        n, W = self._blocks_of(length)
        for memory in (self.keys, self.values):
            memory[:, :n, [a, b], :, :W] = memory[:, :n, [b, a], :, :W]
        self.lengths[[a, b]] = self.lengths[[b, a]]

    def _blocks_of(self, length: int) -> tuple[int, int]:
        """How many blocks hold `length` tokens, and how many columns of each."""
        return (-(-length // BLOCK), BLOCK) if self.in_blocks else (1, length)


def additive_mask(mask: Tensor, like: Tensor) -> Tensor:
    """A bool mask (B,T,S), True = visible, as what is added to scores, 0 or -inf: (B,1,T,S), for all heads.

    Made once a pass, because SDPA would convert a bool mask in each layer and keep it for backward. On CUDA
    it would copy a mask whose rows do not begin at a multiple of eight.
    """
    B, T, S = mask.shape
    return like.new_full((B, T, S + -S % 8), -torch.inf)[..., :S].masked_fill_(mask, 0)[:, None]


def attend_blocks(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """`attend` for one new token a row, in which no bit of a row depends on the number of columns.

    q (B,H,1,D); keys and values (n,B,K,W,D), n blocks of W columns; mask (B,1,1,n·W), -inf where a column is
    hidden. Returns (B,K,H/K,D).

    The longest row decides n, so n must not change any other row. Products have a fixed shape, (H/K) x D by D
    x W and back. The maximum is exact in any order. Weights are summed over W. Blocks are added in turn; a
    hidden one adds 0.

    >>> q, kv, mask = torch.ones(1, 2, 1, 4), torch.ones(2, 2, 1, 1, 8, 4), torch.zeros(1, 1, 1, 16)
    >>> mask[..., 5:] = -torch.inf
    >>> torch.equal(attend_blocks(q, *kv, mask), attend_blocks(q, *kv[:, :1], mask[..., :8]))
    True
    """
    n, B, K, W, D = keys.shape
    if B * K == 1:  # MKL splits a single product over threads and adds up in another order
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
