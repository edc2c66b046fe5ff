"""TRL's files: preferences and demonstrations as other trainers keep them, read and written.

JSONL, one row a line: a prompt, which is a list of messages, and two ways on from it, `chosen` and
`rejected`, or both with the prompt in them. To imitate: `messages`, `prompt` and `completion`, or the chosen.
What counts is what the assistant says behind the prompt, as in our own episodes. TRL itself counts all tokens
behind the prompt: also the pages between two answers, and the line break behind each.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from minidpo.data.episodes import is_text, json_object
from minidpo.data.pairs import NothingToLearn, Pair, cut_at_turn
from minidpo.data.prompt import Conversation, episode_messages
from minidpo.data.tree import common
from minidpo.model.chat import Message
from minidpo.system.files import write_text

# what we add to the rows that we write; other trainers do not read it
COLUMN, VERSION = "minidpo", 1
# of a conversation, not of an episode
FIELDS = {"prompt", "chosen", "rejected", "completion", "messages"}
ROLES = ("system", "user", "assistant", "tool")
# What else a message may say. Its other keys (name, id, timestamp) Qwen2's template does not write either.
SAID = "audio function_call images reasoning reasoning_content refusal thinking tool_calls videos"


@dataclass(frozen=True)
class Preferred:
    """chosen ≻ rejected: two ways on from one prompt, because a file says so."""

    chosen: Conversation
    rejected: Conversation
    source: str = "dataset"

    def provenance(self) -> dict:
        """Where it came from, for the record."""
        return {"source": self.source, "row": self.chosen.name.removesuffix(", chosen")}


def are_trl_files(paths: Sequence[Path]) -> bool:
    """Whether these are files of conversations, by their first lines. Raises ValueError if only some are."""
    kinds = {}
    for path in filter(Path.is_file, paths):  # a missing one is told by who reads it
        with open(path, "rb") as file:
            line = next(filter(bytes.strip, file), b"")
        try:
            kinds[path] = not FIELDS.isdisjoint(json_object(line))
        except ValueError:  # damaged: the reader of episodes says how
            kinds[path] = False
    if len(set(kinds.values())) == 2:
        rows, episodes = (next(path for path in kinds if kinds[path] == k) for k in (True, False))
        raise ValueError(
            f"{rows} holds conversations and {episodes} does not: give --data files of one kind"
        )
    return any(kinds.values())


def _rows(paths: Sequence[Path]) -> Iterator[tuple[str, dict]]:
    """Each line's name and content."""
    for path in paths:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                name = f"{path}, line {number}"
                try:
                    row = json_object(line)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
                for field in ("tools", "images", "image"):
                    if row.get(field):
                        raise ValueError(f"{name}: {field!r} is not read: a conversation is text")
                yield name, row


def _messages(
    row: dict, field: str, name: str, prompt: tuple[Message, ...] = ()
) -> tuple[Message, ...]:
    """A field's messages, which go on from a prompt. Raises ValueError that says what is wrong in them."""
    value = row.get(field)
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"{name}: {field!r} should be messages, [{{role, content}}], got {value!r:.40}"
        )
    for n, message in enumerate(value):
        where = f"{name}: {field}[{n}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ValueError(f"{where}: wanted a message with the role {', '.join(ROLES)}")
        if not is_text(message.get("content")):
            raise ValueError(f"{where}: 'content' should be text")
        unread = [key for key in SAID.split() if message.get(key)]
        if field != "prompt" and message.get("weight") not in (None, 1):
            unread.append("weight")  # OpenAI's 0: not to be learned
        if unread:
            raise ValueError(
                f"{where}: {unread[0]!r} is not read: each message says its content, and counts alike"
            )
    said = tuple(Message(message["role"], message["content"]) for message in value)
    if prompt and (said[: len(prompt)] == prompt or said[0] == prompt[-1]):
        raise ValueError(  # it would be read twice, and its old answers be learned
            f"{name}: {field!r} begins with the 'prompt' or its end again: leave it out"
        )
    return said


def _preference(row: dict, name: str) -> tuple[tuple[Message, ...], ...]:
    """The prompt of a row, and its two ways on from it."""
    if not {"chosen", "rejected"} <= row.keys():
        raise ValueError(
            f"{name}: preferences have 'chosen' and 'rejected', this has {', '.join(row)}"
        )
    text, prompt = row.get("prompt") or "", ()
    if not isinstance(text, str):
        prompt = _messages(row, "prompt", name)
    sides = [_messages(row, field, name, prompt) for field in ("chosen", "rejected")]
    if prompt:
        return prompt, *sides
    prompt = sides[0][: common(*sides)]  # what both begin with, as TRL has it
    chosen, rejected = (side[len(prompt) :] for side in sides)
    told = text.strip() in ("", *(message.content.strip() for message in prompt))
    if not (prompt and told and chosen and rejected):
        raise ValueError(
            f"{name}: without a 'prompt' of messages, 'chosen' and 'rejected' must begin alike, with "
            "the prompt, and then differ: make 'prompt' a list of messages, or leave the row out"
        )
    return prompt, chosen, rejected


