"""Measure success on held-out instances: the base and any number of adapters, all on the same ones.

    python evaluate.py --adapters sft=runs/demo/sft/adapter dpo=runs/demo/adapter
    python evaluate.py --model Qwen/Qwen2-0.5B-Instruct --tasks report --out runs/qwen2
    python evaluate.py --adapters dpo=runs/dpo/adapter --export merged   # a model, no episodes
    python evaluate.py --url URL --goal "..."    # an agent on any page; with --help: its options

Greedy by default. The seeds are disjoint from those of demonstrations and rollouts by construction.
"""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from envs.miniwob.browser.remote import check_display
from envs.miniwob.tasks import resolve
from minidpo.acting.collect import jobs, play_to_file
from minidpo.acting.policies import Job, ModelPolicy
from minidpo.config import EvaluateCommand
from minidpo.data.episodes import Episode, read
from minidpo.memory import lora
from minidpo.memory.loading import open_policy, policy_name
from minidpo.model.checkpoint import locate
from minidpo.results.publish import export_merged
from minidpo.results.replay import report, trainings
from minidpo.results.success import best_of, circumstances, comparisons, summary, table, totals, write_result
from minidpo.system import processes, run_folder
from minidpo.system.files import write_json, write_text
from minidpo.system.tracking import Tracking

# What may not change when an evaluation goes on in its folder; adapters and episodes may become more.
KEPT = ("model", "tasks", "split", "temperature", "best_of", "seed", "max_new_tokens")

# What a result holds besides its agents, and metrics.jsonl: no agent may have such a name.
KEYS = ("version", "comparison", "comparisons", "temperature", "best_of", "date", "machine", "versions",
        "metrics")


def named(given: Sequence[str]) -> dict[str, Path | None]:
    """Name -> adapter folder, of NAME=FOLDER; the base alone when none is given."""
    adapters: dict[str, Path | None] = {}
    for text in given:
        name, sign, folder = text.partition("=")
        if not (sign and name and (folder or name == "base")):
            raise ValueError(f"--adapters takes NAME=FOLDER, got {text!r}")
        if name in KEYS:
            raise ValueError(f"--adapters {text}: {name} is the name of something else here; take another")
        if name in adapters:
            raise ValueError(f"--adapters has two by the name {name}: give each a name of its own")
        adapters[name] = Path(folder) if folder else None
    return adapters or {"base": None}


def adapters_of(config: EvaluateCommand) -> dict[str, Path | None]:
    """`named`, all of which are there."""
    adapters = named(config.adapters)
    for folder in filter(None, adapters.values()):
        if not (locate(folder, lora.FILES) / lora.CONFIG).is_file():
            raise ValueError(f"{folder}: no adapter_config.json here, so this is not an adapter folder")
    return adapters


def take(config: EvaluateCommand) -> TextIO:
    """The lock of the folder, whose result this evaluation may replace by its own.

    Raises ValueError if another process has it, or if something of it would be lost: a run that is no
    evaluation, an agent that is not asked for again, a result under other settings or of more episodes.
    """
    lock = run_folder.lock(config.out)
    if not (config.out / "config.json").is_file():
        return lock
    old = run_folder.read_settings(config.out)
    if "adapters" not in old:
        raise ValueError(f"{config.out} holds a run that is no evaluation: give another --out")
    kept = KEPT + ("episodes",) * (old["episodes"] > config.episodes)
    before, now = ({name: asked.get(name) for name in kept} for asked in (old, asdict(config)))
    if changed := run_folder.changed_settings(before, now):
        raise ValueError(f"{config.out} holds an evaluation with other settings ({changed}): "
                         "give another --out, or delete the folder")
    if lost := sorted(dict(named(old["adapters"]).items() - named(config.adapters).items())):
        raise ValueError(f"{config.out} holds the result of {', '.join(lost)}, which would be lost: name "
                         f"these too ({' '.join(old['adapters']) or 'base='}), or give another --out")
    return lock


def instances(config: EvaluateCommand) -> list[Job]:
    """What every adapter plays."""
    return jobs(dict.fromkeys(resolve(config.tasks), config.episodes), config.split, 0, config.best_of)


def held_out(config: EvaluateCommand, name: str) -> list[Episode]:
    """What was played to OUT/NAME.jsonl, of each instance the best episode."""
    keys = {job[:3] for job in instances(config)}
    return best_of([episode for episode in read(config.out / f"{name}.jsonl") if episode.key in keys])


def play_held_out(config: EvaluateCommand, name: str, adapter: Path | None) -> list[Episode]:
    """The episodes of one adapter, in OUT/NAME.jsonl; goes on where it stopped. Returns `held_out`."""
    out, wanted, pages = config.out / f"{name}.jsonl", instances(config), config.machine.page_count(config.watch)
    model, chat = open_policy(config.model, adapter, config.machine)
    signed = policy_name(adapter or config.model, model)
    policy = ModelPolicy(model, chat, signed, config.temperature, 1.0, config.seed, config.max_new_tokens,
                         model.config.max_position_embeddings, pages)
    counts = play_to_file(policy, wanted, out, pages, f"{name} on {config.split}", config.watch)
    if not counts["episodes"]:
        raise ValueError(f"{out}: not one episode could be played, because the browser failed")
    return held_out(config, name)


def write(config: EvaluateCommand, result: dict) -> None:
    """What the folder keeps besides the episodes."""
    write_result(config.out / "result.json", result)
    write_json(config.out / "config.json", {"version": run_folder.VERSION, **asdict(config)})
    write_text(config.out / "metrics.jsonl", json.dumps({"step": 1, **totals(result)}) + "\n")


def evaluate(config: EvaluateCommand) -> dict:
    if config.watch:
        check_display()
    adapters = adapters_of(config)
    if config.export:
        if None in adapters.values():
            raise ValueError("the base has no adapter to merge: name adapters, --adapters NAME=FOLDER")
        return {name: export_merged(config.model, adapter, config.machine, config.out / f"{name}-merged")
                for name, adapter in adapters.items()}
    resolve(config.tasks)
    with processes.on_rank_0(take, config) or nullcontext():  # of several processes the first has it
        return measure(config, adapters)


def measure(config: EvaluateCommand, adapters: dict[str, Path | None]) -> dict:
    """Play, compare, write and print."""
    settings = {"temperature": config.temperature, "best_of": config.best_of}
    tracking = Tracking(config.out, asdict(config))
    episodes = {name: play_held_out(config, name, adapter) for name, adapter in adapters.items()}
    result: dict = {name: summary(played) for name, played in episodes.items()}
    names = list(episodes)
    result |= comparisons(episodes) | settings | circumstances("torch", "playwright", "miniwob", "tokenizers")
    processes.on_rank_0(write, config, result)
    print(table(result, names))

    def tell() -> None:
        about, curves, pairs = trainings(adapters, config.model, config.machine)
        about |= {"model": config.model, "split": config.split, **settings}
        report(config.out / "report.html", f"{len(result[names[0]]['tasks'])} MiniWoB++ tasks", result,
               episodes, about, {}, curves, pairs)

    processes.on_rank_0(tell)
    processes.on_rank_0(tracking.finish)
    print(f"result: {config.out / 'result.json'}   report: {config.out / 'report.html'}   "
          f"episodes: {config.out}/NAME.jsonl")
    return result
