"""Success: episodes in, rates and comparisons out, with what such counts can and cannot say.

A success rate of n episodes is a binomial count: `wilson` gives its interval. Two agents are compared by the
instances on which they differ: `mcnemar_exact` asks whether a fair coin could have split those so unevenly.
Both are of these tasks and these trainings; of other tasks, or another seed of training, they say nothing.
Instances are seeds, and a task may show the same page for many of them: `pages` counts the different ones,
and rates of `new` leave out those that training had.
"""

import math
import platform
import re
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

from minidpo.acting.causes import CAUSES, causes
from minidpo.data.episodes import Episode, by_instance, grouped
from minidpo.data.interval import wilson
from minidpo.system import processes

BANDS = {"1 - 3 to act on": 3, "4 - 7": 7, "8 - 15": 15, "16 and more": math.inf}


def mcnemar_exact(only_a: int, only_b: int) -> float:
    """Two-sided exact p-value that agents A and B are equally good, from the instances on which they differ.

    A alone solved only_a instances, B alone only_b. If neither is better, each of these is a fair coin, so
    p = 2 · P(Binomial(only_a + only_b, 1/2) <= min(only_a, only_b)), at most 1, from exact integers.
    Instances that both or neither solved say nothing. McNemar 1947, Psychometrika 12(2), in its exact form.

    >>> mcnemar_exact(1, 8)  # 2 · (1 + 9) / 2**9
    0.0390625
    """
    if only_a < 0 or only_b < 0:
        raise ValueError(f"counts must be >= 0, got {only_a} and {only_b}")
    n = only_a + only_b
    tail = sum(math.comb(n, k) for k in range(min(only_a, only_b) + 1))
    return min(1.0, 2 * tail / 2**n)


def summary(
    episodes: Sequence[Episode], sampled: Sequence[Episode] = (), trained_on: Collection[tuple] = ()
) -> dict:
    """One agent's rates: {"all": rates, "tasks": {task: rates}, "difficulty": {band: rates}, "causes":
    {cause: failed episodes}, "reward_by_step": mean rewards}, and "sampled" for episodes at temperature 1.

    Those are kept apart because greedy play hides a bad habit while a good one is a little more likely. With
    the first prompts of training, "new" has the rates on all others, None if there are none.
    """
    rates = {
        "all": _rates(episodes),
        "tasks": rates_by_task(episodes),
        "causes": causes(episodes),
        "reward_by_step": reward_by_step(episodes),
    }
    bands = {band: [e for e in episodes if difficulty(e) == band] for band in BANDS}
    rates["difficulty"] = {band: _rates(members) for band, members in bands.items() if members}
    if trained_on:
        new = [e for e in episodes if e.first_prompt not in trained_on]
        rates["new"] = _rates(new) if new else None
    return rates | ({"sampled": _rates(sampled)} if sampled else {})


def reward_by_step(episodes: Sequence[Episode]) -> list[float]:
    """Mean reward had all play stopped after 1, 2, ... turns; what had not ended by then was paid nothing.

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
    """The band of BANDS for how much the first page shows that can be acted on.

    No agent's success is in it, so it says the same of every agent. On all of MiniWoB++ an agent that had
    read five demonstrations a task solved 52, 31, 22 and 9 % in the four bands (docs/log.md).
    """
    count = (
        len(re.findall(r" \[\d+\]$", episode.turns[0].observation, re.M)) if episode.turns else 0
    )
    return next(band for band, most in BANDS.items() if count <= most)


def rates_by_task(episodes: Sequence[Episode]) -> dict[str, dict]:
    """The rates of each task, in the order in which the tasks come."""
    return {task: _rates(played) for task, played in grouped(episodes, lambda e: e.task).items()}


def _rates(episodes: Sequence[Episode]) -> dict:
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

    Best-of-N as ETO measures it: the page's verdict chooses, so this is an oracle's success, not the agent's.
    rewards, of each episode: the first with the highest, and no verdict is read.
    """
    judged = [e.solved for e in episodes] if rewards is None else rewards
    rank = dict(zip(map(id, episodes), judged, strict=True))
    return [
        replace(max(group, key=lambda e: rank[id(e)]), index=0)
        for group in by_instance(episodes).values()
    ]


