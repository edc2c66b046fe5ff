"""22. Run folders: what a training leaves behind, written so that a kill can tear nothing.

`metrics.jsonl` gets a line a step; `state.safetensors` holds parameters, optimizer and step in ONE file, so
there is no moment at which they disagree. Next: 24 trainer.
"""

import json
import time
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from minidpo.files import read_json, write_json, write_text
from minidpo.pretrained import write_weights
from minidpo.tracking import Tracking

STATE_VERSION = "1"


def records(folder: Path) -> list[dict]:
    """The steps that a run folder has logged, in order."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def _decides(config: dict) -> dict:
    """The settings that a result depends on: not where it is told, nor how much is computed at once."""
    machine = {**(config.get("machine") or {})}
    for name in ("micro_tokens", "tree_tokens", "recompute", "offload", "cache", "memory_gib", "pages"):
        machine.pop(name, None)
    config = {name: value for name, value in config.items() if name not in ("explain", "track")}
    return {**config, "machine": machine}


class Run:
    """A folder that one training writes to. It belongs to a configuration from `begin` on."""

    def __init__(self, folder: str | Path, config: dict):
        self.folder = Path(folder)
        before = self.folder / "config.json"
        self.config = config = json.loads(json.dumps(config, default=str))  # as it will read back
        old = read_json(before) if before.is_file() else config
        old, new = _decides(old), _decides(config)
        if old != new:
            changed = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
            raise ValueError(f"{self.folder} holds a run with other settings ({', '.join(changed)}): "
                             "give another --out, or delete the folder")
        self.metrics = self.folder / "metrics.jsonl"
        self.state = self.folder / "state.safetensors"
        self.tracking = Tracking(self.folder, config)

    def begin(self) -> None:
        """Take the folder: called once all that was asked for is known to be there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "config.json", self.config)
        self.tracking.begin()

    @property
    def finished(self) -> bool:
        return (self.folder / "done").is_file()

    def finish(self) -> None:
        """Mark the run as complete and drop what only a restart needs."""
        self.tracking.finish()
        write_text(self.folder / "done", "complete\n")
        self.state.unlink(missing_ok=True)

    def log(self, record: dict) -> None:
        with open(self.metrics, "a") as file:
            file.write(json.dumps(record) + "\n")
        self.tracking.sync()

    def records(self) -> list[dict]:
        """All steps logged so far."""
        return records(self.folder)

    def save_state(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Everything that the next step depends on, after `step` steps."""
        write_weights(self.state, tensors, {"step": str(step), "version": STATE_VERSION})

    def load_state(self) -> tuple[int, dict[str, Tensor]] | None:
        """What `save_state` last kept, on the CPU, or None. Metrics of later steps go: they come again."""
        if not self.state.is_file():
            self.metrics.unlink(missing_ok=True)
            return None
        try:
            with safe_open(self.state, "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except SafetensorError as error:
            raise ValueError(f"{self.state}: not readable ({error}); delete it to start again") from None
        if metadata.get("version") != STATE_VERSION:
            raise ValueError(f"{self.state}: made by another version; delete it to start again")
        step = int(metadata["step"])
        lines = self.metrics.read_text().splitlines(keepends=True)[:step] if self.metrics.is_file() else []
        write_text(self.metrics, "".join(lines))
        return step, tensors


class Clock:
    """Seconds by stage, kept in a file so that a run that went on elsewhere still knows what it took."""

    def __init__(self, path: Path):
        self.path = path
        self.seconds: dict[str, float] = read_json(path) if path.is_file() else {}

    def time(self, stage: str, work, *arguments):
        began = time.perf_counter()
        try:
            return work(*arguments)
        finally:
            self.seconds[stage] = round(self.seconds.get(stage, 0.0) + time.perf_counter() - began, 1)
            write_json(self.path, self.seconds)
