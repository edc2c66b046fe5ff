"""12. AdamW in 8 bits: the moments as codes of a byte, the update as exact as before.

Saves 5.97 of the 8 bytes a weight of AdamW's moments; costs 17 ns a weight and step where AdamW takes 5 (one
CPU thread), and some precision: a moment is one of 256 levels, dense near 0, times its block's scale. A step
decodes the moments, takes AdamW's step in fp32 and rounds them only then: so step 1 is torch's, and without a
gradient from the start no moment appears. Tensors under 4,096 weights keep fp32 moments. Next: 13 packing.

Two things rounding to the nearest would do, and what is done here. A second moment beside a much larger one
becomes 0, and when its gradient stops the weight moves by m/ε, thousands of lr: so the root is kept, and a
live one never as 0. A first moment that loses a tenth a step is nearest to the level it had, never falls, and
moves its weight for ever: so rounding is stochastic in effect. At step t a number goes up if it lies above
the share t·φ mod 1 of its gap, with one φ for all, so over the steps as often as it should; no random state.

Dettmers et al. 2022, arXiv:2110.02861, section 2. Differs from the paper: those two; blocks of 256, as in
bitsandbytes, not 2,048; a scale has the sign of its block's largest number, so that this one comes back
exactly and -x has x's codes.
"""

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256  # numbers that share a scale
SMALLEST = 4096  # weights of a tensor from which on 8 bits are worth it: biases and norms are a few bytes
CHUNK = 2**18  # weights decoded at a time, whole blocks: some 10 MB, and fastest on a CPU
GOLDEN = (5**0.5 - 1) / 2  # its multiples, modulo 1, fall evenly between 0 and 1, however many


def dynamic_map(signed: bool) -> Tensor:
    """The 256 levels, sorted: (256,) float32. Section 2.2 of the paper; bit for bit those of bitsandbytes.

    The decade from 10^(e-7) to 10^(e-6), e = 0 .. 6, is cut into 2^e equal parts (2^(e+1) without a sign),
    whose middles are levels, with their negatives if signed. 0 and 1 are levels too, -1 is none.

    >>> dynamic_map(signed=True)[[0, 126, 127, 128, 255]].tolist()
    [-0.992968738079071, -5.500000384017767e-07, 0.0, 5.500000384017767e-07, 1.0]
    """
    levels = [torch.tensor([0.0, 1.0], dtype=torch.float32)]
    for e in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (e if signed else e + 1) + 1, dtype=torch.float32)
        middles = 10.0 ** (e - 6) * (edges[:-1] + edges[1:]) / 2
        levels += [middles, -middles] if signed else [middles]
    return torch.cat(levels).sort().values


class Levels(NamedTuple):
    """A map, ready to round to."""

    book: Tensor  # (257,) the levels, sorted, and inf
    gap: Tensor  # (256,) from a level to the next; 0 where whatever is above the level goes to the next
    low: Tensor  # (65536,) int32, by the upper half of a float32: the last level not above any such float


def levels(book: Tensor, gap: Tensor) -> Levels:
    """book (256,) and gap (256,) with the table of starts.

    To search the levels takes a CPU 30 ns a number, more than the rest of a step. A float's upper half leaves
    one level to compare with, as no two between -1 and 1 have the same, and takes 3 ns.
    """
    halves = torch.arange(-2**15, 2**15, dtype=torch.int32) << 16
    ends = torch.stack((halves, halves | 0xFFFF)).view(torch.float32)  # of the floats that begin so
    low = torch.searchsorted(book, ends, right=True, out_int32=True).amin(0) - 1
    return Levels(F.pad(book, (0, 1), value=math.inf), gap, low.clamp(min=0))


@functools.cache
def maps(device: torch.device) -> tuple[Levels, Levels]:
    """For the first moment, and for the root of the second, of which none but 0 may become 0."""
    signed, unsigned = dynamic_map(signed=True), dynamic_map(signed=False)
    gap, root_gap = (F.pad(book.diff(), (0, 1)) for book in (signed, unsigned))
    root_gap[0] = 0
    return tuple(Levels(*(t.to(device) for t in levels(*of))) for of in ((signed, gap), (unsigned, root_gap)))


def spread(scale: Tensor, n: int) -> Tensor:
    """A block's scale beside each of its numbers: (blocks,) -> (n,)."""
    return scale[:, None].expand(-1, BLOCK).reshape(-1)[:n]


def quantise(x: Tensor, to: Levels, at: float = 0.5) -> tuple[Tensor, Tensor]:
    """x (n,) float32 as codes (n,) uint8 and scales (blocks,) float32: the number largest in size of each.

    at: the share of the gap between two levels from which on a number goes to the higher; 0.5 is the nearest.

    >>> signed, _ = maps(torch.device("cpu"))
    >>> quantise(torch.tensor([0.0, -2.0, 1.0]), signed)  # shares 0, 1 and -0.5 of the scale
    (tensor([127, 255,  35], dtype=torch.uint8), tensor([-2.]))
    """
    padded = F.pad(x, (0, -len(x) % BLOCK)).view(-1, BLOCK)
    scale = padded.gather(1, padded.abs().argmax(1, keepdim=True)).squeeze(1)
    share = x / spread(torch.where(scale == 0, 1.0, scale), len(x))  # a block of zeros stays zeros, not 0/0
    low = to.low.index_select(0, (share.view(torch.int32) >> 16) + 2**15)
    low += share >= to.book.index_select(0, low + 1)
    border = torch.add(to.book.index_select(0, low), to.gap.index_select(0, low), alpha=at)
    return (low + (share > border)).to(torch.uint8), scale


