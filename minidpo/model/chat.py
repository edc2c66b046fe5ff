"""Chat: messages to token ids, and the agent's turn of each id. All prompts are made here.

What stands around messages is written by the model's own chat template (`model/template`). Ids are joined from
encoded parts, so a prompt is always a prefix of what follows it, and no token straddles the border between page
and agent. Text is encoded as plain text: a page that prints `<|im_end|>` cannot end its turn.
"""

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer

from minidpo.model import gguf_file
from minidpo.model.template import Template, cutter, first_difference
from minidpo.system.files import read_json

# Qwen2's template, for a tokenizer that comes without one
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Message(NamedTuple):
    """One message of a conversation."""

    role: str
    content: str
    ids: tuple[int, ...] | None = None  # the agent's tokens as sampled, with the end if it was
    calls: str | None = None  # the tools that an answer calls behind its content, JSON


class Dialogue(NamedTuple):
    """Token ids (T,), and for each the index of the agent's turn that it belongs to, or -1."""

    ids: list[int]
    turns: list[int]

    @property
    def written(self) -> list[int]:
        """The turn of each token that the agent wrote."""
        return [turn for turn in self.turns if turn >= 0]


class Plain(str):
    """Text in which nothing is a special token, whatever it spells: what a person or a page says."""


class Chat:
    """A tokenizer and the chat template around it. `end`: the token that closes an answer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None = None,
        tokens: Mapping[str, str] | None = None,
    ):
        """template: in Jinja; None for Qwen2's. tokens: what `bos_token` and the like stand for in it. Raises
        ValueError if it does more than join messages, or marks turns with text that a page could print."""
        self.tokenizer = tokenizer
        self.template = Template(CHATML if template is None else template, tokens)
        self.vocab_size = float("inf")  # the ids of the model, more than tokens; `open_chat` tells
        self.tokenizer.no_truncation()  # transformers saves tokenizers with both
        self.tokenizer.no_padding()
        self._protect_marks()
        self.added = self.tokenizer.get_added_tokens_decoder()
        self._cutter = cutter(token.content for token in self.added.values())
        self.tokenizer.encode_special_tokens = True  # special strings inside a text are text
        self.with_tools = functools.lru_cache(64)(self._with_tools)
        # some templates leave the last answer open
        closing = self.template.closing("assistant") or self.template.before("assistant", "user")
        opening = self.template.opening("user")
        if min(len(self._parts([closing])), len(self._parts([opening]))) < 3:
            if template is None:
                raise ValueError("no chat template is here: put chat_template.jinja beside it")
            raise ValueError(
                f"the chat template marks turns with text, {opening!r} and {closing!r}, and not with "
                "special tokens that the tokenizer has: a page could print it"
            )
        self.blank, self.end, *_ = self._parts([closing])
        bos, start = self.template.tokens.get("bos_token"), self.template.before(None, "user")
        # with it every text begins, if the template says so
        self.begin = [self.tokenizer.token_to_id(bos)] if bos and start.startswith(bos) else []
        self.end_text = self.blank + self.tokenizer.id_to_token(self.end)
        self._begin_with_a_token()
        self._compare()

    @classmethod
    def load(cls, folder: str | Path) -> "Chat":
        """The tokenizer of a model folder. Raises ValueError if it is missing or cannot be read."""
        folder = Path(folder)
        if gguf_file.is_gguf(folder):
            found = gguf_file.tokenizer_of(folder), *gguf_file.template_of(folder)
        else:
            tokenizer = _tokenizer(folder)
            found = tokenizer, _template(folder), _token_names(folder, tokenizer)
        try:
            return cls(*found)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of the tokenizer and the template: who has another reads other words in the same ids."""
        written = f"{self.tokenizer.to_str()} {self.template.source}"
        return hashlib.sha256(written.encode()).hexdigest()[:12]

    def _protect_marks(self) -> None:
        """Make special what marks turns in the template. Some tokenizers do not, and then a page that prints it
        could end its turn."""
        before, closing = self.template.before, self.template.closing
        marks = before(None, "user") + before("assistant", "user") + closing("assistant")
        marks += before(None, "system") + before("system", "user") + before("user", "assistant")
        tokens = self.tokenizer.get_added_tokens_decoder().values()
        added = {token.content: token for token in tokens}
        for name in sorted({*cutter(added).split(marks)[1::2]}):
            old = added[name]
            if not old.special:
                sides = {"lstrip": old.lstrip, "rstrip": old.rstrip}
                self.tokenizer.add_special_tokens([AddedToken(name, normalized=False, **sides)])

    def _begin_with_a_token(self) -> None:
        """Some tokenizers put a blank before the very first text and no other (Llama's, saved anew). If the
        template begins with a token, there is no such text, so none of ours, encoded one by one, is one."""
        cutting = self.tokenizer.pre_tokenizer
        starts = [self._parts([self.template.before(None, role)]) for role in ("system", "user")]
        begins = all(len(parts) > 1 and not parts[0] for parts in starts)
        if begins and getattr(cutting, "prepend_scheme", None) == "first":
            cutting.prepend_scheme = "never"

    def _compare(self) -> None:
        """Raises ValueError where our ids differ from those of the template's text as a whole."""
        self.template.require_join()
        for messages in self.template.conversations():
            ours = self.prompt([Message(**message) for message in messages])
            text = self.template.render(messages, opened=True)
            self.tokenizer.encode_special_tokens = False
            theirs = self.encode(text)
            self.tokenizer.encode_special_tokens = True
            if ours != theirs and text == self.template.joined(messages, opened=True):
                raise ValueError(
                    "the tokenizer cuts the chat template's text otherwise as a whole than in parts, "
                    f"{first_difference(ours, theirs)}"
                )

    def _with_tools(self, tools: str | None) -> Template:
        """The template where the agent may call these tools, JSON."""
        if tools is None:
            return self.template
        template = Template(self.template.source, self.template.tokens, json.loads(tools))
        asked = [{"role": "user", "content": "page"}]
        if template.render(asked) == self.template.render(asked):
            raise ValueError("the chat template does not tell which tools there are")
        template.require_join()
        return template

    def encode(self, text: str) -> list[int]:
        """Ids of plain text. Nothing in it becomes a special token."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int] | tuple[int, ...]) -> str:
        """The text of an answer's ids, without the token that closes it."""
        ids = list(ids)
        if ids[-1:] == [self.end]:
            ids.pop()
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def _parts(self, texts: Sequence[str]) -> list:
        """Texts in a row, as text, id, text, id, ..., text: what stands between two tokens is one text."""
        parts = [""]
        for text in texts:
            first, *pieces = [text] if isinstance(text, Plain) else self._cutter.split(text)
            parts[-1] += first
            for name, behind in zip(pieces[::2], pieces[1::2]):
                parts += [self.tokenizer.token_to_id(name), behind]
        for n in range(1, len(parts), 2):  # some tokens take the blanks beside them
            token = self.added[parts[n]]
            parts[n - 1] = parts[n - 1].rstrip() if token.lstrip else parts[n - 1]
            parts[n + 1] = parts[n + 1].lstrip() if token.rstrip else parts[n + 1]
        return parts

    def _ids(self, texts: Sequence[str]) -> list[int]:
        ids: list[int] = []
        for n, part in enumerate(self._parts(texts)):
            ids += [part] if n % 2 else self.encode(part)
        return ids

    def answer(
        self, message: Message, between: Sequence[str] = (), said: str | None = None
    ) -> list[int]:
        """The sampled ids if they spell the message in this tokenizer, else its text's ids, closed. `between`: the
        texts before it; `said`: what the template makes of its own."""
        ids = message.ids
        if ids and max(ids) < self.vocab_size and self.decode(ids) == message.content:
            return list(ids)
        said = (message.content if said is None else said) + self.blank
        said = said.rstrip() if self.added[self.end].lstrip else said  # the end takes the blanks
        before = self._parts(between)[-1]
        given, whole = self.encode(before), self.encode(before + said)
        # some tokenizers begin a text otherwise than they go on in it
        ids = whole[len(given) :] if whole[: len(given)] == given else self.encode(said)
        return [*ids, self.end]

    def _behind(self, body: list[int] | None, text: str) -> str:
        """What the template writes next, without the end that an answer's body has. None: no answer stands
        before."""
        if body is None:
            return text
        if not text.startswith(self.end_text):
            raise ValueError(f"the chat template ends an answer here with {text!r}")
        if body[-1:] != [self.end]:  # cut short: it gets an end that is not the agent's
            return text.removeprefix(self.blank)
        text = text.removeprefix(self.end_text)
        return text.lstrip() if self.added[self.end].rstrip else text

    def dialogue(
        self, messages: Sequence[Message], tools: str | None = None, *, opened: bool = False
    ) -> Dialogue:
        """All messages as ids; `opened`: up to where the agent is to answer. A turn is the agent's tokens with the
        end that it chose; all else is -1. tools: the functions that it may call, JSON."""
        template = self.with_tools(tools)
        ids: list[int] = []
        turns: list[int] = []
        between: list[str] = []  # the texts since the last answer
        turn, last, body = 0, None, None
        for message in messages:
            said = template.form(message.role)(message.content)
            if message.role == "assistant":
                if message.calls:
                    said = template.called(last, message.content, json.loads(message.calls))
                between.append(self._behind(body, template.opening(last)))
                given, body = self._ids(between), self.answer(message, between, said)
                ids += [*given, *body]
                turns += [-1] * len(given) + [turn] * len(body)
                between, turn = [], turn + 1
            else:
                before = self._behind(body, template.before(last, message.role))
                between += [before, Plain(said)]
                body = None
            last = message.role
        end = template.opening(last) if opened else template.closing(last)
        if body is not None and not end.startswith(self.end_text):  # a last answer left open
            end = self.end_text
        given = self._ids([*between, self._behind(body, end)])
        return Dialogue(ids + given, turns + [-1] * len(given))

    def prompt(self, messages: Sequence[Message], tools: str | None = None) -> list[int]:
        """Ids up to the agent's next answer."""
        return self.dialogue(messages, tools, opened=True).ids


