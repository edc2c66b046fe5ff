"""Scores: score_i = Σ_t W_it · logp_t. SFT and preference losses read nothing else from a model.

Objectives differ in W: 1 on the agent's tokens (SFT, DPO), 1/length (SimPO), a weight for each turn (DMPO).
All log-probs come from `token_logps` in model/head; the kinds of W are made here.
"""

import math

import torch
from torch import Tensor


def scores(logps: Tensor, segment: Tensor, weight: Tensor, n: int) -> Tensor:
    """score = W @ logp: the weighted sum of each trajectory's log-probs, for n trajectories.

    logps (T,) come from `token_logps`. W is sparse, with one entry a token: segment (T,) int64 is the entry's
    trajectory, 0..n-1, and weight (T,) its weight there. Returns (n,) in logps' dtype. A token that several
    trajectories share has one entry in each: pass logps[token]. Weight 0 adds no value and no gradient, even
    where the log-prob is -inf.

    >>> logps, segment = torch.tensor([-1.0, -2.0, -torch.inf]), torch.tensor([0, 1, 1])
    >>> scores(logps, segment, weight=torch.tensor([1.0, 0.5, 0.0]), n=2)
    tensor([-1., -1.])
    """
    # where(), not the product alone: 0 * -inf is nan, and one banned token would poison the sum
    terms = torch.where(weight != 0, weight * logps.double(), 0.0)
    # float64, because CUDA adds in no fixed order: rounded to float32, the order hardly ever shows
    return terms.new_zeros(n).index_add(0, segment, terms).to(logps.dtype)


def sum_weights(action_mask: Tensor, segment: Tensor, n: int) -> Tensor:
    """W = 1 on the agent's tokens, 0 elsewhere: the score is log π(trajectory), which DPO and SFT read.

    action_mask (T,) bool is True where the agent wrote the token; segment (T,) and n are those of `scores`.
    Returns (T,) float64. Raises ValueError if the agent wrote nothing in a trajectory.

    >>> sum_weights(torch.tensor([False, True, True]), torch.tensor([0, 0, 1]), n=2)
    tensor([0., 1., 1.], dtype=torch.float64)
    """
    lengths(action_mask, segment, n)
    return action_mask.double()


def mean_weights(action_mask: Tensor, segment: Tensor, n: int) -> Tensor:
    """W = 1/length on the agent's tokens, 0 elsewhere: the score is their mean log-prob, which SimPO reads.

    Arguments, result and error are those of `sum_weights`. The length counts the agent's tokens only.

    >>> mean_weights(torch.tensor([False, True, True]), torch.tensor([0, 0, 0]), n=1)
    tensor([0.0000, 0.5000, 0.5000], dtype=torch.float64)
    """
    return action_mask.double() / lengths(action_mask, segment, n)[segment]


def dmpo_weights(
    action_mask: Tensor, segment: Tensor, n: int, turn: Tensor, gamma: float
) -> Tensor:
    """W = φ(t,N) on the agent's tokens of turn t of N, 0 elsewhere. DMPO is `dpo_loss` on these scores.

    turn (T,) int64 is the turn of each token, from 0; each trajectory has its own N. gamma is that of
    `turn_weights`. The other arguments, the result and the error are those of `sum_weights`.

    >>> mask, segment, turn = torch.tensor([True] * 3), torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0])
    >>> dmpo_weights(mask, segment, n=2, turn=turn, gamma=1.0)
    tensor([1.0000, 0.5000, 1.0000], dtype=torch.float64)
    """
    lengths(action_mask, segment, n)
    weight = torch.zeros(len(turn), dtype=torch.float64, device=turn.device)
    for trajectory in range(n):
        written = action_mask & (segment == trajectory)
        phi = turn_weights(int(turn[written].max()) + 1, gamma).to(turn.device)  # (N,)
        weight[written] = phi[turn[written]]
    return weight


def turn_weights(n_turns: int, gamma: float) -> Tensor:
    """DMPO's weight of each turn: φ(t,N) = γᵗ (1 - γᴺ⁻ᵗ) / (1 - γᴺ) for t = 0 .. N-1, as (N,) float64.

    The first turn weighs 1, later turns less. Both limits are exact: γ = 1 gives (N-t)/N, γ = 0 gives the
    first turn alone. Shi et al. 2024, arXiv:2406.14868, Eq. 17, where our N is called T. Raises ValueError
    unless N >= 1 and 0 <= γ <= 1. Differs from the paper: nothing.

    >>> turn_weights(4, gamma=0.5)  # (1, 7/15, 3/15, 1/15)
    tensor([1.0000, 0.4667, 0.2000, 0.0667], dtype=torch.float64)
    """
    check_parameters(n_turns=n_turns, gamma=gamma)
    if gamma == 0:
        phi = [1.0] + [0.0] * (n_turns - 1)
    elif gamma == 1:
        phi = [(n_turns - t) / n_turns for t in range(n_turns)]
    else:
        # 1 - γᵏ as -expm1(k log γ): near γ = 1 the plain difference loses half its digits
        log_gamma = math.log(gamma)
        phi = [
            gamma**t * math.expm1((n_turns - t) * log_gamma) / math.expm1(n_turns * log_gamma)
            for t in range(n_turns)
        ]
    return torch.tensor(phi, dtype=torch.float64)


def lengths(action_mask: Tensor, segment: Tensor, n: int) -> Tensor:
    """How many tokens the agent wrote in each trajectory: (n,) int64. Raises ValueError where it wrote none.

    >>> lengths(torch.tensor([False, True, True]), torch.tensor([0, 0, 0]), n=1)
    tensor([2])
    """
    counts = torch.bincount(segment[action_mask], minlength=n)  # (n,)
    if not counts.all():
        raise ValueError(
            f"trajectory {counts.argmin()} of {n} has no token that the agent wrote and so no "
            "score: drop it, or truncate its prompt instead of its answers"
        )
    return counts


def check_parameters(**parameters: float) -> None:
    """Refuse a parameter outside its range. nan fails every comparison, so it is refused too."""
    for name, value in parameters.items():
        valid, wanted = (
            (value >= 1, "at least 1")
            if name in ("n_turns", "n_tokens")
            else (0 < value < math.inf, "finite and > 0")
            if name in ("beta", "temperature")
            else (0 <= value <= 1, "within [0, 1]")
            if name in ("gamma", "lam")
            else (0 <= value < 1, "within [0, 1)")
            if name == "low"
            else (0 <= value < 0.5, "within [0, 0.5)")
            if name == "label_smoothing"
            else (0 <= value < math.inf, "finite and >= 0")
        )
        if not valid:
            raise ValueError(f"{name} must be {wanted}, got {value}")
