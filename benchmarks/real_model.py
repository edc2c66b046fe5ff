"""A real model on a CPU: training, sampling and rollouts, beside what a user would take instead.

    python benchmarks/real_model.py --peer-python /path/to/python/with/trl+xllamacpp --work FOLDER
        [--model smollm2] [--parts sft,dpo,...] [--dtypes float32]

    sft         demonstrations of the demo suite's tasks, eight episodes a step, beside TRL + PEFT
    dpo         whole episodes that the shipped model played on real pages, in this model's tokens, four pairs a
                step, beside TRL + PEFT, the reference cached on both sides
    dpo_groups  the same of the 15 pairs of a group of eight: prompt 256, answers of 48
    row, 16, 64, groups
                192 tokens read and 48 written, for one row, 16, 64, and eight instances in groups of eight:
                beside transformers' `generate` and llama.cpp (F16 and the model's own GGUF file)
    rollouts    `collect.py` on the demo suite's tasks, in groups of eight, with an adapter of 60 steps of SFT

Both sides have the same base, first adapter, token ids and batches, in float32 and, where the processor has
instructions for it, in bfloat16. In training each side runs at each of its settings (`works.settings_of`) and
`_best` names the fastest; a ratio compares each side at its best dtype and settings. `floor` is the products with
the weights alone. Each side runs in a process of its own; what the peer's Python lacks is left out and said.

What was measured stays in FOLDER/MODEL: a run that was stopped goes on where it was, and figures of one dtype are
there when the other is measured. Delete the folder to measure anew. Figures begin with the model's name, and those
of other models and parts stay in benchmarks/results/real_model.json, each part with its date, machine and model.
"""

import argparse
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from parts import Figures, Part, peer_versions, run_parts
from records import RESULTS, run_ours

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import checkpoints  # noqa: E402
import generate  # noqa: E402
import qwen2_7b_cuda  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import works  # noqa: E402

from envs import world  # noqa: E402
from minidpo.data.episodes import read  # noqa: E402
from minidpo.data.prompt import dialogues_of  # noqa: E402
from minidpo.experiment import files_sha256  # noqa: E402
from minidpo.memory.loading import open_chat  # noqa: E402
from minidpo.memory.machine import MICRO_TOKENS, multiplies_bfloat16  # noqa: E402
from minidpo.memory.quantised import tensor_formats  # noqa: E402
from minidpo.model import checkpoint, gguf_file  # noqa: E402
from minidpo.model.decoder import Transformer  # noqa: E402

PEERS = (*works.TRL, "xllamacpp")
SFT_BATCH = 8


def base_of(args: argparse.Namespace) -> Path:
    """A folder with the model's weights in fp32."""
    base = args.work / "base"
    if not (base / "config.json").is_file():
        checkpoint.save(checkpoint.load(args.model, torch.float32), base, checkpoints.TOKENIZER)
    return base


def about(args: argparse.Namespace) -> dict:
    """What the model is, and the SHA-256 of its files."""
    source = checkpoint.locate(args.model)
    with torch.device("meta"):
        model = Transformer(checkpoint.read_config(source)[0])
    found = {"given": args.model, "sha256": dict(files_sha256(str(source)))}
    found["weights"] = sum(weight.numel() for weight in model.parameters())
    if gguf_file.is_gguf(source):
        found["name"] = gguf_file.value(source, "general.name")
        found["tensors"] = dict(Counter(map(str, tensor_formats(source).values())))
    return found


# ---- training ----


def training_floor(args: argparse.Namespace, dtype: str) -> float:
    """Tokens a second if training were only the blocks' products, forward and back to their inputs."""
    with torch.device("meta"):
        model = Transformer(checkpoint.read_config(base_of(args))[0])
    layers = [m for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear)]
    shapes, kind = [layer.weight.shape for layer in layers], getattr(torch, dtype)
    weights = {shape: torch.randn(shape).to(kind) for shape in shapes}
    xs = {n: torch.randn(MICRO_TOKENS, n).to(kind) for shape in shapes for n in shape}
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        for out, ins in shapes:
            F.linear(xs[ins], weights[out, ins])
            xs[out] @ weights[out, ins]
        seconds.append(time.perf_counter() - began)
    return MICRO_TOKENS / min(seconds)


