"""21. Tracking: a run's numbers in MLflow or TensorBoard as well, where people compare runs.

What counts is `metrics.jsonl`; a tracker gets a copy of its lines, and the store itself is asked which steps
it has. So a run that was killed and went on, one whose server was away for a while, and one that is tracked
only from its second half on all end with every step once. A tracker that fails is told once and stops no
training. Both libraries are optional, and imported only when asked for. Next: 22 runs.
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

from minidpo.system.files import file_sha256, read_json, write_json

VERSION = 1  # of the note that a run folder keeps of its tracker
KEPT = ("config.json", "metrics.jsonl", "result.json", "report.html", "adapter")
ROW = ("success", "low", "high", "n", "mean_steps", "valid_action_rate")


def flat(config: dict, prefix: str = "") -> dict[str, int | float | str]:
    """Settings as one level of names.

    >>> flat({"seed": 1, "sft": {"lr": 2e-05, "data": ["a", "b"]}, "adapter": None})
    {'seed': 1, 'sft.lr': 2e-05, 'sft.data': 'a, b', 'adapter': 'None'}
    """
    found = {}
    for name, value in config.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, (list, tuple)):
            found[prefix + name] = ", ".join(map(str, value))
        else:
            found[prefix + name] = value if isinstance(value, (int, float)) else str(value)
    return found


def numbers(record: dict) -> dict[str, float]:
    """What of a line of metrics.jsonl is drawn over its step."""
    return {name: value for name, value in record.items()
            if name != "step" and isinstance(value, (int, float))}


def rows_of(result: dict) -> list[dict]:
    """The result table: a row for each agent and task, and one for all tasks."""
    return [{"agent": name, "task": task, **{column: row[column] for column in ROW}}
            for name, found in result.items() if isinstance(found, dict) and "tasks" in found
            for task, row in {**found["tasks"], "all tasks": found["all"]}.items()]


def result_of(folder: Path) -> str:
    """Which result it has: an evaluation whose browser failed may be finished twice."""
    return file_sha256(folder / "result.json") if (folder / "result.json").is_file() else "none"


class MLflow:
    """A run in the store that MLFLOW_TRACKING_URI names, by default MLflow's own: `mlflow.db` here."""

    def __init__(self, folder: Path, above: Path | None):
        # MLflow would wait four minutes for a server that is away, and training with it.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow import MlflowClient
        self.client = MlflowClient()
        self.where = self.client.tracking_uri
        self.title = os.environ.get("MLFLOW_EXPERIMENT_NAME", "minidpo")
        self.experiment = self.client.get_experiment_by_name(self.title)  # is the store there at all?

    def open(self, name: str, run: str | None, parent: str | None, settings: dict) -> str:
        """Begin a run, or go on with `run`. Returns its id."""
        from mlflow.entities import Param
        if run is None:
            experiment = self.experiment.experiment_id if self.experiment else (
                self.client.create_experiment(self.title))
            tags = {"mlflow.parentRunId": parent} if parent else {}
            run = self.client.create_run(experiment, run_name=name, tags=tags).info.run_id
        self.run = run
        self.client.update_run(run, "RUNNING")
        data = self.client.get_run(run).data
        new = [Param(name, str(value)) for name, value in settings.items() if name not in data.params]
        for at in range(0, len(new), 100):  # a call takes no more
            self.client.log_batch(run, params=new[at:at + 100])
        self.last = {name: max(metric.step for metric in self.client.get_metric_history(run, name))
                     for name in data.metrics}  # of each number the last step that the store has
        return run

    def log(self, records: list[dict]) -> None:
        from mlflow.entities import Metric
        now = int(1000 * time.time())
        new = [Metric(name, value, now, record["step"]) for record in records
               for name, value in numbers(record).items() if record["step"] > self.last.get(name, -1)]
        for at in range(0, len(new), 1000):  # a call takes no more
            self.client.log_batch(self.run, metrics=new[at:at + 1000])
        self.last |= {metric.key: metric.step for metric in new}

    def table(self, rows: list[dict]) -> None:
        # in log_table's format; that would append to what is there when it is called again
        content = {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}
        self.client.log_dict(self.run, content, "results.json")
        tables = json.dumps([{"path": "results.json", "type": "table"}])
        self.client.set_tag(self.run, "mlflow.loggedArtifacts", tables)

    def keep(self, paths: list[Path]) -> None:
        for path in paths:
            if path.is_dir():
                self.client.log_artifacts(self.run, str(path), path.name)
            else:
                self.client.log_artifact(self.run, str(path))

    def close(self, status: str) -> None:
        self.client.set_terminated(self.run, status)


