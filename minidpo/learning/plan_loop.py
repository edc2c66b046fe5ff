"""`train.py plan`: where the memory of a loop would go, before any weight is read."""

from functools import partial

import torch
from tqdm import tqdm

from minidpo.config import POLICY_GRADIENTS, LoopCommand
from minidpo.memory import lora
from minidpo.memory.loading import as_trained
from minidpo.memory.machine import MIB, memory_limit
from minidpo.memory.plan import (Plan, Setup, acting_plan, acting_setup, acting_verdict, dpo_load, setup_of,
                                 sft_load, step_plan, verdict, with_micro_tokens)


def prepare(config: LoopCommand) -> tuple[Setup, float | None, list]:
    """How the loop would train, the bytes it may take (None: of a GPU that is not here), and for each kind of
    training (name, options, how much it has at once)."""
    machine = as_trained(config.machine, config.adapter)
    shape = lora.read_config(config.adapter) if config.adapter else config.lora
    setup = setup_of(config.model, machine, shape, config.sft.optimizer, here=False)
    known = not setup.cuda or machine.memory_gib is not None or torch.cuda.is_available()
    learn = ((config.dpo, dpo_load) if config.learn == "dpo" else
             (config.grpo, dpo_load) if config.learn in POLICY_GRADIENTS else
             (config.ppo, partial(dpo_load, heads="both")) if config.learn == "ppo" else
             (config.rm, partial(dpo_load, heads="scalar")) if config.learn == "rm" else
             (config.imitation, sft_load))
    first = [] if config.adapter else [("SFT", config.sft, sft_load)]
    stages = [*first, (config.learn.upper(), *learn)]
    return setup, memory_limit(machine, setup.cuda) if known else None, stages


def peak_and_limit(config: LoopCommand) -> tuple[float, float | None]:
    """The most bytes that a stage of the loop needs, and those that it may take, as `prepare` has them."""
    setup, limit, stages = prepare(config)
    tokens = config.machine.page_tokens or config.machine.pass_tokens()
    peaks = [acting_plan(acting_setup(setup), tokens).peak]
    for _, options, load_of in stages:
        chosen = setup._replace(optimizer=options.optimizer)
        chosen = chosen if limit is None else with_micro_tokens(chosen, load_of, limit)
        peaks.append(step_plan(chosen, load_of(chosen.machine)).peak)
    return max(peaks), limit


def plan_loop(config: LoopCommand) -> dict:
    """Print where the memory of the loop's training steps would go, and whether it is there."""
    machine, plans, below = config.machine, {}, []
    setup, limit, stages = prepare(config)
    for stage, options, load_of in tqdm(stages, "planning", unit="stage", leave=False):
        chosen = setup._replace(optimizer=options.optimizer)
        if limit is not None:
            chosen = with_micro_tokens(chosen, load_of, limit)
            below.append(verdict(stage, chosen, load_of, limit))
        plans[stage] = step_plan(chosen, load_of(chosen.machine))
    acting, tokens = acting_setup(setup), machine.page_tokens or machine.pass_tokens()
    plans["explore"] = acting_plan(acting, tokens)
    if limit is not None:
        below.append(acting_verdict(acting, tokens, limit))
    else:
        below = [f"counted with --machine.micro-tokens {machine.pass_tokens()}: no GPU is here to compare "
                 "with; --machine.memory-gib says what there will be"]
    print(f"{config.model}, {str(setup.dtype).removeprefix('torch.')} on "
          f"{'CUDA' if setup.cuda else 'a CPU'}, LoRA of rank {setup.adapter.rank}; "
          f"exploring: {machine.page_count()} pages, {tokens:,} tokens on each",
          table(plans), *below, sep="\n")
    return {stage: round(plan.peak / MIB) for stage, plan in plans.items()}


def table(plans: dict[str, Plan]) -> str:
    """The plans side by side, in MiB; only the largest of the phases is in the sum."""
    def rows(terms: list[dict[str, float]], indent: str = "") -> list[str]:
        names = dict.fromkeys(name for column in terms for name in column)
        return [f"{indent + name:<28}" + "".join(f"{column.get(name, 0) / MIB:>10,.0f}" for column in terms)
                for name in names]

    return "\n".join([f"{'MiB':<28}" + "".join(f"{name:>10}" for name in plans),
                      *rows([plan.held for plan in plans.values()]), "and the largest of",
                      *rows([plan.phases for plan in plans.values()], indent="  "),
                      *rows([{"peak": plan.peak} for plan in plans.values()])])
