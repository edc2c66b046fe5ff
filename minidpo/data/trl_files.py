"""TRL's files: preferences and demonstrations as other trainers keep them, read and written.

JSONL, one row a line: a prompt, which is a list of messages, and two ways on from it, `chosen` and
`rejected`, or both with the prompt in them. To imitate: `messages`, `prompt` and `completion`, or the chosen.
To judge one by one, as KTO does: `prompt`, `completion` and `label`. Other keys: `data/row_keys`.
What counts is what the assistant says behind the prompt, as in our own episodes. TRL itself counts all tokens
behind the prompt: also the pages between two answers, and the line break behind each.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from minidpo.data.episodes import are_all, is_text, json_object
from minidpo.data.pairs import NothingToLearn, Pair, cut_at_turn, side_by_side
from minidpo.data.prompt import Conversation, episode_messages
from minidpo.data.recorded import is_recorded
from minidpo.data.row_keys import LEARN_KEYS, learn_flags, refuse_unread, says_nothing
from minidpo.data.tree import common
from minidpo.model.chat import Message
from minidpo.system.files import write_text

# what we add to the rows that we write; other trainers do not read it
COLUMN, VERSION = "minidpo", 1
# what is read in a row of preferences, which may hold its chosen side again as `messages`
PREFERENCE = {"prompt", "chosen", "rejected", "messages", "tools", COLUMN, *LEARN_KEYS}
JUDGED = {"prompt", "completion", "label", "tools", *LEARN_KEYS}
# and in one to imitate, by the field that is imitated, in this order
IMITATED = {
    "messages": {*PREFERENCE, "label"},
    "completion": JUDGED,
    "chosen": PREFERENCE,
}
FIELDS = PREFERENCE | JUDGED
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Preferred:
    """chosen ≻ rejected: two ways on from one prompt, because a file says so. From the source "unpaired" the
    two are not compared: KTO judges each alone."""

    chosen: Conversation
    rejected: Conversation
    source: str = "dataset"

    def provenance(self) -> dict:
        """Where it came from, for the record."""
        return {
            "source": self.source,
            "chosen": self.chosen.name,
            "rejected": self.rejected.name,
        }


def are_trl_files(paths: Sequence[Path]) -> bool:
    """Whether these are files of rows, by their first lines: an episode has a version. Raises ValueError if
    only some are."""

    def is_row(row: dict) -> bool:
        return "version" not in row or not FIELDS.isdisjoint(row)

    return are_all(paths, lambda row: is_row(row) and not is_recorded(row), "conversations")


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
                for key, learned in learn_flags(row, name).items():
                    if not learned:
                        raise ValueError(f"{name}: {key!r} says not to learn it: leave the row out")
                yield name, row


def messages_of(
    row: dict, field: str, name: str, prompt: tuple[Message, ...] = ()
) -> tuple[Message, ...]:
    """A field's messages, which go on from a prompt. Raises ValueError that says what is wrong in them."""
    value = row.get(field)
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"{name}: {field!r} should be messages, [{{role, content}}], got {value!r:.40}"
        )
    messages = []
    for n, message in enumerate(value):
        where = f"{name}: {field}[{n}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ValueError(
                f"{where}: wanted a message with 'content' and the 'role' {', '.join(ROLES)}"
            )
        called = calls_of(message, where)
        read = {"role", "content", *(["tool_calls"] if called else []), *LEARN_KEYS}
        refuse_unread(message, read, where)
        for key, learned in learn_flags(message, where).items():
            if learned and message["role"] != "assistant":
                raise ValueError(
                    f"{where}: {key!r} asks to learn what the {message['role']} says, but only the "
                    "assistant's words are learned: leave the key out of the file"
                )
        content = "" if called and says_nothing(message.get("content")) else None
        content = _content(message, where) if content is None else content
        messages.append(Message(message["role"], content, calls=called))
    said = tuple(messages)
    if prompt and (said[: len(prompt)] == prompt or said[0] == prompt[-1]):
        raise ValueError(  # it would be read twice, and its old answers be learned
            f"{name}: {field!r} begins with the 'prompt' or its end again: leave it out"
        )
    return said


