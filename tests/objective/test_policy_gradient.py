"""The laws of policy gradients and of reward models."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minidpo.objective.losses import advantage_weights, dpo_loss
from minidpo.objective.policy_gradient import (
    adapted_coefficient,
    clipped_loss,
    entropy,
    gae,
    group_advantages,
    kl_k1,
    kl_k3,
    state_advantages,
    value_loss,
)
from minidpo.objective.reward_model import (
    bradley_terry_loss,
    calibration_error,
    reliability,
    step_reward_loss,
)

DOUBLE = torch.float64
unit = st.floats(0, 1)
rewards = st.floats(-10, 10, allow_subnormal=False)
logps = st.floats(-20, 0)
seeds = st.integers(0, 2**32 - 1)
bands = st.floats(0, 0.9)


@st.composite
def grouped(draw, elements=rewards):
    """Rewards of some groups, and which group each is of, mixed up."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    group = torch.tensor(
        draw(st.permutations([g for g, size in enumerate(sizes) for _ in range(size)]))
    )
    reward = torch.tensor(
        draw(st.lists(elements, min_size=len(group), max_size=len(group))), dtype=DOUBLE
    )
    return reward, group


def tensor(*numbers):
    return torch.tensor(numbers, dtype=DOUBLE)


# Advantages


@given(grouped(), unit)
def test_a_state_seen_once_adds_nothing_and_weight_0_is_the_episodes_advantage(case, weight):
    reward, group = case
    advantage, turns = (
        group_advantages(reward, group),
        torch.arange(len(reward)).repeat_interleave(2),
    )
    returns, alone = reward[turns], torch.arange(len(turns))
    assert torch.equal(state_advantages(advantage, turns, returns, alone, weight), advantage[turns])
    assert torch.equal(
        state_advantages(advantage, turns, returns, alone // 3, 0.0), advantage[turns]
    )


def test_of_two_actions_in_one_state_the_one_that_solved_gains_and_the_sooner_more():
    advantage = state_advantages(
        tensor(0, 0, 0),
        torch.arange(3),
        tensor(0.9, 0.5, 0.0),
        torch.zeros(3, dtype=torch.int64),
        weight=1.0,
    )
    torch.testing.assert_close(advantage, tensor(0.9, 0.5, 0.0) - 1.4 / 3)


# Returns and values


@given(st.lists(st.tuples(rewards, rewards), min_size=1, max_size=8), unit, unit)
def test_gae_is_the_sum_that_the_paper_writes(steps, gamma, lam):
    reward, value = tensor(*(r for r, _ in steps)), tensor(*(v for _, v in steps))
    delta = gae(reward, value, gamma, 0.0)
    written = tensor(
        *(
            sum((gamma * lam) ** (k - t) * float(delta[k]) for k in range(t, len(steps)))
            for t in range(len(steps))
        )
    )
    torch.testing.assert_close(gae(reward, value, gamma, lam), written, rtol=1e-7, atol=1e-7)


@given(rewards, rewards, rewards, unit)
def test_a_value_gains_nothing_by_leaving_the_band(value, old, returns, clip):
    loss = value_loss(tensor(value), tensor(old), tensor(returns), clip)
    plain = value_loss(tensor(value), tensor(value), tensor(returns), clip)
    assert loss >= plain and math.isclose(plain, (value - returns) ** 2 / 2, abs_tol=1e-12)
    if abs(value - old) <= clip:
        torch.testing.assert_close(loss, plain, rtol=1e-9, atol=1e-9)
    edge = min(max(value, old - clip), old + clip)
    assert math.isclose(
        loss, max((value - returns) ** 2, (edge - returns) ** 2) / 2, rel_tol=1e-9, abs_tol=1e-9
    )


# PPO's ratio


def slope(logp, old, advantage, low, high):
    """The derivative of the loss by logp."""
    leaf = tensor(logp).requires_grad_()
    clipped_loss(leaf, tensor(old), tensor(advantage), low, high).sum().backward()
    return leaf.grad.item()


@given(logps, st.floats(-2, 2), rewards, bands, bands)
def test_clipping_changes_nothing_inside_and_removes_outside_only_the_side_that_is_pushed_to(
    logp, step, advantage, low, high
):
    ratio = math.exp((logp + step) - logp)
    if min(abs(ratio - (1 - low)), abs(ratio - (1 + high))) < 1e-9:
        return  # the edge itself has two derivatives
    gone = (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)
    expected = 0.0 if gone else -advantage * ratio
    assert math.isclose(
        slope(logp + step, logp, advantage, low, high), expected, rel_tol=1e-9, abs_tol=1e-12
    )


# KL


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=5), seeds)
def test_both_estimators_have_kl_as_their_expectation_and_k3_is_never_negative(logits, seed):
    p, draw = torch.log_softmax(tensor(*logits), 0), torch.Generator().manual_seed(seed)
    q = torch.log_softmax(p + torch.randn(len(p), generator=draw, dtype=DOUBLE), 0)
    kl = (p.exp() * (p - q)).sum()
    for estimator in (kl_k1, kl_k3):
        torch.testing.assert_close((p.exp() * estimator(p, q)).sum(), kl, rtol=1e-9, atol=1e-12)
    assert (kl_k3(p, q) >= 0).all()
    assert not kl_k3(p, p).any()


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=5), seeds)
def test_whoever_wrote_the_tokens_the_entropy_is_the_policys_in_expectation(logits, seed):
    p, draw = torch.log_softmax(tensor(*logits), 0), torch.Generator().manual_seed(seed)
    q = torch.log_softmax(p + torch.randn(len(p), generator=draw, dtype=DOUBLE), 0)
    true = -(p.exp() * p).sum()
    for writer in (p, q):
        torch.testing.assert_close(
            (writer.exp() * entropy(p, writer)).sum(), true, rtol=1e-9, atol=1e-12
        )


