"""Reward models: a number for an episode or a turn. P counts pairs, S turns."""

import torch
import torch.nn.functional as F
from torch import Tensor

from minidpo.objective.losses import check_scores
from minidpo.objective.scores import check_parameters


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margin: float = 0.0) -> Tensor:
    """-log σ(R(chosen) - R(rejected) - margin) per pair: rewards (P,) each -> (P,).

    Ouyang et al. 2022 (InstructGPT), arXiv:2203.02155, Eq. 1; margin: Touvron et al. 2023 (Llama 2),
    arXiv:2307.09288, Eq. 2. A constant added to both changes nothing. DPO is this loss on β (policy - ref).
    Raises ValueError if a reward is not finite, or the margin not finite and >= 0. Differs from the papers: one
    margin for all pairs.

    >>> from torch import tensor; bradley_terry_loss(tensor([2.0]), tensor([0.0]), margin=1.0)
    tensor([0.3133])
    """
    check_parameters(margin=margin)
    check_scores(chosen=chosen, rejected=rejected)
    return -F.logsigmoid(chosen - rejected - margin)


def step_reward_loss(reward: Tensor, value: Tensor) -> Tensor:
    """(R - V)² per turn, for a reward model of turns; V is the share of continuations that solved. (S,) -> (S,).

    Xiong et al. 2024 (IPR), arXiv:2406.11176, section 3.2, where V is estimated by playing on. Raises
    ValueError if a number is not finite. Differs from the paper: nothing here, but see `step_values`.

    >>> from torch import tensor; step_reward_loss(tensor([0.5]), tensor([1.0]))
    tensor([0.2500])
    """
    check_scores(reward=reward, value=value)
    return (reward - value) ** 2


def reliability(chosen: Tensor, rejected: Tensor, bins: int = 5) -> Tensor:
    """How sure a reward model is and how often it is right, for pairs in bins of similar confidence: (3,bins).

    Rewards (P,) each. The model prefers the side with more reward, with confidence σ(|gap|), from 0.5 to 1;
    the bins have equal width. Each bin holds the sum of confidences, the number of right pairs (a tie counts
    half), and the number of pairs. Guo et al. 2017, arXiv:1706.04599, section 2. Differs from the paper: the
    bins begin at 0.5, because the confidence in one of two is never below it.

    >>> from torch import tensor; reliability(tensor([2.0, 0.0]), tensor([0.0, 2.0]))[:, 3]  # 0.8 to 0.9
    tensor([1.7616, 1.0000, 2.0000])
    """
    check_scores(chosen=chosen, rejected=rejected)
    gap = chosen - rejected
    confidence, right = torch.sigmoid(gap.abs()), (gap > 0).to(gap.dtype) + (gap == 0) / 2
    place = ((2 * confidence - 1) * bins).long().clamp(max=bins - 1)
    return gap.new_zeros(3, bins).index_add(
        1, place, torch.stack([confidence, right, torch.ones_like(gap)])
    )


def calibration_error(chosen: Tensor, rejected: Tensor, bins: int = 5) -> Tensor:
    """Expected calibration error: the mean over pairs of |accuracy - confidence| of the pair's bin, ().

    It is 0 if the model is right as often as it is sure. Rewards (P,) each; bins as in `reliability`.
    arXiv:1706.04599, Eq. 3.

    >>> from torch import tensor; calibration_error(tensor([2.0, 0.0]), tensor([0.0, 2.0]))  # 0.8808 - 0.5
    tensor(0.3808)
    """
    confidence, right, pairs = reliability(chosen, rejected, bins)
    return (right - confidence).abs().sum() / pairs.sum()
