"""The machine: which device, in which dtype, and what of it a run may use."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch


def require_positive(**options: float | None) -> None:
    """Raises ValueError for an option that is not finite and greater than 0; None means off and is
    accepted."""
    for name, value in options.items():
        if value is not None and not 0 < value < math.inf:  # nan fails every comparison
            raise ValueError(f"{name} must be finite and greater than 0, got {value}")


@dataclass(frozen=True)
class Machine:
    """Where it runs."""

    device: str = "auto"
    "cpu, cuda, cuda:1 ...; auto takes a GPU if there is one"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    "of the base's weights; auto is bfloat16 on a GPU and float32 on a CPU"
    pages: int | None = None
    "browser pages played at once (default: 16, or one that is watched)"
    micro_tokens: int = 768
    "trees or episodes go through the model together up to this many tokens (with padding) in training; \
lower saves memory and changes no result"
    tree_tokens: int = 2048
    "tokens that the tree of a group may have; a larger group is split, and its prompt read once a part"
    recompute: bool = False
    "gradient checkpointing: keep only block inputs, compute the rest again in backward"
    offload: bool = False
    "with recompute, on a GPU: keep the block inputs in the host's memory"
    quantize: Literal["nf4"] | None = None
    "hold the base in 4 bits a weight (its vocabulary in 8): a model of 7B in 4.2 GiB"
    cache: Path | None = None
    "with quantize: folder that keeps the quantised weights, so that the next start takes seconds"
    memory_gib: float | None = None
    "what a run may take: of the GPU, whose allocator then gives no more, or on a CPU of the machine; a plan \
that needs more is refused before the weights are read (default: what is free)"

    def __post_init__(self):
        require_positive(micro_tokens=self.micro_tokens, tree_tokens=self.tree_tokens, pages=self.pages,
                         memory_gib=self.memory_gib)
        if self.offload and not self.recompute:
            raise ValueError("offload keeps what recompute keeps, in another place: set recompute as well")
        if self.cache is not None and self.quantize is None:
            raise ValueError("cache keeps quantised weights, but quantize is not set: set it, or drop cache")

    def page_count(self, watched: bool = False) -> int:
        """Browser pages that play at the same time: `pages`, or by default 16, or 1 if a person watches."""
        return self.pages or (1 if watched else 16)


def device_of(machine: Machine) -> torch.device:
    """Where it is to run, whether or not that is here. Raises ValueError for what is no such place."""
    name = machine.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device {name!r} is none: use cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is not supported: use cpu, cuda or cuda:N")
    if machine.offload and device.type == "cpu":
        raise ValueError("offload moves block inputs from a GPU to the host, but this runs on a CPU: drop it")
    if device.index is not None and torch.cuda.is_available() and device.index >= torch.cuda.device_count():
        raise ValueError(f"device {name!r} is not there: GPUs count from 0, and there are "
                         f"{torch.cuda.device_count()}")
    return device


def device_and_dtype(machine: Machine) -> tuple[torch.device, torch.dtype]:
    """Where to run, and in what. Raises ValueError for a device that is not there."""
    device = device_of(machine)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but PyTorch sees no GPU; use --machine.device cpu")
    return device, dtype_on(machine, device.type == "cuda")


def dtype_on(machine: Machine, cuda: bool) -> torch.dtype:
    """What the products run in. Raises ValueError for a GPU that has no bfloat16."""
    name = machine.dtype
    if name == "auto":
        name = "bfloat16" if cuda else "float32"
    if cuda and torch.cuda.is_available() and name == "bfloat16" and not torch.cuda.is_bf16_supported(False):
        raise ValueError("this GPU does not compute in bfloat16 (NVIDIA's do from Ampere, 2020, on); use "
                         "--machine.dtype float32")
    return getattr(torch, name)
