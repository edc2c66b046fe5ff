"""Success: episodes in, rates and comparisons out.

The successes among n episodes are a binomial count, and `wilson` gives the interval of their rate. Two agents are
compared on the instances on which they differ: `mcnemar_exact` asks whether a fair coin could have split those so
unevenly. Both numbers are about these tasks and these trainings; they say nothing about other tasks or training seeds.
A task may show the same page for many seeds, so `pages` counts different pages, and the rates `new` leave out pages
that appeared in training.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from minidpo.data.episodes import Episode, by_instance, grouped
from minidpo.data.interval import wilson

# The most usable elements on the first page, for each band.
BANDS = {"1 - 3 to act on": 3, "4 - 7": 7, "8 - 15": 15, "16 and more": math.inf}


def mcnemar_exact(only_a: int, only_b: int) -> float:
    """Two-sided exact p-value that agents A and B are equally good, from the instances on which they differ.

    A alone solved only_a instances, B alone only_b. If neither is better, each of these is a fair coin, so
    p = 2 · P(Binomial(only_a + only_b, 1/2) <= min(only_a, only_b)), at most 1, from exact integers.
    Instances that both or neither solved do not count. McNemar 1947, Psychometrika 12(2), in its exact form.

    >>> mcnemar_exact(1, 8)  # 2 · (1 + 9) / 2**9
    0.0390625
    """
    n = only_a + only_b
    tail = sum(math.comb(n, k) for k in range(min(only_a, only_b) + 1))
    return min(1.0, 2 * tail / 2**n)


def summary(
    episodes: Sequence[Episode],
    sampled: Sequence[Episode] = (),
    trained_on: Collection[tuple[str, str]] = (),
    cause: Callable[[Episode], str] | None = None,
) -> dict:
    """One agent's rates: {"all": rates, "tasks": {task: rates}, "difficulty": {band: rates},
    "reward_by_step": mean rewards, "causes": {cause: failed episodes}}.

    sampled: episodes at temperature 1. Their rates are kept apart as "sampled", because greedy play hides a bad habit
    as long as a good one is a little more likely. trained_on: the first prompts of training. "new" then holds the
    rates on all other prompts, None if there are none. cause: returns why an episode failed.
    """
    by_task = grouped(episodes, lambda e: e.task)
    rates = {
        "all": rates_of(episodes),
        "tasks": {task: rates_of(some) for task, some in by_task.items()},
        "reward_by_step": reward_by_step(episodes),
    }
    bands = {band: [e for e in episodes if difficulty(e) == band] for band in BANDS}
    rates["difficulty"] = {band: rates_of(members) for band, members in bands.items() if members}
    if cause is not None:
        failures = Counter(cause(episode) for episode in episodes if not episode.solved)
        rates["causes"] = dict(failures.most_common())
    if trained_on:
        new = [e for e in episodes if e.first_prompt not in trained_on]
        rates["new"] = rates_of(new) if new else None
    if sampled:
        rates["sampled"] = rates_of(sampled)
    return rates


def reward_by_step(episodes: Sequence[Episode]) -> list[float]:
    """Mean reward if play had stopped after 1, 2, ... turns; episodes that are longer count as 0.

    >>> from minidpo.data.episodes import Turn
    >>> played = lambda turns, paid: Episode("t", 1, 0, "", (Turn("", "", None),) * turns, "solved", paid, "")
    >>> reward_by_step([played(1, 1.0), played(3, 0.5)])
    [0.5, 0.5, 0.75]
    """
    longest = max((len(e.turns) for e in episodes), default=0)
    return [
        sum(e.reward for e in episodes if len(e.turns) <= n) / len(episodes)
        for n in range(1, longest + 1)
    ]


def difficulty(episode: Episode) -> str:
    """The band of BANDS for the number of usable elements on the first page.

    It is the same for every agent. An agent that had read five demonstrations a task solved 52, 31, 22 and
    9 % of all of MiniWoB++ in the four bands (docs/log.md, "All of MiniWoB++").
    """
    page = episode.turns[0].observation if episode.turns else ""
    count = len(re.findall(r" \[\d+\]$", page, re.MULTILINE))
    return next(band for band, most in BANDS.items() if count <= most)


def rates_of(episodes: Sequence[Episode]) -> dict:
    """Success with its interval, and mean values, over some episodes."""
    solved, n = sum(e.solved for e in episodes), len(episodes)
    low, high = wilson(solved, n)
    turns = [turn for episode in episodes for turn in episode.turns]
    return {
        "success": solved / n,
        "low": low,
        "high": high,
        "n": n,
        "pages": len({e.first_prompt for e in episodes}),
        "mean_steps": len(turns) / n,
        "mean_reward": sum(e.reward for e in episodes) / n,
        "valid_action_rate": sum(turn.error is None for turn in turns) / max(1, len(turns)),
    }


def best_of(episodes: Sequence[Episode], rewards: Sequence[float] | None = None) -> list[Episode]:
    """One episode of each instance, renumbered 0: the first that was solved, else the first.

    This is Best-of-N as in ETO. The world's verdict chooses, so it is an oracle's success, not the agent's alone.
    rewards: one for each episode; the first with the highest reward is taken instead.
    """
    judged = [e.solved for e in episodes] if rewards is None else rewards
    rank = {id(episode): value for episode, value in zip(episodes, judged, strict=True)}
    return [
        replace(max(group, key=lambda e: rank[id(e)]), index=0)
        for group in by_instance(episodes).values()
    ]


def compare(before: Sequence[Episode], after: Sequence[Episode]) -> dict:
    """Gain in points and McNemar's p-value on the instances that both played. Raises ValueError without any."""
    solved_before = {e.key: e.solved for e in before}
    solved_after = {e.key: e.solved for e in after}
    shared = solved_before.keys() & solved_after.keys()
    if not shared:
        raise ValueError(
            "the two agents have no task instance in common, so they cannot be compared"
        )
    lost = sum(solved_before[key] and not solved_after[key] for key in shared)
    won = sum(solved_after[key] and not solved_before[key] for key in shared)
    return {
        "gain_points": 100 * (won - lost) / len(shared),
        "p_value": mcnemar_exact(lost, won),
        "n": len(shared),
        "only_before": lost,
        "only_after": won,
    }


