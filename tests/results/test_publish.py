"""Transformers and PEFT compute what we compute, and what is pushed is what is loaded again."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import huggingface_hub.constants
import pytest
import tiny
import torch
from hub import TOKEN, Hub
from safetensors.torch import load_file, save_file

from minidpo.memory import loading, lora
from minidpo.memory.lora import LoRAConfig
from minidpo.memory.machine import Machine
from minidpo.model import checkpoint, scalar_head
from minidpo.model.chat import CHATML, Message
from minidpo.results import publish
from minidpo.results.evaluate import EvaluateCommand, evaluate
from minidpo.results.publish import PushCommand, card, export_merged, push, to_upload
from minidpo.system.tensors import fingerprint

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])
HERE = Machine(device="cpu", dtype="float32")
NF4 = replace(HERE, quantize="nf4")


def logits(model):
    with torch.no_grad():
        return model.head(model(IDS))


# a merged model


@pytest.mark.parametrize("machine", [HERE, NF4, replace(NF4, dtype="bfloat16")])
def test_the_merged_folder_is_a_model_with_the_logits_of_base_and_adapter(
    base, make_adapter, tmp_path, machine
):
    adapter = make_adapter(tmp_path / "adapter", machine)
    export_merged(str(base), adapter, machine, tmp_path, "mine")
    merged = checkpoint.load(tmp_path / "mine-merged")
    model, _ = loading.open_base(str(base), machine)
    before = logits(model)
    lora.load(model, adapter)
    apart = float((logits(merged) - logits(model)).norm() / before.norm())
    assert apart < (1e-5 if machine.dtype == "float32" else 0.1)
    assert {w.dtype for w in merged.state_dict().values()} == {getattr(torch, machine.dtype)}
    if machine == HERE:  # bit for bit what plays
        acting, *_ = loading.open_policy(str(base), adapter, machine)
        assert fingerprint(merged.state_dict()) == fingerprint(acting.state_dict())


def test_transformers_loads_the_merged_folder_with_the_same_logits_tokens_and_end(
    base, adapter, tmp_path
):
    transformers = pytest.importorskip("transformers")
    export_merged(str(base), adapter, HERE, tmp_path, "mine")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mine-merged")
    acting, chat, _ = loading.open_policy(str(base), adapter, HERE)
    torch.testing.assert_close(theirs(IDS).logits, logits(acting), rtol=1e-5, atol=1e-5)
    assert theirs.generation_config.eos_token_id == [chat.end]
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "mine-merged")
    check_template(tokenizer, chat)


def check_template(tokenizer, chat):
    for said in (
        [("user", f"page:\n{tiny.PAGE}")],
        [("system", "x"), ("user", "y"), ("assistant", "z"), ("user", "é")],
    ):
        messages = [{"role": role, "content": content} for role, content in said]
        ours = [Message(*message) for message in said]
        if said[0][0] != "system":
            ours.insert(0, Message("system", "You are a helpful assistant."))
        assert tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        ) == chat.prompt(ours)
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.fixture
def qwen2_like(base, tmp_path):
    """The base with a tokenizer that splits as Qwen2's, and the files beside it that the hub has."""
    folder = shutil.copytree(base, tmp_path / "base")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    split = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = split
    tokenizer["normalizer"] = {"type": "NFC"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 777,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 5, "top_k": 20}))
    return folder


