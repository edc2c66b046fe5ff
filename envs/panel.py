"""The instances on which agents are measured, and a SHA-256 that identifies them in a result.

    python -m envs.panel scienceworld > panel.json

prints the instances that `train.py` plays by default: 20 for validation and 100 for test of each task, or all if there
are fewer.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable

import envs
from envs.protocol import World


def sha256(instances: Iterable[tuple[str, int]]) -> str:
    """SHA-256 of the JSON text [["TASK",SEED],...] of all (task, seed), each once, sorted.

    >>> sha256([("boil", 22), ("boil", 21)]) == sha256([("boil", 21), ("boil", 22)])
    True
    """
    text = json.dumps(sorted(set(instances)), separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def panel(world: World, tasks: Iterable[str], counts: dict[str, int]) -> dict:
    """For each split in `counts`: its hash, and the first seeds of each task."""
    found = {}
    for split, count in counts.items():
        seeds = {task: [*world.instances(task, split)[:count]] for task in tasks}
        digest = sha256((task, seed) for task, of_task in seeds.items() for seed in of_task)
        found[split] = {"sha256": digest, "instances": seeds}
    return found


def main() -> int:
    """Returns the exit code: 0, or 2 after one line on what is wrong."""
    parser = argparse.ArgumentParser("envs.panel", description="Print a panel as JSON.")
    parser.add_argument("world", help=", ".join(envs.names()))
    parser.add_argument("--tasks", default="all", help="suites or tasks, separated by commas")
    parser.add_argument("--validation", type=int, default=20, help="instances of each task")
    parser.add_argument("--test", type=int, default=100, help="instances of each task")
    given = parser.parse_args()
    try:
        world = envs.world(given.world)
        tasks = envs.resolve(world, given.tasks)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    counts = {"validation": given.validation, "test": given.test}
    print(json.dumps({"world": world.name, **panel(world, tasks, counts)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
