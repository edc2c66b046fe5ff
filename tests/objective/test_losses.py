"""What the kit (test_loss_laws) and the libraries (test_losses_parity) do not ask of losses and turn weights."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minidpo.objective.losses import (
    advantage_weights,
    dpo_loss,
    sft_loss,
)
from minidpo.objective.scores import dmpo_weights, scores, sum_weights, turn_weights

gammas = st.one_of(st.sampled_from([0.0, 1e-300, 0.5, 1 - 1e-12, 1.0]), st.floats(0, 1))
seeds = st.integers(0, 2**32 - 1)


# DPO


def test_scores_of_different_shapes_are_not_broadcast_to_all_pairs_of_pairs():
    for other in (torch.zeros(1), torch.zeros(3, 1), torch.zeros(())):
        with pytest.raises(AssertionError, match=r"each must be \(P,\)"):
            dpo_loss(torch.zeros(3), torch.zeros(3), torch.zeros(3), other, beta=0.1)
    with pytest.raises(AssertionError, match=r"each must be \(P,\)"):
        dpo_loss(*[torch.zeros(3, 1)] * 4, beta=0.1)


# Supervised fine-tuning


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


@pytest.mark.parametrize("n_turns, gamma", [(0, 0.5), (3, -0.1), (3, 1.1), (3, math.nan)])
def test_turn_weights_outside_their_range_are_refused(n_turns, gamma):
    with pytest.raises(ValueError, match="n_turns must be|gamma must be"):
        turn_weights(n_turns, gamma)


# Imitation weighed by step values


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=1), st.floats(0.1, 5))
def test_imitation_by_advantage_weighs_exp_of_it_over_the_temperature_and_1_on_average(
    episodes, temperature
):
    reward = torch.tensor([float(r) for r, _ in episodes], dtype=torch.float64)
    group = torch.tensor([g for _, g in episodes])
    weight = advantage_weights(reward, group, temperature)
    assert math.isclose(weight.mean(), 1, rel_tol=1e-9)
    means = torch.stack([reward[group == g].mean() for g in group])
    ratio = weight.log() - (reward - means) / temperature
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=0, atol=1e-9)
    for bad in (0.0, math.nan):
        with pytest.raises(ValueError, match="temperature must be"):
            advantage_weights(reward, group, bad)
