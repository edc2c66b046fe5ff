"""collect.py: episodes by an agent or by the scripted experts, one JSON line each."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import envs
from minidpo.acting.collect import play_to_file, print_counts
from minidpo.acting.jobs import make_jobs, split_instances, with_shots
from minidpo.acting.policies import PlayOptions, Sampling, expert_policy, model_policy
from minidpo.data.episodes import read
from minidpo.system.ranges import NotNegative, Positive


@dataclass(frozen=True, kw_only=True)
class CollectCommand(PlayOptions):
    """Play episodes: demonstrations by scripted experts, or rollouts by a model."""

    policy: Literal["model", "expert"] = "model"
    "who acts"
    adapter: Path | None = None
    "with a model: folder or hub id of a LoRA adapter"
    split: Literal["demos", "rollouts", "validation", "test"] = "rollouts"
    "which seeds: the splits are disjoint by construction"
    instances: Positive[int] = 20
    "instances (seeds) of each task"
    first: NotNegative[int] = 0
    "number of the first instance within the split"
    group: Positive[int | None] = None
    "episodes of each instance; None: 8, or 1 of an expert, who would do the same again"
    index: NotNegative[int] = 0
    "number of the first of them; other numbers are other samples"
    out: Path = Path("runs/rollouts.jsonl")
    "JSONL file, appended episode by episode; started again, it goes on where it stopped"
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self):
        super().__post_init__()
        if self.policy == "expert" and self.changed("adapter", "sampling"):
            raise ValueError(
                "adapter and sampling are a model's, and an expert is a script: leave them out"
            )


def collect(command: CollectCommand) -> dict:
    """Play what is asked for. Returns counts: episodes, env_errors, and of each outcome."""
    context = command.context()
    world = context.world
    world.require(command.watch)
    tasks = envs.resolve(world, command.tasks)
    count = dict.fromkeys(tasks, command.instances)
    instances = split_instances(world, count, command.split, command.first)
    group = command.group or (1 if command.policy == "expert" else 8)
    jobs = make_jobs(world, instances, group, command.index)
    if command.shots:
        jobs = with_shots(jobs, read(command.examples), command.shots)
    if command.policy == "expert":
        policy = expert_policy(context, tasks, watch=command.watch)
    else:
        pages = command.machine.page_count(command.watch)
        policy = model_policy(
            context, command.adapter, command.sampling, pages=pages, watch=command.watch
        )
    title = f"{policy.name} on {command.split}"
    counts = play_to_file(
        policy, jobs, command.out, context=context, title=title, watch=command.watch
    )
    print_counts(command.out, jobs, counts)
    return counts
