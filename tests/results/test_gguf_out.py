"""What is written as GGUF is read back as the same model, tokenizer and adapter."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny
import torch
from test_families import CASES, weights_of, write_gguf
from test_lora import trained

from minidpo.memory import lora
from minidpo.memory.loading import open_policy
from minidpo.memory.machine import Machine
from minidpo.model import gguf_file
from minidpo.model.chat import Chat, Message
from minidpo.model.checkpoint import load
from minidpo.results.evaluate import EvaluateCommand, evaluate
from minidpo.results.publish import export_gguf, export_merged
from minidpo.system.tensors import write_weights

HERE = Machine(device="cpu", dtype="float32")
TEMPLATES = json.loads((Path(__file__).parents[1] / "oracles" / "templates.json").read_text())
LLAMA3_TOKENS = "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"
IDS = torch.tensor([[1, 5, 2, 9, 9, 3]])
TEXT = "naïve 你好 12 <|im_end|>\n\n x"


@pytest.fixture(params=["llama", "llama3", "qwen2", "qwen3"])
def case(request):
    return roomy(CASES[request.param])


def roomy(case):
    """The model with as many rows in its vocabulary as the tokenizer has tokens, and five more."""
    rows = tiny.chat().tokenizer.get_vocab_size() + 5
    shapes = {
        name: [rows, *shape[1:]]
        if name in ("model.embed_tokens.weight", "lm_head.weight")
        else shape
        for name, shape in case["shapes"].items()
    }
    config = {**case["config"], "vocab_size": rows}
    # the numbers that all of Meta's models have
    if config["rope_parameters"]["rope_type"] == "llama3":
        config["rope_parameters"] = {
            **config["rope_parameters"],
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    return {**case, "shapes": shapes, "config": config}


def as_folder(case, folder):
    """The model as the hub has it, with a tokenizer that splits text as Qwen's does."""
    write_weights(folder / "model.safetensors", weights_of(case), {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(case["config"]))
    tokens = gguf_file.tokenizer_of(write_gguf(folder.with_suffix(".tokens.gguf"), CASES["qwen2"]))
    if case["config"]["rope_parameters"]["rope_type"] == "llama3":
        tokens.add_special_tokens(list(LLAMA3_TOKENS))
        (folder / "chat_template.jinja").write_text(TEMPLATES["templates"]["llama3.1"]["template"])
        settings = {"bos_token": LLAMA3_TOKENS[0], "eos_token": LLAMA3_TOKENS[-1]}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokens.save(str(folder / "tokenizer.json"))
    return folder


def adapter_of(base, folder):
    """An adapter with an effect, trained in a sense; the model in full beside it."""
    model = load(base, torch.float32).requires_grad_(False)
    trained(model, lora.LoRAConfig(rank=2, alpha=6.0))
    lora.save(model, folder, str(base))
    return model


def logits(model):
    with torch.no_grad():
        return model.head(model(IDS))


def test_a_merged_model_is_read_back_as_itself(case, tmp_path):
    base = as_folder(case, tmp_path / "base")
    model = adapter_of(base, tmp_path / "adapter")
    export_gguf(str(base), tmp_path / "adapter", HERE, tmp_path, "mine")
    again = load(tmp_path / "mine-merged.gguf")
    assert again.config == model.config
    # F16 has 11 bits
    torch.testing.assert_close(logits(again), logits(model), rtol=2e-2, atol=2e-2)
    lora.merge(model)
    rounded = {
        name: weight.half().float() if weight.ndim == 2 else weight
        for name, weight in model.state_dict().items()
    }
    assert rounded.keys() == again.state_dict().keys()
    assert all(torch.equal(weight, rounded[name]) for name, weight in again.state_dict().items())
    ours, theirs = Chat.load(base), Chat.load(tmp_path / "mine-merged.gguf")
    asked = [Message("user", TEXT)]
    assert ours.prompt(asked) == theirs.prompt(asked)
    stored = gguf.GGUFReader(tmp_path / "mine-merged.gguf")
    tokens = stored.fields["tokenizer.ggml.tokens"].contents()
    kinds = stored.fields["tokenizer.ggml.token_type"].contents()
    assert len(tokens) == len(set(tokens)) == len(kinds) == case["config"]["vocab_size"]
    assert kinds[-1] == gguf.TokenType.UNUSED and kinds[ours.end] == gguf.TokenType.CONTROL
    assert stored.fields["tokenizer.ggml.eos_token_id"].contents() == ours.end
    for key in ("key", "value"):
        length = stored.fields[f"{case['config']['model_type']}.attention.{key}_length"]
        assert length.contents() == model.config.head_dim
    begins = stored.fields.get("tokenizer.ggml.bos_token_id")
    assert [begins.contents()] == ours.begin if ours.begin else begins is None
    assert stored.fields["tokenizer.ggml.add_bos_token"].contents() == bool(ours.begin)
    assert theirs.template.source == ours.template.source


def test_an_adapter_alone_is_the_same_update_in_llama_cpps_order(case, tmp_path):
    base = as_folder(case, tmp_path / "base")
    model = adapter_of(base, tmp_path / "adapter")
    export_gguf(str(base), tmp_path / "adapter", HERE, tmp_path, "mine")
    stored = gguf.GGUFReader(tmp_path / "mine-lora.gguf")
    fields = {key: field.contents() for key, field in stored.fields.items()}
    assert fields["general.type"] == "adapter" and fields["adapter.type"] == "lora"
    assert fields["general.architecture"] == case["config"]["model_type"]
    assert fields["adapter.lora.alpha"] == 6
    tensors = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in stored.tensors}
    whole = {
        tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "mine-merged.gguf").tensors
    }
    assert len(tensors) == 2 * len(lora.layers(model))
    plain = load(base, torch.float32).state_dict()
    for name in [name.removesuffix(".lora_a") for name in tensors if name.endswith(".lora_a")]:
        update = 6 / 2 * tensors[f"{name}.lora_b"] @ tensors[f"{name}.lora_a"]
        hub = gguf_file.hub_name(name)
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(
            hub.split(".")[-2]
        )
        if case["config"]["model_type"] == "llama" and heads:
            update = gguf_file.unpermute(update, case["config"][heads])
        assert (plain[hub] + update - gguf_tensor(whole[name], case, heads)).abs().max() < 5e-3


