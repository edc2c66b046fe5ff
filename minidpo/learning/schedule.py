"""41. Rounds: explore and train, again and again: which round to keep, when to stop, where to look next.

Pure functions of what was played, and what becomes of files of other rounds and loops; `minidpo/loop.py` plays and
trains. One round is EF-DPO, several are ETO (Song et al. 2024, arXiv:2403.02502, Algorithm 1), which found
that later ones may hurt: so each is measured on validation seeds, and the best is kept. Next: 42 exchange.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from minidpo.config import LoopCommand
from minidpo.data.episodes import Episode
from minidpo.data.pairs import by_instance
from minidpo.memory import lora
from minidpo.system.files import replacing
from minidpo.system.run_folder import changed_settings, read_settings


def mean(success: dict[str, float]) -> float:
    """Over tasks; rounded, so that the order of a sum does not decide which of two equals is the better."""
    return round(sum(success.values()) / len(success), 9)


def best_round(success: Sequence[float]) -> int:
    """Which round to keep: the first of the best.

    >>> best_round([0.7, 0.9, 0.8, 0.9])
    1
    """
    return max(range(len(success)), key=lambda k: (success[k], -k))


def enough(success: Sequence[float], patience: int) -> bool:
    """Whether the last `patience` rounds brought nothing better than what was there before them.

    success: of the first policy, then of each round.

    >>> enough([0.5, 0.7, 0.7], patience=2), enough([0.5, 0.7, 0.7, 0.6], patience=2)
    (False, True)
    """
    return len(success) - 1 - best_round(success) >= patience


def entered(success: dict[str, float], threshold: float) -> list[str]:
    """The tasks of a curriculum: easiest first, one more while the mean of those before passes the threshold.

    The first is always in. Returned in the order of `success`.

    >>> entered({"hard": 0.1, "easy": 0.9, "medium": 0.6}, threshold=0.8)
    ['easy', 'medium']
    """
    total, inside = 0.0, set()
    for n, task in enumerate(sorted(success, key=lambda task: -success[task])):
        if n and round(total / n, 9) < threshold:  # three times 0.7 is 0.7, whatever its sum is in binary
            break
        inside.add(task)
        total += success[task]
    return [task for task in success if task in inside]


def focused(mixed: dict[str, float], instances: int) -> dict[str, int]:
    """How many instances of each task to explore, `instances` a task on the average.

    mixed: of each task the mean of p(1-p) over its groups, p a group's success rate: a share 2p(1-p) of all
    couples differ in outcome, and only they teach. A task's part grows with that, and no task gets less than
    a quarter of the average, so that one that was solved every time, or never, is still seen.

    >>> focused({"never": 0.0, "half": 0.25, "mostly": 0.09, "always": 0.0}, instances=20)
    {'never': 5, 'half': 49, 'mostly': 21, 'always': 5}
    """
    least, total = max(1, instances // 4), sum(mixed.values())
    if not total:
        return dict.fromkeys(mixed, instances)
    free = (instances - least) * len(mixed)
    exact = {task: free * v / total for task, v in mixed.items()}
    counts = {task: least + int(share) for task, share in exact.items()}
    # what rounding left over goes to the largest remainders
    over = instances * len(mixed) - sum(counts.values())
    for task in sorted(exact, key=lambda task: int(exact[task]) - exact[task])[:over]:
        counts[task] += 1
    return counts


def mixed(episodes: Sequence[Episode]) -> dict[str, float]:
    """How mixed each task's groups were: the mean over its instances of p(1-p), p their success rate."""
    found: dict[str, list[float]] = {}
    for (task, _), group in by_instance(episodes).items():
        p = sum(episode.solved for episode in group) / len(group)
        found.setdefault(task, []).append(p * (1 - p))
    return {task: sum(values) / len(values) for task, values in found.items()}


def source_of(config: LoopCommand) -> str:
    """Where the pairs come from; imitation reads all that the agent played by itself."""
    return config.dpo.pairs if config.learn == "dpo" else "outcome"


