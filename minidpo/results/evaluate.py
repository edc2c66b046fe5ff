"""Measure success on held-out instances: the base and any number of adapters, all on the same instances.

The seeds are disjoint from those of demonstrations and rollouts by construction. Play is greedy by default.
A folder holds one evaluation; it can be continued, and extended by more agents and episodes.
"""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from envs.miniwob.browser.remote import check_display
from envs.miniwob.tasks import resolve
from minidpo.acting.collect import make_jobs, play_to_file, with_shots
from minidpo.acting.policies import Job, make_policy
from minidpo.config import CollectCommand, EvaluateCommand, Sampling
from minidpo.data.episodes import Episode, read
from minidpo.learning.rm import episode_rewards, require_reward_model
from minidpo.memory import lora
from minidpo.memory.machine import device_of
from minidpo.results.publish import export_gguf, export_merged
from minidpo.results.replay import make_report, training_shown
from minidpo.results.success import (
    best_of,
    circumstances,
    comparisons,
    made_by,
    result_metrics,
    summary,
    table,
)
from minidpo.system import processes, run_folder
from minidpo.system.files import as_json, write_text
from minidpo.system.result_file import write_result
from minidpo.system.tracking import Tracking

# Settings that must stay the same when an evaluation is continued; adapters and episodes may become more.
FIXED = (
    "model",
    "tasks",
    "split",
    "temperature",
    "best_of",
    "judge",
    "seed",
    "max_new_tokens",
    "shots",
)


def evaluate(config: EvaluateCommand) -> dict:
    """Measure the adapters, or with `export` write each as a model. Returns the result."""
    if config.watch:
        check_display()
    adapters = parse_adapters(config.adapters)
    for folder in filter(None, adapters.values()):
        lora.located(folder)
    if config.judge:
        require_reward_model(config.judge)
        processes.require_own_gpu(device_of(config.machine))
    if config.export:
        if None in adapters.values():
            raise ValueError(
                "the base has no adapter to merge: name adapters, --adapters NAME=FOLDER"
            )
        if config.export == "gguf":
            return {
                name: export_gguf(config.model, adapter, config.machine, config.out, name)
                for name, adapter in adapters.items()
            }
        return {
            name: export_merged(
                config.model, adapter, config.machine, config.out / f"{name}-merged"
            )
            for name, adapter in adapters.items()
        }
    resolve(config.tasks)  # an unknown task is an error before the folder is touched
    with processes.on_rank_0(lock_folder, config) or nullcontext():
        return measure(config, adapters)


def measure(config: EvaluateCommand, adapters: dict[str, Path | None]) -> dict:
    """Play, compare, write result and report, and print the table."""
    settings = {
        "split": config.split,
        "seed": config.seed,
        "temperature": config.temperature,
        "best_of": config.best_of,
        **({"shots": config.shots} if config.shots else {}),
        **({"judge": str(config.judge)} if config.judge else {}),
    }
    tracking = Tracking(config.out, asdict(config))
    episodes = {name: play_held_out(config, name, adapter) for name, adapter in adapters.items()}
    if config.judge:
        tries = {name: tried(config, name) for name in adapters}
        rewards = iter(
            episode_rewards(config.model, config.machine, config.judge, sum(tries.values(), []))
        )
        episodes = {
            name: best_of(played, [next(rewards) for _ in played]) for name, played in tries.items()
        }
    result = {
        "agents": {name: summary(played) for name, played in episodes.items()},
        **comparisons(episodes),
        **settings,
        **circumstances("torch", "playwright", "miniwob", "tokenizers"),
    }

    def write_files() -> None:
        write_result(config.out / "result.json", result)
        run_folder.write_settings(config.out, asdict(config))
        write_text(
            config.out / "metrics.jsonl", json.dumps({"step": 1, **result_metrics(result)}) + "\n"
        )
        print(table(result))
        shown = training_shown(adapters, config.model, config.machine)
        shown["settings"] |= {"model": config.model, **settings}
        tasks = next(iter(result["agents"].values()))["tasks"]
        agents = ", ".join(
            f"{name} = {adapter or 'no adapter'}" for name, adapter in adapters.items()
        )
        shown |= {
            "title": f"{len(tasks)} MiniWoB++ tasks",
            "seconds": {},
            "about": f"{config.model}: {agents}. {made_by(result)}",
        }
        make_report(config.out / "report.html", result, episodes, shown)
        tracking.finish()

    processes.on_rank_0(write_files)
    print(
        f"result: {config.out / 'result.json'}   report: {config.out / 'report.html'}   "
        f"episodes: {config.out}/NAME.jsonl"
    )
    return result


