"""Transformers and PEFT compute what we compute, and what is pushed is what is loaded again."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import huggingface_hub.constants
import pytest
import tiny
import torch
from hub import TOKEN, Hub
from safetensors.torch import load_file
from test_sft_dpo import HERE, folder  # noqa: F401  folder: a fixture

from minidpo.config import EvaluateCommand, PushCommand
from minidpo.learning.schedule import copy_adapter
from minidpo.learning.training_run import adapter_sha256
from minidpo.memory import loading, lora
from minidpo.memory.lora import LoRAConfig
from minidpo.model import checkpoint, scalar_head
from minidpo.model.chat import SYSTEM_DEFAULT, Message
from minidpo.results import evaluate, publish
from minidpo.results.publish import UPLOADED, card, export_merged, push, to_upload
from minidpo.system.tensors import fingerprint

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])
NF4 = replace(HERE, quantize="nf4")


def logits(model):
    with torch.no_grad():
        return model.head(model(IDS))


def adapter_of(folder, machine, out, config=LoRAConfig(rank=3)):
    """An adapter that does something, for the base as this machine holds it."""
    model, _ = loading.open_base(str(folder / "base"), machine)
    lora.attach(model, config, torch.Generator().manual_seed(8))
    with torch.no_grad():
        for layer in lora.layers(model).values():
            layer.lora_B.normal_(0, 0.1, generator=torch.Generator().manual_seed(9))
    lora.save(model, out, str(folder / "base"), fingerprint(lora.base_tensors(model)))
    return out


# a merged model


@pytest.mark.parametrize(
    "machine",
    [HERE, NF4, replace(HERE, dtype="bfloat16"), replace(NF4, dtype="bfloat16")],
    ids=["fp32", "nf4", "bf16", "nf4-bf16"],
)
def test_the_merged_folder_is_a_model_with_the_logits_of_base_and_adapter(
    folder, tmp_path, machine, capsys
):
    adapter = adapter_of(folder, machine, tmp_path / "adapter")
    export_merged(str(folder / "base"), adapter, machine, tmp_path / "merged")
    merged = checkpoint.load(tmp_path / "merged")
    kept, _ = loading.open_base(str(folder / "base"), machine)
    base = logits(kept)
    lora.load(kept, adapter)
    apart, moved = (
        float((logits(merged) - other).norm() / base.norm()) for other in (logits(kept), base)
    )
    assert apart < (1e-6 if machine.dtype == "float32" else 0.03) < 0.1 < moved
    assert {w.dtype for w in merged.state_dict().values()} == {getattr(torch, machine.dtype)}
    assert ("held in few bits" in capsys.readouterr().out) == bool(machine.quantize)
    if machine == HERE:  # bit for bit what plays
        acting, *_ = loading.open_policy(str(folder / "base"), adapter, machine)
        assert fingerprint(merged.state_dict()) == fingerprint(acting.state_dict())


def test_transformers_loads_the_merged_folder_with_the_same_logits_tokens_and_end(folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    adapter = adapter_of(folder, HERE, tmp_path / "adapter")
    export_merged(str(folder / "base"), adapter, HERE, tmp_path / "merged")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    acting, chat, _ = loading.open_policy(str(folder / "base"), adapter, HERE)
    torch.testing.assert_close(theirs(IDS).logits, logits(acting), rtol=1e-5, atol=1e-5)
    assert theirs.generation_config.eos_token_id == [chat.end]
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "merged")
    check_template(tokenizer, chat)


def check_template(tokenizer, chat):
    for said in (
        [("user", f"page:\n{tiny.PAGE}")],
        [("system", "x"), ("user", "y"), ("assistant", "z"), ("user", "é")],
    ):
        messages = [{"role": role, "content": content} for role, content in said]
        ours = [Message(*message) for message in said]
        if said[0][0] != "system":
            ours.insert(0, Message("system", SYSTEM_DEFAULT))
        assert tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        ) == chat.prompt(ours)
    assert tokenizer.eos_token == "<|im_end|>"


def qwen2_like(folder):
    """The base with a tokenizer that splits as Qwen2's, and the files beside it that the hub has."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    split = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = split
    tokenizer["normalizer"] = {"type": "NFC"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "Qwen2Tokenizer",
                "eos_token": "<|im_end|>",
                "pad_token": "<|endoftext|>",
                "model_max_length": 777,
            }
        )
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 5, "top_k": 20}))


