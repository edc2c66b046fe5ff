"""31. Opening: where to run, in what dtype, whether it will fit, and then the model.

In this order, because a wrong device, a missing tokenizer or too little memory is better said before 15 GB
are read than after. Next: 32 preference.
"""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from minidpo import lora, pretrained
from minidpo.budget import GIB, Load, Setup, memory_now, require
from minidpo.chat import Chat
from minidpo.checkpointing import switch
from minidpo.lora import LoRAConfig
from minidpo.options import Machine
from minidpo.qwen2 import Qwen2
from minidpo.streaming import expand, is_quantised, load_quantised


def device_and_dtype(machine: Machine) -> tuple[torch.device, torch.dtype]:
    """Where to run, and in what. Raises ValueError for a device that is not there."""
    name = machine.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device {name!r} is none: use cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is not supported: use cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but PyTorch sees no GPU; use --machine.device cpu")
    if machine.offload and device.type == "cpu":
        raise ValueError("offload moves block inputs from a GPU to the host, but this runs on a CPU: drop it")
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


def memory_limit(machine: Machine, cuda: bool) -> float:
    """The bytes that a run may take: as told, or what the GPU or this machine has."""
    if machine.memory_gib is not None:
        return machine.memory_gib * GIB
    if not cuda:
        free = Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]
        return 1024 * int(free) + memory_now()
    if not torch.cuda.is_available():
        raise ValueError("there is no GPU here that could be asked for its memory: give --machine.memory-gib")
    return torch.cuda.get_device_properties(torch.device(machine.device.replace("auto", "cuda"))).total_memory


def check_memory(source: str, adapter: LoRAConfig, machine: Machine, optimizer: str,
                 load_of: Callable[[Machine], Load]) -> None:
    """Refuse, before the weights are loaded, what will not fit."""
    device, dtype = device_and_dtype(machine)
    cuda = device.type == "cuda"
    shape, _ = pretrained.read_config(pretrained.locate(source))
    require(Setup(shape, adapter, machine, optimizer, dtype, cuda), load_of, memory_limit(machine, cuda))


def open_chat(source: str) -> tuple[Chat, int]:
    """A model's chat, and how many tokens the model reads: all that is needed to see what data mean to it."""
    folder = pretrained.locate(source)
    return Chat.load(folder), pretrained.read_config(folder)[0].max_position_embeddings


def open_model(source: str, machine: Machine) -> Qwen2:
    """The base model."""
    device, dtype = device_and_dtype(machine)
    if machine.memory_gib is not None:
        hold_to(machine, device)
    if machine.quantize:
        model = load_quantised(source, dtype, device, machine.cache)
    else:
        model = pretrained.load(source, dtype, device)
    switch(model, machine.recompute, machine.offload)
    return model


def hold_to(machine: Machine, device: torch.device) -> None:
    """Keep the allocator within `memory_gib` (CUDA), or near what is alive (a CPU under glibc)."""
    if device.type == "cuda":
        share = memory_limit(machine, True) / memory_limit(replace(machine, memory_gib=None), True)
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)
    elif hasattr(libc := ctypes.CDLL(None), "mallopt"):
        # From here on a tensor gets pages of its own, which go back when it dies. Left alone, glibc raises
        # this limit as it goes, to 32 MiB, and keeps the dead in a heap full of holes: 1.5 GiB for 1.0 alive.
        libc.mallopt(-3, 2**17)  # M_MMAP_THRESHOLD


def open_base(source: str, machine: Machine) -> tuple[Qwen2, Chat]:
    """Base model and its chat."""
    chat, _ = open_chat(source)  # before the weights: a missing tokenizer is found at once
    return open_model(source, machine), chat


def open_policy(source: str, adapter: Path | None, machine: Machine) -> tuple[Qwen2, Chat]:
    """A policy that is to act: base and adapter, merged unless the base is to stay in four bits."""
    model, chat = open_base(source, machine)
    if adapter is not None:
        lora.load(model, adapter)
    weight = model.head_weight
    if is_quantised(model) and weight.device.type == "cpu" and weight.dtype == torch.float32:
        # chapter 13 has all weights in full anyway, and is several times faster
        with torch.device("meta"):
            in_full = sum(4 * weight.numel() for weight in Qwen2(model.config).parameters())
        if in_full > (limit := memory_limit(machine, cuda=False)):
            raise ValueError("to act on a CPU in float32 all weights are written out, "
                             f"{in_full / GIB:.1f} GiB, but there are {limit / GIB:.1f}: "
                             "use --machine.dtype bfloat16")
        expand(model)
    if not is_quantised(model):
        lora.merge(model)
    return model.requires_grad_(False).eval(), chat


def policy_name(source: str | Path, model: Qwen2) -> str:
    """What its episodes are signed with: where it was loaded from, and which weights these were."""
    return f"{source}@{pretrained.fingerprint(model.state_dict())[:12]}"
