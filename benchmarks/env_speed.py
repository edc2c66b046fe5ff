"""Episodes a second: this driver against Farama's Selenium environment, BrowserGym, and the floor.

    python benchmarks/env_speed.py --farama-python /tmp/farama-venv/bin/python
                                   --browsergym-python /tmp/browsergym-venv/bin/python

A scripted policy solves four tasks, and every episode must end solved. In each turn every side plays once, so
that all feel the same noise; a figure is the median of its turns. Browsers are up and pages loaded before the
clock starts. The sides:

    minidpo     this driver on 1, 4, 8, 16 pages, with trusted input
    floor       as many pages, one call for the reset and one an action, without input (env_floor.py)
    farama      1 and 2 processes as they are; farama_without_screenshots: with these switched off
    browsergym  one process as it is; browsergym_tuned: with its pauses set to 0

The ratios are geometric means over the tasks of episodes a second, each side with the number of pages or
processes that is best for it; vs_floor_ratio is seconds over the floor's seconds, so it should be small.
Writes benchmarks/results/env_speed.json.
"""

import argparse
import asyncio
import importlib.metadata
import json
import shutil
import sys
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from env_floor import Floor  # noqa: E402
from records import RESULTS, record  # noqa: E402

from envs.miniwob.browser.chromium import find_chromium  # noqa: E402
from envs.miniwob.browser.driver import Browser  # noqa: E402
from envs.miniwob.experts.by_task import EXPERTS  # noqa: E402
from envs.miniwob.tasks import HTML, SEEDS  # noqa: E402
from envs.protocol import Env, Outcome  # noqa: E402

TASKS = ("click-button", "click-link", "enter-text", "login-user")
PAGES, PROCESSES = (1, 4, 8, 16), (1, 2)
NEEDED = {"farama": "miniwob==1.1.0 selenium", "browsergym": "browsergym-miniwob==0.14.3"}
READY_S = 120  # a peer starts its browser and plays an episode


async def episode(env: Env, task: str, seed: int) -> int:
    """The number of actions in which the expert solved it."""
    seen, done = await env.reset(task, seed), []
    while seen.outcome is None:
        done.append(EXPERTS[task](seen, done).action)
        seen = await env.step(done[-1])
    assert seen.outcome is Outcome.SOLVED, (task, seed)
    return len(done)


async def play(envs: list[Env], instances: Iterable[tuple[str, int]]) -> int:
    """An episode of each (task, seed), on the next page that is free; the number of their actions."""
    left = iter(instances)

    async def page(env: Env) -> int:
        return sum([await episode(env, task, seed) for task, seed in left])

    async with asyncio.TaskGroup() as group:  # the first error ends them all
        pages = [group.create_task(page(env)) for env in envs]
    return sum(each.result() for each in pages)


class Peer:
    """Processes of a peer, each with one environment."""

    def __init__(self, name: str, python: str, task: str):
        self._command = [
            python,
            str(Path(__file__).with_name("env_peers.py")),
            name,
            "--task",
            task,
            "--chromium",
            find_chromium(),
            "--html",
            str(HTML),
        ]
        self.versions: dict[str, str] = {}

    async def start(self, processes: int) -> None:
        """Returns when all are warm."""
        pipe = asyncio.subprocess.PIPE
        self._processes = [
            await asyncio.create_subprocess_exec(*self._command, stdin=pipe, stdout=pipe)
            for _ in range(processes)
        ]
        async with asyncio.timeout(READY_S):
            for process in self._processes:
                self.versions = await self._answer(process)

    async def play(self, processes: int, instances: list[tuple[str, int]], **settings: bool) -> int:
        """The instances shared out among the first processes; the number of actions."""
        chosen = self._processes[:processes]
        for i, process in enumerate(chosen):
            order = {"seeds": [seed for _, seed in instances[i::processes]], **settings}
            process.stdin.write(json.dumps(order).encode() + b"\n")
        return sum([await self._answer(process) for process in chosen])

    async def stop(self) -> None:
        """They end when their input does."""
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            await process.wait()

    async def _answer(self, process: asyncio.subprocess.Process) -> int | dict:
        line = await process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer broke: {' '.join(self._command)}")
        return json.loads(line)


Side = tuple[str, int]  # its name, its pages or processes
Rates = dict[
    tuple[Side, str], list[tuple[float, float]]
]  # of a task in each turn: episodes/s, actions/s


