"""Our side of SFT in real_model.py: the dialogues of sft.json, trained by the code that `train.py sft` runs.

    python benchmarks/minidpo_sft.py --work FOLDER --batch 8 --steps 4 --out ours.json

FOLDER holds base/, adapter/ and sft.json, which real_model.py writes. The order is the file's.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from sides import forget_peak, held_mib, options, peak_mib

sys.path.insert(0, str(Path(__file__).parents[1]))


def bench(args: argparse.Namespace, folder: str) -> dict:
    """Train, and return seconds and loss of each step, memory in MiB and versions."""
    from minidpo.config import Optimizer
    from minidpo.data.batch import batch_scores
    from minidpo.learning.sft import Demonstrations, sft_batches, sft_objective
    from minidpo.learning.trainer import Schedule, train
    from minidpo.memory import lora
    from minidpo.memory.machine import Machine
    from minidpo.model import checkpoint
    from minidpo.model.chat import Dialogue
    from minidpo.system.run_folder import RunFolder, records

    rows = json.loads((args.work / "sft.json").read_text())
    dialogues = [Dialogue(row["ids"], row["turns"]) for row in rows]
    data = Demonstrations(dialogues, [str(n) for n in range(len(rows))], [1.0] * len(rows))
    device = torch.device(args.device)
    model = checkpoint.load(args.work / "base", getattr(torch, args.dtype), device)
    before = held_mib(args.device)
    lora.load(model, args.work / "adapter")
    forget_peak(args.device)
    ticks, with_gradients = [], set()

    class Clock(RunFolder):
        def log(self, record: dict) -> None:
            super().log(record)
            ticks.append(time.perf_counter())

    def batches(step: int):
        if not ticks:
            ticks.append(time.perf_counter())
        picked = [i % len(dialogues) for i in range(step * args.batch, (step + 1) * args.batch)]
        for batch in sft_batches(data, picked, device, Machine().pass_tokens()):
            yield batch  # comes back when it has been run backward
            with_gradients.update(name.split(".")[-1] for name, weight in model.named_parameters()
                                  if weight.grad is not None)

    optimizer = torch.optim.AdamW(lora.parameters(model), lr=args.lr, weight_decay=0.0)
    run = Clock(folder, {})
    train(run, model, [optimizer], batches=batches, score=lambda batch: batch_scores(model, batch.trees),
          objective=sft_objective,
          schedule=Schedule(Optimizer(args.steps, warmup=0, save_every=args.steps), seed=0, title="minidpo"))
    return {"step_s": [end - start for start, end in zip(ticks, ticks[1:])],
            "losses": [record["loss"] for record in records(run.folder)],
            "before_mib": before, "peak_mib": peak_mib(args.device),
            "gradients": sorted(with_gradients),
            "versions": {"torch": torch.__version__}}


if __name__ == "__main__":
    args = options(__doc__.split("\n")[0]).parse_args()
    os.environ.update(OMP_NUM_THREADS=str(args.threads), TQDM_DISABLE="1")
    import torch

    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="minidpo_") as folder:
        args.out.write_text(json.dumps(bench(args, folder), indent=1) + "\n")