def _from_json(value: object) -> object:
    """What a text means as JSON; `datasets` writes lists of several types so. Else the value itself."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def calls_of(message: dict, where: str) -> str | None:
    """The tools that an answer calls, JSON, as chat templates want them: arguments as an object."""
    calls = _from_json(message.get("tool_calls"))
    if says_nothing(calls) or message["role"] != "assistant":
        return None
    read = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not is_text(function.get("name")):
            raise ValueError(f"{where}: tool_calls should be functions, got {call!r:.60}")
        arguments = _from_json(function.get("arguments") or {})
        if not isinstance(arguments, dict):
            raise ValueError(
                f"{where}: arguments of a tool should be an object, got {arguments!r:.60}"
            )
        function = {"name": function["name"], "arguments": arguments}
        read.append({"type": "function", "function": function})
    return json.dumps(read, ensure_ascii=False)


def tools_of(row: dict, name: str) -> str | None:
    """The functions that the agent may call, JSON."""
    tools = _from_json(row.get("tools"))
    if says_nothing(tools):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"{name}: 'tools' should be a list of functions, got {tools!r:.60}")
    return json.dumps(tools, ensure_ascii=False)


def _content(message: dict, where: str) -> str:
    """A message's text; in a list of parts, as OpenAI writes it, the one part."""
    content = message.get("content")
    if isinstance(content, list) and content:
        for n, part in enumerate(content):
            if n or not isinstance(part, dict) or part.get("type") != "text":
                raise ValueError(
                    f"{where}: content[{n}] is not read, {part!r:.60}: write the content as one text"
                )
            refuse_unread(part, {"type", "text"}, f"{where}: content[0]")
        content = content[0].get("text")
    if not is_text(content):
        raise ValueError(f"{where}: 'content' should be text, got {content!r:.40}")
    return content


def _conversation(
    row: dict,
    field: str,
    prompt: tuple[Message, ...],
    said: tuple[Message, ...],
    name: str,
    instance: tuple[str, int],
    solved: bool,
) -> Conversation:
    """A prompt and what was said behind it, by a row's field, which has the prompt in it or not. An answer that
    asks not to be learned is context."""
    messages, value = prompt + said, row[field]
    begin = len(messages) - len(value)
    silent = [n for n, m in enumerate(value, begin) if False in learn_flags(m, name).values()]
    tools = tools_of(row, name)
    return Conversation(messages, len(prompt), name, instance, solved, frozenset(silent), tools)


def _is_told_again(prompt: object, messages: tuple[Message, ...]) -> bool:
    """Whether a prompt says nothing that the messages do not."""
    if says_nothing(prompt):
        return True
    said = [message.content.strip() for message in messages]
    return isinstance(prompt, str) and prompt.strip() in said


def _this_has(row: dict) -> str:
    """The keys in which a row says something."""
    keys = [repr(key) for key, value in row.items() if not says_nothing(value)]
    return f"this has {', '.join(keys) or 'nothing'}"


def _preference(row: dict, name: str) -> tuple[tuple[Message, ...], ...]:
    """The prompt of a row, and its two ways on from it."""
    if not {"chosen", "rejected"} <= row.keys():
        judged = ": --pairs unpaired --dpo.loss kto learn from a label" if "label" in row else ""
        raise ValueError(
            f"{name}: preferences have 'chosen' and 'rejected', messages each, {_this_has(row)}{judged}"
        )
    refuse_unread(row, PREFERENCE, name)
    text, prompt = row.get("prompt") or "", ()
    if not isinstance(text, str):
        prompt = messages_of(row, "prompt", name)
    sides = [messages_of(row, field, name, prompt) for field in ("chosen", "rejected")]
    if prompt:
        return prompt, *sides
    prompt = sides[0][: common(*sides)]  # what both begin with, as TRL has it
    chosen, rejected = (side[len(prompt) :] for side in sides)
    if not (prompt and _is_told_again(text, prompt) and chosen and rejected):
        raise ValueError(
            f"{name}: without a 'prompt' of messages, 'chosen' and 'rejected' must begin alike, with "
            "the prompt, and then differ: make 'prompt' a list of messages, or leave the row out"
        )
    return prompt, chosen, rejected


