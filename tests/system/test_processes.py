"""Two processes are one run: the same adapter, log and episodes, and they end together."""

import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import tiny
import torch
import toy
from hypothesis import given
from hypothesis import strategies as st

from minidpo.acting import collect
from minidpo.acting.policies import Job
from minidpo.data.episodes import read
from minidpo.learning import sft as sft_learner
from minidpo.system import processes
from minidpo.system.run_folder import records

ROOT = Path(__file__).parents[2]
SMALL = {"steps": 4, "warmup": 1, "save_every": 1}
RUNS = {
    "sft": (toy.sft, SMALL),
    "dpo8bit": (
        toy.dpo,
        SMALL | {"batch": 1, "optimizer": "adamw8bit", "nll": 0.5},
    ),  # rank 1 idles
    "kto": (toy.dpo, SMALL | {"batch": 3, "loss": "kto"}),
}
LONG = {"steps": 30, "batch": 2, "save_every": 4}


def work(folder):
    """What each of the processes does."""
    for name, (learner, options) in RUNS.items():
        learner(folder, folder / f"two-{name}", **options)
    said = [processes.all_gather({"rank": processes.rank(), "long": "ö" * 999 * processes.rank()})]
    try:
        with processes.fail_together():
            if processes.rank() == 1:
                raise OSError("no space left in rank 1")
    except (OSError, ValueError) as error:
        said.append(str(error))
    real = sft_learner.batch_scores
    spoilt = float("nan") if processes.rank() == 1 else 1.0
    sft_learner.batch_scores = lambda *args: real(*args) * spoilt
    try:
        toy.sft(folder, folder / "nan", **SMALL)
    except ValueError as error:
        said.append(str(error))
    sft_learner.batch_scores = real
    (folder / f"said-{processes.rank()}.json").write_text(json.dumps(said))


def train_long(folder, out):
    toy.sft(folder, out, **LONG)


def command(function, *paths):
    """The words after `python` that call a function of this file as one process of several."""
    code = (
        "import pathlib, test_processes as t; from minidpo.system.command_line import main\n"
        f"main(lambda given: t.{function}(*map(pathlib.Path, given)))"
    )
    return ("-c", code, *paths)


def spawn(n, *command):
    """The command n times, as torchrun starts it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    return [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            cwd=ROOT,
            text=True,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **group, "RANK": str(k), "LOCAL_RANK": str(k)},
        )
        for k in range(n)
    ]


def ended(started, timeout=1200):
    """Of each its exit code and what it printed."""
    return [(process.communicate(timeout=timeout), process.returncode) for process in started]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Everything trained by one process, and by two."""
    folder = toy.prepare(tmp_path_factory.mktemp("parallel"))
    started = spawn(2, *command("work", folder))
    for name, (learner, options) in RUNS.items():
        learner(folder, folder / f"one-{name}", **options)
    for (_, err), status in ended(started):
        assert status == 0, err
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_train_the_adapter_of_one_and_log_its_numbers(folder, name):
    one, two = folder / f"one-{name}", folder / f"two-{name}"
    expected, found = toy.adapter(one), toy.adapter(two)
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key], rtol=0, atol=1e-6)
    (_, log), (_, other) = toy.finished(one), toy.finished(two)
    assert len(log) == len(other) == 4
    for record, wanted in zip(other, log):
        assert record == pytest.approx(wanted, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("file", ["dpo8bit/reference", "kto/reference", "kto/reference-baseline"])
def test_the_reference_scored_by_two_is_that_of_one_to_the_last_bit(folder, file):
    one, two = (folder / f"{run}-{file}.safetensors" for run in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


def test_an_error_in_one_rank_is_raised_in_all_and_nothing_of_that_step_is_kept(folder):
    said = [json.loads((folder / f"said-{rank}.json").read_text()) for rank in range(2)]
    assert said[0] == said[1]
    everybody, full, odd = said[0]
    assert everybody == [{"rank": 0, "long": ""}, {"rank": 1, "long": "ö" * 999}]
    assert full == "no space left in rank 1"
    assert "score is nan" in odd and "\n" not in odd
    assert records(folder / "nan") == [] and not (folder / "nan" / "state.safetensors").exists()


@given(st.lists(st.integers(1, 99), max_size=30), st.integers(1, 8))
def test_every_part_has_one_owner_and_nobody_has_much_more_than_another(costs, ranks):
    owner = processes.assign_ranks(costs, ranks)
    loads = [sum(cost for cost, of in zip(costs, owner) if of == rank) for rank in range(ranks)]
    assert len(owner) == len(costs) and sum(loads) == sum(costs)
    assert max(loads) - min(loads) <= max(costs, default=0)


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5), st.integers(0, 2)), unique=True),
    st.integers(1, 4),
    st.data(),
)
def test_instances_are_dealt_out_whole_and_each_job_once(keys, ranks, data):
    jobs = [Job(*key, limit=9) for key in keys]
    done = set(data.draw(st.lists(st.sampled_from(keys), unique=True)) if keys else ())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "world_size", lambda: ranks)
        shares = []
        for rank in range(ranks):
            patch.setattr(processes, "rank", lambda rank=rank: rank)
            shares.append(collect.share_of_rank(jobs, done))
    assert Counter(job.key for share in shares for job in share) == Counter(set(keys) - done)
    instances = [{job.instance for job in share} for share in shares]
    assert sum(map(len, instances)) == len(set().union(*instances))
    assert max(map(len, instances)) - min(map(len, instances)) <= 1


