"""Our side of dpo_step.py: the pairs of pairs.json, trained by the code that `train.py dpo` runs.

    python benchmarks/minidpo_dpo.py --work FOLDER --batch 8 --steps 20 --out ours.json

FOLDER holds base/, adapter/ and pairs.json, which dpo_step.py writes. Pairs of one "group" are a tree.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from sides import forget_peak, memory_mib, options

sys.path.insert(0, str(Path(__file__).parents[1]))


def preferences(path: Path):
    """pairs.json as token ids with turns; what the agent wrote is the completion, or what "turns" says."""
    from minidpo.chat import Dialogue
    from minidpo.preference import Preferences

    data, found = Preferences([], [], [], []), {}
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
    return data


def bench(args: argparse.Namespace, folder: str) -> dict:
    """Train, and return seconds and loss of each step, memory in MiB and versions."""
    from minidpo import lora, pretrained
    from minidpo.options import DPO, Machine
    from minidpo.preference import pair_batches, pair_loss, score_all, settings_of
    from minidpo.runs import Run
    from minidpo.trainer import train
    from minidpo.tree import Budget, batch_scores

    device = torch.device(args.device)
    budget = Budget(args.micro_tokens or Machine().micro_tokens, Machine().tree_tokens)
    data = preferences(args.work / "pairs.json")
    model = pretrained.load(args.work / "base", getattr(torch, args.dtype), device)
    before = torch.cuda.memory_allocated() / 2**20 if device.type == "cuda" else memory_mib("VmRSS")
    lora.load(model, args.work / "adapter")
    model.eval()
    settings = settings_of(DPO(beta=args.beta))
    began = time.perf_counter()
    reference = score_all(model, data, settings, budget).cpu()
    precompute_s = time.perf_counter() - began
    torch.cuda.reset_peak_memory_stats() if device.type == "cuda" else forget_peak()
    ticks, tokens = [], []

    class Clock(Run):
        def log(self, record: dict) -> None:
            super().log(record)
            ticks.append(time.perf_counter())

    def batches(step: int):
        if not ticks:
            ticks.append(time.perf_counter())
        picked = [i % len(data.pairs) for i in range(step * args.batch, (step + 1) * args.batch)]
        for batch in pair_batches(data, picked, reference, settings, budget, device):
            tokens.append(batch.tokens)
            yield batch

    optimizer = torch.optim.AdamW(lora.parameters(model), lr=args.lr, weight_decay=0.0)
    run = Clock(folder, {})
    train(run, model, [optimizer], args.steps, batches, lambda batch: batch_scores(model, batch.trees),
          lambda batch, scores: pair_loss(settings, batch, scores), 0, 1.0, 0, args.steps, "minidpo")
    return {
        "step_s": [end - start for start, end in zip(ticks, ticks[1:])],
        "losses": [record["loss"] for record in run.records()],
        "precompute_s": precompute_s,
        "before_mib": before,
        "peak_mib": (torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda"
                     else memory_mib("VmHWM")),
        "computed_tokens_per_step": sum(tokens) / args.steps,
        "trainable": sum(p.numel() for p in lora.parameters(model)),
        "versions": {"torch": torch.__version__},
    }


if __name__ == "__main__":
    parser = options(__doc__.split("\n")[0])
    parser.add_argument("--micro-tokens", type=int, help="tokens a forward pass; the default of train.py")
    args = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS=str(args.threads), TQDM_DISABLE="1")
    import torch

    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="minidpo_") as folder:
        args.out.write_text(json.dumps(bench(args, folder), indent=1) + "\n")
