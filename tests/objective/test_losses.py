"""The laws of DPO, of DMPO's turn weights, and of what is logged. Parity: test_losses_parity."""

import doctest
import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minidpo.objective.losses
from minidpo.objective.losses import (
    dpo_loss,
    log_ratio_gap,
    preference_metrics,
    sft_loss,
    value_weights,
)
from minidpo.objective.scores import dmpo_weights, scores, sum_weights, turn_weights

SIDES = ("policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected")

logps = st.floats(-1000, 0)
quadruples = st.tuples(logps, logps, logps, logps)
betas = st.floats(1e-3, 5)
gaps = st.floats(-100, 100)
near_1 = st.floats(5, 15).map(lambda digits: 1 - 10**-digits)
gammas = st.one_of(st.sampled_from([0.0, 1e-300, 0.5, 1 - 1e-12, 1.0]), st.floats(0, 1))
seeds = st.integers(0, 2**32 - 1)


def f64(*numbers):
    return [torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in numbers]


def at_gap(h, beta, dtype=torch.float64):
    """The DPO loss of one pair as a function of h, and its derivative there."""
    h = torch.tensor([h], dtype=dtype, requires_grad=True)
    zero = torch.zeros_like(h)
    loss = dpo_loss(h, zero, zero, zero, beta)
    loss.backward()
    return loss.item(), h.grad.item()


# DPO


@given(logps, logps, betas)
def test_dpo_is_exactly_log_2_where_the_policy_is_the_reference(chosen, rejected, beta):
    for dtype in (torch.float64, torch.float32):
        chosen_, rejected_ = (
            torch.tensor([chosen], dtype=dtype),
            torch.tensor([rejected], dtype=dtype),
        )
        loss = dpo_loss(chosen_, rejected_, chosen_, rejected_, beta)
        assert torch.equal(loss, torch.tensor([math.log(2)], dtype=dtype))


@given(quadruples, betas, st.floats(-1000, 1000))
def test_dpo_ignores_a_shared_prompt_constant(quadruple, beta, constant):
    """Added to both policy or both reference log-probs: the partition function cancels."""
    pc, pr, rc, rr = f64(*quadruple)
    loss = dpo_loss(pc, pr, rc, rr, beta)
    for moved in (
        dpo_loss(pc + constant, pr + constant, rc, rr, beta),
        dpo_loss(pc, pr, rc + constant, rr + constant, beta),
    ):
        torch.testing.assert_close(moved, loss, rtol=1e-9, atol=1e-9)


@given(quadruples, betas)
def test_the_probabilities_of_a_pair_and_of_its_swap_sum_to_1(quadruple, beta):
    pc, pr, rc, rr = f64(*quadruple)
    probability = torch.exp(-dpo_loss(pc, pr, rc, rr, beta)) + torch.exp(
        -dpo_loss(pr, pc, rr, rc, beta)
    )
    torch.testing.assert_close(probability, torch.ones_like(pc), rtol=1e-12, atol=0)


@given(quadruples, betas)
def test_the_pull_on_both_sides_is_opposite_and_beta_sigmoid_of_minus_beta_h(quadruple, beta):
    inputs = f64(*quadruple)
    dpo_loss(*inputs, beta).backward()
    h = (quadruple[0] - quadruple[2]) - (quadruple[1] - quadruple[3])
    pull = beta * torch.sigmoid(torch.tensor([-beta * h], dtype=torch.float64))
    assert (pull <= beta).all()
    for tensor, sign in zip(inputs, (-1, 1, 1, -1), strict=True):
        torch.testing.assert_close(tensor.grad, sign * pull, rtol=1e-9, atol=1e-300)


@given(gaps, gaps, betas)
def test_dpo_falls_in_h_and_is_convex(a, b, beta):
    (low, slope_low), (high, slope_high) = at_gap(min(a, b), beta), at_gap(max(a, b), beta)
    middle, _ = at_gap((a + b) / 2, beta)
    assert high <= low and middle <= (low + high) / 2 + 1e-12
    assert slope_low <= slope_high <= 0


