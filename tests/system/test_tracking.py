"""A real MLflow store and real event files have every step of metrics.jsonl once."""

import importlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_loop
from test_sft_dpo import HERE, dpo, folder, killed  # noqa: F401  (a fixture)

from minidpo import loop
from minidpo.config import SFT, EvaluateCommand, SFTCommand
from minidpo.data import prompt
from minidpo.learning import preferences, trainer
from minidpo.learning.sft import sft as train_sft
from minidpo.memory.lora import LoRAConfig
from minidpo.model import checkpoint
from minidpo.results.evaluate import evaluate
from minidpo.system import tensors
from minidpo.system.files import read_json, write_json
from minidpo.system.run_folder import RunFolder
from minidpo.system.tracking import Tracking

CONFIG = {"seed": 1, "sft": {"lr": 2e-5}, "data": ["a", "b"], "machine": {"pages": 4}}
RATES = {
    "success": 0.5,
    "low": 0.2,
    "high": 0.8,
    "n": 4,
    "mean_steps": 2.0,
    "valid_action_rate": 1.0,
}
RESULT = {"sft": {"all": RATES, "tasks": {"click-link": RATES}}, "seed": 1}


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    pytest.importorskip("mlflow")
    return (
        tmp_path_factory.mktemp("store") / "mlflow.db"
    )  # one for all: making its tables takes seconds


@pytest.fixture
def at_exit(monkeypatch):
    """What would run when the process ends, when these folders are gone."""
    works = []
    monkeypatch.setattr(
        "minidpo.system.tracking.atexit",
        SimpleNamespace(register=works.append, unregister=works.remove),
    )
    return works


@pytest.fixture
def client(database, at_exit, monkeypatch, request):
    """A client of the local store, in which this test has an experiment of its own."""
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", request.node.name)
    client = MlflowClient()
    client.create_experiment(
        request.node.name, artifact_location=str(database.parent / request.node.name)
    )
    return client


def runs(client):
    """Of this test's experiment, the first one first."""
    experiment = client.get_experiment_by_name(os.environ["MLFLOW_EXPERIMENT_NAME"])
    return client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])


def history(client, run, name="loss"):
    return [
        (metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)
    ]


def half_and_rest(folder, track, first=None):
    """A run that is killed behind step 5, of which a state was kept after step 3, and then goes on."""
    run = RunFolder(folder, {**CONFIG, "track": first})
    run.begin()
    run.load_state()
    for step in range(1, 6):
        run.log({"step": step, "loss": 1 / step, "lr": 0.1})
        if step == 3:
            run.save_state(3, {})
    run = RunFolder(folder, {**CONFIG, "track": track})
    run.begin()
    start, _ = run.load_state()
    run.truncate_log(start)
    for step in range(start + 1, 7):
        run.log({"step": step, "loss": 1 / step, "lr": 0.1})
    return run


LOSSES = [(step, 1 / step) for step in range(1, 7)]


def test_a_run_that_was_killed_is_one_run_in_mlflow_and_has_every_step_once(
    client, tmp_path, capsys
):
    half_and_rest(tmp_path / "run", "mlflow", first="mlflow").finish()
    assert (
        f"tracked   mlflow ui --backend-store-uri {client.tracking_uri} " in capsys.readouterr().out
    )
    (run,) = runs(client)
    assert history(client, run) == LOSSES and history(client, run, "lr") == [
        (s, 0.1) for s, _ in LOSSES
    ]
    assert run.info.status == "FINISHED" and run.info.run_name == str(tmp_path / "run")
    assert run.data.params == {"seed": "1", "sft.lr": "2e-05", "data": "a, b", "machine.pages": "4"}
    again = RunFolder(tmp_path / "run", {**CONFIG, "track": "mlflow"})
    again.tracking.finish()  # as a stage does that finds its run finished
    assert len(runs(client)) == 1 and history(client, run) == LOSSES


def test_a_run_that_ends_before_it_is_complete_says_so_until_it_goes_on(client, at_exit, tmp_path):
    run = begun(tmp_path / "run")
    at_exit[0]()
    assert [kept.info.status for kept in runs(client)] == ["KILLED"]
    run = begun(tmp_path / "run")
    assert [kept.info.status for kept in runs(client)] == ["RUNNING"]
    run.finish()
    assert [kept.info.status for kept in runs(client)] == ["FINISHED"]


