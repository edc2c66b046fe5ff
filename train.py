"""Train an agent.

    python train.py sft  --data runs/demos.jsonl --out runs/sft       imitate demonstrations
    python train.py dpo  --adapter runs/sft/adapter --data runs/rollouts.jsonl --out runs/dpo
    python train.py loop --config configs/demo.toml                   the whole circle, as `make demo` runs it
    python train.py plan --config configs/qwen2-7b-8gb.toml           the memory it will need
    python train.py base --config configs/nano-base.toml              make the small base model from nothing
    python train.py push --to OWNER/NAME --folder runs/dpo/adapter    upload it to the Hugging Face hub

dpo --explain shows one pair as the loss sees it, dpo --export trl writes all for TRL; --track mlflow, or
tensorboard, tells a tracker. Each takes --help, and --config FILE for a TOML file of defaults. A run that was
killed goes on when started again; torchrun --nproc-per-node N train.py ... shares the work of sft, dpo, loop.
"""

from dataclasses import asdict, replace

import torch
from tqdm import tqdm

from collect import collect
from loop import loop
from minidpo import parallel
from minidpo.budget import MIB, Setup, acting_plan, dpo_load, sft_load, step_plan, verdict
from minidpo.budget import table as plan_table
from minidpo.commandline import main, parse
from minidpo.config import CollectCommand, DPOCommand, PushCommand, SFTCommand
from minidpo.episodes import read
from minidpo.exchange import push
from minidpo.explain import explain
from minidpo.files import write_json
from minidpo.opening import acting_setup, acting_verdict, device_of, dtype_on, memory_limit, shape_of
from minidpo.pretraining import make_base
from minidpo.recipes import BaseCommand, LoopCommand
from minidpo.runs import Run
from minidpo.stages import dpo, sft


def base(config: BaseCommand) -> dict:
    """Demonstrations on the `base` seeds, clumsy and careful ones, then the model."""
    parallel.alone("train.py base does not run")
    run = Run(config.out, asdict(config))
    run.begin()  # its stages are not done again, so they must be this configuration's
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


def prefer(config: DPOCommand) -> dict:
    """Train on pairs, or show one."""
    return explain(config) if config.explain else dpo(config)


def plan(config: LoopCommand) -> dict:
    """Print where the memory of the loop's training steps would go, and whether it is there."""
    machine = config.machine
    cuda = device_of(machine).type == "cuda"
    dtype, plans, below = dtype_on(machine, cuda), {}, []
    known = not cuda or machine.memory_gib is not None or torch.cuda.is_available()
    learn = (("DPO", config.dpo, dpo_load) if config.learn == "dpo" else
             (config.learn.upper(), config.imitation, sft_load))
    stages = (("SFT", config.sft, sft_load), learn)
    for stage, options, load_of in tqdm(stages, "planning", unit="stage", leave=False):
        setup = Setup(shape_of(config.model), config.lora, machine, options.optimizer, dtype, cuda)
        plans[stage] = step_plan(setup, load_of(machine))
        if known:
            below.append(verdict(stage, setup, load_of, memory_limit(machine, cuda)))
    acting, tokens = acting_setup(setup), machine.micro_tokens
    plans["explore"] = acting_plan(acting, tokens)
    if known:
        below.append(acting_verdict(acting, tokens, memory_limit(machine, cuda)))
    else:
        below = ["no GPU is here to compare with: --machine.memory-gib says what there will be"]
    print(f"{config.model}, {str(dtype).removeprefix('torch.')} on {'CUDA' if cuda else 'a CPU'}, "
          f"LoRA of rank {config.lora.rank}; exploring: {machine.at_once()} pages, {tokens:,} tokens on each",
          plan_table(plans), *below, sep="\n")
    return {stage: round(plan.peak / MIB) for stage, plan in plans.items()}


COMMANDS = {"sft": (SFTCommand, sft), "dpo": (DPOCommand, prefer), "loop": (LoopCommand, loop),
            "base": (BaseCommand, base), "plan": (LoopCommand, plan), "push": (PushCommand, push)}


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
