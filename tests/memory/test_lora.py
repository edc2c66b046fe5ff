"""LoRA: an adapter starts at zero, adds just (α/R) B A, comes off without a trace, and has PEFT's format."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from minidpo.memory import lora
from minidpo.memory.lora import LoRAConfig, LoRALinear, attach, detach
from minidpo.model import checkpoint
from minidpo.model.decoder import ModelConfig, Transformer
from minidpo.system.tensors import fingerprint

seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=settings.default.max_examples // 5)
configs = st.builds(
    LoRAConfig,
    rank=st.integers(1, 6),
    alpha=st.floats(0.5, 64),
    targets=st.sampled_from(
        [
            ("q_proj",),
            ("q_proj", "down_proj"),
            LoRAConfig().targets,
            ("layers.0.mlp.up_proj", "v_proj"),
        ]
    ),
)
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])


def tiny(seed=0, dtype=torch.float64, tied=False, layers=2):
    torch.manual_seed(seed)
    config = ModelConfig(
        vocab_size=11,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return Transformer(config).to(dtype)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def trained(model, config=LoRAConfig(rank=3), seed=0):
    """Attach an adapter whose B is not zero any more."""
    attach(model, config, generator(seed))
    with torch.no_grad():
        for layer in lora.layers(model).values():
            layer.lora_B.normal_(std=0.3, generator=generator(seed + 1))
    return model


def logits(model):
    return model.head(model(IDS)).detach()


# law 17


@given(seeds, configs, st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
@few
def test_a_fresh_adapter_is_bitwise_the_base(seed, config, dtype):
    model = tiny(seed, dtype)
    base = logits(model)
    attach(model, config, generator(seed))
    assert torch.equal(logits(model), base)


@given(seeds, configs)
@few
def test_only_r_times_in_plus_out_numbers_a_map_train(seed, config):
    model = tiny(seed)
    maps = lora.targets(model, config)
    attach(model, config, generator(seed))
    logits_sum = model.head(model(IDS)).logsumexp(-1).sum()
    logits_sum.backward()
    with_gradient = {name for name, weight in model.named_parameters() if weight.grad is not None}
    assert with_gradient == {f"{name}.{part}" for name in maps for part in ("lora_A", "lora_B")}
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert count == sum(config.rank * (m.in_features + m.out_features) for m in maps.values())
    assert [id(p) for p in lora.parameters(model)] == [
        id(p) for p in model.parameters() if p.requires_grad
    ]


# how it starts


def test_a_is_drawn_uniformly_within_one_over_root_in_and_b_is_zero():
    layer = LoRALinear(torch.nn.Linear(400, 30), LoRAConfig(rank=50), generator())
    bound = 1 / math.sqrt(400)  # Kaiming with a = sqrt(5): sqrt(6 / ((1 + 5) · in))
    assert layer.lora_A.abs().max() <= bound and not layer.lora_B.any()
    assert abs(float(layer.lora_A.detach().std()) - bound / math.sqrt(3)) < 0.02 * bound


def test_the_start_comes_from_the_generator_alone_and_is_fp32_beside_any_base():
    drawn = []
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny(0, dtype)
        torch.manual_seed(len(drawn))
        attach(model, LoRAConfig(rank=2), generator(7))
        drawn.append(lora.adapter_tensors(model))
    assert fingerprint(drawn[0]) == fingerprint(drawn[1])
    assert {tensor.dtype for tensor in drawn[0].values()} == {torch.float32}


def test_dropout_acts_on_the_input_of_a_in_training_only():
    """W = 0, A = B = 1 with R = α = 1: the output is the sum of what dropout left, each doubled."""
    base = torch.nn.Linear(1_000, 1, bias=False)
    layer = LoRALinear(base, LoRAConfig(rank=1, alpha=1, dropout=0.5), generator())
    for weight in (base.weight, layer.lora_A, layer.lora_B):
        torch.nn.init.constant_(weight, 0 if weight is base.weight else 1)
    torch.manual_seed(0)
    x = torch.ones(1, 1_000)
    sums = [layer(x).item() for _ in range(8)]
    assert len(set(sums)) > 4 and all(850 < total < 1_150 and total % 2 == 0 for total in sums)
    layer.eval()
    assert layer(x).item() == 1_000


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"alpha": 0.0}, {"dropout": 1.0}, {"targets": ()}])
def test_a_config_without_sense_is_refused(wrong):
    with pytest.raises(ValueError, match="LoRA needs"):
        LoRAConfig(**wrong)


# files


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_saved_is_what_is_loaded(tmp_path, dtype):
    config = LoRAConfig(rank=3, alpha=5.5, dropout=0.25, targets=("q_proj", "up_proj"))
    model = trained(tiny(dtype=dtype), config)
    lora.save(model, tmp_path, "some/base", fingerprint(lora.base_tensors(model)))
    other = tiny(dtype=dtype)
    lora.load(other, tmp_path)
    assert fingerprint(other.state_dict()) == fingerprint(model.state_dict())
    assert {layer.config for layer in lora.layers(other).values()} == {config}
    assert all(p.requires_grad for p in lora.parameters(other))
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == "some/base"


@pytest.fixture
def saved(tmp_path):
    model = trained(tiny(), LoRAConfig(rank=3, targets=("q_proj", "up_proj")))
    lora.save(model, tmp_path, "some/base", fingerprint(lora.base_tensors(model)))
    return tmp_path


def refused(model, folder, says):
    with pytest.raises(ValueError, match=says) as caught:
        lora.load(model, folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
    untouched = all(p.requires_grad for p in model.parameters())
    assert untouched and lora.layers(model) == {}


def test_an_adapter_for_another_base_is_refused(saved):
    refused(tiny(seed=1), saved, "made for another base")
    refused(tiny(dtype=torch.float32), saved, "made for another base: .*--machine.dtype")
    refused(tiny(layers=3), saved, r"made for another base: tensor .*layers.2")
    refused(tiny(layers=1), saved, r"made for another base: tensor .*layers.1")
    wider = Transformer(ModelConfig(11, 32, 24, 2, 4, 2))
    refused(wider, saved, r"another base: tensor .* \(3, 16\) .* \(3, 32\)")


@pytest.mark.parametrize(
    "key, value",
    [
        ("peft_type", "IA3"),
        ("use_dora", True),
        ("lora_bias", True),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 4}),
        ("fan_in_fan_out", True),
        ("layers_to_transform", [0]),
        ("init_lora_weights", "pissa"),
        ("bias", "lora_only"),
        ("invented_in_2031", True),
        ("target_modules", "all-linear"),
        ("r", "8"),
        ("lora_alpha", None),
        ("target_modules", ["q_proj", 1]),
    ],
)
def test_an_adapter_of_a_kind_that_is_not_implemented_is_refused_by_key(saved, key, value):
    path = saved / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    refused(tiny(), saved, key)


def test_damaged_or_missing_files_are_refused(saved):
    path = saved / "adapter_model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    refused(tiny(), saved, "not a complete safetensors file")
    path.write_bytes(whole)
    tensors = load_file(path)
    lost = sorted(tensors)[0]
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, path)
    refused(tiny(), saved, f"tensor {lost} has shape None in the adapter")
    path.unlink()
    refused(tiny(), saved, "not a complete safetensors file")
    (saved / "adapter_config.json").unlink()
    refused(tiny(), saved, "no adapter_config.json here, so this is not an adapter folder")


def renamed(saved, change):
    path = saved / "adapter_model.safetensors"
    save_file(dict(change(name, tensor) for name, tensor in load_file(path).items()), path)
    return sorted(load_file(path))


@pytest.mark.parametrize(
    "change",
    [
        lambda name: name.replace("lora_A.", "lora_A.default."),
        lambda name: name.removeprefix(lora.PREFIX),
        lambda name: name.replace("model.layers", "_orig_mod.model.layers"),
        lambda name: f"module.{name}",
        lambda name: name.replace(".lora_B.weight", ".lora_up.weight"),
        lambda name: name.replace("model.layers", "transformer.h"),
    ],
)
def test_other_names_are_told_by_one_that_is_there_and_one_that_is_wanted(saved, change):
    names = renamed(saved, lambda name, tensor: (change(name), tensor))
    with pytest.raises(ValueError, match="names") as caught:
        lora.load(tiny(), saved)
    wanted = f"{lora.PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"
    assert wanted in str(caught.value) and any(f" {name}," in str(caught.value) for name in names)


@pytest.mark.parametrize(
    "beside, what",
    [
        ("model.embed_tokens.weight", "whole weight"),
        ("lm_head.modules_to_save.weight", "whole weight"),
        ("lm_head.weight", "whole weight"),
        ("model.norm.weight", "whole weight"),
        ("model.layers.0.self_attn.q_proj.lora_magnitude_vector", "DoRA"),
        ("model.layers.0.self_attn.q_proj.lora_B.bias", "bias"),
        ("model.layers.0.self_attn.q_proj.bias", "bias"),
        ("model.embed_tokens.lora_embedding_A", "embedding"),
    ],
)
def test_a_tensor_beside_loras_is_refused_by_its_name_as_what_it_is(saved, beside, what):
    path, name = saved / "adapter_model.safetensors", f"{lora.PREFIX}{beside}"
    save_file({**load_file(path), name: torch.zeros(2, 2)}, path)
    refused(tiny(), saved, f"tensor {name} is .*{what}")


def test_an_adapter_that_was_not_saved_whole_is_refused_as_that(saved):
    renamed(saved, lambda name, tensor: (name, torch.empty(0)))
    refused(tiny(), saved, r"lora_A.weight has the shape \(0,\): it was not saved whole")


@pytest.mark.parametrize(
    "value, dtype", [(math.nan, torch.bfloat16), (-math.inf, torch.float32), (1e39, torch.float64)]
)
def test_one_number_that_is_not_finite_in_the_models_dtype_is_refused_by_its_tensor(
    saved, value, dtype
):
    name = f"{lora.PREFIX}model.layers.1.mlp.up_proj.lora_B.weight"

    def change(other, tensor):
        tensor = tensor.to(dtype)
        if other == name:
            tensor[2, 1] = value
        return other, tensor

    renamed(saved, change)
    refused(tiny(dtype=torch.float32), saved, f"tensor {name} .*not finite")


def test_a_file_of_an_adapter_is_not_its_folder(saved):
    for name in lora.FILES:
        refused(tiny(), saved / name, "give the folder")


# PEFT


def test_an_adapter_that_peft_wrote_is_read_as_it_is(oracles):
    run = oracles / "trl_dpo_run"
    model = checkpoint.load(run / "base")
    base = logits(model)
    lora.load(model, run / "adapter_init")
    stored = load_file(run / "adapter_init" / "adapter_model.safetensors")
    assert fingerprint(lora.adapter_tensors(model)) == fingerprint(stored)
    config = next(iter(lora.layers(model).values())).config
    assert (config.rank, config.alpha, config.dropout, len(lora.layers(model))) == (8, 16, 0, 14)
    assert torch.equal(logits(model), base)  # B is zero before training


def test_we_read_the_adapter_of_peft_and_compute_its_logits_and_gradients(tmp_path):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    model = tiny(dtype=torch.float32)
    checkpoint.save(model, tmp_path / "base")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(
        r=4,
        lora_alpha=7,
        target_modules=["k_proj", "gate_proj"],
        task_type="CAUSAL_LM",
        init_lora_weights=False,
    )
    theirs = peft.get_peft_model(theirs, config)
    theirs.save_pretrained(tmp_path / "adapter")
    lora.load(model, tmp_path / "adapter")
    torch.testing.assert_close(logits(model), theirs(IDS).logits, rtol=1e-5, atol=1e-5)
    model.head(model(IDS)).logsumexp(-1).sum().backward()
    theirs(IDS).logits.logsumexp(-1).sum().backward()
    gradients = {
        name.replace(".default", ""): weight.grad
        for name, weight in theirs.named_parameters()
        if weight.requires_grad
    }
    assert gradients.keys() == lora.adapter_tensors(model).keys()
    for name, weight in lora.adapter_tensors(model).items():
        torch.testing.assert_close(weight.grad, gradients[name], rtol=1e-4, atol=1e-5)


def test_detached_the_base_is_what_it_was_and_takes_another_adapter():
    base, model = logits(tiny()), trained(tiny())
    detach(model)
    assert torch.equal(logits(model), base) and not lora.layers(model)
    attach(model, LoRAConfig(rank=2), torch.Generator())
    assert torch.equal(logits(model), base) and lora.layers(model)