class TensorBoard:
    """Event files in OUT/tensorboard; the parts of a loop have folders inside the loop's."""

    def __init__(self, folder: Path, above: Path | None):
        from torch.utils.tensorboard import SummaryWriter  # needs the package tensorboard
        self.writer_in = SummaryWriter
        above = above or folder
        self.where = str(above / "tensorboard" / folder.relative_to(above))

    def open(self, name: str, run: str | None, parent: str | None, settings: dict) -> None:
        """What was written before is purged: `log` gets all lines anew, so a torn file loses none."""
        from torch.utils.tensorboard.summary import hparams
        self.writer = self.writer_in(self.where, purge_step=0, flush_secs=10)
        for part in hparams(settings, {}):
            self.writer.file_writer.add_summary(part)

    def log(self, records: list[dict]) -> None:
        for record in records:
            for name, value in numbers(record).items():
                self.writer.add_scalar(name, value, record["step"])

    def table(self, rows: list[dict]) -> None:
        lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
        self.writer.add_text("results", "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines))

    def keep(self, paths: list[Path]) -> None:
        """Event files hold no files: where they lie."""
        self.writer.add_text("files", "\n".join(f"- {path.resolve()}" for path in paths))

    def close(self, status: str) -> None:
        self.writer.close()


class Tracking:
    """The tracker of one run folder; without `track` in the configuration it does nothing.

    Inside the folder of a tracked loop a run is a part of the loop's. What is wrong with a tracker is an
    error at the start; later, and in a loop's parts, it is told once and the work goes on.
    """

    def __init__(self, folder: Path, config: dict):
        # of several processes that train together, the first one tells
        self.name = config.get("track") if os.environ.get("RANK", "0") == "0" else None
        self.title, self.folder, self.settings = str(folder), folder.resolve(), flat(config)
        self.settings.pop("track", None)
        self.note = self.folder / f"tracking-{self.name}.json"
        self.above = next((path for path in self.folder.parents if (path / self.note.name).is_file()), None)
        self.tracker: MLflow | TensorBoard | None = None
        self.lost, self.read = False, 0  # whether a failure was told; bytes of metrics.jsonl that were read
        if self.name and self.above is None:
            self._guarded(self._reach, fatal=True)

    def begin(self) -> None:
        """Once all that was asked for is known to be there: from here on the tracker has a run of it."""
        if self.name and self.tracker is None and not self.lost:
            self._guarded(self._open, fatal=self.above is None)

    def sync(self) -> None:
        """Tell the tracker what is new in metrics.jsonl."""
        if self.tracker is not None and not self.lost:
            self._guarded(lambda: self.tracker.log(self._lines()))

    def finish(self) -> None:
        """What is still missing, the result table, the files. To call it again does no harm."""
        if self.name:
            self._guarded(self._complete)

    def _guarded(self, work: Callable[[], object], fatal: bool = False) -> None:
        try:
            work()
        except ImportError:
            raise ValueError(f"--track {self.name} needs a package: pip install {self.name}") from None
        except Exception as error:  # a server's, a database's, a disk's: these have no class in common
            said = f"--track {self.name}: {(str(error) or repr(error)).strip().splitlines()[0][:300]}"
            if fatal:
                way_out = f"; {self.note} names its run: delete it to begin another" * self.note.is_file()
                raise ValueError(said + way_out) from None
            if not self.lost:
                tqdm.write(f"{said}\nThe work goes on. metrics.jsonl has every step, and the tracker gets "
                           "what it missed at the end, or when the command is started again", file=sys.stderr)
            self.lost = True

    def _reach(self) -> MLflow | TensorBoard:
        return {"mlflow": MLflow, "tensorboard": TensorBoard}[self.name](self.folder, self.above)

    def _open(self) -> None:
        """Go on with the note's run, if it is of these settings and this store, else begin one."""
        tracker = self._reach()
        kept = {name: value for name, value in self.settings.items() if not name.startswith("machine.")}
        now = {"version": VERSION, "where": tracker.where,
               "settings": hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()}
        note = read_json(self.note) if self.note.is_file() else now
        if note.get("version") != VERSION:
            raise ValueError("its note was made by another version")
        note = note if note == {**note, **now} else now
        if note.get("finished") == result_of(self.folder):
            return
        parent = read_json(self.above / self.note.name).get("run") if self.above else None
        title = str(self.folder.relative_to(self.above)) if self.above else self.title
        run = tracker.open(title, note.get("run"), parent, self.settings)
        write_json(self.note, {**note, "run": run})
        self.tracker, self.read = tracker, 0
        atexit.register(self._leave)

    def _lines(self) -> list[dict]:
        """What is new in metrics.jsonl."""
        path = self.folder / "metrics.jsonl"
        if not path.is_file():
            return []
        lines = path.read_bytes()[self.read:]
        self.read += len(lines)
        return [json.loads(line) for line in lines.splitlines()]

    def _complete(self) -> None:
        if self.tracker is None or self.lost:  # once more: it may be there again
            self._open()
            if self.tracker is None:
                return  # it has everything
        self.tracker.log(self._lines())
        if (self.folder / "result.json").is_file():
            self.tracker.table(rows_of(read_json(self.folder / "result.json")))
        self.tracker.keep([path for name in KEPT if (path := self.folder / name).exists()])
        self.tracker.close("FINISHED")
        write_json(self.note, {**read_json(self.note), "finished": result_of(self.folder)})
        atexit.unregister(self._leave)
        self.tracker, self.lost = None, False

    def _leave(self) -> None:
        with suppress(Exception):  # the process ends: nobody is left to be told
            self.lost or self.tracker.close("KILLED")
