"""The blocks of llama.cpp: weights in 4 to 8 bits, written out as numbers.

A row of a matrix is cut into blocks of 32 weights, or of 256 for the K formats. A block stores small integers
q and a scale d, some formats also a smallest value m: w = d·q + m. In a K format, runs of 16 or 32 weights
have scales of their own, which are integers too.

The layouts are llama.cpp's (`ggml-common.h`, `ggml-quants.c`). Tests compare each with the `gguf` package.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Format(NamedTuple):
    """`decode` takes blocks (n, bytes) of uint8 and gives weights (n, weights), made in fp32, in a dtype.
    `halves`: the bytes at which a block has its fp16 scales."""

    weights: int
    bytes: int
    decode: Callable[..., Tensor]
    halves: tuple[int, ...]


def _half(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number at this byte of each block, (n,1)."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(codes: Tensor) -> Tensor:
    """Low halves of all bytes of the last dimension, then the high halves."""
    return torch.cat((codes & 15, codes >> 4), dim=-1)


def q4_0(blocks: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """w = d·(q - 8): d in fp16, 16 bytes of codes."""
    return (_half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)).to(dtype)


def q4_1(blocks: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """w = d·q + m: d and m in fp16, 16 bytes of codes."""
    return (_half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2)).to(dtype)


def q8_0(blocks: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """w = d·q: d in fp16, 32 signed bytes."""
    return (_half(blocks, 0) * blocks[:, 2:].view(torch.int8)).to(dtype)


def q4_k(blocks: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """w = (d·s)·q - (d'·m): d and d' in fp16; s and m of each run of 32, six bits each; 128 bytes of codes.

    Twelve bytes hold the eight s and m: low six bits of bytes 0-3 and 4-7 for the first four runs; the others
    have their low four bits in bytes 8-11 and the rest in the two bits that are left of bytes 0-7.
    """
    packed = blocks[:, 4:16]
    low, rest = packed[:, :8] & 63, packed[:, 8:]
    top = packed[:, :8] >> 6 << 4
    scale = torch.cat((low[:, :4], rest & 15 | top[:, :4]), dim=1)[:, :, None]
    smallest = torch.cat((low[:, 4:], rest >> 4 | top[:, 4:]), dim=1)[:, :, None]
    codes = _nibbles(blocks[:, 16:].view(-1, 4, 32)).view(-1, 8, 32)  # 64 weights share 32 bytes
    d, d_smallest = _half(blocks, 0)[:, :, None], _half(blocks, 2)[:, :, None]
    return ((d * scale) * codes - d_smallest * smallest).view(-1, 256).to(dtype)


def q6_k(blocks: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """w = (d·s)·(q - 32): low four bits of q in 128 bytes, two more in 64; a signed byte s a run of 16."""
    low = blocks[:, :128].view(-1, 2, 64)  # 128 weights share 64 bytes, and 32 bytes of top bits
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    top = blocks[:, 128:192].view(-1, 2, 1, 32) >> shifts & 3  # (n,2,4,32)
    codes = _nibbles(low).view(-1, 2, 4, 32) | top << 4
    scale = blocks[:, 192:208].view(torch.int8).float()[:, :, None]
    shares = _half(blocks, 208)[:, :, None] * scale
    return (shares * (codes.view(-1, 16, 16).float() - 32)).view(-1, 256).to(dtype)


FORMATS = {
    "Q4_0": Format(32, 18, q4_0, (0,)),
    "Q4_1": Format(32, 20, q4_1, (0, 2)),
    "Q8_0": Format(32, 34, q8_0, (0,)),
    "Q4_K": Format(256, 144, q4_k, (0, 2)),
    "Q6_K": Format(256, 210, q6_k, (208,)),
}
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def is_finite(form: Format, stored: Tensor) -> bool:
    """Whether all weights are finite, which is whether all scales are: bytes (rows, bytes a row)."""
    blocks = stored.reshape(-1, form.bytes)
    return all(bool(_half(blocks, at).isfinite().all()) for at in form.halves)


def decode(name: str, stored: Tensor) -> Tensor:
    """Weights in fp32, (rows, columns), of a matrix in one of FORMATS or PLAIN: bytes (rows, bytes a row)."""
    if name in PLAIN:
        return stored.view(PLAIN[name]).float()
    form = FORMATS[name]
    return form.decode(stored.reshape(-1, form.bytes)).view(len(stored), -1)
