"""The commands: each parses its options, calls and prints. `python train.py sft` from a checkout is `minidpo
train sft` where minidpo is installed; likewise `collect`, `evaluate` and `check`."""

import inspect

import minidpo.system.needed  # noqa: F401 (first, because the next lines import what may be missing)
from minidpo.acting import browse
from minidpo.acting.check import check
from minidpo.acting.collect import collect as collect_episodes
from minidpo.acting.make_nano import make_nano
from minidpo.config import (
    AverageCommand,
    BaseCommand,
    BrowseCommand,
    CheckCommand,
    CollectCommand,
    DPOCommand,
    EvaluateCommand,
    GRPOCommand,
    LoopCommand,
    PlanCommand,
    PPOCommand,
    PushCommand,
    RMCommand,
    SFTCommand,
)
from minidpo.learning.average import average
from minidpo.learning.dpo import dpo
from minidpo.learning.explain import explain
from minidpo.learning.grpo import grpo
from minidpo.learning.plan_loop import plan_loop
from minidpo.learning.ppo import ppo
from minidpo.learning.rm import rm
from minidpo.learning.sft import sft
from minidpo.loop import loop
from minidpo.results.evaluate import evaluate as evaluate_adapters
from minidpo.results.publish import push
from minidpo.system import command_line, processes
from minidpo.system.command_line import as_started, command_in, parse, split_config_file

TRAINING = {
    "sft": (SFTCommand, sft),
    "loop": (LoopCommand, loop),
    "plan": (PlanCommand, plan_loop),
    "dpo": (DPOCommand, lambda config: explain(config) if config.explain else dpo(config)),
    "grpo": (GRPOCommand, grpo),
    "ppo": (PPOCommand, ppo),
    "rm": (RMCommand, rm),
    "average": (AverageCommand, lambda config: processes.on_rank_0(average, config)),
    "base": (BaseCommand, make_nano),
    "push": (PushCommand, push),
    "check": (CheckCommand, check),
}


def train(arguments: list[str]) -> None:
    """Train an agent.

        python train.py sft  --data runs/demos.jsonl --out runs/sft     imitate demonstrations
        python train.py dpo  --adapter runs/sft/adapter --data runs/rollouts.jsonl --out runs/dpo
        python train.py grpo --adapter runs/sft/adapter --data runs/rollouts.jsonl --out runs/grpo
        python train.py ppo  --adapter runs/sft/adapter --data runs/rollouts.jsonl --out runs/ppo
        python train.py rm   --adapter runs/sft/adapter --data runs/rollouts.jsonl --out runs/rm
        python train.py average --adapters runs/sft/adapter runs/dpo/adapter    the mean of their weights
        python train.py loop --config configs/demo.toml                 the whole circle, as in `make demo`
        python train.py plan --config configs/qwen2-7b-8gb.toml         the memory it will need
        python train.py check                                           whether this machine can run the demo
        python train.py base --config configs/nano-base.toml            make the small base model from nothing
        python train.py push --to OWNER/NAME --folder runs/dpo/adapter  upload it to the Hugging Face hub

    dpo --explain shows one pair as the loss sees it, dpo --export trl writes all for TRL; --track mlflow, or
    tensorboard, tells a tracker. Each takes --help, and --config FILE for a TOML file of defaults. A run that
    was killed goes on when started again; torchrun --nproc-per-node N train.py ... shares the work of all
    that train, but base.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(as_started(inspect.getdoc(train)))
        return
    kind, command = command_in(TRAINING, arguments[0], "train.py has no command")
    command(parse(kind, arguments[1:], f"train.py {arguments[0]}", kind.__doc__))


def collect(arguments: list[str]) -> dict:
    """Play episodes on real pages and keep them, one JSON line each.

        python collect.py --policy expert --split demos --instances 5 --out runs/demos.jsonl
        python collect.py --policy expert --noise 0.3 --split base --group 1 --out runs/bad.jsonl
        python collect.py --adapter runs/sft/adapter --out runs/rollouts.jsonl
        python collect.py --adapter runs/sft/adapter --golden runs/golden.jsonl --out runs/stepwise.jsonl
        python collect.py --adapter runs/sft/adapter --values 4 --recorded runs/rollouts.jsonl \\
            --out runs/values.jsonl
        python collect.py --policy dagger --states runs/rollouts.jsonl --out runs/dagger.jsonl

    Started again after a kill, it goes on where it stopped: no episode twice, none lost, the same numbers.
    With torchrun --nproc-per-node N in place of python, N processes share the instances.
    """
    return collect_episodes(parse(CollectCommand, arguments, "collect.py", inspect.getdoc(collect)))


def evaluate(arguments: list[str]) -> dict:
    """Measure success on held-out instances: the base and any number of adapters, all on the same ones.

        python evaluate.py --adapters sft=runs/nano/sft/adapter dpo=runs/nano/adapter
        python evaluate.py --model Qwen/Qwen2-0.5B-Instruct --tasks report --out runs/qwen2
        python evaluate.py --adapters dpo=runs/dpo/adapter --export merged   # a model, no episodes
        python evaluate.py --url URL --goal "..."    # an agent on any page; with --help: its options

    Greedy by default. The seeds are disjoint from those of demonstrations and rollouts by construction.
    """
    _, settings, flags = split_config_file(arguments)
    if any(argument.split("=")[0] == "--url" for argument in (*settings, *flags)):
        return browse.browse(
            parse(BrowseCommand, arguments, "evaluate.py --url URL", browse.__doc__)
        )
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
