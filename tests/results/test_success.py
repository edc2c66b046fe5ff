"""A few episodes counted by hand; Wilson's interval and the exact McNemar test against their definitions."""

import math
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from minidpo.results.success import (
    BANDS,
    best_of,
    circumstances,
    compare,
    comparisons,
    difficulty,
    machine_name,
    mcnemar_exact,
    newest_comparison,
    result_metrics,
    summary,
    table,
    wilson,
)


def played(task, *outcomes):
    return [
        tiny.episode("a", outcome, task=task, seed=seed) for seed, outcome in enumerate(outcomes)
    ]


def broken(episode, *errors):
    """The same episode with so many turns, the given ones of them unusable."""
    turn = episode.turns[0]
    return replace(episode, turns=tuple(replace(turn, error=error) for error in errors))


BEFORE = [
    *played("click-a", "solved", "failed", "limit", "failed"),
    *played("click-b", "solved", "solved"),
]
AFTER = [
    *played("click-a", "solved", "solved", "solved", "failed"),
    *played("click-b", "failed", "solved"),
]


def test_pages_are_counted_once_and_those_of_training_are_left_out_of_new():
    """Two instances of click-b show one page; what training played of click-a is not new."""
    shown = [
        replace(e, turns=(replace(e.turns[0], observation=f"page {n}"),))
        for n, e in enumerate(BEFORE)
    ]
    shown[5] = replace(shown[5], turns=shown[4].turns, instruction=shown[4].instruction)
    rates = summary(shown, trained_on={shown[0].first_prompt, shown[1].first_prompt})
    assert (rates["all"]["pages"], rates["tasks"]["click-b"]["pages"], rates["all"]["n"]) == (
        5,
        1,
        6,
    )
    assert (rates["new"]["n"], rates["new"]["success"], rates["new"]["pages"]) == (4, 2 / 4, 3)
    other = {("another instruction", shown[0].first_prompt[1])}
    assert summary(shown, trained_on=other)["new"] == rates["all"]
    assert "new" not in summary(shown)
    known = summary(shown, trained_on={e.first_prompt for e in shown})
    assert known["new"] is None and "which training did not have: 0" in table(
        {"agents": {"sft": known}}
    )
    text = table({"agents": {"sft": rates, "dpo": rates}})
    assert (
        "all new pages" in text
        and (
            "6 held-out instances, pages that differ: 5; instances with new pages, which training did not have: 4"
        )
        in text
    )
    told = table({"agents": {"sft": summary(shown)}, "split": "validation"})
    assert "6 validation instances, pages that differ: 5" in told and "new" not in told


def test_a_summary_counts_solved_episodes_turns_and_usable_answers():
    """Wilson at 1 of 4 with z = 1.96: centre (1/4 + z²/8)/(1 + z²/4) = 0.3725, half width 0.3269."""
    episodes = [broken(BEFORE[0], None, "stale", None), broken(BEFORE[1], "stale"), *BEFORE[2:]]
    result = summary(episodes)
    a = result["tasks"]["click-a"]
    assert (a["success"], a["n"], a["mean_steps"], a["valid_action_rate"]) == (
        0.25,
        4,
        6 / 4,
        4 / 6,
    )
    assert (a["low"], a["high"]) == pytest.approx((0.0456, 0.6994), abs=1e-4)
    assert list(result["tasks"]) == ["click-a", "click-b"]
    everything = result["all"]
    assert (everything["success"], everything["n"], everything["mean_steps"]) == (0.5, 6, 8 / 6)
    assert everything["valid_action_rate"] == 6 / 8


def test_a_mean_reward_tells_near_misses_from_far_ones_and_an_old_result_has_none():
    near = [replace(e, reward=reward) for e, reward in zip(BEFORE, (1.0, -1.0, 0.0, 0.5, 1.0, 1.0))]
    rates = summary(near)
    assert (rates["all"]["mean_reward"], rates["tasks"]["click-a"]["mean_reward"]) == (
        2.5 / 6,
        0.5 / 4,
    )
    assert "mean reward          0.417" in table({"agents": {"sft": rates}})
    del rates["all"]["mean_reward"]
    assert "mean steps" in (text := table({"agents": {"sft": rates}})) and "mean reward" not in text


def test_an_episode_without_a_turn_has_no_valid_answer_and_does_not_divide_by_zero():
    assert summary([replace(BEFORE[0], turns=())])["all"]["valid_action_rate"] == 0.0