def test_a_run_may_be_tracked_from_its_second_half_on_or_when_it_is_over(client, tmp_path):
    half_and_rest(tmp_path / "half", "mlflow").finish()
    half_and_rest(tmp_path / "over", None).finish()
    assert not list((tmp_path / "over").glob("tracking*"))
    RunFolder(tmp_path / "over", {**CONFIG, "track": "mlflow"}).tracking.finish()
    assert [history(client, run) for run in runs(client)] == [LOSSES] * 2


def test_a_result_that_has_changed_since_is_told_again(client, tmp_path):
    """As that of a loop is which goes on for more rounds."""
    write_json(tmp_path / "run" / "result.json", RESULT)
    half_and_rest(tmp_path / "run", "mlflow").finish()
    better = json.loads(json.dumps(RESULT).replace("0.5", "0.75"))
    write_json(tmp_path / "run" / "result.json", better)
    for rounds in (2, 3):
        more = {
            "track": "mlflow",
            "rounds": rounds,
            "patience": rounds,
            "out": str(tmp_path / str(rounds)),
        }
        RunFolder(tmp_path / "run", {**CONFIG, **more}).tracking.finish()
    (run,) = runs(client)
    told = Path(client.download_artifacts(run.info.run_id, "results.json")).read_text()
    assert "0.75" in told and history(client, run) == LOSSES


def test_a_stage_leaves_its_adapter_and_settings_in_mlflow(client, folder, tmp_path, monkeypatch):  # noqa: F811
    command = SFTCommand(
        str(folder / "base"),
        (folder / "demos.jsonl",),
        out=tmp_path / "run",
        machine=HERE,
        sft=SFT(steps=5, save_every=2),
        lora=LoRAConfig(rank=4),
        track="mlflow",
    )
    with killed(monkeypatch, RunFolder, "log", 4):
        train_sft(command)
    train_sft(command)
    (run,) = runs(client)
    log = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert (
        history(client, run) == [(record["step"], record["loss"]) for record in log]
        and len(log) == 5
    )
    assert run.data.params["lora.rank"] == "4" and run.info.status == "FINISHED"
    kept = Path(client.download_artifacts(run.info.run_id, ""))
    assert {path.name for path in kept.iterdir()} == {"adapter", "config.json", "metrics.jsonl"}
    for name in ("adapter/adapter_model.safetensors", "metrics.jsonl"):
        assert (kept / name).read_bytes() == (tmp_path / "run" / name).read_bytes()


def go_away(monkeypatch, client):
    """Numbers don't reach the store any more."""

    def log_batch(*args, **kwargs):
        raise ConnectionError("no route to host\nand more")

    monkeypatch.setattr(type(client), "log_batch", log_batch)


def begun(folder, steps=1):
    """A tracked run with its first steps."""
    run = RunFolder(folder, {**CONFIG, "track": "mlflow"})
    run.begin()
    for step, loss in LOSSES[:steps]:
        run.log({"step": step, "loss": loss})
    return run


def test_a_server_that_goes_away_is_told_once_and_gets_at_the_end_what_it_missed(
    client, tmp_path, monkeypatch, capsys
):
    run = begun(tmp_path / "run")
    with monkeypatch.context() as patch:
        go_away(patch, client)
        for step, loss in LOSSES[1:4]:
            run.log({"step": step, "loss": loss})
    for step, loss in LOSSES[4:]:
        run.log({"step": step, "loss": loss})
    said = capsys.readouterr().err
    assert (
        said.count("--track mlflow: no route to host\nThe work goes on.") == 1
        and "and more" not in said
    )
    run.finish()
    (kept,) = runs(client)
    assert history(client, kept) == LOSSES and kept.info.status == "FINISHED"
    assert capsys.readouterr().err == ""


