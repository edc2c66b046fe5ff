"""22. Run folders: what a training leaves behind, written so that a kill can tear nothing.

`metrics.jsonl` gets a line a step; `state.safetensors` holds parameters, optimizer and step in ONE file, so
there is no moment at which they disagree. One process at a time may write to a folder. Next: 23 parallel.
"""

import fcntl
import hashlib
import json
import os
import time
from pathlib import Path
from typing import TextIO

from safetensors import SafetensorError, safe_open
from torch import Tensor

from minidpo.system.files import check_version, named_in_errors, read_json, write_json, write_text
from minidpo.system.tensors import fingerprint, write_weights
from minidpo.system.tracking import Tracking, flat

VERSION = 1  # of the folder, in its JSON files: what its files are called and what stands in them
STATE_VERSION = "2"
# What a result does not depend on: where it lies and is told, how far a loop goes, how much is done at once.
BESIDES = {"out", "track", "explain", "export", "rounds", "patience",
           *(f"{stage}.save_every" for stage in ("sft", "dpo", "imitation")),
           *(f"machine.{name}" for name in ("micro_tokens", "tree_tokens", "recompute", "offload", "cache",
                                            "memory_gib", "pages"))}
# Where the second is kept, of the first counts only whether it is given: the content decides, not the path.
KNOWN_BY = {"data": "data_sha256", "golden": "data_sha256", "adapter": "adapter_sha256",
            "reference": "reference_sha256", "start": "start"}  # a loop looks itself how `start` began
OLD_NAMES = {"kl": "mean_drop"}  # in logs written before the metric was renamed


