"""A run folder belongs to one run, and nothing in it can be torn."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minidpo.system.run_folder import RunFolder, changed_settings, records

CONFIG = {"lr": 1e-3, "data": Path("runs/demos.jsonl"), "lora": {"targets": ("q_proj",)}}
STATE = {"param.weight": torch.tensor([[1.5, -0.1]]), "optimizer.0.0.step": torch.tensor(3.0)}


def test_a_folder_is_opened_again_with_the_same_settings_and_with_no_others(tmp_path):
    RunFolder(tmp_path, CONFIG).begin()
    begun = RunFolder(tmp_path, CONFIG)
    begun.begin()
    begun.log({"step": 1})
    assert json.loads((tmp_path / "config.json").read_text())["data"] == "runs/demos.jsonl"
    says = r"holds a run with other settings \(lora.targets q_proj, now k_proj; lr 0.001, now 0.002\): give "
    with pytest.raises(ValueError, match=says):
        RunFolder(tmp_path, {**CONFIG, "lr": 2e-3, "lora": {"targets": ("k_proj",)}})
    with pytest.raises(ValueError, match=r"other settings \(data runs/demos.jsonl, now None\)"):
        RunFolder(tmp_path, {name: value for name, value in CONFIG.items() if name != "data"})


def test_what_decides_no_result_may_change_and_of_an_input_the_content_decides():
    run = {
        "out": "runs/a",
        "track": None,
        "model": "nano",
        "data": ["a/x.jsonl"],
        "golden": None,
        "data_sha256": ["1"],
        "adapter": "a/sft/adapter",
        "adapter_sha256": "2",
        "reference": None,
        "reference_sha256": None,
        "dpo": {"lr": 1e-3, "save_every": 25},
        "machine": {"pages": 16, "dtype": "auto"},
    }
    moved = {
        "out": "/b",
        "track": "mlflow",
        "data": ["/b/x.jsonl"],
        "adapter": "/b/sft/adapter",
        "dpo": {"lr": 1e-3, "save_every": 5},
        "machine": {"pages": 4, "dtype": "auto"},
    }
    assert changed_settings(run, {**run, **moved}) == ""
    for changes, says in (
        ({"adapter_sha256": "3"}, "adapter of other content"),
        ({"golden": "g.jsonl", "data_sha256": ["1", "4"]}, "data of other content"),
        ({"reference": "r", "reference_sha256": "5"}, "reference of other content"),
        ({"model": "/b/nano"}, "model nano, now /b/nano"),
        ({"machine": {"dtype": "bfloat16"}}, "machine.dtype auto, now bfloat16"),
        ({"rank": 8}, "rank None, now 8"),
    ):
        assert changed_settings(run, {**run, **moved, **changes}) == says


def test_of_a_model_it_is_told_which_part_is_another_and_an_older_run_goes_by_its_path():
    parts = {"weights": "1", "tokenizer.json": "2"}
    run = {"model": "a/nano", "lr": 1e-3, "model_sha256": parts}
    moved = {**run, "model": "/b/nano"}
    assert changed_settings(run, moved) == ""
    for name in parts:
        told = changed_settings(run, {**moved, "model_sha256": {**parts, name: "3"}})
        assert name in told and not any(other in told for other in parts.keys() - {name})
    older = {"model": "a/nano", "lr": 1e-3}
    assert changed_settings(older, run) == ""
    assert "/b/nano" in changed_settings(older, {**run, "model": "/b/nano"})


def test_the_state_comes_back_bit_for_bit_and_the_metrics_with_it(tmp_path):
    run = RunFolder(tmp_path, CONFIG)
    run.begin()
    for step in range(1, 4):
        run.log({"step": step, "loss": 1 / step})
    run.save_state(3, STATE)
    run.log({"step": 4})
    with open(run.metrics, "a") as file:
        file.write('{"step": 5, "lo')  # a kill in the middle of a line
    step, tensors = RunFolder(tmp_path, CONFIG).load_state()
    assert step == 3 and tensors.keys() == STATE.keys()
    assert all(torch.equal(tensors[name], STATE[name]) for name in STATE)
    run.truncate_log(step)
    assert records(run.folder) == [{"step": step, "loss": 1 / step} for step in range(1, 4)]


def test_a_finished_run_says_so_and_keeps_no_state(tmp_path):
    run = RunFolder(tmp_path, CONFIG)
    run.log({"step": 1})
    run.save_state(1, STATE)
    assert not run.finished
    run.finish()
    assert RunFolder(tmp_path, CONFIG).finished and not run.state.exists()
    assert records(run.folder) == [{"step": 1}]


def test_a_damaged_state_and_one_of_another_version_are_refused_with_the_way_out(tmp_path):
    run = RunFolder(tmp_path, CONFIG)
    run.state.write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"state.safetensors: not a complete .*; delete it to start again"
    ):
        run.load_state()
    save_file(STATE, run.state, {"step": "3"})
    with pytest.raises(ValueError, match="made by another version; delete it"):
        run.load_state()
