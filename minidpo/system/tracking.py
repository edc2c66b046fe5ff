"""Copies a run's numbers to MLflow, TensorBoard or trackio, where people compare runs.

A tracker gets the lines of `metrics.jsonl`. It is asked which steps it has, so it gets each step once, even if the
run was killed, the server was away, or tracking began in the middle. If a tracker fails before the work begins,
that is an error; if it fails later, that is printed once and the work continues. The libraries are optional.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from minidpo.system.errors import first_line
from minidpo.system.files import check_version, read_json, write_json
from minidpo.system.result_file import read_result

Tracker = Literal["mlflow", "tensorboard", "trackio"]
VERSION = 1  # of tracking-NAME.json, which names the tracker's run of a folder
OPEN: set["Tracking"] = set()  # those whose run the tracker shows as running
FILES = ("config.json", "metrics.jsonl", "result.json", "report.html", "adapter")


class Tracking:
    """The tracker of one run folder; does nothing if the configuration has no `track`.

    A failure before the end of `begin` raises ValueError; a later one is printed once and the work continues.
    """

    def __init__(self, folder: Path, config: Mapping):
        # only rank 0 tracks; the process group may not exist yet, so the variable is read
        self.name = config.get("track") if os.environ.get("RANK", "0") == "0" else None
        self.folder, self.title = folder.resolve(), str(folder)
        self.settings = flat({name: value for name, value in config.items() if name != "track"})
        self.note = self.folder / f"tracking-{self.name}.json"
        # the open one, until a call to it fails
        self.store: MLflow | TensorBoard | Trackio | None = None
        self.failed, self.sent = False, 0  # sent: how many lines of metrics.jsonl
        if self.name:
            self._guarded(lambda: STORES[self.name](self.folder), fatal=True)

    def begin(self) -> None:
        """Create or resume the tracker's run. Call it when all inputs of the work are known to exist."""
        if self.name and self.store is None:
            self._guarded(self._open, fatal=True)

    def sync(self) -> None:
        """Send the new lines of metrics.jsonl."""
        if self.store is not None:
            self._guarded(self._send)

    def finish(self) -> None:
        """Send what is still missing, the result table and the files. Calling it again does no harm."""
        if self.name:
            self._guarded(self._complete)

    def stop(self, status: str) -> None:
        """Tell the tracker that the work ended early, FAILED or KILLED. `begin` resumes the run."""
        if self.store is not None:
            self._guarded(lambda: self.store.end(status))
        self._close()

    def _guarded(self, work: Callable[[], object], fatal: bool = False) -> None:
        try:
            work()
        except ImportError:
            raise ValueError(
                f"--track {self.name} needs a package: pip install {self.name}"
            ) from None
        except Exception as error:  # errors of servers, databases and disks have no common class
            problem = f"--track {self.name}: {first_line(error)[:300]}"
            if fatal:
                raise ValueError(problem) from None
            if not self.failed:
                tqdm.write(
                    f"{problem}\nThe work continues. metrics.jsonl has every step; the tracker gets "
                    "the missing ones at the end, or when the command is started again",
                    file=sys.stderr,
                )
            self.failed = True
            self._close()

    def _close(self) -> None:
        self.store = None
        OPEN.discard(self)

    def _open(self) -> None:
        """Resume the run that the note names if it is in this store, else begin a new one."""
        store, run = STORES[self.name](self.folder), None
        if self.note.is_file():
            way_out = "; delete it to begin another run"
            note = check_version(read_json(self.note), VERSION, f"{self.note} is", way_out)
            run = note["run"] if note["where"] == store.where else None
        run = store.open(self.title, run, self.settings)
        write_json(self.note, {"version": VERSION, "where": store.where, "run": run})
        self.store, self.sent = store, 0
        OPEN.add(self)

    def _send(self) -> None:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines()[self.sent :] if path.is_file() else []
        self.sent += len(lines)
        self.store.log(list(map(json.loads, lines)))

    def _complete(self) -> None:
        if self.store is None:  # it failed or was never opened
            self._open()
        self._send()
        paths = [self.folder / name for name in FILES if (self.folder / name).exists()]
        result = self.folder / "result.json"
        agents = read_result(result)["agents"] if result.is_file() else {}
        rows = [
            {"agent": name, "task": task, **row}
            for name, rates in agents.items()
            for task, row in {**rates["tasks"], "all tasks": rates["all"]}.items()
        ]
        self.store.finish(rows, paths)
        print(f"tracked   {self.store.viewer}")
        self._close()


