"""`train.py check` on a whole machine and on broken ones: a line for each thing, and what to do."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import envs
from minidpo.acting import check as checks
from minidpo.acting.check import Check, Need
from minidpo.memory.machine import GIB, Machine

ROOT = Path(__file__).parents[2]
NEEDS = {
    "demo": lambda: Need(1 * GIB, 2 * GIB, on_gpu=False),
    "large": lambda: Need(3 * GIB, 2 * GIB, on_gpu=False),
    "on-gpu": lambda: Need(3 * GIB, None, on_gpu=True),
}


@pytest.fixture
def check(capsys, tmp_path):
    """What is printed, by the first word of a thing; and the exit code."""

    def told(world="toy", needs=NEEDS, **options):
        code = 0
        try:
            options = {"model": "minidpo/nano", "out": tmp_path, **options}
            machine = Machine(device="cpu")
            checks.check(Check(**options), envs.world(world), machine, needs)
        except SystemExit as exit:
            code = exit.code
        *lines, last = capsys.readouterr().out.splitlines()
        words = (line.split(":")[0].split() for line in lines)
        return {name: verdict for verdict, name, *_ in words}, last, code

    return told


def test_a_whole_machine_runs_the_demo(check):
    told, last, code = check("miniwob")
    good = ("Python", "PyTorch", "disk", "miniwob", "memory", "model")
    assert {name for name, verdict in told.items() if verdict == "ok"} >= {*good}
    assert told["configs/large.toml"] == told["configs/on-gpu.toml"] == "no"
    assert "demo can run" in last and code == 0


def small(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 1000))
    return {}


def no_browser(monkeypatch, tmp_path):
    monkeypatch.setenv("MINIDPO_CHROMIUM", str(tmp_path / "nothing"))
    return {"world": "miniwob"}


def old_pytorch(monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "__version__", "2.4.1+cpu")
    return {}


@pytest.mark.parametrize(
    "broken, name",
    [
        (small, "disk"),
        (no_browser, "miniwob"),
        (old_pytorch, "PyTorch"),
        (lambda *_: {"model": "nowhere/none.gguf"}, "model"),
        (lambda *_: {"needs": {"demo": NEEDS["large"]}}, "memory"),
    ],
)
def test_what_is_missing_fails_alone_and_is_named_last(check, monkeypatch, tmp_path, broken, name):
    told, last, code = check(**broken(monkeypatch, tmp_path))
    assert [thing for thing, verdict in told.items() if verdict == "FAIL"] == [name]
    assert name in last and code == 1


def test_an_old_python_is_told_before_anything_is_imported():
    code = "import sys; sys.version_info = (3, 10); sys.version = '3.10.4 (main)'\nimport minidpo"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "3.10.4" in done.stderr