def test_what_stands_beside_the_tokenizer_of_the_base_goes_along(folder, tmp_path, capsys):
    base = shutil.copytree(folder / "base", tmp_path / "base")
    qwen2_like(base)
    export_merged(str(base), folder / "adapter", HERE, tmp_path / "merged")
    read = {
        name: json.loads((tmp_path / "merged" / f"{name}.json").read_text())
        for name in ("tokenizer_config", "generation_config")
    }
    _, chat = loading.open_base(str(base), HERE)
    assert read["generation_config"] == {"eos_token_id": [chat.end, 5], "top_k": 20}
    assert read["tokenizer_config"]["model_max_length"] == 777
    assert read["tokenizer_config"]["chat_template"] == publish.TEMPLATE
    assert "AutoTokenizer" not in capsys.readouterr().out
    for ends, kept in ((0, [0]), (None, []), ([0, chat.end], [0])):  # 0 is a token, too
        (base / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        publish.write_tokenizer(base, chat, publish.TEMPLATE, tmp_path / "merged")
        written = json.loads((tmp_path / "merged" / "generation_config.json").read_text())
        assert written["eos_token_id"] == [chat.end, *kept]
    (base / "chat_template.jinja").write_text("its own")
    export_merged(str(base), folder / "adapter", HERE, tmp_path / "other")
    assert (tmp_path / "other" / "chat_template.jinja").read_text() == "its own"
    assert "chat_template" not in json.loads(
        (tmp_path / "other" / "tokenizer_config.json").read_text()
    )
    (base / "chat_template.jinja").unlink()
    (base / "tokenizer_config.json").write_text('{"chat_template": null}')
    publish.write_tokenizer(base, chat, publish.TEMPLATE, tmp_path / "merged")
    written = json.loads((tmp_path / "merged" / "tokenizer_config.json").read_text())
    assert written == {"chat_template": publish.TEMPLATE}


def test_auto_tokenizer_reads_the_tokenizer_of_a_qwen2_as_we_do(folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    base = shutil.copytree(folder / "base", tmp_path / "base")
    qwen2_like(base)
    export_merged(str(base), folder / "adapter", HERE, tmp_path / "merged")
    _, chat = loading.open_base(str(base), HERE)
    check_template(transformers.AutoTokenizer.from_pretrained(tmp_path / "merged"), chat)


def test_the_template_is_qwen2s_own(oracles):
    assert json.loads((oracles / "chat.json").read_text())["template"] == publish.TEMPLATE


def test_a_merged_folder_is_made_once_and_never_over_another(folder, tmp_path, capsys):
    source, out = str(folder / "base"), tmp_path / "merged"
    weights = export_merged(source, folder / "adapter", HERE, out)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    assert export_merged(source, folder / "adapter", HERE, out) == weights
    assert "already holds this model" in capsys.readouterr().out
    other = adapter_of(folder, HERE, tmp_path / "adapter")
    with pytest.raises(ValueError, match="merged exists and holds something else"):
        export_merged(source, other, HERE, out)
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match="mine exists and holds something else"):
        export_merged(source, other, HERE, tmp_path / "mine")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "merged", "mine"]


def test_what_does_not_fit_in_full_is_refused_before_it_is_loaded(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "open_base", lambda *_: pytest.fail("loaded the model"))
    with pytest.raises(
        ValueError, match="held in full, .* but there are 0: try --machine.device cpu"
    ):
        export_merged(
            str(folder / "base"), folder / "adapter", replace(NF4, memory_gib=1e-6), tmp_path / "x"
        )


@pytest.mark.parametrize("name", ["save", "write_tokenizer"])
def test_an_export_that_fails_leaves_nothing_behind(folder, tmp_path, monkeypatch, name):
    real = getattr(publish, name)

    def full(*arguments):
        real(*arguments)
        raise OSError("no space left on device")

    monkeypatch.setattr(publish, name, full)
    with pytest.raises(OSError, match="no space"):
        export_merged(str(folder / "base"), folder / "adapter", HERE, tmp_path / "merged")
    assert not list(tmp_path.iterdir())


