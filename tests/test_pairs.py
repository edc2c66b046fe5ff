"""Chapter 16: a pair is one instance with two verdicts, and where it is cut only the last turn differs."""

from collections import Counter

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from minidpo.chat import Dialogue
from minidpo.pairs import Pair, divergence, make_pairs, until_divergence, words
from minidpo.preference import until_difference

OUTCOMES = ["solved", "solved", "failed", "limit"]


@st.composite
def groups(draw):
    """Episodes of a few instances; answers from few words, so that beginnings and whole episodes coincide."""
    played = []
    instances = st.tuples(st.sampled_from("pq"), st.integers(0, 1))
    for task, seed in draw(st.lists(instances, min_size=1, max_size=3, unique=True)):
        for index in range(draw(st.integers(1, 6))):
            said = draw(st.text("ab", max_size=3))
            outcome = draw(st.sampled_from(OUTCOMES))
            played.append(tiny.episode(said, outcome, seed=seed, index=index, task=task))
    return played


def pairs_of(played, per_instance=4, seed=1, until="end"):
    try:
        return make_pairs(played, per_instance, seed, until)
    except ValueError:
        return []


ends = st.sampled_from(["end", "turn"])


@given(groups(), st.integers(1, 5), st.integers(0, 9), ends)
def test_a_pair_is_a_success_and_a_failure_of_one_instance_that_differ(played, cap, seed, until):
    for pair in pairs_of(played, cap, seed, until):
        assert pair.chosen.instance == pair.rejected.instance
        assert pair.chosen.solved and not pair.rejected.solved
        assert words(pair.chosen) != words(pair.rejected)


@given(groups(), st.integers(1, 5), ends)
def test_an_instance_gives_so_many_different_pairs_as_asked_for_or_as_there_are(played, cap, until):
    pairs = pairs_of(played, cap, until=until)
    everything = pairs_of(played, 10**6, until=until)
    said = [(pair.chosen.instance, pair.chosen.index, pair.rejected.index) for pair in everything]
    assert len(said) == len(set(said))
    there = Counter(pair.chosen.instance for pair in everything)
    assert Counter(pair.chosen.instance for pair in pairs) == {i: min(n, cap) for i, n in there.items()}


@given(groups())
def test_whole_episodes_are_paired_in_every_combination(played):
    solved = [e for e in played if e.solved and e.turns]
    unsolved = [e for e in played if not e.solved and e.turns]
    combinations = {(c.instance, words(c), words(r)) for c in solved for r in unsolved
                    if c.instance == r.instance and words(c) != words(r)}
    pairs = pairs_of(played, 10**6)
    assert {(p.chosen.instance, words(p.chosen), words(p.rejected)) for p in pairs} == combinations


@pytest.mark.parametrize("successes, failures", [(1, 5), (2, 3), (3, 2), (4, 4)])
def test_no_success_comes_twice_before_all_came_once_and_no_failure(successes, failures):
    played = [tiny.episode(str(i), "solved", index=i) for i in range(successes)]
    played += [tiny.episode(str(i), "failed", index=i) for i in range(successes, successes + failures)]
    for cap in range(1, successes * failures + 1):
        pairs = make_pairs(played, cap, seed=3)
        for side, there in (("chosen", successes), ("rejected", failures)):
            counts = Counter(words(getattr(pair, side)) for pair in pairs)
            assert max(counts.values()) == 1 or len(counts) == there


@given(groups())
def test_until_divergence_all_turns_but_the_last_are_shared(played):
    for pair in pairs_of(played, 10**6, until="turn"):
        last = divergence(pair.chosen, pair.rejected)
        assert words(pair.chosen)[:last] == words(pair.rejected)[:last]
        assert max(len(pair.chosen.turns), len(pair.rejected.turns)) == last + 1
        assert until_divergence(pair) == pair


def test_until_divergence_by_hand():
    pair = Pair(tiny.episode("abc", "solved"), tiny.episode("axcd", "failed", index=1))
    cut = until_divergence(pair)
    assert (words(cut.chosen), words(cut.rejected)) == (("a", "b"), ("a", "x"))
    assert cut.chosen.solved and not cut.rejected.solved


@given(groups(), st.integers(0, 9), ends)
def test_the_seed_decides_and_the_pairs_of_an_instance_do_not_depend_on_the_others(played, seed, until):
    pairs = pairs_of(played, 2, seed, until)
    assert pairs_of(list(played), 2, seed, until) == pairs
    for instance in {episode.instance for episode in played}:
        alone = pairs_of([e for e in played if e.instance == instance], 2, seed, until)
        among = [pair for pair in pairs if pair.chosen.instance == instance]
        assert Counter(map(repr, alone)) == Counter(map(repr, among))


ids = st.lists(st.integers(0, 2), min_size=1, max_size=8)


@given(ids, ids)
def test_until_the_difference_all_tokens_but_the_last_are_shared(left, right):
    chosen, rejected = (Dialogue(ids, list(range(len(ids)))) for ids in (left, right))
    cut = until_difference(chosen, rejected)
    n = len(cut.ids)
    assert cut == Dialogue(right[:n], rejected.turns[:n])
    assert cut.ids[:-1] == left[:n - 1] and (cut.ids != left[:n] or cut == rejected)


def test_where_the_pages_differ_first_no_token_is_the_mistake_and_the_rejected_stays_whole():
    chosen, rejected = Dialogue([1, 5, 7, 8], [-1, 0, -1, 1]), Dialogue([1, 5, 6, 9], [-1, 0, -1, 1])
    assert until_difference(chosen, rejected) == rejected


def test_another_seed_draws_other_pairs_in_another_order():
    played = [tiny.episode(str(i), OUTCOMES[i % 2 * 2], seed=s, index=i) for s in range(4) for i in range(6)]
    assert make_pairs(played, 2, seed=1) != make_pairs(played, 2, seed=2)
    instances = [pair.chosen.seed for pair in make_pairs(played, 2, seed=1)]
    assert sorted(instances) == [0, 0, 1, 1, 2, 2, 3, 3] != instances


def test_groups_that_were_always_solved_or_never_say_what_to_try():
    played = [tiny.episode("a", "solved"), tiny.episode("b", "solved", index=1),
              tiny.episode("a", "failed", seed=2), tiny.episode("", "limit", seed=3)]
    with pytest.raises(ValueError, match=r"no pair in 3 groups \(1 solved every time, 2 never\): .*; try m"):
        make_pairs(played, 4, seed=1)


def test_how_far_to_compare_is_one_of_three_words():
    with pytest.raises(ValueError, match="until must be end, turn or token, got 'tokens'"):
        make_pairs([], 1, 0, "tokens")


def test_a_pair_across_instances_or_verdicts_cannot_be_made():
    solved, failed = tiny.episode("a"), tiny.episode("b", "failed", index=1)
    with pytest.raises(ValueError, match="one instance, got click-button seed 1 and click-button seed 2"):
        Pair(solved, tiny.episode("b", "failed", seed=2))
    for chosen, rejected in [(failed, solved), (solved, solved), (failed, failed)]:
        with pytest.raises(ValueError, match="the chosen must be solved and the rejected not"):
            Pair(chosen, rejected)