def _tokenizer(folder: Path) -> Tokenizer:
    """A folder's tokenizer. Raises ValueError if it is missing or cannot be read."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"{folder}: no tokenizer.json here; it must lie beside the model's weights"
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more precise
        raise ValueError(f"{path}: not a readable tokenizer file ({error})") from None


def _token_names(folder: Path, tokenizer: Tokenizer) -> dict[str, str]:
    """What `bos_token` and the like stand for in a folder's chat template."""
    read = ("tokenizer_config.json", "special_tokens_map.json", "config.json")
    settings, older, config = (
        read_json(folder / name) if (folder / name).is_file() else {} for name in read
    )
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token, id = settings.get(name, older.get(name)), config.get(f"{name}_id")
        token = token.get("content") if isinstance(token, dict) else token
        if token is None and not settings and isinstance(id, int):
            token = tokenizer.id_to_token(id)
        if not isinstance(token, str | None):
            raise ValueError(f"{folder / read[0]}: {name} should be text, got {token!r:.60}")
        if token is not None:
            tokens[name] = token
    return tokens


def _template(folder: Path) -> str | None:
    """The chat template among a tokenizer's files, or None."""
    path, beside = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not text in UTF-8 ({error})") from None
    template = read_json(beside).get("chat_template") if beside.is_file() else None
    if isinstance(template, list):  # several, by name
        entries = [entry for entry in template if isinstance(entry, dict)]
        named = {entry.get("name"): entry.get("template") for entry in entries}
        if "default" not in named:
            raise ValueError(
                f"{beside}: chat_template has none called 'default' among {', '.join(map(str, named))}: "
                "put the one to follow into chat_template.jinja beside it"
            )
        template = named["default"] or ""
    if not isinstance(template, str | None):
        raise ValueError(f"{beside}: chat_template should be text, got {template!r:.60}")
    return template
