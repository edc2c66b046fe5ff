"""4. The key/value cache: what a decoder has read stays read.

A page's episode is one growing text, so the keys and values of everything before the newest observation are
kept from turn to turn and only new tokens go through the model. Rows of a batch have different lengths and
are left-aligned: row b holds `lengths[b]` tokens, new ones are written behind them, and whatever lies
further right is never visible and soon overwritten. Between two batches a row lives on as a `Past`, which
any number of episodes may share: the group's first prompt is computed once. Next: 5 qwen2.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Past(NamedTuple):
    """The cache of one row: keys and values, each (L,K,T,D). Never written to, so it can be shared."""

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
    """Keys and values of a batch, (L,B,K,S,D) each, with row lengths (B,)."""

    def __init__(self, keys: Tensor, values: Tensor, lengths: Tensor):
        self.keys, self.values, self.lengths = keys, values, lengths
        self.longest = int(lengths.max())  # kept on the host: reading it must not wait for the device

    @classmethod
    def stack(cls, pasts: list[Past | None], room: int, like: tuple[int, int, int],
              dtype, device) -> "KVCache":
        """One batch from single rows (None = empty), with room for `room` more tokens a row.

        `like` is (L, K, D) of the model. The rows are copied: what a `Past` shares stays untouched.
        """
        L, K, D = like
        lengths = [past.length if past else 0 for past in pasts]
        shape = (L, len(pasts), K, max(lengths) + room, D)
        keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        for b, past in enumerate(pasts):
            if past:
                keys[:, b, :, : past.length] = past.keys
                values[:, b, :, : past.length] = past.values
        return cls(keys, values, torch.tensor(lengths, device=device))

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write T new tokens, (B,K,T,D) each, behind every row; return all S keys and values of that layer.

        Lengths do not move: all layers write at the same place, then `advance` moves them once.
        """
        B, _, T, _ = keys.shape
        at = self.lengths[:, None] + torch.arange(T, device=keys.device)  # (B,T)
        row = torch.arange(B, device=keys.device)[:, None]
        self.keys[layer][row, :, at] = keys.transpose(1, 2)  # an indexed write sees (B,T,K,D)
        self.values[layer][row, :, at] = values.transpose(1, 2)
        S = self.longest + T
        return self.keys[layer, :, :, :S], self.values[layer, :, :, :S]

    def visible(self, T: int) -> Tensor:
        """Which keys each of T new queries may read, (B,T,S): all of its row up to and with itself.

        Built by hand because SDPA's `is_causal` aligns top-left when there are fewer queries than keys.
        """
        key = torch.arange(self.longest + T, device=self.lengths.device)
        return key <= self.positions(T)[:, :, None]

    def positions(self, T: int) -> Tensor:
        """Positions of T new tokens a row, (B,T)."""
        return self.lengths[:, None] + torch.arange(T, device=self.lengths.device)

    def advance(self, counts: Tensor, longest: int) -> None:
        """Count `counts` (B,) new tokens as read and forget padding behind them; `longest` row after it."""
        self.lengths = self.lengths + counts
        self.longest = longest

    def keep(self, rows: Tensor, longest: int) -> None:
        """Keep the rows with these indices: finished ones stop costing anything. `longest` of those kept."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]
        self.lengths, self.longest = self.lengths[rows], longest

    def row(self, b: int, length: int) -> Past:
        """The first `length` tokens of row b as a `Past` of its own."""
        return Past(self.keys[:, b, :, :length].clone(), self.values[:, b, :, :length].clone())
