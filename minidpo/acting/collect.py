"""Play episodes on real pages and keep them, one JSON line each.

    python collect.py --policy expert --split demos --instances 5 --group 1 --out runs/demos.jsonl
    python collect.py --policy expert --noise 0.3 --split base --instances 400 --group 1 --out runs/bad.jsonl
    python collect.py --adapter runs/sft/adapter --out runs/rollouts.jsonl
    python collect.py --adapter runs/sft/adapter --golden runs/golden.jsonl --out runs/stepwise.jsonl

Started again after a kill, it goes on where it stopped: no episode twice, none lost, the same numbers. With
torchrun --nproc-per-node N in place of python, N processes share the instances.
"""

import asyncio
import glob
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from envs.miniwob.browser.remote import RemoteBrowser, check_display
from envs.miniwob.experts.by_task import EXPERTS
from envs.miniwob.progress import progress
from envs.miniwob.tasks import SEEDS, STEP_LIMIT, resolve
from envs.protocol import EnvError, Outcome
from minidpo.acting.policies import ExpertPolicy, Job, ModelPolicy, Policy, Told, child_seed
from minidpo.acting.rollout import play
from minidpo.config import CollectCommand
from minidpo.data.episodes import Episode, Writer, arrange, read
from minidpo.memory.loading import open_policy, policy_name
from minidpo.system import processes


def own(jobs: Iterable[Job], done: set[tuple[str, int, int]]) -> list[Job]:
    """This rank's of the jobs that are not done yet: whole instances, dealt out in turn."""
    left = [job for job in jobs if job[:3] not in done]
    number = {instance: n for n, instance in enumerate(dict.fromkeys(job[:2] for job in left))}
    return [job for job in left if number[job[:2]] % processes.world_size() == processes.rank()]


@contextmanager
def open_writer(out: Path) -> Iterator[Writer]:
    """A writer for what this rank plays: to `out` in rank 0, in the others to OUT.rankN beside it.

    Its `done` begins with what `out` holds, into which rank 0 first takes what a killed run left beside it.
    """
    with ExitStack() as stack:
        with processes.fail_together(phase=True):
            if processes.rank() == 0:
                kept = stack.enter_context(Writer(out))
                _take(kept)
        if processes.rank() > 0:
            kept = stack.enter_context(Writer(out.with_name(f"{out.name}.rank{processes.rank()}")))
            kept.done |= {episode.key for episode in _read(out)}
        yield kept


def arranged(kept: Writer, out: Path, keys: Iterable[tuple[str, int, int]]) -> list[Episode]:
    """When all ranks have played, what they played in `out`, in the order of these keys."""
    if processes.rank() > 0:
        kept.file.close()  # rank 0 reads it now
    with processes.fail_together(phase=True):
        pass
    with processes.fail_together(phase=True):
        if processes.rank() == 0:
            _take(kept)
            if kept.done:
                arrange(out, keys)
    return _read(out)


def _take(kept: Writer) -> None:
    for path in sorted(kept.path.parent.glob(f"{glob.escape(kept.path.name)}.rank*")):
        with Writer(path):  # its last line may be torn; and nobody may write to it any more
            kept.extend(_read(path))
            path.unlink()


def _read(path: Path) -> list[Episode]:
    return read(path) if path.stat().st_size else []


def jobs(instances: Mapping[str, int], split: str, first: int, group: int, index: int = 0) -> list[Job]:
    """`group` episodes of each of so many seeds of each task, episodes of one instance together."""
    if first + max(instances.values()) > len(SEEDS[split]):
        raise ValueError(f"{split} has {len(SEEDS[split]):,} instances: --first and --instances go beyond")
    return [Job(task, seed, number, STEP_LIMIT(task)) for task, count in instances.items()
            for seed in SEEDS[split][first:first + count] for number in range(index, index + group)]


def forced(wanted: list[Job], golden: Path, seed: int) -> list[Job]:
    """The same jobs, each beginning with the first steps of its instance's golden episode.

    How many is drawn for each instance, so that a group stands before the same step: none to all but one.
    Instances without a solved golden episode are left out, and told.
    """
    found = {episode.instance: episode.said for episode in read(golden) if episode.solved and episode.turns}
    missing = list(dict.fromkeys(f"{job.task} seed {job.seed}" for job in wanted if job[:2] not in found))
    if missing:
        print(f"{golden} has no solved episode of {len(missing)} instances, which are left out: {missing[0]}")
    if not (left := [job for job in wanted if job[:2] in found]):
        raise ValueError(f"{golden}: no solved episode of any instance that is asked for: collect.py "
                         "--policy expert makes them, for the same --tasks, --split, --first and --instances")
    return [job._replace(forced=steps[:child_seed(seed, job.task, job.seed) % len(steps)])
            for job in left for steps in [found[job[:2]]]]


def with_progress(episode: Episode) -> Episode:
    """A failure with how near it came, where that can be told."""
    if episode.solved:
        return episode
    turns = [(turn.observation, turn.action) for turn in episode.turns]
    near = progress(episode.instruction, episode.task, turns, episode.reward,
                    ended=episode.outcome == Outcome.FAILED)
    return replace(episode, progress=near)


