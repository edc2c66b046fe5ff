"""A result as text: a row for each task, a column for each agent, comparisons below."""

from collections.abc import Sequence

from minidpo.results.success import BANDS


def table(result: dict) -> str:
    """The result as text, with its `headline` first if it has one; "-" where an agent has no value."""
    agents = result["agents"]
    names, rates = list(agents), list(agents.values())
    tasks = list(dict.fromkeys(task for agent in rates for task in agent["tasks"]))
    causes = [agent.get("causes", {}) for agent in rates]
    every_cause = list(dict.fromkeys(f"  {name}" for counts in causes for name in counts))
    width = max(map(len, [*tasks, *every_cause, "valid actions %"]))

    def row(label: str, cells: Sequence[object]) -> str:
        return f"{label:<{width}}{''.join(f'  {cell:>9}'.ljust(27) for cell in cells)}".rstrip()

    def rate_row(label: str, row_rates: Sequence[dict | None]) -> str:
        return row(label, [_rate(rate) if rate else "-" for rate in row_rates])

    lines = [result["headline"], ""] if result.get("headline") else []
    heading = " " * width + "  success %   95 % interval" * len(names)
    lines += [" " * width + "".join(f"  {name:>24}" for name in names), heading]
    lines += [rate_row(task, [agent["tasks"].get(task) for agent in rates]) for task in tasks]
    lines += ["-" * len(heading), rate_row("all tasks", [agent["all"] for agent in rates])]
    for label, key in (("all new pages", "new"), ("all at T = 1", "sampled")):
        if any(agent.get(key) for agent in rates):
            lines.append(rate_row(label, [agent.get(key) for agent in rates]))
    for label, key, scale, digits in (
        ("mean reward", "mean_reward", 1, 3),
        ("mean steps", "mean_steps", 1, 1),
        ("valid actions %", "valid_action_rate", 100, 1),
    ):
        if all(key in agent["all"] for agent in rates):  # old results have no mean reward
            cells = [f"{scale * agent['all'][key]:.{digits}f}" for agent in rates]
            lines.append(row(label, cells))

    bands = [agent.get("difficulty", {}) for agent in rates]
    shown = [band for band in BANDS if any(band in agent for agent in bands)]
    if len(shown) > 1:
        lines.append("success by number of usable elements on the first page:")
        lines += [rate_row(f"  {band}", [agent.get(band) for agent in bands]) for band in shown]

    rewards = [agent.get("reward_by_step", []) for agent in rates]
    longest = max(map(len, rewards))
    if longest > 1:
        lines.append("mean reward if every episode had stopped after so many turns:")
        for turns in (2**k for k in range(longest.bit_length())):
            lines.append(row(f"  {turns}", [_reward_after(turns, each) for each in rewards]))

    if every_cause:
        lines.append("failed episodes, by cause:")
        for label in every_cause:
            lines.append(row(label, [counts.get(label.strip(), 0) for counts in causes]))

    lines.append(_instances(result, tasks))
    compared = list(result.get("comparisons", ()))
    if "comparison" in result:
        compared.append({"before": names[0], "after": names[-1], **result["comparison"]})
    for one in compared:
        lines.append(
            f"{one['after']} - {one['before']}: {one['gain_points']:+.1f} points on the "
            f"same {one['n']} instances ({one['only_after']} won, {one['only_before']} lost), "
            f"exact McNemar p = {one['p_value']:.2g}"
        )
    if result.get("best_of", 1) > 1:
        lines.append(_chosen_by(result))
    return "\n".join(lines)


def _rate(rate: dict) -> str:
    percent = {key: 100 * rate[key] for key in ("success", "low", "high")}
    return "{success:>9.1f}   {low:>5.1f} - {high:>5.1f}".format(**percent)


def _reward_after(turns: int, rewards: Sequence[float]) -> str:
    """The mean reward after so many turns; the last one if the agent's longest episode was shorter."""
    return f"{rewards[min(turns, len(rewards)) - 1]:.3f}" if rewards else "-"


def _instances(result: dict, tasks: Sequence[str]) -> str:
    """The number of instances, of different pages among them, and of instances whose page was not in training."""
    rates = list(result["agents"].values())
    which = "validation" if result.get("split") == "validation" else "held-out"
    counts = [
        max(agent["tasks"][task]["n"] for agent in rates if task in agent["tasks"])
        for task in tasks
    ]
    if len(set(counts)) == 1:
        text = f"{counts[0]} {which} instances a task"
    else:
        text = f"{sum(counts)} {which} instances"
    whole = max((agent["all"] for agent in rates), key=lambda row: row["n"])
    if "pages" in whole:  # early results lack it
        text += f", different pages: {whole['pages']}"
    new = [agent["new"]["n"] if agent["new"] else 0 for agent in rates if "new" in agent]
    if new:
        text += f"; instances whose page was not in training: {max(new)}"
    return text


def _chosen_by(result: dict) -> str:
    by = "the world's verdict: an oracle's success, not the agent's"
    if result.get("judge"):
        by = f"the reward model {result['judge']}, not by the world's verdict"
    return (
        f"best of {result['best_of']} tries at temperature {result['temperature']:g}, chosen by "
        f"{by}; steps and valid actions are those of the chosen try"
    )