@given(gaps, betas)
def test_beta_only_scales_h(h, beta):
    assert math.isclose(at_gap(h, beta)[0], at_gap(beta * h, 1.0)[0], rel_tol=1e-12)


@given(st.floats(-1000, 1000), st.floats(1e-3, 50))
def test_dpo_is_finite_in_fp32_for_beta_h_up_to_50000(h, beta):
    loss, slope = at_gap(h, beta, torch.float32)
    assert 0 <= loss < math.inf and -beta * (1 + 1e-6) <= slope <= 0
    if (
        beta * h < -20
    ):  # far on the wrong side the loss is the line -β·h, not a constant and not infinite
        assert math.isclose(loss, -beta * h, rel_tol=1e-6) and math.isclose(
            slope, -beta, rel_tol=1e-6
        )


@pytest.mark.parametrize("beta", [0.0, -0.1, math.inf, math.nan])
def test_a_beta_that_makes_no_loss_is_refused(beta):
    with pytest.raises(ValueError, match=f"beta must be finite and > 0, got {beta}"):
        at_gap(1.0, beta)


@pytest.mark.parametrize("name", SIDES)
@pytest.mark.parametrize("odd", [math.nan, -math.inf, math.inf])
def test_a_log_prob_that_is_not_finite_is_refused_by_name_instead_of_giving_nan(name, odd):
    inputs = {key: torch.zeros(3) for key in SIDES}
    inputs[name][1] = odd
    with pytest.raises(ValueError, match=f"{name} must be finite, got {odd}; if a model"):
        log_ratio_gap(**inputs)


def test_scores_of_different_shapes_are_not_broadcast_to_all_pairs_of_pairs():
    for other in (torch.zeros(1), torch.zeros(3, 1), torch.zeros(())):
        with pytest.raises(AssertionError, match=r"each must be \(P,\)"):
            dpo_loss(torch.zeros(3), torch.zeros(3), torch.zeros(3), other, beta=0.1)
    with pytest.raises(AssertionError, match=r"each must be \(P,\)"):
        dpo_loss(*[torch.zeros(3, 1)] * 4, beta=0.1)


# Supervised fine-tuning


@given(seeds, st.integers(1, 12), st.integers(1, 12))
def test_micro_batches_of_sft_add_up_to_one_batch_in_value_and_gradient(seed, B, size):
    g = torch.Generator().manual_seed(seed)
    n_tokens = int(torch.randint(1, 50, (B,), generator=g).sum())
    policy_logp = (-100 * torch.rand(B, generator=g, dtype=torch.float64)).requires_grad_()
    whole = sft_loss(policy_logp, n_tokens)
    parts = sum(sft_loss(part, n_tokens) for part in policy_logp.split(size))
    torch.testing.assert_close(parts, whole)
    (gradient,) = torch.autograd.grad(parts, policy_logp)
    torch.testing.assert_close(gradient, torch.full_like(gradient, -1 / n_tokens))


def test_sft_is_the_mean_over_tokens_not_over_trajectories():
    """Log-probs -1 -1 -1 and -5: the tokens' mean is 8/4 = 2, the trajectories' would be (1 + 5)/2 = 3."""
    segment, mask = torch.tensor([0, 0, 0, 1]), torch.ones(4, dtype=torch.bool)
    policy_logp = scores(
        torch.tensor([-1.0, -1, -1, -5]), segment, sum_weights(mask, segment, 2), 2
    )
    assert sft_loss(policy_logp, n_tokens=4).item() == 2.0


def test_sft_refuses_a_batch_without_tokens_and_a_log_prob_that_is_not_finite():
    with pytest.raises(ValueError, match="n_tokens must be at least 1, got 0"):
        sft_loss(torch.zeros(0), 0)
    with pytest.raises(ValueError, match="policy_logp must be finite, got nan"):
        sft_loss(torch.tensor([-1.0, math.nan]), 2)


# DMPO


