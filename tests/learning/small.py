"""The smallest trainings: episodes and pairs for `agent`, and SFT and DPO called in one place."""

from dataclasses import replace

import toy
from safetensors.torch import load_file

from minidpo.data.pairs import outcome_pairs
from minidpo.learning.dpo import DPO, dpo
from minidpo.learning.sft import SFT, sft
from minidpo.memory import lora
from minidpo.memory.lora import LoRAConfig
from minidpo.system.run_folder import RunFolder, records

DEMOS, PLAYED = toy.DEMOS[:3], toy.ROLLOUTS[:8]  # the latter of two instances
PAIRS = outcome_pairs(PLAYED)
STEPS = {"steps": 5, "lr": 1e-3, "warmup": 2, "batch": 4, "save_every": 2}


def run_sft(agent, out, episodes=DEMOS, *, weights=None, start=None, dropout=0.0, **options):
    """The adapter's weights and the log without what a clock or the memory says."""
    context, options = given(agent, options)
    shape = LoRAConfig(rank=4, dropout=dropout)
    run = RunFolder(out, {})
    return left(
        sft(run, context, episodes, SFT(**options), weights=weights, start=start, shape=shape)
    )


def run_dpo(agent, out, pairs=PAIRS, *, start=None, reference=None, rehearsed=(), **options):
    context, options = given(agent, options)
    more = {"rehearsed": rehearsed, "rehearse": len(rehearsed)}
    start = start or agent.adapter
    run = RunFolder(out, {})
    return left(dpo(run, context, pairs, DPO(**options), start=start, reference=reference, **more))


def given(agent, options):
    """The context on the machine and with the seed that are asked for, and the options."""
    options = {**STEPS, **options}
    machine = options.pop("machine", agent.context.machine)
    seed = options.pop("seed", agent.context.seed)
    return replace(agent.context, machine=machine, seed=seed), options


def left(adapter):
    weights = {name: t.tolist() for name, t in load_file(adapter / lora.WEIGHTS).items()}
    log = [
        {k: v for k, v in step.items() if k not in toy.TIMES} for step in records(adapter.parent)
    ]
    return weights, log
