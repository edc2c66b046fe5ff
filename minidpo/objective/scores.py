"""1. Scores: the only way from a model to a loss.

A trajectory is a row of tokens of which the agent wrote some, turn by turn. Every objective here reads
nothing of the model but weighted sums of the log-probs of those tokens, `score = W @ logp`: DPO's W is 1,
SimPO's 1/length, DMPO's a weight for each turn. So log-probs are made in one place, `token_logps`, masks and
weights are applied in one place, `scores`, and a loss is a line of algebra on the result. Next: 2 losses.
"""

import math

import torch
from torch import Tensor


def scores(logps: Tensor, segment: Tensor, weight: Tensor, n: int) -> Tensor:
    """score = W @ logp: for each of n trajectories the weighted sum of its tokens' log-probs.

    W is given by its entries, one a token: segment (T,) int64, the trajectory 0..n-1 that the token belongs
    to, and weight (T,), its weight there. logps (T,) is what `token_logps` gives. Returns (n,) in its dtype.
    A token that several trajectories share is listed once for each of them: pass logps[token]. A token of
    weight 0 carries neither value nor gradient, whatever its log-prob is.

    >>> logps, segment = torch.tensor([-1.0, -2.0, -torch.inf]), torch.tensor([0, 1, 1])
    >>> scores(logps, segment, weight=torch.tensor([1.0, 0.5, 0.0]), n=2)
    tensor([-1., -1.])
    """
    # where(), not the product alone: 0 * -inf is nan, and one banned token would poison the sum
    terms = torch.where(weight != 0, weight * logps.double(), 0.0)
    # In float64 the order of addition, which CUDA's atomic adds do not have, practically never shows in the float32.
    return terms.new_zeros(n).index_add(0, segment, terms).to(logps.dtype)


def sum_weights(action_mask: Tensor, segment: Tensor, n: int) -> Tensor:
    """W = 1 on the agent's tokens, 0 elsewhere: the score is log π(trajectory), as DPO and SFT read it.

    action_mask (T,) bool, True where the agent wrote the token; segment (T,) and n as in `scores`. Returns
    (T,) float64. Raises ValueError for a trajectory in which the agent wrote nothing.

    >>> sum_weights(torch.tensor([False, True, True]), torch.tensor([0, 0, 1]), n=2)
    tensor([0., 1., 1.], dtype=torch.float64)
    """
    lengths(action_mask, segment, n)
    return action_mask.double()


def mean_weights(action_mask: Tensor, segment: Tensor, n: int) -> Tensor:
    """W = 1/length on the agent's tokens, 0 elsewhere: the score is their mean log-prob, as SimPO reads it.

    Arguments, result and error as in `sum_weights`; the length counts the agent's own tokens only.

    >>> mean_weights(torch.tensor([False, True, True]), torch.tensor([0, 0, 0]), n=1)
    tensor([0.0000, 0.5000, 0.5000], dtype=torch.float64)
    """
    return action_mask.double() / lengths(action_mask, segment, n)[segment]


def lengths(action_mask: Tensor, segment: Tensor, n: int) -> Tensor:
    """How many tokens the agent wrote in each trajectory: (n,) int64. Raises ValueError where it wrote none.

    >>> lengths(torch.tensor([False, True, True]), torch.tensor([0, 0, 0]), n=1)
    tensor([2])
    """
    counts = torch.bincount(segment[action_mask], minlength=n)  # (n,)
    if not counts.all():
        raise ValueError(f"trajectory {counts.argmin()} of {n} has no token that the agent wrote and so no "
                         "score: drop it, or truncate its prompt instead of its answers")
    return counts


def turn_weights(n_turns: int, gamma: float) -> Tensor:
    """DMPO's weight of each turn: φ(t,N) = γᵗ (1 - γᴺ⁻ᵗ) / (1 - γᴺ) for t = 0 .. N-1, as (N,) float64.

    The first turn weighs 1, later ones less. Both limits are exact: γ = 1 gives (N-t)/N, γ = 0 the first turn
    alone. DMPO is `dpo_loss` on scores with these weights. Shi et al. 2024, arXiv:2406.14868, Eq. 17, T for
    our N. Raises ValueError unless N >= 1 and 0 <= γ <= 1. Differs from the paper: nothing.

    >>> turn_weights(4, gamma=0.5)  # (1, 7/15, 3/15, 1/15)
    tensor([1.0000, 0.4667, 0.2000, 0.0667], dtype=torch.float64)
    """
    check_parameter("n_turns", n_turns, n_turns >= 1, "at least 1")
    check_parameter("gamma", gamma, 0 <= gamma <= 1, "within [0, 1]")
    if gamma == 0:
        phi = [1.0] + [0.0] * (n_turns - 1)
    elif gamma == 1:
        phi = [(n_turns - t) / n_turns for t in range(n_turns)]
    else:
        # 1 - γᵏ as -expm1(k log γ): near γ = 1 the plain difference loses half its digits
        log_gamma = math.log(gamma)
        phi = [gamma**t * math.expm1((n_turns - t) * log_gamma) / math.expm1(n_turns * log_gamma)
               for t in range(n_turns)]
    return torch.tensor(phi, dtype=torch.float64)


def dmpo_weights(action_mask: Tensor, segment: Tensor, n: int, turn: Tensor, gamma: float) -> Tensor:
    """W = φ(t,N) on the tokens that the agent wrote in turn t of its N turns, 0 elsewhere.

    turn (T,) int64: the turn of each token, from 0; each trajectory has its own N. gamma is `turn_weights`'s,
    the other arguments, the result and the error are those of `sum_weights` (chapter 1).

    >>> mask, segment, turn = torch.tensor([True] * 3), torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0])
    >>> dmpo_weights(mask, segment, n=2, turn=turn, gamma=1.0)
    tensor([1.0000, 0.5000, 1.0000], dtype=torch.float64)
    """
    lengths(action_mask, segment, n)
    weight = torch.zeros(len(turn), dtype=torch.float64, device=turn.device)
    for trajectory in range(n):
        own = action_mask & (segment == trajectory)
        phi = turn_weights(int(turn[own].max()) + 1, gamma).to(turn.device)  # (N,)
        weight[own] = phi[turn[own]]
    return weight


def check_parameter(name: str, value: float, valid: bool, wanted: str) -> None:
    """Refuse a parameter outside its range; nan fails every comparison, so it is refused too."""
    if not valid:
        raise ValueError(f"{name} must be {wanted}, got {value}")
