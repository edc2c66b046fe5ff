"""What a training step loses to a program beside it, by how its threads wait for each other: awake or asleep.

    python benchmarks/shared_cores.py

A step is the gradient of a random conversation in SmolLM2's shape (random weights), with as many threads as
PyTorch takes. `awake` is OpenMP's default, which spins before it sleeps; `asleep` is OMP_WAIT_POLICY=passive.
Each is timed alone, beside a loop that keeps one core busy, and beside a second training of its own kind.
They take turns; the fastest and the slowest turn are recorded, because who gets a core is chance. Writes
benchmarks/results/shared_cores.json.
"""

import argparse
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import checkpoints
from records import RESULTS, record

from minidpo.data.batch import batch_scores, collate
from minidpo.memory.machine import Machine, dtype_on

BUSY = [sys.executable, "-c", "print('ready', flush=True)\nwhile True: pass"]


def steps(shape: str, tokens: int, seconds: float) -> float:
    """Seconds of a step: the median of those that fit into `seconds`, of two at least."""
    dtype = dtype_on(Machine(dtype="fast"), cuda=False)
    model = checkpoints.with_adapter(checkpoints.SHAPES[shape], dtype)
    batch = collate([[checkpoints.conversation(tokens, seed=2)]])
    took = []
    batch_scores(model, batch).sum().backward()  # warms up
    print("ready", flush=True)
    until = time.perf_counter() + seconds
    while len(took) < 2 or time.perf_counter() < until:
        began = time.perf_counter()
        batch_scores(model, batch).sum().backward()
        took.append(time.perf_counter() - began)
    return median(took)


@contextmanager
def beside(command: list[str] | None, env: dict[str, str]):
    """A program that runs meanwhile, and is ready."""
    if command is None:
        yield
        return
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as program:
        program.stdout.readline()
        try:
            yield
        finally:
            program.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="smollm2", choices=checkpoints.SHAPES)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each case and turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--step", action="store_true", help="used by the script itself")
    parser.add_argument("--out", type=Path, default=RESULTS / "shared_cores.json")
    args = parser.parse_args()
    if args.step:
        print(steps(args.shape, args.tokens, args.seconds))
        return
    training = [
        sys.executable,
        __file__,
        "--step",
        "--shape",
        args.shape,
        "--tokens",
        str(args.tokens),
    ]
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    figures: dict[str, float] = {"threads": torch.get_num_threads()}
    ways = {"awake": {}, "asleep": {"OMP_WAIT_POLICY": "passive"}}
    companions = {
        "alone": None,
        "beside_a_loop": BUSY,
        "twice": [*training, "--seconds", "1000000"],
    }
    for (name, command), _, (way, policy) in product(
        companions.items(), range(args.turns), ways.items()
    ):
        measured = [*training, "--seconds", str(args.seconds)]
        with beside(command, env | policy):
            said = subprocess.check_output(measured, env=env | policy, text=True)
        took = float(said.split()[-1])
        for which, of in (("fastest", min), ("slowest", max)):
            key = f"{way}_{name}_{which}_s"
            figures[key] = of(took, figures.get(key, took))
        print(f"{way}, {name}: {took:.2f} s a step", flush=True)
    record(args.out, figures, {"torch": torch.__version__})


if __name__ == "__main__":
    main()
