"""The sides of sampling in real_model.py and gpu.py: our sampler, transformers' `generate`, and the floor.

Prompts of 192 ids, 48 new tokens each: 1, 16 and 64 rows greedily, and at temperature 1 eight episodes of each of
eight instances, as rollouts have it; there ours reads each prompt once. Each side runs in a process of its own.
`floor` is the time of the products with the weights alone, without attention, sampling or the Python in between.
The ratios with random weights in docs/measured.md (results/generate.json) were measured by v1's form of this script.
"""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from answers import generate  # noqa: E402

from minidpo.memory.packing import Packed, can_pack, pack, saves_time  # noqa: E402
from minidpo.model import checkpoint  # noqa: E402
from minidpo.model.sampling import Request  # noqa: E402

PROMPT, NEW = 192, 48
CASES = {
    "batch1": (1, 1, 0.0),
    "batch16": (16, 1, 0.0),
    "batch64": (64, 1, 0.0),
    "groups": (8, 8, 1.0),
}


def requests_of(work: dict) -> list[Request]:
    """The prompts, and uniform numbers for their answers."""
    rng = random.Random(1)
    return [
        Request(tuple(ids), tuple(rng.random() for _ in range(work["new"])))
        for ids in work["prompts"]
    ]


def ours(work: dict) -> dict:
    """This side: seconds of each repeat, and the answers."""
    torch.set_num_threads(work["threads"])
    model = checkpoint.load(work["base"], getattr(torch, work["dtype"]), work["device"])
    model.requires_grad_(False).eval()
    if saves_time(model, len(work["prompts"])):  # as a policy does
        pack(model)
    requests, seconds = requests_of(work), []
    for _ in range(1 + work["repeats"]):
        began = time.perf_counter()
        answers = generate(model, requests, -1, work["temperature"])
        seconds.append(time.perf_counter() - began)
    return {
        "seconds": seconds[1:],
        "answers": [list(answer.ids) for answer in answers],
        "versions": {},
    }


def floor(work: dict) -> dict:
    """Seconds that the matrix products of the case take by themselves."""
    torch.set_num_threads(work["threads"])
    dtype = getattr(torch, work["dtype"])
    model = checkpoint.load(work["base"], dtype, work["device"]).requires_grad_(False)
    weights = [m.weight for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear)]
    packing = can_pack(model.head_weight) and saves_time(model, len(work["prompts"]))
    body = [Packed(w, None) if packing else lambda x, w=w: x @ w.t() for w in weights]
    rows = len(work["prompts"])
    distinct = len({tuple(ids) for ids in work["prompts"]})

    def passes(layers, shapes, inputs, times: int) -> None:
        xs = [torch.randn(inputs, n).to(torch.float32 if packing else dtype) for n in shapes]
        for _ in range(times):
            for layer, x in zip(layers, xs):
                layer(x)

    head = Packed(model.head_weight, None) if packing else lambda x: x @ model.head_weight.t()
    widths, seconds = [w.shape[1] for w in weights], []
    for _ in range(1 + work["repeats"]):
        began = time.perf_counter()
        with torch.inference_mode():
            passes(body, widths, PROMPT, distinct)
            passes(body, widths, rows, work["new"] - 1)
            passes([head], [model.config.hidden_size], rows, work["new"])
        seconds.append(time.perf_counter() - began)
    return {"seconds": seconds[1:], "answers": [], "versions": {}}


def run_side(side: str, python: str, work: dict) -> dict:
    """The result of a process of its own."""
    script = (
        [str(ROOT / "benchmarks" / "hf_generate.py")]
        if side == "transformers"
        else [__file__, "--side", side]
    )
    done = subprocess.run(
        [python, *script, json.dumps(work)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":  # a side, in a process of its own
    side, work = sys.argv[2:]
    print(json.dumps({"minidpo": ours, "floor": floor}[side](json.loads(work))))
