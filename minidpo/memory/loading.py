"""34. Opening: where to run, in what dtype, whether it will fit, and then the model.

In this order, because a wrong device, a missing tokenizer or too little memory is better said before the
weights are read than after. Next: 35 preference.
"""

import ctypes
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from minidpo.memory import lora
from minidpo.memory.lora import LoRAConfig
from minidpo.memory.machine import Machine, device_and_dtype
from minidpo.memory.plan import (
    CONTEXT,
    GIB,
    MIB,
    Load,
    Setup,
    acting_plan,
    memory_now,
    require,
    skeleton,
    weights_of,
)
from minidpo.memory.quantised import expand, load_quantised
from minidpo.memory.recompute import switch
from minidpo.model import checkpoint
from minidpo.model.chat import Chat
from minidpo.model.decoder import Qwen2, Qwen2Config
from minidpo.system.tensors import fingerprint

# The published shapes, so that a plan needs neither the network nor the weights.
PUBLISHED = {f"Qwen/Qwen2-{size}{kind}": Qwen2Config(*shape, tie_word_embeddings=tied)
             for size, shape, tied in [("0.5B", (151_936, 896, 4864, 24, 14, 2), True),
                                       ("1.5B", (151_936, 1536, 8960, 28, 12, 2), True),
                                       ("7B", (152_064, 3584, 18_944, 28, 28, 4), False)]
             for kind in ("", "-Instruct")}


def shape_of(source: str | Path) -> Qwen2Config:
    """A model's shape, without its weights: from its folder, as published, or from the hub."""
    if str(source) in PUBLISHED and not Path(source).is_dir():
        return PUBLISHED[str(source)]
    return checkpoint.read_config(checkpoint.locate(source, ["config.json"]))[0]


def memory_limit(machine: Machine, cuda: bool) -> float:
    """The bytes that a run may take: as told, or what the GPU or this machine has."""
    if machine.memory_gib is not None:
        return machine.memory_gib * GIB
    if not cuda:
        free = Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's processes share the machine
        return 1024 * int(free) / ranks + memory_now()
    if not torch.cuda.is_available():
        raise ValueError("there is no GPU here that could be asked for its memory: give --machine.memory-gib")
    device = torch.device(machine.device.replace("auto", "cuda"))
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) + CONTEXT


def check_memory(source: str, adapter: LoRAConfig, machine: Machine, optimizer: str,
                 load_of: Callable[[Machine], Load]) -> None:
    """Refuse, before the weights are loaded, what will not fit."""
    setup = setup_of(source, machine, adapter, optimizer)
    require(setup, load_of, memory_limit(machine, setup.cuda))


def setup_of(source: str, machine: Machine, adapter: LoRAConfig = LoRAConfig(),
             optimizer: str = "adamw") -> Setup:
    """What a plan has to know of a run, without the weights."""
    device, dtype = device_and_dtype(machine)
    return Setup(shape_of(source), adapter, machine, optimizer, dtype, device.type == "cuda")


def require_weights(setup: Setup, what: str, way_out: str) -> None:
    """Refuse, before they are loaded, weights that alone are too much."""
    needed, limit = sum(weights_of(skeleton(setup)).values()), memory_limit(setup.machine, setup.cuda)
    if needed > limit:
        raise ValueError(f"{what} {needed / MIB:,.0f} MiB, but there are {limit / MIB:,.0f}: {way_out}")


def acting_setup(setup: Setup) -> Setup:
    """The same to act. For fp32 on a CPU quantised weights are written out: chapter 13 has them in full."""
    if setup.cuda or setup.dtype != torch.float32:
        return setup
    return setup._replace(machine=replace(setup.machine, cache=None, quantize=None))


def acting_verdict(setup: Setup, tokens: int, limit: float) -> str:
    """A line that says whether as many agents as pages fit into `limit` bytes, and how many would."""
    def needed(pages: int) -> float:
        return acting_plan(setup._replace(machine=replace(setup.machine, pages=pages)), tokens).peak

    pages = setup.machine.page_count()
    left = limit - needed(pages)
    if left >= 0:
        return f"exploring fits into {limit / MIB:,.0f} MiB, {left / MIB:,.0f} are left"
    fewer = next((f"--machine.pages {n} fits" for n in range(pages - 1, 0, -1) if needed(n) <= limit),
                 "take a smaller model or shorter episodes")
    return f"exploring does not fit into {limit / MIB:,.0f} MiB, {-left / MIB:,.0f} too many: {fewer}"


def check_weights(source: str, machine: Machine) -> bool:
    """Refuse weights that alone are too much; whether they will act in full."""
    setup = acting_setup(setup_of(source, machine))
    require_weights(setup, "the weights alone take",
                    "use --machine.quantize nf4 with --machine.dtype bfloat16, or a smaller model")
    return setup.machine.quantize is None


def open_chat(source: str) -> tuple[Chat, int]:
    """A model's chat, and how many tokens the model reads: all that is needed to see what data mean to it."""
    folder = checkpoint.locate(source)
    chat, (config, _) = Chat.load(folder), checkpoint.read_config(folder)
    if (tokens := chat.tokenizer.get_vocab_size()) > config.vocab_size:
        raise ValueError(f"{folder}: tokenizer.json has {tokens} tokens, but vocab_size in config.json is "
                         f"{config.vocab_size}: they are of two models")
    return chat, config.max_position_embeddings


def open_model(source: str, machine: Machine) -> Qwen2:
    """The base model."""
    device, dtype = device_and_dtype(machine)
    if machine.memory_gib is not None:
        hold_to(machine, device)
    if machine.quantize:
        model = load_quantised(source, dtype, device, machine.cache)
    else:
        model = checkpoint.load(source, dtype, device)
    switch(model, machine.recompute, machine.offload)
    return model


def hold_to(machine: Machine, device: torch.device) -> None:
    """Keep the allocator within `memory_gib` less the driver's part (CUDA), or near what is alive (glibc)."""
    if device.type == "cuda":
        share = (machine.memory_gib * GIB - CONTEXT) / torch.cuda.get_device_properties(device).total_memory
        here = None if device.index is None else device  # which is refused without a number
        torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, share)), here)
    elif hasattr(libc := ctypes.CDLL(None), "mallopt"):
        # From here on a tensor gets pages of its own, which go back when it dies. Left alone, glibc raises
        # this limit as it goes, to 32 MiB, and keeps the dead in a heap with holes (40 %, docs/log.md).
        libc.mallopt(-3, 2**17)  # M_MMAP_THRESHOLD


def open_base(source: str, machine: Machine) -> tuple[Qwen2, Chat]:
    """Base model and its chat."""
    chat, _ = open_chat(source)  # before the weights: a missing tokenizer is found at once
    return open_model(source, machine), chat


def open_policy(source: str, adapter: Path | None, machine: Machine) -> tuple[Qwen2, Chat]:
    """A policy that is to act: base and adapter, merged unless the base is to stay in four bits.

    In bfloat16 a merged weight is rounded again, and what an adapter changed by less than half a step is lost
    (docs/log.md, 2026-11-22): the price of products without LoRA in each step of sampling.
    """
    in_full = check_weights(source, machine)
    model, chat = open_base(source, machine)
    if adapter is not None:
        lora.load(model, adapter)
    if in_full:
        expand(model)
        lora.merge(model)
    return model.requires_grad_(False).eval(), chat


def policy_name(source: str | Path, model: Qwen2) -> str:
    """What its episodes are signed with: where it was loaded from, and which weights these were."""
    return f"{source}@{fingerprint(model.state_dict())[:12]}"