def compare(before: Sequence[Episode], after: Sequence[Episode]) -> dict:
    """Gain in points and McNemar's p-value on the instances that both played; ValueError if there is none."""
    solved_before, solved_after = (
        {e.key: e.solved for e in episodes} for episodes in (before, after)
    )
    if not (shared := solved_before.keys() & solved_after.keys()):
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
    """`comparison`: the last agent against the first; of three or more also `comparisons`: each against the
    one before it, with their names as `before` and `after`. Empty if there is only one agent."""
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
    """The last agent against the one before it: what the last training brought. {} if there is one."""
    return (result.get("comparisons") or [result.get("comparison", {})])[-1]


def result_metrics(result: dict) -> dict[str, float]:
    """A result as one line of metrics: each agent's rates, the newest comparison, seconds by stage.

    >>> result_metrics({"agents": {"sft": {"all": {"success": 0.5}, "tasks": {}}}, "seconds": {"sft": 9.5}})
    {'sft/success': 0.5, 'seconds/sft': 9.5}
    """
    metrics = {
        f"{name}/{key}": rate
        for name, rates in result["agents"].items()
        for key, rate in rates["all"].items()
    }
    metrics |= {
        f"{name}/success/{band}": row["success"]
        for name, rates in result["agents"].items()
        for band, row in rates.get("difficulty", {}).items()
    }
    metrics |= {
        f"{name}/failed/{cause}": count
        for name, rates in result["agents"].items()
        for cause, count in rates.get("causes", {}).items()
    }
    metrics |= {
        key: x for key, x in newest_comparison(result).items() if key in ("gain_points", "p_value")
    }
    return metrics | {
        f"seconds/{stage}": seconds for stage, seconds in result.get("seconds", {}).items()
    }


def table(result: dict) -> str:
    """The result as text: a row a task, a column an agent, comparisons below; "-" for what is missing."""
    agents = result["agents"]
    names, rates = [name.upper() for name in agents], list(agents.values())
    tasks = list(dict.fromkeys(task for agent in rates for task in agent["tasks"]))
    width = max(map(len, [*tasks, "valid actions %"]))
    lines = [
        " " * width + "".join(f"  {name:>24}" for name in names),
        " " * width + "  success %   95 % interval" * len(names),
    ]
    lines += [
        _rate_row(task, [agent["tasks"].get(task) for agent in rates], width) for task in tasks
    ]
    lines += ["-" * len(lines[1]), _rate_row("all tasks", [agent["all"] for agent in rates], width)]
    for label, key in (("all new pages", "new"), ("all at T = 1", "sampled")):
        if any(agent.get(key) for agent in rates):
            lines.append(_rate_row(label, [agent.get(key) for agent in rates], width))
    below = (
        ("mean reward", "mean_reward", 1, 3),
        ("mean steps", "mean_steps", 1, 1),
        ("valid actions %", "valid_action_rate", 100, 1),
    )
    for label, key, scale, digits in below:
        if all(
            key in agent["all"] for agent in rates
        ):  # results of earlier versions have no mean reward
            lines.append(
                _row(label, [f"{scale * agent['all'][key]:.{digits}f}" for agent in rates], width)
            )
    bands = [agent.get("difficulty", {}) for agent in rates]
    if len(shown := [band for band in BANDS if any(band in agent for agent in bands)]) > 1:
        lines.append("success by the number of elements to act on that the first page shows:")
        lines += [
            _rate_row(f"  {band}", [agent.get(band) for agent in bands], width) for band in shown
        ]
    lines += _step_rows([agent.get("reward_by_step", []) for agent in rates], width)
    lines += _cause_rows([agent.get("causes", {}) for agent in rates], width)
    counts = [
        max(agent["tasks"][task]["n"] for agent in rates if task in agent["tasks"])
        for task in tasks
    ]
    which = "validation" if result.get("split") == "validation" else "held-out"
    lines.append(
        (
            f"{counts[0]} {which} instances a task"
            if len(set(counts)) == 1
            else f"{sum(counts)} {which} instances"
        )
        + _told_pages(rates)
    )
    compared = list(result.get("comparisons", ()))
    if "comparison" in result:
        compared.append({"before": names[0], "after": names[-1], **result["comparison"]})
    for c in compared:
        lines.append(
            f"{c['after'].upper()} - {c['before'].upper()}: {c['gain_points']:+.1f} points on the "
            f"same {c['n']} instances ({c['only_after']} won, {c['only_before']} lost), "
            f"exact McNemar p = {c['p_value']:.2g}"
        )
    if (tries := result.get("best_of", 1)) > 1:
        by = (
            f"the reward model {judge}, without the page's verdict"
            if (judge := result.get("judge"))
            else "the page's verdict: an oracle's success, not the agent's"
        )
        lines.append(
            f"best of {tries} tries at temperature {result['temperature']:g}, chosen by {by}; "
            "steps and valid actions are of that try"
        )
    return "\n".join(lines)