def gguf_tensor(tensor, case, heads):
    weight = torch.from_numpy(tensor.data.astype(np.float32))
    llama = case["config"]["model_type"] == "llama" and heads
    return gguf_file.unpermute(weight, case["config"][heads]) if llama else weight


def test_a_gguf_base_keeps_its_own_tokenizer_and_goes_out_again(tmp_path):
    base = as_folder(roomy(CASES["llama3"]), tmp_path / "base")
    adapter_of(base, tmp_path / "adapter")
    export_gguf(str(base), tmp_path / "adapter", HERE, tmp_path, "one")
    adapter_of(tmp_path / "one-merged.gguf", tmp_path / "second")
    for export in (export_gguf, export_merged):
        export(str(tmp_path / "one-merged.gguf"), tmp_path / "second", HERE, tmp_path, "two")
    settings = json.loads((tmp_path / "two-merged" / "tokenizer_config.json").read_text())
    assert settings["bos_token"] == LLAMA3_TOKENS[0]  # transformers fills the template with it
    assert "{{- bos_token }}" in settings["chat_template"]
    one, two = (gguf.GGUFReader(tmp_path / f"{name}-merged.gguf") for name in ("one", "two"))
    for key, field in one.fields.items():
        if key.startswith("tokenizer."):
            assert two.fields[key].contents() == field.contents()


def test_what_ends_begins_and_fills_a_text_goes_out_with_the_base_both_ways_and_back(tmp_path):
    ids = {"eos_token_id": [7, 5], "bos_token_id": 3, "pad_token_id": 6}
    base = as_folder(roomy(CASES["llama"]), tmp_path / "base")
    config = json.loads((base / "config.json").read_text()) | ids | {"initializer_range": 0.5}
    (base / "config.json").write_text(json.dumps(config))
    adapter_of(base, tmp_path / "adapter")
    for export in (export_gguf, export_merged):
        export(str(base), tmp_path / "adapter", HERE, tmp_path, "one")
    end = Chat.load(base).end

    def written(folder, name):
        return json.loads((tmp_path / folder / name).read_text())

    assert written("one-merged", "config.json").items() >= {**ids, "initializer_range": 0.5}.items()
    generation = {**ids, "eos_token_id": [end, 7, 5]}
    assert written("one-merged", "generation_config.json") == generation
    fields = gguf.GGUFReader(tmp_path / "one-merged.gguf").fields
    for key, wanted in (("eos", 7), ("eot", end), ("bos", 3), ("padding", 6)):
        assert fields[f"tokenizer.ggml.{key}_token_id"].contents() == wanted
    adapter_of(tmp_path / "one-merged.gguf", tmp_path / "second")
    export_merged(str(tmp_path / "one-merged.gguf"), tmp_path / "second", HERE, tmp_path, "two")
    assert written("two-merged", "config.json").items() >= {**ids, "eos_token_id": 7}.items()
    pad = Chat.load(base).tokenizer.id_to_token(6)
    assert written("two-merged", "tokenizer_config.json")["pad_token"] == pad
    transformers = pytest.importorskip("transformers")
    theirs = [
        transformers.AutoConfig.from_pretrained(folder)
        for folder in (base, tmp_path / "one-merged")
    ]
    for key in (*ids, "initializer_range", "rope_parameters", "vocab_size"):
        assert getattr(theirs[0], key) == getattr(theirs[1], key)


