"""A shelf of boxes: a complete world of text, for reading and for tests. It needs no browser.

    task: Open the "red" box, then the "green" box.
    page:
    button "green" [1]
    button "red" [2]

`docs/add-your-own.md` explains it.
"""

import contextlib
import random
import re
from collections.abc import AsyncIterator, Sequence

from envs import actions
from envs.actions import Action
from envs.protocol import Decision, Env, Observation, Outcome, World

COLOURS = ("red", "green", "blue", "black", "white", "pink", "yellow", "brown")
SENTENCES = {
    "open-one": 'Open the "{}" box.',
    "open-two": 'Open the "{}" box, then the "{}" box.',
    "open-three": 'Open the boxes "{}", "{}", "{}" in any order.',  # rewards a part of them, too
}
SUITES = {"all": tuple(SENTENCES)}
SEEDS = {
    split: range(100_000 * number, 100_000 * (number + 1))
    for number, split in enumerate(("demos", "rollouts", "validation", "test"))
}


class Shelf(Env):
    """Five boxes. The episode ends with a wrong box or, in open-three, after three boxes."""

    async def reset(self, task: str, seed: int) -> Observation:
        """Place the boxes. All randomness comes from (task, seed), so an instance always looks the same."""
        rng = random.Random(f"{task} {seed}")
        self.task, self.opened = task, []
        self.boxes = rng.sample(COLOURS, 5)
        self.wanted = rng.sample(self.boxes, SENTENCES[task].count("{}"))
        return self._look()

    async def step(self, action: Action) -> Observation:
        """Open a box. An impossible action costs a turn, and the observation says why."""
        number = action["ref"] if action.command == "CLICK" else ""
        if number not in ("1", "2", "3", "4", "5"):
            return self._look('boxes are opened with CLICK(ref="1") to CLICK(ref="5")')
        box = self.boxes[int(number) - 1]
        if box in self.opened:
            return self._look(f'the "{box}" box is open already')
        self.opened.append(box)
        return self._look()

    def _look(self, error: str | None = None) -> Observation:
        lines = [
            f'text "{box}, open"' if box in self.opened else f'button "{box}" [{number}]'
            for number, box in enumerate(self.boxes, 1)
        ]
        outcome, reward = None, 0.0
        right = len(set(self.opened) & set(self.wanted)) / len(self.wanted)
        in_order = self.opened == self.wanted[: len(self.opened)]
        if len(self.opened) == len(self.wanted) or not (in_order or self.task == "open-three"):
            solved = right == 1 and (in_order or self.task == "open-three")
            outcome = Outcome.SOLVED if solved else Outcome.FAILED
            reward = right if self.task == "open-three" else float(solved)
        instruction = SENTENCES[self.task].format(*self.wanted)
        return Observation(instruction, "\n".join(lines), outcome, reward, error)


def expert(seen: Observation, done: list[Action]) -> Decision:
    """Open the first box that the instruction names and that is still closed."""
    for box in re.findall(r'"(\w+)"', seen.instruction):
        if line := re.search(rf'^button "{box}" \[(\d)\]$', seen.text, re.MULTILINE):
            return Decision(line[0], Action("CLICK", ref=line[1]))
    raise LookupError("no box is left to open")


class Toy(World):
    """The shelf as `minidpo` sees it."""

    name = "toy"
    suites, seeds = SUITES, SEEDS
    system_prompt = actions.SYSTEM_PROMPT
    experts = dict.fromkeys(SENTENCES, expert)
    parse, render = staticmethod(actions.parse), staticmethod(actions.render)

    def step_limit(self, task: str) -> int:
        """Two actions more than needed."""
        return 2 + SENTENCES[task].count("{}")

    @contextlib.asynccontextmanager
    async def open(self, places: int, watch: bool = False) -> AsyncIterator[Sequence[Env]]:
        """A shelf for each place."""
        yield [Shelf() for _ in range(places)]

    def mistake(self, seen: Observation, done: Action, wanted: Action, ended: bool) -> str:
        """Always the wrong box, for there is nothing else."""
        return "wrong element"


WORLD = Toy()
