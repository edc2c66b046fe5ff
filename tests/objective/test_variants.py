"""What all losses have in common, and each variant's own law. Parity: test_losses_parity."""

import inspect
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minidpo.learning.loss_table import LOSSES, LossParameters
from minidpo.objective.variants import (
    cdpo_loss,
    kto_baseline,
    kto_loss,
    log_odds,
    nll_term,
)

SIDES = ("policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected")
EXAMPLE = {
    "beta": 0.1,
    "label_smoothing": 0.1,
    "target_margin": 0.5,
    "odds_weight": 0.1,
    "desirable_weight": 1.0,
    "undesirable_weight": 1.33,
    "penalty_weight": 5.0,
}

logps = st.floats(-1000, 0)
quadruples = st.tuples(logps, logps, logps, logps)
mean_logps = st.floats(-80, -1e-12)
betas = st.floats(1e-3, 5)
gaps = st.floats(-100, 100)
smoothings = st.floats(0, 0.49)
weights = st.floats(0, 10)


def f64(*numbers):
    return [torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in numbers]


def at_gap(loss, h, dtype=torch.float64, **parameters):
    """A loss of one pair as a function of h (the chosen's policy score moves), and its derivative there."""
    h = torch.tensor([h], dtype=dtype, requires_grad=True)
    zero = torch.zeros_like(h)
    value = loss(h, zero, zero, zero, **parameters)
    value.backward()
    return value.item(), h.grad.item()


def parameters_of(name):
    """A loss's floats, and KTO's baseline, which is measured and not chosen."""
    baseline = {"baseline": 0.25} if LOSSES[name].needs_baseline else {}
    return {parameter: EXAMPLE[parameter] for parameter in numbers_of(name)} | baseline


def numbers_of(name):
    """What the loss's function takes besides scores; gamma is of its scores' weights."""
    return {key: value for key, value in LOSSES[name].defaults.given().items() if key != "gamma"}


# What all have in common


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_takes_exactly_the_parameters_that_it_lists(name):
    entry = LOSSES[name]
    takes = list(inspect.signature(entry.function).parameters)
    assert takes[:4] == list(SIDES)
    assert set(takes[4:]) == set(numbers_of(name)) | (
        {"baseline"} if entry.needs_baseline else set()
    )
    assert entry.score in ("sum", "mean", "dmpo")
    assert ("gamma" in entry.defaults.given()) == (entry.score == "dmpo")


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_called_with_each_number_in_its_place(name):
    """Numbers that differ from each other, so that two in the wrong order would show."""
    generator, parameters = torch.Generator().manual_seed(1), parameters_of(name)
    four = [-torch.rand(5, generator=generator) - 0.1 for _ in SIDES]
    baseline = torch.tensor(parameters.pop("baseline")) if LOSSES[name].needs_baseline else None
    called = LOSSES[name].of_scores(LossParameters(**parameters), baseline)(*four)
    more = {} if baseline is None else {"baseline": baseline}
    assert torch.equal(called, LOSSES[name].function(*four, **parameters, **more))


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_refuses_a_parameter_outside_its_range(name):
    ones = [-torch.ones(1)] * 4
    bad = dict.fromkeys(numbers_of(name), (-0.1, math.inf, math.nan))
    bad["beta"] = (*bad.get("beta", ()), 0.0) if "beta" in bad else ()
    bad["label_smoothing"] = (-0.1, 0.5, 1.0, math.nan) if "label_smoothing" in bad else ()
    for parameter, values in bad.items():
        for value in values:
            with pytest.raises(ValueError, match=f"{parameter} must be .*, got {value}"):
                LOSSES[name].function(*ones, **{**parameters_of(name), parameter: value})


def test_ktos_baseline_and_the_nll_term_are_checked_too():
    ones = [-torch.ones(1)] * 4
    with pytest.raises(ValueError, match="baseline must be finite and >= 0, got -1"):
        kto_loss(*ones, 0.1, 1.0, 1.0, baseline=-1.0)
    with pytest.raises(ValueError, match="alpha must be finite and >= 0, got -1"):
        nll_term(ones[0], alpha=-1.0)
    with pytest.raises(ValueError, match="policy_chosen_mean must be finite, got nan"):
        nll_term(torch.tensor([math.nan]), alpha=1.0)


# cDPO and robust DPO


@given(st.floats(0.1, 5), st.floats(1e-3, 0.49), st.floats(1e-3, 10))
def test_cdpos_minimum_lies_where_the_policy_is_right_with_probability_1_minus_epsilon(
    beta, smoothing, away
):
    best = math.log((1 - smoothing) / smoothing) / beta
    lowest, slope = at_gap(cdpo_loss, best, beta=beta, label_smoothing=smoothing)
    assert abs(slope) < 1e-12
    for other in (best - away, best + away):
        assert at_gap(cdpo_loss, other, beta=beta, label_smoothing=smoothing)[0] > lowest


# IPO and hinge


# SimPO and ORPO


@given(mean_logps)
def test_log_odds_are_exact_in_fp32_from_certainty_to_despair(mean_logp):
    """Where 1 - p is as small as 1e-12 and where p is as small as e⁻⁸⁰; the slope is finite too."""
    x = torch.tensor([mean_logp], requires_grad=True)
    odds = log_odds(x)
    odds.backward()
    assert x.grad.isfinite().all() and (x.grad > 0).all()
    assert math.isclose(
        odds.item(), mean_logp - math.log(-math.expm1(mean_logp)), rel_tol=1e-5, abs_tol=1e-6
    )


# KTO


@given(st.lists(quadruples, min_size=1, max_size=6), betas)
def test_no_gradient_reaches_ktos_baseline_which_is_not_negative(pairs, beta):
    columns = zip(*pairs, strict=True)
    inputs = [torch.tensor(column, dtype=torch.float64, requires_grad=True) for column in columns]
    z0 = kto_baseline(torch.cat(inputs[:2]), torch.cat(inputs[2:]))
    assert z0.shape == () and not z0.requires_grad and z0 >= 0
    measured, number = (kto_loss(*inputs, beta, 1.0, 1.0, it) for it in (z0, z0.item()))
    assert torch.equal(measured, number)
    moving = inputs[0].mean().clamp(min=0)  # even a baseline that somebody forgot to detach
    losses = [kto_loss(*inputs, beta, 1.0, 1.0, z0).sum() for z0 in (moving, moving.item())]
    gradients = [torch.autograd.grad(loss, inputs[:2]) for loss in losses]
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


# Guards of the chosen log-prob


@given(mean_logps, weights)
def test_the_nll_term_pulls_the_chosen_mean_up_by_alpha(mean_logp, alpha):
    (mean,) = f64(mean_logp)
    term = nll_term(mean, alpha)
    term.backward()
    assert term.item() == -alpha * mean_logp and mean.grad.item() == -alpha
