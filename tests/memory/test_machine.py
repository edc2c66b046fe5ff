"""The machine: what cannot run here is refused, and a run gets the memory that it was promised."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from minidpo.memory.machine import (
    CUDA_CONTEXT,
    GIB,
    Machine,
    container_free,
    device_and_dtype,
    limit_allocator,
    memory_limit,
)

HERE = Machine(device="cpu", dtype="float32")


@pytest.mark.parametrize(
    "device, says",
    [
        ("gpu", "device 'gpu' is not supported"),
        ("cuda", "sees no GPU"),
        ("meta", "device 'meta' is not supported"),
        ("cpu:0", "'cpu:0' is not supported"),
        ("cuda:128", "use cpu, cuda or cuda:N"),
    ],
)
def test_a_device_that_is_not_there_is_refused(device, says, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=says):
        device_and_dtype(Machine(device=device))
    assert device_and_dtype(Machine()) == (torch.device("cpu"), torch.float32)


def test_offload_on_a_cpu_is_refused_and_so_are_options_that_would_do_nothing():
    with pytest.raises(ValueError, match="from a GPU to the host, but this runs on a CPU"):
        device_and_dtype(replace(HERE, recompute=True, offload=True))
    with pytest.raises(ValueError, match="set recompute as well"):
        Machine(offload=True)
    with pytest.raises(ValueError, match="quantize is not set"):
        Machine(cache="somewhere")
    with pytest.raises(ValueError, match="memory_gib must be finite and greater than 0"):
        Machine(memory_gib=0.0)


def test_a_container_leaves_its_limit_less_what_is_used_but_files(tmp_path):
    assert container_free(tmp_path) == math.inf
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 400\nfile 300\ninactive_file 200\nactive_file 90\n")
    assert container_free(tmp_path) == math.inf
    (tmp_path / "memory.max").write_text("1000\n")
    assert container_free(tmp_path) == 1000 - 700 + 290


def test_the_memory_limit_is_what_was_said_or_what_is_there(monkeypatch):
    assert memory_limit(replace(HERE, memory_gib=2.5), cuda=False) == 2.5 * 2**30
    assert memory_limit(HERE, cuda=False) > 2**28
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no GPU here .* give --machine.memory-gib"):
        memory_limit(Machine(device="cuda"), cuda=True)


@pytest.mark.parametrize("name, index", [("cuda", 3), ("cuda:1", 1)])
def test_a_gpu_is_held_to_its_share_whether_or_not_it_has_a_number(name, index, monkeypatch):
    """With CUDA replaced: 4 of 8 GiB less the driver's part, on GPU 1, or on the current one, GPU 3."""
    calls = []
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=8 * GIB)
    )
    monkeypatch.setattr(
        torch._C, "_cuda_setMemoryFraction", lambda *call: calls.append(call), raising=False
    )
    limit_allocator(Machine(device=name, memory_gib=4), torch.device(name))
    assert calls == [(0.5 - CUDA_CONTEXT / GIB / 8, index)]
