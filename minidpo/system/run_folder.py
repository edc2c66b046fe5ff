"""A run folder: what one training leaves on the disk, written so that a kill damages nothing.

`config.json` holds the settings, `metrics.jsonl` one line per step. `state.safetensors` holds parameters, optimizer
and step in one file, so that they always belong together. `done` marks a finished run.
"""

import fcntl
import hashlib
import json
import os
import re
from pathlib import Path
from typing import TextIO

from torch import Tensor

from minidpo.system import processes
from minidpo.system.files import (
    as_json,
    check_version,
    named_in_errors,
    read_json,
    write_json,
    write_text,
)
from minidpo.system.tensors import fingerprint, read_weights, write_weights
from minidpo.system.tracking import Tracking, flat

VERSION = 1  # of the folder's layout and its JSON files
SHA256 = re.compile(r"[0-9a-f]{64}")
STATE_VERSION = "3"  # 3: instances in a random order within an epoch
# Settings that do not change the result: paths, and how much is computed at a time.
NOT_DECISIVE = {
    "out",
    "track",
    "explain",
    "export",
    "golden",  # hashed with the data
    "machine.micro_tokens",
    "machine.tree_tokens",
    "machine.depth_first",
    "machine.recompute",
    "machine.offload",
    "machine.cache",
    "machine.memory_gib",
    "machine.pages",
    "machine.page_tokens",
}


class RunFolder:
    """The folder of one training. After `begin` it belongs to this configuration and this process."""

    def __init__(self, folder: str | Path, config: dict):
        self.folder = Path(folder)
        self.config = as_json(config)  # as read_settings returns it
        self.metrics, self.state = self.folder / "metrics.jsonl", self.folder / "state.safetensors"
        self.base = ""  # fingerprint of the base's weights
        self.drawn = ""  # how many tokens dropout is drawn for at a time
        self._lock = None
        self._check_settings()
        self.tracking = Tracking(self.folder, self.config)

    def _check_settings(self) -> None:
        """Raise ValueError if the folder holds a run with other settings that has made a step, or files that
        belong to no run."""
        if (self.folder / "config.json").is_file():
            changed = changed_settings(read_settings(self.folder), self.config)
            if changed and (self.metrics.exists() or self.state.exists() or self.finished):
                raise ValueError(
                    f"{self.folder} holds a run with other settings ({changed}): give another "
                    "--out, or delete the folder"
                )
        elif self.state.exists() or (self.folder / "adapter").exists():
            raise ValueError(
                f"{self.folder} has files of a run but no config.json with its settings: give another --out"
            )

    @processes.by_rank_0
    def begin(self) -> None:
        """Lock the folder and write the settings. Call it when all inputs are known to exist."""
        if self._lock is None:
            self._lock = lock(self.folder)
            self._check_settings()  # another process may have written them since __init__
        write_settings(self.folder, self.config)
        self.tracking.begin()

    def log(self, record: dict) -> None:
        """Append one step to metrics.jsonl."""
        if processes.rank() > 0:
            return
        with named_in_errors(self.metrics), open(self.metrics, "a") as file:
            file.write(json.dumps(record) + "\n")
        self.tracking.sync()

    def steps_so_far(self) -> list[dict]:
        """The steps in the log. Rank 0 reads them, because it may be writing the file."""
        return processes.all_gather(records(self.folder) if processes.rank() == 0 else [])[0]

    @processes.by_rank_0
    def truncate_log(self, steps: int) -> None:
        """Keep the first `steps` lines of the log; the later steps will be logged again."""
        text = self.metrics.read_text() if self.metrics.is_file() else ""
        lines = text.splitlines(keepends=True)[:steps]
        if len(lines) < steps:
            raise ValueError(
                f"{self.metrics} holds {len(lines)} steps, but {self.state.name} was saved at step "
                f"{steps}; delete both to start again"
            )
        if text:
            write_text(self.metrics, "".join(lines))

    @processes.by_rank_0
    def save_state(self, step: int, tensors: dict[str, Tensor]) -> None:
        """After `step` steps, save everything that the next step depends on."""
        if self.metrics.is_file():
            # the log of these steps must reach the disk before the state does
            with open(self.metrics, "rb+") as file:
                os.fsync(file.fileno())
        metadata = {"step": str(step), "version": STATE_VERSION}
        if self.base:
            metadata["base"] = self.base
        if self.drawn:
            metadata["drawn"] = self.drawn
        write_weights(self.state, tensors, metadata | {"sha256": _checksum(metadata, tensors)})

    def load_state(self) -> tuple[int, dict[str, Tensor]] | None:
        """The step and the tensors that `save_state` wrote last, on the CPU; None if there is no state."""
        if not self.state.is_file():
            return None
        try:
            tensors, metadata = read_weights(self.state)
            if metadata.get("version") != STATE_VERSION:
                raise ValueError(f"{self.state}: made by another version")
            if metadata.get("base", self.base) != self.base:
                raise ValueError(
                    f"{self.state}: the run began with another base model or dtype: continue "
                    "with the model and the device that it began with"
                )
            if metadata.get("drawn", self.drawn) != self.drawn:
                raise ValueError(
                    f"{self.state}: dropout was drawn for {metadata['drawn']} tokens at a time: continue "
                    "with that --machine.micro-tokens"
                )
            if metadata.get("sha256") != _checksum(metadata, tensors):
                raise ValueError(f"{self.state}: not readable (its checksum is wrong)")
        except ValueError as error:
            raise ValueError(f"{error}; delete it to start again") from None
        return int(metadata["step"]), tensors

    @processes.by_rank_0
    def call(self, work, *arguments) -> None:
        """Do this in one process only."""
        work(*arguments)

    @processes.by_rank_0
    def write(self, name: str, text: str) -> None:
        """Write a file of the folder, whole or not at all."""
        write_text(self.folder / name, text)

    @property
    def finished(self) -> bool:
        return (self.folder / "done").is_file()

    @processes.by_rank_0
    def finish(self) -> None:
        """Mark the run as complete and delete the state from which a restart would continue."""
        self.tracking.finish()
        write_text(self.folder / "done", "complete\n")
        self.state.unlink(missing_ok=True)

    @processes.by_rank_0
    def resync_finished(self) -> None:
        """Bring a finished run up to date: delete the state and complete the tracker."""
        self.state.unlink(missing_ok=True)  # a kill may have come before `finish` did
        self.tracking.finish()


