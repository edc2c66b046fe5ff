"""Episodes: what happened, one JSON line each.

An episode is one agent on one task instance (task, seed): the turns it took and the page's verdict.
Demonstrations, rollouts and evaluations are all this one record, so every tool reads every file. Files are
appended episode by episode; a kill can only cut the last line short, and `Writer` repairs that.
"""

import fcntl
import glob
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import TypeVar, get_origin

from minidpo.system.files import named_in_errors, write_text
from minidpo.system.ranges import default_of

Record = TypeVar("Record")
VERSION = 1  # of the file format; a reader refuses any other
BEGIN = b'{"version": '  # of each line


@dataclass(frozen=True)
class Turn:
    """One turn: what the agent saw, what it answered, what came of it."""

    observation: str  # the page as text, as it stood before the answer
    answer: str  # the agent's own words
    action: str | None  # the action understood from it, in canonical form; None when there was none
    # why the action was of no use; the agent reads it next, or its visit has ended
    error: str | None = None
    # the answer's tokens as sampled, with the stop token if it came
    ids: tuple[int, ...] | None = None
    logps: tuple[float, ...] | None = None  # log π of each of them when it was sampled, nats


def in_a_loop(turns: Sequence[Turn]) -> bool:
    """Whether the last turn did the same on the same page for the third time: this ends it, as "limit".

    WebArena's harness ends it, too (Zhou et al. 2023, arXiv:2307.13854). Differs: that compares actions
    alone, and a page may want the same action ten times.
    """
    said = [(turn.observation, turn.action or turn.answer) for turn in turns if not is_silent(turn)]
    return bool(turns) and not is_silent(turns[-1]) and said.count(said[-1]) >= 3


def is_silent(turn: Turn) -> bool:
    """Whether it waited or pressed an arrow key: the page need not show what that did."""
    return turn.error is None and bool(re.match(r"WAIT|PRESS.*Arrow", turn.action or ""))


@dataclass(frozen=True)
class Cost:
    """What an episode took. The tokens are the same each time it is played, the seconds are not."""

    tokens_read: int  # of the pages and the task; the agent's own are not counted again
    tokens_written: int
    model_s: float  # waiting for answers, beside the other episodes that the model wrote
    browser_s: float


def player_of(policy: str) -> tuple[str, str]:
    """Fingerprints of a player's weights and of its chat, wherever its adapter is kept; of a script its name.

    >>> player_of("runs/a@0c1d-9e8f"), player_of("runs/a@0c1d"), player_of("expert")
    (('0c1d', '9e8f'), ('0c1d', ''), ('expert', ''))
    """
    _, at, mark = policy.rpartition("@")
    weights, _, chat = mark.partition("-") if at else (mark, "", "")
    return weights, chat


@dataclass(frozen=True)
class Episode:
    """One episode; an environment failure is never one. `outcome` is solved, failed or limit, of a visit to a
    page that no task is (`--url`) limit or stopped."""

    task: str
    seed: int
    index: int  # which episode of its group: same task, same seed
    instruction: str
    turns: tuple[Turn, ...]
    outcome: str
    reward: float  # the page's raw reward
    policy: str  # who acted: "expert", "clumsy 0.3", "dagger", or ADAPTER@WEIGHTS-CHAT, or MODEL@ the same
    # temperature, top_p, seed; or an expert's noise, seed
    sampling: dict = field(default_factory=dict)
    cost: Cost | None = field(default=None, compare=False)
    # turns given at its beginning: of a golden episode; of dagger and values, an agent's
    forced: int = 0
    shots: tuple[str, ...] = ()  # solved examples before the task: what was shown and said, in turn
    progress: float | None = None  # in files of before December 2026: how near a failure came

    @property
    def solved(self) -> bool:
        return self.outcome == "solved"

    @property
    def instance(self) -> tuple[str, int]:
        """The task instance: only episodes of the same one may be compared."""
        return self.task, self.seed

    @property
    def key(self) -> tuple[str, int, int]:
        return self.task, self.seed, self.index

    @property
    def name(self) -> str:
        """How messages name it."""
        return f"{self.task} seed {self.seed} episode {self.index}"

    @property
    def first_prompt(self) -> tuple[str, str]:
        """All that its instance is to an agent before it acts: instruction and first page."""
        return self.instruction, self.turns[0].observation if self.turns else ""

    @property
    def said(self) -> tuple[str, ...]:
        """All that the agent said: two episodes that agree in it are the same to the model."""
        return tuple(turn.answer for turn in self.turns)

    @property
    def relabelled(self) -> bool:
        """Whether the expert played on from a state that an agent had reached (DAgger)."""
        return self.policy == "dagger"

    def up_to(self, turns: int) -> "Episode":
        """The same episode without what came behind its first turns."""
        return replace(self, turns=self.turns[:turns])

    def to_json(self) -> str:
        """One line without a line break."""
        return json.dumps({"version": VERSION, **asdict(self)}, ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str | bytes) -> "Episode":
        """Raises ValueError that says which field is wrong."""
        record = json_object(line)
        if record.pop("version", None) != VERSION:
            raise ValueError(f"not an episode of format version {VERSION}")
        episode = record_of(cls, record, "episode")
        if episode.outcome not in ("solved", "failed", "limit", "stopped"):
            raise ValueError(f"episode: 'outcome' is unknown: {episode.outcome!r:.40}")
        turns = tuple(record_of(Turn, turn, f"turn {n}") for n, turn in enumerate(episode.turns))
        if not 0 <= episode.forced <= len(turns):
            raise ValueError(f"episode: 'forced' should be 0 to {len(turns)}, got {episode.forced}")
        cost = None if episode.cost is None else record_of(Cost, episode.cost, "cost")
        return replace(episode, turns=turns, cost=cost)


