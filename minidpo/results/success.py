"""26. Results: episodes in, the numbers that a person asks for out.

Per task and in all: success rate with Wilson's interval, mean steps, share of answers that held a usable
action; for two agents on the same instances the gain in points and McNemar's exact p-value. Next: 27
report.
"""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

from minidpo.data.episodes import Episode
from minidpo.data.pairs import by_instance
from minidpo.results.stats import mcnemar_exact, wilson
from minidpo.system.files import check_version, read_json, write_json

VERSION = 1  # of result.json


def read_result(path: Path) -> dict:
    """A result.json. Raises ValueError if it is of another version."""
    return check_version(read_json(path), VERSION, f"{path}: a result")


def write_result(path: Path, result: Mapping) -> None:
    write_json(path, {"version": VERSION, **result})


def machine_name(device: str | None = None) -> str:
    """System, processor as `lscpu` names it, and its cores, or the device: numbers depend on all of them."""
    cpuinfo = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in
             (cpuinfo.read_text().splitlines() if cpuinfo.is_file() else ()) if line.startswith("model name")]
    processor = names[0] if names else platform.processor() or "unknown processor"
    return f"{platform.system()} {platform.machine()}, {processor}, {device or f'{os.cpu_count()} CPU cores'}"


def circumstances(*libraries: str) -> dict:
    """When and on what a result was made: date, machine and the versions of these libraries."""
    return {"date": date.today().isoformat(), "machine": machine_name(),
            "versions": {library: version(library) for library in libraries}}


def _rates(episodes: Sequence[Episode]) -> dict:
    solved, n = sum(e.solved for e in episodes), len(episodes)
    low, high = wilson(solved, n)
    turns = [turn for episode in episodes for turn in episode.turns]
    return {"success": solved / n, "low": low, "high": high, "n": n, "mean_steps": len(turns) / n,
            "valid_action_rate": sum(turn.error is None for turn in turns) / max(1, len(turns))}


def summary(episodes: Sequence[Episode], sampled: Sequence[Episode] = ()) -> dict:
    """{"all": rates, "tasks": {task: rates}} of one agent; the tasks in the order they were played.

    `sampled`: episodes of the same agent at temperature 1, kept apart as "sampled": greedy play hides a bad
    habit as long as a good one is a little stronger.
    """
    tasks = list(dict.fromkeys(e.task for e in episodes))
    rates = {"all": _rates(episodes),
             "tasks": {task: _rates([e for e in episodes if e.task == task]) for task in tasks}}
    return rates | ({"sampled": _rates(sampled)} if sampled else {})


def best_of(episodes: Sequence[Episode]) -> list[Episode]:
    """Of each instance one episode, numbered 0: the first that was solved, else the first.

    Best-of-N as ETO measures it: the page's own verdict chooses, so it is what an oracle would get out of N
    tries, not what an agent could do alone.
    """
    return [replace(next((e for e in group if e.solved), group[0]), index=0)
            for group in by_instance(episodes).values()]


def compare(before: Sequence[Episode], after: Sequence[Episode]) -> dict:
    """Gain in points and the paired p-value, on the instances that both have played."""
    first, second = ({e.key: e.solved for e in episodes} for episodes in (before, after))
    both = first.keys() & second.keys()
    if not both:
        raise ValueError("the two have no task instance in common, so they cannot be compared")
    lost = sum(first[k] and not second[k] for k in both)
    won = sum(second[k] and not first[k] for k in both)
    return {"gain_points": 100 * (won - lost) / len(both), "p_value": mcnemar_exact(lost, won),
            "n": len(both), "only_before": lost, "only_after": won}


