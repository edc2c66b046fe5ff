"""TextWorldExpress (Jansen and Côté 2022, arXiv:2208.01174): eight small text games.

Every game has its package's default parameters. A seed is the package's own: of the official training seeds (0 to
999) every third is for demos, the others for rollouts; validation is the official dev split (10,000 to 10,999) and
test the official test split (20,000 to 20,999).

    task: Your task is to do exactly what Simon says.
    page:
    Simon says, 'slice grape'.

Reward: the highest score so far, 0 to 1. Solved is the full score; a game may end before it, as failed.

The game is the package `textworld_express` 1.1.0 (Apache-2.0), which needs Java (`envs/jvm.py`).
"""

import functools
import json

from envs.golden import follow, in_words
from envs.jvm import Game, Java, JavaWorld, Place
from envs.protocol import Expert, Outcome

JAVA = Java(
    "textworld_express",
    "1.1.0",
    "textworld-express.jar",
    "textworldexpress.runtime.PythonInterface",
)
# The longest golden path of the first 200 training seeds.
LONGEST = {
    "cookingworld": 114,
    "twc": 19,
    "coin": 21,
    "mapreader": 13,
    "arithmetic": 5,
    "sorting": 10,
    "simonsays": 5,
    "peckingorder": 9,
}
SEEDS = {
    "demos": range(0, 1000, 3),
    "rollouts": [seed for seed in range(1000) if seed % 3],
    "validation": range(10_000, 11_000),
    "test": range(20_000, 21_000),
}
# The package solves these games by walks whose random numbers have no seed: their golden paths differ at each start.
WALKERS = {
    "twc": "textworldexpress.goldagent.TWCGoldAgent",
    "coin": "textworldexpress.goldagent.CoinGoldAgent",
}
WALKS = 20  # of which the shortest is shown
FOLDS = ("train", "dev", "test")  # by ten thousands
SYSTEM_PROMPT = """You play a text game. Answer:
thought: what the task needs next
action: look around
or inventory, task, examine OBJ, read OBJ, open OBJ, close OBJ, open door to north, move north (south, east, west), \
take OBJ, put OBJ in OBJ, cook OBJ in OBJ, chop OBJ, slice OBJ, dice OBJ, prepare meal, eat OBJ. Name things as the \
text does: take 6 pineapples. Some games have commands of their own, which their text gives."""
WORDS = {
    r"look around": "I see what is here.",
    r"task": "I read the task again.",
    r"inventory": "I see what I have.",
    r"move (.+)": r"What I need is on to the \1.",
    r"open door to (.+)": r"The way \1 must be open.",
    r"open (.+)": r"Something that I need may be in the \1.",
    r"close (.+)": r"I have seen what is in the \1.",
    r"read (.+)": r"The \1 says what to do.",
    r"take (.+)": r"The task needs the \1.",
    r"put (.+) in (.+)": r"The \1 belongs in the \2.",
    r"cook (.+) in (.+)": r"The recipe wants the \1 cooked, and the \2 does it.",
    r"(chop|slice|dice) (.+)": r"The recipe wants to \1 the \2.",
    r"prepare meal": "All ingredients are ready.",
    r"eat meal": "The meal is ready.",
    r"(.+)": r"The next step is: \1.",
}


class Room(Place):
    """A place in which one game is played."""

    def begin(self, task: str, seed: int) -> tuple[str, str, float]:
        """Make the game of this seed."""
        text, score, _ = shown(new_game(self.game, task, seed, golden=False))
        return self.game("getTaskDescription"), text, score

    def act(self, action: str) -> tuple[str, float, Outcome | None]:
        """One command."""
        return shown(self.game("stepJSON", action))


def new_game(game: Game, task: str, seed: int, golden: bool) -> str:
    """Start the game. Returns what it says, as JSON."""
    game.seed()
    game("load", task, "")
    return game("generateNewGameJSON", seed, FOLDS[seed // 10_000], golden)


def shown(said: str) -> tuple[str, float, Outcome | None]:
    """Text, score and outcome, from what the game says."""
    answer = json.loads(said)
    outcome = None
    if answer["score"] >= 1 or answer["tasksuccess"]:
        outcome = Outcome.SOLVED
    elif answer["taskfailure"]:
        outcome = Outcome.FAILED
    return answer["observation"].strip(), answer["score"], outcome


def think(text: str, action: str) -> str:
    """A thought for a golden action, from the text that is seen."""
    if text.endswith(f"Simon says, '{action}'."):
        return "Simon says so."
    return in_words(WORDS, action)


@functools.lru_cache(4096)
def golden_path(task: str, seed: int) -> tuple[str, ...]:
    """The package's own solution of a game; of a game with a walker its shortest walk. Empty if it has none."""

    def solve(game: Game) -> tuple[str, ...]:
        if task in WALKERS:
            walks = [walk(game, task, seed, number) for number in range(WALKS)]
            return min(filter(None, walks), key=len, default=())
        new_game(game, task, seed, golden=True)
        return tuple(game("getGoldActionSequence"))

    return JAVA.ask(solve)


def walk(game: Game, task: str, seed: int, number: int) -> tuple[str, ...]:
    """What the package's walker did in one walk, which this number draws; empty if it did not solve the game."""
    new_game(game, task, seed, golden=False)
    walker = game.new(WALKERS[task], game("game"))
    game.seed(number)
    done = game.call(walker, "mkGoldPath", game.random)
    return tuple(done._2())[1:] if done._1() else ()  # new_game has looked around before


class TextWorldExpress(JavaWorld):
    """The games as `minidpo` sees them."""

    name = "textworld_express"
    suites = {"all": tuple(LONGEST)}
    seeds = SEEDS
    experts = tuple(LONGEST)
    java, place = JAVA, Room
    system_prompt = SYSTEM_PROMPT

    def expert(self, task: str, seed: int) -> Expert:
        """It follows the game's golden path."""
        return follow(lambda: golden_path(task, seed), think)

    def step_limit(self, task: str) -> int:
        """Twice the longest golden path, at most 120."""
        return min(120, 2 * LONGEST[task])


WORLD = TextWorldExpress()
