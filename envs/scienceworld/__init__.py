"""ScienceWorld (Wang et al. 2022, arXiv:2203.07540): a child's experiments in a house, in text.

The 24 tasks that ETO plays (Song et al. 2024, arXiv:2403.02502), with the package's "easy" simplifications: doors
and containers are open, one may teleport, flower pots water themselves. A seed is the number of a variation. Of
the official training variations every third is for demos, the others for rollouts; validation is the official
dev split, ETO's "seen"; test is the first ten of the official test split, or all where there are fewer, ETO's 211.

    task: Your task is to boil water. [...] First, focus on the substance. Then, [...]
    page:
    This room is called the hallway. In it, you see: [...]
        A door to the kitchen (that is open)

Reward: the highest score so far, 0 to 1. A score below 0, after a focus on the wrong thing, ends the episode as
failed, and what was reached before it counts. Solved is the full score. Differs from ETO: its limits are others
(`step_limit`), and here no solved example is in the prompt unless `--shots` puts it there.

The game is the package `scienceworld` 1.2.3 (Apache-2.0), which needs Java (`envs/jvm.py`).
"""

import functools
import re
from collections.abc import Sequence

from envs.golden import follow, in_words
from envs.jvm import Game, Java, JavaWorld, Place
from envs.protocol import Expert, Outcome
from envs.scienceworld.tasks import TASKS

JAVA = Java(
    "scienceworld",
    "1.2.3",
    "scienceworld.jar",
    "scienceworld.runtime.pythonapi.PythonInterface",
)
SYSTEM_PROMPT = """You do a task of science in a house, and read what happens. Answer:
thought: what the task needs next
action: open door to kitchen
or look around, examine OBJ, look in OBJ, inventory, go to ROOM, teleport to ROOM, open OBJ, close OBJ, pick up OBJ, \
drop OBJ, move OBJ to OBJ, pour OBJ into OBJ, dunk OBJ in OBJ, mix OBJ, focus on OBJ, activate OBJ, deactivate OBJ, \
use OBJ on OBJ, read OBJ, eat OBJ, flush OBJ, connect OBJ to OBJ, disconnect OBJ, wait, wait1. If a request is \
ambiguous, answer with a number."""
WORDS = {
    r"open door to (.+)": r"The door to the \1 must be open.",
    r"close (.+)": r"The \1 must be closed.",
    r"go to (.+)": r"What the task needs is in the \1 or on from there.",
    r"look around": "I see what is in this room.",
    r"pick up (.+)": r"The task needs the \1.",
    r"open (.+)": r"Something that the task needs may be in the \1.",
    r"focus on (.+)": r"The task asks for a focus on the \1.",
    r"examine (.+)": r"I see how the \1 has changed.",
    r"use thermometer.* on (.+)": r"I measure how warm the \1 is.",
    r"use (.+) on (.+)": r"The \1 changes the \2.",
    r"(?:move|pour) (.+) (?:in)?to (.+)": r"The \1 belongs in the \2.",
    r"mix (.+)": r"All parts are in the \1.",
    r"read (.+)": r"The \1 says what is needed.",
    r"connect (.+) to (.+)": r"The circuit goes on from the \1 to the \2.",
    r"activate (.+)": r"The \1 must be on.",
    r"deactivate (.+)": r"The \1 has done its part.",
    r"wait1?": "It takes time.",
    r"drop (.+)": r"The \1 is needed here.",
    r"(.+)": r"The next step is: \1.",
}
SIGHTS = {
    r"the thermometer measures (a temperature of -?\d+ degrees celsius)": r"It has \1.",
    r"a substance called (.+)": r"It is \1.",
}


class House(Place):
    """A house in which one variation is played."""

    def begin(self, task: str, seed: int) -> tuple[str, str, float]:
        """Load the variation and look around, as the package's own reset does."""
        load(self.game, task, seed, golden=False)
        text, score, _ = self.act("look around")
        return self.game("getTaskDescription"), text, score

    def act(self, action: str) -> tuple[str, float, Outcome | None]:
        """The package's own step lists all valid actions as well, which takes ten times as long."""
        text = self.game("step", action).strip()
        score, outcome = round(self.game("getScore"), 2), None
        if score >= 1:
            outcome = Outcome.SOLVED
        elif score < 0 or self.game("getCompleted"):
            outcome = Outcome.FAILED
        return text, score, outcome


def load(game: Game, task: str, seed: int, golden: bool) -> None:
    """Start a variation. A task's first load in a game draws more random numbers than the later ones do."""
    for _ in range(1 if task in game.met else 2):
        game.seed()
        game("load", task, seed, "easy", golden)
    game.met.add(task)


def think(text: str, action: str) -> str:
    """A thought for a golden action, from the text that is seen."""
    if meant := action.isdigit() and re.search(rf"^{action}:\s*(.+)$", text, re.MULTILINE):
        return f"I mean: {meant[1]}."
    seen = [
        found.expand(words)
        for sight, words in SIGHTS.items()
        if (found := re.fullmatch(sight, text))
    ]
    return " ".join([*seen, in_words(WORDS, action)])


@functools.lru_cache(4096)
def golden_path(task: str, seed: int) -> tuple[str, ...]:
    """The package's own solution of a variation."""

    def solve(game: Game) -> tuple[str, ...]:
        load(game, task, seed, golden=True)
        return tuple(game("getGoldActionSequence"))

    return JAVA.ask(solve)


class ScienceWorld(JavaWorld):
    """The tasks as `minidpo` sees them."""

    name = "scienceworld"
    suites = {"all": tuple(TASKS)}
    experts = tuple(TASKS)
    java, place = JAVA, House
    system_prompt = SYSTEM_PROMPT

    def instances(self, task: str, split: str) -> Sequence[int]:
        """The numbers of its variations; they differ by task."""
        train, dev, test, _ = TASKS[task]
        return {
            "demos": range(0, train, 3),
            "rollouts": [n for n in range(train) if n % 3],
            "validation": range(train, train + dev),
            "test": range(train + dev, train + dev + min(test, 10)),
        }[split]

    def expert(self, task: str, seed: int) -> Expert:
        """It follows the variation's golden path."""
        return follow(lambda: golden_path(task, seed), think)

    def step_limit(self, task: str) -> int:
        """Twice the longest golden path of its training variations, at most 120."""
        return min(120, 2 * TASKS[task].longest)


WORLD = ScienceWorld()
