"""result.json: what a run or an evaluation found.

`{"version": 2, "agents": {name: {"all": rates, "tasks": {task: rates}}}, "comparison": ..., ...}`. In version 1
the agents were at the top level, beside the other fields; reading turns it into version 2.
"""

from collections.abc import Mapping
from pathlib import Path

from minidpo.system.files import check_version, read_json, write_json

VERSION = 2


def read_result(path: Path) -> dict:
    """A result.json of version 1 or 2 in the shape of version 2. `agents` is empty if the file names none."""
    content = read_json(path)
    if content.get("version", 1) == 1:
        agents = {
            name: value
            for name, value in content.items()
            if isinstance(value, dict) and {"all", "tasks"} <= value.keys()
        }
        fields = {name: value for name, value in content.items() if name not in agents}
        content = {**fields, "version": VERSION, "agents": agents}
    return {"agents": {}, **check_version(content, VERSION, f"{path}: a result")}


def write_result(path: Path, result: Mapping) -> None:
    write_json(path, {"version": VERSION, **result})
