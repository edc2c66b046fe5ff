"""Train an agent.

    python train.py sft  --data runs/demos.jsonl --out runs/sft       imitate demonstrations
    python train.py dpo  --adapter runs/sft/adapter --data runs/rollouts.jsonl --out runs/dpo
    python train.py loop --config configs/demo.toml                   the whole circle, as `make demo` runs it
    python train.py plan --config configs/qwen2-7b-8gb.toml           the memory it will need
    python train.py base --config configs/nano-base.toml              make the small base model from nothing

Each takes --help, and --config FILE for a TOML file of defaults. A run that was killed goes on when started
again.
"""

import json
import os
import platform
import time
from dataclasses import asdict, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch

from collect import collect
from envs.miniwob.tasks import SEEDS, resolve
from evaluate import play_held_out, report
from minidpo.budget import MIB, Setup, acting_plan, dpo_load, sft_load, step_plan, verdict
from minidpo.budget import table as plan_table
from minidpo.commandline import main, parse
from minidpo.config import BaseCommand, CollectCommand, DPOCommand, EvaluateCommand, LoopCommand, SFTCommand
from minidpo.episodes import Episode, read
from minidpo.files import read_json, write_json
from minidpo.opening import acting_setup, device_of, dtype_on, memory_limit, shape_of
from minidpo.pairs import NEEDS_GOLDEN, NothingToPrefer
from minidpo.pretraining import make_base
from minidpo.results import compare, summary, table
from minidpo.rounds import best_round, enough, entered, focused
from minidpo.runs import Run, records
from minidpo.stages import dpo, sft


SEEDS_APART = 10_000  # instances between those of one loop and those of a loop with the next seed


class Clock:
    """Seconds by stage, kept in a file so that a run that went on elsewhere still knows what it took."""

    def __init__(self, path: Path):
        self.path = path
        self.seconds: dict[str, float] = read_json(path) if path.is_file() else {}

    def time(self, stage: str, work, *arguments):
        began = time.perf_counter()
        try:
            return work(*arguments)
        finally:
            self.seconds[stage] = round(self.seconds.get(stage, 0.0) + time.perf_counter() - began, 1)
            write_json(self.path, self.seconds)