def _solved(row: dict, name: str) -> bool:
    """Whether what was chosen solved its page; so it did if the row does not say."""
    written = row.get(COLUMN)
    if written is not None and (not isinstance(written, dict) or written.get("version") != VERSION):
        raise ValueError(f"{name}: {COLUMN!r} is not of format version {VERSION}")
    return written is None or written.get("solved", True) is True


def read_preferences(paths: Sequence[Path], until: str) -> list[Preferred]:
    """The pairs of some files, cut if `until` is "turn". Raises ValueError naming file, line and field."""
    numbers: dict[tuple, int] = {}
    pairs = []
    for name, row in _rows(paths):
        prompt, *sides = _preference(row, name)
        instance = "prompt", numbers.setdefault(prompt, len(numbers))
        solved = _solved(row, name)
        sides = [
            Conversation(prompt + side, len(prompt), f"{name}, {field}", instance, solved)
            for side, field in zip(sides, ("chosen", "rejected"))
        ]
        pairs.append(Preferred(*(cut_at_turn(*sides) if until == "turn" else sides)))
    return pairs


def read_demonstrations(paths: Sequence[Path]) -> list[Conversation]:
    """The conversations to imitate; of preferences the chosen, unless it is known to have failed. Raises
    ValueError naming file, line, field, or NothingToLearn."""
    found = []
    for number, (name, row) in enumerate(_rows(paths)):
        if row.get("messages") is not None:
            prompt, said = (), _messages(row, "messages", name)
        elif row.get("completion") is not None:
            prompt = _messages(row, "prompt", name)
            said = _messages(row, "completion", name, prompt)
        elif row.get("chosen") is not None:
            prompt, said, _ = _preference(row, name)
            if not _solved(row, name):
                continue
        else:
            raise ValueError(
                f"{name}: demonstrations have 'messages', 'prompt' and 'completion', or 'chosen'"
                f" and 'rejected', this has {', '.join(row)}"
            )
        found.append(Conversation(prompt + said, len(prompt), name, ("row", number)))
    if not found:
        raise NothingToLearn(
            f"{' '.join(map(str, paths))}: nothing in it is known to be worth imitating"
        )
    return found


def write_pairs(pairs: Sequence[Pair], path: Path, until: str, system: str) -> dict:
    """Write pairs of episodes as TRL's DPOTrainer reads them; where each came from stands in `minidpo`.

    system: the world's system prompt, with which each conversation begins.
    """
    rows = [row for row in (_row(pair, system) for pair in pairs) if row]
    if not rows:
        raise NothingToLearn(
            f"{path}: not written, since no pair's two sides begin with the same page"
        )
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if path.is_file() and path.read_text(encoding="utf-8") != text:
        raise ValueError(f"{path} exists and holds other pairs: delete it, or give another --out")
    write_text(path, text)
    left_out = len(pairs) - len(rows)
    if left_out:
        print(f"{left_out} pairs are left out, because their sides began with different pages")
    whole = ", whole: until token cuts within a message" if until == "token" else ""
    print(f"{path}: {len(rows)} pairs, prompt, chosen and rejected as messages{whole}")
    return {"pairs": len(rows)}


def _row(pair: Pair, system: str) -> dict | None:
    """A pair as messages: the prompt is all up to the first page that counts, of a dagger pair the last. None
    if the two sides have not read the same up to there."""
    first = 2 + len(pair.chosen.shots) + 2 * pair.chosen.forced * pair.chosen.relabelled
    origin = {"task": pair.chosen.task, "seed": pair.chosen.seed, "source": pair.source}
    about = {"version": VERSION, **origin, "solved": pair.chosen.solved}
    said = []
    for name, e in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        messages = episode_messages(e, system)
        said.append([{"role": m.role, "content": m.content} for m in messages])
        # to the same type in every line, or the `datasets` library, which guesses types, refuses the file
        about[name] = {
            "policy": e.policy,
            "index": e.index,
            "outcome": e.outcome,
            "reward": float(e.reward),
        }
    chosen, rejected = said
    if chosen[:first] != rejected[:first]:
        return None
    prompt = chosen[:first]
    return {"prompt": prompt, "chosen": chosen[first:], "rejected": rejected[first:], COLUMN: about}
