"""`train.py check`: can this machine run the demo? Prints a line for each requirement."""

import asyncio
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from envs.protocol import Outcome, World
from minidpo.memory.context import ContextOptions
from minidpo.memory.loading import open_policy
from minidpo.memory.machine import GIB, Machine, multiplies_bfloat16
from minidpo.memory.packing import pack
from minidpo.model.chat import Message
from minidpo.model.sampling import Request, Sampler
from minidpo.system.command_line import as_started
from minidpo.system.threads import how_they_wait

DISK_GIB = 2.0  # what a run of the demo writes, with some room to spare


@dataclass(frozen=True, kw_only=True)
class Check(ContextOptions):
    """Check Python, PyTorch, disk, world, model, memory and GPU of this machine."""

    model: str = "smollm2"
    out: Path = Path("runs")
    "the folder where runs will be written"


class Need(NamedTuple):
    """Peak bytes that a configuration needs, and free bytes (None: on a GPU that is not there)."""

    peak: float
    limit: float | None
    on_gpu: bool


def check(
    options: Check, world: World, machine: Machine, needs: Mapping[str, Callable[[], Need]]
) -> None:
    """Print a line for each check: ok, or what to do. Exits with 1 if the demo cannot run here.

    needs: {name: plan} for the files in configs/, with "demo" among them.
    """
    steps = {
        # an older Python has been refused already (minidpo/__init__.py)
        "Python": lambda: f"{sys.version.split()[0]} in {sys.prefix}",
        "PyTorch": pytorch,
        "disk": lambda: disk(options.out),
        world.name: lambda: plays(world),
        "memory": lambda: plan("demo", needs["demo"]),
    }
    failed = [name for name, step in steps.items() if not passes(name, step)]
    fits = {
        name: passes(f"configs/{name}.toml", partial(plan, name, need), needed=False)
        for name, need in needs.items()
        if name != "demo"
    }
    # last, because plans would count the memory that the model leaves behind
    if not passes("model", lambda: model(options.model, machine)):
        failed.append("model")
    passes("GPU", gpu, needed=False)
    if not failed:
        slow = not (multiplies_bfloat16() or torch.cuda.is_available())
        hours = " and will take about an hour (make demo-nano is shorter)" if slow else ""
        print(as_started(f"the demo can run here{hours}: make demo"))
        return
    print(as_started(f"the demo cannot run here: {', '.join(failed)}"))
    if set(failed) <= {"model", "memory"} and fits.get("nano"):  # all else is there
        print(as_started("the demo on the small model that ships with minidpo can: make demo-nano"))
    sys.exit(1)


def passes(name: str, step: Callable[[], str], needed: bool = True) -> bool:
    """Run a step and print the result. Returns False if it failed; `needed`: the demo cannot run without it."""
    try:
        print(f"ok    {name}: {step()}", flush=True)
        return True
    except (ValueError, OSError, RuntimeError) as error:  # whatever a broken machine raises
        why = as_started(" ".join(str(error).split()))
        print(f"{'FAIL' if needed else 'no  '}  {name}: {why}", flush=True)
        return False


def pytorch() -> str:
    """PyTorch's version, its threads, and whether the processor has instructions for bfloat16."""
    numbers = torch.__version__.split("+")[0].split(".")
    if tuple(map(int, numbers[:2])) < (2, 9):
        raise ValueError(
            f"{torch.__version__} is older than 2.9: run make setup, or pip install --upgrade torch"
        )
    fast = "" if multiplies_bfloat16() else "no "
    return (
        f"{torch.__version__}, {torch.get_num_threads()} threads {how_they_wait()}, {fast}instructions for "
        "bfloat16"
    )


def disk(folder: Path) -> str:
    """Whether runs can be written to this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / ".check"
    probe.write_bytes(b"0" * 4096)
    probe.unlink()
    free = shutil.disk_usage(folder).free / GIB
    if free < DISK_GIB:
        raise ValueError(
            f"{free:.1f} GiB are free under {folder}, but a run takes up to {DISK_GIB:g}: make room"
        )
    return f"{free:.0f} GiB are free under {folder}"


def plays(world: World) -> str:
    """Open an instance of the world's first task and solve it, as its scripted expert does."""
    world.require()
    task = next(iter(world.suites.values()))[0]
    seed = world.instances(task, "validation")[0]
    expert = world.expert(task, seed)

    async def solve() -> tuple[Outcome | None, float]:
        async with world.open(1) as (env,):
            began = time.perf_counter()
            seen, done = await env.reset(task, seed), []
            while seen.outcome is None and len(done) < world.step_limit(task):
                done.append(expert(seen, done).action)
                seen = await env.step(done[-1])
            return seen.outcome, time.perf_counter() - began

    outcome, seconds = asyncio.run(solve())
    if outcome != Outcome.SOLVED:
        raise ValueError(
            f"{task} was opened but its expert did not solve it ({outcome}): please report this"
        )
    return f"opened {task} and solved it in {1000 * seconds:.0f} ms"


def model(source: str, machine: Machine) -> str:
    """Load the demo's model and let it answer a question."""
    language_model, chat, _ = open_policy(source, None, machine)
    sampler = Sampler(pack(language_model), 1, chat.end, temperature=0.0)
    prompt = chat.prompt([Message("user", "What is the capital of France?")])
    sampler.ask(0, Request(tuple(prompt), (0.0,) * 48))
    began, answers = time.perf_counter(), {}
    while not answers:
        answers = sampler.step()
    rate = len(answers[0].ids) / (time.perf_counter() - began)
    return f"{source} answers {chat.decode(answers[0].ids)!r}, {rate:.0f} tokens/s"


def plan(name: str, need: Callable[[], Need]) -> str:
    """The memory that a configuration needs, and the memory that is free."""
    peak, limit, on_gpu = need()
    if limit is None or (on_gpu and not torch.cuda.is_available()):
        raise ValueError(f"needs a GPU with {peak / GIB:.1f} GiB, but PyTorch sees none")
    if peak > limit:
        raise ValueError(
            f"needs {peak / GIB:.1f} GiB, but {limit / GIB:.1f} are free: close other programs; train.py "
            f"plan with configs/{name}.toml says what else helps"
        )
    return f"needs {peak / GIB:.1f} GiB, {limit / GIB:.1f} are free"


def gpu() -> str:
    """The GPU's name and memory."""
    if not torch.cuda.is_available():
        raise ValueError("PyTorch sees none; the demo runs without one")
    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name}, {properties.total_memory / GIB:.0f} GiB"
