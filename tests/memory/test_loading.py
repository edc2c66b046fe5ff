"""A model is opened as asked for, and what cannot be opened is refused before its weights are read."""

import json
import shutil
from dataclasses import replace

import pytest
import tiny
import torch

from minidpo.config import LoopCommand
from minidpo.learning.plan_loop import plan_loop
from minidpo.learning.reference import identity
from minidpo.memory import loading, lora
from minidpo.memory import machine as machines
from minidpo.memory.frozen import FrozenLinear
from minidpo.memory.lora import LoRAConfig
from minidpo.memory.machine import Machine
from minidpo.memory.packing import pack
from minidpo.memory.plan import sft_load
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
    with pytest.raises(
        ValueError, match="made for another base"
    ):  # what is asked for is not changed
        loading.open_policy(base, tmp_path, other)
    assert loading.as_trained(auto, None) == auto


def test_a_dtype_that_no_option_offers_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(lora, "base_dtype", lambda folder: "float64")
    assert loading.as_trained(Machine(), tmp_path) == Machine()


@pytest.mark.parametrize("has_instructions", [True, False])
def test_a_plan_counts_the_adapter_that_a_loop_starts_from_in_its_dtype_and_no_sft(
    base, tmp_path, capsys, monkeypatch, has_instructions
):
    monkeypatch.setattr(machines, "multiplies_bfloat16", lambda: has_instructions)
    with_adapter(base, replace(HERE, dtype="bfloat16"), tmp_path)
    assert set(plan_loop(LoopCommand(base, adapter=tmp_path, machine=Machine(device="cpu")))) == {
        "DPO",
        "explore",
    }
    dtype = "bfloat16" if has_instructions else "float32"
    assert f"{dtype} on a CPU, LoRA of rank 4" in capsys.readouterr().out
    planned = loading.to_compute(Machine(device="cpu", memory_gib=0.01), tmp_path)
    assert planned.dtype == ("bfloat16" if has_instructions else "rounded")
    with pytest.raises(
        ValueError, match="a training step would take .* saves"
    ):  # as far as it can be said
        loading.open_to_train(base, planned, LoRAConfig(rank=4), "adamw", sft_load)


@pytest.mark.parametrize("has_instructions", [True, False])
def test_one_line_says_that_a_processor_is_slow_in_bfloat16(
    base, monkeypatch, capsys, has_instructions
):
    monkeypatch.setattr(machines, "multiplies_bfloat16", lambda: has_instructions)
    machines.print_if_slow.cache_clear()
    loading.open_policy(base, None, HERE)
    assert capsys.readouterr().out == ""
    for _ in range(2):
        loading.open_policy(base, None, replace(HERE, act_dtype="bfloat16"))
        loading.open_to_train(
            base, replace(HERE, dtype="bfloat16"), LoRAConfig(), "adamw", sft_load
        )
    said = capsys.readouterr().out.splitlines()
    assert ["act-dtype float32" in line for line in said] == (
        [] if has_instructions else [True, False]
    )
    assert all("this processor has no instructions for bfloat16" in line for line in said)


@pytest.mark.parametrize("has_instructions", [True, False])
def test_beside_bfloat16_a_processor_without_it_acts_in_float32_unless_asked(
    base, tmp_path, monkeypatch, has_instructions
):
    monkeypatch.setattr(machines, "multiplies_bfloat16", lambda: has_instructions)
    with_adapter(base, replace(HERE, dtype="bfloat16"), tmp_path)
    auto = Machine(device="cpu")
    model, _, mark = loading.open_policy(base, tmp_path, auto)
    plain = loading.open_policy(base, tmp_path, replace(auto, dtype="bfloat16"))
    exact = loading.open_policy(
        base, tmp_path, replace(auto, dtype="bfloat16", act_dtype="float32")
    )
    assert mark == (plain if has_instructions else exact)[2]
    assert plain[2] != exact[2]
    assert torch.equal(model.head_weight, (plain if has_instructions else exact)[0].head_weight)
    asked = replace(auto, act_dtype="bfloat16")
    head = loading.open_policy(base, tmp_path, asked)[0].head_weight
    assert head.dtype == torch.bfloat16 and torch.equal(head, plain[0].head_weight)
    assert loading.to_compute(replace(auto, device="cuda"), tmp_path).dtype == "bfloat16"


