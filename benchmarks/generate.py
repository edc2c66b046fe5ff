"""The sides of sampling in real_model.py and gpu.py: our policy's sampler, the floor, and peer_generate.py's.

Prompts of 192 ids, 48 new tokens each: a row alone, 16 and 64 greedily, and at temperature 1 eight episodes of
each of eight instances, as rollouts have it; there ours reads each prompt once. Each side runs in a process of
its own. `floor` is the time of the products with the weights alone, without attention, sampling or the Python in
between. The ratios with random weights in docs/measured.md (results/generate.json) were measured by v1's form of
this script.
"""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from answers import answers_of  # noqa: E402
from works import ENVIRONMENTS  # noqa: E402

from minidpo.acting.policies import ModelPolicy, Sampling  # noqa: E402
from minidpo.memory.loading import open_policy  # noqa: E402
from minidpo.memory.machine import Machine  # noqa: E402
from minidpo.memory.packing import Packed, can_pack, saves_time  # noqa: E402
from minidpo.model import checkpoint  # noqa: E402
from minidpo.model.sampling import Request, Sampler  # noqa: E402

PROMPT, NEW = 192, 48
# instances, episodes of each, temperature
CASES = {"row": (1, 1, 0.0), "16": (16, 1, 0.0), "64": (64, 1, 0.0), "groups": (8, 8, 1.0)}


def work_of(case: str, **settings) -> dict:
    """The prompts of a case, and what a side must know besides."""
    instances, group, temperature = CASES[case]
    prompts = [[17 + (7 * n + 3 * t) % 1000 for t in range(PROMPT)] for n in range(instances)]
    prompts = [ids for ids in prompts for _ in range(group)]
    return {"prompts": prompts, "new": NEW, "temperature": temperature, **settings}


def timed(call, work: dict):
    """Seconds of each of `repeats` calls, and what the last one returned."""
    seconds = []
    for _ in range(work["repeats"]):
        began = time.perf_counter()
        found = call()
        seconds.append(time.perf_counter() - began)
    return seconds, found


def ours(work: dict) -> dict:
    """This side: a policy on as many pages as there are prompts."""
    rng, rows = random.Random(1), len(work["prompts"])
    machine = Machine(**work["machine"], pages=rows)
    model, chat, name = open_policy(work["model"], None, machine)
    sampling = Sampling(temperature=work["temperature"])
    model = ModelPolicy(model, chat, name, "", sampling, pages=rows).sampler.model
    requests = [
        Request(tuple(ids), tuple(rng.random() for _ in range(work["new"])))
        for ids in work["prompts"]
    ]
    seconds = []
    for repeat in range(1 + work["repeats"]):  # the first warms up, with fewer tokens
        # anew: a sampler remembers what was said. The answers are of one length
        sampler = Sampler(model, rows, stop=-1, temperature=work["temperature"])
        asked = requests if repeat else [Request(requests[0].ids[:9], requests[0].uniforms[:2])]
        began = time.perf_counter()
        answers = answers_of(sampler, asked)
        seconds.append(time.perf_counter() - began)
    return {"seconds": seconds[1:], "answers": [list(answer.ids) for answer in answers]}


def floor(work: dict) -> dict:
    """The matrix products of the case by themselves."""
    dtype, rows = getattr(torch, work["dtype"]), len(work["prompts"])
    model = checkpoint.load(work["model"], dtype).requires_grad_(False)
    weights = [m.weight for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear)]
    packing = can_pack(model.head_weight) and saves_time(model, rows)

    def product(weight):
        return Packed(weight, None) if packing else lambda x: x @ weight.t()

    body, head = [product(weight) for weight in weights], product(model.head_weight)
    distinct = len({tuple(ids) for ids in work["prompts"]})

    def passes(layers, widths, inputs: int, times: int) -> None:
        xs = [torch.randn(inputs, n).to(torch.float32 if packing else dtype) for n in widths]
        for _ in range(times):
            for layer, x in zip(layers, xs):
                layer(x)

    def all_of_it() -> None:
        widths = [weight.shape[1] for weight in weights]
        passes(body, widths, PROMPT, distinct)
        passes(body, widths, rows, work["new"] - 1)
        passes([head], [model.config.hidden_size], rows, work["new"])

    with torch.inference_mode():
        passes(body, [weight.shape[1] for weight in weights], 9, 1)  # warms up
        return {"seconds": timed(all_of_it, work)[0]}


def run_side(side: str, python: str, work: dict) -> dict:
    """The result of a process of its own."""
    whose = "ours" if side in ("minidpo", "floor") else "peer"
    script = {"ours": "generate.py", "peer": "peer_generate.py"}[whose]
    done = subprocess.run(
        [python, str(ROOT / "benchmarks" / script), side, json.dumps(work)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**ENVIRONMENTS[whose], "HF_HUB_OFFLINE": "1"},
    )
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":  # a side, in a process of its own
    side, work = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(work["threads"])
    print(json.dumps({"minidpo": ours, "floor": floor}[side](work)))