def dequantise(codes: Tensor, scale: Tensor, of: Levels) -> Tensor:
    """The numbers that codes (n,) and scales (blocks,) stand for: (n,) float32."""
    return of.book.index_select(0, codes.int()) * spread(scale, len(codes))


def layout(n: int) -> dict[str, tuple[int, torch.dtype]]:
    """Length and dtype of what is kept for a tensor of n weights, beside the number of its steps."""
    if n < SMALLEST:
        return {"m": (n, torch.float32), "v": (n, torch.float32)}
    blocks = -(-n // BLOCK)  # the last may be short
    return {"m_codes": (n, torch.uint8), "m_scale": (blocks, torch.float32),
            "root_v_codes": (n, torch.uint8), "root_v_scale": (blocks, torch.float32)}


def state_bytes(n: int) -> int:
    """What the moments of a tensor of n weights take.

    >>> state_bytes(2**20) / 2**20, state_bytes(1000) / 1000
    (2.03125, 8.0)
    """
    return sum(length * dtype.itemsize for length, dtype in layout(n).values())


def adamw_(p: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: int, lr: float, betas: tuple[float, float],
           eps: float, weight_decay: float) -> None:
    """Step 1, 2, .. of AdamW, in place; all (n,), m and v float32. The operations are torch.optim.AdamW's.

    m ← β1 m + (1-β1) g, v ← β2 v + (1-β2) g², p ← (1 - lr·λ) p - lr · m/(1-β1ᵗ) / (√(v/(1-β2ᵗ)) + ε).
    """
    p.mul_(1 - lr * weight_decay)
    m.lerp_(grad, 1 - betas[0])
    v.mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
    size = (v.sqrt() / (1 - betas[1] ** step) ** 0.5).add_(eps)
    p.addcdiv_(m, size, value=-lr / (1 - betas[0] ** step))


def step_fp32(p: Tensor, grad: Tensor, kept: dict, settings: dict) -> None:
    """`adamw_` with moments kept as they are; p and grad (n,)."""
    adamw_(p, grad.float(), kept["m"], kept["v"], kept["step"], **settings)


def step_8bit(p: Tensor, grad: Tensor, kept: dict, settings: dict) -> None:
    """`adamw_` with moments decoded before and rounded behind it; p and grad (n,)."""
    signed, unsigned = maps(p.device)
    at = kept["step"] * GOLDEN % 1
    for start in range(0, len(p), CHUNK):  # or the moments of a whole embedding would be decoded at once
        end = start + CHUNK
        here, blocks = slice(start, end), slice(start // BLOCK, end // BLOCK)
        m_kept = kept["m_codes"][here], kept["m_scale"][blocks]
        root_kept = kept["root_v_codes"][here], kept["root_v_scale"][blocks]
        m, v = dequantise(*m_kept, signed), dequantise(*root_kept, unsigned).square_()
        adamw_(p[here], grad[here].float(), m, v, kept["step"], **settings)
        for old, new in zip(m_kept + root_kept, quantise(m, signed, at) + quantise(v.sqrt_(), unsigned, at)):
            old.copy_(new)


class AdamW8bit(torch.optim.Optimizer):
    """torch.optim.AdamW whose moments take 2.03 bytes a weight; parameters must be contiguous.

    Measured against torch's over 500 steps of 8,192 weights, the rate falling to 0: the weights end 4 - 9 %
    of their way apart, the losses 0.5 - 2.2 %. Two problems, two seeds: a quadratic (curvatures from 0.01
    to 100, noise as large as the way) and a logistic regression in batches of 32.
    """

    def __init__(self, params, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0):
        if not (0 <= lr < math.inf and 0 <= betas[0] < 1 and 0 <= betas[1] < 1 and 0 < eps < math.inf
                and 0 <= weight_decay < math.inf):
            raise ValueError("AdamW needs lr >= 0, betas in [0, 1), eps > 0 and weight_decay >= 0, "
                             f"got {lr}, {betas}, {eps} and {weight_decay}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        """Move all parameters that have a gradient. The host never waits: what it needs, it counts itself."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                kept = self.state[p]
                if not kept:  # zeros: scales of 0 make any code 0
                    kept["step"] = 0
                    for name, (n, dtype) in layout(p.numel()).items():
                        kept[name] = torch.zeros(n, dtype=dtype, device=p.device)
                kept["step"] += 1
                settings = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
                step = step_fp32 if "m" in kept else step_8bit
                step(p.view(-1), p.grad.reshape(-1), kept, settings)

    def load_state_dict(self, state_dict: dict) -> None:
        """Take up a state as it was, bit for bit: torch's own would cast codes to the parameter's dtype.

        Raises ValueError, nothing changed, if it is another optimizer's or was kept for other tensors.
        """
        ids = (i for group in state_dict["param_groups"] for i in group["params"])
        parameters = dict(zip(ids, (p for group in self.param_groups for p in group["params"])))
        loaded = {}
        for i, kept in state_dict["state"].items():
            tensors = {name: torch.as_tensor(value) for name, value in kept.items()}
            got = {name: (t.numel(), t.dtype) for name, t in tensors.items()}
            p = parameters.get(i)
            wanted = {} if p is None else {"step": (1, torch.int64), **layout(p.numel())}
            if got != wanted:
                raise ValueError(f"parameter {i}: the state holds {got}, 8-bit AdamW keeps {wanted} for it: "
                                 "another optimizer's or another model's state; start the run again")
            loaded[p] = {name: t.to(p.device, copy=True) for name, t in tensors.items()}
            loaded[p]["step"] = int(tensors["step"])
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self.state.update(loaded)