def _solved(row: dict, name: str) -> bool:
    """Whether what was chosen solved its page; so it did if the row does not say."""
    written = row.get(COLUMN)
    if says_nothing(written):
        return True
    if not isinstance(written, dict) or written.get("version") != VERSION:
        raise ValueError(f"{name}: {COLUMN!r} is not of format version {VERSION}")
    return written.get("solved", True) is True


def _label(row: dict, name: str) -> bool | None:
    """What a row says of its completion: true or 1 is desirable, false or 0 undesirable."""
    label = row.get("label")
    if says_nothing(label):
        return None
    if label not in (True, False):
        raise ValueError(f"{name}: 'label' should be true or false, got {label!r:.40}")
    return bool(label)


def read_preferences(paths: Sequence[Path], until: str) -> list[Preferred]:
    """The pairs of some files, cut if `until` is "turn". Raises ValueError naming file, line and field."""
    numbers: dict[tuple, int] = {}
    pairs = []
    for name, row in _rows(paths):
        prompt, *sides = _preference(row, name)
        instance = "prompt", numbers.setdefault(prompt, len(numbers))
        solved = _solved(row, name)
        sides = [
            _conversation(row, field, prompt, said, f"{name}, {field}", instance, solved)
            for field, said in zip(("chosen", "rejected"), sides)
        ]
        pairs.append(Preferred(*(cut_at_turn(*sides) if until == "turn" else sides)))
    return pairs


def read_judged(paths: Sequence[Path], seed: int) -> list[Preferred]:
    """The completions of some files, desirable and undesirable ones by their labels, `side_by_side` for KTO.
    Raises ValueError naming file, line and field, or NothingToLearn."""
    numbers: dict[tuple, int] = {}
    judged = []
    for name, row in _rows(paths):
        label = _label(row, name)
        if label is None or says_nothing(row.get("completion")):
            raise ValueError(
                f"{name}: unpaired rows have 'prompt', 'completion' and 'label', {_this_has(row)}"
            )
        refuse_unread(row, JUDGED, name)
        prompt = messages_of(row, "prompt", name)
        said = messages_of(row, "completion", name, prompt)
        instance = "prompt", numbers.setdefault(prompt, len(numbers))
        judged.append(_conversation(row, "completion", prompt, said, name, instance, label))
    if len({conversation.solved for conversation in judged}) < 2:
        raise NothingToLearn(
            f"{' '.join(map(str, paths))}: each 'label' is true, or each is false: KTO needs both kinds"
        )
    return [Preferred(good, bad, "unpaired") for good, bad in side_by_side(judged, seed)]


def _demonstration(row: dict, name: str, number: int) -> Conversation:
    """What a row has to imitate; it is `solved` unless the row says that it failed."""
    field = next((field for field in IMITATED if not says_nothing(row.get(field))), None)
    if field is None:
        raise ValueError(
            f"{name}: demonstrations have 'messages' [{{role, content}}], 'prompt' and 'completion', "
            f"or 'chosen' and 'rejected', {_this_has(row)}: write it as one of these"
        )
    refuse_unread(row, IMITATED[field], name)
    prompt: tuple[Message, ...] = ()
    if field == "chosen":
        prompt, said, _ = _preference(row, name)
    elif field == "completion":
        prompt = messages_of(row, "prompt", name)
        said = messages_of(row, "completion", name, prompt)
    else:
        said = messages_of(row, "messages", name)
        if not _is_told_again(row.get("prompt"), said):
            raise ValueError(
                f"{name}: 'prompt' is not in 'messages', which is learned: leave it out"
            )
    solved = _label(row, name) is not False and _solved(row, name)
    return _conversation(row, field, prompt, said, name, ("row", number), solved)


def read_demonstrations(paths: Sequence[Path]) -> list[Conversation]:
    """The conversations to imitate; of preferences the chosen. Rows that are known to have failed are left out,
    and counted. Raises ValueError naming file, line, field, or NothingToLearn."""
    shown = [_demonstration(row, name, n) for n, (name, row) in enumerate(_rows(paths))]
    found = [conversation for conversation in shown if conversation.solved]
    if not found:
        raise NothingToLearn(
            f"{' '.join(map(str, paths))}: nothing in it is known to be worth imitating"
        )
    left_out = len(shown) - len(found)
    if left_out:
        print(
            f"{left_out} rows are left out: label is false, or the chosen is known to have failed"
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
