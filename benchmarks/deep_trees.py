"""A group whose tree is too large, three ways: whole, split into several trees, and depth first.

    python benchmarks/deep_trees.py

Eight random episodes of one instance in SmolLM2's shape (random weights, fp32): a prompt of 192 tokens, then
eight turns of 48, and at each of the first three turns every branch forks. A way computes the gradient of all
eight scores. `peak` is what tensors take at most beside the weights, counted as they are made and freed;
`split` may have as many tokens in a tree as depth first has in a path. Writes
benchmarks/results/deep_trees.json.
"""

import argparse
import os
import random
import sys
import time
from pathlib import Path

from records import RESULTS, record

sys.path.insert(0, str(Path(__file__).parents[1]))

import checkpoints
import torch

from minidpo.data.batch import batch_scores, collate
from minidpo.data.tree import grow_groups
from minidpo.memory import lora
from minidpo.memory.plan import ByteCounter
from minidpo.model.chat import Dialogue

PROMPT, TURN, TURNS, FORKS = 192, 48, 8, 3


def episodes() -> list[Dialogue]:
    """Two to the power of FORKS trajectories."""
    rng, rows = random.Random(0), [[]]

    def some(n: int) -> list[int]:
        return [rng.randrange(4000) for _ in range(n)]

    rows = [some(PROMPT)]
    for turn in range(TURNS):
        rows = [row + some(TURN) for row in rows for _ in range(1 + (turn < FORKS))]
    return [Dialogue(row, [-1] * PROMPT + [0] * (len(row) - PROMPT)) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="smollm2", choices=checkpoints.SHAPES)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "deep_trees.json")
    args = parser.parse_args()
    torch.set_num_threads(os.cpu_count())
    model = checkpoints.with_adapter(checkpoints.SHAPES[args.shape])
    rows = episodes()
    path = len(rows[0].ids)
    alone = [(n,) for n in range(len(rows))]
    groups = grow_groups(alone, [row.ids for row in rows], [("", 0)] * len(rows), path)
    split = [collate([[rows[n] for n in group.trajectories]]) for group in groups]
    ways = {
        "whole": ([collate([rows])], sys.maxsize),
        "split": (split, sys.maxsize),
        "depth_first": ([collate([rows])], 0),
    }
    figures, gradients = {"path_tokens": path, "tree_tokens": ways["whole"][0][0].tokens}, {}
    for way, (batches, walk_above) in ways.items():
        seconds = []
        for counted in [False] * args.repeats + [True]:
            for p in lora.parameters(model):
                p.grad = torch.zeros_like(p)
            began = time.perf_counter()
            with ByteCounter() if counted else torch.enable_grad() as counter:
                for batch in batches:
                    batch_scores(model, batch, walk_above).sum().backward()
            if not counted:
                seconds.append(time.perf_counter() - began)
        gradients[way] = torch.cat([p.grad.flatten() for p in lora.parameters(model)])
        figures |= {
            f"{way}_s": min(seconds),
            f"{way}_peak_mib": counter.peak / 2**20,
            f"{way}_tokens": sum(batch.tokens for batch in batches),
        }
        print(f"{way}: {min(seconds):.1f} s, {counter.peak / 2**20:.0f} MiB", flush=True)
    for way in ("split", "depth_first"):
        apart = (gradients[way] - gradients["whole"]).norm() / gradients["whole"].norm()
        assert apart < 1e-4, f"{way}: not the same gradient ({apart})"
        figures[f"{way}_gradient_differs_by"] = apart.item()
    record(args.out, figures, {"torch": torch.__version__})


if __name__ == "__main__":
    main()
