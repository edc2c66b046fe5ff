"""31. The command line: flags and a TOML file in, one dataclass out.

A TOML file gives defaults, flags win; what a run used is written beside its results. Next: 32 alive.
"""

import contextlib
import io
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
import tyro

from minidpo.system import processes


def toml_flags(path: str | Path) -> list[str]:
    """A TOML file as the flags it stands for: `[sft] lr = 0.001` is `--sft.lr 0.001`.

    Raises ValueError when the file is missing or not TOML; whether an option exists is the parser's to say.
    """
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such configuration file") from None
    except ValueError as error:  # not TOML, or not UTF-8
        raise ValueError(f"{path}: not TOML: {error}") from None
    return list(_flags(values, ""))


def _flags(values: dict, prefix: str) -> Iterator[str]:
    for name, value in values.items():
        flag = f"--{prefix}{name.replace('_', '-')}"
        if isinstance(value, dict):
            yield from _flags(value, f"{prefix}{name.replace('_', '-')}.")
        elif isinstance(value, bool):
            yield flag if value else f"--{prefix}no-{name.replace('_', '-')}"
        elif isinstance(value, list):
            yield from (flag, *map(str, value))
        else:
            yield from (flag, str(value))


def changed_flags(config) -> list[str]:
    """The flags that a command was given, by itself or from a file: those that are not the default."""
    asked, default = (json.loads(json.dumps(asdict(of), default=str)) for of in (config, type(config)()))
    changed = {name: value for name, value in asked.items() if value != default[name]}
    for name, group in changed.items():
        if isinstance(group, dict):
            changed[name] = {key: value for key, value in group.items() if value != default[name][key]}
    return list(_flags(changed, ""))


def split_config_file(arguments: list[str]) -> tuple[str | None, list[str], list[str]]:
    """The file behind --config, or None; what stands in it, as flags; and the other arguments."""
    parts = [part for argument in arguments for part in
             (argument.split("=", 1) if argument.startswith("--config=") else [argument])]
    if "--config" not in parts:
        return None, [], parts
    at = parts.index("--config")
    if at + 1 == len(parts):
        raise ValueError("--config needs the name of a TOML file")
    return parts[at + 1], toml_flags(parts[at + 1]), parts[:at] + parts[at + 2:]


def parse(kind: type, arguments: list[str], program: str, description: str):
    """The command's dataclass from `--config FILE` and flags; the file's values come first, so flags win.

    They are judged together, as each may need what only the other says. The file is named where something
    is wrong with it and the flags are not wrong in just this way without it.
    """
    file, settings, flags = split_config_file(arguments)
    text = f"{description}\n\n--config FILE reads a TOML file first; flags win over it."
    try:
        return _cli(kind, [*settings, *flags], program, text)
    except ValueError as error:
        if _problem(kind, settings, program) and _problem(kind, flags, program) != str(error):
            raise ValueError(f"{file}: {error}") from None
        raise


def _problem(kind: type, arguments: list[str], program: str) -> str | None:
    try:
        _cli(kind, arguments, program, "")
    except ValueError as error:
        return str(error)
    return None


def _cli(kind: type, arguments: list[str], program: str, description: str):
    """tyro's parser, with its box of complaints in one line: what is wrong, and what was perhaps meant."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(kind, args=arguments, prog=program, description=description)
    except SystemExit as end:
        if not end.code:  # --help was asked for and given
            raise
        text = re.sub(r"\x1b\[[0-9;]*m", "", said.getvalue())
        lines = [line.strip("│| ") for line in text.splitlines()[1:]]  # without the frame and its title
        problem, *more = filter(str.strip, re.split(r"[─╰╯+-]{4,}", "\n".join(lines)))
        meant = r"^(?:Perhaps you meant|Arguments similar to .*):\n *(--\S+)"
        like = re.findall(meant, "\n".join(map(str.strip, more)), re.MULTILINE)
        hint = f" (is it {' or '.join(like)}?)" if like else ""
        problem = " ".join(problem.split()).rstrip(".")
        raise ValueError(f"{problem}{hint}; {program} --help lists what there is") from None


def main(run: Callable[[list[str]], object]) -> None:
    """Run a script: an expected error is one line and exit code 2, never a traceback."""
    # MKL may use fewer threads than it has until this was called once, and rollouts call it: so from here on a run
    # that plays first and one that goes on behind it compute alike
    torch.set_num_threads(torch.get_num_threads())
    try:
        with processes.process_group():
            run(sys.argv[1:])
    except (ValueError, OSError) as error:  # what was asked for, or the disk: not a mistake of ours
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        print(f"stopped; {str(stop) or 'the same command goes on from here'}", file=sys.stderr)
        sys.exit(130)
