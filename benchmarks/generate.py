"""Tokens a second: our sampler against transformers' `generate`, on the same weights and prompts.

    python benchmarks/generate.py --peer-python /path/to/python/with/transformers [--device cuda]

Prompts of 192 random ids, 48 new tokens each, batches of 1, 16 and 64, greedy; the answers of both sides must
be the same tokens, or there is no result. Then, at temperature 1, a batch of 64 that is eight episodes of
each of eight instances, as rollouts have it: there ours reads each prompt once. The sides take turns in
processes of their own; on a CPU each runs with 1 and with all threads, and its faster one counts. `floor` is
the time of the products with the weights alone, without attention, sampling or the Python in between; `limit`
is the ratio of a program that did nothing else. Writes benchmarks/results/generate.json (generate-cuda.json
on a GPU).
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from records import RESULTS, record

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from answers import generate  # noqa: E402

from benchmarks.make_nano import initialise  # noqa: E402
from minidpo.memory.packing import Packed, can_pack, pack  # noqa: E402
from minidpo.model import checkpoint  # noqa: E402
from minidpo.model.decoder import ModelConfig, Transformer  # noqa: E402
from minidpo.model.sampling import Request  # noqa: E402

SHAPE = ModelConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    max_position_embeddings=4096,
)
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
    if len(work["prompts"]) > 1 or work["dtype"] == "bfloat16":  # as a policy does
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
    packing = can_pack(model.head_weight) and (len(work["prompts"]) > 1 or dtype == torch.bfloat16)
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


def case(name: str, base: Path, args: argparse.Namespace) -> tuple[dict, dict]:
    """The figures of one case, and the other side's versions."""
    instances, group, temperature = CASES[name]
    rng = random.Random(0)
    prompts = [
        [rng.randrange(2, SHAPE.vocab_size) for _ in range(PROMPT)] for _ in range(instances)
    ]
    work = {
        "base": str(base),
        "prompts": [ids for ids in prompts for _ in range(group)],
        "new": NEW,
        "temperature": temperature,
        "repeats": args.repeats,
        "device": args.device,
        "dtype": args.dtype,
    }
    threads = sorted({1, os.cpu_count()}) if args.device == "cpu" else [os.cpu_count()]
    sides = ["transformers", "minidpo"]
    if (args.device, args.dtype) == ("cpu", "float32"):
        sides.append("floor")
    took: dict[str, dict[int, list[float]]] = {side: {n: [] for n in threads} for side in sides}
    said, versions = {}, {}
    for _ in range(args.turns):
        for side in sides:
            for n in threads:
                python = args.peer_python if side == "transformers" else sys.executable
                run = run_side(side, python, {**work, "threads": n})
                took[side][n] += run["seconds"]
                said[side] = run["answers"]
                versions |= run["versions"]
    if temperature == 0 and said["minidpo"] != said["transformers"]:
        raise SystemExit(
            f"{name}: the two sides do not say the same, so their times cannot be compared"
        )
    best = {side: min(map(statistics.median, runs.values())) for side, runs in took.items()}
    figures = {
        f"{name}_{side}_tokens_per_s": len(work["prompts"]) * NEW / s for side, s in best.items()
    }
    figures[f"{name}_ratio"] = best["transformers"] / best["minidpo"]
    if "floor" in best:
        figures[f"{name}_limit"] = best["transformers"] / best["floor"]
    return figures, versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer-python", default=sys.executable, help="a Python with transformers")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls in a process")
    parser.add_argument(
        "--turns", type=int, default=3, help="processes of each side and number of threads"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument(
        "--side", nargs=2, metavar=("SIDE", "WORK"), help="used by the script itself"
    )
    args = parser.parse_args()
    if args.side:
        print(json.dumps({"minidpo": ours, "floor": floor}[args.side[0]](json.loads(args.side[1]))))
        return
    figures, versions = {}, {}
    with tempfile.TemporaryDirectory(prefix="generate_") as folder:
        model = Transformer(SHAPE)
        initialise(model, torch.Generator().manual_seed(0))
        checkpoint.save(model, Path(folder), ROOT / "minidpo" / "nano" / "tokenizer.json")
        for name in CASES:
            more, versions = case(name, Path(folder), args)
            figures |= more
            print(name, {key: round(value, 2) for key, value in more.items()}, flush=True)
    device = torch.cuda.get_device_name() if args.device == "cuda" else None
    suffix = "-cuda" * (args.device == "cuda") + "-bfloat16" * (args.dtype == "bfloat16")
    record(
        args.out or RESULTS / f"generate{suffix}.json",
        figures,
        versions | {"minidpo_torch": torch.__version__},
        device,
    )


if __name__ == "__main__":
    main()
