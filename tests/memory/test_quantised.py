"""A quantised model is what `encode` makes of the plain weights, killed or not, cached or not."""

import copy
import json
import os
import shutil

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_lora import trained
from test_nf4 import Large
from test_tree import trajectories

import minidpo.model.head
from minidpo.data.batch import batch_scores, collate
from minidpo.memory import lora, nf4, quantised
from minidpo.memory.frozen import FrozenLinear, FrozenTable
from minidpo.memory.nf4 import Int8Matrix, NF4Matrix
from minidpo.memory.quantised import expand, load_quantised
from minidpo.model import checkpoint
from minidpo.system.tensors import fingerprint

V = 53
# 888 weights: 13 blocks and a piece of one
ODD = {"vocab": V, "hidden_size": 24, "intermediate_size": 37}
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])
KINDS = [FrozenLinear, FrozenTable]
both = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
either = pytest.mark.parametrize("tied", [True, False])


def write(folder, dtype=torch.float32, seed=1, shard=10**9, **changes):
    model = tiny.model(seed, dtype, **{**ODD, **changes})
    checkpoint.save(model, folder, max_shard_bytes=shard)
    return folder


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "model")


def same(model, other):
    return fingerprint(model.state_dict()) == fingerprint(other.state_dict())


def content(folder):
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


def edit(path, **changes):
    save_file(load_file(path) | changes, path, {"format": "pt"})


def refused(says, *args, **kwargs):
    with pytest.raises(ValueError, match=says) as caught:
        load_quantised(*args, **kwargs)
    assert "\n" not in str(caught.value)


# what is loaded


@either
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard", [10**9, 4_000])
def test_each_tensor_is_what_encode_makes_of_the_plain_one(tmp_path, stored, tied, shard):
    write(tmp_path, stored, shard=shard, tie_word_embeddings=tied)
    loaded = load_quantised(tmp_path, torch.float32).state_dict()
    wanted = {}
    for name, weight in checkpoint.load(tmp_path).state_dict().items():
        if weight.ndim == 1:
            wanted[name] = weight.float()
        else:
            kind = Int8Matrix if "embed_tokens" in name or "lm_head" in name else NF4Matrix
            wanted |= {f"{name}.{part}": codes for part, codes in kind.encode(weight).items()}
    assert fingerprint(loaded) == fingerprint(wanted)
    assert sum(name.endswith(".codes") for name in loaded) == 2 * 7 + 2 - tied


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_weight_that_is_not_finite_is_refused_by_name(tmp_path, name, value):
    path = write(tmp_path, tie_word_embeddings=False) / "model.safetensors"
    weight = load_file(path)[name]
    weight.view(-1)[-1] = value
    edit(path, **{name: weight})
    refused(f"model.safetensors: tensor {name} .* not finite", tmp_path, torch.float32)


# the cache


@either
def test_a_second_load_reads_the_same_from_the_cache_alone(tmp_path, monkeypatch, tied):
    write(tmp_path / "model", shard=4_000, tie_word_embeddings=tied)
    first = load_quantised(tmp_path / "model", torch.float32, cache=tmp_path / "cache")
    assert same(first, load_quantised(tmp_path / "model", torch.float32))
    before, opened = content(tmp_path / "cache"), []
    reader = quantised.read_weights
    monkeypatch.setattr(quantised, "read_weights", lambda path: opened.append(path) or reader(path))
    assert same(first, load_quantised(tmp_path / "model", torch.float32, cache=tmp_path / "cache"))
    assert len(opened) == 4 + (not tied) and {path.parent for path in opened} == {
        tmp_path / "cache"
    }
    assert content(tmp_path / "cache") == before


def test_stopped_at_any_file_the_next_load_completes_the_cache(folder, tmp_path, monkeypatch):
    whole = load_quantised(folder, torch.float32, cache=tmp_path / "whole")
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert len(names) == 5
    replace = os.replace
    for n in range(len(names)):
        cache, done = tmp_path / f"stopped-{n}", []

        def stopping(old, new, n=n, done=done):
            if len(done) == n:
                raise KeyboardInterrupt
            done.append(new)
            replace(old, new)

        monkeypatch.setattr(os, "replace", stopping)
        with pytest.raises(KeyboardInterrupt):
            load_quantised(folder, torch.float32, cache=cache)
        monkeypatch.undo()
        assert len(list(cache.iterdir())) == n and not (cache / "index.json").exists()
        assert same(load_quantised(folder, torch.float32, cache=cache), whole)
        assert all(
            (cache / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
            for name in names
        )


def other_weights_of_the_same_date(folder, monkeypatch):
    """One bit of a weight, size and date as they were."""
    path = folder / "model.safetensors"
    status, data = path.stat(), bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def other_config(folder, monkeypatch):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 777.0}))


