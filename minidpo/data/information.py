"""How varied an agent's answers are, and whether they depend on the task: counted on episodes.

An agent may stop looking at the page although its answers stay varied: its entropy stays high while the mutual
information of prompt and answer falls to 0 ("template collapse", RAGEN-2, Wang et al. 2026, arXiv:2604.06268).
"""

import math
from collections import Counter
from collections.abc import Sequence

from minidpo.data.episodes import Episode, grouped


def group_numbers(episodes: Sequence[Episode]) -> dict[str, float]:
    """`diversity` and `answer_information` (nats) of some episodes, as far as there is enough to count."""
    information = answer_information(episodes)
    numbers = diversity(episodes)
    if information is not None:
        numbers["answer_information"] = information
    return numbers


def diversity(episodes: Sequence[Episode]) -> dict[str, float]:
    """How varied the attempts at one instance from one state are; empty if no state was tried twice.

    `diversity`: how often two attempts have different answers (1 - Simpson's index, 1949). `mixed`: the share
    of groups that were both solved and failed. Only these groups teach.

    >>> diversity([])
    {}
    """
    attempts = grouped(episodes, lambda e: (e.instance, e.said[: e.forced]))
    groups = [group for group in attempts.values() if len(group) > 1]
    if not groups:
        return {}
    unlike = [1 - _agreement(Counter(e.said for e in group)) for group in groups]
    mixed = [len({e.solved for e in group}) == 2 for group in groups]
    return {"diversity": sum(unlike) / len(groups), "mixed": sum(mixed) / len(groups)}


def answer_information(episodes: Sequence[Episode]) -> float | None:
    """Mutual information of first prompt X and first answer Y in nats, of order 2: H₂(Y) - H₂(Y|X).

    That is log(P(two answers to one prompt agree) / P(answers to two prompts drawn at random agree)). All
    prompts count alike; those with one answer are left out. Independent answers give 0 up to noise, so it may be
    negative. Answers that the prompt determines give H₂(Y), at most log(prompts). Returns None if there are
    fewer than two prompts, or no prompt got the same answer twice. Both probabilities are counted without bias
    (Simpson 1949, Nature 163, 688); a plug-in estimate would mistake few answers for information. H₂: Rényi
    1961. Differs from RAGEN-2: we count, where the paper scores each answer after other prompts with the model;
    it is of order 2, so rare answers count little.

    >>> from minidpo.data.episodes import Turn
    >>> said = lambda page, word: Episode("t", 1, 0, "", (Turn(page, word, None),), "failed", 0.0, "")
    >>> round(answer_information([said(page, page) for page in "aabb"]), 4)  # log 2
    0.6931
    """
    by_prompt = grouped((e for e in episodes if e.turns and not e.forced), lambda e: e.first_prompt)
    answers = [
        Counter(e.turns[0].answer for e in group) for group in by_prompt.values() if len(group) > 1
    ]
    m = len(answers)
    if m < 2:
        return None
    same_prompt = sum(map(_agreement, answers)) / m
    if not same_prompt:
        return None
    shares: dict[str, list[float]] = {}  # of each answer, its share at each prompt that got it
    for counts in answers:
        for answer, n in counts.items():
            shares.setdefault(answer, []).append(n / counts.total())
    agreeing = sum(sum(s) ** 2 - sum(x * x for x in s) for s in shares.values())
    two_prompts = max(0.0, agreeing / (m * (m - 1)))
    return math.log(same_prompt / (same_prompt / m + two_prompts * (1 - 1 / m)))


def _agreement(counts: Counter) -> float:
    """How often two of these, drawn without replacement, are the same."""
    n = counts.total()
    return sum(k * (k - 1) for k in counts.values()) / (n * (n - 1))
