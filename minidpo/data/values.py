"""Step values: how often an agent that continues from a step solves the page, by the pages' verdicts alone.

A state is an instance and all answers so far: the same answers lead to the same page. A continuation is an
episode whose first steps were given (`Episode.forced`) and lead to the state. An episode without given steps
is a continuation from the first page.
"""

from collections.abc import Sequence

from minidpo.data.episodes import Episode, by_instance


def states(group: Sequence[Episode]) -> list[tuple[str, ...]]:
    """The states in which the episodes of an instance made their own choice, each once, as the answers so far."""
    return list(dict.fromkeys(e.said[:t] for e in group for t in range(e.forced, len(e.turns))))


def values_of(
    episodes: Sequence[Episode], continuations: Sequence[Episode]
) -> list[list[float | None]]:
    """The `step_values` of each episode, from the continuations of all of them, in any order."""
    of_instance = by_instance(continuations)
    return [step_values(e, of_instance.get(e.instance, [])) for e in episodes]


def step_values(episode: Episode, continuations: Sequence[Episode]) -> list[float | None]:
    """V of the state before each turn, and of the end: the share of the state's continuations that solved.

    Returns turns + 1 numbers within [0, 1]. The last is the episode's own verdict. A state without continuations
    has None. The mean over continuations is unbiased, because each is a sample from its state. If the episode
    itself is one of them, its verdict counts in V_0. Xiong et al. 2024 (IPR), arXiv:2406.11176, section 3.2.
    Differs from the paper: the verdict, 1 or 0, in place of the reward; no expert goes on.

    >>> from minidpo.data.episodes import Turn
    >>> said = lambda words, outcome, forced: Episode(
    ...     "t", 1, 0, "", tuple(Turn("", word, None) for word in words), outcome, 0.0, "", forced=forced)
    >>> step_values(said("ab", "failed", 0), [said("ac", "solved", 0), said("ac", "solved", 1),
    ...                                       said("ab", "failed", 1)])
    [1.0, 0.5, 0.0]
    """
    values: list[float | None] = []
    for t in range(len(episode.turns)):
        verdicts = [
            e.solved
            for e in continuations
            if e.instance == episode.instance and e.forced == t and e.said[:t] == episode.said[:t]
        ]
        values.append(sum(verdicts) / len(verdicts) if verdicts else None)
    return [*values, float(episode.solved)]
