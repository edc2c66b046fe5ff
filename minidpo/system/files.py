"""0. Files: written whole or not at all.

A file is filled beside its place, pushed to the disk and renamed into it, so a kill or a full disk leaves
either the old file or the new one. Only logs and episodes are appended to, line by line. Next: 1 scores.
"""

import glob
import hashlib
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def named_in_errors(path: Path) -> Iterator[None]:
    """An error of the disk, such as no space left, says for which file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A path to write to; if the block ends well, it takes the place of `path`, at once and whole."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    here = f".{path.name}.{socket.gethostname()}."  # a process can be asked for where it runs only
    for left in path.parent.glob(f"{glob.escape(here)}*"):
        if not _runs(left.name.removeprefix(here)):
            left.unlink(missing_ok=True)
    written = path.with_name(f"{here}{os.getpid()}")
    try:
        with named_in_errors(path):
            yield written
            with open(written, "rb+") as file:
                os.fsync(file.fileno())  # or a crash could leave the new name with no content
        os.replace(written, path)
    finally:
        written.unlink(missing_ok=True)


def _runs(process: str) -> bool:
    return not process.isdecimal() or Path("/proc", process).exists()


def write_text(path: str | Path, text: str) -> None:
    """UTF-8 text, in place at once or not at all."""
    with replacing(path) as written:
        written.write_text(text, encoding="utf-8")


def write_json(path: str | Path, content: dict) -> None:
    """Indented JSON; paths are written as text."""
    write_text(path, json.dumps(content, indent=1, default=str, ensure_ascii=False) + "\n")


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file's content, in hex: tells whether a run that goes on was begun with the same data."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: str | Path) -> dict:
    """The JSON object in a file. Raises ValueError when there is no file, or no object in it."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except ValueError as error:  # bad JSON, or not UTF-8
        raise ValueError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {content!r:.40}")
    return content


def check_version(content: dict, known: int, what: str, otherwise: str = "") -> dict:
    """What `read_json` found, without its `version`, which the first files did not carry.

    Raises ValueError, which begins with `what` and ends with `otherwise`, if it is not the `known` one.
    """
    if (version := content.pop("version", 1)) != known:
        raise ValueError(f"{what} of format version {version}, but this minidpo knows {known}{otherwise}")
    return content
