"""A copy of a run's numbers in MLflow or TensorBoard, where people compare runs.

A tracker gets a copy of the lines of `metrics.jsonl`, and the store itself is asked which steps it has. So
every step ends up there once, even if the run was killed, the server was away, or tracking began in the
middle. A tracker that fails before a run has begun is an error; one that fails later is reported once, and
the work goes on. Both libraries are optional.
"""

import atexit
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm

from minidpo.system.errors import first_line
from minidpo.system.files import file_sha256, read_json, write_json
from minidpo.system.result_file import read_result

VERSION = 1  # of tracking-NAME.json, which names the tracker's run of a folder
MAY_CHANGE = (
    "out",
    "rounds",
    "patience",
)  # of one run: a loop may go on for more rounds, or be moved
FILES = ("config.json", "metrics.jsonl", "result.json", "report.html", "adapter")


class Tracking:
    """The tracker of one run folder; without `track` in the configuration it does nothing.

    A run in the folder of a tracked loop becomes a part of the loop's run. A failure before `begin` has ended
    raises ValueError; a later one, or one in a loop's part, is printed once and the work goes on.
    """

    def __init__(self, folder: Path, config: dict):
        # only rank 0 tracks; this must hold before the process group exists, so it reads the variable
        self.name = config.get("track") if os.environ.get("RANK", "0") == "0" else None
        self.folder, self.settings = folder.resolve(), flat(config)
        self.settings.pop("track", None)
        self.note = self.folder / f"tracking-{self.name}.json"
        self.loop = next(
            (path for path in self.folder.parents if (path / self.note.name).is_file()), None
        )
        self.title = str(self.folder.relative_to(self.loop) if self.loop else folder)
        self.tracker: MLflow | TensorBoard | None = None
        self.failed, self.bytes_read = False, 0  # bytes_read: of metrics.jsonl
        if self.name and self.loop is None:
            self._guarded(self._connect, fatal=True)

    def begin(self) -> None:
        """Create or resume the tracker's run. Call it when all inputs of the work are known to exist."""
        if self.name and self.tracker is None and not self.failed:
            self._guarded(self._open, fatal=self.loop is None)

    def sync(self) -> None:
        """Send the new lines of metrics.jsonl."""
        if self.tracker is not None and not self.failed:
            self._guarded(lambda: self.tracker.log(self._new_numbers()))

    def finish(self) -> None:
        """Send what is still missing, the result table and the files. Calling it again does no harm."""
        if self.name:
            self._guarded(self._complete)

    def _guarded(self, work: Callable[[], object], fatal: bool = False) -> None:
        try:
            work()
        except ImportError:
            raise ValueError(
                f"--track {self.name} needs a package: pip install {self.name}"
            ) from None
        except (
            Exception
        ) as error:  # errors of a server, a database or a disk have no class in common
            problem = f"--track {self.name}: {first_line(error)[:300]}"
            if fatal:
                way_out = (
                    f"; {self.note} names its run: delete it to begin another" * self.note.is_file()
                )
                raise ValueError(problem + way_out) from None
            if not self.failed:
                tqdm.write(
                    f"{problem}\nThe work goes on. metrics.jsonl has every step; the tracker gets "
                    "what it missed at the end, or when the command is started again",
                    file=sys.stderr,
                )
            self.failed = True

    def _connect(self) -> "MLflow | TensorBoard":
        return {"mlflow": MLflow, "tensorboard": TensorBoard}[self.name](self.folder, self.loop)

    def _open(self) -> None:
        """Resume the run named in the note if its settings and store are the same, else begin a new one."""
        tracker = self._connect()
        decisive = {
            name: value
            for name, value in self.settings.items()
            if name not in MAY_CHANGE and not name.startswith("machine.")
        }
        expected = {
            "version": VERSION,
            "where": tracker.where,
            "settings": hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest(),
        }
        note = read_json(self.note) if self.note.is_file() else expected
        if note.get("version") != VERSION:
            raise ValueError("its note was made by another version")
        if not expected.items() <= note.items():
            note = expected
        if note.get("finished") == result_sha256(self.folder):
            return
        parent = read_json(self.loop / self.note.name).get("run") if self.loop else None
        run = tracker.open(self.title, note.get("run"), parent, self.settings)
        write_json(self.note, {**note, "run": run})
        self.tracker, self.bytes_read = tracker, 0
        atexit.register(self._at_exit)

    def _new_numbers(self) -> list[tuple[str, float, int]]:
        """Name, value and step of each number in the lines of metrics.jsonl that were not read yet."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_bytes()[self.bytes_read :] if path.is_file() else b""
        self.bytes_read += len(lines)
        return [
            (name, value, record["step"])
            for record in map(json.loads, lines.splitlines())
            for name, value in record.items()
            if name != "step" and isinstance(value, (int, float))
        ]

    def _complete(self) -> None:
        if self.tracker is None or self.failed:  # try again: the server may be back
            self._open()
        if self.tracker is None:
            return  # the tracker already has everything
        self.tracker.log(self._new_numbers())
        paths = [path for name in FILES if (path := self.folder / name).exists()]
        result = self.folder / "result.json"
        agents = read_result(result)["agents"] if result.is_file() else {}
        rows = [
            {"agent": name, "task": task, **row}
            for name, rates in agents.items()
            for task, row in {**rates["tasks"], "all tasks": rates["all"]}.items()
        ]
        self.tracker.finish(rows, paths)
        if self.loop is None:
            print(f"tracked   {self.tracker.viewer}")
        write_json(self.note, {**read_json(self.note), "finished": result_sha256(self.folder)})
        atexit.unregister(self._at_exit)
        self.tracker, self.failed = None, False

    def _at_exit(self) -> None:
        with suppress(Exception):  # the process ends: nobody would read the error
            self.failed or self.tracker.close("KILLED")


class MLflow:
    """A run in the store that MLFLOW_TRACKING_URI names, by default MLflow's own: `mlflow.db` here."""

    def __init__(self, folder: Path, loop: Path | None):
        # MLflow's defaults would make training wait four minutes for a server that is away
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow import MlflowClient

        self.client = MlflowClient()
        self.where, self.result = self.client.tracking_uri, folder / "result.json"
        self.title = os.environ.get("MLFLOW_EXPERIMENT_NAME", "minidpo")
        self.experiment = self.client.get_experiment_by_name(
            self.title
        )  # raises if the store is not there

    def open(self, name: str, run: str | None, parent: str | None, settings: dict) -> str:
        """Resume `run`, or begin a new one if it is None. Returns the run's id."""
        from mlflow.entities import Param

        if run is None:
            experiment = (
                self.experiment.experiment_id
                if self.experiment
                else (self.client.create_experiment(self.title))
            )
            tags = {"mlflow.parentRunId": parent} if parent else {}
            run = self.client.create_run(experiment, run_name=name, tags=tags).info.run_id
        self.run = run
        stored = self.client.get_run(run)
        # MLflow 3's first page leads to its tools for chat bots, which show no curves
        page = f"/#/experiments/{stored.info.experiment_id}/runs?workflowType=machine_learning"
        self.viewer = (
            self.where + page
            if self.where.startswith("http")
            else f"mlflow ui --backend-store-uri {self.where}   then open http://127.0.0.1:5000{page}"
        )
        self.client.update_run(run, "RUNNING")
        new = [
            Param(name, str(value))
            for name, value in settings.items()
            if name not in stored.data.params
        ]
        for at in range(0, len(new), 100):  # MLflow takes 100 a call
            self.client.log_batch(run, params=new[at : at + 100])
        history = {name: self.client.get_metric_history(run, name) for name in stored.data.metrics}
        self.last = {
            name: max((m.step, m.timestamp, m.value) for m in metrics)
            for name, metrics in history.items()
        }
        return run

    def log(self, numbers: list[tuple[str, float, int]]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        new = []
        for name, value, step in numbers:
            last, _, told = self.last.get(name, (-1, 0, 0.0))
            # an evaluation may be finished twice: then its only step has other numbers
            if step > last or (step == last and value != told and self.result.is_file()):
                new.append(Metric(name, value, now, step))
        for at in range(0, len(new), 1000):  # MLflow takes 1,000 a call
            self.client.log_batch(self.run, metrics=new[at : at + 1000])
        self.last |= {metric.key: (metric.step, now, metric.value) for metric in new}

    def finish(self, rows: list[dict], paths: list[Path]) -> None:
        if (
            rows
        ):  # in the format of log_table, which would append to the existing table when called again
            content = {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}
            self.client.log_dict(self.run, content, "results.json")
            tables = '[{"path": "results.json", "type": "table"}]'
            self.client.set_tag(self.run, "mlflow.loggedArtifacts", tables)
        for path in paths:
            self.client.log_artifact(self.run, str(path))
        self.close("FINISHED")

    def close(self, status: str) -> None:
        self.client.set_terminated(self.run, status)


class TensorBoard:
    """Event files in OUT/tensorboard; the parts of a loop have folders inside the loop's."""

    def __init__(self, folder: Path, loop: Path | None):
        from torch.utils.tensorboard import SummaryWriter  # needs the package tensorboard

        self.writer_class = SummaryWriter
        loop = loop or folder
        self.where = str(loop / "tensorboard" / folder.relative_to(loop))
        self.viewer = (
            f"tensorboard --logdir {loop / 'tensorboard'}   then open http://127.0.0.1:6006"
        )

    def open(self, name: str, run: str | None, parent: str | None, settings: dict) -> None:
        """Purge the older events: `log` gets all lines again, so a torn event file loses none."""
        from torch.utils.tensorboard.summary import hparams

        self.writer = self.writer_class(self.where, purge_step=0, flush_secs=10)
        for part in hparams(settings, {}):
            self.writer.file_writer.add_summary(part)

    def log(self, numbers: list[tuple[str, float, int]]) -> None:
        for name, value, step in numbers:
            self.writer.add_scalar(name, value, step)

    def finish(self, rows: list[dict], paths: list[Path]) -> None:
        """Event files hold no other files, so of these only the paths are written."""
        if rows:
            lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
            self.writer.add_text(
                "results", "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
            )
        self.writer.add_text("files", "\n".join(f"- {path.resolve()}" for path in paths))
        self.close("FINISHED")

    def close(self, status: str) -> None:
        self.writer.close()


def flat(config: dict, prefix: str = "") -> dict[str, int | float | str]:
    """Nested settings as one level of names.

    >>> flat({"seed": 1, "sft": {"lr": 2e-05, "data": ["a", "b"]}, "adapter": None})
    {'seed': 1, 'sft.lr': 2e-05, 'sft.data': 'a, b', 'adapter': 'None'}
    """
    settings = {}
    for name, value in config.items():
        if isinstance(value, dict):
            settings |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, (list, tuple)):
            settings[prefix + name] = ", ".join(map(str, value))
        else:
            settings[prefix + name] = value if isinstance(value, (int, float)) else str(value)
    return settings


def result_sha256(folder: Path) -> str:
    """Identifies the folder's result: an evaluation whose browser failed may be finished twice."""
    return file_sha256(folder / "result.json") if (folder / "result.json").is_file() else "none"
