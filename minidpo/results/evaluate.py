"""Measure success on held-out instances: the base and any number of adapters, all on the same instances.

Their seeds are never used for demonstrations or rollouts. Play is greedy by default. A folder holds one evaluation,
which can be continued and extended by more agents and episodes.
"""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TextIO

import envs
from envs import panel
from minidpo.acting.causes import cause
from minidpo.acting.collect import play_to_file
from minidpo.acting.jobs import Job, make_jobs, split_instances, with_shots
from minidpo.acting.policies import PlayOptions, Sampling, model_policy
from minidpo.data.episodes import Episode, read
from minidpo.learning.rm import episode_rewards, require_reward_model
from minidpo.memory import lora
from minidpo.memory.context import Context
from minidpo.memory.machine import device_of
from minidpo.results.circumstances import circumstances
from minidpo.results.publish import export_gguf, export_merged
from minidpo.results.replay import write_report
from minidpo.results.success import best_of, comparisons, result_metrics, summary
from minidpo.results.table import table
from minidpo.system import processes, run_folder
from minidpo.system.command_line import at_home
from minidpo.system.files import as_json, write_text
from minidpo.system.ranges import NotNegative, Positive
from minidpo.system.result_file import write_result
from minidpo.system.tracking import Tracker, Tracking

# Settings that must stay the same when an evaluation is continued; adapters and episodes may be added.
FIXED = (
    "model",
    "world",
    "tasks",
    "split",
    "temperature",
    "best_of",
    "judge",
    "seed",
    "max_new_tokens",
    "shots",
)


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand(PlayOptions):
    """Measure success on held-out instances, of several adapters side by side."""

    adapters: tuple[str, ...] = ()
    "adapters in order, as NAME=FOLDER or NAME=OWNER/NAME (on the hub); `base=` (the default) is the model alone"
    split: Literal["validation", "test"] = "test"
    "which held-out instances"
    episodes: Positive[int] = 100
    "instances per task, the same for every adapter"
    temperature: NotNegative[float] = 0.0
    "sampling temperature; 0 is greedy"
    best_of: Positive[int] = 1
    "tries per instance, of which the best counts: an oracle's success (Best-of-N)"
    judge: Path | None = None
    "with best_of: adapter folder of a reward model that chooses instead of the oracle"
    max_new_tokens: Positive[int] = 96
    "most tokens in an answer"
    out: Path = Path("runs/evaluation")
    "folder for the episodes (NAME.jsonl), result.json and report.html"
    export: Literal["merged", "gguf"] | None = None
    "play nothing, but write each adapter, added to the base, as a model: merged, to OUT/NAME-merged, for \
transformers; gguf, to OUT/NAME-merged.gguf, for llama.cpp and Ollama, and the adapter alone to \
OUT/NAME-lora.gguf"
    track: Tracker | None = None
    "copy the results to MLflow (at MLFLOW_TRACKING_URI), to TensorBoard (OUT/tensorboard) or to trackio"

    def __post_init__(self):
        super().__post_init__()
        if self.best_of > 1 and not self.temperature:
            raise ValueError(
                "best_of needs tries that differ, but greedy tries are all alike: set --temperature above 0"
            )
        if self.judge and self.best_of == 1:
            raise ValueError("judge picks one of several episodes: set best_of above 1")
        given = self.changed(*FIXED[1:], "episodes", "examples", "watch", "track")
        if self.export and given:
            raise ValueError(f"export plays nothing: leave out {', '.join(given)}")


def evaluate(command: EvaluateCommand) -> dict:
    """Measure the adapters, or with `export` write each as a model. Returns the result."""
    adapters = parse_adapters(command.adapters)
    for folder in filter(None, adapters.values()):
        # read all now, because the last one is needed an hour after the first
        lora.read_weights(folder)
    if command.export:
        return export(command, adapters)
    context = command.context()
    context.world.require(command.watch)
    if command.judge:
        require_reward_model(command.judge)
        processes.require_own_gpu(device_of(command.machine))
    tasks = envs.resolve(context.world, command.tasks)
    instances = split_instances(
        context.world, dict.fromkeys(tasks, command.episodes), command.split, 0
    )
    jobs = make_jobs(context.world, instances, command.best_of)
    if command.shots:
        jobs = with_shots(jobs, read(command.examples), command.shots)
    curves = training_curves(adapters)
    with processes.on_rank_0(lock_folder, command) or nullcontext():
        tracking = Tracking(command.out, asdict(command))
        tries = {
            name: play(command, context, name, adapter, jobs) for name, adapter in adapters.items()
        }
        episodes = best_tries(command, context, tries)
        result = {
            "agents": {
                name: summary(played, cause=partial(cause, context.world))
                for name, played in episodes.items()
            },
            **comparisons(episodes),
            **settings_of(command),
            "panel": {command.split: panel.sha256(instances)},
            **circumstances("torch", "playwright", "miniwob", "tokenizers"),
        }
        processes.on_rank_0(write_files, command, context, result, episodes, curves)
        processes.on_rank_0(tracking.finish)
    return result


def export(command: EvaluateCommand, adapters: dict[str, Path | None]) -> dict[str, str]:
    """Write each adapter as a model. Returns the fingerprint of each model's weights."""
    if None in adapters.values():
        raise ValueError("the base has no adapter to merge: name adapters, --adapters NAME=FOLDER")
    write = export_gguf if command.export == "gguf" else export_merged
    return {
        name: write(command.model, adapter, command.machine, command.out, name)
        for name, adapter in adapters.items()
    }


