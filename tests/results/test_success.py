"""Episodes counted by hand; Wilson's interval and the exact McNemar test against their definitions."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from minidpo.results.success import (
    BANDS,
    best_of,
    compare,
    comparisons,
    difficulty,
    mcnemar_exact,
    newest_comparison,
    result_metrics,
    summary,
    wilson,
)


def played(task, *outcomes):
    return [
        tiny.episode("a", outcome, task=task, seed=seed) for seed, outcome in enumerate(outcomes)
    ]


def turns_of(episode, *errors):
    """The same episode with a turn for each of these errors."""
    return replace(episode, turns=tuple(replace(episode.turns[0], error=error) for error in errors))


def seeing(episode, page):
    """The same episode, begun on another page."""
    return replace(episode, turns=(replace(episode.turns[0], observation=page),))


BEFORE = [
    *played("click-a", "solved", "failed", "limit", "failed"),
    *played("click-b", "solved", "solved"),
]
AFTER = [
    *played("click-a", "solved", "solved", "solved", "failed"),
    *played("click-b", "failed", "solved"),
]


def test_a_summary_counts_solved_episodes_turns_and_usable_answers():
    """Wilson at 1 of 4 with z = 1.96: centre (1/4 + z²/8)/(1 + z²/4) = 0.3725, half width 0.3269."""
    episodes = [turns_of(BEFORE[0], None, "stale", None), turns_of(BEFORE[1], "stale"), *BEFORE[2:]]
    episodes[1] = replace(episodes[1], reward=-1.0)
    rates = summary(episodes, sampled=episodes[:4])
    a = rates["tasks"]["click-a"]
    names = ("success", "n", "mean_steps", "valid_action_rate", "mean_reward")
    assert [a[name] for name in names] == [0.25, 4, 6 / 4, 4 / 6, 0.0]
    assert (a["low"], a["high"]) == pytest.approx((0.0456, 0.6994), abs=1e-4)
    assert list(rates["tasks"]) == ["click-a", "click-b"] and rates["sampled"] == a
    everything = rates["all"]
    assert (everything["success"], everything["n"], everything["mean_steps"]) == (0.5, 6, 8 / 6)
    silent = summary([replace(BEFORE[0], turns=())])
    assert silent["all"]["valid_action_rate"] == 0.0


def test_pages_are_counted_once_and_those_of_training_are_left_out_of_new():
    """Two instances of click-b show one page; training had two pages of click-a."""
    shown = [seeing(e, f"page {n}") for n, e in enumerate(BEFORE)]
    shown[5] = replace(shown[5], turns=shown[4].turns)
    rates = summary(shown, trained_on={shown[0].first_prompt, shown[1].first_prompt})
    assert (rates["all"]["pages"], rates["tasks"]["click-b"]["pages"]) == (5, 1)
    assert (rates["new"]["n"], rates["new"]["success"], rates["new"]["pages"]) == (4, 2 / 4, 3)
    assert summary(shown, trained_on={e.first_prompt for e in shown})["new"] is None


def test_difficulty_counts_what_the_first_page_lets_an_agent_act_on():
    """Something to act on ends with a number in brackets: 3 are few, 4 are the next band, 16 the last."""
    few, some, _, most = BANDS
    for count, band in ((0, few), (3, few), (4, some), (7, some), (16, most)):
        page = "\n".join(f'button "{n}" [{n}]' for n in range(1, count + 1))
        assert difficulty(seeing(BEFORE[0], page)) == band
    note = 'link "Footnotes [1], [2], [3] and [4]" [1]'
    assert difficulty(seeing(BEFORE[0], note)) == few


def test_the_reward_by_step_ends_at_the_mean_reward():
    episodes = [
        replace(turns_of(BEFORE[0], *[None] * turns), reward=reward)
        for turns, reward in ((1, 0.8), (3, -1.0), (6, 1.0))
    ]
    rates = summary(episodes)
    assert rates["reward_by_step"] == pytest.approx([0.8 / 3, 0.8 / 3, *[-0.2 / 3] * 3, 0.8 / 3])
    assert rates["reward_by_step"][-1] == pytest.approx(rates["all"]["mean_reward"])


def test_best_of_several_tries_takes_the_first_that_was_solved_or_that_a_judge_likes_most():
    tries = [
        tiny.episode("a", outcome, seed=seed, index=index)
        for seed, outcomes in enumerate(
            (("failed", "solved", "solved"), ("limit", "failed", "failed"))
        )
        for index, outcome in enumerate(outcomes)
    ]
    best = best_of(tries)
    assert [(e.seed, e.index, e.outcome) for e in best] == [(0, 0, "solved"), (1, 0, "limit")]
    judged = best_of(tries, [2.0, 1.0, 2.0, -3.0, -1.0, -2.0])  # of equal ones the first
    assert [(e.seed, e.outcome) for e in judged] == [(0, "failed"), (1, "failed")]


def test_a_comparison_looks_at_the_same_instances_only():
    """2 won, 1 lost of 6: 100/6 points; p = 2 · (1 + 3) / 2³ = 1."""
    found = compare(BEFORE, AFTER)
    assert found == {
        "gain_points": pytest.approx(100 / 6),
        "p_value": 1.0,
        "n": 6,
        "only_before": 1,
        "only_after": 2,
    }
    extra = played("click-c", "solved", "solved")
    assert compare([*BEFORE, *extra], AFTER) == found == compare(BEFORE[::-1], [*AFTER, *extra])
    with pytest.raises(ValueError, match="no task instance in common"):
        compare(BEFORE, extra)


def test_each_of_three_agents_is_compared_with_the_one_before_it_and_the_last_with_the_first():
    episodes = {"base": BEFORE, "sft": AFTER, "dpo": [replace(e, outcome="solved") for e in AFTER]}
    found = comparisons(episodes)
    assert found == {
        "comparison": compare(BEFORE, episodes["dpo"]),
        "comparisons": [
            {"before": "base", "after": "sft", **compare(BEFORE, AFTER)},
            {"before": "sft", "after": "dpo", **compare(AFTER, episodes["dpo"])},
        ],
    }
    assert newest_comparison(found)["gain_points"] == pytest.approx(100 / 3)
    assert comparisons({"dpo": AFTER}) == {} and newest_comparison({}) == {}


def test_metrics_hold_each_agents_rates_and_the_newest_gain():
    agents = {"sft": summary(BEFORE, cause=lambda _: "slip"), "dpo": summary(AFTER)}
    result = {"agents": agents, "comparison": compare(BEFORE, AFTER), "seconds": {"play": 3.0}}
    metrics = result_metrics(result)
    assert (metrics["sft/success"], metrics["dpo/success"]) == (0.5, 4 / 6)
    assert (metrics["sft/failed/slip"], metrics["seconds/play"]) == (3, 3.0)
    assert metrics["sft/success/1 - 3 to act on"] == 0.5
    assert metrics["gain_points"] == pytest.approx(100 / 6)


# ---- statistics ----


counts = st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))
zs = st.floats(0.1, 5)


@given(counts, zs)
def test_the_ends_of_wilsons_interval_are_z_standard_deviations_from_the_rate(count, z):
    """Both ends p solve (successes/n - p)² = z² p (1-p) / n, the equation that defines the interval."""
    successes, n = count
    low, high = wilson(successes, n, z)
    assert 0 <= low <= successes / n <= high <= 1 and low < high
    for end in (low, high):
        deviations = (successes / n - end) ** 2, z * z * end * (1 - end) / n
        assert math.isclose(*deviations, rel_tol=1e-6, abs_tol=1e-12)
    assert wilson(n - successes, n, z) == pytest.approx((1 - high, 1 - low), abs=1e-12)


def test_wilson_by_default_has_95_percent():
    """45 of 50: centre (0.9 + 1.92073/50) / (1 + 3.84146/50) = 0.87146, and 0.08506 to either side."""
    assert wilson(45, 50) == pytest.approx((0.78640, 0.95652), abs=5e-6)


@given(st.integers(0, 40), st.integers(0, 40))
def test_mcnemar_is_the_share_of_fair_coin_outcomes_at_least_as_uneven(a, b):
    """Summed over the outcomes k of n coins with |n - 2k| at least |a - b|, from Pascal's triangle."""
    n, row = a + b, [1]
    for _ in range(n):
        row = [left + right for left, right in zip([0, *row], [*row, 0], strict=True)]
    uneven = sum(ways for k, ways in enumerate(row) if abs(n - 2 * k) >= abs(a - b))
    assert mcnemar_exact(a, b) == float(Fraction(uneven, 2**n))


def test_mcnemar_of_thousands_is_exact_and_does_not_overflow():
    assert mcnemar_exact(600, 600) == 1.0
    assert mcnemar_exact(0, 3000) == 0.0  # 2⁻²⁹⁹⁹ is no float