@pytest.mark.parametrize("has_instructions", [True, False])
def test_an_adapter_of_bfloat16_learns_on_any_processor_and_stays_one(
    base, tmp_path, monkeypatch, has_instructions
):
    monkeypatch.setattr(machines, "multiplies_bfloat16", lambda: has_instructions)
    with_adapter(base, replace(HERE, dtype="bfloat16"), tmp_path / "first")
    machine = loading.to_compute(Machine(device="cpu"), tmp_path / "first")
    model, _, made_for = loading.open_to_train(base, machine, LoRAConfig(rank=4), "adamw", sft_load)
    lora.load(model, tmp_path / "first", made_for)
    assert model.head_weight.dtype == (torch.bfloat16 if has_instructions else torch.float32)
    halved = loading.open_model(base, replace(HERE, dtype="bfloat16"))
    assert torch.equal(model.head_weight.float(), halved.head_weight.float())
    assert model(IDS).dtype == model.head_weight.dtype
    lora.save(model, tmp_path / "next", base, made_for)
    lora.switch_adapter(model, tmp_path / "next")  # without the fingerprint it is found again
    half = loading.open_model(base, replace(HERE, dtype="bfloat16"))
    lora.load(half, tmp_path / "next")
    same = identity(half, made_for, LoRAConfig()) == identity(model, made_for, LoRAConfig())
    assert same == has_instructions  # scores that one has computed are not the other's
    for machine in (replace(HERE, dtype="bfloat16"), replace(HERE, dtype="rounded")):
        lora.load(loading.open_model(base, machine), tmp_path / "next")
    with pytest.raises(ValueError, match="made for another base"):
        lora.load(loading.open_model(base, HERE), tmp_path / "next")
    assert lora.base_dtype(tmp_path / "next") == "bfloat16"


def test_a_base_in_few_bits_is_not_rounded():
    with pytest.raises(
        ValueError, match="rounded is of a full base, but quantize is nf4: use float32"
    ):
        replace(NF4, dtype="rounded")


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
    monkeypatch.setattr(
        loading, "merge", lambda model, dtype: None
    )  # as if another processor had merged
    assert loading.open_policy(base, tmp_path / "copy", HERE)[2] == mark


def test_a_four_bit_policy_on_a_cpu_in_fp32_is_written_out_merged_and_packed(base, tmp_path):
    trained = with_adapter(base, NF4, tmp_path)
    acting, *_ = loading.open_policy(base, tmp_path, NF4)
    assert not tiny.is_quantised(acting) and not lora.layers(acting)
    torch.testing.assert_close(acting(IDS), trained(IDS))
    torch.testing.assert_close(pack(acting)(IDS), trained(IDS), rtol=1e-4, atol=1e-4)


def test_a_four_bit_policy_in_bf16_stays_in_four_bits_with_its_adapter_beside(base, tmp_path):
    machine = replace(NF4, dtype="bfloat16")
    trained = with_adapter(base, machine, tmp_path)
    acting, *_ = loading.open_policy(base, tmp_path, machine)
    assert tiny.is_quantised(acting) and lora.layers(acting) and pack(acting) is acting
    assert torch.equal(acting(IDS), trained(IDS))
    assert any(type(module) is FrozenLinear for module in acting.modules())


def test_weights_that_would_be_written_out_are_counted_in_full(base):
    """The tiny base has 29,000 weights: 114 KiB in full; in four and eight bits, an adapter beside, 80."""
    narrow = replace(NF4, memory_gib=95 / 2**20)
    with pytest.raises(ValueError, match="weights alone take .* with --machine.dtype bfloat16"):
        loading.open_policy(base, None, narrow)
    acting, *_ = loading.open_policy(base, None, replace(narrow, dtype="bfloat16"))
    assert tiny.is_quantised(acting)


def test_weights_that_alone_are_too_much_are_not_loaded(base, monkeypatch):
    monkeypatch.setattr(loading, "open_model", lambda *_: pytest.fail("loaded the model"))
    with pytest.raises(
        ValueError, match="weights alone take 0 MiB, but there are 0: use --machine.quantize"
    ):
        loading.open_policy(base, None, replace(HERE, memory_gib=1e-6))


def test_a_missing_tokenizer_is_found_before_the_weights_are_read(base, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "open_model", lambda *_: pytest.fail("loaded the model"))
    with pytest.raises(ValueError, match="tokenizer.json"):
        loading.open_base(str(tmp_path), HERE)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path):
    folder = tiny.checkpoint(tmp_path / "base")
    checkpoint.save(tiny.model(vocab=300), folder)
    with pytest.raises(
        ValueError, match="tokenizer.json has tokens up to .*, but vocab_size .* is 300"
    ):
        loading.open_chat(str(folder))
