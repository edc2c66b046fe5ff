"""DPO, step for step: this project against TRL's DPOTrainer with PEFT's LoRA on the same work.

    python benchmarks/dpo_step.py --peer-python /path/to/python/with/trl [--device cuda] [--works a,c]

The same Qwen2 base, the same first adapter, the same token ids in the same order and batches, the reference
cached on both sides; the loss curves must lie on each other, or there is no result. The sides take turns in
processes of their own, so that each has its own memory and both feel the same noise. TRL gets the number of
pairs a forward pass with which it is fastest, tried beforehand. Work:

    a  prompt 192, answers 48 / 48: 64 pairs, each with a prompt of its own, 8 a step
    b  prompt 768, answers 64 / 64: 16 pairs, 4 a step
    c  groups of eight: prompt 768, eight answers of 64, 3 of them successes: the 15 pairs of a group a step
    d  rollouts of the shipped model on real pages, groups of eight, whole episodes, paired as train.py does

c is a tree's best case: one group, all of its pairs in one step. In d an episode goes page, answer, page,
answer, and TRL counts the pages as answers; there, only time and memory are compared. Memory is the peak of
training above the loaded model and the imported libraries; of the whole process, it is given besides. With
`--works`, the figures of the others stay as they were recorded; "works" has the day, versions and command of
each. Writes benchmarks/results/dpo_step.json, or dpo_step-cuda.json, -bfloat16.json or both by its options.
"""

import argparse
import json
import math
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

from records import RESULTS, command, record

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from checkpoints import SHAPES, TOKENIZER, make  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks.make_nano import initialise  # noqa: E402
from minidpo.memory import lora  # noqa: E402
from minidpo.memory.lora import LoRAConfig  # noqa: E402
from minidpo.memory.machine import GPU_MICRO_TOKENS  # noqa: E402
from minidpo.model import checkpoint  # noqa: E402
from minidpo.model.decoder import ModelConfig, Transformer  # noqa: E402

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
TITLES = {
    "a": "prompt 192 + 48/48",
    "b": "prompt 768 + 64/64",
    "c": "groups of eight, prompt 768 + 64",
    "d": "rollouts of the shipped model",
}


def synthetic(prompt: int, answer: int, groups: int, good: int = 1, bad: int = 1) -> list[dict]:
    """Random ids: `groups` prompts with `good` + `bad` answers each; a pair for each good and bad one."""
    rng = random.Random(0)

    def draw(n: int) -> list[int]:
        return [rng.randrange(2, SHAPE.vocab_size) for _ in range(n)]

    pairs = []
    for group in range(groups):
        first, answers = draw(prompt), [draw(answer) for _ in range(good + bad)]
        pairs += [
            {"group": group, "prompt_ids": first, "chosen_ids": chosen, "rejected_ids": rejected}
            for chosen in answers[:good]
            for rejected in answers[good:]
        ]
    return pairs


def rollouts(folder: Path, source: str, instances: int = 4) -> list[dict]:
    """All pairs of whole episodes that the shipped model played on real pages, eight an instance, in the
    tokens of the model `source`."""
    import envs
    from minidpo.commands.play import CollectCommand, collect
    from minidpo.data.episodes import read
    from minidpo.data.pairs import choose, outcome_pairs
    from minidpo.learning.dpo import DPO
    from minidpo.learning.preferences import tokenise
    from minidpo.memory.loading import open_chat
    from minidpo.memory.machine import Machine

    file = folder / "rollouts.jsonl"
    tasks = "login-user,click-checkboxes,enter-password,click-tab-2,form-sequence-2"
    machine = Machine(device="cpu")
    collect(CollectCommand(tasks=tasks, instances=instances, out=file, machine=machine))
    chat, limit = open_chat(source)
    chosen = choose(outcome_pairs(read(file)), DPO.pairs_per_instance, seed=0)
    data = tokenise(chosen, chat, limit, envs.world("miniwob").system_prompt, "end")
    pairs = []
    for sides in sorted(data.pairs, key=lambda pair: data.instances[pair[0]]):
        chosen, rejected = (data.dialogues[i] for i in sides)
        begin = next(t for t, turn in enumerate(chosen.turns) if turn >= 0)
        task, seed = data.instances[sides[0]]
        pairs.append(
            {
                "group": f"{task} {seed}",
                "prompt_ids": chosen.ids[:begin],
                "chosen_ids": chosen.ids[begin:],
                "chosen_turns": chosen.turns[begin:],
                "rejected_ids": rejected.ids[begin:],
                "rejected_turns": rejected.turns[begin:],
            }
        )
    return pairs