def test_evaluate_with_export_plays_nothing_and_refuses_a_base_without_adapter(
    folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(evaluate, "play_held_out", lambda *_: pytest.fail("played"))
    command = EvaluateCommand(
        str(folder / "base"),
        (f"a={folder / 'adapter'}",),
        out=tmp_path,
        export="merged",
        machine=HERE,
    )
    result = evaluate.evaluate(command)
    merged = checkpoint.load(tmp_path / "a-merged")
    assert (
        result == {"a": fingerprint(merged.state_dict())}
        and not (tmp_path / "result.json").exists()
    )
    for adapters in ((), ("base=",)):
        with pytest.raises(ValueError, match="the base has no adapter to merge"):
            evaluate.evaluate(replace(command, adapters=adapters))


# PEFT's adapters


def peft_adapter(out, folder, **options):
    """What PEFT makes of these options and saves, and its model."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
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
        {"use_rslora": True, "r": 1},
        {"lora_dropout": 0.5},
        {"target_modules": "all-linear"},
        {"target_modules": ["layers.1.mlp.up_proj", "v_proj"]},
        {"target_modules": ["model.layers.0.self_attn.k_proj"]},
    ],
    ids=str,
)
def test_an_adapter_that_peft_made_has_its_logits_here(folder, tmp_path, options):
    theirs = peft_adapter(tmp_path / "adapter", folder, **options)
    model, _ = loading.open_base(str(folder / "base"), HERE)
    base = logits(model)
    lora.load(model.eval(), tmp_path / "adapter")
    torch.testing.assert_close(logits(model.eval()), theirs(IDS).logits, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits(model), base, atol=1e-3)


@pytest.mark.parametrize(
    "key, options",
    [
        ("use_dora", {"use_dora": True}),
        ("bias", {"bias": "lora_only"}),
        ("bias", {"bias": "all"}),
        ("modules_to_save", {"modules_to_save": ["lm_head"]}),
        ("lora_bias", {"lora_bias": True}),
        ("rank_pattern", {"rank_pattern": {"q_proj": 2}}),
        ("alpha_pattern", {"alpha_pattern": {"q_proj": 2}}),
        ("layers_to_transform", {"layers_to_transform": [0]}),
        ("target_modules", {"target_modules": ".*q_proj"}),
        ("trainable_token_indices", {"trainable_token_indices": [3]}),
    ],
    ids=str,
)
def test_an_adapter_that_peft_made_and_we_cannot_compute_is_refused_by_key(
    folder, tmp_path, key, options
):
    peft_adapter(tmp_path / "adapter", folder, **options)
    model, _ = loading.open_base(str(folder / "base"), HERE)
    with pytest.raises(ValueError, match=f"adapter_config.json: .*{key}"):
        lora.load(model, tmp_path / "adapter")
    assert not lora.layers(model)


@pytest.mark.parametrize(
    "config",
    [
        LoRAConfig(rank=3, alpha=5.5),
        LoRAConfig(rank=2, targets=("q_proj", "o_proj")),
        LoRAConfig(rank=1, targets=("layers.1.mlp.up_proj",)),
    ],
    ids=str,
)
def test_our_adapter_goes_through_peft_and_back_with_the_same_tensors_and_logits(
    folder, tmp_path, config
):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    ours = adapter_of(folder, HERE, tmp_path / "ours", config)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    theirs = peft.PeftModel.from_pretrained(theirs, ours)
    theirs.save_pretrained(tmp_path / "theirs")
    model, _ = loading.open_base(str(folder / "base"), HERE)
    lora.load(model, tmp_path / "theirs")
    torch.testing.assert_close(theirs(IDS).logits, logits(model), rtol=1e-5, atol=1e-5)
    assert fingerprint(lora.adapter_tensors(model)) == fingerprint(load_file(ours / lora.WEIGHTS))
    assert lora.read_config(tmp_path / "theirs") == lora.read_config(ours)


def test_an_rslora_adapter_is_written_as_the_plain_one_that_it_equals(folder, tmp_path):
    adapter = adapter_of(folder, HERE, tmp_path / "plain", LoRAConfig(rank=4, alpha=10.0))
    path = shutil.copytree(adapter, tmp_path / "rs") / lora.CONFIG
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"use_rslora": True, "lora_alpha": 5})
    )
    assert lora.read_config(tmp_path / "rs") == lora.read_config(adapter)  # 5 / √4 = 10 / 4


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


def test_an_adapter_that_is_pushed_is_loaded_by_its_id_and_is_the_same(folder, tmp_path, online):
    adapter = shutil.copytree(folder / "adapter", tmp_path / "adapter")
    (adapter / "diary.txt").write_text("mine")
    told = push(PushCommand("me/agent", adapter, private=True))
    assert told == {"to": "me/agent", "kind": "adapter", "commit": f"{1:040x}"}
    (commit,) = online.repositories["me/agent"]
    assert online.private == {"me/agent": True} and commit.keys() == {"README.md", *lora.FILES}
    assert all(commit[name] == (adapter / name).read_bytes() for name in lora.FILES)
    command = EvaluateCommand(
        str(folder / "base"), ("a=me/agent",), out=tmp_path, export="merged", machine=HERE
    )
    acting, *_ = loading.open_policy(str(folder / "base"), adapter, HERE)
    assert evaluate.evaluate(command) == {"a": fingerprint(acting.state_dict())}
    assert adapter_sha256(Path("me/agent")) == adapter_sha256(adapter)  # what a run is begun with
    online.repositories["me/agent"][-1] |= {
        scalar_head.FILE: b"of an adapter before",
        "notes.txt": b"mine",
    }
    push(PushCommand("me/agent", adapter))  # a head left there would be taken for this adapter's
    assert online.repositories["me/agent"][-1].keys() == {"README.md", "notes.txt", *lora.FILES}


def test_a_merged_model_that_is_pushed_is_loaded_by_its_id_and_pushed_anew_is_another_commit(
    folder, tmp_path, online
):
    weights = export_merged(str(folder / "base"), folder / "adapter", HERE, tmp_path / "merged")
    for _ in range(2):
        push(PushCommand("me/agent", tmp_path / "merged"))
    assert len(online.repositories["me/agent"]) == 2 and online.private == {"me/agent": False}
    # the same in several files over it: no file of the first is left for a loader to take
    kept = {
        "notes.txt",
        "adapter_model.safetensors",
        "a/model.safetensors",
    }  # not the earlier model's
    online.repositories["me/agent"][-1] |= dict.fromkeys(
        [*kept, "model-00001-of-00002.safetensors"], b"old"
    )
    push(PushCommand("me/agent", tmp_path / "merged"))
    files = online.repositories["me/agent"][-1].keys()
    assert kept < {*files}
    assert not any("-of-" in name for name in files)
    assert fingerprint(loading.open_base("me/agent", HERE)[0].state_dict()) == weights


@pytest.mark.parametrize(
    "token, endpoint, offline, says",
    [
        (None, None, False, "an upload to the hub needs a token: set HF_TOKEN"),
        (
            "hf_wrong",
            None,
            False,
            r"me/agent: nothing was uploaded \(.*401.*Invalid username or password",
        ),
        (TOKEN, "http://127.0.0.1:9", False, r"me/agent: nothing was uploaded \(.*refused"),
        (TOKEN, None, True, r"me/agent: nothing was uploaded \(.*offline"),
    ],
)
def test_an_upload_that_fails_is_one_line(
    folder, online, monkeypatch, token, endpoint, offline, says
):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", "/nowhere")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    if endpoint:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(ValueError, match=f"^{says}") as caught:
        push(PushCommand("me/agent", folder / "adapter"))
    assert "\n" not in str(caught.value) and not online.repositories


def test_an_adapter_that_the_hub_does_not_have_is_one_line(folder, tmp_path, online):
    command = EvaluateCommand(str(folder / "base"), ("a=me/nobody",), out=tmp_path / "out")
    with pytest.raises(
        ValueError, match="^me/nobody: no such folder, and the hub cannot provide"
    ) as caught:
        evaluate.evaluate(command)
    assert "\n" not in str(caught.value)


def test_an_adapter_is_served_from_the_cache_when_offline(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--someone--agent"
    shutil.copytree(folder / "adapter", repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    one, other = (
        loading.open_policy(str(folder / "base"), adapter, HERE)[0]
        for adapter in (Path("someone/agent"), folder / "adapter")
    )
    assert fingerprint(one.state_dict()) == fingerprint(other.state_dict())


def test_what_is_neither_adapter_nor_merged_model_is_not_uploaded(folder, tmp_path):
    for given, says in (
        (tmp_path / "none", "no such folder"),
        (folder / "base", "holds neither an adapter"),
    ):
        with pytest.raises(ValueError, match=says):
            push(PushCommand("me/agent", given))


def test_a_head_goes_where_its_adapter_goes(tmp_path):
    """PPO's value and a reward model's reward are read off the adapter's hidden states."""
    for name in (*lora.FILES, scalar_head.FILE):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / name).write_text("{}" if name.endswith("json") else name)
    copy_adapter(tmp_path / "run", tmp_path / "adapter")
    assert (tmp_path / "adapter" / scalar_head.FILE).read_text() == scalar_head.FILE
    assert {path.suffix for path in tmp_path.joinpath("adapter").iterdir()} == {
        ".json",
        ".safetensors",
    }
    assert scalar_head.FILE in UPLOADED["adapter"]


