"""Measure success on held-out instances: the base and any number of adapters, all on the same ones.

    python evaluate.py --adapters sft=runs/demo/sft/adapter dpo=runs/demo/dpo/adapter
    python evaluate.py --model Qwen/Qwen2-0.5B-Instruct --tasks report --episodes 50

Greedy by default. The seeds are disjoint from those of demonstrations and rollouts by construction.
"""

from pathlib import Path

from collect import jobs, play_to_file
from envs.miniwob.tasks import resolve
from minidpo.commandline import main, parse
from minidpo.config import EvaluateCommand
from minidpo.episodes import Episode, read
from minidpo.files import write_json
from minidpo.rollout import ModelPolicy
from minidpo.stages import open_policy
from minidpo.results import compare, summary, table


def adapters_of(config: EvaluateCommand) -> dict[str, Path | None]:
    """Name -> adapter folder; the base alone when none is given."""
    adapters: dict[str, Path | None] = {}
    for given in config.adapters:
        name, sign, folder = given.partition("=")
        if not (sign and name and folder):
            raise ValueError(f"--adapters takes NAME=FOLDER, got {given!r}")
        if not (Path(folder) / "adapter_config.json").is_file():
            raise ValueError(f"{folder}: no adapter_config.json here, so this is not an adapter folder")
        adapters[name] = Path(folder)
    return adapters or {"base": None}


def play_held_out(config: EvaluateCommand, name: str, adapter: Path | None) -> list[Episode]:
    """The episodes of one adapter, in OUT/NAME.jsonl; goes on where it stopped."""
    out = config.out / f"{name}.jsonl"
    wanted = jobs(resolve(config.tasks), config.split, 0, config.episodes, 1)
    model, chat = open_policy(config.model, adapter, config.machine)
    policy = ModelPolicy(model, chat, str(adapter or config.model), config.temperature, 1.0, config.seed,
                         config.max_new_tokens, model.config.max_position_embeddings)
    play_to_file(policy, wanted, out, config.machine.pages, f"{name} on {config.split}")
    keys = {job[:3] for job in wanted}
    return [episode for episode in read(out) if episode.key in keys]


def evaluate(config: EvaluateCommand) -> dict:
    adapters = adapters_of(config)
    resolve(config.tasks)
    episodes = {name: play_held_out(config, name, adapter) for name, adapter in adapters.items()}
    result: dict = {name: summary(played) for name, played in episodes.items()}
    names = list(episodes)
    if len(names) > 1:
        result["comparison"] = compare(episodes[names[0]], episodes[names[-1]])
    write_json(config.out / "result.json", result)
    print(table(result, names))
    print(f"result: {config.out / 'result.json'}   episodes: {config.out}/NAME.jsonl")
    return result


if __name__ == "__main__":
    main(lambda arguments: evaluate(parse(EvaluateCommand, arguments, "evaluate.py", __doc__)))
