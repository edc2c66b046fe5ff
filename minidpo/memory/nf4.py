"""NF4: a frozen base in four bits a weight.

A block of 64 weights is divided by its absolute maximum and rounded to 16 levels, quantiles of the normal
distribution. The maximum becomes 8 bits. Costs a rounding error of 9.2 % (rms, of normal weights), and
expanding the matrix for each product, forward and backward; one matrix at a time exists in full. The
vocabulary's two matrices decide every token and are read by rows, so they take 8 bits a weight and a scale a
row, with an error of 0.9 % in rows of 3,584.

Dettmers et al. 2023 (QLoRA), arXiv:2305.14314, section 3 and appendix E. Differs from the paper: a block's
maximum is the square of an 8-bit number times the largest of 256 maxima, not an 8-bit float around their
mean, so that quantising twice changes nothing; the vocabulary is quantised, too.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from minidpo.memory.frozen import Matrix, one_kernel
from minidpo.model.head import tiles

BLOCK, GROUP = 64, 256  # weights that share a maximum; maxima that share a largest
# weights that are coded or decoded together: a few MiB, which stay in a processor's cache
TILE = 2**19


def code_book() -> Tensor:
    """The 16 levels, (16,) float32, ascending from -1 to 1, with an exact 0: QLoRA, appendix E.

    Quantiles at equal steps of probability, 7 below zero and 8 above, from 1 - (1/32 + 1/30)/2 = 0.9677083
    down to 1/2, then scaled to reach 1. Steps in float32, quantiles in float64: the published bits.

    >>> code_book()[[0, 1, 7, 8, 15]]
    tensor([-1.0000, -0.6962,  0.0000,  0.0796,  1.0000])
    """

    def quantiles(n: int) -> Tensor:  # from the edge down to the middle, which is 0 and is left out
        return torch.special.ndtri(torch.linspace(0.9677083, 0.5, n).double())[:-1]

    levels = torch.cat((-quantiles(8), torch.zeros(1), quantiles(9))).float().sort().values
    return levels / levels.max()


@functools.cache
def tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """The levels and then the squares of 8-bit scales, (272,); the two levels in a byte, (256,2)."""
    book = code_book()
    pairs = torch.stack((book.repeat_interleave(16), book.repeat(16)), dim=1)
    squares = (torch.arange(256) / 255).square()
    return torch.cat((book, squares)).to(device), pairs.to(device)


def nearest(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Each weight's nearest level in its block (n,64) float32 over absmax: codes (n,64) uint8, absmax (n,).

    >>> codes, absmax = nearest(torch.tensor([[0.0, -2.0, 1.1]]))
    >>> codes, absmax * code_book()[codes.int()]
    (tensor([[ 7,  0, 13]], dtype=torch.uint8), tensor([[ 0.0000, -2.0000,  1.1252]]))
    """
    absmax = blocks.abs().amax(1)
    book = tables(blocks.device)[0][:16]
    borders = (book[1:] + book[:-1]) / 2
    unit = blocks / torch.where(absmax > 0, absmax, 1.0)[:, None]
    return torch.bucketize(unit, borders, out_int32=True).to(torch.uint8), absmax


def two_a_byte(codes: Tensor) -> Tensor:
    """Two codes a byte, the first in the upper half: (n,64) -> (n,32) uint8."""
    return codes[:, 0::2] << 4 | codes[:, 1::2]


def quantise_scales(absmax: Tensor) -> tuple[Tensor, Tensor]:
    """Double quantisation: absmax (n,) -> scales (n,) uint8 and the largest of each 256, (⌈n/256⌉,) float32.

    absmax ≈ largest · (scale / 255)²: steps are small for small maxima, because a maximum that is rounded to
    0 makes its whole block 0. With s = sqrt(absmax / largest), the error is at most
    largest · (s + 1/1020) / 255.
    """
    groups = F.pad(absmax, (0, -len(absmax) % GROUP)).view(-1, GROUP)
    largest = groups.amax(1)
    share = groups / torch.where(largest > 0, largest, 1.0)[:, None]
    return (share.sqrt() * 255).round().to(torch.uint8).flatten()[: len(absmax)], largest


def dequantise_scales(scales: Tensor, largest: Tensor) -> Tensor:
    """absmax (n,) float32 again. A table, not a division: products alone round the same on every device."""
    squares = tables(scales.device)[0][16:]
    return squares[scales.int()] * largest.repeat_interleave(GROUP)[: len(scales)]