def make_adapter(base: Path, folder: Path) -> None:
    """A first adapter, B = 0, made without the base's weights."""
    with torch.device("meta"):  # an adapter needs the base's shapes alone
        model = Transformer(checkpoint.read_config(base)[0])
    lora.attach(model, LoRAConfig(), torch.Generator())
    generator = torch.Generator().manual_seed(
        1
    )  # the adapter that `attach` would give a base with weights
    for layer in lora.layers(model).values():
        a = nn.init.kaiming_uniform_(
            torch.empty(layer.lora_A.shape), math.sqrt(5), generator=generator
        )
        layer.lora_A, layer.lora_B = nn.Parameter(a), nn.Parameter(torch.zeros(layer.lora_B.shape))
    lora.save(model, folder, "base")


def make_work(name: str, folder: Path, shape: str = "") -> int:
    """Base, adapter and pairs in `folder`; the number of pairs a step. shape: one of `checkpoints.SHAPES`,
    else this script's own."""
    folder.mkdir(parents=True)
    if name == "d":
        pairs, batch = rollouts(folder, checkpoint.NANO), 16
    else:
        pairs, batch = {
            "a": (synthetic(192, 48, 64), 8),
            "b": (synthetic(768, 64, 16), 4),
            "c": (synthetic(768, 64, 2, good=3, bad=5), 15),
        }[name]
    (folder / "pairs.json").write_text(json.dumps(pairs))
    if shape:
        make(folder / "base", SHAPES[shape])
    elif name == "d":
        checkpoint.save(
            checkpoint.load(TOKENIZER.parent, torch.float32), folder / "base", TOKENIZER
        )
    else:
        model = Transformer(SHAPE)
        initialise(model, torch.Generator().manual_seed(0))
        checkpoint.save(model, folder / "base", TOKENIZER)
    make_adapter(folder / "base", folder / "adapter")
    return batch


def run_side(
    python: str,
    script: str,
    work: Path,
    batch: int,
    args: argparse.Namespace,
    steps: int,
    *more: str,
) -> dict:
    out = work / "out.json"
    options = f"--work {work} --out {out} --batch {batch} --steps {steps} --lr 1e-3"
    where = f"--threads {args.threads} --device {args.device} --dtype {args.dtype}"
    command = [python, str(ROOT / "benchmarks" / script), *shlex.split(f"{options} {where}"), *more]
    subprocess.run(command, check=True)
    return json.loads(out.read_text())


def step_s(run: dict) -> float:
    """Seconds of a step: the median, without the first, which warms up."""
    return statistics.median(run["step_s"][1:])


def fastest_micro(work: Path, batch: int, args: argparse.Namespace) -> int:
    """How many pairs a forward pass make TRL fastest: all of a step, or fewer."""
    sizes = [size for size in range(1, batch + 1) if batch % size == 0]
    took = {
        size: step_s(
            run_side(args.peer_python, "trl_dpo.py", work, batch, args, 3, "--micro", str(size))
        )
        for size in sizes
    }
    return min(took, key=took.get)