async def measure(
    tasks: tuple[str, ...], pages: tuple[int, ...], turns: int, episodes: int, peers: dict[str, str]
) -> tuple[Rates, dict[str, str]]:
    """What every side reaches, and the versions; `peers` has the Python of each peer."""
    rates: Rates = {}
    versions = {"minidpo_playwright": importlib.metadata.version("playwright")}
    async with Browser(pages=max(pages)) as ours, Browser(pages=0) as bare:
        context = (await bare.new_page()).context
        versions["chromium"] = context.browser.version
        floors = [await Floor.open(context) for _ in ours.envs]
        for task in tasks:
            async with AsyncExitStack() as stack:
                sides: dict[Side, tuple] = {}
                for n in pages:
                    sides["minidpo", n] = (partial(play, ours.envs[:n]), episodes)
                    sides["floor", n] = (partial(play, floors[:n]), episodes)
                for envs in (ours.envs, floors):
                    await play(
                        envs, [(task, seed) for seed in SEEDS["validation"][: 3 * len(envs)]]
                    )
                for name, python in peers.items():
                    peer = Peer(name, python, task)
                    stack.push_async_callback(peer.stop)
                    await peer.start(max(PROCESSES) if name == "farama" else 1)
                    versions |= {
                        f"{name}_{package}": number for package, number in peer.versions.items()
                    }
                    sides |= peer_sides(name, peer, episodes)
                for turn in range(turns):
                    for side, (go, count) in sides.items():
                        seeds = SEEDS["rollouts"][1000 * turn :][:count]
                        begin = time.perf_counter()
                        actions = await go([(task, seed) for seed in seeds])
                        took = time.perf_counter() - begin
                        rates.setdefault((side, task), []).append((count / took, actions / took))
                        print(
                            f"{task} {turn} {side[0]} {side[1]}: {count / took:.2f} episodes/s",
                            flush=True,
                        )
    return rates, versions


def peer_sides(name: str, peer: Peer, episodes: int) -> dict[Side, tuple]:
    """A peer's settings, and how many episodes each plays: BrowserGym needs seconds for one."""
    if name == "browsergym":
        return {
            ("browsergym", 1): (partial(peer.play, 1), 1),
            ("browsergym_tuned", 1): (partial(peer.play, 1, tuned=True), 1),
        }
    few = max(PROCESSES) * (episodes // 16 + 1)
    return {
        (f"farama{suffix}", n): (partial(peer.play, n, screenshots=not suffix), few)
        for suffix in ("", "_without_screenshots")
        for n in PROCESSES
    }


def figures(rates: Rates) -> dict[str, float]:
    """Medians of the turns, the best number of pages or processes of each side, and the ratios there."""
    result: dict[str, float] = {}
    best: dict[str, dict[str, float]] = {}  # side -> task -> episodes/s, at its best number
    tasks = list(dict.fromkeys(task for _, task in rates))
    for (name, n), task in rates:
        for kind, values in zip(("episodes", "actions"), zip(*rates[(name, n), task]), strict=True):
            result[f"{name}_{n}_{task.replace('-', '_')}_{kind}_per_s"] = median(values)
    for name, n in dict.fromkeys(side for side, _ in rates):
        reached = {
            task: result[f"{name}_{n}_{task.replace('-', '_')}_episodes_per_s"] for task in tasks
        }
        mean = result[f"{name}_{n}_episodes_per_s"] = geometric_mean(reached.values())
        if name not in best or mean > geometric_mean(best[name].values()):
            best[name], result[f"{name}_best_number"] = reached, n
    for name in best.keys() - {"minidpo"}:
        ratio = geometric_mean(best["minidpo"][task] / best[name][task] for task in tasks)
        result[f"vs_{name}_ratio"] = 1 / ratio if name == "floor" else ratio
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for peer, packages in NEEDED.items():
        parser.add_argument(f"--{peer}-python", default="", help=f"a Python with {packages}")
    parser.add_argument("--turns", type=int, default=3, help="of each side with each task")
    parser.add_argument(
        "--episodes", type=int, default=160, help="of this driver and the floor in a turn"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "env_speed.json", help="result file")
    args = parser.parse_args()
    peers = {peer: getattr(args, f"{peer}_python") for peer in NEEDED}
    for peer, python in peers.items():
        if shutil.which(python) is None:
            parser.error(
                f"--{peer}-python is needed and must be a program, got {python!r}: python3 -m venv "
                f"/tmp/{peer}-venv && /tmp/{peer}-venv/bin/pip install {NEEDED[peer]}"
            )
    if shutil.which("chromedriver") is None:
        parser.error("Farama's environment needs chromedriver: apt-get install chromium-driver")
    rates, versions = asyncio.run(measure(TASKS, PAGES, args.turns, args.episodes, peers))
    result = figures(rates)
    for name in sorted(name for name in result if name.startswith("vs_")):
        print(f"{name} {result[name]:.2f}")
    record(args.out, result, versions)


if __name__ == "__main__":
    main()
