"""The blocks of llama.cpp: weights in 2 to 8 bits, written out as numbers.

A row of a matrix is cut into blocks of 32 weights, or of 256 for the K formats. A block stores small integers
q and a scale d, some formats also a smallest value m: w = d·q + m. In a K format, runs of 16 or 32 weights
have scales of their own, which are integers too. Where q has more than four bits, or three, the top bit lies
apart from the others.

The layouts are llama.cpp's (`ggml-common.h`, `ggml-quants.c`). Tests compare each with the `gguf` package.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# of IQ4_NL
UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


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


def _fields(codes: Tensor, bits: int) -> Tensor:
    """Each byte's fields of so many bits, lowest first, (...,8/bits,bytes): all first fields, then all second."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)[:, None]
    return codes[..., None, :] >> shifts & (1 << bits) - 1


def _fifth_bits(stored: Tensor) -> Tensor:
    """The top bits of 32 codes of five bits, (n,32), as they are added: 16 or 0. Four bytes a block."""
    return _fields(stored, 1).transpose(1, 2).reshape(-1, 32) << 4


def q4_0(blocks: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """w = d·(q - 8): d in fp16, 16 bytes of codes."""
    return (_half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)).to(dtype)


def q4_1(blocks: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """w = d·q + m: d and m in fp16, 16 bytes of codes."""
    return (_half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2)).to(dtype)


def q5_0(blocks: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """w = d·(q - 16): d in fp16, 4 bytes of top bits, 16 bytes of low codes."""
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return (_half(blocks, 0) * (codes.float() - 16)).to(dtype)


def q5_1(blocks: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """w = d·q + m: d and m in fp16, 4 bytes of top bits, 16 bytes of low codes."""
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return (_half(blocks, 0) * codes + _half(blocks, 2)).to(dtype)


def iq4_nl(blocks: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """w = d·v(q): d in fp16, 16 bytes of codes, each the number of one of sixteen unevenly spaced values."""
    values = torch.tensor(UNEVEN, dtype=torch.float32, device=blocks.device)
    return (_half(blocks, 0) * values[_nibbles(blocks[:, 2:]).int()]).to(dtype)


def q8_0(blocks: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """w = d·q: d in fp16, 32 signed bytes."""
    return (_half(blocks, 0) * blocks[:, 2:].view(torch.int8)).to(dtype)


def q2_k(blocks: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """w = (d·s)·q - (d'·m): a byte of each run of 16 holds s and m, 64 bytes of codes; d and d' in fp16."""
    d, d_smallest = _half(blocks, 80)[:, :, None], _half(blocks, 82)[:, :, None]
    scale, smallest = blocks[:, :16, None] & 15, blocks[:, :16, None] >> 4
    codes = _fields(blocks[:, 16:80].view(-1, 2, 32), 2).reshape(-1, 16, 16)
    return ((d * scale) * codes - d_smallest * smallest).view(-1, 256).to(dtype)


def q3_k(blocks: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """w = (d·(s - 32))·(q - 4): 32 bytes of top bits, 64 of low ones, s of each run of 16 in six bits; d in fp16.

    Of the twelve bytes with s, eight have its low four bits, and four the two above them.
    """
    scale = _nibbles(blocks[:, 96:104]) | _fields(blocks[:, 104:108], 2).reshape(-1, 16) << 4
    low = _fields(blocks[:, 32:96].view(-1, 2, 32), 2).reshape(-1, 16, 16)
    codes = low | _fields(blocks[:, :32], 1).reshape(-1, 16, 16) << 2
    shares = _half(blocks, 108) * (scale.float() - 32)
    return (shares[:, :, None] * (codes.float() - 4)).view(-1, 256).to(dtype)


def _runs_of_32(blocks: Tensor, codes: Tensor) -> Tensor:
    """w = (d·s)·q - (d'·m) of codes (n,8,32), (n,256): d and d' in fp16; s and m of a run, six bits each.

    Twelve bytes hold the eight s and m: low six bits of bytes 0-3 and 4-7 for the first four runs; the others
    have their low four bits in bytes 8-11 and the rest in the two bits that are left of bytes 0-7.
    """
    packed = blocks[:, 4:16]
    low, rest = packed[:, :8] & 63, packed[:, 8:]
    top = packed[:, :8] >> 6 << 4
    scale = torch.cat((low[:, :4], rest & 15 | top[:, :4]), dim=1)[:, :, None]
    smallest = torch.cat((low[:, 4:], rest >> 4 | top[:, 4:]), dim=1)[:, :, None]
    d, d_smallest = _half(blocks, 0)[:, :, None], _half(blocks, 2)[:, :, None]
    return ((d * scale) * codes - d_smallest * smallest).view(-1, 256)


def q4_k(blocks: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """`_runs_of_32` with 128 bytes of codes: 64 weights share 32 bytes."""
    codes = _fields(blocks[:, 16:].view(-1, 4, 32), 4)
    return _runs_of_32(blocks, codes.view(-1, 8, 32)).to(dtype)


def q5_k(blocks: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """`_runs_of_32` with 32 bytes of top bits and 128 of low codes."""
    low = _fields(blocks[:, 48:].view(-1, 4, 32), 4).view(-1, 8, 32)
    return _runs_of_32(blocks, low | _fields(blocks[:, 16:48], 1) << 4).to(dtype)


def q6_k(blocks: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """w = (d·s)·(q - 32): low four bits of q in 128 bytes, two more in 64; a signed byte s a run of 16."""
    low = blocks[:, :128].view(-1, 2, 64)  # 128 weights share 64 bytes, and 32 bytes of top bits
    top = _fields(blocks[:, 128:192].view(-1, 2, 32), 2)  # (n,2,4,32)
    codes = _nibbles(low).view(-1, 2, 4, 32) | top << 4
    scale = blocks[:, 192:208].view(torch.int8).float()[:, :, None]
    shares = _half(blocks, 208)[:, :, None] * scale
    return (shares * (codes.view(-1, 16, 16).float() - 32)).view(-1, 256).to(dtype)


FORMATS = {
    "Q4_0": Format(32, 18, q4_0, (0,)),
    "Q4_1": Format(32, 20, q4_1, (0, 2)),
    "Q5_0": Format(32, 22, q5_0, (0,)),
    "Q5_1": Format(32, 24, q5_1, (0, 2)),
    "IQ4_NL": Format(32, 18, iq4_nl, (0,)),
    "Q8_0": Format(32, 34, q8_0, (0,)),
    "Q2_K": Format(256, 84, q2_k, (80, 82)),
    "Q3_K": Format(256, 110, q3_k, (108,)),
    "Q4_K": Format(256, 144, q4_k, (0, 2)),
    "Q5_K": Format(256, 176, q5_k, (0, 2)),
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
