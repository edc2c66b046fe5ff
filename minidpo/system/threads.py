"""How PyTorch's threads wait for each other on a CPU.

A step makes its threads wait thousands of times. libgomp lets a thread that waits spin for some milliseconds
before it sleeps. If another program then has the core of the thread that works, the one that waits holds the
other core for nothing, and a step takes several times as long. A short spin costs nothing where nothing else
runs (`docs/measured.md`, "Beside other programs"). libgomp reads its variables once, as PyTorch is loaded.
"""

import os
import sys

SPINS = 3000
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # with either the user has chosen


def wait_briefly() -> None:
    """Let threads sleep after SPINS turns, unless the user's variables say how they wait, or PyTorch is loaded
    already."""
    if "torch" not in sys.modules and not any(name in os.environ for name in VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)


def how_they_wait() -> str:
    """For `train.py check`: what is set, and by whom."""
    found = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    if found == [f"GOMP_SPINCOUNT={SPINS}"]:
        return "that wait briefly and then sleep"
    return f"that wait as {' and '.join(found) or 'libgomp lets them'}"
