"""Prints the table of `tasks` again, from the game; ten minutes.

python -m envs.scienceworld.measure
"""

from envs.jvm import Game
from envs.scienceworld import JAVA, golden_path
from envs.scienceworld.tasks import TASKS

SAMPLE = 30  # training variations of a task, evenly spread, whose golden paths are measured


def main() -> None:
    """A line for each task."""
    for task in TASKS:
        train, dev, test = JAVA.ask(lambda game, task=task: splits(game, task))
        sample = {round(n * (train - 1) / (SAMPLE - 1)) for n in range(SAMPLE)}
        longest = max(len(golden_path(task, variation)) for variation in sample)
        print(f'    "{task}": Variations({train}, {dev}, {test}, longest={longest}),', flush=True)


def splits(game: Game, task: str) -> list[int]:
    """How many variations each official split has."""
    game("load", task, 0, "easy", False)
    return [len(game(f"getVariations{split}")) for split in ("Train", "Dev", "Test")]


if __name__ == "__main__":
    main()
