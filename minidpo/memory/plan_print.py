"""`train.py plan`: where the memory of acting and of each learner would go, before any weight is read."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from tqdm import tqdm

from minidpo.memory.advice import LESS, with_micro_tokens
from minidpo.memory.loading import to_compute
from minidpo.memory.lora import LoRAConfig
from minidpo.memory.machine import MIB, Machine, memory_limit
from minidpo.memory.plan import Load, Plan, Setup, acting_plan, acting_setup, setup_of, step_plan

Learner = tuple[str, Callable[[Machine], Load]]  # its optimizer, and the largest load of a step


class Plans(NamedTuple):
    """The plans of a run and what they are made from."""

    setup: Setup
    limit: float | None  # bytes that may be taken; None: of a GPU that is not here
    plans: dict[str, Plan]  # of each learner, and of acting as "explore"

    @property
    def peak(self) -> float:
        """The most bytes that are needed at a time."""
        return max(plan.peak for plan in self.plans.values())


def plans_of(
    model: str, machine: Machine, shape: LoRAConfig, learners: Mapping[str, Learner]
) -> Plans:
    """The plans of these learners, with micro-batches that fit if any do, and of acting.

    Loads are `sft_load`, `dpo_load`, or `dpo_load` with other heads (`memory/plan`).
    """
    machine = to_compute(machine)
    setup = setup_of(model, machine, shape, here=False)
    known = not setup.cuda or machine.memory_gib is not None or torch.cuda.is_available()
    limit = memory_limit(machine, setup.cuda) if known else None
    plans = {}
    for name in tqdm(learners, "planning", unit="learner", leave=False):
        optimizer, load_of = learners[name]
        chosen = setup._replace(optimizer=optimizer)
        if limit is not None:
            chosen = with_micro_tokens(chosen, load_of, limit)
        plans[name] = step_plan(chosen, load_of(chosen.machine))
    plans["explore"] = acting_plan(acting_setup(setup), page_tokens(machine))
    return Plans(setup, limit, plans)


def page_tokens(machine: Machine) -> int:
    """Tokens of the longest conversation that acting is planned for."""
    return machine.page_tokens or machine.pass_tokens()


def print_plan(
    model: str, machine: Machine, shape: LoRAConfig, learners: Mapping[str, Learner]
) -> dict[str, int]:
    """Print where the memory would go, and whether there is enough. Returns the peaks in MiB."""
    setup, limit, plans = plans_of(model, machine, shape, learners)
    tokens = page_tokens(machine)
    print(
        f"{model}, {str(setup.dtype).removeprefix('torch.')} on "
        f"{'CUDA' if setup.cuda else 'a CPU'}, LoRA of rank {shape.rank}; "
        f"exploring: {machine.page_count()} pages, {tokens:,} tokens on each"
    )
    print(table(plans))
    if limit is None:
        print(
            f"counted with --machine.micro-tokens {machine.pass_tokens()}: there is no GPU here to "
            "compare with; --machine.memory-gib says how much memory there will be"
        )
    else:
        for name, plan in plans.items():
            spare = (limit - plan.peak) / MIB
            if spare >= 0:
                print(f"{name} fits into {limit / MIB:,.0f} MiB, {spare:,.0f} are left")
            else:
                print(f"{name} needs {-spare:,.0f} MiB more than {limit / MIB:,.0f}")
        if max(plan.peak for plan in plans.values()) > limit:
            print(f"{LESS}; exploring with fewer --machine.pages or --machine.page-tokens, too")
    return {name: round(plan.peak / MIB) for name, plan in plans.items()}


def table(plans: Mapping[str, Plan]) -> str:
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