def test_what_llama_cpp_cannot_have_is_refused_in_one_line_and_nothing_is_left(tmp_path):
    base = tiny.checkpoint(tmp_path / "base")
    adapter_of(base, tmp_path / "adapter")
    with pytest.raises(ValueError, match="tokenizer.json"):
        export_gguf(str(base), tmp_path / "adapter", HERE, tmp_path / "out", "mine")
    assert not list((tmp_path / "out").glob("*"))
    case = roomy(CASES["qwen2"])
    folder, weights = as_folder(case, tmp_path / "large"), weights_of(case)
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e6
    write_weights(folder / "model.safetensors", weights, {"format": "pt"})
    adapter_of(folder, tmp_path / "other")
    with pytest.raises(ValueError, match="blk.0.ffn_up.weight"):
        export_gguf(str(folder), tmp_path / "other", HERE, tmp_path / "out", "mine")
    assert not list((tmp_path / "out").glob("*"))


def test_an_export_that_was_stopped_is_continued_by_the_same_command(tmp_path):
    """One that ended is left as it is; another adapter under its name is refused."""
    base, names = as_folder(roomy(CASES["qwen2"]), tmp_path / "base"), ("first", "second")
    for name in names:
        adapter_of(base, tmp_path / name)
    command = EvaluateCommand(
        model=str(base),
        adapters=tuple(f"{name}={tmp_path / name}" for name in names),
        export="gguf",
        out=tmp_path / "out",
        machine=HERE,
    )
    found = evaluate(command)
    paths = [
        tmp_path / "out" / f"{name}-{kind}.gguf" for name in names for kind in ("merged", "lora")
    ]
    before = [path.read_bytes() for path in paths]
    for path in paths[1:]:  # as if it had been killed after the first file
        path.unlink()
    written = paths[0].stat().st_mtime_ns
    assert evaluate(command) == found
    assert [path.read_bytes() for path in paths] == before and paths[
        0
    ].stat().st_mtime_ns == written
    model = adapter_of(base, tmp_path / "third")
    lora.parameters(model)[1].data += 1
    lora.save(model, tmp_path / "first", str(base))
    with pytest.raises(ValueError, match="first-merged.gguf"):
        evaluate(command)


@pytest.mark.parametrize(
    "machine",
    [Machine(device="cpu", dtype="bfloat16", act_dtype="float32"), Machine(device="cpu")],
    ids=["asked", "slow in bf16"],
)
def test_what_is_exported_is_what_acts_though_it_was_trained_in_another_dtype(
    tmp_path, machine, monkeypatch
):
    """A small update is lost where it is added to weights in bf16; act_dtype float32 keeps it, and so does a
    processor that is slow in bf16."""
    monkeypatch.setattr("minidpo.memory.machine.multiplies_bfloat16", lambda: False)
    base = as_folder(roomy(CASES["qwen2"]), tmp_path / "base")
    model = load(base, torch.bfloat16).requires_grad_(False)
    lora.attach(model, lora.LoRAConfig(rank=2), torch.Generator().manual_seed(0))
    for weight in lora.parameters(model):
        torch.nn.init.normal_(weight, std=0.002, generator=torch.Generator().manual_seed(1))
    lora.save(model, tmp_path / "adapter", str(base))
    acting = open_policy(str(base), tmp_path / "adapter", machine)[0].state_dict()
    export_merged(str(base), tmp_path / "adapter", machine, tmp_path, "mine")
    export_gguf(str(base), tmp_path / "adapter", machine, tmp_path, "mine")
    name = "model.layers.0.mlp.up_proj.weight"
    assert acting[name].bfloat16().float().ne(acting[name]).any()
    folder, file = (
        load(tmp_path / path).state_dict() for path in ("mine-merged", "mine-merged.gguf")
    )
    assert all(torch.equal(folder[name], weight) for name, weight in acting.items())
    assert torch.equal(file[name], acting[name].half().float())
