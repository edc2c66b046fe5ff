"""What a training step loses to a program beside it, by how its threads wait for each other: awake or asleep.

    python benchmarks/shared_cores.py

A step is the gradient of a random conversation in SmolLM2's shape (random weights), with as many threads as
PyTorch takes. `awake` is OpenMP's default, which spins before it sleeps; `asleep` is OMP_WAIT_POLICY=passive.
Each is timed alone, beside a loop that keeps one core busy, and beside a second training of its
own kind; they take turns, and the faster turn counts. Writes benchmarks/results/shared_cores.json.
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

import checkpoints  # noqa: E402
from records import RESULTS, record  # noqa: E402

from minidpo.data.batch import batch_scores, collate  # noqa: E402
from minidpo.learning.nano_base import initialise  # noqa: E402
from minidpo.memory import lora  # noqa: E402
from minidpo.memory.machine import multiplies_bfloat16  # noqa: E402
from minidpo.model.chat import Dialogue  # noqa: E402
from minidpo.model.decoder import Transformer  # noqa: E402

BUSY = [sys.executable, "-c", "print('ready', flush=True)\nwhile True: pass"]


def steps(shape: str, tokens: int, seconds: float) -> float:
    """Seconds of a step: the median of those that fit into `seconds`, of two at least."""
    dtype = torch.bfloat16 if multiplies_bfloat16() else torch.float32
    model = Transformer(checkpoints.SHAPES[shape]).to(dtype)
    initialise(model, torch.Generator().manual_seed(0))
    model.requires_grad_(False).eval()
    lora.attach(model, lora.LoRAConfig(), torch.Generator().manual_seed(1))
    ids = torch.randint(2, 4096, (tokens,), generator=torch.Generator().manual_seed(2)).tolist()
    batch = collate([[Dialogue(ids, [-1] * (tokens // 2) + [0] * (tokens - tokens // 2))]])
    took = []
    for n in range(1_000_000):
        began = time.perf_counter()
        batch_scores(model, batch).sum().backward()
        took.append(time.perf_counter() - began)
        if n == 0:  # the first one warms up
            print("ready", flush=True)
            took, until = [], time.perf_counter() + seconds
        elif time.perf_counter() > until and len(took) >= 2:
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
    training = [sys.executable, __file__, "--step", "--shape", args.shape, "--tokens", str(args.tokens)]
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    figures: dict[str, float] = {"threads": torch.get_num_threads()}
    ways = {"awake": {}, "asleep": {"OMP_WAIT_POLICY": "passive"}}
    companions = {"alone": None, "beside_a_loop": BUSY, "twice": [*training, "--seconds", "1000000"]}
    for (name, command), _, (way, policy) in product(companions.items(), range(args.turns), ways.items()):
        measured = [*training, "--seconds", str(args.seconds)]
        with beside(command, env | policy):
            said = subprocess.check_output(measured, env=env | policy, text=True)
        took = float(said.split()[-1])
        figures[f"{way}_{name}_s"] = min(took, figures.get(f"{way}_{name}_s", took))
        print(f"{way}, {name}: {took:.2f} s a step", flush=True)
    record(args.out, figures, {"torch": torch.__version__})


if __name__ == "__main__":
    main()
