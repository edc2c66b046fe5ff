"""A real MLflow store and real event files have every step of metrics.jsonl once."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from minidpo.system.command_line import main
from minidpo.system.files import write_json
from minidpo.system.run_folder import RunFolder
from minidpo.system.tracking import Tracking

CONFIG = {"seed": 1, "sft": {"lr": 2e-5}, "data": ["a", "b"], "machine": {"pages": 4}}
RATES = {"success": 0.5, "low": 0.2, "high": 0.8, "n": 4}
RESULT = {"sft": {"all": RATES, "tasks": {"click-link": RATES}}, "seed": 1}
LOSSES = [(step, 1 / step) for step in range(1, 7)]


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """One for all tests: making its tables takes seconds."""
    pytest.importorskip("mlflow")
    return tmp_path_factory.mktemp("store") / "mlflow.db"


@pytest.fixture
def client(database, monkeypatch, request):
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
    """The runs of this test's experiment, the first one first."""
    experiment = client.get_experiment_by_name(os.environ["MLFLOW_EXPERIMENT_NAME"])
    return client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])


def history(client, run, name="loss"):
    return [
        (metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)
    ]


def begun(folder, track="mlflow", steps=0):
    """A tracked run with its first steps."""
    run = RunFolder(folder, {**CONFIG, "track": track})
    run.begin()
    for step, loss in LOSSES[:steps]:
        run.log({"step": step, "loss": loss, "lr": 0.1})
    return run


def half_and_rest(folder, track, first=None):
    """A run that is killed after step 5, of which a state was kept after step 3, and then goes on."""
    run = begun(folder, first, steps=3)
    run.load_state()
    run.save_state(3, {})
    for step, loss in LOSSES[3:5]:
        run.log({"step": step, "loss": loss, "lr": 0.1})
    run = begun(folder, track)
    start, _ = run.load_state()
    run.truncate_log(start)
    for step, loss in LOSSES[start:]:
        run.log({"step": step, "loss": loss, "lr": 0.1})
    return run


def test_a_run_that_was_killed_is_one_run_in_mlflow_and_has_every_step_once(client, tmp_path):
    half_and_rest(tmp_path / "run", "mlflow", first="mlflow").finish()
    (run,) = runs(client)
    assert history(client, run) == LOSSES
    assert history(client, run, "lr") == [(step, 0.1) for step, _ in LOSSES]
    assert run.info.status == "FINISHED" and run.info.run_name == str(tmp_path / "run")
    assert run.data.params == {"seed": "1", "sft.lr": "2e-05", "data": "a, b", "machine.pages": "4"}
    again = RunFolder(tmp_path / "run", {**CONFIG, "track": "mlflow"})
    again.tracking.finish()  # as a command does that finds its run finished
    assert len(runs(client)) == 1 and history(client, run) == LOSSES


def test_a_run_may_be_tracked_from_its_second_half_on_or_when_it_is_over(client, tmp_path):
    half_and_rest(tmp_path / "half", "mlflow").finish()
    half_and_rest(tmp_path / "over", None).finish()
    assert not list((tmp_path / "over").glob("tracking*"))
    RunFolder(tmp_path / "over", {**CONFIG, "track": "mlflow"}).tracking.finish()
    assert [history(client, run) for run in runs(client)] == [LOSSES] * 2


def test_the_store_holds_the_newest_result_as_a_table_and_the_files(client, tmp_path):
    """An evaluation is finished again when it goes on with more episodes."""
    tracking = {**CONFIG, "track": "mlflow"}
    (tmp_path / "report.html").write_text("<p>")
    for success in (0.5, 0.75):
        result = json.loads(json.dumps(RESULT).replace("0.5", str(success)))
        write_json(tmp_path / "result.json", result)
        line = json.dumps({"step": 1, "success": success})
        (tmp_path / "metrics.jsonl").write_text(f"{line}\n")
        Tracking(tmp_path, tracking).finish()
    (run,) = runs(client)
    assert history(client, run, "success") == [(1, 0.5), (1, 0.75)]
    table = Path(client.download_artifacts(run.info.run_id, "results.md")).read_text()
    assert table.splitlines()[0] == f"| {' | '.join(['agent', 'task', *RATES])} |"
    assert [line.split(" | ")[1:3] for line in table.splitlines()[2:]] == [
        ["click-link", "0.75"],
        ["all tasks", "0.75"],
    ]
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert files == {"metrics.jsonl", "result.json", "results.md", "report.html"}