class Circle:
    """The stages of a loop, each in its place on disk: what is there already is not made again."""

    def __init__(self, config: LoopCommand):
        self.config, self.out = config, config.out
        self.tasks = resolve(config.tasks)
        self.clock = Clock(config.out / "seconds.json")
        self.home = config.start or config.out  # of what the rounds begin with
        # With focus a task may get all the instances that there are, so each round has room for that.
        self.block = config.instances * (len(self.tasks) if config.focus else 1)
        room = len(SEEDS["rollouts"]) // SEEDS_APART
        if config.rounds * self.block > SEEDS_APART or config.seed > room:
            raise ValueError(f"a task may have {SEEDS_APART:,} instances in all rounds, and seeds go up to "
                             f"{room}: beyond that two loops, or two splits, would play the same pages")
        self.alike = began_alike(config)
        self.evaluation = EvaluateCommand(
            model=config.model, tasks=config.tasks, episodes=config.episodes, out=config.out / "evaluation",
            seed=config.seed, machine=config.machine, max_new_tokens=config.sampling.max_new_tokens)
        self.exploration = CollectCommand(
            model=config.model, tasks=config.tasks, split="rollouts", instances=config.instances,
            group=config.group, sampling=config.sampling, seed=config.seed, machine=config.machine)

    def collect(self, stage: str, command: CollectCommand, instances: dict[str, int] | None = None) -> Path:
        self.clock.time(stage, collect, command, instances)
        return command.out

    def first_policy(self) -> tuple[Path, list[Path]]:
        """SFT on demonstrations or, without any, on what the base solved by itself; and that data."""
        config = self.config
        if config.demonstrations:
            demos = CollectCommand(policy="expert", tasks=config.tasks, split="demos", group=1,
                                   instances=config.demonstrations, first=self.first(config.demonstrations),
                                   out=self.home / "demos.jsonl", seed=config.seed, machine=config.machine)
            data = self.collect("demonstrations", demos)
        else:
            own = replace(self.exploration, split="demos", first=self.first(config.instances),
                          out=self.home / "selfplay.jsonl")
            data = self.collect("demonstrations", own)
        options = config.sft if config.demonstrations else replace(config.sft, distinct=True)
        out = self.home / "sft"
        self.clock.time("sft", sft, SFTCommand(model=config.model, data=(data,), out=out, seed=config.seed,
                                               sft=options, lora=config.lora, machine=config.machine))
        return out / "adapter", [data]

    def first(self, instances: int, number: int = 1) -> int:
        """The place in its split of a round's first instance: other seeds of the loop, other pages."""
        return SEEDS_APART * (self.config.seed - 1) + instances * (number - 1)

    def explore(self, number: int, adapter: Path,
                counts: dict[str, int] | None) -> tuple[list[Path], Path | None]:
        """The round's rollouts, and the golden episodes of its instances if its pairs need them."""
        config, folder = self.config, self.out / f"round-{number}"
        command = replace(self.exploration, adapter=adapter, first=self.first(self.block, number))
        source = config.dpo.pairs if config.learn == "dpo" else "outcome"
        golden = None
        if source in NEEDS_GOLDEN:
            show = replace(command, policy="expert", adapter=None, group=1, out=folder / "golden.jsonl")
            golden = self.collect("golden", show, counts)
        G = config.group
        free, stepwise = {"stepwise": (0, G), "mixture": (G - G // 2, G // 2)}.get(source, (G, 0))
        data = []
        if free:
            shared = "exploration" in self.alike and number == 1 and counts is None and free == config.group
            where = (self.home if shared else self.out) / f"round-{number}" / "rollouts.jsonl"
            data.append(self.collect("explore", replace(command, group=free, out=where), counts))
        if stepwise:
            ways = replace(command, group=stepwise, golden=golden, out=folder / "stepwise.jsonl")
            data.append(self.collect("explore", ways, counts))
        return data, golden

    def learn(self, number: int, adapter: Path, first: Path, data: list[Path], rounds: list[list[Path]],
              golden: Path | None) -> Path:
        """Train on a round's rollouts; `data`: what the first policy learned from, `rounds`: all rollouts."""
        config, out = self.config, self.out / f"round-{number}" / self.config.learn
        if config.learn == "dpo":
            reference = first if config.reference == "sft" and adapter != first else None
            self.clock.time("dpo", dpo, DPOCommand(
                model=config.model, adapter=adapter, reference=reference, data=tuple(rounds[-1]),
                golden=golden, out=out, seed=config.seed, dpo=config.dpo, machine=config.machine))
        else:
            options = replace(config.imitation, **{"rft": {"distinct": True}, "bc": {},
                                                   "rwr": {"weighting": "advantage"}}[config.learn])
            again = config.learn == "rft"
            seen = [*data, *(path for paths in rounds for path in paths)] if again else rounds[-1]
            self.clock.time(config.learn, sft, SFTCommand(
                model=config.model, data=tuple(seen), adapter=None if again else adapter, out=out,
                seed=config.seed, sft=options, lora=config.lora, machine=config.machine))
        return out / "adapter"

    def validate(self, number: int, adapter: Path) -> dict[str, float]:
        """Greedy success by task on validation seeds."""
        home = self.home if number == 0 and "validation" in self.alike else self.out
        command = replace(self.evaluation, split="validation", episodes=self.config.validation,
                          out=home / "validation")
        return by_task(self.clock.time("validate", play_held_out, command, f"round-{number}", adapter))

    def evaluate(self, name: str, adapter: Path) -> tuple[list, list]:
        """Held-out episodes, greedy and at temperature 1."""
        home = self.home if name == "sft" and "evaluation" in self.alike else self.out
        greedy = replace(self.evaluation, out=home / "evaluation")
        sampled = replace(greedy, episodes=self.config.sampled, temperature=1.0,
                          out=home / "evaluation" / "sampled")
        stage = f"evaluate_{name}"
        return (self.clock.time(stage, play_held_out, greedy, name, adapter),
                self.clock.time(stage, play_held_out, sampled, name, adapter))


def began_alike(config: LoopCommand) -> set[str]:
    """What of the loop in `config.start` can be used here: its exploration, validation, evaluation of SFT.

    Raises ValueError if not even its first policy is the one that is asked for.
    """
    if config.start is None:
        return set()
    theirs, ours = (json.loads(json.dumps(settings, default=str))
                    for settings in (read_json(config.start / "config.json"), asdict(config)))
    for settings in (theirs, ours):
        settings["machine"] = {name: settings["machine"][name] for name in ("device", "dtype", "quantize")}
    exploration = ("instances", "group", "sampling")
    first = ("model", "tasks", "seed", "demonstrations", "sft", "lora", "machine")
    first += () if config.demonstrations else exploration
    if changed := [name for name in first if theirs.get(name) != ours[name]]:
        raise ValueError(f"{config.start} began with other settings ({', '.join(changed)}): give the "
                         "same, or leave out start")
    same = {"exploration": exploration, "validation": ("validation",), "evaluation": ("episodes", "sampled")}
    return {what for what, names in same.items() if all(theirs.get(name) == ours[name] for name in names)}


def by_task(episodes: list[Episode]) -> dict[str, float]:
    """Success rate of each task."""
    return {task: row["success"] for task, row in summary(episodes)["tasks"].items()}


def loop(config: LoopCommand) -> dict:
    """A first policy, then rounds of explore, train and validate; evaluation of first and best; report."""
    circle = Circle(config)
    Run(config.out, asdict(config)).begin()
    first, data = circle.first_policy()
    watched = config.rounds > 1 or config.curriculum is not None  # one round leaves nothing to choose
    success = circle.validate(0, first) if watched else {}
    history, rounds, trained = [success], [], []
    adapter, at_1 = first, {}
    for number in range(1, config.rounds + 1):
        tasks = entered(success, config.curriculum) if config.curriculum is not None else circle.tasks
        counts = None
        if config.focus and number > 1:
            counts = focused({task: at_1.get(task, 0.5) for task in tasks}, config.instances)
        elif len(tasks) < len(circle.tasks):
            counts = dict.fromkeys(tasks, config.instances)
        explored, golden = circle.explore(number, adapter, counts)
        rounds.append(explored)
        at_1 |= by_task(read(explored[0]))
        try:
            adapter = circle.learn(number, adapter, first, data, rounds, golden)
        except NothingToPrefer as error:
            if number == 1:
                raise
            print(f"round {number}: {error}; so the loop ends here")
            break
        trained.append(adapter.parent)
        if watched:
            success = circle.validate(number, adapter)
            history.append(success)
            rates = [sum(rates.values()) / len(rates) for rates in history]
            print(f"round {number}: {100 * rates[-1]:.1f} % on validation (before: "
                  + ", ".join(f"{100 * rate:.1f}" for rate in rates[:-1]) + ")")
            write_json(config.out / f"round-{number}" / "result.json", {
                "round": number, "validation": rates[-1], "tasks": success,
                "explored": {task: at_1[task] for task in tasks}, "adapter": str(adapter)})
            if enough(rates, config.patience) and number < config.rounds:
                print(f"{config.patience} rounds brought nothing better: the loop ends here")
                break
    kept = best_round(rates[1:]) if watched else 0
    return finish(circle, first, trained, kept, rates if watched else [])


def finish(circle: Circle, first: Path, trained: list[Path], kept: int, validation: list[float]) -> dict:
    """Held-out evaluation of the first policy and the round that is kept, result.json and the report."""
    config, out, name, seconds = circle.config, circle.out, circle.config.learn, circle.clock.seconds
    adapter = trained[kept] / "adapter"
    episodes, at_1 = {}, {}
    for policy, folder in (("sft", first), (name, adapter)):
        episodes[policy], at_1[policy] = circle.evaluate(policy, folder)
    comparison = compare(episodes["sft"], episodes[name])
    result = {policy: summary(episodes[policy], at_1[policy]) for policy in episodes} | {
        "comparison": comparison, "gain_points": comparison["gain_points"], "p_value": comparison["p_value"],
        "validation": validation, "kept_round": kept + 1, "seconds": seconds, "seed": config.seed,
        "date": date.today().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
        "versions": {library: version(library)
                     for library in ("torch", "playwright", "miniwob", "tokenizers")}}
    write_json(out / "result.json", result)
    print("\n" + table(result, ["sft", name]))
    settings = {"model": config.model, "seed": config.seed, "learn": name, "rounds": len(trained),
                "kept": kept + 1, **({"loss": config.dpo.loss} if name == "dpo" else {})}
    curves = {"/".join(stage.parts[-2:]): records(stage) for stage in (first.parent, *trained)}
    report(out / "report.html", f"{len(result['sft']['tasks'])} MiniWoB++ tasks, SFT and {name.upper()}",
           result, episodes, settings | result["versions"], seconds, curves)
    print(f"""
{sum(seconds.values()):.0f} seconds in all
report    {out / 'report.html'}
adapters  {first}   {adapter}
next      .venv/bin/python evaluate.py --adapters {name}={adapter} --tasks report --out runs/mine
          .venv/bin/python collect.py --adapter {adapter} --tasks click-button --out runs/mine.jsonl
          SEED=2 make demo""")
    return result


def base(config: BaseCommand) -> dict:
    """Demonstrations on the `base` seeds, clumsy and careful ones, then the model."""
    show = CollectCommand(policy="expert", tasks=config.tasks, split="base", group=1, seed=config.seed,
                          machine=config.machine)
    clumsy = replace(show, noise=config.noise, instances=config.clumsy, out=config.out / "clumsy.jsonl")
    careful = replace(show, first=config.clumsy, instances=config.careful, out=config.out / "careful.jsonl")
    collect(clumsy)
    collect(careful)
    result = make_base(config, read(careful.out), read(clumsy.out))
    write_json(config.out / "result.json", result)
    print(f"{config.out / 'model'}: " + ", ".join(f"{name} {value:.4f}" for name, value in result.items()))
    return result


def plan(config: LoopCommand) -> dict:
    """Print where the memory of the loop's training steps would go, and whether it is there."""
    machine = config.machine
    cuda = device_of(machine).type == "cuda"
    dtype, plans, below = dtype_on(machine, cuda), {}, []
    known = not cuda or machine.memory_gib is not None or torch.cuda.is_available()
    for stage, options, load_of in (("SFT", config.sft, sft_load), ("DPO", config.dpo, dpo_load)):
        setup = Setup(shape_of(config.model), config.lora, machine, options.optimizer, dtype, cuda)
        plans[stage] = step_plan(setup, load_of(machine))
        if known:
            below.append(verdict(stage, setup, load_of, memory_limit(machine, cuda)))
    plans["explore"] = acting_plan(acting_setup(setup), machine.micro_tokens)
    if not known:
        below = ["no GPU is here to compare with: --machine.memory-gib says what there will be"]
    print(f"{config.model}, {str(dtype).removeprefix('torch.')} on {'CUDA' if cuda else 'a CPU'}, "
          f"LoRA of rank {config.lora.rank}, {machine.pages} pages to explore",
          plan_table(plans), *below, sep="\n")
    return {stage: round(plan.peak / MIB) for stage, plan in plans.items()}


COMMANDS = {"sft": (SFTCommand, sft), "dpo": (DPOCommand, dpo), "loop": (LoopCommand, loop),
            "base": (BaseCommand, base), "plan": (LoopCommand, plan)}


def run(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return
    if arguments[0] not in COMMANDS:
        raise ValueError(f"no command {arguments[0]!r}; there are {', '.join(COMMANDS)}")
    kind, command = COMMANDS[arguments[0]]
    command(parse(kind, arguments[1:], f"train.py {arguments[0]}", kind.__doc__))


if __name__ == "__main__":
    main(run)
