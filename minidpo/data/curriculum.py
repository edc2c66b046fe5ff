"""Curriculum: which tasks to explore more, by how often each was solved."""

from collections.abc import Mapping


def most_mixed(success: Mapping[str, float], instances: int) -> dict[str, int]:
    """How many instances of each task to explore: `instances` a task on average, most where p is near 1/2.

    success: p, the share of episodes that were solved, by task. Two episodes differ in their outcome with
    probability 2p(1-p), and only such pairs teach. Every task gets a quarter of the average, rounded down, and
    at least 1, so a task that was always or never solved is still explored.

    >>> most_mixed({"never": 0.0, "half": 0.5, "mostly": 0.9, "always": 1.0}, instances=20)
    {'never': 5, 'half': 49, 'mostly': 21, 'always': 5}
    """
    variance = {task: p * (1 - p) for task, p in success.items()}
    least, total = max(1, instances // 4), sum(variance.values())
    if not total:
        return dict.fromkeys(success, instances)
    free = (instances - least) * len(success)
    exact = {task: free * v / total for task, v in variance.items()}
    counts = {task: least + int(share) for task, share in exact.items()}
    # the instances that rounding down left over go to the tasks with the largest remainders
    left_over = instances * len(success) - sum(counts.values())
    for task in sorted(exact, key=lambda task: int(exact[task]) - exact[task])[:left_over]:
        counts[task] += 1
    return counts
