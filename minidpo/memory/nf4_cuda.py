"""NF4 written out on a GPU: one kernel reads codes and scales and writes weights, nothing in between.

A program of the kernel takes BYTES bytes of codes, two weights each. The levels and the squares of the scales
are tables of a few hundred bytes, which stay in the processor's cache. Triton comes with PyTorch's packages
for CUDA.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BYTES = 1024  # on an H100 as fast as a plain copy of the weights; 256 and 4096 are a fifth slower


@triton.jit
def _kernel(packed, scales, largest, table, out, n_bytes, BYTES: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BYTES
    byte_at = first + tl.arange(0, BYTES)
    inside = byte_at < n_bytes
    byte = tl.load(packed + byte_at, mask=inside, other=0).to(tl.int32)
    block = byte_at // 32  # 64 weights
    scale = tl.load(scales + block, mask=inside, other=0).to(tl.int32)
    absmax = tl.load(table + 16 + scale) * tl.load(largest + block // 256, mask=inside, other=0)
    # products alone: there is nothing that could be fused to one rounding
    upper, lower = tl.load(table + (byte >> 4)) * absmax, tl.load(table + (byte & 15)) * absmax
    weight_at = 2 * first + tl.arange(0, 2 * BYTES)
    weights = tl.interleave(upper, lower).to(out.dtype.element_ty)
    tl.store(out + weight_at, weights, mask=weight_at < 2 * n_bytes)


def expand(
    packed: Tensor, scales: Tensor, largest: Tensor, table: Tensor, dtype: torch.dtype
) -> Tensor:
    """(n,64) weights of (n,32) bytes, (n,) scales and their groups' largest, as `nf4.dequantise`. table: the
    16 levels, and the squares of the 256 scales."""
    out = torch.empty((len(packed), 64), dtype=dtype, device=packed.device)
    programs = triton.cdiv(packed.numel(), BYTES)
    # Triton launches on the current GPU, which may be another model's
    with torch.cuda.device(packed.device):
        _kernel[(programs,)](packed, scales, largest, table, out, packed.numel(), BYTES=BYTES)
    return out
