"""Chat: messages to token ids, and the agent's turn of each id. All prompts are made here.

Qwen2 talks ChatML: `<|im_start|>role\\n content <|im_end|>\\n`. Ids are joined from encoded parts, so a
prompt is always a prefix of what follows it, and no token straddles the border between page and agent. Text
is encoded as plain text: a page that prints `<|im_end|>` cannot end its turn.
"""

from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

SYSTEM_DEFAULT = "You are a helpful assistant."  # what Qwen2's template says by default


class Message(NamedTuple):
    """One message of a conversation."""

    role: str
    content: str
    ids: tuple[int, ...] | None = None  # the agent's tokens as sampled, with `<|im_end|>` if it was


class Dialogue(NamedTuple):
    """Token ids (T,), and for each the index of the agent's turn that it belongs to, or -1."""

    ids: list[int]
    turns: list[int]


class Chat:
    """A tokenizer and Qwen2's ChatML around it."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.tokenizer.encode_special_tokens = True  # special strings inside a text are text
        self.tokenizer.no_truncation()  # transformers saves tokenizers with both
        self.tokenizer.no_padding()
        self.start, self.end = self._special("<|im_start|>"), self._special("<|im_end|>")
        self.newline = self.encode("\n")

    @classmethod
    def load(cls, folder: str | Path) -> "Chat":
        """The tokenizer of a model folder. Raises ValueError if it is missing or cannot be read."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{folder}: no tokenizer.json here; it must lie beside the model's weights")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises nothing more precise
            raise ValueError(f"{path}: not a readable tokenizer file ({error})") from None
        return cls(tokenizer)

    def _special(self, name: str) -> int:
        token = self.tokenizer.token_to_id(name)
        if token is None:
            raise ValueError(f"the tokenizer has no token {name}: this is not a Qwen2 chat tokenizer")
        return token

    def encode(self, text: str) -> list[int]:
        """Ids of plain text. Nothing in it becomes a special token."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int] | tuple[int, ...]) -> str:
        """The text of an answer's ids, without the `<|im_end|>` that closes it."""
        ids = list(ids)
        return self.tokenizer.decode(ids[:-1] if ids[-1:] == [self.end] else ids, skip_special_tokens=False)

    def header(self, role: str) -> list[int]:
        """`<|im_start|>role\\n`. The assistant's header is the generation prompt."""
        return [self.start, *self.encode(f"{role}\n")]

    def answer(self, message: Message) -> list[int]:
        """The sampled ids if they spell the message in this tokenizer, else its text's ids, closed."""
        if message.ids is not None and self.decode(message.ids) == message.content:
            return list(message.ids)
        return [*self.encode(message.content), self.end]

    def dialogue(self, messages: list[Message]) -> Dialogue:
        """All messages as ids. A turn is the agent's tokens with the `<|im_end|>` it chose; all else -1."""
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
            tail = self.newline if closed else [self.end, *self.newline]  # an end that is not the agent's
            ids += [*head, *body, *tail]
            turns += [-1] * len(head) + labels + [-1] * len(tail)
        return Dialogue(ids, turns)

    def prompt(self, messages: list[Message]) -> list[int]:
        """Ids up to the agent's next answer."""
        return [*self.dialogue(messages).ids, *self.header("assistant")]