def comparisons(episodes: Mapping[str, Sequence[Episode]]) -> dict:
    """What a result says of agents side by side; of one alone nothing.

    "comparison": the last against the first; of three or more also "comparisons": each against the one
    before it, with their names as `before` and `after`.
    """
    names = list(episodes)
    if len(names) < 2:
        return {}
    result: dict = {"comparison": compare(episodes[names[0]], episodes[names[-1]])}
    if len(names) > 2:
        result["comparisons"] = [{"before": one, "after": other, **compare(episodes[one], episodes[other])}
                                 for one, other in pairwise(names)]
    return result


def newest(result: dict) -> dict:
    """The last agent against the one before it: what the last training brought. Empty if there is one agent.

    >>> newest({"comparison": {"n": 1}}), newest({"comparison": {}, "comparisons": [{"n": 2}, {"n": 3}]})
    ({'n': 1}, {'n': 3})
    """
    return (result.get("comparisons") or [result.get("comparison", {})])[-1]


def totals(result: dict) -> dict[str, float]:
    """A result in a line of numbers: each agent's rates over all tasks, `newest`, seconds by stage.

    >>> totals({"sft": {"all": {"success": 0.5}, "tasks": {}}, "seed": 1, "seconds": {"sft": 9.5}})
    {'sft/success': 0.5, 'seconds/sft': 9.5}
    """
    agents = {name: found for name, found in result.items() if isinstance(found, dict) and "tasks" in found}
    rates = {f"{name}/{key}": value for name, found in agents.items() for key, value in found["all"].items()}
    compared = {name: newest(result)[name] for name in ("gain_points", "p_value") if len(agents) > 1}
    return rates | compared | {f"seconds/{stage}": s for stage, s in result.get("seconds", {}).items()}


def table(result: dict, names: Sequence[str]) -> str:
    """The result as text: a row a task, a column an agent, the total below; "-" for what was not played."""
    tasks = list(dict.fromkeys(task for name in names for task in result[name]["tasks"]))
    width = max(map(len, [*tasks, "valid actions %"]))
    lines = [" " * width + "".join(f"  {name.upper():>24}" for name in names),
             " " * width + "  success %   95 % interval" * len(names)]
    rows = {task: [result[name]["tasks"].get(task) for name in names] for task in tasks}
    totals = [result[name]["all"] for name in names]
    sampled = [result[name]["sampled"] for name in names if "sampled" in result[name]]
    below = [("all tasks", totals), *([("all at T = 1", sampled)] if sampled else [])]
    for label, cells in (*rows.items(), *below):
        if cells is totals:
            lines.append("-" * len(lines[1]))
        rates = ([100 * c[key] for key in ("success", "low", "high")] if c else None for c in cells)
        line = "".join(f"  {r[0]:>9.1f}   {r[1]:>5.1f} - {r[2]:>5.1f}" if r else f"  {'-':>9}{'':16}"
                       for r in rates)
        lines.append(f"{label:<{width}}{line}".rstrip())
    for label, key, scale in (("mean steps", "mean_steps", 1), ("valid actions %", "valid_action_rate", 100)):
        line = f"{label:<{width}}" + "".join(f"  {scale * c[key]:>9.1f}{'':16}" for c in totals)
        lines.append(line.rstrip())
    n = [max(cell["n"] for cell in cells if cell) for cells in rows.values()]
    lines.append(f"{n[0]} held-out instances a task" if len(set(n)) == 1 else f"{sum(n)} held-out instances")
    compared = list(result.get("comparisons", ()))
    if "comparison" in result:
        compared.append({"before": names[0], "after": names[-1], **result["comparison"]})
    for c in compared:
        lines.append(f"{c['after'].upper()} - {c['before'].upper()}: {c['gain_points']:+.1f} points on the "
                     f"same {c['n']} instances ({c['only_after']} won, {c['only_before']} lost), "
                     f"exact McNemar p = {c['p_value']:.2g}")
    if (tries := result.get("best_of", 1)) > 1:
        lines.append(f"of {tries} tries at temperature {result['temperature']:g} the one that the page "
                     "judged best: an oracle's success, not the agent's own; steps and valid actions are of "
                     "that try")
    return "\n".join(lines)
