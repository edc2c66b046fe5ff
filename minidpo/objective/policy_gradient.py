"""Policy gradients: tokens of the agent's own rollouts become more or less probable by their advantage.

REINFORCE is -Σ A·logp, a score with W = -A (`objective/scores`). PPO and GRPO replace logp by a ratio and
clip it, so that several steps on the same rollouts stay near the policy that played them. GRPO, RLOO and
GiGPO differ only in the advantage; PPO's comes from a value function (`gae`).

B counts episodes, S turns, N the agent's tokens. Log-probs are in nats.
"""

import torch
from torch import Tensor

from minidpo.objective.losses import check_scores, group_means
from minidpo.objective.scores import check_parameters


def group_advantages(reward: Tensor, group: Tensor, scale: bool = True) -> Tensor:
    """How much better each one did than its group: A = (r - mean) / std, or without the std.

    reward (B,) float; group (B,) int64, equal for what may be compared: the episodes of an instance, or the
    actions tried in one state. Returns (B,): 0 in a group without variance, such as a group of one.
    Shao et al. 2024 (GRPO), arXiv:2402.03300, section 4.1.2. scale=False: Liu et al. 2025 (Dr. GRPO),
    arXiv:2503.20783, because dividing by the std makes easy and hard groups count more than mixed ones.
    Raises ValueError if a reward is not finite. Differs from the paper: the std is that of a sample (n - 1),
    and nothing is added to it (TRL adds 1e-4).

    >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 0, 1]))
    tensor([ 1.1547, -0.5774, -0.5774,  0.0000])
    """
    check_scores(reward=reward)
    count = torch.bincount(group).to(reward.dtype)
    above = reward - group_means(reward, group)[group]
    low, high = (
        torch.zeros_like(count).scatter_reduce(0, group, reward, kind, include_self=False)
        for kind in ("amin", "amax")
    )
    spread = (high - low)[group]  # not `above`: the mean of equal numbers may be off by a bit
    if scale:
        above = above / spread  # within [-1, 1], because the squares of tiny rewards would be 0
        variance = group_means(above**2, group) * count / (count - 1)
        above = above / variance.sqrt()[group]
    return torch.where(spread == 0, 0.0, above)  # a group of one, too


def leave_one_out_advantages(reward: Tensor, group: Tensor) -> Tensor:
    """How much better each one did than the others of its group: A = r - the mean of the others.

    Arguments and error are those of `group_advantages`; a group of one gets 0. The baseline does not depend
    on the episode itself, so the gradient stays unbiased. Ahmadian et al. 2024 (RLOO), arXiv:2402.14740,
    section 2.3. Differs from the paper: nothing.

    >>> leave_one_out_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 0, 1]))
    tensor([ 1.0000, -0.5000, -0.5000,  0.0000])
    """
    count = torch.bincount(group).to(reward.dtype)
    return group_advantages(reward, group, scale=False) * (count / (count - 1).clamp(min=1))[group]


def state_advantages(
    episode_advantage: Tensor, episode: Tensor, step_return: Tensor, state: Tensor, weight: float
) -> Tensor:
    """An advantage for each turn: its episode's, plus `weight` times its own among the turns in the same state.

    episode_advantage (B,); episode (S,) int64, the episode of each turn; step_return (S,), the discounted
    reward from the turn on; state (S,) int64, equal for the same page in the same instance. Returns (S,). A
    state seen once adds nothing. Feng et al. 2025 (GiGPO), arXiv:2505.10978, Eq. 4-8, in the variant without std;
    weight is its ω. Raises ValueError unless weight is finite and >= 0. Differs from the paper: nothing.

    >>> state_advantages(torch.tensor([0.5, -0.5]), torch.tensor([0, 0, 1]), torch.tensor([0.9, 1.0, 0.0]),
    ...                  torch.tensor([0, 1, 0]), weight=1.0)
    tensor([ 0.9500,  0.5000, -0.9500])
    """
    check_parameters(weight=weight)
    return episode_advantage[episode] + weight * group_advantages(step_return, state, scale=False)


def gae(reward: Tensor, value: Tensor, gamma: float, lam: float) -> Tensor:
    """Generalised advantage estimates of one episode: A_t = Σₗ (γλ)ˡ δ_{t+l}, δ_t = r_t + γ·V_{t+1} - V_t.

    reward (S,), paid after each turn; value (S,), V of the state before it; after the last turn V is 0.
    Returns (S,). λ = 0: the TD error; λ = 1: discounted returns minus values. Schulman et al. 2016,
    arXiv:1506.02438, Eq. 16. Raises ValueError unless γ and λ lie within [0, 1]. Differs from the paper:
    nothing.

    >>> gae(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.5]), gamma=1.0, lam=0.0)
    tensor([0.0000, 0.5000])
    """
    check_parameters(gamma=gamma, lam=lam)
    check_scores(reward=reward, value=value)
    delta = reward + gamma * torch.cat([value[1:], value.new_zeros(1)]) - value
    advantage = torch.zeros_like(delta)
    following = delta.new_zeros(())
    for t in reversed(range(len(delta))):
        advantage[t] = following = delta[t] + gamma * lam * following
    return advantage


