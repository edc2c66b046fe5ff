"""The machine: the device a run uses, its dtype, and how much memory the run may take."""

import ctypes
import math
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from minidpo.system.ranges import Checked, Positive

MIB, GIB = 2**20, 2**30
MICRO_TOKENS = 768  # by default on a CPU
GPU_MICRO_TOKENS = 8192, 4096, 2048, 1024  # by default on a GPU the first of these that fits
# that cuBLAS keeps for each thread and stream that multiplies on Hopper; elsewhere it is 8
CUBLAS = 32 * MIB
CUDA_CONTEXT = 450 * MIB  # an estimate: what an NVIDIA driver takes once cuBLAS is loaded


@dataclass(frozen=True)
class Machine(Checked):
    """Where the model runs and how it is made to fit."""

    device: str = "auto"
    "cpu, cuda, cuda:1 ...; auto takes a GPU if there is one"
    dtype: Literal["auto", "fast", "float32", "bfloat16", "rounded"] = "auto"
    "of the base's weights; auto is that beside which the adapter was trained or, without one, bfloat16 on a \
GPU and float32 on a CPU; fast is auto, but bfloat16 on a CPU with instructions for it, too; rounded is for \
adapters of bfloat16 where that is slow: its weights in float32, which auto and fast then take by themselves"
    act_dtype: Literal["auto", "float32", "bfloat16", "int8"] | None = None
    "of a policy that acts; bfloat16 on a CPU: of weights and products alone, all else is float32; float32 \
beside dtype bfloat16: the adapter is added without rounding; int8: weights in 8 bits and the adapter beside \
them, on a CPU with one page; auto: int8 if so and the base is a GGUF file of fewer than 16 bits; None: dtype"
    pages: Positive[int | None] = None
    "browser pages that play at the same time; None: 16, or 1 with --watch"
    micro_tokens: Positive[int | None] = None
    "in training, trees or episodes go through the model together up to this many tokens, padding included; \
a lower number saves memory and, without dropout, changes no result; None: 768 on a CPU and with \
dropout, on a GPU the most of 8192, 4096 .. that its memory has room for"
    page_tokens: Positive[int | None] = None
    "tokens of a page's longest conversation, by which `plan` counts the memory of exploring; None: as \
micro_tokens"
    tree_tokens: Positive[int] = 2048
    "the most tokens in a group's tree; a larger group is split, and its prompt is read once for each part"
    depth_first: bool = False
    "a larger group is not split: its tree goes depth first, one path from the root at a time, and all its \
tokens are computed once more"
    recompute: bool = False
    "gradient checkpointing: keep only the blocks' inputs and compute the rest again in backward"
    offload: bool = False
    "with recompute, on a GPU: keep the blocks' inputs in the host's memory"
    quantize: Literal["nf4", "keep"] | None = None
    "nf4: hold the base in 4 bits a weight and its vocabulary in 8, a 7B model takes 4.2 GiB; keep: hold the \
blocks of a GGUF file as they are"
    cache: Path | None = None
    "with quantize nf4: a folder that keeps the quantised weights, so that the next start takes seconds"
    memory_gib: Positive[float | None] = None
    "memory the run may take, of the GPU, whose allocator then gives no more, or of the machine, whose \
CPU then trains slower; a plan that needs more is refused before its weights are read; None: what is free"

    def __post_init__(self):
        super().__post_init__()
        if self.offload and not self.recompute:
            raise ValueError(
                "offload moves the block inputs that recompute keeps: set recompute as well"
            )
        if self.dtype == "rounded" and self.quantize is not None:
            raise ValueError(
                f"dtype rounded is of a full base, but quantize is {self.quantize}: use float32"
            )
        if self.cache is not None and self.quantize != "nf4":
            raise ValueError(
                f"cache keeps weights in NF4, but quantize is {self.quantize or 'not set'}: set "
                "--machine.quantize nf4, or drop cache"
            )

    def pass_tokens(self) -> int:
        """Tokens that go through the model together: `micro_tokens`, or 768 where no plan has chosen it."""
        return self.micro_tokens or MICRO_TOKENS

    @property
    def split_above(self) -> int:
        """Tokens from which on a group is split into several trees."""
        return sys.maxsize if self.depth_first else self.tree_tokens

    @property
    def walk_above(self) -> int:
        """Tokens from which on a tree goes depth first."""
        return self.tree_tokens if self.depth_first else sys.maxsize

    def page_count(self, watched: bool = False) -> int:
        """Browser pages that play at the same time: `pages`, or by default 16, or 1 if a person watches."""
        return self.pages or (1 if watched else 16)


