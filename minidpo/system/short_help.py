"""What `--help` prints: the options that most people need, a line each, on one screen. `--help-all` has the rest."""

import ast
import inspect
import itertools
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from fnmatch import fnmatch
from typing import Literal, get_args, get_origin, get_type_hints

from minidpo.system.ranges import default_of

LINES = 25  # a title and 24 more
WIDTH = 100  # at most, in columns
# Of the options in groups only these are shown.
COMMON_IN_GROUPS = ("*.steps", "*.lr", "dpo.loss", "dpo.beta", "dpo.nll", "dpo.until")
# Of the options outside groups, a page's own among them, all but these are shown.
RARE = {
    "examples",
    "first",
    "index",
    "judge",
    "least_instances",
    "max_new_tokens",
    "patience",
    "reuse",
    "sampled",
    "shots",
    "track",
}
FOOT = "--config FILE reads defaults from a TOML file. --help-all shows every option."


def short_help(kind: type, description: str) -> str:
    """The common options of the command's dataclass `kind`, below as much of its description as fits."""
    width = min(WIDTH, shutil.get_terminal_size().columns)
    rows = list(common_options(kind, {f.name: default_of(f) for f in fields(kind)}))
    rows.sort(key=lambda row: "." in row[0].split()[0])  # those in groups come last
    left = max(len(flag) for flag, _ in rows) + 4
    options = [
        f"  {flag}".ljust(left) + textwrap.shorten(text, width - left, placeholder=" ...")
        for flag, text in rows
    ]
    paragraphs = description.split("\n\n")
    while len(paragraphs) > 1 and height(paragraphs) + len(options) + 2 > LINES:
        paragraphs.pop()
    return "\n".join(["\n\n".join(paragraphs), "", *options, FOOT])


def height(paragraphs: list[str]) -> int:
    """The lines that these paragraphs take, with an empty one between any two."""
    return len("\n\n".join(paragraphs).splitlines())


def common_options(
    kind: type, defaults: Mapping[str, object], prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """Each common option as its flag with its default, and its help."""
    texts, types = help_texts(kind), get_type_hints(kind)
    for name, default in defaults.items():
        if is_dataclass(default):
            yield from common_options(type(default), vars(default), f"{prefix}{name}.")
        elif is_common(prefix + name):
            yield as_flag(prefix + name, default), with_choices(texts.get(name, ""), types[name])


def is_common(name: str) -> bool:
    if "." in name:
        return any(fnmatch(name, pattern) for pattern in COMMON_IN_GROUPS)
    return name not in RARE


def as_flag(name: str, default: object) -> str:
    """An option as one would type it, with its default; its name in capitals where that is None, or is missing.

    >>> as_flag("dpo.lr", 2e-4), as_flag("best_of", 1), as_flag("golden", None), as_flag("watch", False)
    ('--dpo.lr 0.0002', '--best-of 1', '--golden GOLDEN', '--watch')
    """
    flag = f"--{name}".replace("_", "-")
    if isinstance(default, bool):
        return flag
    if default is None or default is MISSING or default == ():
        return f"{flag} {flag.lstrip('-').rpartition('.')[2].upper()}"
    values = default if isinstance(default, tuple) else (default,)
    return " ".join([flag, *map(str, values)])


def with_choices(text: str, kind: object) -> str:
    """The help of an option that takes one of a few words, which come first unless it names them itself.

    >>> with_choices("who acts", Literal["model", "expert"] | None)
    '(model, expert) who acts'
    """
    for part in (kind, *get_args(kind)):
        if get_origin(part) is Literal and any(word not in text for word in get_args(part)):
            return f"({', '.join(get_args(part))}) {text}"
    return text


def help_texts(kind: type) -> dict[str, str]:
    """The string below each field of a dataclass, by the field's name; that of a base class where it has none."""
    texts = {}
    for part in reversed(kind.__mro__):
        try:
            source = inspect.getsource(part)
        except (OSError, TypeError):  # a class without a source: a built-in, or made by the program
            continue
        (definition,) = ast.parse(textwrap.dedent(source)).body
        for field, below in itertools.pairwise(definition.body):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                texts[field.target.id] = " ".join(ast.literal_eval(below.value).split())
    return texts
