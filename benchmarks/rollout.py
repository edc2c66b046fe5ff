"""Episodes a second: a model on real pages of the demo suite, and where the time goes.

    python benchmarks/rollout.py [--pages 4,8,16,32] [--model smollm2 --adapter runs/demo/02-sft/adapter]

Groups of eight at temperature 1, as `collect.py` plays them, after a short warm-up. For each number of pages:

    PAGES_episodes_per_s, _turns_per_s, _tokens_per_s
    PAGES_model_busy         the share of the time in which the model is at work
    PAGES_in_model, _in_browser, _in_python   of an average page: waiting for its answer, for its page, for
                             Python or for the others to end; they add up to 1
    PAGES_browser_cores      CPU seconds that the pages' process, the driver and Chromium take, a second

Writes benchmarks/results/rollout.json.
"""

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

from records import RESULTS, record

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import envs  # noqa: E402
from minidpo.acting.jobs import make_jobs, split_instances  # noqa: E402
from minidpo.acting.policies import ModelPolicy, Sampling  # noqa: E402
from minidpo.acting.rollout import play  # noqa: E402
from minidpo.memory.loading import open_policy  # noqa: E402
from minidpo.memory.machine import Machine  # noqa: E402
from minidpo.model.checkpoint import NANO  # noqa: E402

WORLD = envs.world("miniwob")


def below(parent: int) -> float:
    """CPU seconds of all processes below this one."""
    ticks, parents, found = {}, {parent}, set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        ticks[int(stat.parent.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    while parents:
        parents = {pid for pid, (above, _) in ticks.items() if above in parents}
        found |= parents
    return sum(ticks[pid][1] for pid in found) / os.sysconf("SC_CLK_TCK")


async def measure(
    pages: int,
    instances: int,
    tasks: tuple[str, ...],
    device: str = "cpu",
    model: str = NANO,
    adapter: Path | None = None,
) -> dict[str, float]:
    model, chat, _ = open_policy(model, adapter, Machine(device=device))
    policy = ModelPolicy(model, chat, "shipped", WORLD.system_prompt, Sampling(), pages=pages)
    episodes, busy_s = [], 0.0

    def timed(call):
        def run(*arguments, **options):
            nonlocal busy_s
            began = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                busy_s += time.perf_counter() - began

        return run

    policy.sampler.ask, policy.sampler.step = timed(policy.sampler.ask), timed(policy.sampler.step)

    def jobs_of(split: str, count: int) -> list:
        return make_jobs(WORLD, split_instances(WORLD, dict.fromkeys(tasks, count), split), 8)

    async with WORLD.open(pages) as places:
        warm_up = jobs_of("validation", 1)[: 8 * pages]
        errors = await play(places, warm_up, policy, episodes.append, WORLD)
        episodes.clear()
        busy_s, cpu, began = 0.0, below(os.getpid()), time.perf_counter()
        wanted = jobs_of("rollouts", instances)
        errors += await play(places, wanted, policy, episodes.append, WORLD)
        seconds, cpu = time.perf_counter() - began, below(os.getpid()) - cpu
    assert not errors, errors
    in_model, in_browser = (
        sum(getattr(e.cost, name) for e in episodes) / seconds / pages
        for name in ("model_s", "browser_s")
    )
    return {
        "episodes_per_s": len(episodes) / seconds,
        "turns_per_s": sum(len(e.turns) for e in episodes) / seconds,
        "tokens_per_s": sum(e.cost.tokens_written for e in episodes) / seconds,
        "model_busy": busy_s / seconds,
        "in_model": in_model,
        "in_browser": in_browser,
        "in_python": 1 - in_model - in_browser,
        "browser_cores": cpu / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pages", default="4,8,16,32", help="numbers of pages")
    parser.add_argument(
        "--instances", type=int, default=8, help="of each task, eight episodes each"
    )
    parser.add_argument("--tasks", default=",".join(WORLD.suites["demo"]), help="tasks")
    parser.add_argument("--model", default=NANO, help="the base")
    parser.add_argument("--adapter", type=Path, help="folder of its adapter")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS / "rollout.json")
    args = parser.parse_args()
    figures = {}
    for pages in map(int, args.pages.split(",")):
        found = asyncio.run(
            measure(
                pages,
                args.instances,
                tuple(args.tasks.split(",")),
                args.device,
                args.model,
                args.adapter,
            )
        )
        print(pages, {name: round(value, 2) for name, value in found.items()}, flush=True)
        figures |= {f"{pages}_{name}": round(value, 3) for name, value in found.items()}
    device = torch.cuda.get_device_name() if args.device == "cuda" else None
    record(args.out, figures, {"torch": torch.__version__}, device)


if __name__ == "__main__":
    main()
