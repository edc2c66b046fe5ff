"""Reads an observation: its lines become elements, and a pattern takes values from its instruction.

An expert knows nothing else of a page, so it reads what a model reads.
"""

import re
from dataclasses import dataclass

from envs.protocol import Observation


@dataclass(frozen=True)
class Element:
    """One line of an observation; `ref` is None for plain text."""

    role: str
    text: str
    value: str
    options: tuple[str, ...]
    flags: frozenset[str]
    ref: str | None
    line: str


_LINE = re.compile(r"(\S*)(.*?)(?: \[(\d+)\])?", re.DOTALL)
_PART = re.compile(
    r'(?P<key>\w+=)?"(?P<string>(?:[^"\\]|\\.)*)"|(?P<id>#\S+)|(?P<word>[a-z][\w-]*)', re.DOTALL
)


def element(line: str) -> Element:
    r"""Parse a line: role, label or #id, value, options, and the bare words as flags.

    >>> box = element(r'input password #key value="a \"b\"" focused [4]')
    >>> box.role, box.text, box.value, sorted(box.flags), box.ref
    ('input', '#key', 'a "b"', ['focused', 'password'], '4')
    >>> element('select options "Peru", "Chad" value="Chad" [2]').options
    ('Peru', 'Chad')
    """
    role, rest, ref = _LINE.fullmatch(line).groups()
    strings: dict[str, list[str]] = {"text": [], "options": [], "value=": []}
    flags, kind = set(), "text"
    for part in _PART.finditer(rest):
        if part["string"] is not None:
            kind = part["key"] or kind
            strings.setdefault(kind, []).append(re.sub(r"\\(.)", r"\1", part["string"]))
        elif part["id"]:
            strings["text"].append(part["id"])
        elif part["word"] == "options":
            kind = "options"
        else:
            flags.add(part["word"])
    text, value = (strings[name][0] if strings[name] else "" for name in ("text", "value="))
    return Element(role, text, value, tuple(strings["options"]), frozenset(flags), ref, line)


def look(seen: Observation, *roles: str) -> list[Element]:
    """The page's elements in reading order; if roles are given, only those."""
    page = [element(line) for line in seen.text.split("\n")]
    return [thing for thing in page if not roles or thing.role in roles]


def find(seen: Observation, text: str, *roles: str) -> Element:
    """The first usable element with this text. Raises ValueError if the page shows none."""
    for thing in look(seen, *roles):
        if thing.text == text and thing.ref is not None:
            return thing
    raise ValueError(f"no {' or '.join(roles) or 'element'} {text!r} on this page: {seen.text!r}")


def asked(seen: Observation, pattern: str) -> tuple[str, ...]:
    """The groups of the pattern in the instruction. Raises ValueError if the pattern does not match."""
    match = re.search(pattern, seen.instruction)
    if match is None:
        raise ValueError(f"an instruction like {pattern!r} was expected, got {seen.instruction!r}")
    return match.groups()