def fastest_run(
    args: argparse.Namespace, folder: Path, batch: int, learner: str, side: str, dtype: str
) -> tuple[str, dict[str, dict]]:
    """The name of a side's best settings, and its runs by settings."""
    python = sys.executable if side == "minidpo" else args.peer_python
    options = argparse.Namespace(threads=args.threads, device="cpu", dtype=dtype)

    def run(setting: str, words: tuple[str, ...]) -> dict:
        def measure() -> dict:
            more = ("--learner", learner, *words)
            return works.run_side(
                python, f"{side}_side.py", folder, batch, options, args.steps, *more
            )

        found = works.once(folder / f"{side}_{dtype}_{setting}_{args.steps}.json", measure)
        seconds, losses = works.step_s(found), found["losses"]
        print(
            f"{folder.name} {side} {dtype} {setting}: {seconds:.3g} s a step, losses {losses}",
            flush=True,
        )
        return found

    return works.search(works.settings_of(side, learner, batch), run)


def training(
    args: argparse.Namespace,
    name: str,
    batch: int,
    examples: Callable[[], list[dict]],
    unit: str,
    amount: Callable[[list[dict]], int],
) -> Figures:
    """Both sides in each dtype and at each of their settings: `amount` of `unit` of the examples a second."""
    learner = name.split("_")[0]
    folder = works.prepare(args.work / name, base_of(args), learner, examples)
    done = amount(json.loads((folder / f"{learner}.json").read_text()))
    sides = ["minidpo"] if args.missing & {*works.TRL} else ["minidpo", "trl"]
    fastest: dict[str, tuple[float, float]] = {}  # rate and memory of each side
    for dtype in args.dtypes:
        rates = {}
        for side in sides:
            best, runs = fastest_run(args, folder, batch, learner, side, dtype)
            key = f"{name}_{side}_{dtype}"
            for setting, run in runs.items():
                yield {
                    f"{key}_{setting}_{unit}_per_s": done / works.step_s(run),
                    f"{key}_{setting}_mib": works.training_mib(run),
                }
            rates[side] = done / works.step_s(runs[best]), works.training_mib(runs[best])
            fastest[side] = max(fastest.get(side, (0.0, 0.0)), rates[side])
            yield {
                f"{key}_best": best,
                f"{key}_{unit}_per_s": rates[side][0],
                f"{key}_training_mib": rates[side][1],
                f"{key}_last_loss": runs[best]["losses"][-1],
            }
        if "trl" in rates:
            yield {f"{name}_{dtype}_vs_trl_ratio": rates["minidpo"][0] / rates["trl"][0]}
    if "trl" in fastest:
        ratio = "vs_trl_ratio" if learner == "sft" else "vs_trl_pairs_ratio"
        yield {
            f"{name}_{ratio}": fastest["minidpo"][0] / fastest["trl"][0],
            f"{name}_memory_ratio": fastest["minidpo"][1] / fastest["trl"][1],
        }


def demonstrations(args: argparse.Namespace) -> Path:
    """The experts' episodes on the demo suite's tasks."""
    file = args.work / "demos.jsonl"
    if not file.is_file():
        run_ours(f"collect.py --policy expert --split demos --instances 5 --out {file}")
    return file


