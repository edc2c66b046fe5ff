"""What both sides of dpo_step.py share: their options, and how memory is read.

Nothing but the standard library, because TRL's side runs in a Python of its own.
"""

import argparse
from pathlib import Path


def options(description: str) -> argparse.ArgumentParser:
    """The options that both sides take."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--work", type=Path, required=True, help="folder with base/, adapter/ and pairs.json")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--batch", type=int, default=8, help="pairs an optimizer step, in the file's order")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate, falling as a cosine")
    parser.add_argument("--beta", type=float, default=0.1, help="DPO's beta")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of PyTorch")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the base")
    return parser


def memory_mib(field: str) -> float:
    """`VmRSS` or `VmHWM` (its peak) in MiB; not ru_maxrss, which a child inherits from a large parent."""
    line = next(line for line in open("/proc/self/status") if line.startswith(field))
    return int(line.split()[1]) / 1024


def forget_peak() -> None:
    """The peak counts from now on."""
    Path("/proc/self/clear_refs").write_text("5")
