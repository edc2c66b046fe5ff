"""Play episodes and write each to a file as a JSON line.

After a kill the same command continues: no episode is played twice, none is lost, and the results are the same.
Under torchrun the processes share the instances.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tqdm import tqdm

from envs.protocol import EnvError
from minidpo.acting.jobs import Job
from minidpo.acting.policies import Policy
from minidpo.acting.rollout import play
from minidpo.data.episodes import Episode, Writer, arrange, player_of, rank_files, read
from minidpo.data.information import diversity
from minidpo.memory.context import Context
from minidpo.system import processes
from minidpo.system.files import named_in_errors


def play_to_file(
    policy: Policy,
    jobs: Sequence[Job],
    out: Path,
    *,
    context: Context,
    title: str,
    watch: bool = False,
) -> dict:
    """Play the jobs that `out` lacks. Returns counts over all jobs: episodes, each outcome, env_errors."""
    keys = dict.fromkeys(job.key for job in jobs)
    with open_rank_file(out) as writer:
        # every rank reads `out` before any rank adds to it
        with processes.fail_together(phase=True):
            played = read_or_none(out)
            check_same_run(out, played, policy, jobs)
            missing = share_of_rank(jobs, {episode.key for episode in played})
            played = [episode for episode in played if episode.key in keys]
        if watch and not missing:
            print(
                f"{out} has all these episodes, so there is nothing to watch: give another --out to play again"
            )
        errors = play_missing(policy, missing, writer, played, context, title, watch)
        if processes.rank() > 0:
            writer.file.close()  # rank 0 reads it now
        of_ranks = processes.all_gather(errors, phase=True)  # also waits for all ranks
        errors = [error for of_rank in of_ranks for error in of_rank]
        processes.on_rank_0(merge_rank_files, writer, keys)
        outcomes = Counter(str(e.outcome) for e in read_or_none(out) if e.key in keys)
    if errors:
        print(
            f"{len(errors)} episodes were given up because the world failed, and are not in {out}; the same "
            f"command tries them again. The first error: {errors[0]}"
        )
    return {"episodes": outcomes.total(), **outcomes, "env_errors": len(errors)}


def check_same_run(out: Path, played: list[Episode], policy: Policy, jobs: Sequence[Job]) -> None:
    """Raise ValueError if `out` holds episodes that do not come from this policy and these jobs.

    A policy is recognised by the fingerprints of its weights, wherever they are, and of its chat format, which
    old episodes lack. A stage of an experiment also has a key, which covers everything about its jobs.
    """
    shots = {job.key: job.shots for job in jobs}
    weights, chat = player_of(policy.name)
    for episode in played:
        if episode.shots != shots.get(episode.key, episode.shots):
            raise ValueError(
                f"{out}: {episode.name} was played with other examples in its prompt: give the same --shots "
                "and --examples as then, or another --out"
            )
        their_weights, their_chat = player_of(episode.policy)
        changed = {
            "weights": their_weights != weights,
            "tokenizer or chat template": their_chat not in ("", chat),
            "sampling": episode.sampling != policy.sampling,
        }
        if others := [name for name, differs in changed.items() if differs]:
            raise ValueError(
                f"{out} holds episodes by {episode.policy} {episode.sampling}, not by {policy.name} "
                f"{policy.sampling} (other {' and '.join(others)}): give another --out, or delete the file"
            )


def play_missing(
    policy: Policy,
    jobs: list[Job],
    writer: Writer,
    played: list[Episode],
    context: Context,
    title: str,
    watch: bool,
) -> list[str]:
    """Play these jobs and write their episodes. A progress bar counts them together with the `played` ones; rank 0
    adds a line to NAME.metrics.jsonl every fifty episodes. Returns a line for each job that the world failed at."""
    world = context.world
    counts, began = Counter(str(episode.outcome) for episode in played), time.perf_counter()
    bar = tqdm(total=len(played) + len(jobs), initial=len(played), desc=title, unit="episode")

    def add(episode: Episode) -> None:
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
        async with world.open(context.machine.page_count(watch), watch) as envs:
            return await play(envs, jobs, policy, add, world)

    with bar:
        try:
            failures = asyncio.run(run()) if jobs else []
        # the world cannot be opened at all: an expected error, told in one line
        except EnvError as error:
            raise ValueError(str(error)) from None
    return [f"{job.task} seed {job.seed}: {error}" for job, error in failures]


def share_of_rank(jobs: Iterable[Job], done: set[tuple[str, int, int]]) -> list[Job]:
    """This rank's share of the jobs that are not done yet. Whole instances go to the ranks in turn."""
    missing = [job for job in jobs if job.key not in done]
    instances = list(dict.fromkeys(job.instance for job in missing))
    share = set(instances[processes.rank() :: processes.world_size()])
    return [job for job in missing if job.instance in share]


def open_rank_file(out: Path) -> Writer:
    """A writer for this rank's episodes: rank 0 writes to `out`, rank N to OUT.rankN beside it.

    Before that, rank 0 moves the episodes that a killed run left in such files into `out`.
    """
    with processes.fail_together(phase=True):
        if processes.rank() == 0:
            writer = Writer(out)
            merge_rank_files(writer)
            return writer
    return Writer(out.with_name(f"{out.name}.rank{processes.rank()}"))


def merge_rank_files(writer: Writer, keys: Iterable[tuple[str, int, int]] | None = None) -> None:
    """Move the episodes of all OUT.rankN into the writer's file, and sort the file by `keys` if given."""
    for path in rank_files(writer.path):
        # cuts off a torn last line, and raises if another process still writes to it
        with Writer(path):
            writer.extend(read_or_none(path))
            path.unlink()
    if keys is not None and writer.done:
        arrange(writer.path, keys)


def read_or_none(path: Path) -> list[Episode]:
    """The episodes of a file, which may be empty."""
    return read(path) if path.stat().st_size else []


def print_counts(out: Path, jobs: Sequence[Job], counts: dict) -> None:
    """Print the counts of `play_to_file` and, if instances were tried several times, how much the tries differ."""
    print(f"{out}: " + ", ".join(f"{count} {name}" for name, count in counts.items() if count))
    asked = {job.key for job in jobs}  # the file may hold more
    if unlike := diversity([episode for episode in read_or_none(out) if episode.key in asked]):
        print(
            f"{unlike['mixed']:.0%} of the instances were both solved and failed; two attempts at the same "
            f"instance differ in {unlike['diversity']:.0%} of the cases"
        )
