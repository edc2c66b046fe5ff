"""Train an agent.

    python train.py sft  --data runs/demos.jsonl --out runs/sft       imitate demonstrations
    python train.py dpo  --adapter runs/sft/adapter --data runs/rollouts.jsonl --out runs/dpo
    python train.py loop --config configs/demo.toml                   the whole circle, as `make demo` runs it
    python train.py plan --config configs/qwen2-7b-8gb.toml           the memory it will need
    python train.py base --config configs/nano-base.toml              make the small base model from nothing

Each takes --help, and --config FILE for a TOML file of defaults. A run that was killed goes on when started
again.
"""

import os
import platform
import time
from dataclasses import asdict, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch

from collect import collect
from envs.miniwob.tasks import resolve
from evaluate import play_held_out, report
from minidpo.budget import MIB, Setup, acting_plan, dpo_load, sft_load, step_plan, verdict
from minidpo.budget import table as plan_table
from minidpo.commandline import main, parse
from minidpo.config import BaseCommand, CollectCommand, DPOCommand, EvaluateCommand, LoopCommand, SFTCommand
from minidpo.episodes import read
from minidpo.files import read_json, write_json
from minidpo.opening import acting_setup, device_of, dtype_on, memory_limit, shape_of
from minidpo.pretraining import make_base
from minidpo.results import compare, summary, table
from minidpo.runs import Run, records
from minidpo.stages import dpo, sft


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


def loop(config: LoopCommand) -> dict:
    """Demonstrations, SFT, `rounds` times explore, pair and train; evaluation of first and last; report."""
    resolve(config.tasks)
    Run(config.out, asdict(config)).begin()
    out, clock = config.out, Clock(config.out / "seconds.json")
    held_out = EvaluateCommand(model=config.model, tasks=config.tasks, episodes=config.episodes,
                               out=out / "evaluation", seed=config.seed, machine=config.machine,
                               max_new_tokens=config.sampling.max_new_tokens)
    sampled = replace(held_out, episodes=config.sampled, temperature=1.0, out=out / "evaluation" / "sampled")
    demos = CollectCommand(policy="expert", tasks=config.tasks, split="demos", group=1,
                           instances=config.demonstrations, first=config.demonstrations * (config.seed - 1),
                           out=out / "demos.jsonl", seed=config.seed, machine=config.machine)
    clock.time("demonstrations", collect, demos)
    clock.time("sft", sft, SFTCommand(config.model, demos.out, out / "sft", config.seed, config.sft,
                                      config.lora, config.machine))
    adapter = out / "sft" / "adapter"
    episodes, at_1, trained = {}, {}, []
    episodes["sft"] = clock.time("evaluate_sft", play_held_out, held_out, "sft", adapter)
    at_1["sft"] = clock.time("evaluate_sft", play_held_out, sampled, "sft", adapter)
    for number in range(1, config.rounds + 1):
        folder = out / f"round-{number}"
        per_round = config.rounds * config.instances
        explore = CollectCommand(model=config.model, adapter=adapter, tasks=config.tasks, split="rollouts",
                                 instances=config.instances, group=config.group, sampling=config.sampling,
                                 first=per_round * (config.seed - 1) + config.instances * (number - 1),
                                 out=folder / "rollouts.jsonl", seed=config.seed, machine=config.machine)
        clock.time("explore", collect, explore)
        learn = DPOCommand(config.model, adapter, explore.out, folder / "dpo", config.seed, config.dpo,
                           config.machine)
        clock.time("dpo", dpo, learn)
        adapter = folder / "dpo" / "adapter"
        trained.append(folder / "dpo")
    episodes["dpo"] = clock.time("evaluate_dpo", play_held_out, held_out, "dpo", adapter)
    at_1["dpo"] = clock.time("evaluate_dpo", play_held_out, sampled, "dpo", adapter)

    comparison = compare(episodes["sft"], episodes["dpo"])
    result = {name: summary(episodes[name], at_1[name]) for name in episodes} | {
        "comparison": comparison, "gain_points": comparison["gain_points"], "p_value": comparison["p_value"],
        "seconds": clock.seconds, "seed": config.seed, "date": date.today().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
        "versions": {name: version(name) for name in ("torch", "playwright", "miniwob", "tokenizers")}}
    write_json(out / "result.json", result)
    print("\n" + table(result, ["sft", "dpo"]))
    report(out / "report.html", f"EF-DPO on {len(result['sft']['tasks'])} MiniWoB++ tasks", result, episodes,
           {"model": config.model, "seed": config.seed, "loss": config.dpo.loss, **result["versions"]},
           clock.seconds, {str(stage.relative_to(out)): records(stage) for stage in (out / "sft", *trained)})
    print(f"""
{sum(clock.seconds.values()):.0f} seconds in all
report    {out / 'report.html'}
adapters  {out / 'sft' / 'adapter'}   {adapter}
next      .venv/bin/python evaluate.py --adapters dpo={adapter} --tasks report --out runs/mine
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
