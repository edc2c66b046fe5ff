"""A model of Qwen2-7B's shape, loaded, trained and let act with little memory: how little?

    python benchmarks/qwen2_7b.py --make                 on a CPU: loading, a step of SFT, a step of DPO
    python benchmarks/qwen2_7b.py --make --device cuda   on a GPU held to 7.6 GiB: DPO, as TRL's; rollouts

`--make` writes the checkpoint first, where --folder does not hold it: random bf16 weights, 15 GB in four
files as the hub has them, with the shipped model's tokenizer. Every part runs in a process of its own. On a
CPU its peak is the kernel's count of all that it had in memory, the parts of files that it read included, and
the steps are `train.py sft` and `train.py dpo`, as a user starts them, on one short episode and pair.
On a GPU both sides train on the same pairs of 2 x 1,024 tokens from the same first adapter: TRL with PEFT and
bitsandbytes (NF4 with double quantisation, 8-bit AdamW, gradient checkpointing) in the Python that
--peer-python names; memory is what PyTorch's allocator gave out at most (more in qwen2_7b_cuda.py). Writes
benchmarks/results/qwen2_7b.json (qwen2_7b-cuda.json on a GPU).
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from records import RESULTS, record
from sides import memory_mib

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
GIB = 2**30
PAGE = 'text "Sign in"\ninput text #user [1]\nbutton "Submit" [2]'


def case_load(folder: Path, cache: Path) -> dict:
    """Seconds of a load, from the checkpoint or, where there is one, from the cache."""
    import torch

    from minidpo.memory.quantised import load_quantised

    before, began = memory_mib("VmRSS"), time.perf_counter()
    model = load_quantised(folder, torch.bfloat16, cache=cache)
    return {
        "seconds": time.perf_counter() - began,
        "held_gib": (memory_mib("VmRSS") - before) / 1024,
        "bytes": sum(tensor.nbytes for tensor in model.state_dict().values()),
    }


def child(command: list[str], log: Path) -> tuple[float, float, str]:
    """Run it. Peak memory in GiB, as the kernel counted it, seconds, and what it printed."""
    began = time.perf_counter()
    with open(log, "w") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TQDM_DISABLE": "1"},
        )
        _, status, usage = os.wait4(process.pid, 0)
    text = log.read_text()
    if status:
        raise SystemExit(f"{' '.join(command)} failed:\n{text}")
    return usage.ru_maxrss * 1024 / GIB, time.perf_counter() - began, text


def on_cpu(folder: Path, work: Path) -> dict[str, float]:
    """The figures of loading, SFT and DPO, each in its own process."""
    from minidpo.data.episodes import Episode, Turn, Writer
    from minidpo.data.prompt import write

    cache = folder / "nf4"
    shutil.rmtree(cache, ignore_errors=True)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    said = {number: write("button", f'CLICK(ref="{number}")') for number in (1, 2)}
    for file, numbers in (("demos.jsonl", (2,)), ("rollouts.jsonl", (2, 1))):
        with Writer(work / file) as writer:
            for index, number in enumerate(numbers):
                outcome = "solved" if number == 2 else "failed"
                writer.add(
                    Episode(
                        "click-button",
                        1,
                        index,
                        "Click on Submit.",
                        (Turn(PAGE, said[number], None),),
                        outcome,
                        float(number == 2),
                        "script",
                    )
                )
    figures = {
        "checkpoint_gib": sum(path.stat().st_size for path in folder.glob("*.safetensors")) / GIB
    }
    case = [sys.executable, __file__, "--case", str(folder), str(cache)]
    for name in ("quantise", "cached_load"):
        peak, _, text = child(case, work / f"{name}.log")
        seen = json.loads(text.splitlines()[-1])
        figures |= {
            f"{name}_s": seen["seconds"],
            f"{name}_peak_gib": peak,
            "weights_gib": seen["bytes"] / GIB,
            f"{name}_held_gib": seen["held_gib"],
        }
        print(f"{name}: {seen['seconds']:.1f} s, peak {peak:.2f} GiB", flush=True)
    machine = (
        f"--model {folder} --machine.device cpu --machine.dtype bfloat16 --machine.quantize nf4 "
        f"--machine.cache {cache} --machine.recompute --machine.memory-gib 8 "
        "--machine.micro-tokens 256 --machine.tree-tokens 256"
    )
    adapter = f"--adapter {work / 'sft' / 'adapter'}"
    for stage, data, more in (("sft", "demos.jsonl", ""), ("dpo", "rollouts.jsonl", adapter)):
        out = work / stage
        options = {"steps": 1, "batch": 1, "warmup": 0, "optimizer": "adamw8bit"}
        words = " ".join(f"--{stage}.{name} {value}" for name, value in options.items())
        words = f"train.py {stage} {machine} --data {work / data} {more} {words} --out {out}"
        command = [sys.executable, *shlex.split(words)]
        peak, seconds, _ = child(command, work / f"{stage}.log")
        step = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
        figures |= {
            f"{stage}_peak_gib": peak,
            f"{stage}_s": seconds,
            f"{stage}_loss": step["loss"],
            f"{stage}_tokens_per_s": step["tokens_per_s"],
        }
        print(f"{stage}: {seconds:.0f} s, peak {peak:.2f} GiB, loss {step['loss']:.4f}", flush=True)
    figures["host_peak_gib"] = max(
        value for name, value in figures.items() if name.endswith("_peak_gib")
    )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--make", action="store_true", help="write the checkpoint if it is not there"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "qwen2-7b-random")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "runs" / "qwen2-7b-bench", help="emptied first"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--peer-python",
        default=sys.executable,
        help="on a GPU: a Python with trl, peft, transformers, bitsandbytes",
    )
    parser.add_argument("--parts", default="dpo,apart,rollouts", help="on a GPU: which of these")
    parser.add_argument(
        "--case", nargs=2, type=Path, metavar=("FOLDER", "CACHE"), help="used by the script itself"
    )
    args = parser.parse_args()
    if args.case:
        print(json.dumps(case_load(*args.case)))
        return
    if args.device == "cuda":
        import qwen2_7b_cuda as gpu

        parts = args.parts.split(",")
        if problem := gpu.trouble(args.peer_python, parts):
            sys.exit(f"qwen2_7b.py: {problem}")
    if not (args.folder / "config.json").is_file():
        if not args.make:
            parser.error(f"{args.folder} holds no checkpoint: --make writes it")
        subprocess.run(
            [
                sys.executable,
                "-c",
                "import sys; sys.path[:0] = sys.argv[1:3]\n"
                "from pathlib import Path; from checkpoints import SHAPES, make\n"
                "make(Path(sys.argv[3]), SHAPES['qwen2-7b'])",
                str(ROOT),
                str(ROOT / "benchmarks"),
                str(args.folder),
            ],
            check=True,
        )
    if args.device == "cuda":
        gpu.record_parts(
            parts, *gpu.on_gpu(args.folder, args.work, parts, "cuda", args.peer_python)
        )
        return
    import torch

    figures = on_cpu(args.folder, args.work)
    record(RESULTS / "qwen2_7b.json", figures, {"torch": torch.__version__})


if __name__ == "__main__":
    main()
