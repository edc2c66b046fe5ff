"""Two processes are one run: the same adapter, log and episodes, and they end together."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_sft_dpo import HERE, WRONG, adapter, episodes_file, tiny

from minidpo import commands
from minidpo.acting import collect
from minidpo.acting.policies import Job
from minidpo.config import (
    DPO,
    GRPO,
    PPO,
    RM,
    SFT,
    DPOCommand,
    GRPOCommand,
    PPOCommand,
    RMCommand,
    SFTCommand,
)
from minidpo.data.episodes import Writer, read
from minidpo.learning import preferences
from minidpo.learning import sft as learning_sft
from minidpo.learning.dpo import dpo as train_dpo
from minidpo.learning.grpo import grpo as train_grpo
from minidpo.learning.ppo import ppo as train_ppo
from minidpo.learning.rm import rm as train_rm
from minidpo.learning.sft import sft as train_sft
from minidpo.memory import loading, lora
from minidpo.memory.lora import LoRAConfig
from minidpo.system import processes
from minidpo.system.run_folder import records

ROOT = Path(__file__).parents[2]
TIMES = ("tokens_per_s", "peak_memory_mib")
SMALL = {"steps": 4, "lr": 1e-4, "warmup": 1, "save_every": 1}
LOSSES = {
    "dpo": DPO(batch=5, **SMALL),
    "kto": DPO(batch=3, loss="kto", pairs="unpaired", **SMALL),
    "dpo8bit": DPO(batch=1, optimizer="adamw8bit", loss="ipo_sum", nll=0.5, **SMALL),
}  # rank 1 idles
OTHERS = {
    "grpo": (train_grpo, GRPOCommand, GRPO(batch=8, kl=0.1, **SMALL)),
    "ppo": (train_ppo, PPOCommand, PPO(batch=8, **SMALL)),
    "rm": (train_rm, RMCommand, RM(batch=5, held_out=0.4, **SMALL)),
}


def prepared(folder):
    """A base, an adapter that does something, demonstrations and rollouts of five instances."""
    tiny.checkpoint(folder / "base")
    right, both = (tiny.CLICK_2,), (tiny.CLICK_1, tiny.CLICK_2)
    episodes_file(
        folder / "demos.jsonl", [tiny.episode(both if n % 2 else right, seed=n) for n in range(5)]
    )
    group = [
        (right, "solved"),
        (both, "solved"),
        ((WRONG,), "failed"),
        ((tiny.CLICK_1, WRONG), "limit"),
    ]
    episodes_file(
        folder / "rollouts.jsonl",
        [
            tiny.episode(
                said, outcome, seed=seed, index=index, instruction=f"Click on Submit, {seed}."
            )
            for seed in range(5)
            for index, (said, outcome) in enumerate(group)
        ],
    )
    model, _ = loading.open_base(str(folder / "base"), HERE)
    lora.attach(model, LoRAConfig(rank=128), torch.Generator().manual_seed(8))
    with torch.no_grad():
        for layer in lora.layers(model).values():
            layer.lora_B.normal_(0, 0.02, generator=torch.Generator().manual_seed(9))
    lora.save(model, folder / "adapter", "base")


def sft(folder, out, **options):
    train_sft(
        SFTCommand(
            str(folder / "base"),
            (folder / "demos.jsonl",),
            out=out,
            machine=HERE,
            lora=LoRAConfig(rank=4, dropout=options.pop("dropout", 0.0)),
            sft=SFT(**{"batch": 4, **SMALL, **options}),
        )
    )


def dpo(folder, out, options):
    train_dpo(
        DPOCommand(
            str(folder / "base"),
            folder / "adapter",
            data=(folder / "rollouts.jsonl",),
            out=out,
            machine=HERE,
            dpo=options,
        )
    )


def train_all(folder, count):
    sft(folder, folder / f"{count}-sft")
    for name, options in LOSSES.items():
        dpo(folder, folder / f"{count}-{name}", options)
    for name, (train, command, options) in OTHERS.items():
        train(
            command(
                str(folder / "base"),
                adapter=folder / "adapter",
                data=(folder / "rollouts.jsonl",),
                out=folder / f"{count}-{name}",
                machine=HERE,
                **{name: options},
            )
        )


def work(folder):
    """What each of the processes does."""
    said = []
    train_all(folder, "two")
    said.append(processes.all_gather({"rank": processes.rank()}))
    longer = "naïve 你好 " * (1 + 500 * processes.rank())
    said.append(processes.all_gather(longer) == ["naïve 你好 ", "naïve 你好 " * 501])
    try:
        with processes.fail_together():
            if processes.rank() == 1:
                raise OSError("no space left in rank 1")
    except (OSError, ValueError) as error:
        said.append(str(error))
    real = learning_sft.batch_scores
    learning_sft.batch_scores = lambda *args: (
        real(*args) * (float("nan") if processes.rank() == 1 else 1)
    )
    try:
        sft(folder, folder / "nan")
    except ValueError as error:
        said.append(str(error))
    learning_sft.batch_scores = real
    try:
        sft(folder, folder / "dropout", dropout=0.1)
    except ValueError as error:
        said.append(str(error))
    (folder / f"said-{processes.rank()}.json").write_text(json.dumps(said))


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
    folder = tmp_path_factory.mktemp("parallel")
    prepared(folder)
    code = (
        "import pathlib, sys; from minidpo.system.command_line import main; import test_processes as t; "
        "main(lambda given: t.work(pathlib.Path(given[0])))"
    )
    started = spawn(2, "-c", code, folder)
    train_all(folder, "one")
    for (_, err), status in ended(started):
        assert status == 0, err
    return folder


def test_cores_are_those_that_this_process_may_use():
    all_of_them = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(all_of_them)})
        assert processes.cores() == 1
    finally:
        os.sched_setaffinity(0, all_of_them)
    assert processes.cores() == len(all_of_them)


def test_without_torchrun_there_is_one_rank_that_does_everything_itself():
    assert (processes.world_size(), processes.rank(), processes.all_gather([1])) == (1, 0, [[1]])
    with processes.process_group():
        assert not torch.distributed.is_initialized()
    parts = [[0, 2], [1]]
    assert processes.rank_parts(parts, [3, 9, 4]) == parts
    assert processes.on_rank_0(sorted, [2, 1]) == [1, 2]
    numbers = {"loss": 0.1}
    assert processes.sum_numbers(numbers) == numbers
    processes.refuse_torchrun("anything")


@pytest.mark.parametrize("name", ["sft", *LOSSES, *OTHERS])
def test_two_processes_train_the_adapter_of_one_and_log_its_numbers(folder, name):
    one, two = folder / f"one-{name}", folder / f"two-{name}"
    expected = adapter(one)
    for key, tensor in adapter(two).items():
        torch.testing.assert_close(tensor, expected[key], rtol=0, atol=1e-6)
    logs = [
        [{k: v for k, v in record.items() if k not in TIMES} for record in records(run)]
        for run in (one, two)
    ]
    assert len(logs[0]) == len(logs[1]) == 4 and logs[0][0].keys() == logs[1][0].keys()
    for record, wanted in zip(*logs):
        assert record == pytest.approx(wanted, rel=1e-6, abs=1e-6)


def test_what_two_hold_out_and_value_is_what_one_does(folder):
    for name in ("ppo", "rm"):
        one, two = (
            load_file(folder / f"{count}-{name}/adapter/head.safetensors")
            for count in ("one", "two")
        )
        assert one.keys() == two.keys()
        for key, tensor in two.items():
            torch.testing.assert_close(tensor, one[key], rtol=0, atol=1e-6)
    one, two = (
        json.loads((folder / f"{count}-rm/result.json").read_text()) for count in ("one", "two")
    )
    assert one["held_out"] == pytest.approx(two["held_out"], abs=1e-6)
    assert one["best_of_n"] == two["best_of_n"]


def test_a_rank_without_a_gpu_of_its_own_is_refused_before_anything_is_read(monkeypatch):
    monkeypatch.setattr(processes, "world_size", lambda: 2)
    monkeypatch.setattr(processes, "all_gather", lambda value, phase=False: [value, value])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for fits in ("cpu", "cuda", "cuda:1"):
        processes.require_own_gpu(torch.device(fits))
    with pytest.raises(
        ValueError, match="each process needs its own GPU: start at most 2, and leave out"
    ):
        processes.require_own_gpu(torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="start at most 1"):
        processes.require_own_gpu(torch.device("cuda"))


@pytest.mark.parametrize("file", ["dpo/reference", "kto/reference", "kto/reference-baseline"])
def test_the_reference_scored_by_two_is_that_of_one_to_the_last_bit(folder, file):
    one, two = (folder / f"{run}-{file}.safetensors" for run in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


def test_scoring_waits_for_the_slowest_rank_before_what_has_the_patience_of_a_step(monkeypatch):
    """A rank's share of all trajectories may take hours, and nothing of it is kept before all are done."""
    called = []
    monkeypatch.setattr(preferences, "micro_batches", lambda *_: called.append("share") or [])
    monkeypatch.setattr(
        preferences, "all_gather", lambda _, phase=False: called.append(f"wait {phase}")
    )
    monkeypatch.setattr(preferences, "sum_over_ranks", lambda _: called.append("sum"))
    preferences.over_all(None, [1, 2], SimpleNamespace(head_weight=torch.zeros(1)), HERE, None)
    assert called == ["share", "wait True", "sum"]


