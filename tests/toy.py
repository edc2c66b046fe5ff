"""The smallest trainings: a base, episodes, an adapter, and each learner called in one place."""

from dataclasses import replace

import tiny
import torch
from safetensors.torch import load_file

from minidpo.commands import by_hand
from minidpo.commands.play import CollectCommand, collect
from minidpo.data.episodes import Writer
from minidpo.learning.dpo import DPO
from minidpo.learning.policy_gradient import PolicyGradient
from minidpo.learning.ppo import PPO
from minidpo.learning.sft import SFT
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
    command = by_hand.SFTCommand(
        model=str(folder / "base"),
        data=(folder / "demos.jsonl",),
        out=out,
        sft=SFT(**options),
        lora=LoRAConfig(rank=rank, dropout=dropout),
        machine=machine,
    )
    by_hand.run_sft(command)
    return finished(out)


def _from_rollouts(run, command, folder, out, machine, **group):
    files = {"adapter": folder / "adapter", "data": (folder / "rollouts.jsonl",), "out": out}
    run(command(model=str(folder / "base"), machine=machine, **files, **group))
    return finished(out)


def _options(options):
    return {"steps": 5, "lr": 1e-4, "warmup": 2, "batch": 5, "save_every": 2, **options}


def dpo(folder, out, machine=HERE, **options):
    options = DPO(**_options(options))
    pairs = "unpaired" if options.loss == "kto" else "outcome"
    command = by_hand.DPOCommand
    return _from_rollouts(by_hand.run_dpo, command, folder, out, machine, dpo=options, pairs=pairs)


def grpo(folder, out, machine=HERE, **options):
    options = PolicyGradient(**_options(options))
    return _from_rollouts(
        by_hand.run_grpo, by_hand.GRPOCommand, folder, out, machine, gradient=options
    )


def ppo(folder, out, machine=HERE, **options):
    options = PPO(**_options(options))
    return _from_rollouts(by_hand.run_ppo, by_hand.PPOCommand, folder, out, machine, ppo=options)


def play(out):
    """An expert plays fifty episodes."""
    collect(
        CollectCommand(
            policy="expert",
            tasks="login-user,click-tab-2",
            split="validation",
            instances=25,
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
