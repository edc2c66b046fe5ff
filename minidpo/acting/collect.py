"""Play episodes on real pages and write each to a file as a JSON line.

A run that was killed goes on when the same command is started again: no episode is played twice, none is
lost, the numbers are the same. Under torchrun the processes share the instances.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from envs.miniwob.browser.remote import RemoteBrowser, check_display
from envs.miniwob.progress import progress
from envs.miniwob.tasks import SEEDS, STEP_LIMIT, resolve
from envs.protocol import EnvError, Outcome
from minidpo.acting.policies import Job, Policy, child_seed, make_policy
from minidpo.acting.rollout import play
from minidpo.config import CollectCommand
from minidpo.data.episodes import Episode, Writer, arrange, by_instance, rank_files, read, read_all
from minidpo.data.information import diversity
from minidpo.data.pairs import segment_starts
from minidpo.data.prompt import as_shots
from minidpo.data.values import states
from minidpo.system import processes
from minidpo.system.files import named_in_errors


def collect(command: CollectCommand, instances_per_task: Mapping[str, int] | None = None) -> dict:
    """Play what the command asks for, or `instances_per_task` where their number differs from task to task.
    Returns counts: episodes, env_errors, and of each outcome."""
    if command.watch:
        check_display()
    if command.recorded:
        jobs = continuations(command.recorded, command.values)
    else:
        count_of = instances_per_task or dict.fromkeys(resolve(command.tasks), command.instances)
        jobs = make_jobs(count_of, command.split, command.first, command.attempts(), command.index)
    if command.shots:
        jobs = with_shots(jobs, command.examples, command.shots)
    if command.golden:
        jobs = with_golden_steps(
            jobs, command.golden, command.seed, golden_steps=command.golden_steps
        )
    if command.states:
        jobs = to_agent_states(jobs, command.states, command.seed)
    policy = make_policy(command, dict.fromkeys(job.task for job in jobs))  # the weights, so last
    counts = play_to_file(
        policy,
        jobs,
        command.out,
        command.machine.page_count(command.watch),
        title=f"{policy.name} on {command.recorded or command.split}",
        watch=command.watch,
    )
    print(
        f"{command.out}: " + ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    )
    asked = {job.key for job in jobs}  # the file may hold more
    if command.attempts() > 1 and (
        unlike := diversity(
            [episode for episode in read_or_none(command.out) if episode.key in asked]
        )
    ):
        print(
            f"of what was tried several times, {unlike['mixed']:.0%} was both solved and failed; two "
            f"attempts at one differ in {unlike['diversity']:.0%} of the cases"
        )
    return counts


def make_jobs(
    instances_per_task: Mapping[str, int], split: str, first: int, group: int, index: int = 0
) -> list[Job]:
    """`group` episodes, numbered from `index`, of each instance, which lie together. The instances of a task
    are the split's seeds from number `first` on. Raises ValueError if the split has fewer."""
    if first + max(instances_per_task.values()) > len(SEEDS[split]):
        raise ValueError(
            f"{split} has {len(SEEDS[split]):,} instances of a task, and "
            f"{first + max(instances_per_task.values()):,} are asked for: ask for fewer"
        )
    return [
        Job(task, seed, number, STEP_LIMIT(task))
        for task, count in instances_per_task.items()
        for seed in SEEDS[split][first : first + count]
        for number in range(index, index + group)
    ]


def with_shots(jobs: list[Job], examples: Path, count: int) -> list[Job]:
    """The same jobs, each behind `count` solved examples: the first of its task, of other instances."""
    solved = [e for e in read(examples) if e.solved and e.turns]
    shown = {}
    for task, seed in dict.fromkeys(job.instance for job in jobs):
        of_task = [e for e in solved if e.task == task and e.seed != seed][:count]
        if len(of_task) < count:
            raise ValueError(
                f"{examples}: {len(of_task)} solved examples of {task} beside seed {seed}, not "
                f"{count}: collect.py --policy expert makes them; or ask for fewer --shots"
            )
        shown[task, seed] = as_shots(of_task)
    return [job._replace(shots=shown[job.instance]) for job in jobs]


