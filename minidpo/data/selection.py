"""Which episodes are imitated, and how much each counts.

A draw depends on the seed and on its own episode alone, so a selection can be repeated, and a higher threshold
leaves a subset. An expert's episodes are all taken.
"""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from minidpo.data.episodes import Episode, by_instance, player_of
from minidpo.objective.losses import advantage_weights


def solved(episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes that were solved, and in which something was said. Filtered behaviour cloning."""
    return [e for e in episodes if e.solved and e.turns]


def paid(
    episodes: Sequence[Episode], threshold: float, share: float = 1.0, *, seed: int
) -> list[Episode]:
    """Of the episodes whose reward reaches the threshold: the expert's, and about this share of the others.

    AgentEvol, Xi et al. 2024, arXiv:2406.04151, learns from r · log π of such episodes. Differs from the paper:
    the share, which its text does not have.
    """
    return [
        e
        for e in episodes
        if e.turns and e.reward >= threshold and (is_expert(e) or uniform(e, seed) < share)
    ]


def distinct(episodes: Sequence[Episode]) -> list[Episode]:
    """Of the episodes of one instance in which the same was said, one: an expert's, else the highest paid."""
    # reversed: of equal ones the first comes last, and stays
    ranked = sorted(reversed(episodes), key=lambda e: (is_expert(e), e.reward))  # noqa: C414
    last = {(e.instance, e.said, e.relabelled): id(e) for e in ranked}
    chosen = set(last.values())
    return [e for e in episodes if id(e) in chosen]


def answers_of_experts(episodes: Sequence[Episode]) -> list[Episode]:
    """Of each episode that an expert played on from an agent's state, and solved, its first answer alone: the
    others answer to states that no agent reached (DAgger)."""
    return [e.up_to(e.forced + 1) for e in episodes if e.solved and len(e.turns) > e.forced]


def weights_by_advantage(episodes: Sequence[Episode], temperature: float) -> list[float]:
    """How much each episode counts by its verdict against its instance's mean (`advantage_weights`)."""
    return advantage_weights(*verdicts(episodes), temperature).tolist()


def verdicts(episodes: Sequence[Episode]) -> tuple[Tensor, Tensor]:
    """The reward, 1 or 0, and the number of the instance of each episode, (B,) both."""
    number = {instance: n for n, instance in enumerate(by_instance(episodes))}
    reward = torch.tensor([float(e.solved) for e in episodes])
    return reward, torch.tensor([number[e.instance] for e in episodes])


def is_expert(episode: Episode) -> bool:
    """Whether a script played it, careful, clumsy or relabelling, and not an agent."""
    name = episode.policy
    return "@" not in name and name.partition(" ")[0] in ("expert", "clumsy", "dagger")


def uniform(episode: Episode, seed: int) -> float:
    """A uniform number below 1, by the seed and the episode."""
    player, _ = player_of(episode.policy)
    return random.Random(f"{seed} {player} {episode.key}").random()