def test_an_error_in_one_rank_is_raised_in_all_and_nothing_of_that_step_is_kept(folder):
    said = [json.loads((folder / f"said-{rank}.json").read_text()) for rank in range(2)]
    assert said[0] == said[1]
    everybody, long, full, odd, dropout = said[0]
    assert everybody == [{"rank": 0}, {"rank": 1}] and long
    assert full == "no space left in rank 1"
    assert re.fullmatch(r"click-button seed \d episode 0: its score is nan; .*", odd)
    assert records(folder / "nan") == [] and not (folder / "nan" / "state.safetensors").exists()
    assert dropout == (
        "dropout is drawn a micro-batch at a time, and would be drawn otherwise in 2 "
        "processes; start it without torchrun"
    )


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
            patch.setattr(processes, "rank", lambda: rank)
            shares.append(collect.share_of_rank(jobs, done))
    assert Counter(job.key for share in shares for job in share) == Counter(set(keys) - done)
    instances = [{job.instance for job in share} for share in shares]
    assert sum(map(len, instances)) == len(set().union(*instances))
    assert max(map(len, instances)) - min(map(len, instances)) <= 1


def test_what_a_killed_run_of_more_processes_left_beside_its_file_is_taken_into_it(tmp_path):
    out = tmp_path / "episodes.jsonl"
    whole = [tiny.episode(seed=seed) for seed in range(6)]
    episodes_file(out, whole[:2])
    episodes_file(
        tmp_path / "episodes.jsonl.rank1", whole[1:4]
    )  # one of them was taken before the kill
    with open(tmp_path / "episodes.jsonl.rank1", "a") as file:
        file.write(whole[4].to_json()[:99])
    (tmp_path / "episodes.jsonl.rank2").touch()
    episodes_file(tmp_path / "episodes.jsonl.ranked", [tiny.episode(seed=9)])  # somebody's own
    with collect.open_rank_file(out) as writer:
        assert writer.done == {episode.key for episode in whole[:4]}
        writer.extend(whole[4:])
        collect.merge_rank_files(writer, [e.key for e in reversed(whole)])
    assert read(out) == whole[::-1] and {path.name for path in tmp_path.iterdir()} == {
        out.name,
        "episodes.jsonl.ranked",
    }


