"""`train.py plan`: where the memory of a loop would go, before any weight is read."""

import torch
from tqdm import tqdm

from minidpo.config import LoopCommand
from minidpo.memory.machine import MIB, memory_limit
from minidpo.memory.plan import (acting_plan, acting_setup, acting_verdict, dpo_load, setup_of, sft_load,
                                 step_plan, table, verdict, with_micro_tokens)


def plan_loop(config: LoopCommand) -> dict:
    """Print where the memory of the loop's training steps would go, and whether it is there."""
    machine, plans, below = config.machine, {}, []
    setup = setup_of(config.model, machine, config.lora, config.sft.optimizer, here=False)
    cuda = setup.cuda
    known = not cuda or machine.memory_gib is not None or torch.cuda.is_available()
    limit = memory_limit(machine, cuda) if known else None
    learn = (config.dpo, dpo_load) if config.learn == "dpo" else (config.imitation, sft_load)
    stages = (("SFT", config.sft, sft_load), (config.learn.upper(), *learn))
    for stage, options, load_of in tqdm(stages, "planning", unit="stage", leave=False):
        chosen = setup._replace(optimizer=options.optimizer)
        if known:
            chosen = with_micro_tokens(chosen, load_of, limit)
            below.append(verdict(stage, chosen, load_of, limit))
        plans[stage] = step_plan(chosen, load_of(chosen.machine))
    acting, tokens = acting_setup(setup), machine.pass_tokens()
    plans["explore"] = acting_plan(acting, tokens)
    if known:
        below.append(acting_verdict(acting, tokens, limit))
    else:
        below = [f"counted with --machine.micro-tokens {tokens}: no GPU is here to compare with; "
                 "--machine.memory-gib says what there will be"]
    print(f"{config.model}, {str(setup.dtype).removeprefix('torch.')} on {'CUDA' if cuda else 'a CPU'}, "
          f"LoRA of rank {config.lora.rank}; "
          f"exploring: {machine.page_count()} pages, {tokens:,} tokens on each",
          table(plans), *below, sep="\n")
    return {stage: round(plan.peak / MIB) for stage, plan in plans.items()}
