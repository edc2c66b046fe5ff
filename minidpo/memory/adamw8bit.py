"""AdamW in 8 bits: each moment is stored in a byte, and the update is computed in fp32.

Saves 5.97 of the 8 bytes a weight of AdamW's moments. Costs 17 ns a weight and step where AdamW takes 5 (one
CPU thread), and precision: a moment is one of 256 levels, dense near 0, times its block's scale. A step
decodes the moments, takes AdamW's step in fp32 and then rounds them. Small tensors keep fp32 moments.

Rounding to the nearest level fails in two ways. A second moment beside a much larger one becomes 0, and when
its gradient stops, the weight moves by m/ε, thousands of lr: so the root is stored, and only 0 becomes 0. A
first moment that loses a tenth a step is nearest to the level it has, never falls and moves its weight for
ever: so at step t a number is rounded up if it lies above the share t·φ mod 1 (GOLDEN) of the gap between two
levels. Over the steps it goes up as often as it should, and no random state is needed.

Dettmers et al. 2022, arXiv:2110.02861, section 2. Differs from the paper: those two; blocks of 256, as in
bitsandbytes, not 2,048; a scale has the sign of its block's largest number, so that this number comes back
exactly and -x has the codes of x.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256  # numbers that share a scale
SMALLEST = 4096  # weights of the smallest tensor that gets 8 bits: others take few bytes anyway
CHUNK = 2**18  # weights decoded at a time, whole blocks: some 10 MB, and fastest on a CPU
# the same on a GPU, of several tensors: an adapter of a 7B has 392, and to launch 60 kernels for each of them
# takes longer than to run all
GPU_CHUNK = 2**22
# its multiples modulo 1 fill the interval from 0 to 1 evenly, however many
GOLDEN = (5**0.5 - 1) / 2


def dynamic_map(signed: bool) -> Tensor:
    """The 256 levels, sorted: (256,) float32. Section 2.2 of the paper; bit for bit those of bitsandbytes.

    Each decade from 10^(e-7) to 10^(e-6), e = 0 .. 6, is cut into 2^e equal parts, 2^(e+1) if unsigned. Their
    middles are levels, and if signed the negatives; so are 0 and 1, and -1 is not.

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
    """A map's levels, and what rounding to them needs."""

    book: Tensor  # (257,) the levels, sorted, and inf
    gap: Tensor  # (256,) from each level to the next; 0 if any number above the level is rounded up
    low: Tensor  # (65536,) int32, by the upper 16 bits of a float32: the last level not above any such float


@functools.cache
def maps(device: torch.device) -> tuple[Levels, Levels]:
    """The levels for the first moment, and for the root of the second, where only 0 may become 0."""
    # The upper 16 bits of a float leave one level to compare with, because no two levels share theirs. That
    # takes a CPU 3 ns a number; to search the levels takes 30 ns, more than the rest of a step.
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    # the first and last float of each half
    ends = torch.stack((halves, halves | 0xFFFF)).view(torch.float32)
    found = []
    for signed in (True, False):
        book = dynamic_map(signed)
        gap = F.pad(book.diff(), (0, 1))
        if not signed:
            gap[0] = 0
        low = (torch.searchsorted(book, ends, right=True, out_int32=True).amin(0) - 1).clamp(min=0)
        book = F.pad(book, (0, 1), value=math.inf)
        found.append(Levels(book.to(device), gap.to(device), low.to(device)))
    return tuple(found)


def quantise(x: Tensor, levels: Levels, at: float = 0.5) -> tuple[Tensor, Tensor]:
    """x (n,) float32 as codes (n,) uint8 and scales (blocks,) float32: of each block, the largest in size.

    A number above the share `at` of the gap between two levels goes to the higher; 0.5 is the nearest level.

    >>> signed, _ = maps(torch.device("cpu"))
    >>> quantise(torch.tensor([0.0, -2.0, 1.0]), signed)  # shares 0, 1 and -0.5 of the scale
    (tensor([127, 255,  35], dtype=torch.uint8), tensor([-2.]))
    """
    padded = F.pad(x, (0, -len(x) % BLOCK)).view(-1, BLOCK)
    scale = padded.gather(1, padded.abs().argmax(1, keepdim=True)).squeeze(1)
    # zeros give 0, not 0/0
    share = x / torch.where(scale == 0, 1.0, scale).repeat_interleave(BLOCK)[: len(x)]
    low = levels.low.index_select(0, (share.view(torch.int32) >> 16) + 2**15)
    low += share >= levels.book.index_select(0, low + 1)
    border = torch.add(levels.book.index_select(0, low), levels.gap.index_select(0, low), alpha=at)
    return (low + (share > border)).to(torch.uint8), scale


def dequantise(codes: Tensor, scale: Tensor, levels: Levels) -> Tensor:
    """The numbers that codes (n,) and scales (blocks,) stand for: (n,) float32."""
    return levels.book.index_select(0, codes.int()) * scale.repeat_interleave(BLOCK)[: len(codes)]


