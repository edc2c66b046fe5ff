"""7. Chat: messages to token ids, and who wrote each of them. The only prompt code there is.

Qwen2 talks ChatML: `<|im_start|>role\\n content <|im_end|>\\n`. Ids are built by concatenating parts and
never by cutting up a re-tokenised text, so a prompt is always a prefix of what follows it and no token can
straddle the border between page and agent. Text is encoded as plain text: a page that prints `<|im_end|>`
cannot end its turn. Each token carries the agent's turn it belongs to, or -1: that is all an objective
needs to know. Next: 8 sampling.
"""

from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

SYSTEM_DEFAULT = "You are a helpful assistant."  # what Qwen2's template says when nobody else does


class Message(NamedTuple):
    """One message."""

    role: str
    content: str
    ids: tuple[int, ...] | None = None  # the agent's tokens as sampled, `<|im_end|>` too if it came to it


class Dialogue(NamedTuple):
    """Token ids (T,) and, for each, the index of the agent's turn that it is part of, or -1."""

    ids: list[int]
    turns: list[int]


class Chat:
    """A tokenizer and Qwen2's ChatML around it."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.tokenizer.encode_special_tokens = True  # special strings inside a text are text
        self.tokenizer.no_truncation()  # transformers leaves both in the files that it saves
        self.tokenizer.no_padding()
        self.start, self.end = (self._special(name) for name in ("<|im_start|>", "<|im_end|>"))
        self.newline = self.encode("\n")

    @classmethod
    def load(cls, folder: str | Path) -> "Chat":
        """The tokenizer of a model folder. Raises ValueError when there is none, or it cannot be read."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{folder}: no tokenizer.json here; a model needs its tokenizer beside it")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers library raises bare Exception, nothing more precise
            raise ValueError(f"{path}: not a readable tokenizer file ({error})") from None
        return cls(tokenizer)

    def _special(self, name: str) -> int:
        token = self.tokenizer.token_to_id(name)
        if token is None:
            raise ValueError(f"the tokenizer has no token {name}: this is not a Qwen2 chat tokenizer")
        return token

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: nothing in it can become a special token."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int] | tuple[int, ...]) -> str:
        """Text of an answer's ids, without the `<|im_end|>` that closes it."""
        ids = list(ids)
        return self.tokenizer.decode(ids[:-1] if ids[-1:] == [self.end] else ids, skip_special_tokens=False)

    def header(self, role: str) -> list[int]:
        """`<|im_start|>role\\n`; for the assistant this is the generation prompt."""
        return [self.start, *self.encode(f"{role}\n")]

    def answer(self, message: Message) -> list[int]:
        """The agent's own ids where they spell its text in this tokenizer, else its text as ids, closed."""
        if message.ids is not None and self.decode(message.ids) == message.content:
            return list(message.ids)
        return [*self.encode(message.content), self.end]

    def dialogue(self, messages: list[Message]) -> Dialogue:
        """All messages as ids. A turn is the agent's tokens and the `<|im_end|>` it chose; all else is -1.

        An answer that its token budget cut short is closed for it, and that `<|im_end|>` is not the agent's.
        """
        ids: list[int] = []
        turns: list[int] = []
        turn = 0
        for message in messages:
            head = self.header(message.role)
            if message.role == "assistant":
                body = self.answer(message)
                closed = body[-1:] == [self.end]
                labels = [turn] * len(body)
                turn += 1
            else:
                body, closed = [*self.encode(message.content), self.end], True
                labels = [-1] * len(body)
            tail = self.newline if closed else [self.end, *self.newline]
            ids += [*head, *body, *tail]
            turns += [-1] * len(head) + labels + [-1] * len(tail)
        return Dialogue(ids, turns)

    def prompt(self, messages: list[Message]) -> list[int]:
        """Ids up to where the agent begins to write."""
        return [*self.dialogue(messages).ids, *self.header("assistant")]
