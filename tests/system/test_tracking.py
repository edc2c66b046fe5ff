"""A real MLflow store and real event files have every step of metrics.jsonl once."""

import importlib
import os
import sys
from types import SimpleNamespace

import pytest

from minidpo.system.files import write_json
from minidpo.system.run_folder import RunFolder

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
