"""Jobs: which episodes to play, and what is given before the agent's own first answer.

All of it is a function of data: instances or episodes in, jobs out, in a fixed order.
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
    "Number within the group: the episodes of the same (task, seed)."
    limit: int
    "Turns the episode may take."
    forced: tuple[str, ...] = ()
    "Answers that are given in the first turns; then the policy is asked."
    shots: tuple[str, ...] = ()
    "Solved examples before the task: what they show and say, in turn."

    @property
    def key(self) -> tuple[str, int, int]:
        return self.task, self.seed, self.index

    @property
    def instance(self) -> Instance:
        return self.task, self.seed


def child_seed(*what) -> int:
    """A 64-bit seed from any values, the same on every machine and in every process.

    >>> child_seed(1, "click-link", 7) == child_seed(1, "click-link", 7) != child_seed(1, "click-link", 8)
    True
    """
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8], "big")


def split_instances(
    world: World, tasks: Mapping[str, int], split: str, first: int = 0
) -> list[Instance]:
    """So many instances of each task: the seeds of the split from number `first` on.

    Of a task that has fewer, all there are, which a printed line says. Raises ValueError if the world has no such
    split, or a task none from there on.
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
                f"{split} has {len(seeds):,} instances of {task}, and number {first:,} is asked for: begin earlier"
            )
        chosen = seeds[first : first + count]
        instances += [(task, seed) for seed in chosen]
        if len(chosen) < count:
            short.append(f"{task} has {len(chosen)}")
    if short:
        more = f" and {len(short) - 3} more tasks" if len(short) > 3 else ""
        print(
            f"fewer instances of {split} than asked for, so all are played: {', '.join(short[:3])}{more}"
        )
    return instances


def make_jobs(
    world: World, instances: Sequence[Instance], group: int = 1, index: int = 0
) -> list[Job]:
    """`group` episodes of each instance, numbered from `index`; the episodes of a group are neighbours."""
    return [
        Job(task, seed, number, world.step_limit(task))
        for task, seed in instances
        for number in range(index, index + group)
    ]


def with_shots(jobs: Sequence[Job], examples: Sequence[Episode], count: int) -> list[Job]:
    """The same jobs, each after `count` solved examples: the first of its task, of other instances.

    Raises ValueError if a task has fewer.
    """
    solved = grouped((e for e in examples if e.solved and e.turns), lambda e: e.task)
    shown = {}
    for task, seed in dict.fromkeys(job.instance for job in jobs):
        others = [e for e in solved.get(task, []) if e.seed != seed][:count]
        if len(others) < count:
            raise ValueError(
                f"{task}: {len(others)} solved examples of other instances than seed {seed}, not {count}: "
                "collect.py --policy expert makes them; or ask for fewer --shots"
            )
        shown[task, seed] = as_shots(others)
    return [job._replace(shots=shown[job.instance]) for job in jobs]


def with_golden_steps(jobs: Sequence[Job], golden: Sequence[Episode]) -> list[Job]:
    """The same jobs, each beginning with the first steps of its instance's golden episode.

    How many is none to all but one, in turn by the episode's index (ETO, appendix C). Instances without a solved
    golden episode are counted in a printed line and left out. Raises ValueError if none is left.
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
        raise ValueError("no golden episode solves any instance that is asked for")
    return forced


def continuations(world: World, recorded: Sequence[Episode], count: int) -> list[Job]:
    """`count` episodes from each step of the recorded ones on: what was said before it is given.

    Steps with the same words before them are one state and are continued once. Where several recorded episodes
    started from the first page, no more do, unless there is no other state. The new episodes are numbered after
    the recorded ones of their instance, so they are other samples. Raises ValueError if there is no step.
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
        raise ValueError("no recorded episode has a step to go on from")
    return jobs


def to_agent_states(jobs: Sequence[Job], rollouts: Sequence[Episode], seed: int) -> list[Job]:
    """The same jobs, each beginning with what an agent did on its instance up to a state that it reached.

    The states of an instance come in a seeded random order; episodes that began alike share states. The
    task's whole limit of turns follows, and the agent's own examples stand before the task. Jobs beyond the
    number of states are left out.
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
