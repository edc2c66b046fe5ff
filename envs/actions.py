"""Actions: the ten things that an agent can do on a page, as text and back.

    CLICK(ref="3")   TYPE(ref="4", text="Lina")   SELECT(ref="6", option="Nigeria")   PRESS(key="Enter")

The grammar is closed: a command, then named arguments, which are strings or whole numbers. Text is parsed,
never evaluated, and `parse(render(action)) == action` for every action. The parser forgives what small models
get nearly right: lower case, single quotes, backticks, a full stop, a reference without quotes. Any other text
raises `ActionError`, whose message the agent reads in its next observation.
"""

import re
from dataclasses import dataclass

from envs.protocol import ActionError

SYSTEM_PROMPT = """You do a task on a web page. Answer:
thought: the step of the task, then the element you use, as the page shows it
action: CLICK(ref="1")
or TYPE(ref, text) SELECT(ref, option) PRESS(key) HOVER(ref) DOUBLE_CLICK(ref) SCROLL(ref, dx, dy) \
DRAG(ref, to) CLICK_AT(x, y) WAIT()"""

# command -> its forms; a form has the type of each argument, in order
FORMS: dict[str, list[dict[str, type]]] = {
    "CLICK": [{"ref": str}],
    "DOUBLE_CLICK": [{"ref": str}],
    "HOVER": [{"ref": str}],
    "TYPE": [{"ref": str, "text": str}],
    # if a list allows several choices, SELECT of a chosen option undoes the choice
    "SELECT": [{"ref": str, "option": str}],
    "PRESS": [{"key": str}],
    "SCROLL": [{"ref": str, "dx": int, "dy": int}],
    "DRAG": [
        {"ref": str, "to": str},
        {"ref": str, "dx": int, "dy": int},
        {"ref": str, "x": int, "y": int},
    ],
    "CLICK_AT": [{"x": int, "y": int}],
    "WAIT": [{}],
}
MAX_PIXELS = 10_000
MAX_LETTERS = 1_000  # takes up to 5 s to type, and a call has 10 s


@dataclass(frozen=True)
class Action:
    """A command and its named arguments, in the order of its form. Raises ActionError if they do not fit.

    >>> Action("CLICK", ref="3")
    Action('CLICK', ref='3')
    """

    command: str
    args: tuple[tuple[str, str | int], ...]

    def __init__(self, command: str, /, **args: str | int):
        if command not in FORMS:
            raise ActionError(
                f"unknown command {command[:40]!r}, the commands are {', '.join(FORMS)}"
            )
        form = next((form for form in FORMS[command] if form.keys() == args.keys()), None)
        if form is None:
            wanted = " or ".join(f"{command}({', '.join(form)})" for form in FORMS[command])
            raise ActionError(f"{command} needs {wanted}, got {command}({', '.join(args)})"[:200])
        for name, kind in form.items():
            if type(args[name]) is not kind:
                wanted = "a whole number" if kind is int else "a string"
                raise ActionError(f"{name} of {command} must be {wanted}")
            if kind is str and len(args[name]) > MAX_LETTERS:
                raise ActionError(
                    f"{name} of {command} must have at most {MAX_LETTERS:,} characters"
                )
            if kind is int and abs(args[name]) > MAX_PIXELS:
                raise ActionError(f"{name} of {command} must lie within {MAX_PIXELS} pixels")
        object.__setattr__(self, "command", command)
        object.__setattr__(self, "args", tuple((name, args[name]) for name in form))

    def __getitem__(self, name: str) -> str | int:
        return dict(self.args)[name]

    def __contains__(self, name: str) -> bool:
        return name in dict(self.args)

    def __repr__(self) -> str:
        args = "".join(f", {name}={value!r}" for name, value in self.args)
        return f"Action({self.command!r}{args})"


def render(action: Action) -> str:
    r"""The one canonical text of an action.

    >>> render(Action("TYPE", ref="4", text='say "hi"'))
    'TYPE(ref="4", text="say \\"hi\\"")'
    """
    args = ", ".join(f"{name}={_literal(value)}" for name, value in action.args)
    return f"{action.command}({args})"


def _literal(value: str | int) -> str:
    if isinstance(value, int):
        return str(value)
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


# possessive (*+): backtracking into a run of spaces took seconds when other text followed it
_CALL = re.compile(
    r"\s*+`*+\s*+([A-Za-z_]++)\s*+\((.*)\)\s*+[.;]?+\s*+`*+\s*+[.;]?+\s*+", re.DOTALL
)
_ARGUMENT = re.compile(
    r"""\s*([A-Za-z_]+)\s*=\s*
        (?: "((?:[^"\\]|\\.)*)"  |  '((?:[^'\\]|\\.)*)'  |  ([+-]?[0-9]{1,9}) )\s*""",
    re.DOTALL | re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)


def parse(text: str) -> Action:
    r"""The action in a text. Raises ActionError and nothing else.

    >>> parse("`click(ref=3)`.")
    Action('CLICK', ref='3')
    """
    call = _CALL.fullmatch(text)
    if call is None:
        raise ActionError(f'an action looks like CLICK(ref="3"), got {text.strip()[:60]!r}')
    command, rest = call[1].upper(), call[2]
    kinds = {name: kind for form in FORMS.get(command, []) for name, kind in form.items()}
    args: dict[str, str | int] = {}
    position = 0
    while position < len(rest) and rest[position:].strip():
        if args:
            if rest[position] != ",":
                raise ActionError(f"a comma is missing before {rest[position:][:40]!r}")
            position += 1
        argument = _ARGUMENT.match(rest, position)
        if argument is None:
            raise ActionError(
                f'an argument looks like name="value", got {rest[position:].strip()[:40]!r}'
            )
        name, position = argument[1].lower(), argument.end()
        if name in args:
            raise ActionError(f"{name} is given twice")
        args[name] = _value(argument, kinds.get(name, str))
    return Action(command, **args)


def _value(argument: re.Match, kind: type) -> str | int:
    """The value in the type that its form wants; text that is no whole number stays a string."""
    quoted = argument[2] if argument[2] is not None else argument[3]
    value = argument[4]
    if quoted is not None:
        value = _ESCAPE.sub(lambda m: "\n" if m[1] == "n" else m[1], quoted)
    return int(value) if kind is int and re.fullmatch(r"[+-]?[0-9]{1,9}", value) else value
