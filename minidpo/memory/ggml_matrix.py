"""A GGUF file's own blocks as the frozen base: what llama.cpp and Ollama run is what LoRA learns beside.

Nothing is quantised twice, and the adapter fits the very file that it was trained on. Formats: `model/ggml`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from minidpo.memory.frozen import Matrix, one_kernel
from minidpo.model import ggml


class GGMLMatrix(Matrix):
    """A matrix in one of ggml.FORMATS, its codes (rows, bytes a row); read by rows."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, name: str):
        super().__init__(shape, dtype)
        self.format = ggml.FORMATS[name]
        row_bytes = shape[1] // self.format.weights * self.format.bytes
        self.register_buffer("codes", torch.empty((shape[0], row_bytes), dtype=torch.uint8))

    def kernel(self) -> Callable | None:
        """The format's `decode` as one kernel, on CUDA."""
        trial = self.codes[:2].view(-1, self.format.bytes), self.dtype
        return one_kernel(self.format.decode, *trial, compiler=torch.compile)

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        codes = self.codes[rows]  # (...,bytes a row)
        decode = self.kernel() or self.format.decode
        weights = decode(codes.reshape(-1, self.format.bytes), self.dtype)
        return weights.view(*codes.shape[:-1], self.shape[1])  # (...,columns)

    def dense(self) -> Tensor:
        """All weights; in tiles, unless a kernel leaves nothing in between to save."""
        return self[:] if self.kernel() else super().dense()