def sft(args: argparse.Namespace) -> Figures:
    """Tokens a second of both sides, and the memory of training."""

    def rows() -> list[dict]:
        chat, limit = open_chat(args.model)
        episodes = read(demonstrations(args))
        dialogues, _ = dialogues_of(episodes, chat, limit, world("miniwob").system_prompt)
        of_each_task = dialogues[::5][:SFT_BATCH]  # the same in each step
        return [{"ids": dialogue.ids, "turns": dialogue.turns} for dialogue in of_each_task]

    def tokens(found: list[dict]) -> int:
        return sum(len(row["ids"]) for row in found)

    yield from training(args, "sft", SFT_BATCH, rows, "tokens", tokens)
    for dtype in args.dtypes:
        yield {f"sft_{dtype}_floor_tokens_per_s": training_floor(args, dtype)}


def dpo(args: argparse.Namespace) -> Figures:
    """Pairs a second of both sides, and the memory of training, on rollouts."""

    def pairs() -> list[dict]:
        return works.rollouts(args.work / "rollouts.jsonl", args.model)[4:8]

    yield from training(args, "dpo", 4, pairs, "pairs", len)


def dpo_groups(args: argparse.Namespace) -> Figures:
    """The same of a group."""
    pairs = partial(works.synthetic, 256, 48, 1, good=3, bad=5)
    yield from training(args, "dpo_groups", 15, pairs, "pairs", len)


# ---- acting ----


def sampling(args: argparse.Namespace, case: str) -> Figures:
    """Tokens a second of all sides, and ours beside each of them."""
    base, fastest = base_of(args), {}
    # ours at each of its ways: what else a Machine can be told belongs here
    ways = [*args.dtypes, "int8"] if case == "row" else args.dtypes
    runs = [("minidpo", way, {"machine": {"device": "cpu", "act_dtype": way}}) for way in ways]
    runs += [("floor", dtype, {"dtype": dtype}) for dtype in args.dtypes]
    if "transformers" not in args.missing:
        runs += [("transformers", dtype, {"dtype": dtype}) for dtype in args.dtypes]
    if "xllamacpp" not in args.missing:
        runs += [("llamacpp", name, {"gguf": str(file)}) for name, file in ggufs(args).items()]
    for side, way, settings in runs:
        model = args.model if side == "minidpo" else str(base)
        shared = {"model": model, "base": str(base), "device": "cpu", "threads": args.threads}
        work = generate.work_of(case, **shared, **settings, repeats=args.repeats)
        python = args.peer_python if side in ("transformers", "llamacpp") else sys.executable
        found = works.once(
            args.work / f"generate_{case}_{side}_{way}_{args.repeats}.json",
            partial(generate.run_side, side, python, work),
        )
        rate = len(work["prompts"]) * work["new"] / min(found["seconds"])
        fastest[side] = max(fastest.get(side, (0.0, "")), (rate, way))
        print(f"{case} {side} {way}: {rate:.1f} tokens/s", flush=True)
        yield {f"generate_{case}_{side}_{way}_tokens_per_s": rate}
    for side, (rate, way) in fastest.items():
        yield {f"generate_{case}_{side}_best": way}
        if side == "floor":
            yield {f"generate_{case}_of_floor": fastest["minidpo"][0] / rate}
        elif side != "minidpo":
            yield {f"{case}_vs_{side}_ratio": fastest["minidpo"][0] / rate}


def ggufs(args: argparse.Namespace) -> dict[str, Path]:
    """Files for llama.cpp: the model in F16, and its own where that is a GGUF."""
    f16, own = args.work / "f16", checkpoint.locate(args.model)
    if not (f16 / "a-merged.gguf").is_file():
        works.make_adapter(base_of(args), args.work / "nothing")
        run_ours(
            f"evaluate.py --model {args.model} --export gguf --adapters a={args.work / 'nothing'} --out {f16}"
        )
    return {"f16": f16 / "a-merged.gguf", **({"own": own} if own.is_file() else {})}