def shares(config: LoopCommand) -> tuple[int, int]:
    """How many of a group's episodes the agent plays by itself, and how many from a golden step on."""
    half = config.group // 2
    return {"stepwise": (0, config.group), "mixture": (config.group - half, half)}.get(
        source_of(config), (config.group, 0))


def done(path: Path) -> Path:
    """The note that a file of episodes is complete."""
    return path.with_suffix(".done")


def forget_others(path: Path, adapter: Path) -> None:
    """Remove a file of held-out episodes if the agent of another round played it: more rounds, or fewer, were
    asked for since, and another one is kept.

    The episodes name their player, and they go last: killed in between, the next start removes the rest.
    """
    if not path.is_file():
        return
    with open(path, "rb") as file:
        line = file.readline()
    if not line.endswith(b"\n"):
        return  # nobody has played a whole episode
    try:
        player = Path(Episode.from_json(line).policy.rpartition("@")[0])
    except ValueError as error:
        raise ValueError(f"{path}, line 1: {error}") from None
    if player.parts[-3:] != adapter.parts[-3:]:  # round-1/dpo/adapter: the folder above may have been renamed
        for old in (done(path), path.with_suffix(".metrics.jsonl"), path):
            old.unlink(missing_ok=True)


def keep(adapter: Path, folder: Path) -> None:
    """Put the adapter of the round that is kept where `train.py sft` and `dpo` leave theirs."""
    for name in lora.FILES:
        with replacing(folder / name) as written:
            shutil.copyfile(adapter / name, written)


def figures(result: dict, learned: str) -> dict[str, float]:
    """What one quotes of a loop, as flat as the results of a benchmark: `won` and `lost` are instances."""
    both = result["comparison"]
    rates = {f"{agent}_{name}": result["agents"][agent][part]["success"] for agent in ("sft", learned)
             for name, part in (("success", "all"), ("sampled_success", "sampled"))}
    return rates | {"gain_points": both["gain_points"], "won": both["only_after"],
                    "lost": both["only_before"], "p_value": both["p_value"],
                    "seconds": round(sum(result["seconds"].values()), 1)}


def began_alike(config: LoopCommand) -> set[str]:
    """The files of the loop in `config.start` that would be made just so here, and are complete.

    Raises ValueError if not even its first policy is the one that is asked for.
    """
    if config.start is None:
        return set()
    theirs, ours = (json.loads(json.dumps(settings, default=str))
                    for settings in (read_settings(config.start), asdict(config)))
    if not {"sampling", "rounds"} <= theirs.keys():
        raise ValueError(f"{config.start} holds a run that is no loop: start names the folder of one")
    for settings in (theirs, ours):
        settings["machine"] = {name: settings["machine"][name] for name in ("device", "dtype", "quantize")}
        settings["tokens"] = settings["sampling"]["max_new_tokens"]
    explored = ("instances", "group", "sampling")
    first = ("model", "tasks", "seed", "demonstrations", "sft", "lora", "machine")
    first += () if config.demonstrations else explored
    if changed := changed_settings(*({name: its.get(name) for name in first} for its in (theirs, ours))):
        raise ValueError(f"{config.start} began with other settings ({changed}): give the same, or leave out "
                         "start")
    if not (config.start / "sft" / "done").is_file():
        raise ValueError(f"{config.start} has no finished SFT of its own: let it go on first, or name the "
                         "loop that it started from")
    names = {"round-1/rollouts.jsonl": explored, "validation/round-0.jsonl": ("validation", "tokens"),
             "evaluation/sft.jsonl": ("episodes", "tokens"),
             "evaluation/sampled/sft.jsonl": ("sampled", "tokens")}
    same = {path for path, of in names.items() if all(theirs[name] == ours[name] for name in of)}
    whole = theirs["curriculum"] is None is config.curriculum and shares(config)[0] == config.group
    if not whole or (theirs["learn"] == "dpo" and theirs["dpo"]["pairs"] in ("stepwise", "mixture")):
        same.discard("round-1/rollouts.jsonl")
    return {"sft", "demos.jsonl", "selfplay.jsonl"} | {
        path for path in same if done(config.start / path).is_file()}