def test_a_server_that_stays_away_gets_at_the_next_start_what_it_missed(
    client, tmp_path, monkeypatch, capsys
):
    run = begun(tmp_path / "run")
    with monkeypatch.context() as patch:
        go_away(patch, client)
        for step, loss in LOSSES[1:]:
            run.log({"step": step, "loss": loss})
        run.finish()
    assert run.finished and capsys.readouterr().err.count("--track") == 1
    (kept,) = runs(client)
    assert history(client, kept) == LOSSES[:1] and kept.info.status == "RUNNING"
    RunFolder(tmp_path / "run", {**CONFIG, "track": "mlflow"}).tracking.finish()
    (kept,) = runs(client)
    assert history(client, kept) == LOSSES and kept.info.status == "FINISHED"


def test_a_server_that_is_not_there_at_the_start_is_an_error_but_for_a_part_of_a_loop(
    client, tmp_path, monkeypatch, capsys
):
    RunFolder(tmp_path / "loop", {**CONFIG, "track": "mlflow"}).begin()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    with pytest.raises(
        ValueError, match=r"--track mlflow: API request to http://127.0.0.1:1\S+ failed"
    ):
        RunFolder(tmp_path / "run", {**CONFIG, "track": "mlflow"})
    assert not (tmp_path / "run").exists()
    part = RunFolder(tmp_path / "loop" / "sft", {**CONFIG, "track": "mlflow"})
    part.begin()
    part.log({"step": 1, "loss": 1.0})
    part.finish()
    assert part.finished and capsys.readouterr().err.count("--track mlflow: API request") == 1


@pytest.mark.parametrize("name", ["mlflow", "tensorboard"])
def test_a_tracker_that_is_not_installed_is_said_before_any_work(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ValueError, match=f"--track {name} needs a package: pip install {name}"):
        RunFolder(tmp_path / "run", {**CONFIG, "track": name})
    assert not (tmp_path / "run").exists()


def test_neither_library_is_imported_unless_it_is_asked_for(tmp_path, monkeypatch):
    for name in ("mlflow", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)  # to import it would fail
    importlib.reload(importlib.import_module("minidpo.system.tracking"))
    half_and_rest(tmp_path / "run", None).finish()
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        ".lock",
        "config.json",
        "metrics.jsonl",
        "done",
    }


def test_the_parts_of_a_loop_are_runs_inside_its_run(client, tmp_path):
    config = {**CONFIG, "track": "mlflow"}
    RunFolder(tmp_path / "loop", config).begin()
    for part in ("sft", "round-1/dpo"):
        RunFolder(tmp_path / "loop" / part, config).begin()
    RunFolder(tmp_path / "alone", config).begin()
    outer, sft, dpo, alone = runs(client)
    assert [run.data.tags.get("mlflow.parentRunId") for run in (outer, sft, dpo, alone)] == [
        None,
        outer.info.run_id,
        outer.info.run_id,
        None,
    ]
    assert (sft.info.run_name, dpo.info.run_name) == ("sft", "round-1/dpo")


def test_results_are_a_table_that_mlflow_reads_and_other_settings_another_run(client, tmp_path):
    pandas = pytest.importorskip("pandas")
    from mlflow import load_table

    write_json(tmp_path / "result.json", RESULT)
    (tmp_path / "report.html").write_text("<p>")
    for config in (CONFIG, {**CONFIG, "machine": {"pages": 1}}, {**CONFIG, "seed": 2}):
        Tracking(tmp_path, {**config, "track": "mlflow"}).finish()
    first, other = runs(client)
    assert (first.data.params["seed"], other.data.params["seed"]) == ("1", "2")
    table = load_table("results.json", [first.info.run_id]).drop(columns="run_id", errors="ignore")
    rows = [{"agent": "sft", "task": task, **RATES} for task in ("click-link", "all tasks")]
    pandas.testing.assert_frame_equal(table, pandas.DataFrame(rows), check_dtype=False)
    assert {file.path for file in client.list_artifacts(first.info.run_id)} == {
        "result.json",
        "results.json",
        "report.html",
    }


def test_a_note_of_another_version_is_refused_with_the_way_out(client, tmp_path):
    RunFolder(tmp_path, {**CONFIG, "track": "mlflow"}).begin()
    note = tmp_path / "tracking-mlflow.json"
    write_json(note, {**read_json(note), "version": 2})
    with pytest.raises(
        ValueError, match="another version; .*tracking-mlflow.json names its run: delete it"
    ):
        RunFolder(tmp_path, {**CONFIG, "track": "mlflow"}).begin()


