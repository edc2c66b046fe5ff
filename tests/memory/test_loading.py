"""Chapter 34: what is opened is what was asked for, and what cannot be is refused before it is loaded."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import tiny
import torch

from minidpo.config import LoopCommand
from minidpo.learning.plan_loop import plan_loop
from minidpo.memory import loading, lora, quantised
from minidpo.memory.lora import LoRAConfig
from minidpo.memory.machine import Machine, device_of
from minidpo.memory.nf4 import NF4Linear
from minidpo.memory.packing import pack
from minidpo.model import checkpoint
from minidpo.system.tensors import fingerprint

HERE = Machine(device="cpu", dtype="float32")
NF4 = replace(HERE, quantize="nf4")
IDS = torch.tensor([[5, 9, 200, 31, 7]])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(tiny.checkpoint(tmp_path_factory.mktemp("opening") / "base"))


def with_adapter(base, machine, folder):
    """A model with an adapter that does something, and the adapter's folder."""
    model = loading.open_model(base, machine)
    made_for = fingerprint(model.state_dict())
    lora.attach(model, LoRAConfig(rank=4), torch.Generator().manual_seed(8))
    with torch.no_grad():
        for layer in lora.layers(model).values():
            layer.lora_B.normal_(0, 0.02, generator=torch.Generator().manual_seed(9))
    lora.save(model, folder, base, made_for)
    return model


def test_a_policy_to_act_with_is_the_trained_one_without_a_trace_of_lora(base, tmp_path):
    trained = with_adapter(base, HERE, tmp_path)
    acting, _ = loading.open_policy(base, tmp_path, HERE)
    torch.testing.assert_close(acting(IDS), trained(IDS))
    assert not lora.layers(acting) and not acting.training
    assert not any(parameter.requires_grad for parameter in acting.parameters())


def test_a_four_bit_policy_on_a_cpu_in_fp32_is_written_out_merged_and_packed(base, tmp_path):
    trained = with_adapter(base, NF4, tmp_path)
    acting, _ = loading.open_policy(base, tmp_path, NF4)
    assert not quantised.is_quantised(acting) and not lora.layers(acting)
    torch.testing.assert_close(acting(IDS), trained(IDS))
    torch.testing.assert_close(pack(acting)(IDS), trained(IDS), rtol=1e-4, atol=1e-4)


def test_a_four_bit_policy_in_bf16_stays_in_four_bits_with_its_adapter_beside(base, tmp_path):
    machine = replace(NF4, dtype="bfloat16")
    trained = with_adapter(base, machine, tmp_path)
    acting, _ = loading.open_policy(base, tmp_path, machine)
    assert quantised.is_quantised(acting) and lora.layers(acting) and pack(acting) is acting
    assert torch.equal(acting(IDS), trained(IDS))
    assert any(type(module) is NF4Linear for module in acting.modules())


def test_weights_that_would_be_written_out_are_counted_in_full(base):
    """The tiny base has 29,000 weights: 114 KiB in full; in four and eight bits, an adapter beside, 80."""
    narrow = replace(NF4, memory_gib=95 / 2**20)
    with pytest.raises(ValueError, match="weights alone take .* with --machine.dtype bfloat16"):
        loading.open_policy(base, None, narrow)
    assert loading.check_weights(base, replace(narrow, dtype="bfloat16")) is False


def test_a_plan_counts_agents_on_a_cpu_in_fp32_with_their_weights_in_full(base):
    setup = loading.Setup(loading.shape_of(base), LoRAConfig(), NF4, "adamw", torch.float32, False)
    assert loading.acting_setup(setup).machine.quantize is None
    assert loading.acting_setup(setup._replace(dtype=torch.bfloat16)).machine.quantize == "nf4"


def test_weights_that_alone_are_too_much_are_not_loaded(base, monkeypatch):
    monkeypatch.setattr(loading, "open_model", lambda *_: pytest.fail("loaded the model"))
    with pytest.raises(ValueError, match="weights alone take 0 MiB, but there are 0: use --machine.quantize"):
        loading.open_policy(base, None, replace(HERE, memory_gib=1e-6))


@pytest.mark.parametrize("device, says", [("gpu", "device 'gpu' is none"), ("cuda", "sees no GPU"),
                                          ("meta", "device 'meta' is not supported")])
def test_a_device_that_is_not_there_is_refused(device, says, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=says):
        loading.device_and_dtype(Machine(device=device))
    assert loading.device_and_dtype(Machine()) == (torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("name, index", [("cuda", 3), ("cuda:1", 1)])
def test_a_gpu_is_held_to_its_share_whether_or_not_it_has_a_number(name, index, monkeypatch):
    """CUDA itself stands in: of 8 GiB, 4 less the driver's part, on GPU 3 where that is the current one."""
    told = []
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda device: SimpleNamespace(total_memory=8 * loading.GIB))
    monkeypatch.setattr(torch._C, "_cuda_setMemoryFraction", lambda *call: told.append(call), raising=False)
    loading.hold_to(Machine(device=name, memory_gib=4), torch.device(name))
    assert told == [(0.5 - loading.CONTEXT / loading.GIB / 8, index)]


def test_a_gpu_without_bf16_is_told_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    with pytest.raises(ValueError, match="does not compute in bfloat16.* --machine.dtype float32"):
        loading.device_and_dtype(Machine(device="cuda"))
    assert loading.device_and_dtype(Machine(device="cuda", dtype="float32"))[1] == torch.float32


def test_offload_on_a_cpu_is_refused_and_so_are_options_that_would_do_nothing():
    with pytest.raises(ValueError, match="from a GPU to the host, but this runs on a CPU"):
        loading.device_and_dtype(replace(HERE, recompute=True, offload=True))
    with pytest.raises(ValueError, match="set recompute as well"):
        Machine(offload=True)
    with pytest.raises(ValueError, match="quantize is not set"):
        Machine(cache="somewhere")
    with pytest.raises(ValueError, match="memory_gib must be finite and greater than 0"):
        Machine(memory_gib=0.0)


def test_the_memory_limit_is_what_was_said_or_what_is_there(monkeypatch):
    assert loading.memory_limit(replace(HERE, memory_gib=2.5), cuda=False) == 2.5 * 2**30
    assert loading.memory_limit(HERE, cuda=False) > 2**28
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no GPU here .* give --machine.memory-gib"):
        loading.memory_limit(Machine(device="cuda"), cuda=True)


def test_a_missing_tokenizer_is_found_before_the_weights_are_read(base, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "open_model", lambda *_: pytest.fail("loaded the model"))
    with pytest.raises(ValueError, match="tokenizer.json"):
        loading.open_base(str(tmp_path), HERE)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path):
    folder = tiny.checkpoint(tmp_path / "base")
    checkpoint.save(tiny.model(vocab=300), folder)
    with pytest.raises(ValueError, match="tokenizer.json has .* tokens, but vocab_size .* is 300"):
        loading.open_chat(str(folder))


@pytest.mark.parametrize("machine, says", [
    ({"device": "gpu"}, "'gpu' is none"), ({"device": ""}, "'' is none"),
    ({"device": "meta"}, "not supported"), ({"offload": True, "recompute": True}, "runs on a CPU")])
def test_a_plan_refuses_what_the_training_would_refuse(machine, says):
    with pytest.raises(ValueError, match=says):
        plan_loop(LoopCommand(machine=Machine(**{"device": "cpu", **machine})))


def test_a_gpu_beyond_the_last_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="'cuda:2' is not there: GPUs count from 0, and there are 2"):
        device_of(Machine(device="cuda:2"))
    assert device_of(Machine(device="cuda:1")).index == 1
