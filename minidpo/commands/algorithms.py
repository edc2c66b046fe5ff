"""The command of an algorithm: its page's options and the experiment's, together on one command line."""

import inspect
import re
import shlex
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import get_type_hints

import envs
from minidpo.algorithms import ALGORITHMS, Algorithm
from minidpo.experiment import ExperimentOptions
from minidpo.learning.dpo import DPO
from minidpo.learning.policy_gradient import PolicyGradient
from minidpo.learning.ppo import PPO
from minidpo.learning.rm import RewardModel
from minidpo.learning.sft import SFT
from minidpo.learning.trainer import Optimizer
from minidpo.memory.plan import dpo_load, sft_load
from minidpo.memory.plan_print import Learner, Plans, plans_of, print_plan
from minidpo.runner import run_algorithm
from minidpo.system.command_line import at_home, changed_flags, command_in, parse
from minidpo.system.ranges import default_of

LOADS = {  # the most that a step of each learner has in memory
    SFT: sft_load,
    DPO: dpo_load,
    PolicyGradient: dpo_load,
    PPO: partial(dpo_load, heads="both"),
    RewardModel: partial(dpo_load, heads="scalar"),
}


def run_named(name: str, arguments: list[str]) -> dict:
    """`train.py NAME`: run the algorithm of this name."""
    return run_page(name, ALGORITHMS[name], arguments, f"train.py {name}")


def run_file(arguments: list[str]) -> dict:
    """`train.py run FILE.py:FUNCTION`: run a page of the user's own."""
    if not arguments or arguments[0].startswith("-"):
        raise ValueError("train.py run needs a page: FILE.py:FUNCTION (docs/add-your-own.md)")
    place = arguments[0]
    return run_page(
        place.rpartition(":")[2], load_page(place), arguments[1:], f"train.py run {place}"
    )


def run_page(name: str, page: Algorithm, arguments: list[str], program: str) -> dict:
    options, setup = parse_page(page, arguments, program)
    flags = changed_flags(combined(page.options), setup, options)
    command = shlex.join(["python", *program.split(), *flags])
    return run_algorithm(name, page.run, options, setup, command)


def parse_page(page: Algorithm, arguments: list[str], program: str) -> tuple:
    """The page's options and the experiment's from a command line."""
    kind = combined(page.options)
    try:
        given = parse(kind, arguments, program, described(page))
    except ValueError as error:
        raise ValueError(f"{error}{pages_with(str(error), page)}") from None
    return part_of(given, page.options), part_of(given, ExperimentOptions)


def part_of(given, kind: type):
    return kind(**{f.name: vars(given)[f.name] for f in fields(kind)})


def combined(options: type) -> type:
    """A dataclass with the fields of a page's options and of the experiment's, of which tyro makes flags."""
    shared = {f.name for f in fields(options)} & {f.name for f in fields(ExperimentOptions)}
    if shared:
        raise ValueError(
            f"{options.__name__}.{min(shared)} has the name of an option that every experiment has: "
            "choose another"
        )
    kind = type(options.__name__, (options, ExperimentOptions), {"__doc__": options.__doc__})
    return dataclass(frozen=True)(kind)


def described(page: Algorithm) -> str:
    """The page's docstring: the algorithm as a box, its source, and where it differs."""
    return inspect.getdoc(inspect.getmodule(page.run)) or page.options.__doc__ or ""


def pages_with(error: str, page: Algorithm) -> str:
    """Which other pages have an option that this one refused."""
    if "nrecognized" not in error:
        return ""
    for name in re.findall(r"--([\w-]+)", error):
        owners = [
            other
            for other, owner in ALGORITHMS.items()
            if owner is not page and name.replace("-", "_") in vars(owner.options())
        ]
        if owners:
            return f" (--{name} is an option of {', '.join(owners)})"
    return ""


def load_page(place: str) -> Algorithm:
    """The page in FILE.py:FUNCTION. Its options are the dataclass that annotates its second parameter.

    Raises ValueError, in one line, if there is no such file or function, or no dataclass.
    """
    file, _, name = place.rpartition(":")
    path = at_home(Path(file))
    if not file or not path.is_file():
        raise ValueError(f"{place}: no such page; name it as FILE.py:FUNCTION")
    module = envs.load(path)
    function = getattr(module, name, None)
    if not callable(function):
        found = [key for key, value in vars(module).items() if inspect.isgeneratorfunction(value)]
        raise ValueError(f"{path} has no function {name!r}, but these: {', '.join(found)}")
    return Algorithm(options_of(function, place), function)


def options_of(function: Callable, place: str) -> type:
    parameters = list(inspect.signature(function).parameters)
    try:
        options = get_type_hints(function).get(parameters[1]) if len(parameters) == 2 else None
    except NameError as error:
        raise ValueError(f"{place}: {error}") from None
    if not is_dataclass(options) or not options.__dataclass_params__.frozen:
        raise ValueError(
            f"{place} must be a function (run: Experiment, o: OPTIONS), where OPTIONS is a frozen dataclass: "
            "its fields become flags"
        )
    required = [f.name for f in fields(options) if default_of(f) is MISSING]
    if required:
        raise ValueError(f"{place}: the option {required[0]} needs a default")
    return options


def learners_of(options) -> dict[str, Learner]:
    """The learners that a page's options hold, for the plan: each one's optimizer and its largest load."""
    return {
        name: (learner.optimizer, LOADS[type(learner)])
        for name, learner in vars(options).items()
        if isinstance(learner, Optimizer)
    }


def plan(arguments: list[str]) -> dict:
    """`train.py plan ALGORITHM`: where the memory of each of its learners will go, before a weight is read."""
    name, *flags = arguments or [""]
    page = command_in(ALGORITHMS, name, "no algorithm is called")
    options, setup = parse_page(page, flags, f"train.py plan {name}")
    return print_plan(setup.model, setup.machine, setup.lora, learners_of(options))


def plans_for(config: Path) -> Plans:
    """The plans of a file of `configs/`, whose first line says how it is run."""
    first, _, _ = config.read_text(encoding="utf-8").partition("\n")
    name, *_ = first.removeprefix("# python train.py ").split()
    options, setup = parse_page(ALGORITHMS[name], ["--config", str(config)], f"train.py {name}")
    return plans_of(setup.model, setup.machine, setup.lora, learners_of(options))
