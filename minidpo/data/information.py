"""How unlike answers are, and whether they depend on the task: mutual information, counted on episodes.

An agent whose answers are as varied as ever may no longer look at the page: its entropy stays high, while
this falls to 0 ("template collapse", RAGEN-2, Wang et al. 2026, arXiv:2604.06268).
"""

import math
from collections import Counter
from collections.abc import Sequence

from minidpo.data.episodes import Episode, grouped


def diversity(episodes: Sequence[Episode]) -> dict[str, float]:
    """How unlike the attempts at one instance from one state on are, where there are several; else empty.

    `diversity`: how often two of them have other answers (1 - Simpson's index, 1949). `mixed`: the share that
    were both solved and failed. Only these teach.

    >>> diversity([])
    {}
    """
    attempts = grouped(episodes, lambda e: (e.instance, e.said[: e.forced]))
    groups = [group for group in attempts.values() if len(group) > 1]
    if not groups:
        return {}
    unlike = [
        1
        - sum(n * (n - 1) for n in Counter(e.said for e in group).values())
        / (len(group) * (len(group) - 1))
        for group in groups
    ]
    mixed = [len({e.solved for e in group}) == 2 for group in groups]
    return {"diversity": sum(unlike) / len(groups), "mixed": sum(mixed) / len(groups)}


def answer_information(episodes: Sequence[Episode]) -> float | None:
    """Mutual information of first prompt X and first answer Y in nats, of order 2: H₂(Y) - H₂(Y|X).

    That is log(P(two answers to one prompt agree) / P(answers to two prompts drawn at random agree)). Prompts
    weigh alike, and those with one answer are left out. Independent answers give 0 up to chance, which may be
    below 0; answers that the prompt determines give H₂(Y): log(prompts), the most there is, where all differ.
    None where nothing can be said: fewer than two prompts, or no answer came twice to one. Both probabilities
    are counted without bias (Simpson 1949, Nature 163, 688), so few answers do not look like information, as
    they do in a plug-in estimate. H₂: Rényi 1961. Differs from RAGEN-2: counted, where the paper scores each
    answer behind other prompts with the model; of order 2, so answers that seldom come twice count little.

    >>> from minidpo.data.episodes import Turn
    >>> said = lambda page, word: Episode("t", 1, 0, "", (Turn(page, word, None),), "failed", 0.0, "")
    >>> round(answer_information([said(page, page) for page in "aabb"]), 4)  # log 2
    0.6931
    """
    by_prompt = grouped((e for e in episodes if e.turns and not e.forced), lambda e: e.first_prompt)
    groups = [
        Counter(e.turns[0].answer for e in group) for group in by_prompt.values() if len(group) > 1
    ]
    m = len(groups)
    agree = sum(
        n * (n - 1) / (c.total() * (c.total() - 1)) for c in groups for n in c.values()
    ) / max(1, m)
    if m < 2 or not agree:
        return None
    shares: dict[
        str, list[float]
    ] = {}  # of each answer, among the answers to each prompt that it came to
    for counts in groups:
        for answer, n in counts.items():
            shares.setdefault(answer, []).append(n / counts.total())
    across = sum(sum(s) ** 2 - sum(x * x for x in s) for s in shares.values()) / (
        m * (m - 1)
    )  # two prompts
    return math.log(agree / (agree / m + max(0.0, across) * (1 - 1 / m)))