def test_the_files_beside_the_bases_tokenizer_go_along(qwen2_like, adapter, tmp_path):
    export_merged(str(qwen2_like), adapter, HERE, tmp_path, "mine")
    merged = tmp_path / "mine-merged"
    _, chat = loading.open_base(str(qwen2_like), HERE)

    def written(name):
        return json.loads((merged / name).read_text())

    assert written("generation_config.json") == {"eos_token_id": [chat.end, 5], "top_k": 20}
    assert written("tokenizer_config.json")["model_max_length"] == 777
    assert written("tokenizer_config.json")["chat_template"] == CHATML
    for ends, others in ((0, [0]), (None, []), ([0, chat.end], [0])):  # 0 is a token, too
        (qwen2_like / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        publish.write_tokenizer(qwen2_like, chat, merged)
        assert written("generation_config.json")["eos_token_id"] == [chat.end, *others]
    (qwen2_like / "chat_template.jinja").write_text("its own")
    publish.write_tokenizer(qwen2_like, chat, merged)
    assert (merged / "chat_template.jinja").read_text() == "its own"
    assert not written("tokenizer_config.json").get("chat_template")


def test_all_templates_and_names_of_tokens_go_along_and_up(qwen2_like, adapter, tmp_path):
    beside = {
        "additional_chat_templates/tool.jinja": "for tools",
        "special_tokens_map.json": "{}",
        "added_tokens.json": '{"<|im_end|>": 2}',
        "merges.txt": "a b",
    }
    (qwen2_like / "additional_chat_templates").mkdir()
    for name, text in beside.items():
        (qwen2_like / name).write_text(text)
    settings = json.loads((qwen2_like / "tokenizer_config.json").read_text())
    named = [{"name": name, "template": f"{{# {name} #}}{CHATML}"} for name in ("default", "rag")]
    settings["chat_template"] = named
    (qwen2_like / "tokenizer_config.json").write_text(json.dumps(settings))
    export_merged(str(qwen2_like), adapter, HERE, tmp_path, "mine")
    merged = tmp_path / "mine-merged"
    assert {name: (merged / name).read_text() for name in beside} == beside
    assert json.loads((merged / "tokenizer_config.json").read_text())["chat_template"] == named
    assert {merged / name for name in beside} <= set(to_upload(merged)[1])


@pytest.mark.parametrize("write", [export_merged, publish.export_gguf], ids=["folder", "gguf"])
def test_an_adapter_with_one_number_that_is_not_finite_is_not_exported(
    base, adapter, tmp_path, write
):
    spoiled = shutil.copytree(adapter, tmp_path / "spoiled")
    tensors = load_file(spoiled / lora.WEIGHTS)
    name = next(name for name in tensors if "lora_B" in name)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, spoiled / lora.WEIGHTS)
    with pytest.raises(ValueError, match=f"{lora.WEIGHTS}: tensor {name} "):
        write(str(base), spoiled, HERE, tmp_path / "out", "mine")
    assert not (tmp_path / "out").exists()


def test_auto_tokenizer_reads_the_tokenizer_of_a_qwen2_as_we_do(qwen2_like, adapter, tmp_path):
    transformers = pytest.importorskip("transformers")
    export_merged(str(qwen2_like), adapter, HERE, tmp_path, "mine")
    _, chat = loading.open_base(str(qwen2_like), HERE)
    check_template(transformers.AutoTokenizer.from_pretrained(tmp_path / "mine-merged"), chat)


def test_the_template_is_qwen2s_own(oracles):
    assert json.loads((oracles / "chat.json").read_text())["template"] == CHATML


def test_a_merged_folder_is_made_once_and_never_over_another(base, adapter, make_adapter, tmp_path):
    out = tmp_path / "mine-merged"
    weights = export_merged(str(base), adapter, HERE, tmp_path, "mine")
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    assert export_merged(str(base), adapter, HERE, tmp_path, "mine") == weights
    other = make_adapter(tmp_path / "adapter", shape=LoRAConfig(rank=2))
    (tmp_path / "theirs-merged").mkdir()
    for name in ("mine", "theirs"):
        with pytest.raises(ValueError, match=f"{name}-merged exists"):
            export_merged(str(base), other, HERE, tmp_path, name)
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
    assert not list((tmp_path / "theirs-merged").iterdir())


def test_a_model_that_does_not_fit_in_full_is_refused_before_it_is_loaded(
    base, adapter, tmp_path, monkeypatch
):
    monkeypatch.setattr(publish, "open_base", lambda *_: pytest.fail("loaded the model"))
    with pytest.raises(ValueError, match="--machine.device cpu"):
        export_merged(str(base), adapter, replace(NF4, memory_gib=1e-6), tmp_path, "x")


@pytest.mark.parametrize("name", ["save", "write_tokenizer"])
def test_an_export_that_fails_leaves_nothing_behind(base, adapter, tmp_path, monkeypatch, name):
    real = getattr(publish, name)

    def full(*arguments, **options):
        real(*arguments, **options)
        raise OSError("no space left on device")

    monkeypatch.setattr(publish, name, full)
    with pytest.raises(OSError, match="no space"):
        export_merged(str(base), adapter, HERE, tmp_path, "mine")
    assert not list(tmp_path.iterdir())


