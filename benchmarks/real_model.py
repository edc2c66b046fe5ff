"""SmolLM2-135M-Instruct on a CPU: training, sampling and rollouts, beside what a user would take instead.

    python benchmarks/real_model.py --peer-python /path/to/python/with/trl+xllamacpp [--parts sft,dpo,...]

    sft        demonstrations of the demo suite's tasks, eight episodes a step, beside TRL + PEFT
    dpo        whole episodes that the shipped model played on real pages, in this model's tokens, and the 15
               pairs of a group of eight: beside TRL + PEFT, the reference cached on both sides
    sampling   192 tokens read and 48 written, for one row, 16, 64, and eight instances in groups of eight:
               beside transformers' `generate` and llama.cpp (F16 and the wheel's Q4_1)
    rollouts   `collect.py` on the demo suite's tasks, in groups of eight, with an adapter of 60 steps of SFT

Both sides have the same base, first adapter, token ids and batches, in float32 and in bfloat16; a ratio
compares each side at its best dtype. `floor` is the products with the weights alone. Each side
runs in a process of its own; what the peer's Python lacks is left out and said. Where SmolLM2 is not
installed, the weights are random. Writes benchmarks/results/real_model.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from parts import Figures, peer_versions, run_parts
from records import RESULTS, run_ours

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import checkpoints  # noqa: E402
import dpo_step  # noqa: E402
import generate  # noqa: E402
import qwen2_7b_cuda  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from envs import world  # noqa: E402
from minidpo.data.episodes import read  # noqa: E402
from minidpo.data.prompt import dialogues_of  # noqa: E402
from minidpo.memory.loading import open_chat  # noqa: E402
from minidpo.memory.machine import MICRO_TOKENS  # noqa: E402
from minidpo.model import checkpoint  # noqa: E402
from minidpo.model.decoder import Transformer  # noqa: E402

DTYPES = ("float32", "bfloat16")
PEERS = ("trl", "peft", "transformers", "datasets", "xllamacpp")


def base_of(args: argparse.Namespace) -> Path:
    """A folder with the model's weights in fp32, and a first adapter beside it."""
    base = args.work / "base"
    if not (base / "config.json").is_file():
        if args.model == "random":
            checkpoints.make(base, checkpoints.SHAPES["smollm2"])
        else:
            checkpoint.save(checkpoint.load(args.model, torch.float32), base, checkpoints.TOKENIZER)
        dpo_step.make_adapter(base, args.work / "adapter")
    return base


def work_folder(args: argparse.Namespace, name: str) -> Path:
    """A folder with base/ and adapter/ for one work."""
    base, folder = base_of(args), args.work / name
    folder.mkdir(exist_ok=True)
    for link, target in (("base", base), ("adapter", args.work / "adapter")):
        if not (folder / link).exists():
            (folder / link).symlink_to(target)
    return folder


def tokens_of(args: argparse.Namespace) -> str:
    """The model whose tokenizer makes the token ids."""
    return checkpoint.NANO if args.model == "random" else args.model


def trainers(args: argparse.Namespace, learner: str) -> list[tuple[str, str, str]]:
    """The two sides of SFT or DPO, each with its Python and script; the peer's only if it is there."""
    sides = [
        ("minidpo", sys.executable, f"minidpo_{learner}.py"),
        ("trl", args.peer_python, f"trl_{learner}.py"),
    ]
    return sides[:1] if args.missing & {"trl", "peft", "transformers", "datasets"} else sides


def training_floor(args: argparse.Namespace, dtype: str) -> float:
    """Tokens a second if training were only the blocks' products, forward and back to their inputs."""
    with torch.device("meta"):
        model = Transformer(checkpoint.read_config(base_of(args))[0])
    shapes = [
        m.weight.shape for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear)
    ]
    weights = {shape: torch.randn(shape).to(getattr(torch, dtype)) for shape in shapes}
    xs = {
        n: torch.randn(MICRO_TOKENS, n).to(getattr(torch, dtype)) for shape in shapes for n in shape
    }
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        for out, ins in shapes:
            F.linear(xs[ins], weights[out, ins])
            xs[out] @ weights[out, ins]
        seconds.append(time.perf_counter() - began)
    return MICRO_TOKENS / min(seconds)


