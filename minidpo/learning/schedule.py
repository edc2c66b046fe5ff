"""The choices of a loop: what a round explores, which round is best, when to stop, what another loop lends.

The choices are pure functions of success rates and episodes. The functions on files decide which of the files
on the disk belong to this loop. `minidpo/loop.py` plays and trains. A round can be worse than the one before
(Song et al. 2024, ETO, arXiv:2403.02502), so a loop measures each on validation seeds.
"""

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from minidpo.config import LoopCommand
from minidpo.data.episodes import Episode, by_instance, parse_lines, rank_files
from minidpo.memory import lora
from minidpo.model import scalar_head
from minidpo.system.files import as_json, replacing
from minidpo.system.run_folder import changed_settings, read_settings


def mean_success(success: dict[str, float]) -> float:
    """The mean over tasks, rounded, so that the order of a sum cannot decide between two equal rounds, and
    0.7 + 0.7 + 0.7, which is less than 3 * 0.7 in binary, reaches 0.7."""
    return round(sum(success.values()) / len(success), 9)


def best_round(validation: Sequence[float]) -> int:
    """The index of the highest success; of equal ones the first.

    >>> best_round([0.7, 0.9, 0.8, 0.9])
    1
    """
    return validation.index(max(validation))


def should_stop(validation: Sequence[float], patience: int) -> bool:
    """Whether none of the last `patience` rounds was better than everything before them.

    validation: success of the first policy, then of each round.

    >>> should_stop([0.5, 0.7, 0.7], patience=2), should_stop([0.5, 0.7, 0.7, 0.6], patience=2)
    (False, True)
    """
    return len(validation) - 1 - best_round(validation) >= patience


def unlocked_tasks(success: dict[str, float], threshold: float) -> list[str]:
    """The tasks of a curriculum: easiest first, one more while the mean so far reaches the threshold.

    >>> unlocked_tasks({"hard": 0.1, "easy": 0.9, "medium": 0.6}, threshold=0.8)
    ['easy', 'medium']
    """
    easiest, n = sorted(success, key=lambda task: -success[task]), 1
    while (
        n < len(easiest)
        and mean_success({task: success[task] for task in easiest[:n]}) >= threshold
    ):
        n += 1
    return [task for task in success if task in easiest[:n]]


def outcome_variance(episodes: Sequence[Episode]) -> dict[str, float]:
    """For each task the mean of p(1-p), p the success rate of a group, over groups of two and more."""
    variances: dict[str, list[float]] = {}
    for (task, _), group in by_instance(episodes).items():
        p = sum(episode.solved for episode in group) / len(group)
        if len(group) > 1:
            variances.setdefault(task, []).append(p * (1 - p))
    return {task: sum(values) / len(values) for task, values in variances.items()}


