"""What is imitated is a part of what was played: less at a higher threshold, the same by the same seed."""

from dataclasses import replace

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from minidpo.data.selection import (
    answers_of_experts,
    distinct,
    is_expert,
    paid,
    weights_by_advantage,
)


@st.composite
def explored(draw):
    """Episodes of some rounds' policies and of the expert, with rewards in between."""
    return [
        replace(
            tiny.episode(
                "ab"[: draw(st.integers(0, 2))],
                draw(st.sampled_from(["solved", "failed"])),
                seed=draw(st.integers(0, 3)),
                index=n,
                policy=draw(st.sampled_from(["expert", "run/1@aa", "run/2@bb"])),
            ),
            reward=draw(st.sampled_from([-1.0, 0.0, 0.3, 0.5, 0.8, 1.0])),
        )
        for n in range(draw(st.integers(0, 12)))
    ]


shares, above_0 = st.floats(0.01, 1), st.sampled_from([0.3, 0.5, 0.8, 1.0])


def keys(episodes):
    return {e.key for e in episodes}


@given(explored(), above_0, above_0, shares, shares, st.integers(0, 9))
def test_what_is_paid_enough_shrinks_with_the_threshold_and_grows_with_the_share(
    played, one, other, part, whole, seed
):
    (low, high), (less, more) = sorted((one, other)), sorted((part, whole))
    found = keys(paid(played, low, more, seed=seed))
    assert keys(paid(played, high, less, seed=seed)) <= found
    enough = [e for e in played if e.reward >= low and e.turns]
    assert found <= keys(enough) == keys(paid(played, low, seed=seed))
    assert {e.key for e in enough if e.policy == "expert"} <= found


@given(explored(), above_0, shares, st.integers(0, 9))
def test_whether_an_episode_is_drawn_depends_on_the_seed_and_itself_alone(played, low, share, seed):
    among = keys(paid(played, low, share, seed=seed))
    moved = [replace(e, policy=e.policy.replace("run/", "elsewhere/")) for e in reversed(played)]
    assert keys(paid(moved, low, share, seed=seed)) == among
    assert among == {e.key for e in played if paid([e], low, share, seed=seed)}


def test_a_share_draws_about_as_many_and_another_seed_draws_others():
    played = [tiny.episode(index=n) for n in range(2_000)]
    drawn = [keys(paid(played, 1.0, 0.3, seed=seed)) for seed in (1, 2)]
    assert all(540 < len(found) < 660 for found in drawn) and drawn[0] != drawn[1]  # 600 ± 3 · 20.5


@given(explored())
def test_of_equal_ones_one_stays_the_experts_or_the_best_paid_in_the_order_of_the_file(played):
    found = distinct(played)
    said = [(e.instance, e.said) for e in found]
    assert len(set(said)) == len(said) and set(said) == {(e.instance, e.said) for e in played}
    assert found == [e for e in played if e in found]
    for e in played:
        (kept,) = [other for other in found if (other.instance, other.said) == (e.instance, e.said)]
        assert (is_expert(kept), kept.reward) >= (is_expert(e), e.reward)


def test_of_an_expert_in_an_agents_state_the_first_answer_counts_if_it_solved_the_page():
    said = [
        tiny.episode("abc", outcome, policy="dagger", forced=1) for outcome in ("solved", "limit")
    ]
    ended = tiny.episode("a", policy="dagger", forced=1)
    assert [e.said for e in answers_of_experts([*said, ended])] == [("a", "b")]


def test_an_episode_counts_by_how_much_better_its_verdict_is_than_its_instances():
    """Of instance 1 one of two solved, of instance 2 both: exp(±0.5 / 0.5) and exp(0), whatever the order."""
    played = [
        tiny.episode(seed=1),
        tiny.episode(seed=2),
        tiny.episode("x", "failed", seed=1, index=1),
        tiny.episode(seed=2, index=1),
    ]
    up, even, down, same = weights_by_advantage(played, 0.5)
    assert up / down == pytest.approx(2.718281828**2) and even == same
    assert weights_by_advantage(played[::-1], 0.5) == pytest.approx([same, down, even, up])
