"""10. NF4: a frozen base in four bits a weight.

Saves 11.9 of the 16 bits of a bf16 weight: a weight becomes one of 16 levels, quantiles of the normal
distribution and so dense where weights are, times its block's largest (of 64), which itself becomes 8 bits.
Costs a rounding error of 9.2 % (rms, of normal weights), and writing the matrix out again for each product:
forward and backward do so and drop it, so one matrix at a time exists in full. The vocabulary's two matrices
are read by rows (a token's, or some at a time) and decide every token, so they are kept in 8 bits a weight,
an error of 0.9 % in rows of 3,584, with a scale a row. LoRA learns beside both. Next: 11 checkpointing.

Dettmers et al. 2023 (QLoRA), arXiv:2305.14314, section 3 and appendix E. Differs from the paper: block maxima
are stored as squares of an 8-bit number times the largest of their 256, in place of 8-bit floats around the
mean, so that what is quantised already stays as it is; the vocabulary is quantised, too.
"""

import functools
from importlib.util import find_spec
from subprocess import SubprocessError

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from minidpo.model.head import tiles

BLOCK, GROUP = 64, 256  # weights that share a maximum; maxima that share one
TILE = 2**19  # weights in work at once: what is between is a few MiB, and stays in a processor's cache


@functools.cache
def code_book() -> Tensor:
    """The 16 levels, (16,) float32, ascending from -1 to 1, with an exact 0: QLoRA, appendix E.

    Quantiles at equal steps of probability, 7 below zero and 8 above, from 1 - (1/32 + 1/30)/2 = 0.9677083
    down to 1/2, then scaled to reach 1. In float32 the steps and in float64 the quantiles, as the published
    numbers were made: the same bits.

    >>> code_book()[[0, 1, 7, 8, 15]]
    tensor([-1.0000, -0.6962,  0.0000,  0.0796,  1.0000])
    """
    def quantiles(n: int) -> Tensor:  # from the edge down to the middle, which is 0 itself
        return torch.special.ndtri(torch.linspace(0.9677083, 0.5, n).double())[:-1]

    levels = torch.cat((-quantiles(8), torch.zeros(1), quantiles(9))).float().sort().values
    return levels / levels.max()


@functools.cache
def tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Between levels (15,), levels of the two codes in a byte (256,2), squares of an 8-bit scale (256,)."""
    book = code_book()
    pairs = torch.stack((book.repeat_interleave(16), book.repeat(16)), dim=1)
    squares = (torch.arange(256) / 255).square()
    return tuple(table.to(device) for table in ((book[1:] + book[:-1]) / 2, pairs, squares))


def nearest(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Each weight's nearest level once its block is divided by its largest: codes (n,64) uint8, absmax (n,).

    blocks (n,64) float32. A block of zeros has absmax 0 and the code of 0 throughout.

    >>> codes, absmax = nearest(torch.tensor([[0.0, -2.0, 1.1]]))
    >>> codes, absmax * code_book()[codes.int()]
    (tensor([[ 7,  0, 13]], dtype=torch.uint8), tensor([[ 0.0000, -2.0000,  1.1252]]))
    """
    absmax = blocks.abs().amax(1)
    between, _, _ = tables(blocks.device)
    unit = blocks / torch.where(absmax > 0, absmax, 1.0)[:, None]
    return torch.bucketize(unit, between, out_int32=True).to(torch.uint8), absmax


def pack(codes: Tensor) -> Tensor:
    """Two codes a byte, the first in the upper half: (n,64) -> (n,32) uint8.

    >>> pack(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8))
    tensor([[ 18, 240]], dtype=torch.uint8)
    """
    return codes[:, 0::2] << 4 | codes[:, 1::2]


def quantise_scales(absmax: Tensor) -> tuple[Tensor, Tensor]:
    """Double quantisation: absmax (n,) -> scales (n,) uint8 and the largest of each 256, (⌈n/256⌉,) float32.

    absmax ≈ largest · (scale / 255)²: the square makes steps small where maxima are small, since a maximum
    that is rounded to 0 takes its block with it. With s = sqrt(absmax / largest), the error is at most
    largest · (s + 1/1020) / 255.
    """
    groups = F.pad(absmax, (0, -len(absmax) % GROUP)).view(-1, GROUP)
    largest = groups.amax(1)
    share = groups / torch.where(largest > 0, largest, 1.0)[:, None]
    return (share.sqrt() * 255).round().to(torch.uint8).flatten()[:len(absmax)], largest


def dequantise_scales(scales: Tensor, largest: Tensor) -> Tensor:
    """absmax (n,) float32 again. A table in place of a division: products alone round the same everywhere."""
    _, _, squares = tables(scales.device)
    return squares[scales.int()] * largest.repeat_interleave(GROUP)[:len(scales)]


def _expand(packed: Tensor, absmax: Tensor, pairs: Tensor, dtype: torch.dtype) -> Tensor:
    """(n,32) bytes and (n,) -> (n,64). Products alone: no compiler can fuse two roundings into one."""
    return (F.embedding(packed.int(), pairs).flatten(1) * absmax[:, None]).to(dtype)