def sft(args: argparse.Namespace) -> Figures:
    """Tokens a second of both sides, and the memory of training."""
    folder, file = work_folder(args, "sft"), args.work / "demos.jsonl"
    if not (folder / "sft.json").is_file():
        run_ours(f"collect.py --policy expert --split demos --instances 5 --out {file}")
        chat, limit = open_chat(tokens_of(args))
        dialogues, _ = dialogues_of(read(file), chat, limit, world("miniwob").system_prompt)
        one_of_each_task = dialogues[::5]
        rows = [{"ids": dialogue.ids, "turns": dialogue.turns} for dialogue in one_of_each_task]
        (folder / "sft.json").write_text(json.dumps(rows))
    rows = json.loads((folder / "sft.json").read_text())
    taken = [len(rows[i % len(rows)]["ids"]) for i in range(8 * args.steps)]
    tokens, best = sum(taken) / args.steps, {}
    of_second = sum(
        len(rows[i % len(rows)]["ids"]) for i in range(8, 16)
    )  # the step that a trial times
    for dtype in args.dtypes:
        options = argparse.Namespace(threads=args.threads, device="cpu", dtype=dtype)
        for side, python, script in trainers(args, "sft"):
            runs = {}  # TRL's by the rows of a pass: each is tried in two steps, the fastest is timed
            for micro in (1, 2, 4, 8) if side == "trl" else ():
                run = dpo_step.run_side(
                    python, script, folder, 8, options, 2, "--micro", str(micro)
                )
                runs[micro], name = run, f"sft_trl_{dtype}_{micro}_rows"
                yield {
                    f"{name}_tokens_per_s": of_second / dpo_step.step_s(run),
                    f"{name}_training_mib": run["peak_mib"] - run["before_mib"],
                }
            micro = min(runs, key=lambda rows: dpo_step.step_s(runs[rows]), default=None)
            run = dpo_step.run_side(
                python,
                script,
                folder,
                8,
                options,
                args.steps,
                *(("--micro", str(micro)) if micro else ()),
            )
            rate = tokens / dpo_step.step_s(run)
            best[side] = max(best.get(side, (0, 0)), (rate, run["peak_mib"] - run["before_mib"]))
            print(f"sft {side} {dtype}: {rate:.0f} tokens/s, losses {run['losses']}", flush=True)
            yield {
                f"sft_{side}_{dtype}_tokens_per_s": rate,
                f"sft_{side}_{dtype}_last_loss": run["losses"][-1],
                f"sft_{side}_{dtype}_training_mib": run["peak_mib"] - run["before_mib"],
            }
            if side == "minidpo":
                assert {*run["gradients"]} == {"lora_A", "lora_B"}, "the frozen base has gradients"
        yield {f"sft_{dtype}_floor_tokens_per_s": training_floor(args, dtype)}
    yield {"sft_tokens_per_s": best["minidpo"][0]}
    if "trl" in best:
        yield {
            "sft_vs_trl_ratio": best["minidpo"][0] / best["trl"][0],
            "sft_memory_ratio": best["minidpo"][1] / best["trl"][1],
        }


