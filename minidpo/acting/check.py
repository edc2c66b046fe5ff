"""`train.py check`: whether this machine can run the demo, a line for each thing that it takes."""

import asyncio
import importlib.metadata
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from envs.miniwob.browser.driver import Browser
from envs.miniwob.experts.by_task import EXPERTS
from envs.miniwob.tasks import SEEDS
from envs.protocol import Outcome
from minidpo.config import CheckCommand, LoopCommand
from minidpo.learning.plan_loop import peak_and_limit
from minidpo.memory.loading import open_policy
from minidpo.memory.machine import GIB, multiplies_bfloat16
from minidpo.memory.packing import pack
from minidpo.model.chat import Message
from minidpo.model.sampling import Request, Sampler
from minidpo.system.command_line import PACKAGED, as_started, parse

CONFIGS = PACKAGED if PACKAGED.is_dir() else Path(__file__).parents[2] / "configs"
DISK_GIB = 2.0  # what a run of the demo writes, and some room


def check(config: CheckCommand) -> None:
    """Print a line for each check: ok, or what to do. Exits with 1 if the demo cannot run here."""
    steps: list[tuple[str, Callable[[], str]]] = [
        # older Pythons do not come so far (minidpo/__init__.py)
        ("Python", lambda: f"{sys.version.split()[0]} in {sys.prefix}"),
        ("PyTorch", pytorch),
        ("disk", lambda: disk(config.out)),
        ("browser", browser),
        ("memory", lambda: plan("demo")),
    ]
    failed = [name for name, step in steps if not passes(name, step)]
    fits = {
        path.stem: passes(f"configs/{path.name}", lambda: plan(path.stem), needed=False)
        for path in sorted(CONFIGS.glob("*.toml"))
        if path.stem not in ("demo", "nano-base")
    }
    # last: what the model leaves in this process, plans would count
    steps = [
        ("model", lambda: model(config.model)),
        *[("MLflow", mlflow)] * (config.track == "mlflow"),
    ]
    failed += [name for name, step in steps if not passes(name, step)]
    passes("GPU", gpu, needed=False)
    slow = not (multiplies_bfloat16() or torch.cuda.is_available())
    print(
        as_started(
            "the demo cannot run here: " + ", ".join(failed)
            if failed
            else "the demo can run here"
            + ", for an hour or so (make demo-nano is shorter)" * slow
            + ": make demo"
        )
    )
    if failed:
        if set(failed) <= {"model", "memory"} and fits.get("nano"):  # what it needs else is there
            print(
                as_started(
                    "the same on the small model that ships with minidpo can: make demo-nano"
                )
            )
        sys.exit(1)


def passes(name: str, step: Callable[[], str], needed: bool = True) -> bool:
    """Run a step and print how it went; FAIL if the demo needs it. False if it failed."""
    try:
        print(f"ok    {name}: {step()}", flush=True)
        return True
    except (
        ValueError,
        OSError,
        RuntimeError,
    ) as error:  # whatever a broken machine raises, in one line
        why = as_started(" ".join(str(error).split()))
        print(f"{'FAIL' if needed else 'no  '}  {name}: {why}", flush=True)
        return False


def pytorch() -> str:
    """The installed PyTorch, and what this processor multiplies fast in."""
    numbers = torch.__version__.split("+")[0].split(".")
    if tuple(map(int, numbers[:2])) < (2, 9):
        raise ValueError(
            f"{torch.__version__} is older than 2.9: run make setup, or pip install --upgrade torch"
        )
    return (
        f"{torch.__version__}, {torch.get_num_threads()} threads, "
        f"{'' if multiplies_bfloat16() else 'no '}instructions for bfloat16"
    )


def disk(folder: Path) -> str:
    """Whether runs can be written where they are to lie."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / ".check"
    probe.write_bytes(b"0" * 4096)
    probe.unlink()
    if (free := shutil.disk_usage(folder).free / GIB) < DISK_GIB:
        raise ValueError(
            f"{free:.1f} GiB are free under {folder}, a run takes up to {DISK_GIB:g}: make room"
        )
    return f"{free:.0f} GiB are free under {folder}"


def browser() -> str:
    """Open a real page and solve it, as its scripted expert does."""

    async def solve() -> tuple[str, float]:
        async with Browser(pages=1) as chromium:
            (env,), began = chromium.envs, time.perf_counter()
            seen = await env.reset("click-button", SEEDS["validation"][0])
            seen = await env.step(EXPERTS["click-button"](seen, []).action)
            return seen.outcome, time.perf_counter() - began

    outcome, seconds = asyncio.run(solve())
    if outcome != Outcome.SOLVED:
        raise ValueError(
            f"the page click-button was opened and not solved ({outcome}): please report this"
        )
    return f"opened the page click-button and solved it in {1000 * seconds:.0f} ms"


def model(source: str) -> str:
    """Load the demo's model and let it answer."""
    language_model, chat, _ = open_policy(source, None, loop_config("demo").machine)
    sampler = Sampler(pack(language_model), 1, chat.end, temperature=0.0)
    prompt = chat.prompt([Message("user", "What is the capital of France?")])
    sampler.ask(0, Request(tuple(prompt), (0.0,) * 48))
    began, answers = time.perf_counter(), {}
    while not answers:
        answers = sampler.step()
    rate = len(answers[0].ids) / (time.perf_counter() - began)
    return f"{source} answers {chat.decode(answers[0].ids)!r}, {rate:.0f} tokens/s"


def loop_config(name: str) -> LoopCommand:
    """A file of configs/ as the loop reads it."""
    return parse(LoopCommand, ["--config", str(CONFIGS / f"{name}.toml")], "train.py check", "")


def plan(name: str) -> str:
    """What a configuration needs, and what is here."""
    config = loop_config(name)
    peak, limit = peak_and_limit(config)
    if limit is None or (config.machine.device == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"needs a GPU with {peak / GIB:.1f} GiB, and PyTorch sees none")
    if peak > limit:
        raise ValueError(
            f"needs {peak / GIB:.1f} GiB, {limit / GIB:.1f} are free: close other "
            f"programs; python train.py plan --config configs/{name}.toml says what else helps"
        )
    return f"needs {peak / GIB:.1f} GiB, {limit / GIB:.1f} are free"


def gpu() -> str:
    """The GPU."""
    if not torch.cuda.is_available():
        raise ValueError("PyTorch sees none, and the demo needs none")
    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name}, {properties.total_memory / GIB:.0f} GiB"


def mlflow() -> str:
    """The tracker, where it is asked for."""
    try:
        return importlib.metadata.version("mlflow")
    except importlib.metadata.PackageNotFoundError:
        raise ValueError("is not installed: pip install mlflow, or leave out --track") from None