class Progress:
    """What was played so far: a bar, and each fifty episodes a line in NAME.metrics.jsonl beside the file.

    Of several processes the first tells what it has played itself.
    """

    def __init__(self, out: Path, before: list[Episode], total: int, title: str):
        self.path, self.began = out.with_suffix(".metrics.jsonl"), time.perf_counter()
        self.counts = Counter(str(episode.outcome) for episode in before)
        self.bar = tqdm(total=total, initial=len(before), desc=title, unit="episode")

    def add(self, episode: Episode) -> None:
        self.counts[str(episode.outcome)] += 1
        played, success = self.counts.total(), self.counts["solved"] / self.counts.total()
        self.bar.set_postfix_str(f"{success:.0%} solved", refresh=False)
        self.bar.update()
        if processes.rank() == 0 and (played % 50 == 0 or played == self.bar.total):
            seconds = round(time.perf_counter() - self.began, 1)  # of this process
            line = {"step": played, "success": success, **self.counts, "seconds": seconds}
            with open(self.path, "a") as file:
                file.write(json.dumps(line) + "\n")


def play_to_file(policy: Policy, wanted: list[Job], out: Path, pages: int, title: str,
                 watch: bool = False) -> dict:
    """Play what `out` does not hold yet. Returns counts: episodes, env_errors, and of each outcome."""
    if watch:
        policy = Told(policy)
    errors: list[str] = []
    given = {job[:3]: len(job.forced) for job in wanted}
    keys = set(given)
    with open_writer(out) as writer:
        with processes.fail_together(phase=True):  # none begins to write before all have read what is there
            before = read(out) if writer.done else []
            for kept in before:
                if kept.key in given and kept.forced != min(given[kept.key], len(kept.turns)):
                    raise ValueError(f"{out}: {kept.task} seed {kept.seed} episode {kept.index} began with "
                                     f"{kept.forced} forced steps, not {given[kept.key]}: give another --out")
                # the weights count, wherever they lie
                weights = [name.rpartition("@")[2] for name in (kept.policy, policy.name)]
                if weights[0] != weights[1] or kept.sampling != policy.sampling:
                    raise ValueError(f"{out} holds episodes by {kept.policy} {kept.sampling}, not by "
                                     f"{policy.name} {policy.sampling}: give another --out, or delete it")
            mine, there = own(wanted, writer.done), [kept for kept in before if kept.key in keys]
        if watch and not mine:
            print(f"{out} holds all of it, so there is nothing to watch: another --out plays it again")
        progressed = Progress(out, there, len(there) + len(mine), title)

        def done(episode):
            if episode.key not in writer.done:
                writer.add(with_progress(episode))
                progressed.add(episode)
                if watch:
                    tqdm.write(f"{episode.task} seed {episode.seed}: {episode.outcome}")

        def failed(job, error):
            errors.append(f"{job.task} seed {job.seed}: {error}")

        async def run():
            async with RemoteBrowser(pages, headless=not watch) as browser:
                await play(browser.envs, mine, policy, done, failed)

        with progressed.bar:
            if mine:
                try:
                    asyncio.run(run())
                except EnvError as error:  # no browser at all: an expected error, one line
                    raise ValueError(str(error)) from None
        # in order while nobody else may write to it
        episodes = arranged(writer, out, [job[:3] for job in wanted])
    if errors := sum(processes.all_gather(errors), []):
        print(f"given up, because the browser failed: {len(errors)}. They are not in {out}; a loop goes on "
              f"without them, collect.py and evaluate.py try them again when started again: {errors[0]}")
    episodes = [episode for episode in episodes if episode.key in keys]
    return {"episodes": len(episodes), **Counter(str(e.outcome) for e in episodes), "env_errors": len(errors)}


def collect(config: CollectCommand, instances: Mapping[str, int] | None = None) -> dict:
    """Play what is asked for; `instances`: of each task, where they are not the same number."""
    if config.watch:
        check_display()
    tasks, pages = resolve(config.tasks), config.machine.page_count(config.watch)
    if config.policy == "expert":
        if missing := [task for task in tasks if task not in EXPERTS]:
            raise ValueError(f"no scripted expert for {', '.join(missing[:5])}; there are experts for "
                             f"{', '.join(sorted(EXPERTS))}")
        policy: Policy = ExpertPolicy(config.noise, config.seed)
    else:
        model, chat = open_policy(config.model, config.adapter, config.machine)
        s = config.sampling
        policy = ModelPolicy(model, chat, policy_name(config.adapter or config.model, model), s.temperature,
                             s.top_p, config.seed, s.max_new_tokens, model.config.max_position_embeddings,
                             pages)
    each = dict.fromkeys(tasks, config.instances) if instances is None else instances
    wanted = jobs(each, config.split, config.first, config.group, config.index)
    if config.golden:
        wanted = forced(wanted, config.golden, config.seed)
    title = f"{policy.name} on {config.split}"
    counts = play_to_file(policy, wanted, config.out, pages, title, config.watch)
    print(f"{config.out}: " + ", ".join(f"{count} {name}" for name, count in counts.items() if count))
    return counts
