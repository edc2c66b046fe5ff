"""Variants of DPO: what other papers changed, and why. A new loss is a function here and a line in
`learning/loss_table`.

Every loss takes four score tensors (P,), then its floats, and returns (P,). Scores are summed log-probs
unless the docstring says mean. Variants change the curve over h (cDPO, robust, IPO, hinge), read mean
log-probs and no reference (SimPO, ORPO), judge each side alone (KTO) or guard the chosen log-prob (DPOP,
`nll_term`). They raise ValueError for a float out of range and, on a CPU, for a score that is not finite.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from minidpo.objective.losses import check_scores, log_ratio_gap
from minidpo.objective.scores import check_parameters


def cdpo_loss(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta, label_smoothing):
    """Conservative DPO: -(1-ε) log σ(β·h) - ε log σ(-β·h), where a share ε of the labels may be wrong.

    The minimum is at h = logit(1-ε)/β and not at infinity: the policy should be right with probability 1-ε
    and no more. Mitchell 2023, "A note on DPO with noisy preferences", Eq. 3. The DPO authors' code and
    torchtune call ε `label_smoothing`, too (TRL ignores it since 0.29). 0 <= ε < 1/2. Differs from the paper: nothing.

    >>> z = torch.zeros(1); cdpo_loss(z + 2, z, z, z, beta=1.0, label_smoothing=0.1)  # 0.1269 + 0.1 · 2
    tensor([0.3269])
    """
    check_parameters(beta=beta, label_smoothing=label_smoothing)
    logit = beta * log_ratio_gap(policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    # log σ(-x) = log σ(x) - x, so smoothing adds a straight line; at h = 0 the loss is log 2 to the last bit
    return -F.logsigmoid(logit) + label_smoothing * logit


def robust_loss(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta, label_smoothing):
    """Robust DPO: ((1-ε) L(h) - ε L(-h)) / (1-2ε), L(h) = -log σ(β·h), for a share ε of flipped labels.

    Its expectation over the flips is the DPO loss on the true labels. It has no minimum and falls below 0.
    Chowdhury et al. 2024 (rDPO), arXiv:2403.00409. 0 <= ε < 1/2. Differs from the paper: nothing.

    >>> z = torch.zeros(1); robust_loss(z + 2, z, z, z, beta=1.0, label_smoothing=0.1)  # 0.1269 - 2/8
    tensor([-0.1231])
    """
    check_parameters(beta=beta, label_smoothing=label_smoothing)
    logit = beta * log_ratio_gap(policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    return (
        -F.logsigmoid(logit) - label_smoothing / (1 - 2 * label_smoothing) * logit
    )  # the same identity


def ipo_loss(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta):
    """IPO: (h - 1/(2β))², a parabola: overshooting costs as much as falling short, so h cannot run away.

    Two losses have this name. "ipo_sum" aims at h = 1/(2β) nats on summed log-probs (the paper, the DPO
    authors' code, OpenRLHF), "ipo_mean" at 1/(2β) nats a token (TRL, HALOs, LLaMA-Factory). Azar et al. 2023,
    arXiv:2310.12036, Eq. 17, where β is called τ. Differs from the paper: nothing, on sums.

    >>> z = torch.zeros(1); ipo_loss(z + 2, z, z, z, beta=0.5)  # (2 - 1)²
    tensor([1.])
    """
    check_parameters(beta=beta)
    return (
        log_ratio_gap(policy_chosen, policy_rejected, ref_chosen, ref_rejected) - 1 / (2 * beta)
    ) ** 2


def hinge_loss(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta):
    """Hinge: max(0, 1 - β·h): a pair whose margin has reached 1 is left alone.

    Liu et al. 2023 (RSO), arXiv:2309.06657, "hinge-norm". Differs from SLiC-HF (Zhao et al. 2023,
    arXiv:2305.10425): log-ratios to the reference, not log-probs; no cross-entropy (`nll_term` is one).

    >>> z = torch.zeros(2); hinge_loss(torch.tensor([2.0, 20.0]), z, z, z, beta=0.1)
    tensor([0.8000, 0.0000])
    """
    check_parameters(beta=beta)
    return F.relu(
        1 - beta * log_ratio_gap(policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    )


def simpo_loss(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta, target_margin):
    """SimPO: -log σ(β (policy_chosen - policy_rejected) - γ) on mean log-probs; ref_* are not read.

    γ is `target_margin`, which β does not scale (HALOs takes γ/β instead). β multiplies nats a token, so it
    is about 2, not 0.1. Meng et al. 2024, arXiv:2405.14734, Eq. 6. Differs from the paper: nothing.

    >>> z = torch.zeros(1); simpo_loss(z - 1, z - 2, None, None, beta=2.0, target_margin=0.5)  # -log σ(1.5)
    tensor([0.2014])
    """
    check_parameters(beta=beta, target_margin=target_margin)
    check_scores(policy_chosen=policy_chosen, policy_rejected=policy_rejected)
    return -F.logsigmoid(beta * (policy_chosen - policy_rejected) - target_margin)


def orpo_loss(policy_chosen, policy_rejected, ref_chosen, ref_rejected, odds_weight):
    """ORPO: -m_w - λ log σ(logit p_w - logit p_l), m a mean log-prob, p = exp(m), λ = `odds_weight`.

    It fine-tunes on the chosen and learns the preference in one stage; ref_* are not read. Hong et al. 2024,
    arXiv:2403.07691, Eq. 6-7. The first term covers only the agent's tokens (as in LLaMA-Factory; TRL's
    includes the prompt). Differs from the paper: the first term, too, is a mean for each trajectory.

    >>> m = torch.tensor([0.5, 0.25]).log()
    >>> orpo_loss(m[:1], m[1:], None, None, odds_weight=1.0)  # log 2 - log σ(log 3) = log 2 + log 4/3
    tensor([0.9808])
    """
    check_parameters(odds_weight=odds_weight)
    check_scores(policy_chosen=policy_chosen, policy_rejected=policy_rejected)
    return -policy_chosen - odds_weight * F.logsigmoid(
        log_odds(policy_chosen) - log_odds(policy_rejected)
    )


def log_odds(mean_logp: Tensor) -> Tensor:
    """logit(p) = log p - log(1 - p) of p = exp(mean_logp), elementwise.

    >>> log_odds(torch.tensor([0.5, 0.25]).log())  # odds 1:1 and 1:3
    tensor([ 0.0000, -1.0986])
    """
    # where the model is certain, mean_logp is 0 in float32: the odds are infinite, the gradient nan
    mean_logp = mean_logp.clamp(max=-1e-12)
    return mean_logp - torch.log(
        -torch.expm1(mean_logp)
    )  # log1p(-exp(x)) would be -inf for x near 0


def kto_loss(
    policy_chosen,
    policy_rejected,
    ref_chosen,
    ref_rejected,
    beta,
    desirable_weight,
    undesirable_weight,
    baseline,
):
    """KTO: the mean of λ_D σ(β (z₀ - r_w)) and λ_U σ(β (r_l - z₀)), r = policy - ref.

    Each side is judged alone against the baseline z₀: the chosen as desirable, the rejected as undesirable.
    Each costs λ - value(r), in [0, λ]. z₀ is `baseline`, a float or a () tensor; it gets no gradient.
    Ethayarajh et al. 2024, arXiv:2402.01306, section 4.1. Differs from the paper: there are as many desirable
    as undesirable examples.

    >>> z = torch.zeros(1); kto_loss(z + 1, z, z, z, 1.0, 1.0, 1.0, baseline=0.0)  # (σ(-1) + σ(0)) / 2
    tensor([0.3845])
    """
    check_parameters(
        beta=beta, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight
    )
    check_scores(
        policy_chosen=policy_chosen,
        policy_rejected=policy_rejected,
        ref_chosen=ref_chosen,
        ref_rejected=ref_rejected,
    )
    if isinstance(baseline, Tensor):
        baseline = baseline.detach()
    else:
        check_parameters(baseline=baseline)
    desirable = desirable_weight * torch.sigmoid(beta * (baseline - (policy_chosen - ref_chosen)))
    undesirable = undesirable_weight * torch.sigmoid(
        beta * ((policy_rejected - ref_rejected) - baseline)
    )
    return (desirable + undesirable) / 2


def kto_baseline(policy: Tensor, ref: Tensor) -> Tensor:
    """KTO's baseline z₀ = max(0, mean(policy - ref)), (B,) scores -> (), without gradient.

    It replaces KL(policy ‖ reference), which would need completions sampled from the policy. The scores are
    those of prompts with completions of *other* prompts: biased, but cheap. Ethayarajh et al. 2024, section 4.1.

    >>> kto_baseline(torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -2.0]))
    tensor(0.5000)
    """
    return (policy - ref).mean().clamp(min=0).detach()


def dpop_loss(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta, penalty_weight):
    """DPO-positive: -log σ(β (h - λ max(0, ref_chosen - policy_chosen))), so that the chosen may not fall.

    DPO allows both log-probs to fall if the rejected falls faster. Here the margin loses λ = `penalty_weight`
    times what the chosen lost against the reference. Pal et al. 2024 (Smaug), arXiv:2402.13228, Eq. 3, with
    the penalty inside the sigmoid (PaddleNLP does so, other code does not). Differs from the paper: nothing.

    >>> z = torch.zeros(1); dpop_loss(z - 1, z - 3, z, z, beta=1.0, penalty_weight=2.0)  # h = 2, penalty 2
    tensor([0.6931])
    """
    check_parameters(beta=beta, penalty_weight=penalty_weight)
    h = log_ratio_gap(policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    # clamp, not relu: its slope at 0, where policy = reference, is 1, so the guard acts from the first step
    return -F.logsigmoid(beta * (h - penalty_weight * (ref_chosen - policy_chosen).clamp(min=0)))


def nll_term(policy_chosen_mean: Tensor, alpha: float) -> Tensor:
    """-α · mean log π of the chosen, (P,) -> (P,): added to a loss, it keeps the chosen log-prob from falling.

    It takes mean log-probs (`mean_weights`), even beside a loss that reads sums. DPO with this term is the
    loss of Iterative RPO: Pang et al. 2024, arXiv:2404.19733, Eq. 1. Differs from the paper: nothing.

    >>> nll_term(torch.tensor([-0.5]), alpha=2.0)
    tensor([1.])
    """
    check_parameters(alpha=alpha)
    check_scores(policy_chosen_mean=policy_chosen_mean)
    return -alpha * policy_chosen_mean