def dpo(args: argparse.Namespace) -> Figures:
    """Pairs a second of both sides on rollouts and on groups, and the memory of training."""
    for name, key in (("rollouts", "dpo"), ("groups", "groups")):
        folder, best = work_folder(args, name), {}
        if not (folder / "pairs.json").is_file():
            pairs = (
                dpo_step.rollouts(folder, tokens_of(args))[:8]
                if name == "rollouts"
                else dpo_step.synthetic(256, 48, 1, good=3, bad=5)
            )
            (folder / "pairs.json").write_text(json.dumps(pairs))
        batch, steps = (4, 2) if name == "rollouts" else (15, 2)  # the peer takes minutes a step
        for dtype in DTYPES:
            options = argparse.Namespace(threads=args.threads, device="cpu", dtype=dtype)
            for side, python, script in trainers(args, "dpo"):
                more = (
                    ("--micro", "1") if side == "trl" else ()
                )  # with which it was fastest in dpo_step.py
                run = dpo_step.run_side(python, script, folder, batch, options, steps, *more)
                rate = batch / dpo_step.step_s(run)
                best[side] = max(
                    best.get(side, (0, 0)), (rate, run["peak_mib"] - run["before_mib"])
                )
                print(
                    f"{name} {side} {dtype}: {rate:.2f} pairs/s, losses {run['losses']}", flush=True
                )
                yield {
                    f"{key}_{side}_{dtype}_pairs_per_s": rate,
                    f"{key}_{side}_{dtype}_training_mib": run["peak_mib"] - run["before_mib"],
                }
        if "trl" in best:
            memory = "training_memory_ratio" if key == "dpo" else f"{key}_memory_ratio"
            yield {
                f"{key}_vs_trl_pairs_ratio": best["minidpo"][0] / best["trl"][0],
                memory: best["minidpo"][1] / best["trl"][1],
            }


def sampling(args: argparse.Namespace) -> Figures:
    """Tokens a second of all sides at one row, 16, 64 and in groups of eight."""
    base, rates = base_of(args), {}
    sides = (
        ("minidpo", "floor")
        if "transformers" in args.missing
        else ("minidpo", "transformers", "floor")
    )
    for case, (instances, group, temperature) in generate.CASES.items():
        name = case.removeprefix("batch")
        prompts = [
            [17 + (7 * n + 3 * t) % 1000 for t in range(generate.PROMPT)] for n in range(instances)
        ]
        work = {
            "base": str(base),
            "prompts": [ids for ids in prompts for _ in range(group)],
            "new": generate.NEW,
            "temperature": temperature,
            "repeats": 1,
            "device": "cpu",
            "threads": args.threads,
        }
        for dtype in DTYPES:
            for side in sides:
                python = args.peer_python if side == "transformers" else sys.executable
                run = generate.run_side(side, python, {**work, "dtype": dtype})
                rates[name, side, dtype] = len(work["prompts"]) * generate.NEW / min(run["seconds"])
                print(
                    f"sampling {name} {side} {dtype}: {rates[name, side, dtype]:.0f} tokens/s",
                    flush=True,
                )
                yield {f"generate_{name}_{side}_{dtype}_tokens_per_s": rates[name, side, dtype]}

        best = {side: max(rates[name, side, dtype] for dtype in DTYPES) for side in sides}
        fastest = "float32"
        if rates[name, "minidpo", "bfloat16"] > rates[name, "minidpo", "float32"]:
            fastest = "bfloat16"
        if "transformers" in sides:
            yield {f"generate_{name}_ratio": best["minidpo"] / best["transformers"]}
        yield {
            f"generate_{name}_of_floor": best["minidpo"] / rates[name, "floor", fastest],
            f"{name}_vs_fp32_ratio": best["minidpo"] / rates[name, "minidpo", "float32"],
        }
        if name == "16" and "xllamacpp" not in args.missing and args.model != "random":
            yield from llamacpp(args, work, best["minidpo"])


def llamacpp(args: argparse.Namespace, work: dict, ours: float) -> Figures:
    """Tokens a second of llama.cpp with the model in F16, and with its own file where that is a GGUF."""
    f16, own = args.work / "f16", checkpoint.locate(args.model)
    if not f16.is_dir():
        adapter = args.work / "adapter"
        run_ours(
            f"evaluate.py --model {args.model} --export gguf --adapters a={adapter} --out {f16}"
        )
    files = {"f16": f16 / "a-merged.gguf", **({"own": own} if own.is_file() else {})}
    for name, file in files.items():
        command = [
            args.peer_python,
            str(ROOT / "benchmarks" / "llamacpp_generate.py"),
            json.dumps({**work, "gguf": str(file)}),
        ]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        seconds = json.loads(done.stdout.splitlines()[-1])["seconds"]
        rate = len(work["prompts"]) * work["new"] / statistics.median(seconds)
        print(f"sampling 16 llama.cpp {name}: {rate:.0f} tokens/s", flush=True)
        yield {f"generate_16_llamacpp_{name}_tokens_per_s": rate}
        if name == "f16":
            yield {"llamacpp_16_ratio": ours / rate}


