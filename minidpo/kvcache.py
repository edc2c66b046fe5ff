"""4. The key/value cache: what a decoder has read stays read.

A page's episode is one growing text, so the keys and values of everything before the newest observation are
kept from turn to turn and only new tokens go through the model. Rows are left-aligned: row b holds
`lengths[b]` tokens, new ones are written behind them, and whatever lies further right is never visible and
soon overwritten. What several episodes begin with lives on as a `Past`, which is copied into their rows: a
group's first prompt is computed once. Next: 5 qwen2.
"""

from typing import NamedTuple

import torch
from torch import Tensor


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


class KVCache:
    """Keys and values of B rows, (L,B,K,S,D) each, with row lengths (B,). A pass sees `columns` of the S."""

    def __init__(self, keys: Tensor, values: Tensor, lengths: Tensor):
        self.keys, self.values, self.lengths = keys, values, lengths
        self.columns = keys.shape[3]  # kept on the host: reading it must not wait for the device

    @classmethod
    def empty(cls, rows: int, like: tuple[int, int, int], dtype, device) -> "KVCache":
        """Rows that hold nothing yet, of a model with (L, K, D) = `like`."""
        L, K, D = like
        nothing = torch.zeros((L, rows, K, 0, D), dtype=dtype, device=device)
        return cls(nothing, nothing, torch.zeros(rows, dtype=torch.long, device=device))

    def look(self, columns: int) -> None:
        """From now on a pass sees so many columns; memory for them is made where it is missing."""
        have = self.keys.shape[3]
        if columns > have:  # half as much again: growing copies everything, so it must not happen each time
            more = (*self.keys.shape[:3], max(columns, have * 3 // 2) - have, self.keys.shape[4])
            self.keys, self.values = (torch.cat((old, old.new_zeros(more)), dim=3)
                                      for old in (self.keys, self.values))
        self.columns = columns

    def rows(self, first: int, end: int) -> "KVCache":
        """These rows as a cache of their own, in the same memory."""
        part = KVCache(self.keys[:, first:end], self.values[:, first:end], self.lengths[first:end])
        part.columns = self.columns
        return part

    def swap(self, a: int, b: int, length: int) -> None:
        """Rows a and b change places, with the first `length` tokens of each."""
        there, here = [a, b], [b, a]
        for memory in (self.keys, self.values):
            memory[:, there, :, :length] = memory[:, here, :, :length]
        self.lengths[there] = self.lengths[here]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write T new tokens, (B,K,T,D) each, behind every row; return that layer's columns of all rows.

        Lengths do not move: all layers write at the same place, then `advance` moves them once.
        """
        B, _, T, _ = keys.shape
        at = self.positions(T)
        row = torch.arange(B, device=keys.device)[:, None]
        self.keys[layer][row, :, at] = keys.transpose(1, 2)  # an indexed write sees (B,T,K,D)
        self.values[layer][row, :, at] = values.transpose(1, 2)
        return self.keys[layer, :, :, :self.columns], self.values[layer, :, :, :self.columns]

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
        self.keys[:, b, :, :past.length] = past.keys
        self.values[:, b, :, :past.length] = past.values
        self.lengths[b] = past.length

    def take(self, b: int, length: int) -> Past:
        """A copy of the first `length` tokens of row b."""
        return Past(self.keys[:, b, :, :length].clone(), self.values[:, b, :, :length].clone())
