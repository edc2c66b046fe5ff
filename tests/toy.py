"""The smallest trainings: a base, episodes, an adapter, and each learner called in one place."""

from dataclasses import replace

import tiny
import torch
from safetensors.torch import load_file

from minidpo.acting import collect
from minidpo.config import (
    DPO,
    GRPO,
    PPO,
    SFT,
    CollectCommand,
    DPOCommand,
    GRPOCommand,
    PPOCommand,
    SFTCommand,
)
from minidpo.data.episodes import Writer
from minidpo.learning import dpo as dpo_learner
from minidpo.learning import grpo as grpo_learner
from minidpo.learning import ppo as ppo_learner
from minidpo.learning import sft as sft_learner
from minidpo.memory import loading, lora
from minidpo.memory.lora import LoRAConfig
from minidpo.memory.machine import Machine
from minidpo.system.run_folder import records

HERE = Machine(device="cpu", dtype="float32")
IN_FOUR_BITS = replace(HERE, quantize="nf4", recompute=True)
TIMES = ("tokens_per_s", "peak_memory_mib")
WRONG = tiny.write("link [3]", 'CLICK(ref="3")')
GROUP = [
    ((tiny.CLICK_2,), "solved"),
    ((tiny.CLICK_1, tiny.CLICK_2), "solved"),
    ((WRONG,), "failed"),
    ((tiny.CLICK_1, WRONG), "limit"),
]
ROLLOUTS = [
    tiny.episode(said, outcome, seed=seed, index=index, instruction=f"Click on Submit, {seed}.")
    for seed in range(5)
    for index, (said, outcome) in enumerate(GROUP)
]
DEMOS = [tiny.episode(GROUP[seed % 2][0], seed=seed) for seed in range(5)]


def episodes_file(path, played):
    with Writer(path) as writer:
        for episode in played:
            writer.add(episode)
    return path


def prepare(folder):
    """A base, an adapter that does something, demonstrations and rollouts of five instances.

    The adapter is large enough for moments in 8 bits.
    """
    tiny.checkpoint(folder / "base")
    episodes_file(folder / "demos.jsonl", DEMOS)
    episodes_file(folder / "rollouts.jsonl", ROLLOUTS)
    model, _ = loading.open_base(str(folder / "base"), HERE)
    lora.attach(model, LoRAConfig(rank=128), torch.Generator().manual_seed(8))
    with torch.no_grad():
        for layer in lora.layers(model).values():
            layer.lora_B.normal_(0, 0.02, generator=torch.Generator().manual_seed(9))
    lora.save(model, folder / "adapter", "base")
    return folder


def sft(folder, out, machine=HERE, dropout=0.0, rank=4, **options):
    """The adapter's weights and the log, without times. This is so for each learner."""
    options = {"steps": 5, "lr": 1e-4, "warmup": 2, "batch": 4, "save_every": 2, **options}
    command = SFTCommand(
        str(folder / "base"),
        (folder / "demos.jsonl",),
        out=out,
        sft=SFT(**options),
        lora=LoRAConfig(rank=rank, dropout=dropout),
        machine=machine,
    )
    sft_learner.sft(command)
    return finished(out)


def _from_rollouts(learn, command, name, group, folder, out, machine, options):
    options = {"steps": 5, "lr": 1e-4, "warmup": 2, "batch": 5, "save_every": 2, **options}
    learn(
        command(
            str(folder / "base"),
            folder / "adapter",
            data=(folder / "rollouts.jsonl",),
            out=out,
            machine=machine,
            **{name: group(**options)},
        )
    )
    return finished(out)


def dpo(folder, out, machine=HERE, **options):
    return _from_rollouts(dpo_learner.dpo, DPOCommand, "dpo", DPO, folder, out, machine, options)


def grpo(folder, out, machine=HERE, **options):
    return _from_rollouts(
        grpo_learner.grpo, GRPOCommand, "grpo", GRPO, folder, out, machine, options
    )


def ppo(folder, out, machine=HERE, **options):
    return _from_rollouts(ppo_learner.ppo, PPOCommand, "ppo", PPO, folder, out, machine, options)


def play(out):
    """An expert that slips now and then plays fifty episodes."""
    collect.collect(
        CollectCommand(
            policy="expert",
            noise=0.5,
            tasks="login-user,click-tab-2",
            split="validation",
            instances=25,
            group=1,
            machine=Machine(pages=4),
            out=out / "episodes.jsonl",
        )
    )


def adapter(out):
    return load_file(out / "adapter" / "adapter_model.safetensors")


def finished(out):
    assert (out / "done").is_file()
    log = [{k: v for k, v in record.items() if k not in TIMES} for record in records(out)]
    return {name: tensor.tolist() for name, tensor in adapter(out).items()}, log
