"""2. Losses: supervised fine-tuning, DPO, DMPO.

A loss reads scores (chapter 1), one number a trajectory, and returns one number a pair. DPO is given four,
policy's and reference's on the chosen and on the rejected trajectory, and sees one: h, how much further the
policy has moved towards the chosen than towards the rejected. DMPO is the same function on scores in which
early turns weigh more. All arithmetic is in the scores' dtype, float32 or better. Next: 3 variants.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from minidpo.objective.scores import check_parameter


def sft_loss(policy_logp: Tensor, n_tokens: int) -> Tensor:
    """Supervised fine-tuning: the mean of -log π over the agent's tokens, -Σ policy_logp / n_tokens.

    policy_logp (B,): log π of each trajectory, summed over the agent's tokens (`sum_weights`). n_tokens: how
    many tokens the agent wrote in the *whole* optimizer step, so that micro-batches add up to one batch.
    Returns a scalar. Song et al. 2024 (ETO), arXiv:2403.02502, Eq. 3-4: no loss on prompts and observations.
    Raises ValueError if n_tokens < 1. Differs from the paper: a mean over tokens where the paper has a sum.

    >>> sft_loss(torch.tensor([-3.0, -1.0]), n_tokens=8)
    tensor(0.5000)
    """
    check_parameter("n_tokens", n_tokens, n_tokens >= 1, "at least 1")
    check_scores(policy_logp=policy_logp)
    return -policy_logp.sum() / n_tokens


def advantage_weights(reward: Tensor, group: Tensor, temperature: float) -> Tensor:
    """Weights of episodes that are imitated by how well they went: exp(A / τ), A = reward - its group's mean.

    reward (B,): float; group (B,) int64: which episodes are of one instance. Returns (B,), scaled to mean 1.
    τ -> ∞ imitates all alike; τ -> 0 those alone that are furthest above their group's mean. Reward-weighted
    regression with a baseline, as in Peng et al. 2019 (AWR), arXiv:1910.00177, β for τ. Raises ValueError
    unless τ is finite and > 0. Differs from the paper: the group's mean is the baseline, where it fits a
    value function; one weight an episode, not a step; weights are scaled to mean 1 and not clipped.

    >>> advantage_weights(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 1]), temperature=0.5)
    tensor([1.9957, 0.2701, 0.7342])
    """
    check_parameter("temperature", temperature, 0 < temperature < math.inf, "finite and > 0")
    check_scores(reward=reward)
    n = int(group.max()) + 1
    total, count = (torch.zeros(n, dtype=reward.dtype).index_add(0, group, x)
                    for x in (reward, torch.ones_like(reward)))
    # a softmax is the exponential without its overflow; the mean of its values is 1/B
    return torch.softmax((reward - (total / count)[group]) / temperature, dim=0) * len(reward)


def dpo_loss(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta):
    """DPO loss per pair: -log σ(β·h), h = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected).

    All four: (P,) float32, log π(y|x) in nats, summed over the agent's tokens. Returns (P,); the caller takes
    the mean. Rafailov et al. 2023, arXiv:2305.18290, Eq. 7. A larger β keeps the policy nearer the reference
    (Eq. 3). Raises ValueError if β <= 0 or a score is not finite. Differs from the paper: nothing.

    >>> z = torch.zeros(1); dpo_loss(z, z, z, z, beta=0.1)  # policy == reference: exactly log 2
    tensor([0.6931])
    """
    check_parameter("beta", beta, 0 < beta < math.inf, "finite and > 0")
    # logsigmoid, not log(sigmoid): at β·h = -200 the sigmoid is 0 in float32 and its logarithm -inf
    return -F.logsigmoid(beta * log_ratio_gap(policy_chosen, policy_rejected, ref_chosen, ref_rejected))


def log_ratio_gap(policy_chosen, policy_rejected, ref_chosen, ref_rejected):
    """h = log π/π_ref of the chosen minus log π/π_ref of the rejected: (P,) each -> (P,).

    >>> one = torch.ones(1); log_ratio_gap(-one, -3 * one, -2 * one, -2 * one)
    tensor([2.])
    """
    check_scores(policy_chosen=policy_chosen, policy_rejected=policy_rejected,
                 ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    return (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)


@torch.no_grad()
def preference_metrics(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta) -> dict[str, Tensor]:
    """What to log of each pair: (P,) each, without gradient; the caller takes means.

    reward_*: β (policy - ref), DPO's implicit reward (Rafailov et al. 2023, section 4). margin: the chosen's
    reward minus the rejected's. accuracy: 1 where the margin is above 0; before the first step margins are 0
    or rounding, and it means nothing. logp_*: the policy's own scores, because both may fall while the margin
    grows. mean_drop: mean of ref - policy over both sides. Not a KL.

    >>> one = torch.ones(1); metrics = preference_metrics(-one, -5 * one, -2 * one, -2 * one, beta=0.5)
    >>> {name: value.item() for name, value in metrics.items()}  # doctest: +NORMALIZE_WHITESPACE
    {'reward_chosen': 0.5, 'reward_rejected': -1.5, 'margin': 2.0, 'accuracy': 1.0,
     'logp_chosen': -1.0, 'logp_rejected': -5.0, 'mean_drop': 1.0}
    """
    chosen, rejected = policy_chosen - ref_chosen, policy_rejected - ref_rejected
    return {"reward_chosen": beta * chosen, "reward_rejected": beta * rejected,
            "margin": beta * (chosen - rejected), "accuracy": (chosen > rejected).to(chosen.dtype),
            "logp_chosen": policy_chosen.detach(), "logp_rejected": policy_rejected.detach(),
            "mean_drop": -(chosen + rejected) / 2}


def check_scores(**scores: Tensor) -> None:
    """Refuse scores that would turn a loss into nan: each must be (P,), of one P, every number finite.

    On a GPU the numbers are not looked at, because the host would have to wait for them; `train` (chapter 24)
    looks at all scores of a step at once.
    """
    shapes = {name: tuple(score.shape) for name, score in scores.items()}
    for name, score in scores.items():
        # (P,) minus (P,1) would broadcast to all P·P pairs without a word
        assert score.ndim == 1 and len(set(shapes.values())) == 1, f"every score must be (P,), got {shapes}"
        if not score.is_cuda and not score.isfinite().all():
            odd = score[~score.isfinite()][0].item()
            raise ValueError(f"{name} holds {odd}, a log-prob must be finite: either the model overflowed "
                             "(lower the learning rate) or a token it cannot produce was scored")
