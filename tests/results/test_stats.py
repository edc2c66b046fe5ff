"""Chapter 25: Wilson's interval and the exact McNemar test, against their definitions."""

import doctest
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import minidpo.results.stats
from minidpo.results.stats import mcnemar_exact, wilson

counts = st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))
zs = st.floats(0.1, 5)


@given(counts, zs)
def test_the_ends_of_wilsons_interval_lie_z_standard_deviations_from_the_rate(count, z):
    """Both ends p solve (successes/n - p)² = z² p (1-p) / n, the equation that defines the interval."""
    successes, n = count
    low, high = wilson(successes, n, z)
    for end in (low, high):
        deviations = (successes / n - end) ** 2, z * z * end * (1 - end) / n
        assert math.isclose(*deviations, rel_tol=1e-6, abs_tol=1e-12)
    assert low < high


@given(counts, zs)
def test_wilsons_interval_lies_within_0_and_1_and_holds_the_rate(count, z):
    low, high = wilson(*count, z)
    assert 0 <= low <= count[0] / count[1] <= high <= 1


@given(counts, zs)
def test_failures_have_the_mirrored_interval_of_successes(count, z):
    successes, n = count
    low, high = wilson(successes, n, z)
    assert wilson(n - successes, n, z) == pytest.approx((1 - high, 1 - low), abs=1e-12)


@given(st.integers(1, 2000), zs)
def test_no_success_reaches_down_to_exactly_0_and_no_failure_up_to_exactly_1(n, z):
    low, high = wilson(0, n, z)
    assert low == 0.0 and high == pytest.approx(z * z / (n + z * z))
    assert wilson(n, n, z)[1] == 1.0


def test_wilson_by_default_has_95_percent():
    """45 of 50: centre (0.9 + 1.92073/50) / (1 + 3.84146/50) = 0.87146, and 0.08506 to either side."""
    assert wilson(45, 50) == pytest.approx((0.78640, 0.95652), abs=5e-6)
    assert wilson(45, 50) == wilson(45, 50, z=1.959963984540054)


@pytest.mark.parametrize("successes, n", [(-1, 5), (6, 5), (0, 0), (1, 0)])
def test_impossible_counts_are_refused(successes, n):
    with pytest.raises(ValueError, match="successes must lie in 0..n"):
        wilson(successes, n)


@pytest.mark.parametrize("z", [0.0, -1.0, math.nan, math.inf])
def test_a_z_that_gives_no_interval_is_refused(z):
    with pytest.raises(ValueError, match="z must be finite and > 0"):
        wilson(1, 2, z)


@given(st.integers(0, 40), st.integers(0, 40))
def test_mcnemar_is_the_share_of_fair_coin_outcomes_at_least_as_uneven(a, b):
    """Summed over the outcomes k of n coins with |n - 2k| at least |a - b|, from Pascal's triangle."""
    n, row = a + b, [1]
    for _ in range(n):
        row = [left + right for left, right in zip([0, *row], [*row, 0], strict=True)]
    uneven = sum(ways for k, ways in enumerate(row) if abs(n - 2 * k) >= abs(a - b))
    assert mcnemar_exact(a, b) == float(Fraction(uneven, 2**n))


@given(st.integers(0, 300), st.integers(0, 300))
def test_mcnemar_does_not_care_which_agent_is_called_a_and_lies_in_0_to_1(a, b):
    assert mcnemar_exact(a, b) == mcnemar_exact(b, a)
    assert 0 < mcnemar_exact(a, b) <= 1
    assert mcnemar_exact(a, a) == 1.0


@given(st.integers(0, 100), st.integers(0, 100))
def test_one_more_win_for_the_leader_never_raises_mcnemars_p(a, b):
    a, b = max(a, b), min(a, b)
    assert mcnemar_exact(a + 1, b) <= mcnemar_exact(a, b)


def test_mcnemar_of_thousands_is_exact_and_does_not_overflow():
    assert mcnemar_exact(3000, 3000) == 1.0
    assert mcnemar_exact(0, 1000) == 2.0**-999
    assert mcnemar_exact(0, 3000) == 0.0  # 2⁻²⁹⁹⁹ is no float


@pytest.mark.parametrize("a, b", [(-1, 2), (2, -1)])
def test_negative_counts_are_refused(a, b):
    with pytest.raises(ValueError, match="counts must be >= 0"):
        mcnemar_exact(a, b)


def test_the_docstrings_examples_are_true():
    assert doctest.testmod(minidpo.results.stats).failed == 0