def rollouts(args: argparse.Namespace) -> Figures:
    """Episodes a second in each dtype, and how many were solved."""
    adapter, demos, fastest = args.work / "adapter-60", demonstrations(args), 0.0
    model = f"--model {args.model} --machine.dtype {args.dtypes[-1]} --machine.pages 32"
    if not (adapter / "done").is_file():
        options = "--sft.steps 60 --sft.lr 5e-4 --sft.warmup 3 --sft.save-every 5"
        run_ours(f"train.py sft {model} --data {demos} --out {adapter} {options}")
    for dtype in args.dtypes:
        out = args.work / f"rollouts-{dtype}.jsonl"

        def play(dtype=dtype, out=out) -> dict:
            for old in (out, out.with_suffix(".metrics.jsonl")):
                old.unlink(missing_ok=True)
            act = f"--machine.act-dtype {dtype} --adapter {adapter / 'adapter'}"
            run_ours(f"collect.py {model} {act} --instances {args.instances} --out {out}")
            return json.loads(out.with_suffix(".metrics.jsonl").read_text().splitlines()[-1])

        last = works.once(args.work / f"rollouts_{dtype}_{args.instances}.json", play)
        fastest = max(fastest, last["step"] / last["seconds"])
        yield {
            f"rollouts_{dtype}_episodes_per_s": last["step"] / last["seconds"],
            f"rollouts_{dtype}_solved": last["success"],
        }
    yield {"episodes_per_s": fastest}


PARTS: dict[str, Part] = {part.__name__: part for part in (sft, dpo, dpo_groups)}
PARTS |= {case: partial(sampling, case=case) for case in generate.CASES}
PARTS |= {"rollouts": rollouts}


def named(model: str, part: Part) -> Part:
    """The part, its figures under the model's name."""

    def run(args: argparse.Namespace) -> Figures:
        for figures in part(args):
            yield {f"{model}_{name}": value for name, value in figures.items()}

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--peer-python", default=sys.executable, help=f"a Python with {', '.join(PEERS)}"
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="which of these")
    parser.add_argument(
        "--work", type=Path, help="folder for what is made and measured (default: temporary)"
    )
    parser.add_argument(
        "--model",
        default=checkpoint.SMOLLM2,
        help="smollm2, a GGUF file, a folder or a hub id",
    )
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps of each training")
    parser.add_argument("--repeats", type=int, default=2, help="of each sampling")
    parser.add_argument("--instances", type=int, default=2, help="of each task in `rollouts`")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dtypes", help="float32, or float32,bfloat16 where that is not slow")
    parser.add_argument("--out", type=Path, default=RESULTS / "real_model.json", help="result file")
    args = parser.parse_args()
    dtypes = ["float32", "bfloat16"] if multiplies_bfloat16() else ["float32"]
    args.dtypes = args.dtypes.split(",") if args.dtypes else dtypes
    if unknown := {*args.dtypes} - {*dtypes}:
        parser.error(f"--dtypes takes some of {', '.join(dtypes)} here, got {', '.join(unknown)}")
    if "bfloat16" not in dtypes:
        print("this processor has no instructions for bfloat16: no figures in it")
    if unknown := [name for name in args.parts.split(",") if name not in PARTS]:
        parser.error(f"--parts takes some of {', '.join(PARTS)}, got {', '.join(unknown)}")
    args.missing = set(qwen2_7b_cuda.lacking(args.peer_python, PEERS))
    if args.missing:
        print(
            f"{args.peer_python} lacks {', '.join(sorted(args.missing))}: no comparison that needs them"
        )
    try:
        checkpoint.locate(args.model)
    except ValueError as error:
        parser.error(str(error))
    name = re.search(r"smollm2|[a-z]+", Path(args.model).name.lower())[0]
    torch.set_num_threads(args.threads)  # for the floor, which is measured here
    there = [name for name in PEERS if name not in args.missing]
    versions = {"torch": torch.__version__, **peer_versions(args.peer_python, there)}
    args.parts = ",".join(f"{name}_{part}" for part in args.parts.split(","))
    parts = {f"{name}_{key}": named(name, part) for key, part in PARTS.items()}
    args.work = args.work and args.work.resolve() / name
    run_parts(parts, args, versions, about=about)


if __name__ == "__main__":
    main()
