"""The cache of attention: keys and values of tokens that the model has read are kept.

A page's episode is one growing text: only new tokens go through the model. Row b holds `lengths[b]` tokens,
left-aligned. New tokens are written behind them. Columns further right are never visible and soon
overwritten. A beginning that several episodes share is copied from row to row.
"""

from collections.abc import Sequence
from copy import copy
from mmap import mmap

import torch
import torch.nn.functional as F
from torch import Tensor

from minidpo.model.attention import attend


class KVCache:
    """Keys and values of B rows, (L,B,K,S,D) each; lengths (B,). A pass sees `columns` of the S.

    On a CPU a step's tokens are attended one by one (`attend_rows`), elsewhere all rows at once.
    """

    def __init__(self, rows: int, dims: tuple[int, int, int], dtype, device):
        """Rows without tokens, for a model with (L, K, D) = `dims`."""
        L, K, D = dims
        self.keys = self.values = torch.zeros((L, rows, K, 0, D), dtype=dtype, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.columns = 0  # kept on the host: reading it must not wait for the device
        self.row_by_row = self.keys.device.type == "cpu"
        self.places: Tensor | None = (
            None  # (N,) each new token's row; None: one text a row. See `at`
        )

    def show(self, columns: int) -> None:
        """Let each pass from now on see so many columns; memory grows if needed. Of each row its tokens are
        kept."""
        available = self.keys.shape[3]
        if columns > available:  # half as much again: growing copies everything
            room = max(columns, available * 3 // 2)
            room += -room % 16  # rows begin at whole cache lines: alignment may change a sum
            self.keys = self._grown(self.keys, room)
            self.values = self._grown(self.values, room)  # after the old keys are freed
        self.columns = columns

    def _grown(self, memory: Tensor, room: int) -> Tensor:
        """The same with `room` columns, the new ones 0. On a CPU only what rows hold is copied, into mapped
        memory, which takes none until it is written to: so one long row does not make all rows long."""
        if not self.row_by_row:
            return F.pad(memory, (0, 0, 0, room - memory.shape[3]))
        L, B, K, _, D = memory.shape
        memory_map = mmap(-1, L * B * K * room * D * memory.itemsize)
        grown = torch.frombuffer(memory_map, dtype=memory.dtype).view(L, B, K, room, D)
        for b, length in enumerate(self.lengths.tolist()):
            held = memory[:, b, :, :length]
            grown[:, b, :, : held.shape[2]] = held
        return grown

    def rows(self, first: int, end: int) -> "KVCache":
        """Rows first .. end-1 as a cache of their own, in the same memory."""
        part = copy(self)
        part.keys, part.values = self.keys[:, first:end], self.values[:, first:end]
        part.lengths = self.lengths[first:end]
        return part

    def at(self, rows: Tensor, columns: Tensor) -> "KVCache":
        """The cache for a pass over N tokens, ids (N,1). Token n is written to row rows[n] and columns[n], and
        sees the row up to itself. rows and columns (N,)."""
        assert self.row_by_row, "where all rows are attended at once, each has one new token"
        part = copy(self)
        part.lengths, part.places = columns, rows
        return part

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Write k and v (B,K,T,D) of T new tokens behind every row; then `attend` for q (B,H,T,D) over what
        this layer holds, (B,H,T,D). All layers write at the same places, so lengths stay."""
        B, H, T, D = q.shape
        row = torch.arange(B, device=q.device) if self.places is None else self.places
        column, row = self.positions(T), row[:, None]
        self.keys[layer][row, :, column] = k.transpose(1, 2)  # an indexed write takes (B,T,K,D)
        self.values[layer][row, :, column] = v.transpose(1, 2)
        keys = self.keys[layer, :, :, : self.columns]
        values = self.values[layer, :, :, : self.columns]
        if T > 1:
            return attend(q, keys, values, mask)
        grouped = q.view(B, keys.shape[1], -1, D)  # heads of one key: its queries
        if self.row_by_row:
            lengths = (self.lengths + 1).tolist()
            return attend_rows(grouped, keys, values, row[:, 0].tolist(), lengths).view(B, H, 1, D)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        return out.reshape(B, H, 1, D)  # not a view: on a GPU some kernels return another layout

    def mask(self, T: int) -> Tensor | None:
        """`visible` for T new tokens a row; None where it is not needed."""
        # with all columns new, no row holds a token
        return None if self.columns == T or (T == 1 and self.row_by_row) else self.visible(T)

    def visible(self, T: int) -> Tensor:
        """Which keys each of T new queries may read, (B,T,S): those of its row up to itself."""
        # by hand: SDPA's `is_causal` aligns top-left when there are fewer queries than keys
        key = torch.arange(self.columns, device=self.lengths.device)
        return key <= self.positions(T)[:, :, None]

    def positions(self, T: int) -> Tensor:
        """Positions of T new tokens a row, (B,T)."""
        return self.lengths[:, None] + torch.arange(T, device=self.lengths.device)

    def copy_row(self, source: int, b: int, start: int, length: int) -> None:
        """Row b has then the first `length` tokens of another row, as it has the first `start` before."""
        for memory in (self.keys, self.values) if source != b else ():
            memory[:, b, :, start:length] = memory[:, source, :, start:length]
        self.lengths[b] = length

    def swap(self, a: int, b: int, length: int) -> None:
        """Rows a and b change places, with the first `length` tokens of each."""
        for memory in (self.keys, self.values):
            exchange(memory[:, a, :, :length], memory[:, b, :, :length])
        exchange(self.lengths[a : a + 1], self.lengths[b : b + 1])


def exchange(first: Tensor, second: Tensor) -> None:
    """Two views swap contents: twice as fast as an assignment to [a, b], which would wait for a GPU."""
    first_copy = first.clone()
    first.copy_(second)
    second.copy_(first_copy)


def attend_rows(
    q: Tensor, keys: Tensor, values: Tensor, rows: Sequence[int], lengths: Sequence[int]
) -> Tensor:
    """Attention of each new token by itself, token n over the first lengths[n] columns of rows[n]; (N,K,G,D).

    q (N,K,G,D) has the G queries that share keys; keys and values (B,K,S,D). The library chooses its kernel,
    and with it the order of addition, by the number of columns and by the alignment of a thread's buffer.
    Each token is a call of its own, the same call as without neighbours, so these can't change its bits.

    >>> q, kv = torch.ones(2, 1, 1, 4), torch.ones(2, 2, 1, 9, 4)
    >>> torch.equal(attend_rows(q, *kv, [0, 1], [3, 9])[:1], attend_rows(q[:1], *kv[:, :1], [0], [3]))
    True
    """
    return torch.cat(
        [
            F.scaled_dot_product_attention(query, keys[row, None, :, :n], values[row, None, :, :n])
            for query, row, n in zip(q.split(1), rows, lengths)
        ]
    )
