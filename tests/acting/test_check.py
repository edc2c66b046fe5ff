"""`train.py check` on a whole machine and on broken ones: each says in one line what to do."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minidpo.acting import check as checks
from minidpo.config import CheckCommand

ROOT = Path(__file__).parents[2]


def run_check(*arguments, **changes):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **changes}
    done = subprocess.run([sys.executable, "train.py", "check", *arguments], cwd=ROOT, env=environment,
                          capture_output=True, text=True)
    return done.returncode, done.stdout


@pytest.fixture
def quick(monkeypatch):
    """Without what takes long: the model, the plans, the browser."""
    for name in ("model", "plan", "browser", "memory"):
        monkeypatch.setattr(checks, name, lambda *_, name=name: name)


def test_a_whole_machine_runs_the_demo_and_no_network_is_needed(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "MEMORY_GIB", 0.1)
    monkeypatch.setattr(checks, "CONFIGS", tmp_path)  # the plans have tests of their own
    shutil.copy(ROOT / "configs" / "demo.toml", tmp_path)
    assert checks.check(CheckCommand(model="minidpo/nano", out=tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:7]] == [
        "ok    Python", "ok    PyTorch", "ok    disk", "ok    browser", "ok    model", "ok    memory",
        "ok    configs/demo.toml"]
    assert lines[-1] == "the demo can run here: make demo"


def test_without_browser_and_model_both_are_named_and_the_exit_code_says_so(tmp_path):
    status, said = run_check("--model", str(tmp_path / "none"), "--out", str(tmp_path),
                             MINIDPO_CHROMIUM=str(tmp_path / "no-browser"))
    assert status == 1 and "the demo cannot run here: browser, model" in said
    assert "FAIL  browser: MINIDPO_CHROMIUM=" in said and "FAIL  model: " in said
    assert "Traceback" not in said and "ok    Python" in said


def test_a_full_disk_and_a_folder_that_cannot_be_written_are_told(quick, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 1000))
    with pytest.raises(SystemExit, match="1"):
        checks.check(CheckCommand(out=tmp_path))
    assert "FAIL  disk: 0.0 GiB are free under" in capsys.readouterr().out
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="1"):
        checks.check(CheckCommand(out=tmp_path / "file" / "runs"))
    assert "FAIL  disk: [Errno 20] Not a directory" in capsys.readouterr().out


def test_little_memory_is_told_with_what_helps(monkeypatch):
    monkeypatch.setattr(checks, "MEMORY_GIB", 10**6)
    with pytest.raises(ValueError, match="the demo takes up to 1e.06: close other programs, or give it"):
        checks.memory()


def test_an_old_pytorch_and_an_old_python_are_told(monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "__version__", "2.4.1+cpu")
    with pytest.raises(ValueError, match=r"2.4.1\+cpu is older than 2.9: run make setup"):
        checks.pytorch()
    code = ("import sys; sys.version_info = (3, 10); sys.version = '3.10.4 (main)'\n"
            "import minidpo")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "minidpo needs Python 3.11 or newer, and this is 3.10.4: run make setup\n"


def test_missing_packages_are_named_in_one_line(monkeypatch):
    code = ("import importlib.util as u\nfind = u.find_spec\n"
            "u.find_spec = lambda name: None if name in ('tyro', 'miniwob') else find(name)\n"
            "import minidpo.commands")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "has no tyro, miniwob: run make setup, then source .venv/bin/activate" in done.stderr


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