@pytest.mark.parametrize("kill_at", [1, 2, 3])
def test_a_killed_copy_of_a_round_is_no_adapter_until_it_is_copied_whole(
    tmp_path, monkeypatch, kill_at
):
    files = (*lora.FILES, scalar_head.FILE)
    for round_ in ("1", "2"):
        (tmp_path / round_).mkdir()
        for name in files:
            (tmp_path / round_ / name).write_text(round_)
    copy_adapter(tmp_path / "1", tmp_path / "kept")
    real, calls = shutil.copyfile, []

    def deadly(*paths):
        calls.append(paths)
        if len(calls) == kill_at:
            raise KeyboardInterrupt
        real(*paths)

    monkeypatch.setattr(shutil, "copyfile", deadly)
    with pytest.raises(KeyboardInterrupt):
        copy_adapter(tmp_path / "2", tmp_path / "kept")
    with pytest.raises(ValueError, match="kept"):
        lora.located(tmp_path / "kept")
    copy_adapter(tmp_path / "2", tmp_path / "kept")
    assert [(tmp_path / "kept" / name).read_text() for name in files] == ["2"] * 3


def test_of_a_merged_folder_all_that_loading_needs_is_uploaded(folder, tmp_path):
    export_merged(str(folder / "base"), folder / "adapter", HERE, tmp_path / "merged")
    kind, files = to_upload(tmp_path / "merged")
    assert kind == "model" and set(files) == set((tmp_path / "merged").iterdir())


