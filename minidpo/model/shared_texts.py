"""What a sampler's cache holds: a tree of texts, each computed once, however many rows say it.

A place of the cache holds a path of the tree. A row stands somewhere on a place's path, where others may stand
too. While it goes on as the path does, it only takes a step along it. If it goes on otherwise, the path up to
there is copied to a free place, which then grows. A place on which no row stands is kept until room is needed:
an attempt that begins later finds the prompts and the answers of those before it.

An edge of the tree is what was read at once: a prompt, or one token of an answer. The bits of a prompt depend
on where it began and ended, so two texts are the same only if their parts are.

Where rows are not `shared` (one row alone; a GPU), each keeps a place of its own and copies prompts only.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minidpo.model.kvcache import KVCache


@dataclass(eq=False, slots=True)
class Node:
    """A text: that of the node before it, and the ids that were read behind it at once."""

    part: tuple[int, ...]
    length: int
    "tokens of the whole text"
    said: bool = True
    "False: a guess, which no row has said yet"
    state: Tensor | None = None
    "(C,) the last hidden state, from which the next token is drawn"
    places: dict["Place", None] = field(default_factory=dict)
    "those that hold the text, in the order in which they came to"
    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict)


@dataclass(eq=False)
class Place:
    """A row of the cache, and the path from the root that it holds."""

    index: int
    path: list[Node]
    used: int = 0
    "when a row came last"


@dataclass(eq=False)
class Row:
    """Where a row stands: at path[depth] of a place."""

    place: Place
    depth: int = 0
    kept: int = 0
    "depth of the prompt or answer that it read last to its end"

    @property
    def node(self) -> Node:
        return self.place.path[self.depth]

    @property
    def text(self) -> tuple[int, ...]:
        return tuple(token for node in self.place.path[: self.depth + 1] for token in node.part)

    @property
    def next(self) -> Node:
        return self.place.path[self.depth + 1]

    def restart(self) -> None:
        self.depth = self.kept = 0

    def keep(self) -> None:
        self.kept = self.depth

    def pass_on(self) -> None:
        """Take a step along the path."""
        self.depth += 1
        self.node.said = True

    def ahead(self, most: int) -> list[Node]:
        """The node, and at most so many in all of those on its path that one token each leads to."""
        nodes = self.place.path[self.depth : self.depth + most]
        return nodes[
            : next((n for n in range(1, len(nodes)) if len(nodes[n].part) > 1), len(nodes))
        ]


class Texts:
    """The texts in a cache, and the rows on them; `shared`: the cache has more places than rows."""

    def __init__(self, cache: KVCache, rows: int, shared: bool):
        root, places = Node((), 0), len(cache.lengths)
        self.cache, self.shared = cache, shared
        self.places = [Place(index, [root]) for index in range(places)]
        self.rows = [Row(place) for place in self.places[:rows]]
        self.grown: list[tuple[Place, int]] = []  # what is being read: the place, its depth before
        self.clock = 0

    def find(self, row: Row, part: tuple[int, ...]) -> bool:
        """Let the row stand where the tree holds its text and this part, if it does."""
        node = row.node.children.get(part)
        if node is None:
            return False
        place = row.place if row.place in node.places else next(iter(node.places))
        if self.shared:
            row.place = place
        else:
            self._copy(place, row.place, row.depth + 1)
        row.pass_on()
        self._use(row.place)
        return True

    def grow(self, row: Row, part: tuple[int, ...]) -> None:
        """Put this part behind the row's text; the caller computes it, `all_or_nothing`, and its state."""
        if not self.shared and row.depth > row.kept:
            row.node.state = None  # nobody else draws from it
        row.place = self._room(row)
        self._use(row.place)
        self.grown.append((row.place, row.depth))
        self._append(row.place, part, said=True)
        row.depth += 1

    def guess(self, row: Row, ids: Sequence[int]) -> None:
        """Put guesses of what comes next behind the text of a row that has grown."""
        for token in ids:
            self._append(row.place, (token,), said=False)

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """What grows meanwhile is forgotten if it is not read to its end: after an interrupt nobody may take it
        for read."""
        self.grown.clear()
        try:
            yield
        except BaseException:
            for place, depth in reversed(self.grown):
                self._cut(place, depth)
            for row in self.rows:
                row.depth = min(row.depth, len(row.place.path) - 1)
            raise

    def show(self, columns: int) -> None:
        """Let each pass see so many columns of the cache."""
        if self.cache.row_by_row:  # where it grows, it copies what its rows hold
            self.cache.lengths.copy_(torch.tensor(self.lengths()))
        self.cache.show(columns)

    def lengths(self) -> list[int]:
        """The tokens at each place of the cache, in the cache's order."""
        return [place.path[-1].length for place in sorted(self.places, key=lambda p: p.index)]

    def exchange(self, row: int, index: int) -> None:
        """Move a row's place there in the cache; the one that is there takes its old index."""
        mine = self.rows[row].place
        other = next(place for place in self.places if place.index == index)
        if mine is not other:
            length = max(mine.path[-1].length, other.path[-1].length)
            self.cache.swap(mine.index, index, length)
            mine.index, other.index = index, mine.index

    def _use(self, place: Place) -> None:
        self.clock += 1
        place.used = self.clock

    def _append(self, place: Place, part: tuple[int, ...], said: bool) -> None:
        before = place.path[-1]
        node = Node(part, before.length + len(part), said)
        if self.shared or len(part) > 1:  # others may come here
            before.children[part] = node
        node.places[place] = None
        place.path.append(node)

    def _room(self, row: Row) -> Place:
        """A place whose path ends where the row stands: its own, without guesses that were wrong, or a copy."""
        place = row.place
        if self.shared and any(node.said for node in place.path[row.depth + 1 :]):
            taken = {row.place for row in self.rows}
            free = min((p for p in self.places if p not in taken), key=lambda p: p.used)
            self._copy(place, free, row.depth)
            return free
        self._cut(place, row.depth)
        return place

    def _copy(self, source: Place, target: Place, depth: int) -> None:
        """Let the target hold the source's path up to there, and no more."""
        path = source.path[: depth + 1]
        same = sum(1 for mine, its in zip(target.path, path) if mine is its)  # they begin together
        self._cut(target, same - 1)
        self.cache.copy_row(source.index, target.index, path[same - 1].length, path[-1].length)
        for node in path[same:]:
            node.places[target] = None
        target.path += path[same:]

    def _cut(self, place: Place, depth: int) -> None:
        """Forget the path beyond this depth."""
        while len(place.path) > depth + 1:
            node, before = place.path.pop(), place.path[-1]
            del node.places[place]
            if not node.places and before.children.get(node.part) is node:
                del before.children[node.part]
