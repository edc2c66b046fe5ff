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
from pathlib import Path

import pytest
import toy

from minidpo.data.episodes import read
from minidpo.system.run_folder import records

ROOT = Path(__file__).parents[2]
EIGHT_BITS = {"optimizer": "adamw8bit", "save_every": 2}
WORK = {
    "short": lambda toys, out: toy.dpo(toys, out, steps=4, **EIGHT_BITS),
    "sft": lambda toys, out: toy.sft(
        toys, out, toy.IN_FOUR_BITS, steps=10, rank=128, dropout=0.1, **EIGHT_BITS
    ),
    "dpo": lambda toys, out: toy.dpo(toys, out, steps=8, **EIGHT_BITS),
    "play": lambda _, out: toy.play(out),
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
                {k: v for k, v in step.items() if k not in toy.TIMES}
                for step in records(path.parent)
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
def live(folder):
    with server(folder) as live:
        yield live


def test_training_killed_now_and_then_leaves_the_same_files(live, tmp_path):
    killed(live, "short", tmp_path / "run", kills=3, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("work", ["sft", "dpo", "play"])
def test_work_killed_fifteen_times_at_random_moments_leaves_the_same_files(live, tmp_path, work):
    killed(live, work, tmp_path / "run", kills=15, seed=2)