def _told_pages(rates: Sequence[dict]) -> str:
    """How many different pages the instances show, and how many of the instances training did not have."""
    whole = max((agent["all"] for agent in rates), key=lambda row: row["n"])
    new = max(
        (agent["new"]["n"] if agent["new"] else 0 for agent in rates if "new" in agent),
        default=None,
    )
    told = (
        f", pages that differ: {whole['pages']}" if "pages" in whole else ""
    )  # early results lack it
    return (
        told
        if new is None
        else f"{told}; instances with new pages, which training did not have: {new}"
    )


def _step_rows(rewards: Sequence[Sequence[float]], width: int) -> list[str]:
    """A row for 1, 2, 4, ... turns, up to what an agent has played."""
    counts = [2**n for n in range(max(map(len, rewards)).bit_length())]
    rows = [
        _row(
            f"  {n}", [f"{row[min(n, len(row)) - 1]:.3f}" if row else "-" for row in rewards], width
        )
        for n in counts
    ]
    return (
        ["mean reward, had all play stopped after so many turns:", *rows] if len(rows) > 1 else []
    )


def _cause_rows(causes: Sequence[Mapping[str, int]], width: int) -> list[str]:
    """A row for each cause of failure: in how many episodes of each agent."""
    names = sorted({name for counts in causes for name in counts}, key=list(CAUSES).index)
    rows = [_row(f"  {name}", [counts.get(name, 0) for counts in causes], width) for name in names]
    return ["failed episodes, by cause:", *rows] if names else []


def _row(label: str, cells: Sequence[object], width: int) -> str:
    return f"{label:<{width}}{''.join(f'  {cell:>9}'.ljust(27) for cell in cells)}".rstrip()


def _rate_row(label: str, rates: Sequence[dict | None], width: int) -> str:
    shown = [
        "{:>9.1f}   {:>5.1f} - {:>5.1f}".format(
            *(100 * rate[key] for key in ("success", "low", "high"))
        )
        if rate
        else "-"
        for rate in rates
    ]
    return _row(label, shown, width)


def circumstances(*libraries: str) -> dict:
    """When, where and by what a result was made: date, machine, commit, the versions of these libraries."""
    return {
        "date": date.today().isoformat(),
        "machine": machine_name(),
        "commit": commit(),
        "versions": {library: version(library) for library in libraries},
    }


def commit() -> str:
    """The commit of this checkout, with a + if files have changed since; "" where there is no checkout."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return ""
    command = ["git", "describe", "--always", "--dirty=+"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True).stdout.strip()


def made_by(result: dict) -> str:
    """The circumstances of a result as a sentence."""
    code = f"minidpo {result['commit']}" if result.get("commit") else "minidpo"
    return f"Made by {code} on {result['date']}, {result['machine']}."


def machine_name(device: str | None = None) -> str:
    """System, processor as `lscpu` names it, and its cores or the device: a result depends on all of them."""
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(
        r"^model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.is_file() else "", re.M
    )
    processor = names[0] if names else platform.processor() or "unknown processor"
    where = device or f"{processes.cores()} CPU cores"
    return f"{platform.system()} {platform.machine()}, {processor}, {where}"
