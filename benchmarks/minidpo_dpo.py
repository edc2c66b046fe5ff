"""Our side of dpo_step.py: the pairs of pairs.json, trained by the code that `train.py dpo` runs.

    python benchmarks/minidpo_dpo.py --work FOLDER --batch 8 --steps 20 --out ours.json

FOLDER holds base/, adapter/ and pairs.json, which dpo_step.py writes. Pairs of one "group" are a tree.
With --four-bit the base is read as `train.py --machine.quantize nf4 --machine.recompute` reads it.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from sides import dpo_options, forget_peak, held_mib, hold_to, peak_mib

sys.path.insert(0, str(Path(__file__).parents[1]))


def preferences(path: Path):
    """pairs.json as token ids with turns; what the agent wrote is the completion, or what "turns" says."""
    from minidpo.learning.preferences import Preferences
    from minidpo.model.chat import Dialogue

    data, found = Preferences([], [], [], [], []), {}
    for number, pair in enumerate(json.loads(path.read_text())):
        both = []
        for side in ("chosen", "rejected"):
            ids = pair["prompt_ids"] + pair[f"{side}_ids"]
            turns = pair.get(f"{side}_turns") or [0] * len(pair[f"{side}_ids"])
            key = (pair["group"], tuple(ids))
            if key not in found:
                found[key] = len(found)
                data.dialogues.append(Dialogue(ids, [-1] * len(pair["prompt_ids"]) + turns))
                data.names.append(f"{side} of pair {number}")
                data.instances.append(("group", pair["group"]))
            both.append(found[key])
        data.pairs.append(tuple(both))
        data.solved.append(True)
    return data


def train_timed(
    args: argparse.Namespace, folder: str, model, optimizer, *, n: int, batches, objective
) -> dict:
    """Train as `train.py` does, on `batches(numbers)` of n examples, in their order. Returns seconds and loss
    of each step."""
    from minidpo.data.batch import batch_scores
    from minidpo.learning.trainer import Optimizer, StepSettings, train
    from minidpo.system.run_folder import RunFolder, records

    ticks = []

    class Clock(RunFolder):
        def log(self, record: dict) -> None:
            super().log(record)
            ticks.append(time.perf_counter())

    def step_batches(step: int):
        if not ticks:
            ticks.append(time.perf_counter())
        return batches([i % n for i in range(step * args.batch, (step + 1) * args.batch)])

    run = Clock(folder, {})
    train(
        run,
        model,
        optimizer,
        batches=step_batches,
        score=lambda batch: batch_scores(model, batch.trees),
        objective=objective,
        settings=StepSettings(
            Optimizer(steps=args.steps, warmup=0, save_every=args.steps), 0, "minidpo"
        ),
    )
    return {
        "step_s": [end - start for start, end in pairwise(ticks)],
        "losses": [record["loss"] for record in records(run.folder)],
    }


def bench(args: argparse.Namespace, folder: str) -> dict:
    """Train, and return seconds and loss of each step, memory in MiB and versions."""
    from minidpo.learning.dpo import DPO, pair_loss_of
    from minidpo.learning.preferences import pair_batches, pair_loss, score_all
    from minidpo.memory import lora, recompute
    from minidpo.memory.adamw8bit import AdamW8bit
    from minidpo.memory.machine import Machine
    from minidpo.memory.quantised import load_quantised
    from minidpo.model import checkpoint

    device, dtype, base = torch.device(args.device), getattr(torch, args.dtype), args.work / "base"
    machine = Machine(micro_tokens=args.micro_tokens)
    data = preferences(args.work / "pairs.json")
    began = time.perf_counter()
    model = (
        load_quantised(base, dtype, device, args.cache)
        if args.four_bit
        else checkpoint.load(base, dtype, device)
    )
    load_s, before = time.perf_counter() - began, held_mib(args.device)
    recompute.switch(model, on=args.four_bit)
    lora.load(model, args.work / "adapter")
    model.eval()
    settings = pair_loss_of(DPO(beta=args.beta))
    began = time.perf_counter()
    reference = score_all(model, data, settings, machine).cpu()
    precompute_s = time.perf_counter() - began
    earlier_peak = peak_mib(args.device)
    forget_peak(args.device)
    tokens = []

    def batches(picked: list[int]):
        for batch in pair_batches(data, picked, reference, settings, machine, device):
            tokens.append(batch.trees.tokens)
            yield batch

    adamw = AdamW8bit if args.four_bit else torch.optim.AdamW
    optimizer = adamw(lora.parameters(model), lr=args.lr, weight_decay=0.0)
    timed = train_timed(
        args,
        folder,
        model,
        optimizer,
        n=len(data.pairs),
        batches=batches,
        objective=lambda batch, scores: pair_loss(settings, batch, scores),
    )
    return timed | {
        "load_s": load_s,
        "precompute_s": precompute_s,
        "before_mib": before,
        "earlier_peak_mib": earlier_peak,
        "peak_mib": peak_mib(args.device),
        "computed_tokens_per_step": sum(tokens) / args.steps,
        "trainable": sum(p.numel() for p in lora.parameters(model)),
        "versions": {"torch": torch.__version__},
    }


if __name__ == "__main__":
    parser = dpo_options(__doc__.split("\n")[0])
    parser.add_argument(
        "--micro-tokens", type=int, help="tokens a forward pass; the default of train.py"
    )
    parser.add_argument(
        "--cache", type=Path, help="with --four-bit: folder of the quantised weights"
    )
    args = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS=str(args.threads), TQDM_DISABLE="1")
    import torch

    torch.set_num_threads(args.threads)
    if args.cap_gib:
        hold_to(args.cap_gib)
    with tempfile.TemporaryDirectory(prefix="minidpo_") as folder:
        args.out.write_text(json.dumps(bench(args, folder), indent=1) + "\n")
