"""`train.py plan`: where the memory of a loop would go, before any weight is read."""

from functools import partial

import torch
from tqdm import tqdm

from minidpo.config import POLICY_GRADIENTS, LoopCommand
from minidpo.memory import lora
from minidpo.memory.advice import acting_verdict, verdict, with_micro_tokens
from minidpo.memory.loading import to_compute
from minidpo.memory.machine import MIB, memory_limit
from minidpo.memory.plan import (
    Plan,
    Setup,
    acting_plan,
    acting_setup,
    dpo_load,
    setup_of,
    sft_load,
    step_plan,
)


def plans_of(config: LoopCommand) -> tuple[Setup, float | None, dict[str, tuple], dict[str, Plan]]:
    """How the loop trains; the bytes it may take (None: of a GPU that is not here); for each kind of training
    its setup, with micro-batches that fit if any do, and what it has at once; their plans, and exploring's.
    """
    machine = to_compute(config.machine, config.adapter)
    tokens = machine.page_tokens or machine.pass_tokens()
    shape = lora.read_config(config.adapter) if config.adapter else config.lora
    setup = setup_of(config.model, machine, shape, config.sft.optimizer, here=False)
    known = not setup.cuda or machine.memory_gib is not None or torch.cuda.is_available()
    limit = memory_limit(machine, setup.cuda) if known else None
    learn = (
        (config.dpo, dpo_load)
        if config.learn == "dpo"
        else (config.grpo, dpo_load)
        if config.learn in POLICY_GRADIENTS
        else (config.ppo, partial(dpo_load, heads="both"))
        if config.learn == "ppo"
        else (config.rm, partial(dpo_load, heads="scalar"))
        if config.learn == "rm"
        else (config.imitation, sft_load)
    )
    named = [
        *([] if config.adapter else [("SFT", config.sft, sft_load)]),
        (config.learn.upper(), *learn),
    ]
    stages, plans = {}, {}
    for stage, options, load_of in tqdm(named, "planning", unit="stage", leave=False):
        chosen = setup._replace(optimizer=options.optimizer)
        chosen = chosen if limit is None else with_micro_tokens(chosen, load_of, limit)
        stages[stage], plans[stage] = (chosen, load_of), step_plan(chosen, load_of(chosen.machine))
    return setup, limit, stages, plans | {"explore": acting_plan(acting_setup(setup), tokens)}


def peak_and_limit(config: LoopCommand) -> tuple[float, float | None]:
    """The most bytes that a stage of the loop needs, and those that it may take, as in `plans_of`."""
    _, limit, _, plans = plans_of(config)
    return max(plan.peak for plan in plans.values()), limit


def plan_loop(config: LoopCommand) -> dict:
    """Print where the memory of the loop's training steps would go, and whether it is there."""
    machine, (setup, limit, stages, plans) = config.machine, plans_of(config)
    tokens = machine.page_tokens or machine.pass_tokens()
    below = (
        [
            f"counted with --machine.micro-tokens {machine.pass_tokens()}: no GPU is here to compare with; "
            "--machine.memory-gib says what there will be"
        ]
        if limit is None
        else [
            *(verdict(stage, *chosen, limit) for stage, chosen in stages.items()),
            acting_verdict(acting_setup(setup), tokens, limit),
        ]
    )
    print(
        f"{config.model}, {str(setup.dtype).removeprefix('torch.')} on "
        f"{'CUDA' if setup.cuda else 'a CPU'}, LoRA of rank {setup.adapter.rank}; "
        f"exploring: {machine.page_count()} pages, {tokens:,} tokens on each",
        table(plans),
        *below,
        sep="\n",
    )
    return {stage: round(plan.peak / MIB) for stage, plan in plans.items()}


def table(plans: dict[str, Plan]) -> str:
    """The plans side by side, in MiB; only the largest of the phases is in the sum."""

    def rows(terms: list[dict[str, float]], indent: str = "") -> list[str]:
        names = dict.fromkeys(name for column in terms for name in column)
        return [
            f"{indent + name:<28}"
            + "".join(f"{column.get(name, 0) / MIB:>10,.0f}" for column in terms)
            for name in names
        ]

    return "\n".join(
        [
            f"{'MiB':<28}" + "".join(f"{name:>10}" for name in plans),
            *rows([plan.held for plan in plans.values()]),
            "and the largest of",
            *rows([plan.phases for plan in plans.values()], indent="  "),
            *rows([{"peak": plan.peak} for plan in plans.values()]),
        ]
    )
