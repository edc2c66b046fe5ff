"""Recorded calls: what other programs' agents said through `evaluate.py --serve`, read as episodes.

A file has a line for each answer and one for each verdict, in the order in which they came:

    {"version": 1, "conversation": "a", "call": "1", "after": null, "read": [5, 6], "ids": [7, 2], ...}
    {"version": 1, "conversation": "a", "call": "2", "after": "1", "read": [8], "ids": [9, 2], ...}
    {"conversation": "a", "solved": true}

A call has read all that the call `after` had read and written, and then `read`. So its ids are those that the
model read and sampled: no text is encoded anew. The agent wrote `ids`, and they are learned; what stands in
`read`, a tool's answer or a page, is not. Conversations that begin with the same prompt are episodes of one
instance. An agent that forgets or rewrites what was said begins another episode of its conversation, and one
verdict is for all of them.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from minidpo.data.episodes import VERSION, Episode, Turn, are_all, json_object, record_of
from minidpo.data.pairs import NothingToLearn
from minidpo.model.chat import Chat, Dialogue


@dataclass(frozen=True)
class Call:
    """An answer, and what was new in its prompt."""

    conversation: str
    call: str  # its own name
    after: str | None  # the call that it goes on from; None: it began with nothing read
    heard: str  # what was new in its prompt, as text
    answer: str
    read: tuple[int, ...]  # the ids of what was new
    ids: tuple[int, ...]  # as sampled, with the end if it came
    logps: tuple[float, ...]  # log π of each at temperature 1, nats
    policy: str
    temperature: float
    top_p: float

    def to_json(self) -> str:
        """One line without a line break."""
        return json.dumps({"version": VERSION, **asdict(self)}, ensure_ascii=False)


@dataclass(frozen=True)
class Verdict:
    """Whether a conversation reached what its agent wanted. The last one of a conversation counts."""

    conversation: str
    solved: bool

    def to_json(self) -> str:
        """One line without a line break."""
        return json.dumps(asdict(self), ensure_ascii=False)


@dataclass(frozen=True)
class RecordedTurn(Turn):
    """A turn with the ids that the agent read since the turn before."""

    read: tuple[int, ...] = ()


@dataclass(frozen=True)
class Recorded(Episode):
    """A way through a conversation's calls. Its task is the conversation, its seed the number of its first
    prompt."""

    conversation: str = ""

    @property
    def name(self) -> str:
        """How messages name it."""
        return f"conversation {self.conversation}"

    def dialogue(self, chat: Chat) -> Dialogue:
        """The recorded ids, and the turn of each. Raises ValueError where they are another tokenizer's."""
        if not self.policy.endswith(f"-{chat.fingerprint}"):
            raise ValueError(
                f"{self.name}: recorded with another tokenizer or chat template than --model's: give "
                f"the model that spoke, {self.policy}"
            )
        ids: list[int] = []
        turns: list[int] = []
        for n, turn in enumerate(self.turns):
            ids += [*turn.read, *turn.ids]
            turns += [-1] * len(turn.read) + [n] * len(turn.ids)
        return Dialogue(ids, turns)


def is_recorded(row: dict) -> bool:
    """Whether a line is a call or a verdict.

    >>> is_recorded({"conversation": "a", "solved": True}), is_recorded({"conversation": []})
    (True, False)
    """
    return type(row.get("conversation")) is str and ("call" in row or "solved" in row)


def are_recorded(paths: Sequence[Path]) -> bool:
    """Whether these are files of recorded calls, by their first lines. Raises ValueError if only some are."""
    return are_all(paths, is_recorded, "recorded calls")


def parse_lines(path: Path, lines: Sequence[bytes]) -> Iterator[Call | Verdict]:
    """The calls and verdicts on these lines; a bad one is named in the ValueError."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json_object(line)
            if "call" not in row:
                yield record_of(Verdict, row, "verdict")
                continue
            if row.pop("version", None) != VERSION:
                raise ValueError(f"not a call of format version {VERSION}")
            call = record_of(Call, row, "call")
            if not call.ids or len(call.ids) != len(call.logps):
                raise ValueError("call: 'ids' and 'logps' should be as many, and at least one")
            yield call
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None


def read(paths: Sequence[Path]) -> list[Recorded]:
    """The judged conversations of some files. Raises ValueError naming file and line, or NothingToLearn."""
    calls: dict[str, Call] = {}
    verdicts: dict[str, bool] = {}
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path}: no such file of recorded calls")
        for said in parse_lines(path, path.read_bytes().split(b"\n")):
            if isinstance(said, Verdict):
                verdicts[said.conversation] = said.solved
                continue
            if said.call in calls:
                raise ValueError(f"{path}: call {said.call} is there twice: leave one out")
            if said.after is not None and said.after not in calls:
                raise ValueError(
                    f"{path}: call {said.call} goes on from {said.after}, which no line before it "
                    "has: give the file of that call, too, and before this one"
                )
            calls[said.call] = said
    spoken = {call.conversation for call in calls.values()}
    for name in verdicts.keys() - spoken:
        raise ValueError(f"there is a verdict for conversation {name}, of which no call is here")
    if not verdicts:
        raise NothingToLearn(
            f"{' '.join(map(str, paths))}: no conversation has a verdict: POST "
            '{"conversation": ID, "solved": true} to /v1/verdicts, or add it as a line'
        )
    if left_out := len(spoken - verdicts.keys()):
        print(f"{left_out} conversations are left out, because they have no verdict")
    return episodes_of(calls, verdicts)


def episodes_of(calls: dict[str, Call], verdicts: dict[str, bool]) -> list[Recorded]:
    """An episode for each call with which a judged conversation ends, or from which nothing goes on."""
    gone_on = {(call.conversation, call.after) for call in calls.values()}
    numbers: dict[tuple[int, ...], int] = {}  # of each first prompt
    counts: dict[int, int] = {}  # of its episodes
    episodes = []
    for end in calls.values():
        if end.conversation not in verdicts or (end.conversation, end.call) in gone_on:
            continue
        path = [end]
        while path[0].after is not None:
            path.insert(0, calls[path[0].after])
        solved = verdicts[end.conversation]
        temperatures, top_ps = zip(*((call.temperature, call.top_p) for call in path))
        number = numbers.setdefault(path[0].read, len(numbers))
        index = counts[number] = counts.get(number, -1) + 1
        episodes.append(
            Recorded(
                "conversation",
                number,
                index,
                "",
                tuple(
                    RecordedTurn(c.heard, c.answer, None, None, c.ids, c.logps, c.read)
                    for c in path
                ),
                "solved" if solved else "failed",
                float(solved),
                end.policy,
                {"temperature": _same(temperatures), "top_p": _same(top_ps)},
                conversation=end.conversation,
            )
        )
    return episodes


def _same(values: Sequence[float]) -> float | list[float]:
    """What all calls were sampled with; where they differ, all of it, which a policy gradient refuses."""
    found = list(dict.fromkeys(values))
    return found[0] if len(found) == 1 else found
