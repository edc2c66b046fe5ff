"""Function calls, as text and back: `guess(number=5, why="it is odd")`.

The grammar is closed: the name of a function, then its arguments, by name or in their order, with JSON values. Text is
parsed, never evaluated. A function has a name, a docstring and the JSON Schema of each parameter.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from envs.protocol import ActionError

KINDS: dict[str, tuple[type, object]] = {  # type in JSON Schema -> type in Python, and an example
    "string": (str, "text"),
    "integer": (int, 1),
    "number": (float, 1.5),
    "boolean": (bool, True),
    "array": (list, []),
    "object": (dict, {}),
    "null": (type(None), None),
}
_KEY = re.compile(r"([A-Za-z_]\w*)\s*=\s*")
_JSON = json.JSONDecoder()


class Tool(NamedTuple):
    """A function that the agent may call."""

    name: str
    about: str
    parameters: Mapping[str, Mapping[str, Any]]
    "The JSON Schema of each parameter, in order."
    required: frozenset[str]

    def __str__(self) -> str:
        """The tool as the agent reads it."""
        words = [
            f"{name}: {told(schema)[0]}" + ("" if name in self.required else " (may be left out)")
            for name, schema in self.parameters.items()
        ]
        about = self.about.replace("\n", "\n    ")
        return f"{self.name}({', '.join(words)})\n    {about}".rstrip()


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: str
    "A JSON object, in the order of the tool's parameters."


class Tools:
    """The tools of a world, and the grammar of their calls."""

    def __init__(self, tools: Iterable[Tool]):
        self.named = {tool.name: tool for tool in tools}
        first = next(iter(self.named.values()))
        given = {name: told(schema)[1] for name, schema in first.parameters.items()}
        self.example = render(Call(first.name, json.dumps(given)))

    def prompt(self, about: str) -> str:
        """The first message to the agent."""
        return "\n".join(
            [
                f"{about}\nYou act by calling functions, one a turn. Answer:",
                "thought: what you see, and what follows from it",
                f"action: {self.example}",
                "The functions are:",
                *map(str, self.named.values()),
            ]
        ).strip()

    def parse(self, text: str) -> Call:
        """The call in a text. Raises ActionError and nothing else."""
        name, bracket, rest = text.strip().strip("`").strip().partition("(")
        tool = self.named.get(name.strip())
        if tool is None or not bracket:
            raise ActionError(
                f"an action looks like {self.example} and calls one of {', '.join(self.named)}, got {text[:60]!r}"
            )
        try:
            given = _arguments(tool, rest.lstrip())
            text = json.dumps(given, ensure_ascii=False, allow_nan=False)
            text.encode()
        except ActionError:
            raise
        # no JSON, not finite, half a character, or nested too deep
        except (ValueError, RecursionError):
            raise ActionError(
                f"the arguments of {tool.name} are no JSON: call it like {self.example}"
            ) from None
        return Call(tool.name, text)


def render(call: Call) -> str:
    """The one canonical text of a call.

    >>> render(Call("guess", '{"number": 5, "why": "odd"}'))
    'guess(number=5, why="odd")'
    """
    given = json.loads(call.arguments).items()
    words = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in given)
    return f"{call.name}({', '.join(words)})"


def _arguments(tool: Tool, rest: str) -> dict[str, Any]:
    """The arguments in the text after the bracket. Raises ActionError, ValueError or RecursionError."""
    given: dict[str, Any] = {}
    while not rest.startswith(")"):
        if given:
            if not rest.startswith(","):
                raise ActionError(f"a comma or a bracket is missing before {rest[:40]!r}")
            rest = rest[1:].lstrip()
        if key := _KEY.match(rest):
            name, rest = key[1], rest[key.end() :]
        else:
            name = next((name for name in tool.parameters if name not in given), "one more")
        if name in given or name not in tool.parameters:
            raise ActionError(f"{name} is given twice to {tool.name} or is none of its parameters")
        value, end = _JSON.raw_decode(rest)
        if not fits(value, tool.parameters[name]):
            wanted = told(tool.parameters[name])[0]
            raise ActionError(f"{name} of {tool.name} must be {wanted}, got {rest[:end][:40]}")
        given[name], rest = value, rest[end:].lstrip()
    if rest.rstrip(" .;") != ")":
        raise ActionError("give exactly one call a turn, and nothing behind it")
    if missing := tool.required - given.keys():
        raise ActionError(f"{tool.name} needs {', '.join(sorted(missing))}")
    return {name: given[name] for name in tool.parameters if name in given}


def fits(value: Any, schema: Any) -> bool:
    """Whether a value fits its JSON Schema, of which anyOf, enum, type and items are checked.

    >>> fits(3, {"type": "integer"}), fits(True, {"type": "integer"}), fits("up", {"enum": ["up", "down"]})
    (True, False, True)
    """
    if not isinstance(schema, Mapping):
        return True
    if "anyOf" in schema:
        return any(fits(value, one) for one in schema["anyOf"])
    if "enum" in schema:
        return any(type(value) is type(one) and value == one for one in schema["enum"])
    kind = KINDS.get(str(schema.get("type")), (type(value),))[0]
    if type(value) is not kind and (type(value), kind) != (int, float):
        return False
    return kind is not list or all(fits(item, schema.get("items")) for item in value)


def told(schema: Any) -> tuple[str, Any]:
    """A type in words, and an example of it.

    >>> told({"enum": ["up", "down"]}), told({"anyOf": [{"type": "integer"}, {"type": "null"}]})
    (('"up" or "down"', 'up'), ('integer or null', 1))
    """
    if not isinstance(schema, Mapping):
        return "value", "text"
    if "anyOf" in schema:
        words, examples = zip(*map(told, schema["anyOf"]))
        return " or ".join(words), examples[0]
    if "enum" in schema:
        return " or ".join(map(json.dumps, schema["enum"])), schema["enum"][0]
    kind = str(schema.get("type", "value"))
    return kind, KINDS.get(kind, KINDS["string"])[1]