def play(
    command: EvaluateCommand, context: Context, name: str, adapter: Path | None, jobs: list[Job]
) -> list[Episode]:
    """Play an agent's jobs into OUT/NAME.jsonl, from where it stopped, and return the episodes."""
    out = command.out / f"{name}.jsonl"
    sampling = Sampling(command.temperature, max_new_tokens=command.max_new_tokens)
    pages = context.machine.page_count(command.watch)
    policy = model_policy(context, adapter, sampling, pages=pages, watch=command.watch)
    title = f"{name} on {command.split}"
    counts = play_to_file(policy, jobs, out, context=context, title=title, watch=command.watch)
    if not counts["episodes"]:
        raise ValueError(f"{out}: no episode could be played, because the world failed")
    keys = {job.key for job in jobs}
    return [episode for episode in read(out) if episode.key in keys]


def best_tries(
    command: EvaluateCommand, context: Context, tries: dict[str, list[Episode]]
) -> dict[str, list[Episode]]:
    """One episode of each instance for each agent, chosen by the verdict or by the reward model."""
    if not command.judge:
        return {name: best_of(played) for name, played in tries.items()}
    together = [episode for played in tries.values() for episode in played]
    rewards = iter(episode_rewards(context, command.judge, together))
    return {
        name: best_of(played, [next(rewards) for _ in played]) for name, played in tries.items()
    }


def settings_of(command: EvaluateCommand) -> dict:
    """The settings that are written into the result."""
    names = ["world", "split", "seed", "temperature", "best_of"]
    if command.shots:
        names.append("shots")
    settings = {name: vars(command)[name] for name in names}
    if command.judge:
        settings["judge"] = str(command.judge)
    return settings


def write_files(
    command: EvaluateCommand,
    context: Context,
    result: dict,
    episodes: dict[str, list[Episode]],
    curves: dict[str, list[dict]],
) -> None:
    """Write result, settings, metrics and report to the folder, and print the table."""
    out = command.out
    write_result(out / "result.json", result)
    run_folder.write_settings(out, asdict(command))
    write_text(out / "metrics.jsonl", json.dumps({"step": 1, **result_metrics(result)}) + "\n")
    print(table(result))
    adapters = parse_adapters(command.adapters)
    agents = ", ".join(f"{name} = {adapter or 'no adapter'}" for name, adapter in adapters.items())
    tasks = next(iter(result["agents"].values()))["tasks"]
    write_report(
        out / "report.html",
        result,
        episodes,
        world=context.world,
        title=f"{len(tasks)} {command.world} tasks",
        about=f"Base model: {command.model}. Adapters: {agents}",
        settings={"model": command.model, **settings_of(command)},
        curves=curves,
    )
    print(
        f"result: {out / 'result.json'}   report: {out / 'report.html'}   "
        f"episodes: {out}/NAME.jsonl"
    )


def training_curves(adapters: dict[str, Path | None]) -> dict[str, list[dict]]:
    """What the run folders of these adapters logged."""
    runs = {name: adapter.parent for name, adapter in adapters.items() if adapter}
    curves = {name: run_folder.records(folder) for name, folder in runs.items()}
    return {name: rows for name, rows in curves.items() if rows}


def parse_adapters(texts: Sequence[str]) -> dict[str, Path | None]:
    """{name: adapter folder} from NAME=FOLDER. `base=` is the base, which is the only agent by default."""
    adapters: dict[str, Path | None] = {}
    for text in texts:
        name, sign, folder = text.partition("=")
        if not (sign and name and (folder or name == "base")):
            raise ValueError(f"--adapters takes NAME=FOLDER, got {text!r}")
        # NAME.jsonl has the episodes; NAME.metrics.jsonl is the log of playing them
        if Path(name).name != name or name.rpartition(".")[2] == "metrics":
            raise ValueError(f"--adapters {text}: {name} cannot name a file in --out: take another")
        if name in adapters:
            raise ValueError(f"--adapters has two agents named {name}: give each its own name")
        adapters[name] = at_home(Path(folder)) if folder else None
    return adapters or {"base": None}


def lock_folder(command: EvaluateCommand) -> TextIO:
    """The lock of the output folder. Raises ValueError if another process has it, or if something would be
    lost: another kind of run, an agent that is not named again, other settings, more episodes."""
    lock = run_folder.lock(command.out)
    if not (command.out / "config.json").is_file():
        return lock
    old = run_folder.read_settings(command.out)
    if not {"adapters", "episodes"} <= old.keys():
        raise ValueError(f"{command.out} holds a run that is no evaluation: give another --out")
    new = as_json(asdict(command))
    fixed = (*FIXED, "episodes") if old["episodes"] > command.episodes else FIXED
    before, now = ({name: some.get(name) for name in fixed} for some in (old, new))
    changed = run_folder.changed_settings(before, now)
    if changed:
        raise ValueError(
            f"{command.out} holds an evaluation with other settings ({changed}): "
            "give another --out, or delete the folder"
        )
    lost = parse_adapters(old["adapters"]).keys() - parse_adapters(command.adapters).keys()
    if lost:
        raise ValueError(
            f"{command.out} holds the result of {', '.join(sorted(lost))}, which would be lost: "
            f"name these too ({' '.join(old['adapters']) or 'base='}), or give another --out"
        )
    return lock