def test_a_comparison_looks_at_the_same_instances_only():
    """2 won, 1 lost of 6: 100/6 points; p = 2 · (1 + 3) / 2³ = 1."""
    result = compare(BEFORE, AFTER)
    assert result == {
        "gain_points": pytest.approx(100 / 6),
        "p_value": 1.0,
        "n": 6,
        "only_before": 1,
        "only_after": 2,
    }
    extra = played("click-c", "solved", "solved")
    assert compare([*BEFORE, *extra], AFTER) == result == compare(BEFORE, [*AFTER, *extra])
    assert compare(BEFORE[::-1], AFTER) == result
    back = compare(AFTER, BEFORE)
    assert (back["gain_points"], back["only_before"]) == (-result["gain_points"], 2)
    with pytest.raises(ValueError, match="no task instance in common"):
        compare(BEFORE, extra)


def test_the_table():
    result = {
        "agents": {"sft": summary(BEFORE), "dpo": summary(AFTER)},
        "comparison": compare(BEFORE, AFTER),
    }
    assert (
        table(result)
        == """\
                                      SFT                       DPO
                 success %   95 % interval  success %   95 % interval
click-a               25.0     4.6 -  69.9       75.0    30.1 -  95.4
click-b              100.0    34.2 - 100.0       50.0     9.5 -  90.5
---------------------------------------------------------------------
all tasks             50.0    18.8 -  81.2       66.7    30.0 -  90.3
mean reward          0.500                      0.667
mean steps             1.0                        1.0
valid actions %      100.0                      100.0
failed episodes, by cause:
  too long               1                          0
  not known              2                          2
6 held-out instances, pages that differ: 1
DPO - SFT: +16.7 points on the same 6 instances (2 won, 1 lost), exact McNemar p = 1"""
    )


def test_success_by_how_much_the_first_page_shows_comes_with_two_bands_or_more():
    """What can be acted on carries a number in brackets: 3 are few, 4 are the next band, 16 the last."""

    def shows(count, outcome, seed):
        page = "\n".join(f'button "{n}" [{n}]' for n in range(1, count + 1))
        plain = tiny.episode("a", outcome, seed=seed)
        return replace(plain, turns=(replace(plain.turns[0], observation=page),))

    episodes = [
        shows(0, "solved", 0),
        shows(3, "solved", 1),
        shows(4, "solved", 2),
        shows(7, "failed", 3),
        shows(16, "failed", 4),
    ]
    few, some, _, most = BANDS
    assert [difficulty(e) for e in episodes] == [few, few, some, some, most]
    note = replace(episodes[1].turns[0], observation='link "Footnotes [1], [2], [3] and [4]" [1]')
    assert difficulty(replace(episodes[1], turns=(note,))) == few
    rates = summary(episodes)
    assert {band: (row["success"], row["n"]) for band, row in rates["difficulty"].items()} == {
        "1 - 3 to act on": (1.0, 2),
        "4 - 7": (0.5, 2),
        "16 and more": (0.0, 1),
    }
    text = table({"agents": {"sft": rates, "dpo": summary(episodes[:2])}})
    assert (
        "success by the number of elements to act on that the first page shows:\n  1 - 3 to act on"
        in text
    )
    assert "elements to act on" not in table({"agents": {"dpo": summary(episodes[:2])}})
    assert result_metrics({"agents": {"sft": rates}})["sft/success/4 - 7"] == 0.5


def test_the_reward_by_step_ends_at_the_mean_reward_and_has_rows_for_powers_of_two():
    def played(turns, reward):
        one = tiny.episode("a", "solved", seed=turns)
        return replace(one, turns=one.turns[:1] * turns, reward=reward)

    episodes = [played(1, 0.8), played(3, -1.0), played(6, 1.0)]
    rates = summary(episodes)
    assert rates["reward_by_step"] == pytest.approx([0.8 / 3, 0.8 / 3, *[-0.2 / 3] * 3, 0.8 / 3])
    assert rates["reward_by_step"][-1] == pytest.approx(rates["all"]["mean_reward"])
    text = table({"agents": {"sft": rates, "dpo": summary([played(2, 1.0)])}})
    assert [row.split() for row in text.split("turns:\n")[1].splitlines()[:3]] == [
        ["1", "0.267", "0.000"],
        ["2", "0.267", "1.000"],
        ["4", "-0.067", "1.000"],
    ]
    old = {key: part for key, part in rates.items() if key != "reward_by_step"}
    assert "mean reward, had all play stopped after so many turns:" in text
    assert "had all play" not in table({"agents": {"sft": old, "dpo": summary([played(1, 1.0)])}})


