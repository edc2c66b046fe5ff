"""A model is opened as asked for, and what cannot be opened is refused before its weights are read."""

import json
import shutil
from dataclasses import replace

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_lora import trained as with_effect

from minidpo.memory import loading, lora
from minidpo.memory import machine as machines
from minidpo.memory.frozen import FrozenLinear
from minidpo.memory.machine import Machine
from minidpo.memory.packing import pack
from minidpo.model import checkpoint
from minidpo.model.chat import CHATML
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
    lora.save(with_effect(model), folder, base, made_for)
    return model


def test_a_policy_to_act_with_is_the_trained_one_without_a_trace_of_lora(base, tmp_path):
    trained = with_adapter(base, HERE, tmp_path)
    acting, *_ = loading.open_policy(base, tmp_path, HERE)
    torch.testing.assert_close(acting(IDS), trained(IDS))
    assert not lora.layers(acting) and not acting.training
    assert not any(parameter.requires_grad for parameter in acting.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_a_dtype_an_adapter_is_opened_in_that_of_its_training(
    base, tmp_path, monkeypatch, dtype
):
    monkeypatch.setattr(machines, "multiplies_bfloat16", lambda: True)
    with_adapter(base, replace(HERE, dtype=dtype), tmp_path)
    auto = Machine(device="cpu")
    assert loading.as_trained(auto, tmp_path).dtype == dtype == lora.base_dtype(tmp_path)
    asked, named = (
        loading.open_policy(base, tmp_path, machine)[0]
        for machine in (auto, Machine(device="cpu", dtype=dtype))
    )
    assert torch.equal(asked(IDS), named(IDS))
    other = replace(auto, dtype={"float32": "bfloat16", "bfloat16": "float32"}[dtype])
    # what is asked for is not changed
    with pytest.raises(ValueError, match="made for another base"):
        loading.open_policy(base, tmp_path, other)
    assert loading.as_trained(auto, None) == auto


@pytest.mark.parametrize("has_instructions", [True, False])
def test_fast_is_bfloat16_where_it_is_faster_and_what_an_adapter_was_trained_beside(
    base, tmp_path, monkeypatch, has_instructions
):
    monkeypatch.setattr(machines, "multiplies_bfloat16", lambda: has_instructions)
    fast = Machine(device="cpu", dtype="fast")
    assert loading.open_model(base, fast).head_weight.dtype == (
        torch.bfloat16 if has_instructions else torch.float32
    )
    assert machines.dtype_on(fast, cuda=True) == torch.bfloat16
    with_adapter(base, HERE, tmp_path)
    assert loading.as_trained(fast, tmp_path).dtype == "float32"


def test_a_fingerprint_is_of_what_was_read_and_not_of_the_last_bits_of_a_merge(
    base, tmp_path, monkeypatch
):
    with_adapter(base, HERE, tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    shutil.copytree(tmp_path / "one", tmp_path / "stronger")
    config = json.loads((tmp_path / "one" / lora.CONFIG).read_text())
    (tmp_path / "stronger" / lora.CONFIG).write_text(json.dumps({**config, "lora_alpha": 64}))
    mark = loading.open_policy(base, tmp_path / "one", HERE)[2]
    others = [
        loading.open_policy(base, None, HERE),
        loading.open_policy(base, tmp_path / "stronger", HERE),
        loading.open_policy(base, tmp_path / "one", replace(HERE, act_dtype="bfloat16")),
    ]
    assert len({mark, *(other[2] for other in others)}) == 4
    shutil.copytree(base, tmp_path / "template")
    (tmp_path / "template" / "chat_template.jinja").write_text(CHATML.replace("helpful", "small"))
    other = loading.open_policy(str(tmp_path / "template"), tmp_path / "one", HERE)[2]
    assert other != mark and other.partition("-")[0] == mark.partition("-")[0]
    # as if another processor had merged
    monkeypatch.setattr(loading, "merge", lambda *_: None)
    assert loading.open_policy(base, tmp_path / "copy", HERE)[2] == mark


def test_a_four_bit_policy_on_a_cpu_in_fp32_is_written_out_merged_and_packed(base, tmp_path):
    trained = with_adapter(base, NF4, tmp_path)
    acting, *_ = loading.open_policy(base, tmp_path, NF4)
    assert not tiny.is_quantised(acting) and not lora.layers(acting)
    torch.testing.assert_close(acting(IDS), trained(IDS), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(pack(acting)(IDS), trained(IDS), rtol=1e-4, atol=1e-4)


def test_a_four_bit_policy_in_bf16_stays_in_four_bits_with_its_adapter_beside(base, tmp_path):
    machine = replace(NF4, dtype="bfloat16")
    trained = with_adapter(base, machine, tmp_path)
    acting, *_ = loading.open_policy(base, tmp_path, machine)
    assert tiny.is_quantised(acting) and lora.layers(acting) and pack(acting) is acting
    assert torch.equal(acting(IDS), trained(IDS))
    assert any(type(module) is FrozenLinear for module in acting.modules())


def test_weights_that_alone_are_too_much_are_not_loaded(base, monkeypatch):
    monkeypatch.setattr(loading, "open_model", lambda *_: pytest.fail("loaded the model"))
    with pytest.raises(ValueError, match="--machine.quantize"):
        loading.open_policy(base, None, replace(HERE, memory_gib=1e-6))


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path):
    folder = tiny.checkpoint(tmp_path / "base")
    checkpoint.save(tiny.model(vocab=300), folder)
    with pytest.raises(ValueError, match="tokenizer.json has tokens .* 300"):
        loading.open_chat(str(folder))


def test_an_adapter_with_a_number_that_is_not_finite_is_refused_before_its_base_is_read(
    base, tmp_path, monkeypatch
):
    with_adapter(base, HERE, tmp_path)
    tensors = load_file(tmp_path / lora.WEIGHTS)
    name = max(tensors)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, tmp_path / lora.WEIGHTS)
    monkeypatch.setattr(loading, "open_model", lambda *_: pytest.fail("read the base"))
    with pytest.raises(ValueError, match=f"{lora.WEIGHTS}: tensor {name} "):
        loading.open_policy(base, tmp_path, HERE)


def test_a_merge_that_overflows_is_refused_by_adapter_and_tensor(base, tmp_path):
    model = loading.open_model(base, HERE)
    lora.attach(model, lora.LoRAConfig(rank=1, targets=("up_proj",)), torch.Generator())
    for weight in lora.parameters(model):
        weight.data.fill_(1e20)  # each finite, their product is not
    lora.save(model, tmp_path, base)
    with pytest.raises(ValueError, match=f"{tmp_path}: tensor .*up_proj.weight .*not finite"):
        loading.open_policy(base, tmp_path, HERE)