@functools.cache
def _fused(device: torch.device):
    """The same as one kernel, so that nothing in between exists; None where PyTorch can't compile for it."""
    fused, (_, pairs, _) = torch.compile(_expand, dynamic=True), tables(device)
    try:  # Triton needs a C compiler and Python's headers, and its errors have many types
        fused(pairs.new_zeros((2, BLOCK // 2), dtype=torch.uint8), pairs.new_ones(2), pairs, torch.float32)
    except (RuntimeError, OSError, SubprocessError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        print(f"PyTorch can't compile for {device}, so four-bit weights are written out in tiles, which is "
              f"slower: {reason}")
        return None
    return fused


def dequantise(packed: Tensor, scales: Tensor, largest: Tensor, dtype: torch.dtype) -> Tensor:
    """(n,64) weights, float32 cast to `dtype`. On CUDA one kernel; else in tiles, to the same bits."""
    _, pairs, _ = tables(packed.device)
    absmax = dequantise_scales(scales, largest)
    if packed.is_cuda and find_spec("triton") and (fused := _fused(packed.device)):
        return fused(packed, absmax, pairs, dtype)
    out = torch.empty((len(packed), BLOCK), dtype=dtype, device=packed.device)
    for part in (slice(n, n + TILE // BLOCK) for n in range(0, len(packed), TILE // BLOCK)):
        out[part] = _expand(packed[part], absmax[part], pairs, dtype)
    return out


class _Matrix(nn.Module):
    """What both kinds of matrix tell about themselves; `dtype` is the one they are written out in."""

    codes: Tensor

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype):
        super().__init__()
        self.shape, self.dtype = tuple(shape), dtype

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def __len__(self) -> int:
        return self.shape[0]

    def numel(self) -> int:
        """Weights, not bytes."""
        return self.shape[0] * self.shape[1]


class NF4Matrix(_Matrix):
    """A matrix in 4.127 bits a weight, row by row in blocks of 64; the last one is filled up with zeros."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype):
        super().__init__(shape, dtype)
        n = -(-self.numel() // BLOCK)
        self.register_buffer("codes", torch.empty((n, BLOCK // 2), dtype=torch.uint8))
        self.register_buffer("scales", torch.empty(n, dtype=torch.uint8))
        self.register_buffer("largest", torch.empty(-(-n // GROUP), dtype=torch.float32))

    @staticmethod
    def encode(weight: Tensor) -> dict[str, Tensor]:
        """The buffers that hold `weight`, on its device. It may be in any floating dtype; read in tiles."""
        n = -(-weight.numel() // BLOCK)
        packed = torch.empty((n, BLOCK // 2), dtype=torch.uint8, device=weight.device)
        absmax = torch.empty(n, dtype=torch.float32, device=weight.device)
        for first, tile in tiles(weight.reshape(-1), TILE):
            blocks = F.pad(tile.float(), (0, -len(tile) % BLOCK)).view(-1, BLOCK)
            part = slice(first // BLOCK, first // BLOCK + len(blocks))
            codes, absmax[part] = nearest(blocks)
            packed[part] = pack(codes)
        scales, largest = quantise_scales(absmax)
        packed[scales == 0] = 0x77  # a block whose scale is rounded to 0 is one of zeros, and has its codes
        return {"codes": packed, "scales": scales, "largest": largest}

    def dense(self) -> Tensor:
        """The whole matrix, written out."""
        flat = dequantise(self.codes, self.scales, self.largest, self.dtype).view(-1)
        return flat[:self.numel()].view(self.shape)


class Int8Matrix(_Matrix):
    """A matrix in 8 bits a weight and a scale a row, read by rows: matrix[a:b], or matrix[ids]."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype):
        super().__init__(shape, dtype)
        self.register_buffer("codes", torch.empty(shape, dtype=torch.int8))
        self.register_buffer("scales", torch.empty(shape[0], dtype=torch.float32))

    @staticmethod
    def encode(weight: Tensor) -> dict[str, Tensor]:
        """The buffers that hold `weight`; 127 stands for a row's largest."""
        codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
        for first, rows in tiles(weight, max(1, TILE // weight.shape[1])):
            part = slice(first, first + len(rows))
            rows = rows.float()
            scales[part] = rows.abs().amax(1) / 127
            unit = rows / torch.where(scales[part] > 0, scales[part], 1.0)[:, None]
            codes[part] = unit.round().clamp(-127, 127)  # a subnormal scale is too coarse: 180 would be -76
        return {"codes": codes, "scales": scales}

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        # in steps: a product of int8 and float32 would make a second copy on a CPU
        return self.codes[rows].float().mul_(self.scales[rows][..., None]).to(self.dtype)

    def dense(self) -> Tensor:
        """The whole matrix, written out."""
        whole = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for first, rows in tiles(self):
            whole[first:first + len(rows)] = rows
        return whole


class _Product(torch.autograd.Function):
    """x Wᵀ, which keeps neither W, written out again in backward, nor x, which only W's gradient needs."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: NF4Matrix, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return F.linear(x, weight.dense(), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return grad @ ctx.weight.dense(), None, None


class NF4Linear(nn.Module):
    """What nn.Linear computes, from a matrix in four bits, which does not train; nor does the bias."""

    def __init__(self, weight: NF4Matrix, bias: nn.Parameter | None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self.weight, self.bias)


class Int8Table(nn.Module):
    """An embedding table, or a head, in 8 bits: looked up by token ids, or read by rows as a head."""

    def __init__(self, weight: Int8Matrix):
        super().__init__()
        self.weight = weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids]
