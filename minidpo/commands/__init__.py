"""The commands: each parses its options, calls and prints. `python train.py sft` from a checkout is `minidpo
train sft` where minidpo is installed; likewise `collect`, `evaluate` and `check`."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import envs
import minidpo.system.needed  # noqa: F401 (first, because the next lines import what may be missing)
from minidpo.acting.browse import Browse, browse
from minidpo.acting.check import Check, Need, check
from minidpo.acting.endpoint import Serve
from minidpo.acting.serve import serve
from minidpo.algorithms import ALGORITHMS
from minidpo.commands import by_hand
from minidpo.commands.algorithms import plan, plans_for, run_file, run_named
from minidpo.commands.play import CollectCommand
from minidpo.commands.play import collect as collect_episodes
from minidpo.memory.context import ContextOptions
from minidpo.results.evaluate import EvaluateCommand
from minidpo.results.evaluate import evaluate as evaluate_adapters
from minidpo.results.publish import PushCommand, push
from minidpo.system import command_line, processes
from minidpo.system.command_line import (
    PACKAGED,
    as_started,
    command_in,
    parse,
    split_config_file,
)

CONFIGS = PACKAGED if PACKAGED.is_dir() else Path(__file__).parents[2] / "configs"


@dataclass(frozen=True, kw_only=True)
class BrowseCommand(Browse, ContextOptions):
    """Let an agent act on a page outside the benchmark, confined to the page's origin."""


def run_check(command: Check) -> None:
    def need(config: Path) -> Need:
        plans = plans_for(config)
        return Need(plans.peak, plans.limit, plans.setup.cuda)

    needs = {path.stem: partial(need, path) for path in sorted(CONFIGS.glob("*.toml"))}
    check(command, envs.world(command.world), command.machine, needs)


BY_HAND: dict[str, tuple[type, Callable]] = {
    "sft": (by_hand.SFTCommand, by_hand.run_sft),
    "dpo": (by_hand.DPOCommand, by_hand.run_dpo),
    "grpo": (by_hand.GRPOCommand, by_hand.run_grpo),
    "ppo": (by_hand.PPOCommand, by_hand.run_ppo),
    "rm": (by_hand.RMCommand, by_hand.run_rm),
    "average": (by_hand.AverageCommand, by_hand.run_average),
    "push": (PushCommand, lambda command: processes.on_rank_0(push, command)),
    "check": (Check, run_check),
}
TRAIN = {**{name: partial(run_named, name) for name in ALGORITHMS}, "run": run_file, "plan": plan}


def train(arguments: list[str]) -> object:
    """Train an agent.

        python train.py ef-dpo --config configs/demo.toml     what `make demo` runs
        python train.py ALGORITHM --help                      ALGORITHM: {algorithms}
        python train.py run FILE.py:FUNCTION                  an algorithm of your own (docs/add-your-own.md)
        python train.py plan ALGORITHM --config FILE          the memory that it will need
        python train.py check                                 whether this machine can run the demo

    One learner by hand, files in, an adapter out:

        python train.py sft  --data runs/demos.jsonl --out runs/sft
        python train.py dpo  --adapter runs/sft/adapter --data runs/rollouts.jsonl --out runs/dpo
        python train.py grpo | ppo | rm    the same files
        python train.py average --adapters runs/sft/adapter runs/dpo/adapter
        python train.py push --to OWNER/NAME --folder runs/dpo/adapter

    Each takes --help, and --config FILE for a TOML file of defaults. The same command goes on after a kill.
    torchrun --nproc-per-node N train.py ... shares the work of all that train or play.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        text = inspect.getdoc(train).replace("{algorithms}", ", ".join(ALGORITHMS))
        print(as_started(text))
        return None
    name, rest = arguments[0], arguments[1:]
    found = command_in({**TRAIN, **BY_HAND}, name, "train.py has no command")
    if name in BY_HAND:
        kind, run = found
        return run(parse(kind, rest, f"train.py {name}", kind.__doc__))
    return found(rest)


def collect(arguments: list[str]) -> dict:
    """Play episodes and keep them, one JSON line each.

        python collect.py --policy expert --split demos --instances 5 --out runs/demos.jsonl
        python collect.py --adapter runs/sft/adapter --out runs/rollouts.jsonl

    Started again after a kill, it goes on where it stopped: no episode twice, none lost, the same numbers.
    With torchrun --nproc-per-node N in place of python, N processes share the instances.
    """
    return collect_episodes(parse(CollectCommand, arguments, "collect.py", inspect.getdoc(collect)))


def evaluate(arguments: list[str]) -> dict:
    """Measure success on held-out instances: the base and any number of adapters, all on the same ones.

        python evaluate.py --adapters sft=runs/sft/adapter dpo=runs/dpo/adapter
        python evaluate.py --model Qwen/Qwen2-0.5B-Instruct --tasks report --out runs/qwen2
        python evaluate.py --adapters dpo=runs/dpo/adapter --export merged   # a model, no episodes
        python evaluate.py --url URL --goal "..."    # an agent on any page; with --help: its options
        python evaluate.py --serve 8000    # answer other programs' agents, and record them

    Greedy by default. The seeds are disjoint from those of demonstrations and rollouts by construction.
    """
    _, settings, flags = split_config_file(arguments)
    names = {argument.split("=")[0] for argument in (*settings, *flags)}
    if "--serve" in names:
        return serve(parse(Serve, arguments, "evaluate.py --serve PORT", Serve.__doc__))
    if "--url" in names:
        program, text = "evaluate.py --url URL", BrowseCommand.__doc__
        command = parse(BrowseCommand, arguments, program, text)
        return browse(command, command.context())
    return evaluate_adapters(
        parse(EvaluateCommand, arguments, "evaluate.py", inspect.getdoc(evaluate))
    )


COMMANDS = {
    "train": train,
    "collect": collect,
    "evaluate": evaluate,
    "check": lambda arguments: train(["check", *arguments]),
}


def dispatch(arguments: list[str]) -> None:
    """minidpo train | collect | evaluate | check: with --help, each says what it takes."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(inspect.getdoc(dispatch))
        return
    command_in(COMMANDS, arguments[0], "minidpo has no command")(arguments[1:])


def main() -> None:
    """The program `minidpo`."""
    command_line.main(dispatch)