def comparisons(episodes: Mapping[str, Sequence[Episode]]) -> dict:
    """`comparison` compares the last agent with the first. With three agents or more, `comparisons` compares each with
    the one before it, named `before` and `after`. Empty if there is only one agent."""
    names, fields = list(episodes), {}
    if len(names) > 1:
        fields["comparison"] = compare(episodes[names[0]], episodes[names[-1]])
    if len(names) > 2:
        fields["comparisons"] = [
            {"before": before, "after": after, **compare(episodes[before], episodes[after])}
            for before, after in pairwise(names)
        ]
    return fields


def newest_comparison(result: dict) -> dict:
    """The last agent compared with the one before it: the gain of the last training. {} if there is one agent."""
    return (result.get("comparisons") or [result.get("comparison", {})])[-1]


def result_metrics(result: dict) -> dict[str, float]:
    """A result as one line of metrics: each agent's rates, the newest comparison, seconds by stage.

    >>> result_metrics({"agents": {"sft": {"all": {"success": 0.5}, "tasks": {}}}, "seconds": {"sft": 9.5}})
    {'sft/success': 0.5, 'seconds/sft': 9.5}
    """
    metrics = {}
    for name, rates in result["agents"].items():
        metrics |= {f"{name}/{key}": rate for key, rate in rates["all"].items()}
        for band, row in rates.get("difficulty", {}).items():
            metrics[f"{name}/success/{band}"] = row["success"]
        for cause, count in rates.get("causes", {}).items():
            metrics[f"{name}/failed/{cause}"] = count
    comparison = newest_comparison(result)
    metrics |= {key: comparison[key] for key in ("gain_points", "p_value") if key in comparison}
    for stage, seconds in result.get("seconds", {}).items():
        metrics[f"seconds/{stage}"] = seconds
    return metrics
