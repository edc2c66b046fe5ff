"""More is explored where verdicts are mixed, and something everywhere."""

from hypothesis import given
from hypothesis import strategies as st

from minidpo.data.curriculum import most_mixed

successes = st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0, 1), min_size=1)


@given(successes, st.integers(1, 50))
def test_as_many_instances_are_explored_and_most_where_verdicts_are_mixed(success, instances):
    counts = most_mixed(success, instances)
    assert sum(counts.values()) == instances * len(success) and counts.keys() == success.keys()
    assert min(counts.values()) >= max(1, instances // 4)
    for a in success:
        for b in success:
            if success[a] * (1 - success[a]) > success[b] * (1 - success[b]):
                assert counts[a] >= counts[b] - 1  # rounding gives one away


def test_where_nothing_was_mixed_every_task_gets_its_share():
    assert most_mixed({"a": 0.0, "b": 1.0}, 7) == {"a": 7, "b": 7}
