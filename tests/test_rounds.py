"""Chapter 41: which round is kept, when to stop, which tasks are in, where to look next."""

from hypothesis import given
from hypothesis import strategies as st

from minidpo.rounds import best_round, enough, entered, focused

rates = st.floats(0, 1)
successes = st.dictionaries(st.sampled_from("abcdefgh"), rates, min_size=1)


@given(st.lists(rates, min_size=1))
def test_the_round_that_is_kept_is_the_first_of_the_best(success):
    best = best_round(success)
    assert success[best] == max(success) and success.index(max(success)) == best


@given(st.lists(rates, min_size=1), st.integers(1, 4))
def test_enough_is_when_the_last_rounds_are_no_better_than_what_was_before_them(success, patience):
    before, last = success[:-patience], success[-patience:]
    assert enough(success, patience) == bool(before and max(before) >= max(last))


@given(successes, rates)
def test_a_curriculum_holds_the_easiest_tasks_in_the_order_given(success, threshold):
    inside = entered(success, threshold)
    assert inside == [task for task in success if task in inside] and inside
    outside = success.keys() - set(inside)
    assert all(success[a] >= success[b] for a in inside for b in outside)
    if outside:
        assert sum(success[task] for task in inside) / len(inside) < threshold + 1e-9


@given(successes, rates, rates)
def test_a_lower_threshold_lets_more_tasks_in(success, one, other):
    low, high = sorted((one, other))
    assert set(entered(success, high)) <= set(entered(success, low))
    assert entered(success, 0.0) == list(success)


@given(successes, st.integers(1, 50))
def test_exploring_with_focus_takes_as_many_instances_and_most_where_outcomes_are_mixed(success, instances):
    counts = focused(success, instances)
    assert sum(counts.values()) == instances * len(success) and counts.keys() == success.keys()
    assert min(counts.values()) >= max(1, instances // 4) or instances == 1
    for a in success:
        for b in success:
            if success[a] > success[b]:
                assert counts[a] >= counts[b] - 1  # rounding gives one away


def test_where_no_group_was_mixed_every_task_gets_its_share():
    assert focused({"a": 0.0, "b": 0.0}, 7) == {"a": 7, "b": 7}


def test_three_times_a_threshold_is_the_threshold():
    """0.7 + 0.7 + 0.7 is a little less than 2.1 in binary."""
    assert (0.7 + 0.7 + 0.7) / 3 < 0.7
    assert entered(dict.fromkeys("abcd", 0.7), 0.7) == list("abcd")
