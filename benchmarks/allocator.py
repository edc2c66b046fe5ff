"""What a CPU's memory allocator costs a training whose conversations all have lengths of their own.

    python benchmarks/allocator.py
    python benchmarks/allocator.py --preload /usr/lib/x86_64-linux-gnu/libjemalloc.so.2

A pass is the gradient of a random conversation in SmolLM2's shape (random weights), 200 to 3,000 tokens long.
Each way has a process of its own and the same conversations. `exact`: in rows as long as they are. `padded`:
in rows of few lengths (`memory/machine.row_length`), as in trainings. `pages`: padded, and blocks from 128
KiB on get pages of their own, as with --machine.memory-gib. `preload`: padded, with another allocator.
Measured are tokens a second, padding not counted, in the first and in the last third of the passes, the share
of processor time that the kernel takes, and the most memory. Writes benchmarks/results/allocator.json.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))

import checkpoints
from records import RESULTS, record

from minidpo.data import batch as batches
from minidpo.memory.machine import MIB, Machine, dtype_on, limit_allocator


def passes(way: str, shape: str, count: int) -> dict[str, float]:
    """What is measured of three times `count` passes, made in this way."""
    if way == "exact":
        batches.row_length = lambda tokens: tokens
    if way == "pages":
        limit_allocator(Machine(), torch.device("cpu"))
    rng, speeds = random.Random(3), []
    model = checkpoints.with_adapter(
        checkpoints.SHAPES[shape], dtype_on(Machine(dtype="fast"), cuda=False)
    )
    for _ in range(3):
        lengths = [round(200 * 15 ** rng.random()) for _ in range(count)]
        began = time.perf_counter()
        for seed, tokens in enumerate(tqdm(lengths, way, unit="pass")):
            batch = batches.collate([[checkpoints.conversation(tokens, seed)]])
            batches.batch_scores(model, batch).sum().backward()
        speeds.append(sum(lengths) / (time.perf_counter() - began))
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "first_tokens_per_s": speeds[0],
        "last_tokens_per_s": speeds[-1],
        "kernel_share": used.ru_stime / (used.ru_stime + used.ru_utime),
        "peak_mib": used.ru_maxrss * 1024 / MIB,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="smollm2", choices=checkpoints.SHAPES)
    parser.add_argument("--passes", type=int, default=30, help="in each third")
    parser.add_argument(
        "--preload", type=Path, help="an allocator to measure, too: a shared library"
    )
    parser.add_argument("--way", help="used by the script itself")
    parser.add_argument("--out", type=Path, default=RESULTS / "allocator.json")
    args = parser.parse_args()
    if args.preload is not None and not args.preload.is_file():  # ld.so would go on without it
        parser.error(f"--preload {args.preload}: no such file")
    if args.way:
        print(json.dumps(passes(args.way, args.shape, args.passes)))
        return
    figures: dict[str, float] = {"passes": args.passes, "threads": torch.get_num_threads()}
    for way in ("exact", "padded", "pages", *["preload"] * (args.preload is not None)):
        env = os.environ | {"LD_PRELOAD": str(args.preload)} if way == "preload" else os.environ
        said = subprocess.check_output(
            [
                sys.executable,
                __file__,
                "--way",
                way,
                "--shape",
                args.shape,
                "--passes",
                str(args.passes),
            ],
            env=env,
            text=True,
        )
        figures |= {f"{way}_{name}": value for name, value in json.loads(said).items()}
        print(way, said, flush=True)
    record(
        args.out,
        figures,
        {"torch": torch.__version__, **({"preload": args.preload.name} if args.preload else {})},
    )


if __name__ == "__main__":
    main()