def test_a_file_that_another_process_still_plays_to_is_not_taken(tmp_path):
    out = tmp_path / "episodes.jsonl"
    with Writer(tmp_path / "episodes.jsonl.rank1") as other:
        other.add(tiny.episode())
        with pytest.raises(ValueError, match="rank1: another process is writing to it"):
            with collect.open_rank_file(out):
                pass
    assert read(tmp_path / "episodes.jsonl.rank1") == [tiny.episode()]


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
TRAIN = (
    "train.py",
    "sft",
    "--sft.steps",
    "30",
    "--sft.batch",
    "2",
    "--sft.save-every",
    "4",
    "--lora.rank",
    "4",
    "--machine.device",
    "cpu",
)


def train(folder, out, *before):
    return [
        *before,
        *TRAIN,
        "--model",
        folder / "base",
        "--data",
        folder / "demos.jsonl",
        "--out",
        out,
    ]


def logged(out):
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def wait_for(true, seconds=120):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_that_loses_a_process_ends_with_one_line_and_goes_on_with_any_number(
    folder, tmp_path, killed
):
    started = spawn(2, *train(folder, tmp_path / "run"))
    wait_for(lambda: logged(tmp_path / "run") > 5)
    started[killed].kill()
    (_, err), status = ended(started)[1 - killed]
    assert status == 2
    line = err.strip().splitlines()[-1]
    assert line.startswith("error: another process of this run has ended or does not answer (")
    assert line.endswith("); the same command goes on from what is saved")
    assert 0 < logged(tmp_path / "run") < 30
    if killed:
        assert [status for _, status in ended(spawn(2, *train(folder, tmp_path / "run")))] == [0, 0]
    else:
        commands.train([str(word) for word in train(folder, tmp_path / "run")[1:]])
    sft(folder, tmp_path / "one", steps=30, batch=2, lr=1e-3, warmup=10)
    for name, tensor in adapter(tmp_path / "run").items():
        torch.testing.assert_close(tensor, adapter(tmp_path / "one")[name], rtol=0, atol=1e-5)
    assert logged(tmp_path / "run") == 30