write_tensors = processes.by_rank_0(write_weights)  # one process writes, the others wait


def _checksum(metadata: dict[str, str], tensors: dict[str, Tensor]) -> str:
    words = [metadata[name] for name in ("step", "base", "drawn") if name in metadata]
    return hashlib.sha256(" ".join([*words, fingerprint(tensors)]).encode()).hexdigest()


def lock(folder: Path) -> TextIO:
    """Lock a folder until the returned file is closed. Raises ValueError if another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / ".lock", "a")
    try:  # the kernel frees it when the process ends
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise ValueError(f"{folder}: another process is writing to it") from None
    return file


def write_settings(folder: Path, settings: dict) -> None:
    write_json(folder / "config.json", {"version": VERSION, **settings})


def read_settings(folder: Path) -> dict:
    """The settings of the run in a folder."""
    return check_version(
        read_json(folder / "config.json"), VERSION, f"{folder} holds a run", ": give another folder"
    )


def records(folder: Path) -> list[dict]:
    """The steps logged in a run folder, in order."""
    path = folder / "metrics.jsonl"
    steps = []
    for number, line in enumerate(path.read_text().splitlines() if path.is_file() else (), 1):
        try:
            steps.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from None
    return steps


def changed_settings(old: dict, new: dict) -> str:
    """The decisive settings in which two configurations differ, with both values; "" if they agree. Inputs are
    compared by content, NAME_sha256 instead of the path NAME, so a moved file is the same input. Inputs of an old
    run without hashes are compared by path.

    >>> changed_settings({"sft": {"lr": 0.001, "save_every": 25}}, {"sft": {"lr": 2e-05, "save_every": 5}})
    'sft.lr 0.001, now 2e-05'
    """
    new = {name: x for name, x in new.items() if name in old or not name.endswith("_sha256")}
    before, now = _decisive(old), _decisive(new)
    found = []
    for name in sorted({*before, *now}):
        if before.get(name) == now.get(name):
            continue
        whole, hashed, part = name.partition("_sha256")
        if hashed or SHA256.fullmatch(str(now.get(name))):
            part = part.replace(".", "'s ", 1)
            found.append(f"{whole}{part} of other content")
        else:
            found.append(f"{name} {before.get(name)}, now {now.get(name)}")
    return "; ".join(found)


def _decisive(config: dict) -> dict:
    """The settings that decide the result, without nesting."""
    settings = flat({name: x for name, x in config.items() if f"{name}_sha256" not in config})
    return {
        name: value
        for name, value in settings.items()
        if name not in NOT_DECISIVE and not name.endswith(".save_every")
    }