def with_golden_steps(
    jobs: list[Job], golden: Path, seed: int, *, golden_steps: str = "drawn"
) -> list[Job]:
    """The same jobs, each beginning with the first steps of its instance's golden episode.

    golden_steps "drawn": their number is drawn for each instance, from none to all but one, so the episodes
    of a group begin alike. "every": each of these numbers in turn, by the episode's index (ETO, appendix C).
    "thirds": those behind which a third of the golden episode begins, in turn. Prints how many instances have
    no solved golden episode, and leaves them out.
    """
    answers = {e.instance: e.said for e in read(golden) if e.solved and e.turns}
    if missing := list(
        dict.fromkeys(f"{e.task} seed {e.seed}" for e in jobs if e.instance not in answers)
    ):
        print(
            f"{golden} has no solved episode of {len(missing)} instances, which are left out: {missing[0]}"
        )
    forced = []
    for job in (job for job in jobs if job.instance in answers):
        steps = answers[job.instance]
        counts = segment_starts(len(steps)) if golden_steps == "thirds" else range(len(steps))
        place = child_seed(seed, job.task, job.seed) if golden_steps == "drawn" else job.index
        forced.append(job._replace(forced=steps[: counts[place % len(counts)]]))
    if not forced:
        raise ValueError(
            f"{golden}: no solved episode of any instance that is asked for: collect.py "
            "--policy expert makes them, for the same --tasks, --split, --first and --instances"
        )
    return forced


def continuations(recorded: Path, count: int) -> list[Job]:
    """`count` episodes from each step of the recorded ones on: what was said before it is given.

    Steps with the same words before them are one state and are continued once. From the first page several
    recorded episodes went on already: there none does, unless there is no other state. The episodes of an
    instance are numbered behind its recorded ones, so they are other samples. Raises ValueError if there is
    no step, or if an episode is of no known task.
    """
    jobs = []
    for (task, seed), group in by_instance(read(recorded)).items():
        resolve(task)
        after = 1 + max(episode.index for episode in group)
        whole = sum(not e.forced and len(e.turns) > 0 for e in group)
        begun = [said for said in states(group) if said] if whole > 1 else []
        given = [said for said in begun or states(group) for _ in range(count)]
        jobs += [
            Job(task, seed, after + n, STEP_LIMIT(task), said, group[0].shots)
            for n, said in enumerate(given)
        ]
    if not jobs:
        raise ValueError(f"{recorded}: no episode has a step to go on from")
    return jobs


def to_agent_states(jobs: list[Job], rollouts: Sequence[Path], seed: int) -> list[Job]:
    """The same jobs, each beginning with what an agent did on its instance up to one of the states that it
    reached, in a seeded random order of these, and with the task's whole limit of turns behind it; and behind
    the examples that stood before the agent's.

    Two episodes that began alike share their states. Jobs beyond the number of states are left out.
    """
    groups = by_instance(read_all(rollouts))
    order = {
        instance: sorted(states(group), key=lambda said: child_seed(seed, *instance, said))
        for instance, group in groups.items()
    }
    forced = []
    for job in jobs:
        if job.index < len(order.get(job.instance, ())):
            said, shots = order[job.instance][job.index], groups[job.instance][0].shots
            if job.shots not in ((), shots):
                raise ValueError(
                    f"{' '.join(map(str, rollouts))}: played behind other examples than --shots "
                    "and --examples give: leave these out"
                )
            forced.append(job._replace(forced=said, limit=job.limit + len(said), shots=shots))
    if not forced:
        raise ValueError(
            f"{' '.join(map(str, rollouts))}: no state of any instance that is asked for: give "
            "the --tasks, --split, --first and --instances of these rollouts"
        )
    return forced


def play_to_file(
    policy: Policy, jobs: list[Job], out: Path, pages: int, title: str, *, watch: bool = False
) -> dict:
    """Play the jobs that `out` lacks. Returns counts of all: episodes, env_errors, and of each outcome."""
    keys = dict.fromkeys(job.key for job in jobs)
    with open_rank_file(out) as writer:
        with processes.fail_together(
            phase=True
        ):  # every rank reads `out` before any rank adds to it
            played = read_or_none(out)
            check_same_run(out, played, policy, jobs)
            missing = share_of_rank(jobs, {episode.key for episode in played})
            played = [episode for episode in played if episode.key in keys]
        if watch and not missing:
            print(
                f"{out} holds all of it, so there is nothing to watch: another --out plays it again"
            )
        errors = play_missing(
            policy, missing, writer, played=played, pages=pages, title=title, watch=watch
        )
        if processes.rank() > 0:
            writer.file.close()  # rank 0 reads it now
        errors = sum(processes.all_gather(errors, phase=True), [])  # which waits for all ranks
        processes.on_rank_0(merge_rank_files, writer, keys)
        outcomes = Counter(str(e.outcome) for e in read_or_none(out) if e.key in keys)
    if errors:
        print(
            f"given up, because the browser failed: {len(errors)}. They are not in {out}; a loop goes "
            f"on without them, and a command of its own tries them when it is started again: {errors[0]}"
        )
    return {"episodes": outcomes.total(), **outcomes, "env_errors": len(errors)}


