"""Our side of SFT in real_model.py: the dialogues of sft.json, trained by the code that `train.py sft` runs.

    python benchmarks/minidpo_sft.py --work FOLDER --batch 8 --steps 4 --out ours.json

FOLDER holds base/, adapter/ and sft.json, which real_model.py writes. The order is the file's.
"""

import argparse
import json
import os
import tempfile

from minidpo_dpo import train_timed
from sides import forget_peak, held_mib, options, peak_mib


def bench(args: argparse.Namespace, folder: str) -> dict:
    """Train, and return seconds and loss of each step, memory in MiB and versions."""
    from minidpo.learning.sft import Demonstrations, sft_batches, sft_objective
    from minidpo.memory import lora
    from minidpo.memory.machine import Machine
    from minidpo.model import checkpoint
    from minidpo.model.chat import Dialogue

    rows = json.loads((args.work / "sft.json").read_text())
    dialogues = [Dialogue(row["ids"], row["turns"]) for row in rows]
    data = Demonstrations(dialogues, [str(n) for n in range(len(rows))], [1.0] * len(rows))
    device = torch.device(args.device)
    model = checkpoint.load(args.work / "base", getattr(torch, args.dtype), device)
    before = held_mib(args.device)
    lora.load(model, args.work / "adapter")
    forget_peak(args.device)
    with_gradients = set()

    def batches(picked: list[int]):
        for batch in sft_batches(data, picked, device, Machine().pass_tokens()):
            yield batch  # comes back when it has been run backward
            with_gradients.update(
                name.split(".")[-1]
                for name, weight in model.named_parameters()
                if weight.grad is not None
            )

    optimizer = torch.optim.AdamW(lora.parameters(model), lr=args.lr, weight_decay=0.0)
    timed = train_timed(
        args, folder, model, optimizer, n=len(rows), batches=batches, objective=sft_objective
    )
    return timed | {
        "before_mib": before,
        "peak_mib": peak_mib(args.device),
        "gradients": sorted(with_gradients),
        "versions": {"torch": torch.__version__},
    }


if __name__ == "__main__":
    args = options(__doc__.split("\n")[0]).parse_args()
    os.environ.update(OMP_NUM_THREADS=str(args.threads), TQDM_DISABLE="1")
    import torch

    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="minidpo_") as folder:
        args.out.write_text(json.dumps(bench(args, folder), indent=1) + "\n")
