"""Memory of Chromium: with 16 pages, and whether it grows.

    python benchmarks/env_memory.py

Counted is PSS: what the processes of the browser hold, shared memory counted once. 16 pages play the twelve
tasks of the demo with trusted input, about ten episodes each of one task and then of the next: loading pages
is part of it. "pages_16_pss_mib" is the most that was found in the first 2,120 episodes. The tasks come round
again after 1,920: "growth_mib" is how much more there is after 4,040 episodes than after 2,120, on the same
task. Where a headless shell is run, the whole Chromium plays the first 1,000, too: "full_..." is what these
take in it. Writes benchmarks/results/env_memory.json.
"""

import argparse
import asyncio
import importlib.metadata
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from env_speed import play  # noqa: E402
from records import RESULTS, record  # noqa: E402

from envs.miniwob.browser.chromium import find_chromium  # noqa: E402
from envs.miniwob.browser.driver import Browser  # noqa: E402
from envs.miniwob.tasks import SEEDS, SUITES  # noqa: E402

PAGES, AFTER, IN_A_ROW = 16, [16, 200, 1000, 2120, 4040], 10
SETTLE_S = 3.0


def browser_processes() -> list[int]:
    """Chromium's, below this one: Playwright starts it in a session of its own, where its helpers stay."""
    parents, sessions = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has just ended
            parents[int(folder.name)], sessions[int(folder.name)] = int(fields[1]), int(fields[3])

    def below(pid: int) -> bool:
        return pid == os.getpid() or (pid in parents and below(parents[pid]))

    leaders = {
        pid for pid, session in sessions.items() if pid == session != os.getpid() and below(pid)
    }
    return [pid for pid, session in sessions.items() if session in leaders]


def pss_mib() -> float:
    """PSS of the browser, of all its processes."""
    lines = (
        line
        for pid in browser_processes()
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    )
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


async def measure(pages: int, after: list[int]) -> list[tuple[float, float]]:
    """MiB after so many episodes on all pages together, and the seconds that all of them took."""
    tasks, found, done, seconds = SUITES["demo"], [], 0, 0.0
    plan = [
        (tasks[n // (pages * IN_A_ROW) % len(tasks)], SEEDS["rollouts"][n])
        for n in range(after[-1])
    ]
    async with Browser(pages=pages) as chromium:
        for goal in after:
            began = time.perf_counter()
            await play(chromium.envs, plan[done:goal])
            seconds += time.perf_counter() - began
            await asyncio.sleep(SETTLE_S)  # what Chromium gives back, it gives back a little later
            found.append((pss_mib(), seconds))
            done = goal
            print(
                f"{goal} episodes: {found[-1][0]:.0f} MiB, {len(browser_processes())} processes, "
                f"{seconds:.1f} s",
                flush=True,
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "env_memory.json", help="result file")
    args = parser.parse_args()
    pss = dict(zip(AFTER, asyncio.run(measure(PAGES, AFTER)), strict=True))
    figures = {f"pss_after_{n}_mib": mib for n, (mib, _) in pss.items()}
    figures |= {
        "pages_16_pss_mib": max(mib for n, (mib, _) in pss.items() if n <= 2120),
        "growth_mib": pss[4040][0] - pss[2120][0],
    }
    if (full := find_chromium(shell=False)) != find_chromium():
        os.environ["MINIDPO_CHROMIUM"] = full
        *_, (mib, seconds) = asyncio.run(measure(PAGES, AFTER[:3]))
        figures |= {
            "full_after_1000_mib": mib,
            "full_1000_s": seconds,
            "shell_1000_s": pss[1000][1],
        }
    record(args.out, figures, {"playwright": importlib.metadata.version("playwright")})


if __name__ == "__main__":
    main()
