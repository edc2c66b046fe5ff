"""Losses: DPO and DMPO on pairs, supervised fine-tuning on single trajectories.

DPO reads four scores a pair: the policy's and the reference's, of the chosen and of the rejected trajectory.
DMPO is DPO on scores in which early turns weigh more. Losses compute in the scores' dtype, float32 or more.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from minidpo.objective.scores import check_parameters


def dpo_loss(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta):
    """DPO loss per pair: -log σ(β·h), h = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected).

    All four: (P,) float32, log π(y|x) in nats, summed over the agent's tokens. Returns (P,); the caller takes
    the mean. Rafailov et al. 2023, arXiv:2305.18290, Eq. 7. A larger β keeps the policy nearer the reference
    (Eq. 3). Raises ValueError if β <= 0 or a score is not finite. Differs from the paper: nothing.

    >>> z = torch.zeros(1); dpo_loss(z, z, z, z, beta=0.1)  # policy == reference: exactly log 2
    tensor([0.6931])
    """
    check_parameters(beta=beta)
    # logsigmoid, not log(sigmoid): at β·h = -200 the sigmoid is 0 in float32 and its logarithm -inf
    return -F.logsigmoid(
        beta * log_ratio_gap(policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    )


def log_ratio_gap(policy_chosen, policy_rejected, ref_chosen, ref_rejected):
    """h, how much further the policy moved towards the chosen than towards the rejected: (P,) each -> (P,).

    >>> one = torch.ones(1); log_ratio_gap(-one, -3 * one, -2 * one, -2 * one)
    tensor([2.])
    """
    check_scores(
        policy_chosen=policy_chosen,
        policy_rejected=policy_rejected,
        ref_chosen=ref_chosen,
        ref_rejected=ref_rejected,
    )
    return (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)


def sft_loss(policy_logp: Tensor, n_tokens: int) -> Tensor:
    """Supervised fine-tuning: the mean of -log π over the agent's tokens, -Σ policy_logp / n_tokens.

    policy_logp (B,): log π of each trajectory, summed over the agent's tokens (`sum_weights`). n_tokens: the
    agent's tokens in the *whole* optimizer step, so that micro-batches add up to one batch. Returns a scalar.
    Song et al. 2024 (ETO), arXiv:2403.02502, Eq. 3-4: prompts and observations carry no loss. Raises
    ValueError if n_tokens < 1. Differs from the paper: a mean over tokens where the paper has a sum.

    >>> sft_loss(torch.tensor([-3.0, -1.0]), n_tokens=8)
    tensor(0.5000)
    """
    check_parameters(n_tokens=n_tokens)
    check_scores(policy_logp=policy_logp)
    return -policy_logp.sum() / n_tokens


def advantage_weights(reward: Tensor, group: Tensor, temperature: float) -> Tensor:
    """Weights for imitating episodes by their rewards: exp(A / τ), A = reward - the mean of its group.

    reward (B,) float; group (B,) int64, equal for the episodes of one instance. Returns (B,), scaled to mean
    1. τ -> ∞ imitates all episodes alike; τ -> 0 only those furthest above their group's mean.
    Reward-weighted regression with a baseline: Peng et al. 2019 (AWR), arXiv:1910.00177, where τ is called β.
    Raises ValueError unless τ is finite and > 0. Differs from the paper: the baseline is the group's mean, not a
    fitted value function; one weight an episode, not a step; weights are scaled to mean 1 and not clipped.

    >>> advantage_weights(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 1]), temperature=0.5)
    tensor([1.9957, 0.2701, 0.7342])
    """
    check_parameters(temperature=temperature)
    check_scores(reward=reward)
    # softmax is the exponential without overflow; its values have the mean 1/B
    return torch.softmax((reward - group_means(reward, group)[group]) / temperature, dim=0) * len(
        reward
    )


def group_means(values: Tensor, group: Tensor) -> Tensor:
    """The mean of each group: values (B,), group (B,) int64 in 0..G-1 -> (G,); nan for an empty group.

    >>> group_means(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 1]))
    tensor([0.5000, 1.0000])
    """
    count = torch.bincount(group)
    return values.new_zeros(len(count)).index_add(0, group, values) / count


@torch.no_grad()
def preference_metrics(
    policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta
) -> dict[str, Tensor]:
    """The numbers logged for each pair: (P,) each, without gradient; the caller takes the means.

    reward_*: β (policy - ref), DPO's implicit reward (Rafailov et al. 2023, section 4). margin: chosen minus
    rejected reward. accuracy: 1 where the margin is above 0; at the first step margins are 0 up to rounding.
    logp_*: the policy's scores; both may fall as the margin grows. mean_drop: mean of ref - policy over both
    sides. Not a KL.

    >>> one = torch.ones(1); metrics = preference_metrics(-one, -5 * one, -2 * one, -2 * one, beta=0.5)
    >>> {name: value.item() for name, value in metrics.items()}  # doctest: +NORMALIZE_WHITESPACE
    {'reward_chosen': 0.5, 'reward_rejected': -1.5, 'margin': 2.0, 'accuracy': 1.0,
     'logp_chosen': -1.0, 'logp_rejected': -5.0, 'mean_drop': 1.0}
    """
    chosen, rejected = policy_chosen - ref_chosen, policy_rejected - ref_rejected
    return {
        "reward_chosen": beta * chosen,
        "reward_rejected": beta * rejected,
        "margin": beta * (chosen - rejected),
        "accuracy": (chosen > rejected).to(chosen.dtype),
        "logp_chosen": policy_chosen.detach(),
        "logp_rejected": policy_rejected.detach(),
        "mean_drop": -(chosen + rejected) / 2,
    }


def check_scores(**scores: Tensor) -> None:
    """Refuse scores that would turn a loss into nan: all must be finite and have the same shape (P,).

    On a GPU this check would make the host wait, so there the trainer checks a whole step at once.
    """
    shapes = {name: tuple(score.shape) for name, score in scores.items()}
    for name, score in scores.items():
        # (P,) minus (P,1) would silently broadcast to P·P pairs
        assert score.ndim == 1 and len(set(shapes.values())) == 1, (
            f"each must be (P,), got {shapes}"
        )
        if not score.is_cuda and not score.isfinite().all():
            odd = score[~score.isfinite()][0].item()
            raise ValueError(
                f"{name} must be finite, got {odd}; if a model made it, it overflowed (lower "
                "the learning rate) or scored a token that it cannot produce"
            )
