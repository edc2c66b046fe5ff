"""The scripts, killed without warning and started again: the files are those of an undisturbed run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_browser import children, left, processes, wait_for

from minidpo.episodes import read

ROOT = Path(__file__).parents[1]
TIMES = ("tokens_per_s", "peak_memory_mib")
EXPERT = ("collect.py --policy expert --noise 0.5 --split validation --tasks login-user,click-tab-2 "
          "--instances 60 --group 1 --machine.pages 4")
MODEL = ("collect.py --sampling.max-new-tokens 48 --split validation --tasks click-button,focus-text-2 "
         "--instances 12 --group 4 --machine.pages 8 --machine.device cpu")
SFT = "train.py sft --sft.steps 40 --sft.batch 4 --sft.save-every 3 --machine.device cpu --data"


def start(command: str, out: Path) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, *command.split(), "--out", str(out)], cwd=ROOT,
                            env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def run(command: str, out: Path) -> float:
    """To the end; seconds taken."""
    began = time.monotonic()
    assert start(command, out).wait(timeout=300) == 0
    return time.monotonic() - began


def run_and_kill(command: str, out: Path, seconds: float, kills: int, seed: int) -> int:
    """Kill it and its browser at random moments within the time that a run takes; then let it end."""
    rng, killed = random.Random(seed), 0
    for _ in range(kills):
        process = start(command, out)
        try:
            process.wait(timeout=rng.uniform(0.3, 0.7) * seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            killed += 1
    run(command, out)
    return killed


@pytest.mark.slow
@pytest.mark.parametrize("command", [EXPERT, MODEL], ids=["expert", "model"])
def test_collect_killed_at_random_moments_writes_the_same_file(command, tmp_path):
    seconds = run(command, tmp_path / "whole.jsonl")
    assert run_and_kill(command, tmp_path / "killed.jsonl", seconds, kills=3, seed=1) > 0
    assert read(tmp_path / "killed.jsonl") == read(tmp_path / "whole.jsonl")  # all but the seconds


@pytest.mark.slow
@pytest.mark.parametrize("stopped", ["nothing", "renderer", "chromium", "driver"])
@pytest.mark.parametrize("kill", [os.kill, os.killpg], ids=["alone", "with its process group"])
def test_a_killed_collect_leaves_no_process(kill, stopped, tmp_path):
    out = tmp_path / "episodes.jsonl"
    process = start(EXPERT, out)
    wait_for(lambda: out.exists() and out.read_bytes().count(b"\n") > 5, seconds=60)
    below = children(process.pid)
    assert stopped == "nothing" or processes(stopped, process.pid)
    for pid in processes(stopped, process.pid):
        os.kill(pid, signal.SIGSTOP)
    kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: not left(below), seconds=10)


@pytest.mark.slow
def test_training_killed_at_random_moments_leaves_the_same_adapter_and_log(tmp_path):
    run(EXPERT.replace("--noise 0.5", ""), tmp_path / "demos.jsonl")
    command = f"{SFT} {tmp_path / 'demos.jsonl'}"
    seconds = run(command, tmp_path / "whole")
    assert run_and_kill(command, tmp_path / "killed", seconds, kills=3, seed=2) > 0
    for name in ("adapter/adapter_model.safetensors", "adapter/adapter_config.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    logs = [[{k: v for k, v in json.loads(line).items() if k not in TIMES}
             for line in (tmp_path / folder / "metrics.jsonl").read_text().splitlines()]
            for folder in ("whole", "killed")]
    assert logs[0] == logs[1] and len(logs[0]) == 40