RATES = {
    "success": 0.5,
    "low": 0.4,
    "high": 0.6,
    "n": 9,
    "mean_steps": 2.0,
    "valid_action_rate": 1.0,
}


def test_the_card_tells_the_base_if_the_hub_knows_it_and_the_result_if_there_is_one(
    folder, tmp_path, monkeypatch
):
    result = tmp_path / "result.json"
    result.write_text(
        json.dumps({"sft": {"all": RATES, "tasks": {"click-link": RATES}}, "temperature": 0.0})
    )
    config = PushCommand("me/agent", folder / "adapter", result)
    text = card(config, "adapter")
    assert text.startswith("---\nlibrary_name: peft\n") and "\n# agent\n" in text
    assert "base_model" not in text  # a folder's name
    assert "SFT" in text and "click-link" in text and "50.0    40.0 -  60.0" in text
    adapter = shutil.copytree(folder / "adapter", tmp_path / "adapter")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    for base, told in (
        ("Qwen/Qwen2-7B", True),
        ("minidpo/nano", False),
        ("/data/Qwen2", False),
        ("models/mine", False),
    ):
        raw = json.loads((adapter / lora.CONFIG).read_text())
        (adapter / lora.CONFIG).write_text(json.dumps(raw | {"base_model_name_or_path": base}))
        text = card(PushCommand("me/agent", adapter), "adapter")
        assert (f"\nbase_model: {base}\n" in text) == told
        assert f"--model {base} --adapters mine=me/agent" in text
    result.write_text("{}")
    with pytest.raises(ValueError, match="result.json: holds no result"):
        card(config, "adapter")


def test_the_card_calls_the_best_of_several_tries_an_oracles_and_takes_no_unknown_version(
    folder, tmp_path
):
    result, found = (
        tmp_path / "result.json",
        {"sft": {"all": RATES, "tasks": {"click-link": RATES}}},
    )
    config = PushCommand("me/agent", folder / "adapter", result)
    for best_of, said in ((1, False), (8, True)):
        result.write_text(
            json.dumps(found | {"version": 1, "best_of": best_of, "temperature": 1.0})
        )
        text = card(config, "adapter")
        assert ("An oracle's success, not the agent's own, on MiniWoB++ instances" in text) == said
        assert ("best of 8 tries at temperature 1, chosen by the page's verdict" in text) == said
    result.write_text(
        json.dumps(found | {"version": 1, "best_of": 8, "temperature": 1.0, "judge": "a/rm"})
    )
    assert "\nSuccess of what a reward model picked, on" in (text := card(config, "adapter"))
    assert "oracle" not in text
    result.write_text(json.dumps(found | {"version": 1, "split": "validation"}))
    assert "\nSuccess on MiniWoB++ validation instances, by which a round may" in card(
        config, "adapter"
    )
    assert "chosen by the reward model a/rm" in text
    result.write_text(json.dumps(found | {"version": 99}))
    with pytest.raises(ValueError, match="result.json: a result of format version 99, but this"):
        card(config, "adapter")
