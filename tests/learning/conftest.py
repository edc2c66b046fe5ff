"""What the learners of these tests begin with."""

from types import SimpleNamespace

import pytest
import tiny
import torch

import envs
from minidpo.memory import loading, lora
from minidpo.memory.context import Context
from minidpo.memory.lora import LoRAConfig
from minidpo.memory.machine import Machine


@pytest.fixture(scope="session")
def agent(tmp_path_factory):
    """A base in a context, and an adapter of it that does something. Tests write elsewhere."""
    folder = tmp_path_factory.mktemp("agent")
    base = str(tiny.checkpoint(folder / "base"))
    context = Context(base, envs.world("toy"), machine=Machine(device="cpu", dtype="float32"))
    model, _ = loading.open_base(base, context.machine)
    lora.attach(model, LoRAConfig(rank=4), torch.Generator().manual_seed(8))
    with torch.no_grad():
        for layer in lora.layers(model).values():
            layer.lora_B.normal_(0, 0.02, generator=torch.Generator().manual_seed(9))
    lora.save(model, folder / "adapter", "base")
    return SimpleNamespace(context=context, adapter=folder / "adapter")
