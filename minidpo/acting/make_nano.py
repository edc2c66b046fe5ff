"""The shipped model from nothing: scripted experts play, and a small decoder reads what they did."""

from dataclasses import asdict, replace

from minidpo.acting.collect import collect
from minidpo.config import BaseCommand, CollectCommand
from minidpo.data.episodes import read
from minidpo.learning.nano_base import make_base
from minidpo.system import processes
from minidpo.system.files import write_json
from minidpo.system.run_folder import RunFolder


def make_nano(config: BaseCommand) -> dict:
    """Demonstrations on the `base` seeds, clumsy and careful ones, then the model."""
    processes.refuse_torchrun("train.py base does not run")
    run = RunFolder(config.out, asdict(config))
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