def test_what_a_killed_run_of_more_processes_left_beside_its_file_is_taken_into_it(tmp_path):
    out = tmp_path / "episodes.jsonl"
    whole = [tiny.episode(seed=seed) for seed in range(6)]
    toy.episodes_file(out, whole[:2])
    toy.episodes_file(
        tmp_path / "episodes.jsonl.rank1", whole[1:4]
    )  # one of them was taken before the kill
    with open(tmp_path / "episodes.jsonl.rank1", "a") as file:
        file.write(whole[4].to_json()[:99])
    (tmp_path / "episodes.jsonl.rank2").touch()
    toy.episodes_file(tmp_path / "episodes.jsonl.ranked", [tiny.episode(seed=9)])  # somebody's own
    with collect.open_rank_file(out) as writer:
        assert writer.done == {episode.key for episode in whole[:4]}
        writer.extend(whole[4:])
        collect.merge_rank_files(writer, [e.key for e in reversed(whole)])
    assert read(out) == whole[::-1] and {path.name for path in tmp_path.iterdir()} == {
        out.name,
        "episodes.jsonl.ranked",
    }


def wait_for(true, seconds=120):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_run_that_loses_a_process_ends_with_one_line_and_goes_on_with_any_number(
    folder, tmp_path
):
    run, log = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    started = spawn(2, *command("train_long", folder, run))
    wait_for(lambda: log.is_file() and log.read_bytes().count(b"\n") > 5)
    started[0].kill()
    (_, err), status = ended(started)[1]
    assert status == 2 and processes.GO_ON in err.strip().splitlines()[-1]
    assert not (run / "done").exists()
    train_long(folder, run)
    train_long(folder, tmp_path / "one")
    for name, tensor in toy.adapter(run).items():
        torch.testing.assert_close(tensor, toy.adapter(tmp_path / "one")[name], rtol=0, atol=1e-5)
    assert len(records(run)) == 30


@pytest.mark.slow
def test_collecting_in_any_number_of_processes_and_killed_in_between_writes_the_file_of_one(
    tmp_path,
):
    one, many = tmp_path / "one", tmp_path / "many"
    toy.play(one)
    for n in (3, 2):
        before = sum(path.read_bytes().count(b"\n") for path in many.glob("episodes.jsonl*"))
        started = spawn(n, *command("toy.play", many))
        path = many / "episodes.jsonl"
        wait_for(lambda: path.exists() and path.read_bytes().count(b"\n") > before + 4)  # noqa: B023
        for process in started:
            process.kill()
        ended(started)
    assert [status for _, status in ended(spawn(2, *command("toy.play", many)))] == [0, 0]
    assert read(many / "episodes.jsonl") == read(one / "episodes.jsonl")
    assert {path.name for path in many.iterdir()} == {path.name for path in one.iterdir()}
