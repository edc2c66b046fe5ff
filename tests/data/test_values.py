"""Step values: unbiased where they are known, blind to what is no continuation."""

import math
from itertools import product

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from minidpo.data.values import states, step_values, values_of


@st.composite
def explorations(draw):
    """Episodes of two instances with the same few words, any number of their first steps given."""
    played = []
    for index in range(draw(st.integers(1, 12))):
        said = draw(st.text("ab", max_size=3))
        outcome, seed = draw(st.sampled_from(["solved", "failed"])), draw(st.integers(0, 1))
        forced = draw(st.integers(0, len(said)))
        played.append(tiny.episode(said, outcome, seed=seed, index=index, forced=forced))
    return played


def chain(t, steps, length=3):
    """A continuation from step t that walks so many steps, with its probability."""
    said = "a" * (t + steps)
    if t + steps == length:
        return 0.7**steps, tiny.episode(said, "solved", forced=t)
    return 0.7**steps * 0.3, tiny.episode(said + "x", "failed", forced=t)


def test_step_values_are_unbiased_on_a_chain_whose_values_are_known():
    """An agent takes the right step with probability 0.7, else the page is over. So V is 0.7 to the power of
    the steps that are left. All that two continuations from each step can do, with its probability."""
    walked = tiny.episode("aaa")
    ways = [[chain(t, steps) for steps in range(3 - t + 1)] for t in range(3)]
    expected = [0.0] * 4
    for played in product(*(product(of_step, of_step) for of_step in ways)):
        probability = math.prod(p for pair in played for p, _ in pair)
        values = step_values(walked, [episode for pair in played for _, episode in pair])
        expected = [mean + probability * value for mean, value in zip(expected, values)]
    assert expected == pytest.approx([0.7**3, 0.7**2, 0.7, 1.0])


@given(explorations(), st.randoms())
def test_a_value_is_the_share_of_what_began_in_its_state_in_any_order(played, random):
    """Another instance, other words before it, more or fewer given steps: each alone keeps an episode out."""
    shuffled = random.sample(played, len(played))
    for episode, values in zip(played, values_of(played, shuffled), strict=True):
        assert values[-1] == float(episode.solved)
        for t, value in enumerate(values[:-1]):
            state = episode.instance, t, episode.said[:t]
            here = [e.solved for e in played if (e.instance, e.forced, e.said[: e.forced]) == state]
            assert value == (sum(here) / len(here) if here else None)


@given(explorations())
def test_the_states_are_all_that_was_said_before_a_step_of_the_agents_own_each_once(played):
    group = [episode for episode in played if episode.seed == 0]
    found = states(group)
    assert len(set(found)) == len(found)
    assert set(found) == {e.said[:t] for e in group for t in range(len(e.turns)) if t >= e.forced}