def clipped_loss(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, low: float, high: float
) -> Tensor:
    """PPO's loss per token: -min(ρA, clip(ρ, 1-low, 1+high)·A), ρ = exp(logp - old_logp).

    All (N,): log π of the policy, log π of the policy that played, and A of each token. Returns (N,). The
    gradient is 0 where ρ left the band on the side that A pushes to; at ρ = 1 it is REINFORCE's, -A·∇logp.
    Schulman et al. 2017, arXiv:1707.06347, Eq. 7, low = high = ε; a larger high: Yu et al. 2025 (DAPO),
    arXiv:2503.14476. Raises ValueError unless 0 <= low < 1 and high is finite and >= 0. Differs from the
    paper: nothing.

    >>> logp = torch.tensor([1.5, 1.5]).log()
    >>> clipped_loss(logp, torch.zeros(2), torch.tensor([1.0, -1.0]), low=0.2, high=0.2)
    tensor([-1.2000,  1.5000])
    """
    check_parameters(low=low, high=high)
    check_scores(logp=logp, old_logp=old_logp, advantage=advantage)
    ratio = (logp - old_logp).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def kl_k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """KL(policy || reference) from tokens that the policy sampled, unbiased: logp - ref_logp. (N,) -> (N,).

    For a single token it may be negative. k1 of Schulman 2020, "Approximating KL divergence".

    >>> kl_k1(torch.tensor([-1.0]), torch.tensor([-3.0]))
    tensor([2.])
    """
    check_scores(logp=logp, ref_logp=ref_logp)
    return logp - ref_logp


def kl_k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """KL as `kl_k1`, with less variance and never negative: exp(d) - d - 1, d = ref_logp - logp. (N,).

    k3 of Schulman 2020; in GRPO's loss (arXiv:2402.03300, Eq. 4). Its gradient is (1 - exp(d))·∇logp.

    >>> kl_k3(torch.tensor([-1.0]), torch.tensor([-3.0]))
    tensor([1.1353])
    """
    d = -kl_k1(logp, ref_logp)
    return torch.expm1(d) - d


def entropy(logp: Tensor, old_logp: Tensor) -> Tensor:
    """The policy's entropy a token, in nats, in states that another policy reached: -ρ·logp. (N,) -> (N,).

    ρ = exp(logp - old_logp), 1 for the policy's own tokens. It is only logged. Importance sampling, from no paper.

    >>> entropy(torch.tensor([-1.0]), torch.tensor([-1.0]))
    tensor([1.])
    """
    check_scores(logp=logp, old_logp=old_logp)
    return -(logp - old_logp).exp() * logp


def value_loss(value: Tensor, old_value: Tensor, returns: Tensor, clip: float) -> Tensor:
    """PPO's loss of a value function per turn: max((V - R)², (V_clipped - R)²) / 2, all (S,) -> (S,).

    V_clipped is V, clamped to within `clip` of old_value, with which the advantages were computed. Raises
    ValueError unless clip is finite and >= 0. Differs from the paper (arXiv:1707.06347): values are clipped, as
    in its authors' code.

    >>> value_loss(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1.0]), clip=0.2)
    tensor([0.3200])
    """
    check_parameters(clip=clip)
    check_scores(value=value, old_value=old_value, returns=returns)
    near = old_value + (value - old_value).clamp(-clip, clip)
    return torch.maximum((value - returns) ** 2, (near - returns) ** 2) / 2


def adapted_coefficient(coefficient: float, kl: float, target: float) -> float:
    """The next weight β of a KL that should stay at a target: β(1 + K·e), e = clip(KL / target - 1, -0.2, 0.2).

    kl: measured under β, in the unit of the target. Ziegler et al. 2019, arXiv:1909.08593, section 2.2, with
    their K = 0.1. Differs from the paper: nothing; `learning/ppo` adapts after each step.

    >>> round(adapted_coefficient(0.05, kl=0.03, target=0.02), 6)  # at most 2 % a time
    0.051
    """
    return coefficient * (1 + 0.1 * min(max(kl / target - 1, -0.2), 0.2))