def events(folder):
    """What TensorBoard reads in a folder of event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def test_a_run_that_was_killed_has_every_step_once_in_tensorboard(at_exit, tmp_path):
    pytest.importorskip("tensorboard")
    write_json(tmp_path / "run" / "result.json", RESULT)
    run = half_and_rest(tmp_path / "run", "tensorboard", first="tensorboard")
    run.finish()
    assert (
        len(list((tmp_path / "run" / "tensorboard").iterdir())) == 2
    )  # two processes would have two files
    seen = events(tmp_path / "run" / "tensorboard")
    assert [(event.step, event.value) for event in seen.Scalars("loss")] == [
        (step, pytest.approx(loss)) for step, loss in LOSSES
    ]
    assert set(seen.Tags()["scalars"]) == {"loss", "lr"}
    table = seen.Tensors("results/text_summary")[0].tensor_proto.string_val[0].decode()
    assert table.splitlines()[2] == "| sft | click-link | 0.5 | 0.2 | 0.8 | 4 | 2.0 | 1.0 |"
    files = seen.Tensors("files/text_summary")[0].tensor_proto.string_val[0].decode()
    assert str(tmp_path / "run" / "config.json") in files
    settings = seen.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"sft.lr" in settings and b"a, b" in settings


def test_the_parts_of_a_loop_are_folders_inside_its_event_files(at_exit, tmp_path):
    pytest.importorskip("tensorboard")
    config = {**CONFIG, "track": "tensorboard"}
    RunFolder(tmp_path / "loop", config).begin()
    part = RunFolder(tmp_path / "loop" / "round-1" / "dpo", config)
    part.begin()
    part.log({"step": 1, "loss": 0.5})
    part.finish()
    assert (
        events(tmp_path / "loop" / "tensorboard" / "round-1" / "dpo").Scalars("loss")[0].value
        == 0.5
    )
    assert not (tmp_path / "loop" / "round-1" / "dpo" / "tensorboard").exists()


@pytest.mark.slow
def test_a_loop_is_a_run_with_its_stages_inside_and_may_be_tracked_when_it_is_over(
    client, tmp_path
):
    config = replace(test_loop.SMALL, out=tmp_path / "loop", sft=SFT(steps=3))
    result = loop.loop(config)
    assert not runs(client)
    loop.loop(replace(config, track="mlflow"))
    outer, sft, dpo = runs(client)
    inside = [run.data.tags["mlflow.parentRunId"] for run in (sft, dpo)]
    assert inside == [outer.info.run_id] * 2 and [
        len(history(client, run)) for run in (sft, dpo)
    ] == [3, 2]
    assert outer.data.metrics["dpo/success"] == result["agents"]["dpo"]["all"]["success"]
    assert history(client, outer, "explored_success")[0][0] == 1
    files = {"config.json", "metrics.jsonl", "report.html", "result.json", "results.json"}
    assert {file.path for file in client.list_artifacts(outer.info.run_id)} == files
    mine = EvaluateCommand(
        adapters=(f"a={tmp_path}/loop/sft/adapter",),
        tasks=config.tasks,
        episodes=1,
        out=tmp_path / "mine",
        machine=config.machine,
        track="mlflow",
    )
    for _ in range(2):  # again: the same run
        success = evaluate(mine)["agents"]["a"]["all"]["success"]
    *_, last = runs(client)
    assert len(runs(client)) == 4 and history(client, last, "a/success") == [(1, success)]
    assert {file.path for file in client.list_artifacts(last.info.run_id)} == files


def test_what_may_take_seconds_has_a_bar_which_short_work_does_not_show(
    folder, tmp_path, monkeypatch, capsys
):
    bars = []
    for module in (prompt, preferences, checkpoint, tensors, trainer):
        monkeypatch.setattr(
            module,
            "tqdm",
            lambda work, desc, real=module.tqdm, **options: (
                bars.append(desc),
                real(work, desc, **options),
            )[1],
        )
    dpo(folder, tmp_path / "run")
    assert {"tokenising", "scoring", "fingerprint", "model.safetensors", "DPO"} <= set(bars)
    shown = capsys.readouterr().err
    assert "DPO: 100%" in shown and "scoring" not in shown and "tokenising" not in shown