class Store:
    """What is asked of MLflow's client, where the package is not installed: it keeps the runs' statuses."""

    def __init__(self):
        self.tracking_uri, self.status = "memory", {}

    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id="1")

    def create_run(self, experiment, run_name):
        self.status[run_name] = "RUNNING"
        return SimpleNamespace(info=SimpleNamespace(run_id=run_name))

    def get_run(self, run):
        return SimpleNamespace(data=SimpleNamespace(params={}, metrics={}))

    def update_run(self, run, status):
        self.status[run] = status

    def set_terminated(self, run, status="FINISHED"):
        self.status[run] = status

    def log_batch(self, run, metrics=(), params=()):
        pass

    def log_artifact(self, run, path):
        pass


@pytest.mark.parametrize(
    "stop, status, code",
    [
        (KeyboardInterrupt, "KILLED", 130),
        (ValueError, "FAILED", 2),
        (RuntimeError, "FAILED", None),  # a bug, with its traceback
        (None, "FINISHED", 0),
    ],
)
def test_a_run_that_ends_early_does_not_seem_to_run_on(tmp_path, monkeypatch, stop, status, code):
    store = Store()
    entities = SimpleNamespace(Param=lambda *x: x, Metric=lambda *x: x)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda: store))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    folder = tmp_path / "run"

    def work(arguments):
        run = begun(folder, steps=2)
        if stop:
            assert store.status == {str(folder): "RUNNING"}
            raise stop
        run.finish()

    with pytest.raises((SystemExit, RuntimeError)) if stop else nullcontext() as ended:
        main(work)
    if code:
        assert ended.value.code == code
    assert store.status == {str(folder): status}
    run = begun(folder)
    assert store.status == {str(folder): "RUNNING"}  # it goes on
    run.finish()
    assert store.status == {str(folder): "FINISHED"}


def go_away(monkeypatch, client):
    """Numbers don't reach the store any more."""

    def log_batch(*args, **kwargs):
        raise ConnectionError("no route to host\nand more")

    monkeypatch.setattr(type(client), "log_batch", log_batch)


def test_a_server_that_goes_away_is_told_once_and_gets_at_the_end_what_it_missed(
    client, tmp_path, monkeypatch, capsys
):
    run = begun(tmp_path / "run", steps=1)
    with monkeypatch.context() as patch:
        go_away(patch, client)
        for step, loss in LOSSES[1:]:
            run.log({"step": step, "loss": loss})
    said = capsys.readouterr().err
    assert said.count("no route to host") == 1 and "and more" not in said
    run.finish()
    (kept,) = runs(client)
    assert history(client, kept) == LOSSES and kept.info.status == "FINISHED"
    assert capsys.readouterr().err == ""


def test_a_server_that_is_not_there_at_the_start_is_an_error(client, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    with pytest.raises(ValueError, match=r"--track mlflow: .*127.0.0.1:1"):
        RunFolder(tmp_path / "run", {**CONFIG, "track": "mlflow"})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["mlflow", "tensorboard", "trackio"])
def test_a_tracker_that_is_not_installed_is_said_before_any_work(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ValueError, match=f"pip install {name}"):
        RunFolder(tmp_path / "run", {**CONFIG, "track": name})
    assert not (tmp_path / "run").exists()


def test_a_run_that_was_killed_has_every_step_once_in_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_json(tmp_path / "run" / "result.json", RESULT)
    half_and_rest(tmp_path / "run", "tensorboard", first="tensorboard").finish()
    files = list((tmp_path / "run" / "tensorboard").iterdir())
    assert len(files) == 2  # as of two processes
    seen = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in seen.Scalars("loss")] == [
        (step, pytest.approx(loss)) for step, loss in LOSSES
    ]
    assert set(seen.Tags()["scalars"]) == {"loss", "lr"}

    def text(name):
        return seen.Tensors(f"{name}/text_summary")[-1].tensor_proto.string_val[0].decode()

    assert text("results").splitlines()[2] == "| sft | click-link | 0.5 | 0.2 | 0.8 | 4 |"
    assert "| sft.lr | 2e-05 |" in text("settings")


def test_a_run_that_was_killed_is_one_run_in_trackio_and_has_every_step_once(tmp_path):
    """In a process of its own: trackio reads where its store is when it is imported."""
    pytest.importorskip("trackio")
    code = (
        "import json, test_tracking as t; from minidpo.system.files import write_json; from pathlib import Path\n"
        "write_json(Path('run/result.json'), t.RESULT)\n"
        "t.half_and_rest(Path('run'), 'trackio', first='trackio').finish()\n"
        "from trackio.sqlite_storage import SQLiteStorage as S\n"
        "print(json.dumps([S.get_runs('minidpo'), S.get_logs('minidpo', 'run')]))"
    )
    paths = os.pathsep.join(path for path in sys.path if path)
    env = {**os.environ, "TRACKIO_DIR": str(tmp_path / "store"), "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("[[")]
    runs, rows = json.loads(said)
    assert runs == ["run"]
    assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == LOSSES
    assert "| sft | click-link | 0.5 | 0.2 | 0.8 | 4 |" in str(rows[-1]["results"])
