"""What is loaded is what was stored, and whatever is not right is refused in one sentence."""

import json
import shutil

import huggingface_hub.constants
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from minidpo.memory import lora
from minidpo.model.checkpoint import load, locate, read_config, save
from minidpo.system.tensors import fingerprint

NORM = "model.norm.weight"


def a_model(tied=False, dtype=torch.float32):
    return tiny.model(dtype=dtype, tie_word_embeddings=tied, rms_norm_eps=1e-5, rope_theta=5e5)


@pytest.fixture
def folder(tmp_path):
    """An untied checkpoint in one file."""
    save(a_model(), tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def sharded(tmp_path):
    save(a_model(), tmp_path / "sharded", max_shard_bytes=4_000)
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
    model = a_model(tied, dtype)
    save(model, tmp_path, max_shard_bytes=max_shard_bytes)
    same(load(tmp_path), model)
    files = sorted(path.name for path in tmp_path.iterdir())
    if max_shard_bytes == 10**9:
        assert files == ["config.json", "model.safetensors"]
        with safe_open(tmp_path / "model.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt"} and (
                "lm_head.weight" in set(file.keys())
            ) == (not tied)
    if max_shard_bytes == 1:
        assert len(files) == len(model.state_dict()) + 2  # each tensor alone, config and index


def test_the_dtype_is_the_stored_one_unless_another_is_asked_for(folder):
    edit_config(folder, torch_dtype="bfloat16")
    model = load(folder)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert {weight.dtype for weight in load(folder, dtype=torch.float64).parameters()} == {
        torch.float64
    }


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


@pytest.mark.parametrize(
    "key, value",
    [
        ("model_type", "gemma"),
        ("architectures", ["Qwen2ForSequenceClassification"]),
        ("hidden_act", "gelu"),
        ("rope_scaling", {"type": "yarn", "factor": 4.0}),
        ("rope_parameters", {"rope_type": "dynamic", "rope_theta": 1e6}),
        ("use_sliding_window", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("quantization_config", {"bits": 4}),
        ("rope_theta", "1e6"),
        ("num_hidden_layers", ...),
        ("hidden_size", "16"),
        ("vocab_size", 0),
        ("rope_scaling", ["llama3"]),
        ("head_dim", 7),
        ("num_key_value_heads", 3),
        ("dtype", "int8"),
        ("attention_bias", True),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", float("inf")),
    ],
)
def test_a_setting_that_is_not_implemented_is_refused_by_file_and_key(folder, key, value):
    edit_config(folder, **{key: value})
    with pytest.raises(ValueError) as caught:
        load(folder)
    assert str(folder / "config.json") in str(caught.value) and key in str(caught.value)
    assert "\n" not in str(caught.value)


# weights


@pytest.mark.parametrize(
    "changes, says",
    [
        ({NORM: ...}, f"{NORM} is missing"),
        ({"lm_head.weight": ...}, "lm_head.weight is missing"),
        (
            {"model.layers.2.mlp.up_proj.weight": torch.zeros(1)},
            "layers.2.mlp.up_proj.weight .* wants None",
        ),
        ({NORM: torch.zeros(17)}, rf"{NORM} has shape \(17,\), config.json wants \(32,\)"),
        ({NORM: torch.zeros(32, dtype=torch.int8)}, f"{NORM} is I8"),
    ],
)
def test_tensors_missing_extra_misshapen_or_not_numbers_are_refused_by_name(folder, changes, says):
    edit_weights(folder / "model.safetensors", **changes)
    with pytest.raises(ValueError, match=says):
        load(folder)


@pytest.mark.parametrize(
    "value, dtype",
    [
        (float("nan"), None),
        (float("-inf"), torch.bfloat16),
        (70_000.0, torch.float16),
        (-1e39, torch.float32),
    ],
)
def test_a_weight_that_is_not_finite_in_the_models_dtype_is_refused_by_file_and_name(
    tmp_path, value, dtype
):
    save(a_model(dtype=torch.float64), tmp_path, max_shard_bytes=8_000)
    name = "model.layers.1.mlp.up_proj.weight"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shard = tmp_path / index["weight_map"][name]
    weight = load_file(shard)[name]
    weight[3, 5] = value
    edit_weights(shard, **{name: weight})
    with pytest.raises(ValueError, match=f"{shard.name}: tensor {name} .*not finite"):
        load(tmp_path, dtype)
    if value == value and value > -1e40:
        load(tmp_path, torch.float64)  # the number is one, but too large for less


def test_what_a_models_own_config_says_beside_is_kept_and_never_contradicts(folder, tmp_path):
    found = {
        "eos_token_id": [5, 7],
        "bos_token_id": 3,
        "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1.0},
        "hidden_size": 1,
    }
    save(a_model(), tmp_path / "again", found=found)
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    plain = json.loads((folder / "config.json").read_text())
    assert written == {"eos_token_id": [5, 7], "bos_token_id": 3, **plain}
    same(load(tmp_path / "again"), load(folder))


def test_a_tied_checkpoint_may_repeat_its_embedding_as_head_but_not_contradict_it(tmp_path):
    model = a_model(tied=True)
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
        save(a_model(), folder)
        shutil.copyfile(path, folder / "whole")
    whole = (folder / "whole").read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match="model.safetensors: not a complete safetensors file"):
        load(folder)


def test_an_index_cannot_point_outside_its_folder(sharded, tmp_path):
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] = {
        name: f"../elsewhere/{file}" for name, file in content["weight_map"].items()
    }
    index.write_text(json.dumps(content))
    same(load(sharded), a_model())  # the name counts, the path does not


# the hub


@pytest.fixture
def snapshot(tmp_path, monkeypatch):
    """A model in the hub's cache, without a network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    return tiny.checkpoint(repository / "snapshots" / ("0" * 40))


def test_a_hub_id_is_served_from_the_cache_when_offline(snapshot):
    save(a_model(), snapshot)
    assert locate("someone/tiny") == snapshot
    same(load("someone/tiny"), a_model())


@pytest.fixture
def cached(snapshot):
    """The same in several files."""
    (snapshot / "model.safetensors").unlink()
    save(a_model(), snapshot, max_shard_bytes=40_000)
    return snapshot


@pytest.mark.parametrize(
    "lost, named",
    [
        ("model*", "model.safetensors"),
        ("[!c]*", "tokenizer.json, model.safetensors"),
        ("[!m]*", "config.json, tokenizer.json"),
        ("model-00002*", "model-00002-of-0000\\d.safetensors"),
        ("*.index.json", "model.safetensors.index.json"),
        ("tokenizer.json", "tokenizer.json"),
    ],
)
def test_a_snapshot_that_is_not_whole_is_refused_by_what_it_lacks(cached, lost, named):
    load("someone/tiny")
    for path in cached.glob(lost):
        path.unlink()
    with pytest.raises(ValueError, match=f"someone/tiny: not all of it is cached: {named} is"):
        load("someone/tiny")


def test_half_an_adapter_in_the_cache_is_refused_by_the_half_that_it_lacks(cached):
    (cached / lora.CONFIG).write_text("{}")
    assert locate("someone/tiny", [lora.CONFIG]) == cached
    with pytest.raises(ValueError, match=f"someone/tiny: not all .* {lora.WEIGHTS} is"):
        locate("someone/tiny", lora.FILES)


def test_a_source_that_is_nowhere_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for source in ("someone/tiny", "runs/a--b", "missing", "./missing/model", tmp_path / "missing"):
        with pytest.raises(ValueError, match="no such folder") as caught:
            load(source)
        assert "\n" not in str(caught.value) and str(source) in str(caught.value)


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