def test_evaluate_with_export_plays_nothing_and_refuses_a_base_without_adapter(
    base, adapter, tmp_path
):
    command = EvaluateCommand(
        model=str(base), adapters=(f"a={adapter}",), out=tmp_path, export="merged", machine=HERE
    )
    result = evaluate(command)
    merged = fingerprint(checkpoint.load(tmp_path / "a-merged").state_dict())
    assert result == {"a": merged} and [path.name for path in tmp_path.iterdir()] == ["a-merged"]
    for adapters in ((), ("base=",)):
        with pytest.raises(ValueError, match="no adapter"):
            evaluate(replace(command, adapters=adapters))


# PEFT's adapters


def peft_adapter(out, base, **options):
    """The adapter that PEFT makes of these options and saves, in its model."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(
        **{
            "r": 4,
            "lora_alpha": 7,
            "task_type": "CAUSAL_LM",
            "init_lora_weights": False,
            "target_modules": ["q_proj", "down_proj"],
            **options,
        }
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        theirs = peft.get_peft_model(theirs, config)
    theirs.save_pretrained(out)
    return theirs.eval()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"lora_dropout": 0.5},
        {"target_modules": "all-linear"},
        {"target_modules": ["layers.1.mlp.up_proj", "v_proj"]},
    ],
    ids=str,
)
def test_an_adapter_that_peft_made_has_its_logits_here(base, tmp_path, options):
    theirs = peft_adapter(tmp_path / "adapter", base, **options)
    model, _ = loading.open_base(str(base), HERE)
    before = logits(model)
    lora.load(model.eval(), tmp_path / "adapter")
    torch.testing.assert_close(logits(model.eval()), theirs(IDS).logits, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits(model), before, atol=1e-3)


@pytest.mark.parametrize(
    "shape",
    [LoRAConfig(rank=3, alpha=5.5), LoRAConfig(rank=1, targets=("layers.1.mlp.up_proj",))],
    ids=str,
)
def test_our_adapter_goes_through_peft_and_back_with_the_same_tensors_and_logits(
    base, make_adapter, tmp_path, shape
):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    ours = make_adapter(tmp_path / "ours", shape=shape)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base)
    theirs = peft.PeftModel.from_pretrained(theirs, ours)
    theirs.save_pretrained(tmp_path / "theirs")
    model, _ = loading.open_base(str(base), HERE)
    lora.load(model, tmp_path / "theirs")
    torch.testing.assert_close(theirs(IDS).logits, logits(model), rtol=1e-5, atol=1e-5)
    assert fingerprint(lora.adapter_tensors(model)) == fingerprint(load_file(ours / lora.WEIGHTS))
    assert lora.read_config(tmp_path / "theirs") == lora.read_config(ours)


def test_an_rslora_adapter_is_read_as_the_plain_one_that_it_equals(make_adapter, tmp_path):
    plain = make_adapter(tmp_path / "plain", shape=LoRAConfig(rank=4, alpha=10.0))
    path = shutil.copytree(plain, tmp_path / "rs") / lora.CONFIG
    changes = {"use_rslora": True, "lora_alpha": 5}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert lora.read_config(tmp_path / "rs") == lora.read_config(plain)  # 5 / √4 = 10 / 4


# the hub


@pytest.fixture
def online(tmp_path, monkeypatch):
    """The only hub that huggingface_hub knows."""
    with Hub() as hub:
        # XET is a service of its own with a protocol of its own; without it the same client talks LFS
        files = f"{hub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        for name, value in (
            ("ENDPOINT", hub.endpoint),
            ("HUGGINGFACE_CO_URL_TEMPLATE", files),
            ("HF_HUB_CACHE", str(tmp_path / "cache")),
            ("HF_HUB_DISABLE_XET", True),
            ("HF_HUB_OFFLINE", False),
        ):
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def test_an_adapter_that_is_pushed_is_loaded_by_its_id_and_is_the_same(
    base, adapter, tmp_path, online
):
    mine = shutil.copytree(adapter, tmp_path / "adapter")
    (mine / "diary.txt").write_text("mine")
    told = push(PushCommand("me/agent", mine, private=True))
    assert told == {"to": "me/agent", "kind": "adapter", "commit": f"{1:040x}"}
    (commit,) = online.repositories["me/agent"]
    assert online.private == {"me/agent": True} and commit.keys() == {"README.md", *lora.FILES}
    assert all(commit[name] == (mine / name).read_bytes() for name in lora.FILES)
    there, here = (
        loading.open_policy(str(base), folder, HERE)[0] for folder in (Path("me/agent"), mine)
    )
    assert fingerprint(there.state_dict()) == fingerprint(here.state_dict())
    # a head that is left there would be taken for this adapter's
    online.repositories["me/agent"][-1] |= {scalar_head.FILE: b"old", "notes.txt": b"mine"}
    push(PushCommand("me/agent", mine))
    assert online.repositories["me/agent"][-1].keys() == {"README.md", "notes.txt", *lora.FILES}


def test_a_merged_model_that_is_pushed_is_loaded_by_its_id_and_pushed_anew_is_another_commit(
    base, adapter, tmp_path, online
):
    weights = export_merged(str(base), adapter, HERE, tmp_path, "mine")
    merged = tmp_path / "mine-merged"
    kind, files = to_upload(merged)
    assert kind == "model" and set(files) == set(merged.iterdir())
    push(PushCommand("me/agent", merged))
    # an earlier model was in several files: a loader would take them
    old = {"notes.txt": b"mine", "model-00001-of-00002.safetensors": b"old"}
    online.repositories["me/agent"][-1] |= old
    push(PushCommand("me/agent", merged))
    assert len(online.repositories["me/agent"]) == 2 and online.private == {"me/agent": False}
    names = online.repositories["me/agent"][-1].keys()
    assert "notes.txt" in names and not any("-of-" in name for name in names)
    assert fingerprint(loading.open_base("me/agent", HERE)[0].state_dict()) == weights


@pytest.mark.parametrize(
    "token, endpoint, offline, says",
    [
        (None, None, False, "HF_TOKEN"),
        ("hf_wrong", None, False, "me/agent: .*401"),
        (TOKEN, "http://127.0.0.1:9", False, "me/agent: .*refused"),
        (TOKEN, None, True, "me/agent: .*offline"),
    ],
)
def test_an_upload_that_fails_is_one_line(
    adapter, online, monkeypatch, token, endpoint, offline, says
):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", "/nowhere")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    if endpoint:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(ValueError, match=says) as caught:
        push(PushCommand("me/agent", adapter))
    assert "\n" not in str(caught.value) and not online.repositories


def test_an_adapter_that_the_hub_does_not_have_is_one_line(base, tmp_path, online):
    command = EvaluateCommand(model=str(base), adapters=("a=me/nobody",), out=tmp_path / "out")
    with pytest.raises(ValueError, match="^me/nobody: ") as caught:
        evaluate(command)
    assert "\n" not in str(caught.value)


def test_only_adapters_and_merged_models_are_uploaded(base, tmp_path):
    for folder in (tmp_path / "none", base):
        with pytest.raises(ValueError, match=re.escape(str(folder))):
            push(PushCommand("me/agent", folder))


ROW = dict.fromkeys(("success", "low", "high", "mean_steps", "valid_action_rate"), 0.5) | {"n": 9}
OLD = {"sft": {"all": ROW, "tasks": {"click-link": ROW}}}  # version 1 has agents at the top level


def test_the_card_names_the_base_if_the_hub_knows_it(adapter, tmp_path, monkeypatch):
    assert "base_model" not in card(PushCommand("me/agent", adapter), "adapter")  # it is a folder
    mine = shutil.copytree(adapter, tmp_path / "adapter")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    for base, is_named in (
        ("Qwen/Qwen2-7B", True),
        ("minidpo/nano", False),
        ("models/mine", False),
    ):
        raw = json.loads((mine / lora.CONFIG).read_text())
        (mine / lora.CONFIG).write_text(json.dumps(raw | {"base_model_name_or_path": base}))
        text = card(PushCommand("me/agent", mine), "adapter")
        assert (f"\nbase_model: {base}\n" in text) == is_named


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"split": "validation"}, "validation"),
        ({"best_of": 8, "temperature": 1.0}, "oracle"),
        ({"best_of": 8, "temperature": 1.0, "judge": "a/rm"}, "a/rm"),
    ],
    ids=str,
)
def test_the_card_holds_the_result_and_says_whose_success_it_is(adapter, tmp_path, changes, word):
    result = tmp_path / "result.json"
    result.write_text(json.dumps(OLD | changes))
    text = card(PushCommand("me/agent", adapter, result), "adapter")
    assert "click-link" in text
    assert [other for other in ("validation", "oracle", "a/rm") if other in text] == [word]
    for content in ({}, OLD | {"version": 99}):
        result.write_text(json.dumps(content))
        with pytest.raises(ValueError, match="result.json"):
            card(PushCommand("me/agent", adapter, result), "adapter")