@contextmanager
def told_of_the_end() -> Iterator[None]:
    """If an error or Ctrl-C ends the block, its trackers are told, so that no run is shown as still running."""
    try:
        yield
    except BaseException as error:
        for tracking in list(OPEN):
            tracking.stop("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        raise


class MLflow:
    """A run in the store that MLFLOW_TRACKING_URI names, by default MLflow's own: `mlflow.db` here."""

    def __init__(self, folder: Path):
        # with MLflow's defaults training would wait four minutes for a missing server
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow import MlflowClient

        self.client = MlflowClient()
        self.where = self.viewer = self.client.tracking_uri
        if not self.where.startswith("http"):
            self.viewer = f"mlflow ui --backend-store-uri {self.where}"
        self.title = os.environ.get("MLFLOW_EXPERIMENT_NAME", "minidpo")
        # raises if there is no store
        self.experiment = self.client.get_experiment_by_name(self.title)

    def open(self, name: str, run: str | None, settings: dict) -> str:
        """Resume `run`, or begin a new one if it is None. Returns the run's id."""
        from mlflow.entities import Param

        if run is None:
            if self.experiment:
                experiment = self.experiment.experiment_id
            else:
                experiment = self.client.create_experiment(self.title)
            run = self.client.create_run(experiment, run_name=name).info.run_id
        self.run, known = run, self.client.get_run(run).data
        self.client.update_run(run, "RUNNING")
        new = [Param(k, str(v)) for k, v in settings.items() if k not in known.params]
        for at in range(0, len(new), 100):  # MLflow takes 100 per call
            self.client.log_batch(run, params=new[at : at + 100])
        self.last = {}  # {metric: (last step, its newest value)}
        for metric in known.metrics:
            history = self.client.get_metric_history(run, metric)
            self.last[metric] = max((m.step, m.timestamp, m.value) for m in history)[::2]
        return run

    def log(self, lines: list[dict]) -> None:
        """Add the numbers that the run lacks, and changed ones of its last step, as an evaluation may be repeated."""
        from mlflow.entities import Metric

        now, new = int(1000 * time.time()), []
        for line in lines:
            for name, value in numbers_in(line):
                found, last = (line["step"], value), self.last.get(name, (-1, 0.0))
                if found != last and found[0] >= last[0]:
                    new.append(Metric(name, value, now, line["step"]))
                    self.last[name] = found
        for at in range(0, len(new), 1000):  # MLflow takes 1,000 per call
            self.client.log_batch(self.run, metrics=new[at : at + 1000])

    def finish(self, rows: list[dict], paths: list[Path]) -> None:
        """Add the table of results and the files."""
        if rows:
            self.client.log_text(self.run, as_table(rows), "results.md")
        for path in paths:
            self.client.log_artifact(self.run, str(path))
        self.end("FINISHED")

    def end(self, status: str) -> None:
        """Say how the run ended: FINISHED, FAILED or KILLED."""
        self.client.set_terminated(self.run, status)


class TensorBoard:
    """Event files in OUT/tensorboard."""

    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter  # needs the package tensorboard

        self.writer_class, self.where = SummaryWriter, str(folder / "tensorboard")
        self.viewer = f"tensorboard --logdir {self.where}"

    def open(self, name: str, run: str | None, settings: dict) -> None:
        """Purge older events. `log` gets all lines again, so nothing is lost if an event file was cut off."""
        self.writer = self.writer_class(self.where, purge_step=0, flush_secs=10)
        rows = [{"setting": key, "value": x} for key, x in settings.items()]
        self.writer.add_text("settings", as_table(rows))

    def log(self, lines: list[dict]) -> None:
        for line in lines:
            for name, value in numbers_in(line):
                self.writer.add_scalar(name, value, line["step"])

    def finish(self, rows: list[dict], paths: list[Path]) -> None:
        """Add the table of results; event files cannot hold other files."""
        if rows:
            self.writer.add_text("results", as_table(rows))
        self.end("FINISHED")

    def end(self, status: str) -> None:
        """Close the event file, which has no status."""
        self.writer.close()


class Trackio:
    """A run in the project `minidpo` of trackio's local store, TRACKIO_DIR or its own."""

    def __init__(self, folder: Path):
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        self.trackio, self.storage = trackio, SQLiteStorage
        self.where, self.viewer = os.environ.get("TRACKIO_DIR"), "trackio show --project minidpo"

    def open(self, name: str, run: str | None, settings: dict) -> str:
        """Resume `run`, or begin a new one if it is None. Returns the run's name."""
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        resume = "never" if run is None else "allow"
        self.run = self.trackio.init(
            "minidpo", run or name, config=settings, resume=resume, **quiet
        )
        rows = [] if run is None else self.storage.get_logs("minidpo", run)
        self.known = {(row["step"], name, value) for row in rows for name, value in numbers_in(row)}
        return self.run.name

    def log(self, lines: list[dict]) -> None:
        """Add the numbers that the run lacks."""
        for line in lines:
            step, numbers = line["step"], numbers_in(line)
            if new := {name: x for name, x in numbers if (step, name, x) not in self.known}:
                self.run.log(new, step)

    def finish(self, rows: list[dict], paths: list[Path]) -> None:
        """Add the table of results."""
        if rows:
            self.run.log({"results": self.trackio.Markdown(as_table(rows))})
        self.end("FINISHED")

    def end(self, status: str) -> None:
        """End the run; trackio has no status."""
        self.run.finish()


def as_table(rows: list[dict]) -> str:
    """Rows of the same columns as Markdown."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def numbers_in(line: dict) -> list[tuple[str, float]]:
    """The numbers of a line of metrics.jsonl."""
    return [
        (name, value)
        for name, value in line.items()
        if name != "step" and isinstance(value, (int, float))
    ]


STORES = {"mlflow": MLflow, "tensorboard": TensorBoard, "trackio": Trackio}


def flat(config: Mapping, prefix: str = "") -> dict[str, int | float | str]:
    """Nested settings as one level of names.

    >>> flat({"seed": 1, "sft": {"lr": 2e-05, "data": ["a", "b"]}, "adapter": None})
    {'seed': 1, 'sft.lr': 2e-05, 'sft.data': 'a, b', 'adapter': 'None'}
    """
    settings = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            settings |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, (list, tuple)):
            settings[prefix + name] = ", ".join(map(str, value))
        else:
            settings[prefix + name] = value if isinstance(value, (int, float)) else str(value)
    return settings
