"""Answering: callers in many threads share one batch.

A caller puts its prompt into a queue of limited length and reads the answer as it grows. One thread gives each prompt
a row of the sampler and runs the sampler. A caller that has read enough, or is gone, drops its prompt, and the row is
free for the next one.
"""

import threading
from collections import deque
from dataclasses import dataclass, field
from queue import Full, SimpleQueue

from minidpo.model.decoder import Transformer
from minidpo.model.sampling import Answer, Request, Sampler

SAMPLERS = 4  # one for each top_p; callers seldom use more than one


@dataclass(eq=False)
class Asked:
    """A prompt that waits for a row or is being answered."""

    request: Request
    top_p: float
    partly: bool
    "Whether the caller reads the answer while it grows."
    dropped: bool = False
    told: SimpleQueue = field(default_factory=SimpleQueue)
    "Holds pairs (the answer so far, whether it is complete), or the exception that ended it."


class Answering:
    """The queue and the rows."""

    def __init__(self, model: Transformer, stop: int, rows: int, most_waiting: int):
        self.model, self.stop, self.rows, self.most_waiting = model, stop, rows, most_waiting
        self.samplers: dict[float, Sampler] = {}  # by top_p
        # for each sampler {row: the ids that it has read}, with the row that was used last at the end
        self.texts: dict[float, dict[int, tuple[int, ...]]] = {}
        self.writing: dict[tuple[float, int], Asked] = {}
        self.waiting: deque[Asked] = deque()
        self.asked = threading.Condition()  # guards `waiting`

    @property
    def is_full(self) -> bool:
        return len(self.waiting) >= self.most_waiting

    def ask(self, asked: Asked) -> None:
        """Put a prompt into the queue. Raises Full if the queue is full."""
        with self.asked:
            if self.is_full:
                raise Full
            self.waiting.append(asked)
            self.asked.notify()

    def run(self) -> None:
        """Answer prompts forever."""
        while True:
            with self.asked:
                self.asked.wait_for(lambda: self.waiting or self.writing)
                free = self.rows - len(self.writing)
                began = [self.waiting.popleft() for _ in range(min(free, len(self.waiting)))]
            for asked in began:
                self._begin(asked)
            self._step()

    def _begin(self, asked: Asked) -> None:
        """Give a prompt the row that has read most of it, or else the row that has been unused the longest."""
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
        """Write a token in each row, and pass the answers on to the callers."""
        for (top_p, row), asked in [*self.writing.items()]:
            if asked.dropped:
                self.samplers[top_p].drop(row)
                del self.writing[top_p, row]
        for top_p, sampler in [*self.samplers.items()]:
            try:
                answers = sampler.step() if sampler.busy else {}
            # any error is passed on to the waiting callers; the others still get answers
            except Exception as error:
                self._give_up(top_p, error)
                continue
            for row, answer in answers.items():
                self.texts[top_p][row] += answer.ids[:-1]
                self.writing.pop((top_p, row)).told.put((answer, True))
            for (p, row), asked in self.writing.items():
                if p == top_p and asked.partly and (answer := sampler.so_far(row)):
                    asked.told.put((Answer(answer.request, answer.ids, answer.logps), False))

    def _give_up(self, top_p: float, error: Exception) -> None:
        """Fail all prompts of this sampler. The next prompt gets a new one."""
        for key in [key for key in self.writing if key[0] == top_p]:
            self.writing.pop(key).told.put(error)
        del self.samplers[top_p], self.texts[top_p]


def _read_of(text: tuple[int, ...], ids: tuple[int, ...]) -> int:
    """How many ids of a prompt a row has read; -1 if it has read something else.

    >>> _read_of((5, 6), (5, 6, 7)), _read_of((), (5, 6, 7)), _read_of((5, 8), (5, 6, 7))
    (2, 0, -1)
    """
    return len(text) if ids[: len(text)] == text else -1
