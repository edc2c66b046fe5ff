"""Loading a model: its chat, the base in its dtype on its device, base and adapter as a policy that acts.

A wrong device, a missing tokenizer and too little memory are found before the weights are read.
"""

import functools
import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from minidpo.memory import lora, recompute
from minidpo.memory.advice import require_step, require_weights
from minidpo.memory.int8 import to_int8
from minidpo.memory.machine import (
    Machine,
    device_and_dtype,
    device_of,
    dtype_on,
    is_slow,
    limit_allocator,
)
from minidpo.memory.plan import Load, acting_in, acting_setup, setup_of
from minidpo.memory.quantised import expand, load_quantised, tensor_formats
from minidpo.model import checkpoint
from minidpo.model.chat import Chat
from minidpo.model.decoder import Transformer
from minidpo.system import processes
from minidpo.system.tensors import fingerprint, require_finite


def open_chat(source: str) -> tuple[Chat, int]:
    """A model's chat, and the most tokens that the model reads."""
    folder = checkpoint.locate(source)
    chat, (config, _) = Chat.load(folder), checkpoint.read_config(folder)
    if (last := max(chat.tokenizer.get_vocab().values())) >= config.vocab_size:
        raise ValueError(
            f"{folder}: tokenizer.json has tokens up to {last}, but vocab_size in config.json "
            f"is {config.vocab_size}: the two files belong to different models"
        )
    chat.vocab_size = config.vocab_size
    _tell(str(folder), tuple(chat.template.not_followed()))
    return chat, config.max_position_embeddings


@functools.cache
def _tell(folder: str, not_followed: tuple[str, ...]) -> None:
    """Say once what a model's chat template does that is not done here."""
    if not_followed:
        print(f"{folder}: its chat template is not followed in all: {'; '.join(not_followed)}")


def open_model(source: str, machine: Machine) -> Transformer:
    """The base model as the machine's options ask for it."""
    device, dtype = device_and_dtype(machine)
    if device.index is not None:  # kernels and graphs that are made by hand run on the current GPU
        torch.cuda.set_device(device)
    if machine.memory_gib is not None:
        limit_allocator(machine, device)
    if machine.quantize:
        formats = tensor_formats(checkpoint.locate(source)) if machine.quantize == "keep" else None
        model = load_quantised(source, dtype, device, machine.cache, formats)
    elif machine.dtype == "rounded":
        model = checkpoint.load(source, torch.bfloat16, device).to(dtype)
        model.read_in = torch.bfloat16
    else:
        model = checkpoint.load(source, dtype, device)
    recompute.switch(model, machine.recompute, machine.offload)
    return model


def open_to_train(
    source: str,
    machine: Machine,
    shape: lora.LoRAConfig,
    optimizer: str,
    load_of: Callable[[Machine], Load],
) -> tuple[Transformer, Machine, str]:
    """The base model, the machine with micro-batches that fit beside it (`require_step`), and the base's
    fingerprint. Raises ValueError, before weights are read, if a step does not fit."""
    processes.require_own_gpu(device_of(machine))
    setup = setup_of(source, machine, shape, optimizer)
    machine = require_step(setup, load_of)
    model = open_model(source, machine)
    return model, machine, lora.fingerprint_of_base(model)


def as_trained(machine: Machine, *adapters: Path | None) -> Machine:
    """The machine, whose dtype, if it is auto or fast, becomes that of the base that the adapters were
    trained beside (the first that says so): beside another base `lora.load` refuses it."""
    if machine.dtype not in ("auto", "fast") or machine.quantize:
        return machine
    for recorded in map(lora.base_dtype, filter(None, adapters)):
        if recorded in ("float32", "bfloat16"):
            return replace(machine, dtype=recorded)
    return machine


def to_compute(machine: Machine, *adapters: Path | None) -> Machine:
    """The machine `as_trained`; where the adapters' bfloat16 is slow, and nobody asked for it, the base has
    its weights, and computes in float32. Raises ValueError for an adapter that `lora.load` would refuse
    whatever its base, before that is read."""
    for adapter in filter(None, adapters):
        lora.read_weights(adapter)
    found = as_trained(machine, *adapters)
    slow = found != machine and is_slow(device_of(found), dtype_on(found, cuda=False))
    return replace(found, dtype="rounded") if slow else found


def open_base(source: str, machine: Machine) -> tuple[Transformer, Chat]:
    """The base model and its chat."""
    chat, _ = open_chat(source)  # before the weights: a missing tokenizer is found at once
    return open_model(source, machine), chat


def open_policy(
    source: str, adapter: Path | None, machine: Machine
) -> tuple[Transformer, Chat, str]:
    """A policy to act with, merged unless the base is or stays quantised; its chat; and its fingerprint.

    In bfloat16 a merge loses what an adapter changed by less than half a step (docs/log.md, 2026-11-22); with
    `act_dtype` float32 nothing is lost. The fingerprint, WEIGHTS-CHAT, is of all weights that were read and the
    dtype, and of the tokenizer and the chat template. It is not of merged weights, whose last bits depend on
    the processor. Raises ValueError, before weights are read, if they do not fit.
    """
    machine = acting_in(source, to_compute(machine, adapter))
    # merging makes it float32 by itself
    if machine.dtype == "rounded" and device_of(machine).type == "cpu":
        machine = replace(machine, dtype="bfloat16", act_dtype=machine.act_dtype or "float32")
    held = setup_of(source, machine)
    setup = acting_setup(held)
    require_weights(
        setup._replace(dtype=torch.promote_types(setup.dtype, held.dtype)),
        "the weights alone take",
        "use --machine.quantize nf4 with --machine.dtype bfloat16, or a smaller model",
    )
    model, chat = open_base(source, machine)
    if adapter is not None:
        lora.load(model, adapter)
    scales = {layer.scale for layer in lora.layers(model).values()}
    int8 = setup.machine.act_dtype == "int8"
    computes = "int8" if int8 else setup.dtype
    what = f"{fingerprint(model.state_dict())} {model.config} {scales} {computes}"
    weights = hashlib.sha256(what.encode()).hexdigest()[:12]
    if int8:
        to_int8(model)
    elif not setup.machine.quantize:
        merge(model, setup.dtype, adapter or source)
    return model.requires_grad_(False).eval(), chat, f"{weights}-{chat.fingerprint}"


def merge(model: Transformer, dtype: torch.dtype, name: str | Path) -> None:
    """Write the base out in full and add the adapter, in fp32 if `dtype` is: then nothing is rounded away.
    Raises ValueError, with the adapter's name, for a weight that overflows."""
    expand(model)
    if dtype == torch.float32:
        model.float()
    lora.merge(model)
    model.to(dtype)
    for tensor, weight in model.state_dict().items():
        require_finite(name, tensor, weight)