def test_a_task_that_a_browser_gave_up_for_one_agent_leaves_a_gap():
    agents = {"sft": summary(BEFORE[:4]), "dpo": summary(AFTER)}
    lines = table({"agents": agents, "comparison": compare(BEFORE[:4], AFTER)}).splitlines()
    assert lines[3] == "click-b                  -                       50.0     9.5 -  90.5"
    assert (
        lines[-2] == "6 held-out instances, pages that differ: 1"
        and "same 4 instances" in lines[-1]
    )
    assert (
        table({"agents": dict(reversed(agents.items()))}).splitlines()[3]
        == "click-b               50.0     9.5 -  90.5          -"
    )


def test_of_three_agents_each_is_compared_with_the_one_before_it_and_the_last_with_the_first():
    episodes = {"base": BEFORE, "sft": AFTER, "dpo": [replace(e, outcome="solved") for e in AFTER]}
    found = comparisons(episodes)
    assert found["comparison"] == compare(BEFORE, episodes["dpo"])
    assert found["comparisons"] == [
        {"before": "base", "after": "sft", **compare(BEFORE, AFTER)},
        {"before": "sft", "after": "dpo", **compare(AFTER, episodes["dpo"])},
    ]
    result = {"agents": {name: summary(played) for name, played in episodes.items()}, **found}
    lines = table(result).splitlines()[-3:]
    assert [line.partition(" points")[0] for line in lines] == [
        "SFT - BASE: +16.7",
        "DPO - SFT: +33.3",
        "DPO - BASE: +50.0",
    ]
    assert result_metrics(result)["gain_points"] == newest_comparison(found)["gain_points"]
    assert newest_comparison(found)["gain_points"] == pytest.approx(100 / 3)
    del episodes["base"]
    assert comparisons(episodes).keys() == {"comparison"}
    del episodes["sft"]
    assert comparisons(episodes) == {}


def test_episodes_at_temperature_1_have_a_row_of_their_own():
    agents = {"sft": summary(BEFORE, BEFORE[:4]), "dpo": summary(AFTER, AFTER[:4])}
    assert (
        agents["sft"]["sampled"]["success"] == 0.25
        and agents["sft"]["all"] == summary(BEFORE)["all"]
    )
    lines = table({"agents": agents}).splitlines()
    assert lines[6] == "all at T = 1          25.0     4.6 -  69.9       75.0    30.1 -  95.4"
    del agents["sft"]["sampled"]
    assert table({"agents": agents}).splitlines()[6] == (
        "all at T = 1             -                       75.0    30.1 -  95.4"
    )


def test_one_agent_has_a_table_without_a_comparison():
    lines = table({"agents": {"base": summary(BEFORE[:4])}}).splitlines()
    assert lines[
        -1
    ] == "4 held-out instances a task, pages that differ: 1" and "DPO" not in "".join(lines)


def test_best_of_several_tries_takes_the_first_that_was_solved_and_stays_comparable():
    tries = [
        tiny.episode("a", outcome, seed=seed, index=index)
        for seed, outcomes in enumerate(
            (("failed", "solved", "solved"), ("limit", "failed", "failed"))
        )
        for index, outcome in enumerate(outcomes)
    ]
    best = best_of(tries)
    assert [(e.seed, e.index, e.outcome) for e in best] == [(0, 0, "solved"), (1, 0, "limit")]
    assert best_of(best) == best and summary(best)["all"]["success"] == 0.5
    alone = [e for e in tries if e.index == 0]
    assert compare(alone, best)["gain_points"] == 50.0
    judged = best_of(
        tries, [2.0, 1.0, 2.0, -3.0, -1.0, -2.0]
    )  # of equal ones the first; no verdict is read
    assert [(e.seed, e.index, e.outcome) for e in judged] == [(0, 0, "failed"), (1, 0, "failed")]
    assert judged[0].turns == tries[0].turns and best_of([], []) == []
    with pytest.raises(ValueError):
        best_of(tries, [1.0])


def test_a_result_names_the_processor_because_the_last_digits_are_its_own():
    processor = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    assert processor is None or processor[1] in circumstances()["machine"]
    assert machine_name("a GPU").endswith(", a GPU")


# ---- statistics ----


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