def layout(n: int) -> dict[str, tuple[int, torch.dtype]]:
    """Length and dtype of each tensor in the state of n weights; the state also counts the steps."""
    if n < SMALLEST:
        return {"m": (n, torch.float32), "v": (n, torch.float32)}
    blocks = -(-n // BLOCK)  # the last one may be short
    return {
        "m_codes": (n, torch.uint8),
        "m_scale": (blocks, torch.float32),
        "root_v_codes": (n, torch.uint8),
        "root_v_scale": (blocks, torch.float32),
    }


def state_bytes(n: int) -> int:
    """The bytes that the moments of n weights take: 8 a weight, or 2.03."""
    return sum(length * dtype.itemsize for length, dtype in layout(n).values())


def adamw_(p: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: int, settings: dict) -> None:
    """AdamW's step number 1, 2, .., in place; all (n,), m and v float32. Operations as in torch.optim.AdamW.

    m ← β1 m + (1-β1) g, v ← β2 v + (1-β2) g², p ← (1 - lr·λ) p - lr · m/(1-β1ᵗ) / (√(v/(1-β2ᵗ)) + ε).
    settings: lr, betas (β1, β2), eps ε and weight_decay λ.
    """
    lr, (beta1, beta2) = settings["lr"], settings["betas"]
    p.mul_(1 - lr * settings["weight_decay"])
    m.lerp_(grad, 1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    size = (v.sqrt() / (1 - beta2**step) ** 0.5).add_(settings["eps"])
    p.addcdiv_(m, size, value=-lr / (1 - beta1**step))


def step_8bit(p: Tensor, grad: Tensor, state: dict, settings: dict) -> None:
    """`adamw_` with moments in 8 bits, decoded before and rounded after it, or in 32 if p (n,) is small."""
    if "m" in state:
        adamw_(p, grad.float(), state["m"], state["v"], state["step"], settings)
        return
    signed, unsigned = maps(p.device)
    at = state["step"] * GOLDEN % 1
    size = GPU_CHUNK if p.is_cuda else CHUNK
    # else the moments of a whole embedding would be decoded together
    for start in range(0, len(p), size):
        chunk = slice(start, start + size)
        blocks = slice(start // BLOCK, (start + size) // BLOCK)
        m_stored = state["m_codes"][chunk], state["m_scale"][blocks]
        root_stored = state["root_v_codes"][chunk], state["root_v_scale"][blocks]
        m, v = dequantise(*m_stored, signed), dequantise(*root_stored, unsigned).square_()
        adamw_(p[chunk], grad[chunk].float(), m, v, state["step"], settings)
        rounded = quantise(m, signed, at) + quantise(v.sqrt_(), unsigned, at)
        for stored, new in zip(m_stored + root_stored, rounded):
            stored.copy_(new)


class AdamW8bit(torch.optim.Optimizer):
    """torch.optim.AdamW with moments of 2.03 bytes a weight. Parameters must be contiguous.

    After 500 steps of 8,192 weights (tests) the weights are 4 - 9 % of the way they moved apart from torch's.
    """

    def __init__(
        self,
        params,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self) -> None:
        """Move all parameters that have a gradient. The host counts the steps and never waits for a GPU."""
        for group in self.param_groups:
            moving = [p for p in group["params"] if p.grad is not None]
            for p in moving:
                state = self.state[p]
                if not state:  # all moments are 0: a scale of 0 makes any code 0
                    for name, (n, dtype) in layout(p.numel()).items():
                        state[name] = torch.zeros(n, dtype=dtype, device=p.device)
                state["step"] = state.get("step", 0) + 1
            for part in self._parts(moving):
                self._move(part, group)

    def _parts(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """Parameters that are moved together: on a GPU those of whole blocks, up to GPU_CHUNK weights."""
        parts: list[list[Tensor]] = []
        open_parts: dict[tuple, list[Tensor]] = {}  # by what a part's members have in common
        for p in parameters:
            state = self.state[p]
            if not p.is_cuda or "m" in state or p.numel() % BLOCK:
                parts.append([p])
                continue
            alike = p.dtype, p.device, state["step"]
            part = open_parts.get(alike)
            if part is None or sum(map(Tensor.numel, part)) + p.numel() > GPU_CHUNK:
                part = open_parts[alike] = []
                parts.append(part)
            part.append(p)
        return parts

    def _move(self, part: Sequence[Tensor], settings: dict) -> None:
        """A step of these parameters, as if their numbers stood in one tensor."""
        states = [self.state[p] for p in part]
        if len(part) == 1:
            step_8bit(part[0].view(-1), part[0].grad.reshape(-1), states[0], settings)
            return
        tensors = {name: [state[name] for state in states] for name in states[0] if name != "step"}
        tensors["weights"] = [p.view(-1) for p in part]
        whole = {name: torch.cat(parts) for name, parts in tensors.items()}
        grads = torch.cat([p.grad.reshape(-1) for p in part])
        step_8bit(whole["weights"], grads, whole | {"step": states[0]["step"]}, settings)
        for name, parts in tensors.items():
            torch._foreach_copy_(parts, whole[name].split([len(tensor) for tensor in parts]))

    def load_state_dict(self, state_dict: dict) -> None:
        """Restore a state bit for bit: torch's method would cast codes."""
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        parameters = [p for group in self.param_groups for p in group["params"]]
        for i, state in state_dict["state"].items():
            p = parameters[i]
            self.state[p] = {
                name: torch.as_tensor(t).to(p.device, copy=True) for name, t in state.items()
            }
            self.state[p]["step"] = int(state["step"])
