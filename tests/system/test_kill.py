"""Killed without warning at random moments, collecting and training leave the files of an undisturbed run.

Most of the time of a start is Python's own imports. So one process imports, and for each life that is to be
ended it makes a copy of itself (`serve`): there can be many.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import test_sft_dpo as toy
from process_tree import children, left, processes, wait_for
from test_sft_dpo import folder  # noqa: F401 (a fixture)

from minidpo.acting.collect import collect
from minidpo.config import CollectCommand, Sampling
from minidpo.data.episodes import read
from minidpo.memory.machine import Machine
from minidpo.system.run_folder import records

ROOT = Path(__file__).parents[2]
TIMES = ("tokens_per_s", "peak_memory_mib")
EXPERT = (
    "collect.py --policy expert --noise 0.5 --split validation --tasks login-user,click-tab-2 "
    "--instances 60 --group 1 --machine.pages 4"
)
SHOWN = CollectCommand(
    policy="expert",
    noise=0.5,
    tasks="login-user,click-tab-2",
    split="validation",
    instances=25,
    group=1,
    machine=Machine(pages=4),
)
PLAYED = replace(
    SHOWN,
    policy="model",
    noise=0.0,
    tasks="click-button,focus-text-2",
    instances=5,
    group=4,
    sampling=Sampling(max_new_tokens=48),
    machine=Machine(pages=8, device="cpu"),
)
WORK = {  # four bits, and moments in eight, of which a state is saved after every other step
    "short": lambda toys, out: toy.in_four_bits(toy.sft, toys, out, steps=4, save_every=2),
    "sft": lambda toys, out: toy.in_four_bits(toy.sft, toys, out, steps=10, save_every=2),
    "dpo": lambda toys, out: toy.in_four_bits(toy.dpo, toys, out, steps=8, save_every=2),
    "expert": lambda _, out: collect(replace(SHOWN, out=out / "episodes.jsonl")),
    "model": lambda _, out: collect(replace(PLAYED, out=out / "episodes.jsonl")),
}


def serve(toys):
    """For each line, [work, folder, seconds, in a write]: do it in a process of its own, killed after so many
    seconds, or then as soon as a file is being written. Answers how it ended."""
    import torch._dynamo  # noqa: F401 (which the first optimizer of each life would import)

    for line in sys.stdin:
        name, out, seconds, in_write = json.loads(line)
        child = os.fork()
        if child == 0:
            os.dup2(2, 1)  # what it prints is no answer
            status = 1
            try:
                WORK[name](Path(toys), Path(out))
                status = 0
            finally:
                os._exit(status)
        end = time.monotonic() + seconds
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
            if time.monotonic() > end and (not in_write or any(Path(out).rglob(".*.*.*.*"))):
                os.kill(child, signal.SIGKILL)
                ended = os.waitpid(child, 0)
                break
            time.sleep(0.0005)
        print(os.waitstatus_to_exitcode(ended[1]), flush=True)


@contextmanager
def server(toys):
    """A function that lets a life of this work be lived, and says how it ended."""
    code = "import sys, test_kill; test_kill.serve(sys.argv[1])"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(toys)],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )

    def live(name, out, seconds=600.0, in_write=False):
        process.stdin.write(json.dumps([name, str(out), seconds, in_write]) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    with process:
        yield live
        process.stdin.close()


def left_behind(out):
    """All that there is, without times (two episodes that differ in them are equal) and collect.py's log of
    its progress, in which a killed process and the next count for themselves."""
    files = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if path.name == "metrics.jsonl":
            files[name] = [
                {k: v for k, v in step.items() if k not in TIMES} for step in records(path.parent)
            ]
        elif path.name == "episodes.jsonl":
            files[name] = read(path)
        elif path.is_file() and path.name != "episodes.metrics.jsonl":
            files[name] = path.read_bytes()
    return files


def killed(live, work, out, kills, seed):
    """Kill so many lives of the work, beginning anew whenever it comes to its end: always the same one."""
    began, rng = time.monotonic(), random.Random(seed)
    assert live(work, out) == 0
    seconds, whole = time.monotonic() - began, left_behind(out)
    assert whole
    while kills > 0:
        shutil.rmtree(out)
        while status := live(
            work, out, rng.uniform(0, 0.7) * seconds if kills > 0 else 600, kills % 3 == 0
        ):
            assert status == -signal.SIGKILL
            kills -= 1
        assert left_behind(out) == whole


@pytest.fixture(scope="module")
def live(folder):  # noqa: F811
    toy.in_four_bits(toy.sft, folder, folder / "sft-nf4", steps=2)  # what dpo starts from
    with server(folder) as live:
        yield live


def test_training_killed_now_and_then_leaves_the_same_files(live, tmp_path):
    killed(live, "short", tmp_path / "run", kills=3, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("work", ["sft", "dpo"])
def test_training_killed_fifteen_times_at_random_moments_leaves_the_same_files(
    live, tmp_path, work
):
    killed(live, work, tmp_path / "run", kills=15, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("work", ["expert", "model"])
def test_collecting_killed_fifteen_times_at_random_moments_leaves_the_same_episodes(
    live, tmp_path, work
):
    killed(live, work, tmp_path / "run", kills=15, seed=3)


def start(command: str, out: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *command.split(), "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


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