def device_of(machine: Machine) -> torch.device:
    """The device that is asked for, even if this machine has no GPU: a plan needs none."""
    name = machine.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda|cuda:[1-9]?[0-9]", name):
        raise ValueError(f"device {name!r} is not supported: use cpu, cuda or cuda:N")
    device = torch.device(name)
    if machine.offload and device.type == "cpu":
        raise ValueError(
            "offload moves block inputs from a GPU to the host, but this runs on a CPU: drop it"
        )
    gpus = torch.cuda.device_count()
    if gpus and device.index is not None and device.index >= gpus:
        raise ValueError(f"device {name!r} is not there: GPUs count from 0, and there are {gpus}")
    return device


def dtype_on(machine: Machine, cuda: bool) -> torch.dtype:
    """The dtype of the base's weights and products. Raises ValueError for a GPU without bfloat16."""
    if machine.dtype in ("float32", "rounded"):
        return torch.float32
    if not cuda and machine.dtype != "bfloat16":
        fast = machine.dtype == "fast" and multiplies_bfloat16()
        return torch.bfloat16 if fast else torch.float32
    if cuda and torch.cuda.is_available() and not torch.cuda.is_bf16_supported(False):
        raise ValueError(
            "this GPU does not compute in bfloat16 (NVIDIA's do from Ampere, 2020, on); use "
            "--machine.dtype float32, or rounded with an adapter that was trained in bfloat16"
        )
    return torch.bfloat16


def multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for it."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def is_slow(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products in this dtype are slower here than in float32, many times for more than one row."""
    return device.type == "cpu" and dtype == torch.bfloat16 and not multiplies_bfloat16()


def device_and_dtype(machine: Machine) -> tuple[torch.device, torch.dtype]:
    """Device and dtype to run with. Raises ValueError as `device_of` does, or if cuda has no GPU."""
    device = device_of(machine)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device cuda was asked for, but PyTorch sees no GPU; use --machine.device cpu"
        )
    return device, dtype_on(machine, device.type == "cuda")


def container_free(root: Path = Path("/sys/fs/cgroup")) -> float:
    """The bytes that a container's limit (cgroup v2) leaves, what its files hold in memory counted as free;
    infinitely many without a limit."""
    try:
        limit, used = (int((root / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = (root / "memory.stat").read_text()
    except (OSError, ValueError):  # no container, or "max"
        return math.inf
    return limit - used + sum(map(int, re.findall(r"^(?:in)?active_file (\d+)", stat, re.M)))


def memory_limit(machine: Machine, cuda: bool) -> float:
    """The bytes that a run may take: `memory_gib`, or what is free on the GPU or on this machine."""
    if machine.memory_gib is not None:
        return machine.memory_gib * GIB
    if not cuda:
        free_kib = Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]
        # torchrun's processes share the machine
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return min(1024 * int(free_kib), container_free()) / ranks + memory_now()
    if not torch.cuda.is_available():
        raise ValueError("no GPU here can be asked for its memory: give --machine.memory-gib")
    device = torch.device(machine.device.replace("auto", "cuda"))
    # of the allocator's
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused + CUDA_CONTEXT


def memory_now() -> float:
    """The bytes of memory that this process has."""
    return 1024 * int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])


def limit_allocator(machine: Machine, device: torch.device) -> None:
    """Keep the allocator within `memory_gib`: on CUDA strictly, with glibc close to what is in use."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        share = (machine.memory_gib * GIB - CUDA_CONTEXT) / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, share)), device.index)
    elif hasattr(libc := ctypes.CDLL(None), "mallopt"):
        # From 128 KiB on, a tensor gets pages of its own, which go back to the system when it is freed. By
        # default glibc raises this up to 32 MiB, and keeps a heap with holes (docs/measured.md).
        libc.mallopt(-3, 2**17)  # M_MMAP_THRESHOLD


def row_length(tokens: int) -> int:
    """The length that so many tokens are padded to: at most a sixteenth longer, and one of few lengths.

    Steps then ask the allocator again for blocks of sizes that it has had; with a new length in each, glibc's
    heap grew and searching it took ever longer (docs/log.md, 2026-11-28, "fourth").

    >>> [row_length(n) for n in (31, 33, 100, 1000)]
    [31, 34, 100, 1024]
    """
    step = max(1, 2 ** (tokens.bit_length() - 5))
    return -(-tokens // step) * step