def other_version(folder, monkeypatch):
    monkeypatch.setattr(quantised, "VERSION", "0")


@pytest.mark.parametrize(
    "change",
    [
        other_weights_of_the_same_date,
        other_config,
        other_version,
    ],
)
def test_a_cache_of_something_else_is_refused_and_left_as_it_is(
    folder, tmp_path, monkeypatch, change
):
    cache = tmp_path / "cache"
    load_quantised(folder, torch.float32, cache=cache)
    before = content(cache)
    change(folder, monkeypatch)
    refused(f"{cache}: .* another checkpoint", folder, torch.float32, cache=cache)
    assert content(cache) == before


@pytest.mark.parametrize("damage", ["gone", "empty", "cut", "junk", "flipped"])
def test_a_damaged_part_of_a_cache_is_named_with_what_to_do(folder, tmp_path, damage):
    path = tmp_path / "cache" / "model.layers.1.safetensors"
    model = load_quantised(folder, torch.float32, cache=tmp_path / "cache")
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        flipped = data[:-1] + bytes([data[-1] ^ 1])
        broken = {"empty": b"", "cut": data[:-1], "junk": b"\xff" * len(data), "flipped": flipped}
        path.write_bytes(broken[damage])
    says = f"^{path}: .*; delete the folder {path.parent},"
    refused(says, folder, torch.float32, cache=tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache")
    assert same(load_quantised(folder, torch.float32, cache=tmp_path / "cache"), model)


# the model


def plain(model):
    model = copy.deepcopy(model)
    expand(model)
    return model


def gradients(model):
    return [weight.grad.clone() for weight in lora.parameters(model)]


@either
@both
def test_the_expanded_model_is_a_plain_one_that_computes_the_same_bit_for_bit(
    tmp_path, dtype, tied
):
    quantised = load_quantised(write(tmp_path, tie_word_embeddings=tied), dtype)
    expanded = plain(quantised)
    assert tiny.is_quantised(quantised) and not tiny.is_quantised(expanded)
    names = tiny.model(**ODD, tie_word_embeddings=tied).state_dict().keys()
    assert expanded.state_dict().keys() == names
    assert not any(type(module) in KINDS for module in expanded.modules())
    hidden = quantised(IDS)
    assert torch.equal(hidden, expanded(IDS))
    assert torch.equal(quantised.head(hidden), expanded.head(hidden))
    checkpoint.save(expanded, tmp_path / "expanded")
    assert same(checkpoint.load(tmp_path / "expanded"), expanded)


@either
@both
def test_scores_and_gradients_of_an_adapter_are_those_on_the_expanded_model_bit_for_bit(
    tmp_path, dtype, tied
):
    quantised = load_quantised(write(tmp_path, tie_word_embeddings=tied), dtype)
    results = []
    for model in (trained(plain(quantised)), trained(quantised)):
        scores = batch_scores(model, collate([trajectories(5, 4)]))
        scores.sum().backward()
        results.append([scores.detach(), *gradients(model)])
    assert all(map(torch.equal, *results)) and any(gradient.any() for gradient in results[0][1:])


def test_a_training_step_has_one_matrix_written_out_at_a_time(folder, monkeypatch):
    monkeypatch.setattr(minidpo.model.head, "TILE", 5 * ODD["hidden_size"])
    monkeypatch.setattr(nf4, "TILE", 128)
    model = trained(load_quantised(folder, torch.bfloat16), lora.LoRAConfig(rank=1))
    smallest = min(
        module.weight.numel() for module in model.modules() if type(module) is FrozenLinear
    )
    with Large(smallest) as large:
        hidden = model(IDS[:1, :5])[0]
        minidpo.model.head.token_logps(hidden, model.head_weight, IDS[0, 1:6]).sum().backward()
    assert large.peak == 1
    assert large.made == 14 + 14 - 3  # nothing that learns is before block 0's q, k and v


def test_an_adapter_made_for_a_quantised_base_is_for_that_base_alone(folder, tmp_path):
    base = load_quantised(folder, torch.float32)
    made_for = fingerprint(base.state_dict())
    model = trained(copy.deepcopy(base))
    assert fingerprint(lora.base_tensors(model)) == made_for
    lora.save(model, tmp_path / "adapter", "some/base", made_for)
    again = copy.deepcopy(base)
    lora.load(again, tmp_path / "adapter")
    assert torch.equal(again(IDS), model(IDS)) and not torch.equal(again(IDS), base(IDS))
    lora.detach(again)
    assert torch.equal(again(IDS), base(IDS))
    for other in (load_quantised(write(tmp_path / "other", seed=2), torch.float32), plain(base)):
        with pytest.raises(ValueError, match="made for another base"):
            lora.load(other, tmp_path / "adapter")
