"""Our side of a training: the examples of dpo.json or sft.json, by the code that `train.py` runs.

    python benchmarks/minidpo_side.py --learner dpo --work FOLDER --batch 8 --steps 20 --out ours.json

FOLDER holds base/, adapter/ and the file, which works.py writes. Pairs of one "group" are a tree. With
--four-bit the base is read as `train.py --machine.quantize nf4 --machine.recompute` reads it.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

from sides import forget_peak, held_mib, hold_to, options, peak_mib

sys.path.insert(0, str(Path(__file__).parents[1]))


def preferences(path: Path):
    """dpo.json as token ids with turns; what the agent wrote is the completion, or what "turns" says."""
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


def open_dpo(args: argparse.Namespace, model, machine):
    """How many pairs there are, the batches of some of them, and the objective; the reference is scored."""
    from minidpo.learning.dpo import DPO, pair_loss_of
    from minidpo.learning.preferences import pair_batches, pair_loss, score_all

    data, settings = preferences(args.work / "dpo.json"), pair_loss_of(DPO(beta=args.beta))
    reference = score_all(model, data, settings, machine).cpu()

    def batches(picked: list[int]):
        return pair_batches(data, picked, reference, settings, machine, torch.device(args.device))

    return len(data.pairs), batches, partial(pair_loss, settings)


def open_sft(args: argparse.Namespace, model, machine):
    """The same of demonstrations."""
    from minidpo.learning.sft import Demonstrations, sft_batches, sft_objective
    from minidpo.model.chat import Dialogue

    rows = json.loads((args.work / "sft.json").read_text())
    dialogues = [Dialogue(row["ids"], row["turns"]) for row in rows]
    data = Demonstrations(dialogues, [str(n) for n in range(len(rows))], [1.0] * len(rows))

    def batches(picked: list[int]):
        return sft_batches(data, picked, torch.device(args.device), machine.pass_tokens())

    return len(rows), batches, sft_objective


def bench(args: argparse.Namespace, folder: str) -> dict:
    """Train, and return seconds and loss of each step, memory in MiB and versions."""
    from minidpo.data.batch import batch_scores
    from minidpo.learning.trainer import Optimizer, StepSettings, train
    from minidpo.memory import lora, recompute
    from minidpo.memory.adamw8bit import AdamW8bit
    from minidpo.memory.machine import Machine
    from minidpo.memory.quantised import load_quantised
    from minidpo.model import checkpoint
    from minidpo.system.run_folder import RunFolder, records

    device, dtype, base = torch.device(args.device), getattr(torch, args.dtype), args.work / "base"
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
    machine = Machine(micro_tokens=args.micro_tokens)
    began = time.perf_counter()
    opened = {"dpo": open_dpo, "sft": open_sft}[args.learner]
    count, batches_of, objective = opened(args, model, machine)
    precompute_s = time.perf_counter() - began
    earlier_peak = peak_mib(args.device)
    forget_peak(args.device)
    ticks, tokens = [], []

    class Clock(RunFolder):
        def log(self, record: dict) -> None:
            super().log(record)
            ticks.append(time.perf_counter())

    def batches(step: int):
        if not ticks:
            ticks.append(time.perf_counter())
        for batch in batches_of([(step * args.batch + i) % count for i in range(args.batch)]):
            tokens.append(batch.trees.tokens)
            yield batch

    adamw = AdamW8bit if args.four_bit else torch.optim.AdamW
    schedule = Optimizer(steps=args.steps, warmup=0, save_every=args.steps)
    run = Clock(folder, {})
    train(
        run,
        model,
        adamw(lora.parameters(model), lr=args.lr, weight_decay=0.0),
        batches=batches,
        score=lambda batch: batch_scores(model, batch.trees),
        objective=objective,
        settings=StepSettings(schedule, 0, "minidpo"),
    )
    return {
        "step_s": [end - start for start, end in pairwise(ticks)],
        "losses": [record["loss"] for record in records(run.folder)],
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
    parser = options(__doc__.split("\n")[0])
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
