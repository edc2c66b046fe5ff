"""The processes below a test, by their command lines."""

import os
import re
import subprocess
import time
from pathlib import Path


def children(parent: int) -> dict[int, str]:
    """The processes below one, with their command lines."""
    # `ww`: whole lines, however narrow the terminal
    listing = subprocess.run(["ps", "-ewwo", "pid=,ppid=,args="], capture_output=True, text=True)
    rows = [
        (int(pid), int(above), command)
        for pid, above, command in (line.split(None, 2) for line in listing.stdout.splitlines())
    ]
    found, parents = {}, {parent}
    # level by level: once the numbers have started again, a child's is below its parent's
    while parents:
        level = {pid: command for pid, above, command in rows if above in parents}
        found, parents = found | level, set(level)
    return {pid: command for pid, command in found.items() if not command.startswith("ps ")}


def alive(pids) -> list[int]:
    """Which of the processes still run; the dead that nobody has buried do not count."""
    stats = {pid: Path(f"/proc/{pid}/stat") for pid in pids}
    return [
        pid
        for pid, stat in stats.items()
        if stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    ]


def left(seen: dict[int, str]) -> list[int]:
    """Which of the processes seen some time ago still run: their numbers may be others' by now."""
    now = children(0)
    return [pid for pid, command in seen.items() if now.get(pid) == command]


def wait_for(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    assert condition()


def processes(kind, parent=None):
    """Below a process, by default this one: the driver, Chromium's own process, its renderers, the guard."""
    pattern = {
        "driver": r"playwright/driver",
        "chromium": r"^(?!.*--type=).*--remote-debugging-pipe",
        "renderer": r"--type=renderer(?!.*--top-chrome-webui)",
        "guard": r"^/bin/sh -c read",
        "nothing": r"(?!)",
    }[kind]
    below = children(parent or os.getpid())
    return [pid for pid, command in below.items() if re.search(pattern, command)]