# On a bandit whose expectations can be written down

BANDIT = st.integers(2, 5).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(-2, 2), min_size=n, max_size=n),
        st.lists(st.floats(-1, 1), min_size=n, max_size=n),
    )
)


@given(BANDIT, st.floats(0.2, 5))
def test_dpo_ppo_with_kl_and_rlhf_agree_on_pi_ref_times_exp_r_over_beta(bandit, beta):
    """At that policy, DPO's loss over pairs labelled by Bradley-Terry has no gradient, nor has the policy
    gradient of r - β·KL."""
    ref, reward = torch.log_softmax(tensor(*bandit[0]), 0), tensor(*bandit[1])
    best = torch.log_softmax(ref + reward / beta, 0)
    leaf = best.clone().requires_grad_()
    policy = torch.log_softmax(leaf, 0)
    i, j = torch.cartesian_prod(*[torch.arange(len(ref))] * 2).t()
    preferred = torch.sigmoid(reward[i] - reward[j])
    (preferred * dpo_loss(policy[i], policy[j], ref[i], ref[j], beta)).sum().backward()
    torch.testing.assert_close(leaf.grad, torch.zeros_like(ref), rtol=0, atol=1e-9)
    leaf = best.clone().requires_grad_()
    policy = torch.log_softmax(leaf, 0)
    paid = reward - beta * kl_k1(best, ref)
    (
        best.exp() * clipped_loss(policy, best, paid - (best.exp() * paid).sum(), 0.2, 0.2)
    ).sum().backward()
    torch.testing.assert_close(leaf.grad, torch.zeros_like(ref), rtol=0, atol=1e-9)


@given(st.floats(0.01, 10), st.floats(0, 10), st.floats(0.01, 10))
def test_the_weight_of_a_kl_moves_towards_its_target_by_2_percent_at_most(weight, kl, target):
    adapted = adapted_coefficient(weight, kl, target)
    assert (adapted > weight) == (kl > target) or abs(kl / target - 1) < 1e-9
    assert 0.98 - 1e-12 <= adapted / weight <= 1.02 + 1e-12
    near = adapted_coefficient(weight, target * 1.1, target)
    assert math.isclose(near, weight * 1.01, rel_tol=1e-9)


# Reward models


def test_a_bin_holds_the_pairs_of_like_confidence_and_says_how_many_are_right():
    """Confidences 1, 1, 1 (the first two right) and sigmoid(0.5) = 0.62 (right), in bins of 0.1 from 0.5 on."""
    chosen, rejected = tensor(1000, 50, 0, 0.5), tensor(0, 0, 50, 0)
    found = reliability(chosen, rejected)
    sure = torch.sigmoid(tensor(0.5))[0]
    wanted = tensor(0, sure, 0, 0, 3, 0, 1, 0, 0, 2, 0, 1, 0, 0, 3).view(3, 5)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(calibration_error(chosen, rejected), (2 - sure) / 4)
    assert reliability(chosen, rejected, bins=2).shape == (3, 2)
    assert calibration_error(chosen, rejected, bins=1) != calibration_error(chosen, rejected)


@given(st.lists(logps, min_size=4, max_size=4), st.floats(0.01, 5))
def test_dpo_is_bradley_terry_on_its_implicit_reward(four, beta):
    pc, pr, rc, rr = map(tensor, four)
    torch.testing.assert_close(
        bradley_terry_loss(beta * (pc - rc), beta * (pr - rr)),
        dpo_loss(pc, pr, rc, rr, beta),
        rtol=1e-9,
        atol=1e-12,
    )


def test_a_reward_of_steps_is_least_at_the_mean_of_its_values():
    values = tensor(0, 0, 1, 1, 1)
    losses = [step_reward_loss(torch.full_like(values, r), values).sum() for r in (0.55, 0.6, 0.65)]
    assert losses[1] < losses[0] and losses[1] < losses[2]


# Bad input


@pytest.mark.parametrize(
    "call",
    [
        lambda: group_advantages(tensor(math.nan, 0), torch.tensor([0, 0])),
        lambda: gae(tensor(0), tensor(0), 1.5, 0.5),
        lambda: gae(tensor(0), tensor(0), 0.5, -0.5),
        lambda: clipped_loss(tensor(0), tensor(0), tensor(1), 1.0, 0.2),
        lambda: value_loss(tensor(0), tensor(0), tensor(0), math.nan),
        lambda: bradley_terry_loss(tensor(0), tensor(0), -1.0),
        lambda: advantage_weights(tensor(math.nan), torch.tensor([0]), 1.0),
    ],
)
def test_what_makes_no_loss_is_refused(call):
    with pytest.raises(ValueError, match="must be"):
        call()


@pytest.mark.parametrize(
    "loss, count",
    [
        (entropy, 2),
        (kl_k1, 2),
        (kl_k3, 2),
        (bradley_terry_loss, 2),
        (calibration_error, 2),
        (step_reward_loss, 2),
        (lambda *three: value_loss(*three, 0.2), 3),
        (lambda *three: clipped_loss(*three, 0.2, 0.2), 3),
    ],
)
def test_a_number_that_is_not_finite_is_refused_instead_of_giving_nan(loss, count):
    for at in range(count):
        inputs = [tensor(math.nan if i == at else 0) for i in range(count)]
        with pytest.raises(ValueError, match="must be finite, got nan"):
            loss(*inputs)