def focused_instances(variance: dict[str, float], instances: int) -> dict[str, int]:
    """How many instances of each task to explore, `instances` a task on the average.

    variance: `outcome_variance`. Two episodes of a group differ in outcome with probability 2p(1-p), and only
    such couples teach, so a task's share grows with its variance. Every task gets a quarter of the
    average, rounded down, and at least 1, so a task that was always or never solved is still explored.

    >>> focused_instances({"never": 0.0, "half": 0.25, "mostly": 0.09, "always": 0.0}, instances=20)
    {'never': 5, 'half': 49, 'mostly': 21, 'always': 5}
    """
    least, total = max(1, instances // 4), sum(variance.values())
    if not total:
        return dict.fromkeys(variance, instances)
    free = (instances - least) * len(variance)
    exact = {task: free * v / total for task, v in variance.items()}
    counts = {task: least + int(share) for task, share in exact.items()}
    # the instances that rounding down left over go to the tasks with the largest remainders
    left_over = instances * len(variance) - sum(counts.values())
    for task in sorted(exact, key=lambda task: int(exact[task]) - exact[task])[:left_over]:
        counts[task] += 1
    return counts


def round_instances(
    config: LoopCommand, tasks: Sequence[str], success: dict[str, float], variance: dict[str, float]
) -> dict[str, int] | None:
    """How many instances of each task the next round explores; None: config.instances of every task. success:
    by task, on validation seeds; variance: `outcome_variance` so far. Of a task without one, as all are
    before the first round, focus looks at the success."""
    explored = tasks if config.curriculum is None else unlocked_tasks(success, config.curriculum)
    if config.focus:
        variance = {task: p * (1 - p) for task, p in success.items()} | variance
        return focused_instances(
            {task: variance.get(task, 0.25) for task in explored}, config.instances
        )
    return dict.fromkeys(explored, config.instances) if len(explored) < len(tasks) else None


def deal(tasks: Sequence[str], total: int) -> dict[str, int]:
    """So many demonstrations of all tasks together, dealt out in turn.

    >>> deal(["a", "b"], 5), deal(["a", "b"], 1)
    ({'a': 3, 'b': 2}, {'a': 1})
    """
    return {task: len(range(n, total, len(tasks))) for n, task in enumerate(tasks[:total])}


def split_group(config: LoopCommand) -> tuple[int, int]:
    """How many episodes of a group the agent plays from the start, and how many from a golden step on."""
    shares = {"stepwise": config.group, "segments": config.group, "mixture": config.group // 2}
    stepwise = shares.get(config.dpo.pairs, 0)
    return config.group - stepwise, stepwise


def done_marker(path: Path) -> Path:
    """The file that marks a file of episodes as complete."""
    return path.with_suffix(".done")


def remove_if_of_another_round(path: Path, adapter: Path) -> None:
    """Remove a file of held-out episodes unless this adapter played it: with more rounds another may be best.
    The episodes name their adapter and are removed last, so after a kill the next start removes the rest."""
    for played in (*rank_files(path), path):
        if not played.is_file():
            continue
        with open(played, "rb") as file:
            line = next(filter(bytes.strip, file), b"")
        if not line.endswith(b"\n"):
            continue  # no complete episode yet
        player = Path(next(parse_lines(played, [line])).policy.rpartition("@")[0])
        if (
            player.parts[-3:] != adapter.parts[-3:]
        ):  # round-1/dpo/adapter: the loop may have been renamed
            for stale in (done_marker(path), path.with_suffix(".metrics.jsonl"), played):
                stale.unlink(missing_ok=True)


def copy_adapter(adapter: Path, folder: Path) -> None:
    """Copy the best round's adapter, and its head if it has one, to where trainings leave theirs. A folder
    without a configuration is no adapter, so a kill leaves none that is half of another round."""
    (folder / lora.CONFIG).unlink(missing_ok=True)
    for name in (
        *(path.name for path in adapter.glob(scalar_head.FILE)),
        lora.WEIGHTS,
        lora.CONFIG,
    ):
        with replacing(folder / name) as written:
            shutil.copyfile(adapter / name, written)


def reusable_files(config: LoopCommand) -> set[str]:
    """The complete files of the loop in `config.start` that this loop would make in the same way. Raises
    ValueError if that loop has no finished first policy, or made it with other settings."""
    if config.start is None:
        return set()
    begun, asked = read_settings(config.start), as_json(asdict(config))
    if not {"sampling", "rounds"} <= begun.keys():
        raise ValueError(
            f"{config.start} holds a run that is no loop: start names the folder of one"
        )
    # an older loop's has no newer options
    begun = {
        name: default | begun.get(name, {})
        if isinstance(default, dict)
        else begun.get(name, default)
        for name, default in as_json(asdict(LoopCommand())).items()
    }
    for settings in (begun, asked):
        settings["tokens"] = settings["sampling"]["max_new_tokens"]
    exploring = ("instances", "group", "sampling")
    decisive = (
        "model",
        "tasks",
        "seed",
        "demonstrations",
        "demonstrations_in_total",
        "shots",
        "sft",
        "lora",
        "machine",
    )
    decisive += (
        () if config.demonstrations else exploring
    )  # self-play explores for its demonstrations
    of_start, of_loop = ({name: run[name] for name in decisive} for run in (begun, asked))
    if changed := changed_settings(of_start, of_loop):
        raise ValueError(
            f"{config.start} began with other settings ({changed}): give the same, or leave out "
            "start"
        )
    if begun["adapter"]:
        raise ValueError(
            f"{config.start} began from {begun['adapter']}: give --adapter in place of start"
        )
    if not (config.start / "sft" / "done").is_file():
        raise ValueError(
            f"{config.start} has no finished SFT of its own: let it go on first, or name the "
            "loop that it started from"
        )
    depends_on = {
        "round-1/rollouts.jsonl": exploring,
        "validation/round-0.jsonl": ("validation", "tokens"),
        "evaluation/sft.jsonl": ("episodes", "tokens"),
        "evaluation/sampled/sft.jsonl": ("sampled", "tokens"),
    }
    same = {
        path
        for path, names in depends_on.items()
        if all(begun[name] == asked[name] for name in names)
    }
    forced = split_group(config)[1] or (
        begun["learn"] == "dpo" and begun["dpo"]["pairs"] in ("stepwise", "segments", "mixture")
    )
    chosen = any(
        run[name] not in (None, False) for run in (begun, asked) for name in ("curriculum", "focus")
    )
    if forced or chosen or len({run["explore"] == "demonstrations" for run in (begun, asked)}) > 1:
        same.discard("round-1/rollouts.jsonl")
    return {"sft", "examples.jsonl", "demos.jsonl", "selfplay.jsonl"} | {
        path
        for path in same
        if done_marker(config.start / path).is_file()
        and not done_marker(config.out / path).is_file()
    }  # what this loop made stays its own
