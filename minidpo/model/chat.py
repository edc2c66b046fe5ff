"""Chat: messages to token ids, and the agent's turn of each id. All prompts are made here.

Qwen and SmolLM2 talk ChatML, `<|im_start|>role\\n content <|im_end|>\\n`; Llama 3 talks
`<|start_header_id|>role<|end_header_id|>\\n\\n content <|eot_id|>`. Ids are joined from encoded parts, so a
prompt is always a prefix of what follows it, and no token straddles the border between page and agent. Text
is encoded as plain text: a page that prints `<|im_end|>` cannot end its turn.
"""

import re
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer

from minidpo.model import gguf_file
from minidpo.system.files import read_json

SYSTEM_DEFAULT = "You are a helpful assistant."  # what Qwen2's template says by default
# how Llama 3.1 and later begin every system message, with the date that their template falls back to
LLAMA31_PREAMBLE = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"


class Message(NamedTuple):
    """One message of a conversation."""

    role: str
    content: str
    ids: tuple[int, ...] | None = None  # the agent's tokens as sampled, with `<|im_end|>` if it was


class Dialogue(NamedTuple):
    """Token ids (T,), and for each the index of the agent's turn that it belongs to, or -1."""

    ids: list[int]
    turns: list[int]

    @property
    def written(self) -> list[int]:
        """The turn of each token that the agent wrote."""
        return [turn for turn in self.turns if turn >= 0]


class ChatFormat(NamedTuple):
    """How messages are written: begin, then for each message open, role, close, content, end and tail."""

    begin: tuple[str, ...]
    open: str
    close: str | None  # a special token, if the role does not end with a line break alone
    breaks: str  # between role and content
    end: str
    tail: str = ""


CHATML = ChatFormat((), "<|im_start|>", None, "\n", "<|im_end|>", "\n")
LLAMA3 = ChatFormat(
    ("<|begin_of_text|>",), "<|start_header_id|>", "<|end_header_id|>", "\n\n", "<|eot_id|>"
)


class Chat:
    """A tokenizer and the chat format around it. `system`: its template's, where a conversation has none."""

    def __init__(self, tokenizer: Tokenizer, template: str | None = None):
        self.tokenizer, self.template = tokenizer, template
        self.vocab_size = float("inf")  # the ids of the model, more than tokens; `open_chat` tells
        self.tokenizer.encode_special_tokens = True  # special strings inside a text are text
        self.tokenizer.no_truncation()  # transformers saves tokenizers with both
        self.tokenizer.no_padding()
        # some that talk ChatML keep Llama 3's tokens: then the template says it
        known = template or ""
        llama3 = tokenizer.token_to_id(LLAMA3.open) is not None and CHATML.open not in known
        self.format = LLAMA3 if llama3 else CHATML
        self.begin = [self._special(name) for name in self.format.begin]
        self.start, self.end = self._special(self.format.open), self._special(self.format.end)
        self.close = [] if self.format.close is None else [self._special(self.format.close)]
        self.tail = self.encode(self.format.tail)
        self.system = SYSTEM_DEFAULT if template is None else default_system(template)
        self.preamble = ""
        if self.format is LLAMA3 and "Cutting Knowledge Date" in known:
            self.system, self.preamble = "", LLAMA31_PREAMBLE  # there is always a system message

    @classmethod
    def load(cls, folder: str | Path) -> "Chat":
        """The tokenizer of a model folder. Raises ValueError if it is missing or cannot be read."""
        folder = Path(folder)
        if gguf_file.is_gguf(folder):
            template = gguf_file.value(folder, "tokenizer.chat_template", "")
            return cls(gguf_file.tokenizer_of(folder), template)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(
                f"{folder}: no tokenizer.json here; it must lie beside the model's weights"
            )
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises nothing more precise
            raise ValueError(f"{path}: not a readable tokenizer file ({error})") from None
        return cls(tokenizer, _template(folder))

    def _special(self, name: str) -> int:
        token = self.tokenizer.token_to_id(name)
        if token is None:
            raise ValueError(
                f"the tokenizer has no token {name}: this is no chat tokenizer of Qwen, SmolLM2 "
                "or Llama 3"
            )
        # some tokenizers do not mark it as special, and a page that prints it could end its turn
        self.tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False)])
        return token

    def encode(self, text: str) -> list[int]:
        """Ids of plain text. Nothing in it becomes a special token."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int] | tuple[int, ...]) -> str:
        """The text of an answer's ids, without the `<|im_end|>` that closes it."""
        ids = list(ids)
        if ids[-1:] == [self.end]:
            ids.pop()
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def header(self, role: str) -> list[int]:
        """What stands before a message. The assistant's header is the generation prompt."""
        if self.close:
            return [self.start, *self.encode(role), *self.close, *self.encode(self.format.breaks)]
        return [self.start, *self.encode(role + self.format.breaks)]

    def answer(self, message: Message) -> list[int]:
        """The sampled ids if they spell the message in this tokenizer, else its text's ids, closed."""
        ids = message.ids
        if ids and max(ids) < self.vocab_size and self.decode(ids) == message.content:
            return list(ids)
        return [*self.encode(message.content), self.end]

    def dialogue(self, messages: list[Message]) -> Dialogue:
        """All messages as ids. A turn is the agent's tokens with the `<|im_end|>` it chose; all else -1."""
        system = self.system  # as the model's template has it, only where the conversation has none
        if messages and messages[0].role == "system":
            system, messages = messages[0].content, messages[1:]
        if system is not None:
            messages = [Message("system", self.preamble + system), *messages]
        ids, turns = list(self.begin), [-1] * len(self.begin)
        turn = 0
        for message in messages:
            head = self.header(message.role)
            if message.role == "assistant":
                body, owner = self.answer(message), turn
                turn += 1
            else:
                body, owner = [*self.encode(message.content), self.end], -1
            # an answer that was cut short gets an end that is not the agent's
            tail = self.tail if body[-1:] == [self.end] else [self.end, *self.tail]
            ids += [*head, *body, *tail]
            turns += [-1] * len(head) + [owner] * len(body) + [-1] * len(tail)
        return Dialogue(ids, turns)

    def prompt(self, messages: list[Message]) -> list[int]:
        """Ids up to the agent's next answer."""
        return [*self.dialogue(messages).ids, *self.header("assistant")]


def _template(folder: Path) -> str | None:
    """The chat template among a tokenizer's files, or None."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    path = folder / "tokenizer_config.json"
    template = read_json(path).get("chat_template") if path.is_file() else None
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def default_system(template: str) -> str | None:
    """The system text that a template inserts where a conversation has none; None if it inserts none.

    >>> default_system("{{ '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}")
    'You are Qwen.'
    """
    found = re.search(r"<\|im_start\|>system(?:\n|\\n)([^<{}'\"]+)<\|im_end\|>", template)
    return found and found[1].replace("\\n", "\n")
