"""Nothing lost, nothing left, memory flat: thousands of episodes while processes are killed and stopped.

    python benchmarks/soak.py [--episodes 10000] [--kills 50] [--seed 1] [--work FOLDER]

The scripted experts play every task that has one, twice. The first collection is left alone. In the second,
at random moments, one process is killed: a renderer, Chromium itself, its driver, the process of the pages,
or the collecting process, which is then started again. The first three may be stopped for good in place of
that. (Where the process of the pages stands still, its caller waits ten minutes, as for a slow machine.) Both
files must hold the same episodes. When a collecting process has ended, no process below it may be left.
`growth_mib` is the memory of all of them together (PSS) in the last quarter of the first collection, less
that of the second quarter: medians. Writes benchmarks/results/soak.json.
"""

import argparse
import importlib.metadata
import os
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.records import RESULTS, record  # noqa: E402
from envs import resolve, world  # noqa: E402
from minidpo.data.episodes import read  # noqa: E402

VICTIMS = {
    "renderer": r"--type=renderer(?!.*--top-chrome-webui)",
    "chromium": r"^(?!.*--type=).*--remote-debugging-pipe",
    "driver": r"playwright/driver",
    "pages": r"envs\.miniwob\.browser\.remote",
    "collector": r"collect\.py",
}
PATIENCE_S = 60.0  # within which no process is left


def below(parent: int) -> dict[int, str]:
    """The process and all below it, with their command lines."""
    listing = subprocess.run(
        ["ps", "-ewwo", "pid=,ppid=,args="], capture_output=True, text=True
    ).stdout
    rows = [line.split(None, 2) for line in listing.splitlines()]
    found, level = {}, {str(parent)}
    while level:
        found |= {int(pid): command for pid, _, command in rows if pid in level}
        level = {pid for pid, above, _ in rows if above in level and int(pid) not in found}
    return found


def pss_mib(pids: list[int]) -> float:
    """PSS of the processes that still run."""
    kib = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except (
            FileNotFoundError,
            ProcessLookupError,
            PermissionError,
        ):  # gone, or in a sandbox of its own
            continue
        kib += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kib / 1024


def survivors(seen: dict[int, str]) -> list[str]:
    """Which of these processes still run after PATIENCE_S."""
    end = time.monotonic() + PATIENCE_S
    while True:
        now = {pid: command for pid, command in below(1).items() if seen.get(pid) == command}
        if not now or time.monotonic() > end:
            return sorted(now.values())
        time.sleep(0.5)


def disturb(collector: int, rng: random.Random) -> str | None:
    """Kill or stop a process of a kind drawn at random; returns what was done, None if there is none."""
    kind = rng.choice(list(VICTIMS))
    pids = [pid for pid, command in below(collector).items() if re.search(VICTIMS[kind], command)]
    if not pids:
        return None
    stop = kind in ("renderer", "chromium", "driver") and rng.random() < 0.5
    try:
        os.kill(rng.choice(pids), signal.SIGSTOP if stop else signal.SIGKILL)
    except ProcessLookupError:  # it has just ended
        return None
    return f"{kind} {'stopped' if stop else 'killed'}"


def collect(out: Path, args: argparse.Namespace, kills: int) -> dict:
    """Collect to `out`, with so many accidents, until the file is whole."""
    tasks = resolve(world("miniwob"), args.tasks)
    instances = -(-args.episodes // len(tasks))
    words = f"collect.py --policy expert --instances {instances} --tasks {','.join(tasks)}"
    words = f"{words} --machine.pages {args.pages} --out {out}"
    command = [sys.executable, *shlex.split(words)]
    rng, began, memory, left, done = random.Random(args.seed), time.monotonic(), [], [], []
    wanted = instances * len(tasks)
    accidents = sorted(rng.sample(range(wanted // 50, wanted), kills))  # after so many episodes
    starts = 0
    while count(out) < wanted:
        starts += 1
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        seen: dict[int, str] = {}
        while process.poll() is None:
            time.sleep(1)
            family = below(process.pid)
            seen |= family
            memory.append((count(out), pss_mib(list(family))))
            if accidents and count(out) >= accidents[0] and (what := disturb(process.pid, rng)):
                accidents.pop(0)
                done.append(what)
                print(f"{count(out)} episodes: {what}", flush=True)
        left += survivors(seen)
        if starts > kills + 5:
            raise RuntimeError(f"{out} is not whole after {starts} starts")
    return {
        "episodes": wanted,
        "seconds": time.monotonic() - began,
        "accidents": done,
        "left": left,
        "starts": starts,
        "memory": memory,
    }


def count(path: Path) -> int:
    """Whole lines in a file."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def growth_mib(memory: list[tuple[int, float]], wanted: int) -> float:
    """Median memory in the last quarter of the episodes, less that in the second quarter."""
    quarters = [[mib for n, mib in memory if low <= 4 * n / wanted < low + 1] for low in (1, 3)]
    return statistics.median(quarters[1]) - statistics.median(quarters[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--tasks", default="expert", help="suites or task names")
    parser.add_argument("--pages", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, help="folder of both files (default: temporary)")
    parser.add_argument("--out", type=Path, default=RESULTS / "soak.json", help="result file")
    args = parser.parse_args()
    if (
        args.episodes < 2_000 or args.kills > args.episodes // 4
    ):  # fewer are over before memory was measured
        parser.error("--episodes is at least 2,000, and four times --kills")
    work = (args.work or Path(tempfile.mkdtemp(prefix="soak_"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    if begun := sorted(work.glob("*.jsonl")):  # what was measured while they were played is gone
        parser.error(
            f"{begun[0]} is of an earlier soak: give --work another folder, or delete the file"
        )
    calm = collect(work / "calm.jsonl", args, kills=0)
    rough = collect(work / "rough.jsonl", args, kills=args.kills)
    calm_ones, rough_ones = (
        {e.key: e for e in read(work / f"{name}.jsonl")} for name in ("calm", "rough")
    )
    assert calm_ones.keys() == rough_ones.keys()
    differ = [episode.name for key, episode in calm_ones.items() if episode != rough_ones[key]]
    figures = {
        "episodes": calm["episodes"],
        "accidents": len(rough["accidents"]),
        "starts": rough["starts"],
        "episodes_that_differ": len(differ),
        "processes_left": len(calm["left"] + rough["left"]),
        "growth_mib": growth_mib(calm["memory"], calm["episodes"]),
        "peak_mib": max(mib for _, mib in calm["memory"]),
        "calm_s": calm["seconds"],
        "rough_s": rough["seconds"],
    }
    record(
        args.out,
        figures,
        {"playwright": importlib.metadata.version("playwright")},
        accidents=rough["accidents"],
        differ=differ,
        left=calm["left"] + rough["left"],
    )
    print("\n".join(f"{name:24} {value:,.0f}" for name, value in figures.items()))
    sys.exit(bool(differ or calm["left"] or rough["left"]))


if __name__ == "__main__":
    main()
