"""Jobs: which episodes to play, and what is given before the agent's own first answer.

Each function takes instances or episodes and returns jobs in a fixed order.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from envs.protocol import SPLITS, World
from minidpo.data.episodes import Episode, by_instance, grouped
from minidpo.data.prompt import as_shots
from minidpo.data.values import states

Instance = tuple[str, int]
"(task, seed)"


class Job(NamedTuple):
    """One episode to play."""

    task: str
    seed: int
    index: int
    "Number within the group, which is all episodes of the same (task, seed)."
    limit: int
    "Most turns of the episode."
    forced: tuple[str, ...] = ()
    "Answers given in the first turns, before the policy is asked."
    shots: tuple[str, ...] = ()
    "Solved examples before the task: prompts and answers in turn."

    @property
    def key(self) -> tuple[str, int, int]:
        return self.task, self.seed, self.index

    @property
    def instance(self) -> Instance:
        return self.task, self.seed


def child_seed(*what) -> int:
    """A 64-bit seed derived from any values, the same on every machine and in every process.

    >>> child_seed(1, "click-link", 7) == child_seed(1, "click-link", 7) != child_seed(1, "click-link", 8)
    True
    """
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8], "big")


def split_instances(
    world: World, tasks: Mapping[str, int], split: str, first: int = 0
) -> list[Instance]:
    """Instances of each task: `tasks[task]` seeds of the split, from number `first` on.

    If a task has fewer, all of them are taken and a line says so. Raises ValueError if the world has no such
    split or a task has no instance from `first` on.
    """
    instances, short = [], []
    for task, count in tasks.items():
        try:
            seeds = world.instances(task, split)
        except KeyError:
            raise ValueError(
                f"the world {world.name} has no split {split!r}: take {', '.join(SPLITS)}"
            ) from None
        if first >= len(seeds):
            raise ValueError(
                f"{split} has {len(seeds):,} instances of {task}, none from number {first:,} on: begin earlier"
            )
        chosen = seeds[first : first + count]
        instances += [(task, seed) for seed in chosen]
        if len(chosen) < count:
            short.append(f"{task} has {len(chosen)}")
    if short:
        more = f" and {len(short) - 3} more tasks" if len(short) > 3 else ""
        print(
            f"{split} has fewer instances than asked for, so all are played: {', '.join(short[:3])}{more}"
        )
    return instances


def make_jobs(
    world: World, instances: Sequence[Instance], group: int = 1, index: int = 0
) -> list[Job]:
    """`group` episodes of each instance, one after another, numbered from `index`."""
    return [
        Job(task, seed, number, world.step_limit(task))
        for task, seed in instances
        for number in range(index, index + group)
    ]


def with_shots(jobs: Sequence[Job], examples: Sequence[Episode], count: int) -> list[Job]:
    """The same jobs, each after `count` solved examples: the first ones of the same task on other instances.

    Raises ValueError if there are fewer.
    """
    solved = grouped((e for e in examples if e.solved and e.turns), lambda e: e.task)
    shown = {}
    for task, seed in dict.fromkeys(job.instance for job in jobs):
        others = [e for e in solved.get(task, []) if e.seed != seed][:count]
        if len(others) < count:
            raise ValueError(
                f"{task}: {count} solved examples are wanted for seed {seed}, but there are {len(others)} of "
                "other instances: make more with collect.py --policy expert, or ask for fewer --shots"
            )
        shown[task, seed] = as_shots(others)
    return [job._replace(shots=shown[job.instance]) for job in jobs]


def with_golden_steps(jobs: Sequence[Job], golden: Sequence[Episode]) -> list[Job]:
    """The same jobs, each beginning with the first steps of its instance's golden episode.

    The index of an episode decides how many steps are given: 0, 1, ... up to all but the last, then 0 again (ETO,
    appendix C). Instances without a solved golden episode are left out, and a line counts them. Raises ValueError
    if none is left.
    """
    answers = {e.instance: e.said for e in golden if e.solved and e.turns}
    missing = {job.instance for job in jobs} - answers.keys()
    if missing:
        task, seed = min(missing)
        print(
            f"{len(missing)} instances have no solved golden episode and are left out, "
            f"such as {task} seed {seed}"
        )
    forced = []
    for job in jobs:
        if job.instance in answers:
            steps = answers[job.instance]
            forced.append(job._replace(forced=steps[: job.index % len(steps)]))
    if not forced:
        raise ValueError("no golden episode solves any of the instances")
    return forced


def continuations(world: World, recorded: Sequence[Episode], count: int) -> list[Job]:
    """`count` new episodes from each step of the recorded ones, with the answers before that step given.

    Steps with the same answers before them are one state, which is continued once. If several recorded episodes
    of an instance began at its first page, the first page is not continued again, unless there is no other state.
    The new episodes are numbered after the recorded ones of their instance, so they are new samples. Raises
    ValueError if there is no step.
    """
    jobs = []
    for (task, seed), group in by_instance(recorded).items():
        after = 1 + max(episode.index for episode in group)
        given = states(group)
        whole = [e for e in group if e.turns and not e.forced]
        if len(whole) > 1:
            given = [said for said in given if said] or given
        given = [said for said in given for _ in range(count)]
        jobs += [
            Job(task, seed, after + n, world.step_limit(task), said, group[0].shots)
            for n, said in enumerate(given)
        ]
    if not jobs:
        raise ValueError("no recorded episode has a step to continue from")
    return jobs


def to_agent_states(jobs: Sequence[Job], rollouts: Sequence[Episode], seed: int) -> list[Job]:
    """The same jobs, each beginning with the answers by which an agent reached some state of the instance.

    The states of an instance come in a seeded random order; episodes that began alike share states. From there
    the job has the task's full limit of turns. It keeps the examples in the agent's prompt. Jobs beyond the number
    of states are left out.
    """
    groups = by_instance(rollouts)
    order = {
        instance: sorted(states(group), key=lambda said: child_seed(seed, *instance, said))
        for instance, group in groups.items()
    }
    forced = []
    for job in jobs:
        reached = order.get(job.instance, ())
        if job.index < len(reached):
            said, shots = reached[job.index], groups[job.instance][0].shots
            forced.append(job._replace(forced=said, limit=job.limit + len(said), shots=shots))
    return forced