def records(folder: Path) -> list[dict]:
    """The steps that a run folder has logged, in order."""
    path = folder / "metrics.jsonl"
    steps = []
    for number, line in enumerate(path.read_text().splitlines() if path.is_file() else (), 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from None
        steps.append({OLD_NAMES.get(name, name): value for name, value in record.items()})
    return steps


def read_settings(folder: Path) -> dict:
    """The settings of the run in a folder. Raises ValueError if it is of another version."""
    return check_version(read_json(folder / "config.json"), VERSION, f"{folder} holds a run",
                      ": give another folder")


def lock(folder: Path) -> TextIO:
    """Take a folder, until what is returned is closed. Raises ValueError if another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / ".lock", "a")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system's: it ends with its process
    except (BlockingIOError, PermissionError):
        raise ValueError(f"{folder}: another process is writing to it") from None
    return file


def changed_settings(old: dict, new: dict) -> str:
    """In which settings that decide a result two configurations differ, with both values; "" if in none.

    >>> changed_settings({"sft": {"lr": 0.001, "save_every": 25}}, {"sft": {"lr": 2e-05, "save_every": 5}})
    'sft.lr 0.001, now 2e-05'
    """
    def decisive(config: dict) -> dict:
        given = {name: bool(config[name]) for name, digest in KNOWN_BY.items() if {name, digest} <= {*config}}
        return {name: value for name, value in flat({**config, **given}).items() if name not in BESIDES}

    before, now = decisive(old), decisive(new)
    changed = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    return "; ".join(f"{name.removesuffix('_sha256')} of other content" if name.endswith("_sha256") else
                     f"{name} {before.get(name)}, now {now.get(name)}" for name in changed)


def _checksum(step: str, tensors: dict[str, Tensor]) -> str:
    return hashlib.sha256(f"{step} {fingerprint(tensors)}".encode()).hexdigest()


class RunFolder:
    """A folder that one training writes to. It belongs to a configuration from `begin` on."""

    def __init__(self, folder: str | Path, config: dict):
        self.folder = Path(folder)
        self.config = json.loads(json.dumps(config, default=str))  # as it will read back
        self.metrics = self.folder / "metrics.jsonl"
        self.state = self.folder / "state.safetensors"
        self._lock = None
        self._compare()
        self.tracking = Tracking(self.folder, self.config)

    def _compare(self) -> None:
        path = self.folder / "config.json"
        if not path.is_file():
            if self.state.is_file():
                raise ValueError(f"{self.state}: {path.name}, which says of what run it is, is gone; delete "
                                 "it to start again")
            return
        if changed := changed_settings(read_settings(self.folder), self.config):
            raise ValueError(f"{self.folder} holds a run with other settings ({changed}): give another "
                             "--out, or delete the folder")

    def begin(self) -> None:
        """Take the folder, for as long as this run lives: called once all that was asked for is known to be
        there. Raises ValueError if another process has it."""
        if self._lock is None:
            self._lock = lock(self.folder)
            self._compare()  # it may have come and gone since
        write_json(self.folder / "config.json", {"version": VERSION, **self.config})
        self.tracking.begin()

    @property
    def finished(self) -> bool:
        return (self.folder / "done").is_file()

    def resync_finished(self) -> None:
        """Of a run that is finished: what it was made of may lie elsewhere now, and a tracker that was away,
        or is asked for only now, gets what it missed."""
        if read_settings(self.folder) != self.config:
            write_json(self.folder / "config.json", {"version": VERSION, **self.config})
        self.tracking.finish()

    def finish(self) -> None:
        """Mark the run as complete and drop what only a restart needs."""
        self.tracking.finish()
        write_text(self.folder / "done", "complete\n")
        self.state.unlink(missing_ok=True)

    def log(self, record: dict) -> None:
        with named_in_errors(self.metrics), open(self.metrics, "a") as file:
            file.write(json.dumps(record) + "\n")
        self.tracking.sync()

    def records(self) -> list[dict]:
        """All steps logged so far."""
        return records(self.folder)

    def save_state(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Everything that the next step depends on, after `step` steps."""
        if self.metrics.is_file():
            with open(self.metrics, "rb+") as file:
                os.fsync(file.fileno())  # no state may be there whose log is not
        write_weights(self.state, tensors, {"step": str(step), "version": STATE_VERSION,
                                            "sha256": _checksum(str(step), tensors)})

    def load_state(self) -> tuple[int, dict[str, Tensor]] | None:
        """What `save_state` last kept, on the CPU, or None. Raises ValueError if it is damaged."""
        if not self.state.is_file():
            return None
        try:
            with safe_open(self.state, "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except SafetensorError as error:
            raise ValueError(f"{self.state}: not readable ({error}); delete it to start again") from None
        if metadata.get("version") != STATE_VERSION:
            raise ValueError(f"{self.state}: made by another version; delete it to start again")
        if metadata.get("sha256") != _checksum(metadata.get("step", ""), tensors):
            raise ValueError(f"{self.state}: not readable (its checksum is wrong); delete it to start again")
        return int(metadata["step"]), tensors

    def truncate_log(self, steps: int) -> None:
        """Drop what was logged after so many steps: it comes again."""
        text = self.metrics.read_text() if self.metrics.is_file() else ""
        lines = text.splitlines(keepends=True)[:steps]
        if len(lines) < steps:
            raise ValueError(f"{self.metrics}: holds {len(lines)} steps, but {self.state.name} is of step "
                             f"{steps}; delete both to start again")
        if text:
            write_text(self.metrics, "".join(lines))


class Clock:
    """Seconds by stage, kept in a file, so that a run that went on elsewhere still knows what it took."""

    def __init__(self, path: Path, keep: bool = True):
        self.path, self.keep = path, keep
        found = read_json(path) if path.is_file() else {}
        self.seconds: dict[str, float] = check_version(found, VERSION, f"{path}:",
                                                    ": delete it, and the time is counted anew")

    def time(self, stage: str, work, *arguments):
        began = time.perf_counter()
        try:
            return work(*arguments)
        finally:
            self.seconds[stage] = round(self.seconds.get(stage, 0.0) + time.perf_counter() - began, 1)
            if self.keep:
                write_json(self.path, {"version": VERSION, **self.seconds})