def json_object(line: str | bytes) -> dict:
    """The JSON object on a line. Raises ValueError if there is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if type(record) is not dict:
        raise ValueError("not a JSON object")
    return record


def are_all(paths: Sequence[Path], is_one: Callable[[dict], bool], what: str) -> bool:
    """Whether the files are of this kind, by their first lines. Raises ValueError if only some are."""
    kinds = {}
    for path in filter(Path.is_file, paths):  # a missing one is told by who reads it
        with open(path, "rb") as file:
            line = next(filter(bytes.strip, file), b"")
        try:
            kinds[path] = is_one(json_object(line))
        except ValueError:  # damaged: the reader of episodes says how
            kinds[path] = False
    if len(set(kinds.values())) == 2:
        some, others = (next(path for path in kinds if kinds[path] == k) for k in (True, False))
        raise ValueError(
            f"{some} holds {what} and {others} does not: give --data files of one kind"
        )
    return any(kinds.values())


def is_text(value: object) -> bool:
    """Whether a value is text; half a character, a lone surrogate, is none."""
    return type(value) is str and not re.search("[\ud800-\udfff]", value)


def _is_number(value: object) -> bool:  # `true` is none
    return type(value) in (float, int) and abs(value) <= sys.float_info.max


# what a field, or each entry of its list, holds: in words, and whether a value is that
_HOLDS: dict[object, tuple[str, Callable[[object], bool]]] = {
    str: ("text", is_text),
    bool: ("true or false", lambda value: type(value) is bool),
    int: ("a whole number", lambda value: type(value) is int),
    float: ("a number", _is_number),
    dict: ("an object", lambda value: type(value) is dict),
    Cost: ("an object", lambda value: type(value) is dict),
    tuple[Turn, ...]: ("a list of objects", lambda value: type(value) is dict),
    tuple[str, ...]: ("a list of texts", is_text),
    tuple[int, ...]: (
        "a list of token ids",
        lambda value: type(value) is int and 0 <= value < 2**31,
    ),
    tuple[float, ...]: ("a list of numbers", _is_number),
}


def record_of(kind: type[Record], record: dict, what: str) -> Record:
    """A dataclass from JSON. Raises ValueError that names the field which does not fit."""
    values = {}
    for f in fields(kind):
        if f.name not in record:
            if default_of(f) is MISSING:
                raise ValueError(f"{what}: {f.name!r} is missing")
            continue
        value, held = record[f.name], f.type
        if isinstance(f.type, UnionType):  # TYPE | None
            held = f.type.__args__[0]
            if value is None:
                values[f.name] = None
                continue
        words, holds = _HOLDS[held]
        is_list = get_origin(held) is tuple
        entries = value if is_list else [value]
        if type(entries) is not list or not all(map(holds, entries)):
            raise ValueError(f"{what}: {f.name!r} should be {words}, got {value!r:.40}")
        values[f.name] = tuple(value) if is_list else value
    unknown = sorted(record.keys() - {f.name for f in fields(kind)})
    if unknown:
        raise ValueError(f"{what}: unknown field {unknown[0]!r}")
    return kind(**values)


def grouped(items: Iterable, key: Callable) -> dict:
    """Lists of the items with the same key, by key, in the order they come.

    >>> grouped(["bat", "ant", "bee"], lambda word: word[0])
    {'b': ['bat', 'bee'], 'a': ['ant']}
    """
    groups: dict[object, list] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def by_instance(episodes: Iterable[Episode]) -> dict[tuple[str, int], list[Episode]]:
    """The episodes of each (task, seed)."""
    return grouped(episodes, lambda e: e.instance)


def instances_of(episodes: Iterable[Episode]) -> list[tuple[str, int]]:
    """The instances that were played, each once, in the order they come."""
    return list(dict.fromkeys(episode.instance for episode in episodes))


def read(path: str | Path) -> list[Episode]:
    """All episodes of a JSONL file. Raises ValueError naming file and line; an empty file is an error too."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file of episodes")
    # bytes: a line that is not UTF-8 is named like any other bad line
    with open(path, "rb") as file:
        episodes = list(parse_lines(path, file))
    if not episodes:
        raise ValueError(f"{path}: holds no episodes")
    return episodes


