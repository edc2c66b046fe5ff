"""Make the shipped model: scripted experts play, then a small decoder learns from their episodes."""

from dataclasses import asdict, replace

from minidpo.acting.collect import collect
from minidpo.config import BaseCommand, CollectCommand
from minidpo.data.episodes import read
from minidpo.learning.nano_base import make_base, make_chat, new_model
from minidpo.system import processes
from minidpo.system.result_file import write_result
from minidpo.system.run_folder import RunFolder


def make_nano(config: BaseCommand) -> dict:
    """Play clumsy and careful demonstrations on the seeds of `base`, then train the model on them."""
    processes.refuse_torchrun("train.py base does not run")
    new_model(config)  # what can be refused is, before hours of playing
    if config.tokenizer and not config.tokenizer.is_file():
        raise ValueError(f"--tokenizer {config.tokenizer}: no such file")
    run = RunFolder(config.out, asdict(config))
    run.begin()  # refuses a folder of other settings: stages that are done are not done again
    if config.tokenizer:
        make_chat(config, [])  # refuses one that is larger than vocab
    demonstrations = CollectCommand(
        policy="expert",
        tasks=config.tasks,
        split="base",
        group=1,
        seed=config.seed,
        machine=config.machine,
    )
    clumsy = replace(
        demonstrations, noise=config.noise, instances=config.clumsy, out=config.out / "clumsy.jsonl"
    )
    careful = replace(
        demonstrations,
        first=config.clumsy,
        instances=config.careful,
        out=config.out / "careful.jsonl",
    )
    collect(clumsy)
    collect(careful)
    result = make_base(config, read(careful.out), read(clumsy.out))
    write_result(config.out / "result.json", result)
    print(
        f"{config.out / 'model'}: "
        + ", ".join(f"{name} {value:.4f}" for name, value in result.items())
    )
    return result