def compare(name: str, batch: int, work: Path, args: argparse.Namespace) -> tuple[dict, dict]:
    """The figures of one work and the versions, from `repeats` turns of both sides."""
    micro = fastest_micro(work, batch, args)
    sides: dict[str, list[dict]] = {"trl": [], "minidpo": []}
    for turn in range(args.repeats):
        for side, python, script, more in (
            ("trl", args.peer_python, "trl_dpo.py", ("--micro", str(micro))),
            (
                "minidpo",
                sys.executable,
                "minidpo_dpo.py",
                ("--micro-tokens", str(GPU_MICRO_TOKENS[0])) if args.device == "cuda" else (),
            ),
        ):  # as train
            sides[side].append(run_side(python, script, work, batch, args, args.steps, *more))
            print(f"{name} {side} {turn}: {step_s(sides[side][-1]):.3f} s a step", flush=True)
    pairs = json.loads((work / "pairs.json").read_text())
    taken = [pairs[i % len(pairs)] for i in range(batch * args.steps)]
    given = sum(
        2 * len(p["prompt_ids"]) + len(p["chosen_ids"]) + len(p["rejected_ids"]) for p in taken
    )
    figures = {f"{name}_trl_pairs_per_forward": micro}
    for side, runs in sides.items():
        seconds = statistics.median(map(step_s, runs))
        figures |= {
            f"{name}_{side}_step_s": seconds,
            f"{name}_{side}_pairs_per_s": batch / seconds,
            f"{name}_{side}_pair_tokens_per_s": given / args.steps / seconds,
            f"{name}_{side}_peak_mib": max(run["peak_mib"] for run in runs),
            f"{name}_{side}_training_mib": max(run["peak_mib"] - run["before_mib"] for run in runs),
            f"{name}_{side}_reference_s": statistics.median(run["precompute_s"] for run in runs),
        }
    ours, trl = (sides[side][0] for side in ("minidpo", "trl"))
    assert ours["trainable"] == trl["trainable"]
    figures |= {
        f"{name}_pairs_per_step": batch,
        f"{name}_pair_tokens_per_step": given / args.steps,
        f"{name}_computed_tokens_per_step": ours["computed_tokens_per_step"],
        f"{name}_pairs_per_s_ratio": (
            figures[f"{name}_trl_step_s"] / figures[f"{name}_minidpo_step_s"]
        ),
        f"{name}_peak_memory_ratio": (
            figures[f"{name}_minidpo_peak_mib"] / figures[f"{name}_trl_peak_mib"]
        ),
        f"{name}_training_memory_ratio": (
            figures[f"{name}_minidpo_training_mib"] / figures[f"{name}_trl_training_mib"]
        ),
    }
    if name != "d":
        apart = max(
            abs(one - other)
            for both in zip(*sides.values())
            for one, other in zip(*(run["losses"] for run in both), strict=True)
        )
        assert apart < (1e-3 if args.dtype == "float32" else 0.05), (
            f"{name}: not the same training ({apart})"
        )
        figures[f"{name}_largest_loss_difference"] = apart
        figures[f"{name}_last_loss"] = ours["losses"][-1]
    return figures, trl["versions"] | {"minidpo_torch": ours["versions"]["torch"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--peer-python", default=sys.executable, help="a Python with trl, peft, transformers"
    )
    parser.add_argument("--works", default="a,b,c,d", help="which of a, b, c, d")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps in each turn")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each side")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args()
    works = args.works.split(",")
    if set(works) - set(TITLES):
        parser.error(f"--works takes some of {', '.join(TITLES)}, got {args.works}")
    suffix = "-cuda" * (args.device == "cuda") + "-bfloat16" * (args.dtype == "bfloat16")
    out = args.out or RESULTS / f"dpo_step{suffix}.json"
    figures, versions = {}, {}
    with tempfile.TemporaryDirectory(prefix="dpo_step_") as folder:
        for name in works:
            work = Path(folder) / name
            more, versions = compare(name, make_work(name, work), work, args)
            figures |= more
            print(
                f"{name} ({TITLES[name]}): {more[f'{name}_pairs_per_s_ratio']:.2f} times TRL's pairs/s at "
                f"{more[f'{name}_training_memory_ratio']:.2f} of its memory",
                flush=True,
            )
    device = torch.cuda.get_device_name() if args.device == "cuda" else None
    old = json.loads(out.read_text()) if out.is_file() else {"figures": {}}
    made = {"date": date.today().isoformat(), "versions": versions, "command": command()}
    record(
        out,
        {**old["figures"], **figures},
        versions,
        device,
        works={**old.get("works", {}), **dict.fromkeys(works, made)},
    )


if __name__ == "__main__":
    main()
