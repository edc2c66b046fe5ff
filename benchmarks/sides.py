"""What both sides of a training share: their options, and how memory is held down and read.

Nothing but the standard library and torch, because TRL's side runs in a Python of its own.
"""

import argparse
from pathlib import Path


def options(description: str) -> argparse.ArgumentParser:
    """The options that both sides take."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--learner", choices=("dpo", "sft"), default="dpo")
    parser.add_argument(
        "--work", type=Path, required=True, help="folder with base/, adapter/ and LEARNER.json"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument(
        "--batch", type=int, default=8, help="examples an optimizer step, in the file's order"
    )
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate, falling as a cosine")
    parser.add_argument("--beta", type=float, default=0.1, help="DPO's beta")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of PyTorch")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the base"
    )
    parser.add_argument(
        "--four-bit",
        action="store_true",
        help="the base in NF4 with double quantisation, "
        "gradient checkpointing, and AdamW in 8 bits",
    )
    parser.add_argument(
        "--cap-gib", type=float, help="all that PyTorch's allocator may take of the GPU"
    )
    return parser


def hold_to(gib: float) -> None:
    """From here on the allocator raises torch.OutOfMemoryError where it would take more of the GPU."""
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total))


def memory_mib(field: str) -> float:
    """`VmRSS` or `VmHWM` (its peak) in MiB; not ru_maxrss, which a child inherits from a large parent."""
    _, _, rest = Path("/proc/self/status").read_text().partition(field)
    return int(rest.split()[1]) / 1024


def held_mib(device: str) -> float:
    """What is in use: of this process, or of what the GPU's allocator gave out."""
    import torch

    return torch.cuda.memory_allocated() / 2**20 if device == "cuda" else memory_mib("VmRSS")


def peak_mib(device: str) -> float:
    """The most that was in use since `forget_peak`."""
    import torch

    return torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else memory_mib("VmHWM")


def forget_peak(device: str = "cpu") -> None:
    """The peak counts from now on."""
    import torch

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")