def check_same_run(out: Path, played: list[Episode], policy: Policy, jobs: list[Job]) -> None:
    """Raise ValueError if `out` holds episodes that this policy, with these jobs, would not have played.

    A policy is known by the fingerprint of its weights, which may have been moved to another place.
    """
    forced, shots = {job.key: job.forced for job in jobs}, {job.key: job.shots for job in jobs}
    for episode in played:
        if episode.shots != shots.get(episode.key, episode.shots):
            raise ValueError(
                f"{out}: {episode.name} was played behind other examples: give its --shots "
                "and --examples, or another --out"
            )
        given = forced.get(episode.key, episode.said[: episode.forced])
        if episode.said[: episode.forced] != given[: len(episode.turns)]:
            raise ValueError(
                f"{out}: {episode.name} began with {episode.forced} forced steps, "
                f"not with these {len(given)}: give another --out"
            )
        fingerprints = [name.rpartition("@")[2] for name in (episode.policy, policy.name)]
        if fingerprints[0] != fingerprints[1] or episode.sampling != policy.sampling:
            raise ValueError(
                f"{out} holds episodes by {episode.policy} {episode.sampling}, not by "
                f"{policy.name} {policy.sampling}: give another --out, or delete it"
            )


def play_missing(
    policy: Policy,
    jobs: list[Job],
    writer: Writer,
    *,
    played: list[Episode],
    pages: int,
    title: str,
    watch: bool,
) -> list[str]:
    """Play these jobs on as many pages and write their episodes. A bar counts them and the `played` ones, and
    every fifty of rank 0 are a line in NAME.metrics.jsonl. Returns what the browser failed at."""
    counts, began = Counter(str(episode.outcome) for episode in played), time.perf_counter()
    bar = tqdm(total=len(played) + len(jobs), initial=len(played), desc=title, unit="episode")

    def add(episode: Episode) -> None:
        if not episode.solved:  # how near it came to the goal, where the page or its form says so
            turns = [(turn.observation, turn.action) for turn in episode.turns]
            nearness = progress(
                episode.instruction,
                episode.task,
                turns,
                episode.reward,
                ended=episode.outcome == Outcome.FAILED,
            )
            episode = replace(episode, progress=nearness)
        writer.add(episode)
        counts[str(episode.outcome)] += 1
        step, success = counts.total(), counts["solved"] / counts.total()
        bar.set_postfix_str(f"{success:.0%} solved", refresh=False)
        bar.update()
        if processes.rank() == 0 and (step % 50 == 0 or step == bar.total):
            seconds = round(time.perf_counter() - began, 1)  # of this process
            line = {"step": step, "success": success, **counts, "seconds": seconds}
            path = writer.path.with_suffix(".metrics.jsonl")
            with named_in_errors(path), open(path, "a") as file:
                file.write(json.dumps(line) + "\n")
        if watch:
            tqdm.write(f"{episode.task} seed {episode.seed}: {episode.outcome}")

    async def run() -> list[tuple[Job, EnvError]]:
        async with RemoteBrowser(pages, headless=not watch) as browser:
            return await play(browser.envs, jobs, policy, add)

    with bar:
        try:
            failures = asyncio.run(run()) if jobs else []
        except EnvError as error:  # no browser at all: an expected error, one line
            raise ValueError(str(error)) from None
    return [f"{job.task} seed {job.seed}: {error}" for job, error in failures]


def share_of_rank(jobs: Iterable[Job], done: set[tuple[str, int, int]]) -> list[Job]:
    """This rank's share of the jobs that are not done yet: whole instances, dealt out in turn."""
    missing = [job for job in jobs if job.key not in done]
    instances = list(dict.fromkeys(job.instance for job in missing))
    share = set(instances[processes.rank() :: processes.world_size()])
    return [job for job in missing if job.instance in share]


def open_rank_file(out: Path) -> Writer:
    """A writer for this rank's episodes: rank 0 writes to `out`, rank N to OUT.rankN beside it.

    First rank 0 moves into `out` what a killed run left in such files.
    """
    with processes.fail_together(phase=True):
        if processes.rank() == 0:
            writer = Writer(out)
            merge_rank_files(writer)
            return writer
    return Writer(out.with_name(f"{out.name}.rank{processes.rank()}"))


def merge_rank_files(writer: Writer, keys: Iterable[tuple[str, int, int]] | None = None) -> None:
    """Move the episodes of all OUT.rankN into the writer's file; with keys, put all in the order of these."""
    for path in rank_files(writer.path):
        with Writer(
            path
        ):  # cuts off a torn last line, and raises if another process still writes to it
            writer.extend(read_or_none(path))
            path.unlink()
    if keys is not None and writer.done:
        arrange(writer.path, keys)


def read_or_none(path: Path) -> list[Episode]:
    """The file's episodes; none of an empty file."""
    return read(path) if path.stat().st_size else []