@given(st.integers(1, 30), gammas)
def test_the_first_turn_weighs_1_and_later_ones_less_and_less(n_turns, gamma):
    phi = turn_weights(n_turns, gamma).tolist()
    assert len(phi) == n_turns and math.isclose(phi[0], 1, rel_tol=1e-15)
    assert all(0 <= later <= earlier for earlier, later in zip(phi, phi[1:], strict=False))
    if gamma > 1e-3:  # below, high powers of gamma are equal: both 0
        assert all(later < earlier for earlier, later in zip(phi, phi[1:], strict=False))


@given(st.integers(1, 30), st.one_of(st.floats(1e-300, 1, exclude_max=True), near_1))
def test_turn_weights_are_the_normalised_difference_of_powers(n_turns, gamma):
    """(γᵗ - γᴺ) / (1 - γᴺ) in exact fractions, to the 13th digit."""
    exact = Fraction(gamma)
    expected = [float((exact**t - exact**n_turns) / (1 - exact**n_turns)) for t in range(n_turns)]
    torch.testing.assert_close(
        turn_weights(n_turns, gamma),
        torch.tensor(expected, dtype=torch.float64),
        rtol=1e-13,
        atol=1e-300,
    )


@given(st.integers(1, 30), near_1)
def test_turn_weights_tend_to_equal_steps_at_gamma_1_and_to_the_first_turn_alone_at_0(
    n_turns, gamma
):
    steps = torch.tensor([(n_turns - t) / n_turns for t in range(n_turns)], dtype=torch.float64)
    assert torch.equal(turn_weights(n_turns, 1.0), steps)
    assert (turn_weights(n_turns, gamma) - steps).abs().max() < n_turns * (1 - gamma) + 1e-14
    first = torch.zeros(n_turns, dtype=torch.float64)
    first[0] = 1
    assert torch.equal(turn_weights(n_turns, 0.0), first)
    assert (turn_weights(n_turns, 1 - gamma) - first).abs().max() <= 1.1 * (1 - gamma)


@given(seeds, st.integers(0, 20), st.integers(1, 4), gammas)
def test_each_token_has_the_weight_of_its_turn_among_the_turns_of_its_own_trajectory(
    seed, T, n, gamma
):
    g = torch.Generator().manual_seed(seed)
    segment = torch.cat([torch.arange(n), torch.randint(n, (T,), generator=g)])
    turn = torch.randint(5, (n + T,), generator=g)
    mask = torch.cat([torch.ones(n, dtype=torch.bool), torch.rand(T, generator=g) < 0.5])
    weight = dmpo_weights(mask, segment, n, turn, gamma)
    for i in range(n + T):
        own_turns = [int(turn[j]) for j in range(n + T) if mask[j] and segment[j] == segment[i]]
        expected = turn_weights(max(own_turns) + 1, gamma)[turn[i]] if mask[i] else 0
        assert weight[i] == expected


@given(seeds, st.integers(1, 12), gammas)
def test_dmpo_of_single_turns_is_dpo(seed, T, gamma):
    mask = torch.rand(T, generator=torch.Generator().manual_seed(seed)) < 0.5
    mask[0] = True
    zeros = torch.zeros(T, dtype=torch.int64)
    torch.testing.assert_close(
        dmpo_weights(mask, zeros, 1, zeros, gamma), sum_weights(mask, zeros, 1), rtol=1e-15, atol=0
    )


def test_dmpo_weighs_an_early_mistake_more_than_a_late_one():
    """γ = 1/2, two turns: φ = (1, 1/3); so the policy's loss of 3 nats counts 3 in turn 0 and 1 in turn 1."""
    segment, turn = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
    weight = dmpo_weights(torch.ones(4, dtype=torch.bool), segment, 2, turn, gamma=0.5)
    result = scores(torch.tensor([-3.0, 0, 0, -3]), segment, weight, 2)
    torch.testing.assert_close(result, torch.tensor([-3.0, -1.0]))