def _expand_on_gpu(*given) -> Tensor:
    from minidpo.memory.nf4_cuda import expand  # here: a CPU's PyTorch brings no Triton

    return expand(*given)


def dequantise(packed: Tensor, scales: Tensor, largest: Tensor, dtype: torch.dtype) -> Tensor:
    """(n,64) weights, float32 cast to `dtype`: on CUDA by one kernel, else in tiles, with the same bits."""
    table, pairs = tables(packed.device)
    if kernel := one_kernel(_expand_on_gpu, packed[:2], scales[:2], largest[:1], table, dtype):
        return kernel(packed, scales, largest, table, dtype)
    absmax = dequantise_scales(scales, largest)
    out = torch.empty((len(packed), BLOCK), dtype=dtype, device=packed.device)
    for first in range(0, len(packed), TILE // BLOCK):
        part = slice(first, first + TILE // BLOCK)
        # with products alone, no compiler can fuse two roundings into one
        out[part] = F.embedding(packed[part].int(), pairs).flatten(1) * absmax[part, None]
    return out


class NF4Matrix(Matrix):
    """A matrix in 4.127 bits a weight: rows end to end, in blocks of 64, the last one padded with zeros."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype):
        super().__init__(shape, dtype)
        n = -(-self.numel() // BLOCK)
        self.register_buffer("codes", torch.empty((n, BLOCK // 2), dtype=torch.uint8))
        self.register_buffer("scales", torch.empty(n, dtype=torch.uint8))
        self.register_buffer("largest", torch.empty(-(-n // GROUP), dtype=torch.float32))

    @staticmethod
    def encode(weight: Tensor) -> dict[str, Tensor]:
        """The buffers that hold `weight`, of any floating dtype, on its device. Works in tiles."""
        n = -(-weight.numel() // BLOCK)
        packed = torch.empty((n, BLOCK // 2), dtype=torch.uint8, device=weight.device)
        absmax = torch.empty(n, dtype=torch.float32, device=weight.device)
        for first, tile in tiles(weight.reshape(-1), TILE):
            blocks = F.pad(tile.float(), (0, -len(tile) % BLOCK)).view(-1, BLOCK)
            part = slice(first // BLOCK, first // BLOCK + len(blocks))
            codes, absmax[part] = nearest(blocks)
            packed[part] = two_a_byte(codes)
        scales, largest = quantise_scales(absmax)
        # the code of 0, twice: a block whose scale is rounded to 0 is all zeros
        packed[scales == 0] = 0x77
        return {"codes": packed, "scales": scales, "largest": largest}

    def dense(self) -> Tensor:
        flat = dequantise(self.codes, self.scales, self.largest, self.dtype).view(-1)
        return flat[: self.numel()].view(self.shape)


def _scaled(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    # float() first: on a CPU, a product of int8 and float32 makes one more copy of the matrix
    return codes.float().mul_(scales[:, None]).to(dtype)


class Int8Matrix(Matrix):
    """A matrix in 8 bits a weight and a scale a row; read by rows, as matrix[a:b] or matrix[ids]."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype):
        super().__init__(shape, dtype)
        self.register_buffer("codes", torch.empty(shape, dtype=torch.int8))
        self.register_buffer("scales", torch.empty(shape[0], dtype=torch.float32))

    @staticmethod
    def encode(weight: Tensor) -> dict[str, Tensor]:
        """The buffers that hold `weight`, on its device. A row's largest weight has the code 127 or -127."""
        codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
        for first, rows in tiles(weight, max(1, TILE // weight.shape[1])):
            part = slice(first, first + len(rows))
            rows = rows.float()
            largest = rows.abs().amax(1)
            # CUDA would multiply by a rounded 1/127
            scales[part] = largest / torch.full_like(largest, 127)
            unit = rows / torch.where(scales[part] > 0, scales[part], 1.0)[:, None]
            # a subnormal scale is coarse: 180 would wrap to -76
            codes[part] = unit.round().clamp(-127, 127)
        return {"codes": codes, "scales": scales}

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        codes, trial = self.codes[rows], (self.codes[:2], self.scales[:2], self.dtype)
        scaled = one_kernel(_scaled, *trial, compiler=torch.compile) or _scaled
        # as rows, whatever the shape: each number of dimensions would be compiled for itself
        flat = codes.reshape(-1, codes.shape[-1]), self.scales[rows].reshape(-1)
        return scaled(*flat, self.dtype).view(codes.shape)
