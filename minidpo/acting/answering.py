"""Answering: callers in threads of their own share one batch.

A caller puts its prompt into a queue that has an end, and reads how the answer grows. One thread gives each
prompt a row of the sampler, and steps it. A caller that has heard enough, or is gone, drops its prompt, and the
row is free for the next.
"""

import threading
from collections import deque
from dataclasses import dataclass, field
from queue import Full, SimpleQueue

from minidpo.model.decoder import Transformer
from minidpo.model.sampling import Answer, Request, Sampler

SAMPLERS = 4  # one for each top_p, of which callers seldom have two


@dataclass(eq=False)
class Asked:
    """A prompt that waits for a row, or is being answered."""

    request: Request
    top_p: float
    partly: bool
    "Whether its caller reads the answer while it grows."
    dropped: bool = False
    told: SimpleQueue = field(default_factory=SimpleQueue)
    "Of (the answer so far, whether that is all), or what went wrong."


class Answering:
    """The queue, and the rows."""

    def __init__(self, model: Transformer, stop: int, rows: int, most_waiting: int):
        self.model, self.stop, self.rows, self.most_waiting = model, stop, rows, most_waiting
        self.samplers: dict[float, Sampler] = {}  # by top_p
        # of each sampler what its rows have read, the row that was used last at the end
        self.texts: dict[float, dict[int, tuple[int, ...]]] = {}
        self.writing: dict[tuple[float, int], Asked] = {}
        self.waiting: deque[Asked] = deque()
        self.asked = threading.Condition()  # guards `waiting`

    @property
    def is_full(self) -> bool:
        return len(self.waiting) >= self.most_waiting

    def ask(self, asked: Asked) -> None:
        """Put it into the queue. Raises Full."""
        with self.asked:
            if self.is_full:
                raise Full
            self.waiting.append(asked)
            self.asked.notify()

    def run(self) -> None:
        """Answer what is asked, without an end."""
        while True:
            with self.asked:
                self.asked.wait_for(lambda: self.waiting or self.writing)
                free = self.rows - len(self.writing)
                began = [self.waiting.popleft() for _ in range(min(free, len(self.waiting)))]
            for asked in began:
                self._begin(asked)
            self._step()

    def _begin(self, asked: Asked) -> None:
        """Give it the row that has read most of its prompt, else the one that was used longest ago."""
        top_p, ids = asked.top_p, asked.request.ids
        if top_p not in self.samplers:
            busy = {p for p, _ in self.writing}
            too_many = max(0, len(self.samplers) - SAMPLERS + 1)
            for idle in [p for p in self.samplers if p not in busy][:too_many]:
                del self.samplers[idle], self.texts[idle]
            self.samplers[top_p] = Sampler(self.model, self.rows, self.stop, top_p=top_p)
            self.texts[top_p] = dict.fromkeys(range(self.rows), ())
        texts = self.texts[top_p]
        free = [row for row in texts if (top_p, row) not in self.writing]
        row = max(free, key=lambda row: _read_of(texts[row], ids))
        texts.pop(row)
        texts[row] = ids
        self.samplers[top_p].ask(row, asked.request)
        self.writing[top_p, row] = asked

    def _step(self) -> None:
        """Write a token in each row, and tell the callers."""
        for (top_p, row), asked in [*self.writing.items()]:
            if asked.dropped:
                self.samplers[top_p].drop(row)
                del self.writing[top_p, row]
        for top_p, sampler in [*self.samplers.items()]:
            try:
                answers = sampler.step() if sampler.busy else {}
            except Exception as error:  # whatever it is: who waits is told, and others are answered
                self._give_up(top_p, error)
                continue
            for row, answer in answers.items():
                self.texts[top_p][row] += answer.ids[:-1]
                self.writing.pop((top_p, row)).told.put((answer, True))
            for (p, row), asked in self.writing.items():
                if p == top_p and asked.partly and (answer := sampler.so_far(row)):
                    asked.told.put((Answer(answer.request, answer.ids, answer.logps), False))

    def _give_up(self, top_p: float, error: Exception) -> None:
        """All that this sampler was asked has no answer; the next begins with another sampler."""
        for key in [key for key in self.writing if key[0] == top_p]:
            self.writing.pop(key).told.put(error)
        del self.samplers[top_p], self.texts[top_p]


def _read_of(text: tuple[int, ...], ids: tuple[int, ...]) -> int:
    """How much of a prompt a row has read; -1 if it has read something else.

    >>> _read_of((5, 6), (5, 6, 7)), _read_of((), (5, 6, 7)), _read_of((5, 8), (5, 6, 7))
    (2, 0, -1)
    """
    return len(text) if ids[: len(text)] == text else -1