@pytest.mark.parametrize("n_turns, gamma", [(0, 0.5), (3, -0.1), (3, 1.1), (3, math.nan)])
def test_turn_weights_outside_their_range_are_refused(n_turns, gamma):
    with pytest.raises(ValueError, match="n_turns must be|gamma must be"):
        turn_weights(n_turns, gamma)


def test_dmpo_refuses_a_trajectory_in_which_the_agent_wrote_nothing():
    with pytest.raises(ValueError, match="trajectory 1 of 2"):
        dmpo_weights(
            torch.tensor([True, False]), torch.tensor([0, 1]), 2, torch.tensor([0, 0]), 0.5
        )


# What is logged


@given(quadruples, betas)
def test_the_margin_is_beta_h_and_the_rewards_difference_and_decides_the_accuracy(quadruple, beta):
    inputs = f64(*quadruple)
    metrics = preference_metrics(*inputs, beta)
    assert torch.equal(metrics["margin"], beta * log_ratio_gap(*inputs).detach())
    torch.testing.assert_close(
        metrics["reward_chosen"] - metrics["reward_rejected"],
        metrics["margin"],
        rtol=1e-9,
        atol=1e-9,
    )
    assert metrics["accuracy"].item() == (metrics["margin"].item() > 0)
    assert not any(value.requires_grad for value in metrics.values())


@given(logps, logps, betas)
def test_before_the_first_step_rewards_margin_accuracy_and_mean_drop_are_exactly_0(
    chosen, rejected, beta
):
    metrics = preference_metrics(*f64(chosen, rejected, chosen, rejected), beta)
    for name in ("reward_chosen", "reward_rejected", "margin", "accuracy", "mean_drop"):
        assert metrics[name].item() == 0, name


def test_over_samples_of_the_reference_the_mean_drop_averages_to_their_kl():
    """Two outcomes, ref (3/4, 1/4) and policy (1/2, 1/2), weighted by how often ref samples each.

    Over pairs it is no KL: it is 0 where one side rises as far as the other falls.
    """
    ref, policy = torch.tensor([0.75, 0.25]).log(), torch.tensor([0.5, 0.5]).log()
    mean_drop = preference_metrics(policy, policy, ref, ref, beta=1.0)["mean_drop"]
    assert (ref.exp() * mean_drop).sum().item() == pytest.approx(
        0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    )
    assert preference_metrics(*f64(-1.0, -3.0, -2.0, -2.0), beta=1.0)["mean_drop"].item() == 0


def test_the_docstrings_examples_are_true():
    assert doctest.testmod(minidpo.objective.losses).failed == 0


# Imitation weighed by step values


@given(st.lists(st.integers(0, 8), min_size=2, max_size=7), st.integers(1, 50))
def test_a_steps_weight_is_its_values_ratio_whatever_their_scale_and_0_where_the_value_is_lost(
    counts, scale
):
    values = torch.tensor(counts, dtype=torch.float64) / 8
    weight = value_weights(values)
    assert len(weight) == len(values) - 1 and (weight >= 0).all() and weight.isfinite().all()
    torch.testing.assert_close(value_weights(values * scale), weight)
    for (before, after), w in zip(pairwise(values.tolist()), weight.tolist()):
        assert (w == 0) == (after == 0)
        assert w == pytest.approx(after / before if before else float(after > 0))
    assert (value_weights(torch.full((5,), 0.3)) == 1).all()


def test_weighted_by_values_the_agents_actions_become_those_of_its_successes():
    """In a state with three actions, by hand: π(a|s) · w is P(a | solved), and w is 1 on average."""
    policy, solves = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.0, 1.0])
    before = (policy * solves).sum()
    weighed = policy * torch.cat([value_weights(torch.stack([before, after])) for after in solves])
    torch.testing.assert_close(weighed, torch.tensor([1 / 3, 0.0, 2 / 3]))
    for bad in (torch.tensor([1.0, -0.5]), torch.tensor([math.nan, 1.0])):
        with pytest.raises(
            ValueError, match="value must be finite and >= 0|value must be finite, got nan"
        ):
            value_weights(bad)
