"""A step of decoding on a GPU as one launch.

One token in each row is little work in a great many kernels: of SmolLM2-135M some two thousand, which the
host takes longer to start than the GPU to run. So the step is recorded once, as a CUDA graph, and replayed.
A recording holds shapes and addresses. So the rows of a step are a power of two, or all, whether each of them
writes or not, and the columns of the cache that it sees grow by COLUMNS at a time.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minidpo.model.decoder import Transformer
from minidpo.model.kvcache import KVCache
from minidpo.system.tensors import to_device

COLUMNS = 256  # a recording sees a multiple of so many


class StepGraphs:
    """Replays `model(tokens, cache=cache)` for one new token in each row of the cache."""

    # one a GPU: cuBLAS keeps memory for each, for good
    streams: dict[torch.device, "torch.cuda.Stream"] = {}

    def __init__(self, model: Transformer, cache: KVCache):
        self.model, self.cache = model, cache
        rows, device = len(cache.lengths), cache.lengths.device
        self.tokens = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.recorded: dict[tuple[int, int], tuple[Callable, Tensor]] = {}  # by rows and columns
        self.room, self.pool = 0, None

    def step(self, tokens: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Last hidden states (rows,C) behind one more token in each of the first rows; `lengths`: the tokens
        that each row of the cache holds. What a row without a new token gets in the cache lies behind its
        end, where nobody reads it. The caller adds to `cache.lengths`."""
        rows = min(len(lengths), 2 ** (len(tokens) - 1).bit_length())
        self.cache.show(-(-(max(lengths[:rows]) + 1) // COLUMNS) * COLUMNS)
        if self.cache.keys.shape[3] != self.room:  # the cache has grown, and lies elsewhere
            self.recorded.clear()  # and with the last of them the pool of memory that they shared
            self.room, self.pool = self.cache.keys.shape[3], None
        self.tokens[: len(tokens), 0] = to_device(torch.tensor(tokens), self.tokens.device)
        shape = rows, self.cache.columns
        if shape not in self.recorded:
            self.recorded[shape] = self._record(self.tokens[:rows], self.cache.rows(0, rows))
        replay, hidden = self.recorded[shape]
        replay()
        return hidden

    def _record(self, tokens: Tensor, cache: KVCache) -> tuple[Callable, Tensor]:
        """What replays the step, and the tensor in which it leaves the hidden states."""
        device = tokens.device
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
        stream = self.streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        # what is compiled or chosen at a first run cannot be recorded
        with torch.cuda.stream(stream):
            self.model(tokens, cache=cache)
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=stream):
            hidden = self.model(tokens, cache=cache)[:, -1]
        # one for all: a recording's results are read before the next one runs
        self.pool = graph.pool()
        return graph.replay, hidden
