"""Which episodes are learned from: those that reach a threshold, the best of each instance, a random draw, or
those whose step values are known.

A draw depends on the seed and on its own episode alone, so a selection can be repeated. A higher threshold
leaves a subset. The expert's episodes are all taken if they reach the threshold, and count for no limit.
"""

import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from minidpo.config import SFT
from minidpo.data.episodes import Episode, by_instance
from minidpo.data.pairs import NothingToLearn
from minidpo.data.values import step_values

ABOVE_0 = math.ulp(0.0)  # the least number above 0


def selected_by_reward(episodes: Sequence[Episode], options: SFT, *, seed: int) -> list[Episode]:
    """What `options.select` leaves of the episodes that reach `options.threshold`."""
    ratio = options.ratio or 1.0  # as a threshold that is given, it is above 0
    if options.select == "threshold":
        return selected(episodes, options.threshold or 1.0, ratio, seed=seed)
    shown = [e for e in episodes if by_expert(e)]
    played = [e for e in episodes if not by_expert(e)]
    left = (
        best(played, ratio, seed=seed)
        if options.select == "top"
        else accepted(played, options.temperature, seed=seed)
    )
    return selected([*shown, *left], options.threshold or ABOVE_0, 1.0, seed=seed)


def by_expert(episode: Episode) -> bool:
    """Whether a script played it, careful, clumsy or relabelling, and not an agent."""
    name = episode.policy
    return "@" not in name and name.partition(" ")[0] in ("expert", "clumsy", "dagger")


def one_agent(episodes: Sequence[Episode], files: Sequence[Path]) -> None:
    """Raises ValueError if several agents played them."""
    if len(players := {e.policy.rpartition("@")[2] for e in episodes}) > 1:
        raise ValueError(
            f"{' '.join(map(str, files))}: played by {len(players)} agents, but an episode is "
            "compared with the agent's own: give the rollouts of one"
        )


def valued_episodes(
    played: Sequence[Episode], files: Sequence[Path], reader: str
) -> list[tuple[Episode, list[float]]]:
    """The agent's whole episodes with their `step_values`, for the option that reads these; those that lack
    continuations are left out, and nothing counts that an expert played. Raises ValueError if several agents
    played, or one sampled in several ways; NothingToLearn if none is left, or only episodes of one turn
    although longer ones were played: the value of a lone turn is its verdict.
    """
    by_agent = [e for e in played if e.turns and not by_expert(e)]
    one_agent(by_agent, files)
    if (
        len(
            {
                repr([e.sampling.get(name) for name in ("temperature", "temperatures", "top_p")])
                for e in by_agent
            }
        )
        > 1
    ):
        raise ValueError(
            f"{' '.join(map(str, files))}: sampled in several ways, but a value is that of "
            "the agent as it played: collect continuations with the episodes' own sampling"
        )
    whole = [e for e in by_agent if not e.forced]
    groups = by_instance(by_agent)
    valued = [
        (e, values) for e in whole if None not in (values := step_values(e, groups[e.instance]))
    ]
    if not valued or max(len(e.turns) for e, _ in valued) < min(
        2, max(len(e.turns) for e in whole)
    ):
        raise NothingToLearn(
            f"{' '.join(map(str, files))}: no episode with continuations from each of its "
            f"steps, for {reader}: --data takes those by collect.py --values, too"
        )
    print(f"{len(valued)} of {len(whole)} episodes have continuations from each of their steps")
    return valued


def uniform(episode: Episode, seed: int) -> float:
    """A uniform number below 1, by the seed and the episode."""
    player = episode.policy.rpartition("@")[
        2
    ]  # its fingerprint: an adapter's folder may have been moved
    return random.Random(f"{seed} {player} {episode.key}").random()


def selected(
    episodes: Sequence[Episode], threshold: float, ratio: float, *, seed: int
) -> list[Episode]:
    """Of the episodes whose reward reaches the threshold, the expert's, and of the others about this share.

    A lower ratio leaves a subset, as a higher threshold does. AgentEvol, Xi et al. 2024, arXiv:2406.04151,
    learns from r · log π of such episodes. Differs from the paper: the ratio, which its text does not have.
    """
    return [
        e
        for e in episodes
        if e.turns and e.reward >= threshold and (by_expert(e) or uniform(e, seed) < ratio)
    ]


def best(episodes: Sequence[Episode], ratio: float, *, seed: int) -> list[Episode]:
    """This share of each instance's episodes, rounded up: highest rewards, of equal ones the lowest draws."""
    return [
        episode
        for group in by_instance(episodes).values()
        for episode in best_first(group, seed)[: math.ceil(round(ratio * len(group), 9))]
    ]


def best_first(episodes: Sequence[Episode], seed: int) -> list[Episode]:
    return sorted(episodes, key=lambda e: (-e.reward, uniform(e, seed)))


def accepted(episodes: Sequence[Episode], temperature: float, *, seed: int) -> list[Episode]:
    """Each with probability exp((r - the highest r of its instance) / temperature): the best always.

    Statistical rejection sampling, RSO, Liu et al. 2023, arXiv:2309.06657, Algorithm 1; temperature is its β.
    Differs from the paper: one pass in place of as many as it takes to accept a given number.
    """
    highest = {
        instance: max(e.reward for e in group) for instance, group in by_instance(episodes).items()
    }
    return [
        e
        for e in episodes
        if uniform(e, seed) < math.exp((e.reward - highest[e.instance]) / temperature)
    ]


def capped(
    episodes: Sequence[Episode], per_instance: int | None, per_task: int | None, *, seed: int
) -> list[Episode]:
    """The expert's, and at most so many others of each instance and of each task (None: all).

    Higher rewards come first, of equal ones those of instances that gave fewest so far, then the lowest draw.
    """
    if per_instance is None and per_task is None:
        return list(episodes)
    played = by_instance([e for e in episodes if not by_expert(e)])
    ranked = [
        (-e.reward, place, uniform(e, seed), e)
        for group in played.values()
        for place, e in enumerate(best_first(group, seed)[:per_instance])
    ]
    taken: list[Episode] = []
    counts: Counter = Counter()
    for *_, episode in sorted(ranked, key=lambda entry: entry[:3]):
        if per_task is None or counts[episode.task] < per_task:
            counts[episode.task] += 1
            taken.append(episode)
    return [e for e in episodes if by_expert(e)] + taken
