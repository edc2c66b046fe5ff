"""The command line: flags, and the TOML file that --config names, become one dataclass."""

import contextlib
import difflib
import gc
import io
import os
import re
import signal
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from unittest.mock import patch

import torch
import tyro

from minidpo.system import processes
from minidpo.system.files import as_json
from minidpo.system.short_help import short_help
from minidpo.system.tracking import told_of_the_end

PACKAGED = Path(__file__).parents[1] / "configs"  # of an installed minidpo; a checkout has configs/
AS_INSTALLED = {
    r"(?:\S*python )?\b(train|collect|evaluate)\.py\b": r"minidpo \1",
    "run make setup, or ": "",
    "make demo-nano": "minidpo train ef-dpo --config configs/nano.toml",
    "make demo": "minidpo train ef-dpo --config configs/demo.toml",
}


def as_started(text: str) -> str:
    """A text that names scripts and make. If minidpo is installed, its program is named instead."""
    for pattern, instead in AS_INSTALLED.items() if PACKAGED.is_dir() else ():
        text = re.sub(pattern, instead, text)
    return text


def parse(kind: type, arguments: list[str], program: str, description: str):
    """The command's dataclass `kind` from `--config FILE` and flags.

    The file's values come first, so flags win. Both are checked together, because a required option may be in
    either. An error names the file.
    """
    if {"-h", "--help"} & {*arguments}:
        print(short_help(kind, as_started(description)), flush=True)
        sys.exit(0)
    arguments = ["--help" if argument == "--help-all" else argument for argument in arguments]
    file, file_flags, flags = split_config_file(arguments)
    names = Counter(
        re.sub(r"^--(.*\.)?no-", r"--\1", flag.partition("=")[0].replace("_", "-"))
        for flag in flags
        if flag.startswith("--")
    )
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(
            f"{twice[0]} is given twice, and only the last one would count: give it once, with all its values"
        )
    text = f"{description}\n\n--config FILE reads a TOML file first; flags win over it."
    try:
        return at_home(_parse_with_tyro(kind, [*file_flags, *flags], program, text))
    except ValueError as error:
        if file is None:
            raise
        raise ValueError(f"{file} and the flags beside it: {error}") from None


def at_home(options):
    """The options with `~` at the beginning of a path replaced by the home folder, which no shell does in a TOML
    file, in quotes or in `--out=~/x`. The options are checked again."""
    if isinstance(options, Path):
        return Path(os.path.expanduser(options))
    if isinstance(options, tuple):
        return tuple(map(at_home, options))
    if is_dataclass(options):
        found = {f.name: at_home(vars(options)[f.name]) for f in fields(options)}
        return replace(options, **found)
    return options


def split_config_file(arguments: list[str]) -> tuple[str | None, list[str], list[str]]:
    """The file after --config or None, its content as flags, and the other arguments."""
    parts = []
    for argument in arguments:
        parts += argument.split("=", 1) if argument.startswith("--config=") else [argument]
    if "--config" not in parts:
        return None, [], parts
    at = parts.index("--config")
    if at + 1 == len(parts):
        raise ValueError("--config needs the name of a TOML file")
    return parts[at + 1], toml_flags(parts[at + 1]), parts[:at] + parts[at + 2 :]


def toml_flags(path: str | Path) -> list[str]:
    """A TOML file's content as flags: `[sft] lr = 0.001` becomes `--sft.lr 0.001`. If minidpo is installed and
    there is no file configs/NAME here, the one that came with minidpo is read."""
    file = at_home(Path(path))
    packaged = PACKAGED / Path(*file.parts[1:])
    if file.parts[:1] == ("configs",) and not file.exists() and packaged.is_file():
        file = packaged
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"{path}: the configuration file cannot be read ({error.strerror})"
        ) from None
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, or nested too deep
        raise ValueError(f"{path}: not TOML: {error}") from None
    return [part for flag in _flags(values) for part in flag]


def changed_flags(kind: type, *configs) -> list[str]:
    """The flags that reproduce settings: those that differ from the defaults of the command's dataclass `kind`.

    configs: dataclasses that together have the fields of `kind`.
    """
    settings = {}
    for config in configs:
        settings |= as_json(asdict(config))
    default_flags = list(_flags(as_json(asdict(kind()))))
    return [part for flag in _flags(settings) if flag not in default_flags for part in flag]