def play_held_out(config: EvaluateCommand, name: str, adapter: Path | None) -> list[Episode]:
    """Play one agent's episodes to OUT/NAME.jsonl, continuing where it stopped; returns `held_out`."""
    out, pages = config.out / f"{name}.jsonl", config.machine.page_count(config.watch)
    sampling = Sampling(config.temperature, max_new_tokens=config.max_new_tokens)
    jobs, title = instances(config), f"{name} on {config.split}"
    if config.shots:  # before the weights are read
        jobs = with_shots(jobs, config.examples, config.shots)
    policy = make_policy(
        CollectCommand(
            model=config.model,
            adapter=adapter,
            sampling=sampling,
            seed=config.seed,
            watch=config.watch,
            machine=config.machine,
        )
    )
    counts = play_to_file(policy, jobs, out, pages, title, watch=config.watch)
    if not counts["episodes"]:
        raise ValueError(f"{out}: not one episode could be played, because the browser failed")
    return held_out(config, name)


def held_out(config: EvaluateCommand, name: str) -> list[Episode]:
    """The episodes of `tried`, the best one of each instance."""
    return best_of(tried(config, name))


def tried(config: EvaluateCommand, name: str) -> list[Episode]:
    """The episodes in OUT/NAME.jsonl that belong to this evaluation."""
    keys = {job.key for job in instances(config)}
    return [episode for episode in read(config.out / f"{name}.jsonl") if episode.key in keys]


def instances(config: EvaluateCommand) -> list[Job]:
    """The episodes that every agent plays."""
    return make_jobs(
        dict.fromkeys(resolve(config.tasks), config.episodes), config.split, 0, config.best_of
    )


def parse_adapters(texts: Sequence[str]) -> dict[str, Path | None]:
    """{name: adapter folder} from NAME=FOLDER. `base=` is the base, which stands alone by default."""
    adapters: dict[str, Path | None] = {}
    for text in texts:
        name, sign, folder = text.partition("=")
        if not (sign and name and (folder or name == "base")):
            raise ValueError(f"--adapters takes NAME=FOLDER, got {text!r}")
        if Path(name).name != name:
            raise ValueError(f"--adapters {text}: {name} names files in --out: leave out the slash")
        if name.rpartition(".")[2] == "metrics":
            raise ValueError(
                f"--adapters {text}: {name}.jsonl is a log; take another name than {name}"
            )
        if name in adapters:
            raise ValueError(f"--adapters has two agents named {name}: give each its own name")
        adapters[name] = Path(folder) if folder else None
    return adapters or {"base": None}


def lock_folder(config: EvaluateCommand) -> TextIO:
    """The lock of the output folder. Raises ValueError if another process has it, or if something would be
    lost: a run that is no evaluation, an agent that is not asked for again, other settings, more episodes."""
    lock = run_folder.lock(config.out)
    if not (config.out / "config.json").is_file():
        return lock
    old = run_folder.read_settings(config.out)
    if not {"adapters", "episodes"} <= old.keys():
        raise ValueError(f"{config.out} holds a run that is no evaluation: give another --out")
    fixed = FIXED + ("episodes",) * (old["episodes"] > config.episodes)
    before, now = (
        {name: {"shots": 0, **settings}.get(name) for name in fixed}  # older ones had no shots
        for settings in (old, as_json(asdict(config)))
    )
    if changed := run_folder.changed_settings(before, now):
        raise ValueError(
            f"{config.out} holds an evaluation with other settings ({changed}): "
            "give another --out, or delete the folder"
        )
    if lost := parse_adapters(old["adapters"]).keys() - parse_adapters(config.adapters).keys():
        raise ValueError(
            f"{config.out} holds the result of {', '.join(sorted(lost))}, which would be lost: "
            f"name these too ({' '.join(old['adapters']) or 'base='}), or give another --out"
        )
    return lock