@pytest.mark.slow
def test_torchrun_ends_a_run_that_lost_a_process_and_goes_on_to_the_same_bytes(folder, tmp_path):
    def torchrun(out):
        command = [sys.executable, *map(str, train(folder, out, *TORCHRUN))]
        return subprocess.Popen(
            command,
            cwd=ROOT,
            text=True,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert torchrun(whole).communicate() and (whole / "done").is_file()
    process = torchrun(killed)
    wait_for(lambda: logged(killed) > 5)
    ranks = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True
    ).stdout.split()
    assert len(ranks) == 2
    os.kill(int(ranks[1]), signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0 and "the same command goes on from what is saved" in err
    assert torchrun(killed).communicate() and (killed / "done").is_file()
    for name in ("adapter/adapter_model.safetensors", "adapter/adapter_config.json"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()


def played(folder, n, *command):
    """Run to the end in n processes; what rank 0 printed."""
    results = ended(spawn(n, *command))
    assert [status for _, status in results] == [0] * n, results
    assert all(not out and not err for (out, err), _ in results[1:])  # rank 0 alone speaks
    return results[0][0][0]


@pytest.mark.slow
def test_collect_in_any_number_of_processes_and_killed_in_between_writes_the_file_of_one(tmp_path):
    command = (
        "collect.py",
        "--policy",
        "expert",
        "--noise",
        "0.5",
        "--split",
        "validation",
        "--tasks",
        "login-user,click-tab-2",
        "--instances",
        "60",
        "--group",
        "2",
        "--machine.pages",
        "3",
        "--out",
    )
    one, many = tmp_path / "one.jsonl", tmp_path / "many.jsonl"
    played(tmp_path, 1, *command, one)
    for n in (3, 2):
        before = sum(path.read_bytes().count(b"\n") for path in tmp_path.glob("many.jsonl*"))
        started = spawn(n, *command, many)  # what was left is taken into the file first
        wait_for(lambda: many.exists() and many.read_bytes().count(b"\n") > before + 8)
        for process in started:
            process.kill()
        ended(started)
    said = played(tmp_path, 2, *command, many)
    assert read(many) == read(one) and len(read(one)) == 240
    assert said.startswith(f"{many}: 240 episodes")
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{name}.{kind}" for name in ("one", "many") for kind in ("jsonl", "metrics.jsonl")
    }


@pytest.mark.slow
def test_the_whole_loop_in_two_processes_plays_and_learns_what_it_does_in_one(tmp_path):
    command = (
        "train.py",
        "loop",
        "--tasks",
        "enter-text,click-option",
        "--demonstrations",
        "2",
        "--instances",
        "3",
        "--group",
        "4",
        "--episodes",
        "3",
        "--sampled",
        "1",
        "--validation",
        "2",
        "--rounds",
        "2",
        "--sft.steps",
        "3",
        "--dpo.steps",
        "3",
        "--machine.pages",
        "4",
        "--machine.device",
        "cpu",
        "--sampling.max-new-tokens",
        "48",
        "--out",
    )
    one, two = tmp_path / "one", tmp_path / "two"
    played(tmp_path, 1, *command, one)
    played(tmp_path, 2, *command, two)
    results = [json.loads((out / "result.json").read_text()) for out in (one, two)]
    names = ("version", "agents", "comparison", "validation", "kept_round")
    assert [results[0][name] for name in names] == [results[1][name] for name in names]
    files = [
        {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
        for out in (one, two)
    ]
    assert files[0] == files[1]
    for path in (one / "sft", one / "round-1" / "dpo"):
        for name, tensor in adapter(path).items():
            torch.testing.assert_close(
                adapter(two / path.relative_to(one))[name], tensor, rtol=0, atol=1e-5
            )


@pytest.mark.slow
def test_evaluate_in_two_processes_writes_the_episodes_and_results_of_one(tmp_path):
    command = (
        "evaluate.py",
        "--tasks",
        "click-button,enter-text",
        "--episodes",
        "5",
        "--machine.pages",
        "3",
        "--machine.device",
        "cpu",
        "--out",
    )
    for n in (1, 2):
        played(tmp_path, n, *command, tmp_path / str(n))
    assert read(tmp_path / "1" / "base.jsonl") == read(
        tmp_path / "2" / "base.jsonl"
    )  # to the last log-prob
    one, two = (json.loads((tmp_path / n / "result.json").read_text()) for n in "12")
    assert one == two and (tmp_path / "2" / "report.html").is_file()
