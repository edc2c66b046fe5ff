"""A GGUF file's own blocks as the frozen base: what llama.cpp and Ollama run is what LoRA learns beside.

Nothing is quantised twice, and the adapter fits the very file that it was trained on. The formats are those
of `model/ggml`.
"""

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

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        codes = self.codes[rows]  # (...,bytes a row)
        blocks = codes.reshape(-1, self.format.bytes)
        decode = one_kernel(self.format.decode, blocks[:2]) or self.format.decode
        return decode(blocks).view(*codes.shape[:-1], self.shape[1]).to(self.dtype)  # (...,columns)
