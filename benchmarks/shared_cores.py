"""What a program beside it costs minidpo, by how PyTorch's threads wait for each other.

    python benchmarks/shared_cores.py

Two kinds of work: `train`, the gradient of a random conversation in SmolLM2's shape (random weights), and
`play`, episodes of SmolLM2 with the shipped adapter on real pages, 32 at once. Each alone, and beside a loop that
keeps one core busy. Ways to wait: `libgomp` (its own default, 300,000 spins), a GOMP_SPINCOUNT, and `passive`
(OMP_WAIT_POLICY). They take turns. Recorded are seconds of a step and of an episode, the fastest and the
slowest turn, because who gets a core is chance; and of minidpo's own setting, `ours`:

    alone_ratio   fastest alone, over libgomp's
    loss_left     of what the loop costs libgomp's default, the share that it still costs, slowest turns

Writes benchmarks/results/shared_cores.json.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import checkpoints  # noqa: E402
import rollout  # noqa: E402
import torch  # noqa: E402
from records import RESULTS, record  # noqa: E402

from minidpo.data.batch import batch_scores, collate  # noqa: E402
from minidpo.memory.machine import Machine, dtype_on  # noqa: E402
from minidpo.model.checkpoint import SMOLLM2  # noqa: E402
from minidpo.system.threads import SPINS, VARIABLES  # noqa: E402 (before PyTorch)

BUSY = [sys.executable, "-c", "print('ready', flush=True)\nwhile True: pass"]
WAYS = {
    "libgomp": {"GOMP_SPINCOUNT": "300000"},
    "ours": {"GOMP_SPINCOUNT": str(SPINS)},
    "1000": {"GOMP_SPINCOUNT": "1000"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
}


def train(seconds: float) -> float:
    """Seconds of a step: the median of those that fit into `seconds`, of two at least."""
    dtype = dtype_on(Machine(dtype="fast"), cuda=False)
    model = checkpoints.with_adapter(checkpoints.SHAPES["smollm2"], dtype)
    batch = collate([[checkpoints.conversation(256, seed=2)]])
    batch_scores(model, batch).sum().backward()  # warms up
    took, until = [], time.perf_counter() + seconds
    while len(took) < 2 or time.perf_counter() < until:
        began = time.perf_counter()
        batch_scores(model, batch).sum().backward()
        took.append(time.perf_counter() - began)
    return median(took)


def play(seconds: float) -> float:
    """Seconds of an episode, of as many as are played in about twice `seconds`."""
    tasks, adapter = (
        ("click-button", "enter-text", "click-checkboxes"),
        ROOT / "minidpo" / "miniwob",
    )
    count = max(1, round(seconds / 3))
    found = asyncio.run(rollout.measure(32, count, tasks, model=SMOLLM2, adapter=adapter))
    return 1 / found["episodes_per_s"]


@contextmanager
def beside(command: list[str] | None):
    """A program that runs meanwhile, and is ready."""
    if command is None:
        yield
        return
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        program.stdout.readline()
        try:
            yield
        finally:
            program.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="for each case and turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument(
        "--ways", default=",".join(WAYS), help="to wait; libgomp and ours among them"
    )
    parser.add_argument("--work", choices=("train", "play"), help="used by the script itself")
    parser.add_argument("--out", type=Path, default=RESULTS / "shared_cores.json")
    args = parser.parse_args()
    works = {"train": train, "play": play}
    if args.work:
        print(works[args.work](args.seconds))
        return
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    figures: dict[str, float] = {"threads": torch.get_num_threads()}
    companions = {"alone": None, "beside": BUSY}
    for (name, command), work, _, (way, setting) in product(
        companions.items(),
        works,
        range(args.turns),
        [(way, WAYS[way]) for way in args.ways.split(",")],
    ):
        again = [sys.executable, __file__, "--work", work, "--seconds", str(args.seconds)]
        with beside(command):
            said = subprocess.check_output(again, env=clean | setting, text=True)
        took = float(said.split()[-1])
        for which, of in (("fastest", min), ("slowest", max)):
            key = f"{work}_{way}_{name}_{which}_s"
            figures[key] = of(took, figures.get(key, took))
        print(f"{work}, {way}, {name}: {took:.3f} s", flush=True)
    for work in works:
        alone, both = figures[f"{work}_libgomp_alone_fastest_s"], {}
        for way in ("libgomp", "ours"):
            both[way] = figures[f"{work}_{way}_beside_slowest_s"] - alone
        figures[f"{work}_alone_ratio"] = figures[f"{work}_ours_alone_fastest_s"] / alone
        figures[f"{work}_loss_left"] = both["ours"] / both["libgomp"]
    record(args.out, figures, {"torch": torch.__version__})


if __name__ == "__main__":
    main()
