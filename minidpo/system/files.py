"""Files that are written whole or not at all.

A file is filled under a temporary name, synced to the disk and renamed into place, so a kill or a full disk
leaves either the old file or the new one. Only logs and episodes are appended to, line by line.
"""

import glob
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def temporary_beside(path: Path) -> Path:
    """A temporary name beside `path` for this process. Deletes what killed processes left under such names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.name}.{socket.gethostname()}."  # only this host's processes can be checked
    for leftover in path.parent.glob(f"{glob.escape(prefix)}*"):
        process = leftover.name.removeprefix(prefix)
        if process.isdecimal() and not Path("/proc", process).exists():  # that process was killed
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)
    return path.with_name(f"{prefix}{os.getpid()}")


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary path to write to. If the block succeeds, that file replaces `path` in one step."""
    path = Path(path)
    if path.is_symlink():  # what the link points to is replaced, not the link
        path = path.resolve()
    temporary = temporary_beside(path)
    try:
        with named_in_errors(path):
            yield temporary
            # otherwise a crash could leave an empty file under the new name
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def named_in_errors(path: Path) -> Iterator[None]:
    """Add the file's name to a disk error without one, such as "no space left"."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def write_text(path: str | Path, text: str) -> None:
    """Write UTF-8 text, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, content: dict) -> None:
    """Write indented JSON, whole or not at all; paths become strings."""
    write_text(path, json.dumps(content, indent=1, default=str, ensure_ascii=False) + "\n")


def as_json(content: dict) -> dict:
    """The content as `read_json` would return it after `write_json`: a path is text, a tuple a list."""
    return json.loads(json.dumps(content, default=str))


def read_json(path: str | Path) -> dict:
    """The JSON object in a file."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (ValueError, RecursionError) as error:  # bad JSON, not UTF-8, or nested too deep
        raise ValueError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {content!r:.40}")
    return content


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file is a Git LFS pointer instead of the content itself."""
    return begins_with(path, b"version https://git-lfs")


def begins_with(path: Path, magic: bytes) -> bool:
    """Whether there is a file that begins with these bytes."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(len(magic)) == magic


def check_version(content: dict, known: int, what: str, way_out: str = "") -> dict:
    """JSON content without its `version`, which must be `known`. Content without a version has version 1."""
    if (version := content.pop("version", 1)) != known:
        raise ValueError(
            f"{what} of format version {version}, but this minidpo reads version {known}{way_out}"
        )
    return content


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file's content, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
