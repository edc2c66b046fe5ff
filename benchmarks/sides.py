"""What the benchmarks share: how memory is read and a result recorded; and the options of dpo_step's sides.

Nothing but the standard library, because the other sides run in a Python of their own.
"""

import argparse
import json
import os
import platform
import sys
from datetime import date
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


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


def record(out: Path, figures: dict, versions: dict, device: str | None = None, **more) -> None:
    """Write a result: the figures, and where, when, with what and by which command they were measured."""
    out.parent.mkdir(parents=True, exist_ok=True)
    machine = f"{platform.system()} {platform.machine()}, {device or f'{os.cpu_count()} CPU cores'}"
    out.write_text(json.dumps({"figures": figures, "date": date.today().isoformat(), "machine": machine,
                               "versions": versions, **more,
                               "command": " ".join(["python", *sys.argv])}, indent=1) + "\n")