def _flags(values: dict, prefix: str = "") -> Iterator[list[str]]:
    """Each option as its flag and its values."""
    for name, value in values.items():
        name = name.replace("_", "-")
        if isinstance(value, dict):
            yield from _flags(value, f"{prefix}{name}.")
        elif isinstance(value, bool):
            yield [f"--{prefix}{name}" if value else f"--{prefix}no-{name}"]
        else:
            yield [f"--{prefix}{name}", *map(str, value if isinstance(value, list) else [value])]


def _parse_with_tyro(kind: type, arguments: list[str], program: str, description: str):
    """tyro's parser. Its boxed error message becomes one line: what is wrong, and what was perhaps meant."""
    printed, program = io.StringIO(), as_started(program)
    # wide enough that no word is broken
    columns = {} if {"-h", "--help"} & {*arguments} else {"COLUMNS": "100000"}
    try:
        with contextlib.redirect_stderr(printed), patch.dict(os.environ, columns):
            return tyro.cli(kind, args=arguments, prog=program, description=as_started(description))
    except SystemExit as end:
        if not end.code:  # --help-all
            sys.stdout.flush()
            raise
        text = re.sub(r"\x1b\[[0-9;]*m", "", printed.getvalue())
        _, *lines = text.splitlines()  # the first one is the frame's title
        inside = "\n".join(line.strip("│| ") for line in lines)
        problem, *_ = filter(str.strip, re.split(r"[─╰╯+-]{4,}", inside))
        hint = ""
        if "Unrecognized" in problem:
            near = [
                o for word in re.findall(r"--[\w.-]+", problem) for o in options_like(word, kind)
            ]
            hint = f" (is it {' or '.join(near)}?)" if near else ""
        problem = " ".join(problem.split()).rstrip(".")
        problem = problem.removeprefix(f"Error parsing {kind.__name__}: ")
        raise ValueError(f"{problem}{hint}; {program} --help-all lists all options") from None


def options_like(option: str, kind: type) -> list[str]:
    """The options of a command whose name, without their group's, is nearly this one's.

    >>> from minidpo.results.evaluate import EvaluateCommand; options_like("--episode", EvaluateCommand)
    ['--episodes']
    """
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        tyro.cli(kind, args=["--help"])
    options = dict.fromkeys(re.findall(r"--[\w.-]+", text.getvalue()))
    names = {o: o.rpartition(".")[2].lstrip("-") for o in options}
    near = difflib.get_close_matches(option.rpartition(".")[2].lstrip("-"), names.values(), 1, 0.7)
    return [o for o, name in names.items() if name in near]


def command_in(table: Mapping[str, object], name: str, what: str):
    """The command of this name. If there is none, raises ValueError with the name that was perhaps meant."""
    if name not in table:
        near = difflib.get_close_matches(name, table, n=1)
        hint = f" (is it {near[0]}?)" if near else ""
        raise ValueError(f"{what} {name!r}{hint}; there are {', '.join(table)}")
    return table[name]


def _unread() -> bool:
    """Whether the reader of the output has closed it, as `head` does; if so, nothing more is written."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # otherwise Python would complain at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def main(run: Callable[[list[str]], object]) -> None:
    """Run a script with its arguments. An expected error is one line and exit code 2, never a traceback."""
    # Until this is called once, MKL may use fewer threads than torch reports. Rollouts call it, so it is called
    # here: otherwise a run that skips its finished rollouts would not compute the same bits.
    torch.set_num_threads(torch.get_num_threads())
    # so that the garbage collector skips what was imported; saves half a second, also at exit
    gc.freeze()
    try:
        with processes.process_group(), told_of_the_end():
            run(sys.argv[1:])
            sys.stdout.flush()
    # a wrong setting or input, the disk, or memory
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        if isinstance(error, BrokenPipeError) and _unread():
            sys.exit(128 + signal.SIGPIPE)
        text = str(error)
        if isinstance(error, torch.OutOfMemoryError):
            text += " (train.py plan shows what needs memory)"
        print(f"error: {as_started(text)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        print(f"stopped; {str(stop) or 'the same command continues from here'}", file=sys.stderr)
        sys.exit(130)