def read_all(paths: Iterable[str | Path]) -> list[Episode]:
    """The episodes of several files, in order; `read` raises."""
    return [episode for path in paths for episode in read(path)]


def parse_lines(path: Path, lines: Iterable[bytes]) -> Iterator[Episode]:
    """The episodes on these lines of a file; a bad one is named in the ValueError."""
    for number, line in enumerate(lines, 1):
        if not line.strip():  # an editor may leave one at the end
            continue
        try:
            yield Episode.from_json(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None


def rank_files(path: Path) -> list[Path]:
    """What other ranks have written beside this file of episodes, or a killed run has left there."""
    return sorted(path.parent.glob(f"{glob.escape(path.name)}.rank[0-9]*"))


def arrange(path: str | Path, keys: Iterable[tuple[str, int, int]]) -> None:
    """Put a file's episodes in the order of these keys, others behind, all at once or never."""
    place = {key: n for n, key in enumerate(keys)}
    found = read(path)
    ordered = sorted(found, key=lambda episode: place.get(episode.key, len(place)))
    if ordered != found:
        write_text(path, "".join(episode.to_json() + "\n" for episode in ordered))


def _readable(episode: Episode) -> str:
    """Its line. Raises ValueError if nobody could read it, as where a world of one's own pays `nan`."""
    try:
        line = episode.to_json()
        Episode.from_json(line)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{episode.name}: the world or its policy gave what no file of episodes holds: {error}"
        ) from None
    return line + "\n"


class Writer(AbstractContextManager):
    """Appends episodes to a file and knows which it holds. A last line that a kill tore is cut off. Raises
    ValueError, and leaves the file as it is, if it holds anything else or if somebody writes to it."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path, "ab+")
        try:
            self._begin()
        except ValueError:
            self.file.close()  # or whoever keeps the error keeps the lock
            raise

    def _begin(self) -> None:
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self.file.fileno()).st_ino != self.path.stat().st_ino:
                raise BlockingIOError  # its last writer has just put another in its place
        except BlockingIOError:
            raise ValueError(f"{self.path}: another process is writing to it") from None
        self.file.seek(0)
        *lines, torn = self.file.read().split(b"\n")
        end = b""
        with suppress(ValueError, RecursionError):
            json.loads(torn)  # whole, but for its line break: somebody else wrote it
            lines, torn, end = [*lines, torn], b"", b"\n"
        self.done = {episode.key for episode in parse_lines(self.path, lines)}
        if not (torn.startswith(BEGIN) or BEGIN.startswith(torn)):
            raise ValueError(f"{self.path}, line {len(lines) + 1}: not the beginning of an episode")
        self.file.truncate(self.file.tell() - len(torn))
        self.file.write(end)

    def add(self, episode: Episode) -> None:
        """Write one line and push it to the disk; an episode that the file holds is not written twice."""
        self.extend([episode])

    def extend(self, episodes: Iterable[Episode]) -> None:
        """Write a line each, and push them to the disk at once."""
        new = {episode.key: episode for episode in episodes if episode.key not in self.done}
        with named_in_errors(self.path):
            self.file.write("".join(map(_readable, new.values())).encode())
            self.file.flush()
            os.fsync(self.file.fileno())
        self.done |= new.keys()

    def __exit__(self, *_) -> None:
        with named_in_errors(self.path):  # what a full disk did not take is tried once more
            self.file.close()
