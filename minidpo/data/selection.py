"""Which episodes are imitated, and how much each counts.

Whether an episode is drawn depends only on the seed and on the episode itself. So a selection can be repeated,
and a higher threshold selects a subset. An expert's episodes are all taken.
"""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from minidpo.data.episodes import Episode, by_instance, player_of
from minidpo.objective.losses import advantage_weights


def solved(episodes: Sequence[Episode]) -> list[Episode]:
    """The solved episodes with at least one turn (filtered behaviour cloning)."""
    return [e for e in episodes if e.solved and e.turns]


def paid(
    episodes: Sequence[Episode], threshold: float, share: float = 1.0, *, seed: int
) -> list[Episode]:
    """Episodes whose reward reaches the threshold: all of an expert's, and about this share of the others.

    AgentEvol, Xi et al. 2024, arXiv:2406.04151, learns from r · log π of such episodes. Differs from the paper:
    the share, which its text does not have.
    """
    return [
        e
        for e in episodes
        if e.turns and e.reward >= threshold and (is_expert(e) or uniform(e, seed) < share)
    ]


def distinct(episodes: Sequence[Episode]) -> list[Episode]:
    """One of several episodes of an instance with the same answers: an expert's, else the one with most reward."""
    # reversed, so that the first of equal episodes comes last and is kept
    ranked = sorted(reversed(episodes), key=lambda e: (is_expert(e), e.reward))  # noqa: C414
    last = {(e.instance, e.said, e.relabelled): id(e) for e in ranked}
    chosen = set(last.values())
    return [e for e in episodes if id(e) in chosen]


def answers_of_experts(episodes: Sequence[Episode]) -> list[Episode]:
    """The expert's first answer of each solved episode that it continued from an agent's state (DAgger). Its later
    answers belong to states that no agent reached."""
    return [e.up_to(e.forced + 1) for e in episodes if e.solved and len(e.turns) > e.forced]


def weights_by_advantage(episodes: Sequence[Episode], temperature: float) -> list[float]:
    """`advantage_weights` of episodes: each one's verdict against the mean of its instance."""
    return advantage_weights(*verdicts(episodes), temperature).tolist()


def verdicts(episodes: Sequence[Episode]) -> tuple[Tensor, Tensor]:
    """Each episode's reward, 1 or 0, and the number of its instance, both (B,)."""
    number = {instance: n for n, instance in enumerate(by_instance(episodes))}
    reward = torch.tensor([float(e.solved) for e in episodes])
    return reward, torch.tensor([number[e.instance] for e in episodes])


def is_expert(episode: Episode) -> bool:
    """Whether a script played it and not an agent: a careful, clumsy or relabelling expert."""
    name = episode.policy
    return "@" not in name and name.partition(" ")[0] in ("expert", "clumsy", "dagger")


def uniform(episode: Episode, seed: int) -> float:
    """A uniform number below 1 that depends only on the seed and the episode."""
    player, _ = player_of(episode.policy)
    return random.Random(f"{seed} {player} {episode.key}").random()
