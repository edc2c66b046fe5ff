"""How PyTorch's threads wait for each other on a CPU.

In each step threads wait for each other thousands of times. libgomp lets a waiting thread spin for some
milliseconds before it sleeps. If another program has taken the core of the thread that works, the waiting thread
blocks the other core for nothing, and a step takes several times as long. Where nothing else runs, a shorter spin
costs nothing (`docs/measured.md`). libgomp reads these variables once, when PyTorch is loaded.
"""

import os
import sys

SPINS = 3000
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # if either is set, the user has chosen


def wait_briefly() -> None:
    """Let threads sleep after SPINS turns, unless the user has set how they wait or PyTorch is already loaded."""
    if "torch" not in sys.modules and not any(name in os.environ for name in VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)


def how_they_wait() -> str:
    """How threads wait, in words for `train.py check`."""
    found = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    if found == [f"GOMP_SPINCOUNT={SPINS}"]:
        return "that wait briefly and then sleep"
    return f"that wait as {' and '.join(found) or 'libgomp lets them'}"