def rollouts(args: argparse.Namespace) -> Figures:
    """Episodes a second in both dtypes, and how many were solved."""
    adapter, demos = args.work / "adapter-60", args.work / "demos.jsonl"
    if args.model == "random":
        raise RuntimeError("random weights solve nothing: give --model")
    model = f"--model {args.model} --machine.dtype bfloat16 --machine.pages 32"
    if not demos.is_file():
        run_ours(f"collect.py --policy expert --split demos --instances 5 --out {demos}")
    if not (adapter / "done").is_file():
        options = "--sft.steps 60 --sft.lr 5e-4 --sft.warmup 3"
        run_ours(f"train.py sft {model} --data {demos} --out {adapter} {options}")
    rates = {}
    for dtype in DTYPES:
        out = args.work / f"rollouts-{dtype}.jsonl"
        for old in (out, out.with_suffix(".metrics.jsonl")):
            old.unlink(missing_ok=True)
        act = f"--machine.act-dtype {dtype} --adapter {adapter / 'adapter'}"
        run_ours(f"collect.py {model} {act} --instances 2 --out {out}")
        last = json.loads(out.with_suffix(".metrics.jsonl").read_text().splitlines()[-1])
        rates[dtype] = last["step"] / last["seconds"]
        yield {
            f"rollouts_{dtype}_episodes_per_s": rates[dtype],
            f"rollouts_{dtype}_solved": last["success"],
        }
    yield {"episodes_per_s": max(rates.values())}


PARTS = {part.__name__: part for part in (sft, dpo, sampling, rollouts)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--peer-python", default=sys.executable, help=f"a Python with {', '.join(PEERS)}"
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="which of these")
    parser.add_argument(
        "--work", type=Path, help="folder for what is made on the way (default: temporary)"
    )
    parser.add_argument(
        "--model", default="smollm2", help="the model; random: weights in SmolLM2's shape"
    )
    parser.add_argument(
        "--steps", type=int, default=4, help="optimizer steps of each side in `sft`"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--dtypes", default=",".join(DTYPES), help="of `sft`: these, or one of them"
    )
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args()
    if args.dtypes not in (*DTYPES, ",".join(DTYPES)):
        parser.error(f"--dtypes takes {','.join(DTYPES)} or one of them, got {args.dtypes}")
    suffix = "" if "," in args.dtypes else f"-{args.dtypes}"  # whose ratios are others
    args.out, args.dtypes = args.out or RESULTS / f"real_model{suffix}.json", args.dtypes.split(",")
    if unknown := [name for name in args.parts.split(",") if name not in PARTS]:
        parser.error(f"--parts takes some of {', '.join(PARTS)}, got {', '.join(unknown)}")
    args.missing = set(qwen2_7b_cuda.lacking(args.peer_python, PEERS))
    if args.missing:
        print(
            f"{args.peer_python} lacks {', '.join(sorted(args.missing))}: no comparison that needs them"
        )
    if args.model != "random":
        try:
            checkpoint.locate(args.model)
        except ValueError as error:
            print(f"{error}; so the weights are random")
            args.model = "random"
    args.work = args.work and args.work.resolve()
    torch.set_num_threads(args.threads)  # for the floor, which is measured here
    there = [name for name in PEERS if name not in args.missing]
    run_parts(PARTS, args, {"torch": torch.__version__, **peer_versions(args.peer_python, there)})


if __name__ == "__main__":
    main()
