"""A model's own chat template, asked what it writes around messages.

A template is a program in Jinja that turns a conversation into text. Here it is run on short conversations whose
contents are marks, and what stands before, between and behind the marks is taken down. So nothing is guessed
from the name of a family or from the words of a template. `require_join` compares whole conversations with the pieces
put together: a template that does more than join messages is found out.
"""

import datetime
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import ext, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

# what a template that asks for the day is told: the one to which Llama 3.1's falls back
TODAY = datetime.date(2024, 7, 26)
# Conversations that lead to a message of each role. The second is for templates that refuse the first.
LEADING_TO: dict[str | None, tuple[tuple[str, ...], ...]] = {
    None: ((),),
    "assistant": (("user", "assistant"), ("system", "user", "assistant")),
    "user": (("user",), ("system", "user")),
    "tool": (("user", "assistant", "tool"), ("system", "user", "assistant", "tool")),
}
# both ends have blanks outside and inside of line breaks, so that no two of FORMS agree
BLANKS = '\n \t\n"word" <&>\n \t\n'
THOUGHTS = "<think>\nwhat was thought\n</think>\n\nClick."


class _Generation(ext.Extension):
    """`{% generation %}`, by which transformers finds the agent's words: what stands inside is written."""

    tags = frozenset({"generation"})

    def parse(self, parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _json(value: Any, indent: int | None = None, **options: Any) -> str:
    """As transformers has this filter: Jinja's own writes < as \\u003c."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


# what templates do to a content, in the order in which they are tried
FORMS: tuple[Callable[[str], str], ...] = (
    str,
    str.strip,
    str.lstrip,
    str.rstrip,
    lambda text: text.strip("\n"),
    lambda text: text.lstrip("\n"),
    lambda text: text.rstrip("\n"),
    lambda text: _json(text)[1:-1],  # the quotes stand around a mark, too
)


class Template:
    """A chat template, run as transformers runs it, except that the day is always TODAY.

    tokens: what `bos_token` and the like stand for. tools: functions that the agent may call, as JSON Schema.
    Methods raise ValueError, with the template's own reason, for roles that it does not write.
    """

    def __init__(
        self, source: str, tokens: Mapping[str, str] | None = None, tools: list | None = None
    ):
        self.source, self.tokens, self.tools = source, dict(tokens or {}), tools
        world = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
        )
        world.filters["tojson"] = _json
        world.globals |= {"raise_exception": _refuse, "strftime_now": TODAY.strftime}
        try:
            self._program = world.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template is no Jinja: {error}") from None
        # each is asked once
        self.before = functools.cache(self._before)
        self.opening = functools.cache(self._opening)
        self.closing = functools.cache(self._closing)
        self.form = functools.cache(self._form)

    def render(self, messages: Sequence[Mapping[str, Any]], opened: bool = False) -> str:
        """The conversation as text; `opened`: up to where the agent is to answer."""
        try:
            return self._program.render(
                messages=list(messages),
                tools=self.tools,
                documents=None,
                add_generation_prompt=opened,
                **self.tokens,
            )
        except Exception as error:  # a program fails as programs do
            roles = ", ".join(message["role"] for message in messages)
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"the chat template does not write {roles}: {reason}") from None

    def _around(self, messages: Sequence[Mapping[str, Any]], opened: bool = False) -> list[str]:
        """What is written before, between and behind the contents."""
        rest, pieces = self.render(messages, opened), []
        for message in messages:
            piece, found, rest = rest.partition(message["content"])
            if not found:
                raise ValueError(
                    f"the chat template leaves out or changes a {message['role']}'s text"
                )
            pieces.append(piece)
        return [*pieces, rest]

    def _before(self, last: str | None, role: str) -> str:
        """What stands before a message, behind one of the role `last`; None: at the beginning."""
        # an answer that is not the last: some templates write that one otherwise
        after = [_mark("user", 8)] if role == "assistant" else []
        n = -2 - len(after)
        return _first(last, lambda said: self._around([*said, _mark(role, 9), *after])[n])

    def _opening(self, last: str | None) -> str:
        """What stands between a message of the role `last` and the agent's answer."""
        before = self.before(last, "assistant")
        if last in (None, "assistant"):  # not what a generation prompt is for
            return before
        asked = _first(last, lambda said: self._around(said, opened=True)[-1])
        # Some templates know no generation prompt. In some of these a user's end is all that it takes.
        is_enough = asked != self.closing(last) or asked.strip() == before.strip()
        return asked if is_enough else before

    def _closing(self, last: str | None) -> str:
        """What stands behind the last message."""
        if last is None:
            return ""
        return _first(last, lambda said: self._around(said)[-1])

    def _form(self, role: str) -> Callable[[str], str]:
        """What becomes of a content of this role: one of FORMS. Of an answer that is not the last."""

        def asked(said):
            said = [*said, _mark("user", 9)] if role == "assistant" else said
            n = len(said) - 1 - (role == "assistant")
            pieces = self._around(said)
            whole = self.render([*said[:n], {"role": role, "content": BLANKS}, *said[n + 1 :]])
            start = "".join(p + m["content"] for p, m in zip(pieces, said[:n])) + pieces[n]
            end = "".join(m["content"] + p for m, p in zip(said[n + 1 :], pieces[n + 2 :]))
            for form in FORMS:
                if whole == start + form(BLANKS) + pieces[n + 1] + end:
                    return form
            raise ValueError(f"the chat template changes the text of a {role}")

        return _first(role, asked)

    def called(self, last: str, content: str, calls: list[Mapping[str, Any]]) -> str:
        """The text of an answer that calls tools, behind a message of the role `last`."""
        answer = {"role": "assistant", "content": content, "tool_calls": calls}
        result = _mark("tool", 9)

        def asked(said):
            whole = self.render([*said, answer, result])
            text = whole[whole.index(said[-1]["content"]) + len(said[-1]["content"]) :]
            end = self.before("assistant", "tool") + self.form("tool")(result["content"])
            end += self.closing("tool")
            for start in (self.opening(last), self.before(last, "assistant")):
                called = text.removeprefix(start).removesuffix(end)
                if start + called + end == text and content in called != content:
                    return called
            raise ValueError(
                "the chat template does not write calls of tools, or not as text alone"
            )

        return _first(last, asked)

    def joined(self, messages: Sequence[Mapping[str, str]], opened: bool, *, own=False) -> str:
        """A conversation put together from pieces. own: before earlier answers stands what the template writes
        there, and not, as here always, what it writes where the agent is to answer."""
        text, last = "", None
        for message in messages:
            role = message["role"]
            asked = role == "assistant" and not own
            text += self.opening(last) if asked else self.before(last, role)
            text += self.form(role)(message["content"])
            last = role
        return text + (self.opening(last) if opened else self.closing(last))

    def conversations(self) -> Iterator[list[dict[str, str]]]:
        """What is compared: with and without a system text, of several turns, with blanks and line breaks at both
        ends of what others say. The agent's answers begin with a word, since ids are cut before them."""
        names = {"s": "system", "u": "user", "a": "assistant"}
        for roles in ("u", "su", "suau", "uauau", "suauauau"):
            for text in ("page {}", "\n \tpage {}. \n\n", "{}\n"):
                yield [
                    {
                        "role": names[role],
                        "content": f"Click {n}. \n" if role == "a" else text.format(n),
                    }
                    for n, role in enumerate(roles)
                ]

    def require_join(self) -> None:
        """Raises ValueError if the pieces put together are not what the template writes."""
        for messages in self.conversations():
            theirs = {opened: self.render(messages, opened) for opened in (True, False)}
            opened = theirs[True] != theirs[False]  # some know no generation prompt
            if theirs[opened] != (ours := self.joined(messages, opened, own=True)):
                difference = first_difference(ours, theirs[opened])
                raise ValueError(f"the chat template does more than join messages, {difference}")

    def not_followed(self) -> list[str]:
        """What the template does besides joining messages, and what is done here instead."""
        found = []
        asked, earlier = self.opening("user"), self.before("user", "assistant")
        if asked != earlier:
            found.append(f"before an earlier answer it writes {earlier!r}, here stays {asked!r}")
        said = [_mark("user", 1), {"role": "assistant", "content": "Click."}]
        if self.render(said) != self.joined(said, opened=False, own=True):
            found.append("the last answer is written otherwise than earlier ones, here all alike")
        said = [said[0], {"role": "assistant", "content": THOUGHTS}, _mark("user", 2)]
        if self.render(said, opened=True) != self.joined(said, opened=True, own=True):
            found.append("the thoughts of earlier answers are dropped, here they stay")
        if "strftime_now" in self.source or "date_string" in self.source:
            found.append(f"the day is written, here always {TODAY:%d %b %Y}")
        return found


def _mark(role: str, n: int) -> dict[str, str]:
    """A message that says what no template writes, changes or trims."""
    return {"role": role, "content": f"qZ{n}Zq"}


def _first(role: str | None, ask: Callable[[list[dict[str, str]]], Any]) -> Any:
    """What `ask` says of a conversation of marks that ends with this role: the first that the template writes."""
    refused = None
    for roles in LEADING_TO.get(role, ((role,),)):
        try:
            return ask([_mark(name, n) for n, name in enumerate(roles)])
        except ValueError as error:
            refused = refused or error
    raise refused


def first_difference(ours: Sequence, theirs: Sequence) -> str:
    """Where two texts or lists of ids first differ, and what stands there."""
    pairs = enumerate(zip(ours, theirs))
    n = next((n for n, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    return f"at {n}: {theirs[n : n + 24]!r}, where {ours[n : n + 24]!r} was expected"


def cutter(tokens: Iterable[str]) -> re.Pattern:
    """Its `split` cuts a text at these tokens and keeps them: every second piece is one, of two the longer."""
    longest = sorted(map(re.escape, tokens), key=len, reverse=True)
    return re.compile(f"({'|'.join(longest) or '(?!)'})")
