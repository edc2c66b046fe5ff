"""Step values: unbiased where they are known, blind to what is no continuation, low behind a slip."""

import math
from dataclasses import replace
from itertools import product

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from envs.actions import parse
from minidpo.acting.causes import expert_action
from minidpo.acting.collect import collect
from minidpo.config import CollectCommand
from minidpo.data.episodes import read
from minidpo.data.pairs import NothingToLearn
from minidpo.data.values import states, step_values
from minidpo.learning.selection import valued_episodes
from minidpo.memory.machine import Machine

OUTCOMES = ["solved", "failed", "limit"]


@st.composite
def explorations(draw):
    """Episodes of two instances with the same few words, any number of their first steps given."""
    played = []
    for index in range(draw(st.integers(1, 12))):
        said = draw(st.text("ab", max_size=3))
        played.append(
            tiny.episode(
                said,
                draw(st.sampled_from(OUTCOMES)),
                seed=draw(st.integers(0, 1)),
                index=index,
                forced=draw(st.integers(0, len(said))),
            )
        )
    return played


def chain(t, steps, length=3):
    """(probability of slipping at each step 0.3) a continuation from step t that walks so many steps."""
    said = "a" * (t + steps)
    solved = t + steps == length
    return (
        0.7**steps * (1.0 if solved else 0.3),
        tiny.episode(said if solved else said + "x", "solved" if solved else "failed", forced=t),
    )


def test_step_values_are_unbiased_on_a_chain_whose_values_are_known():
    """An agent takes the right step with probability 0.7, else the page is over. So V is 0.7 to the power of
    the steps that are left. All that two continuations from each step can do, with its probability."""
    walked = tiny.episode("aaa")
    ways = [[chain(t, steps) for steps in range(3 - t + 1)] for t in range(3)]
    expected, total = [0.0] * 4, 0.0
    for played in product(*(product(of_step, of_step) for of_step in ways)):
        probability = math.prod(p for pair in played for p, _ in pair)
        values = step_values(walked, [episode for pair in played for _, episode in pair])
        expected = [
            mean + probability * value for mean, value in zip(expected, values, strict=True)
        ]
        total += probability
    assert total == pytest.approx(1)
    assert expected == pytest.approx([0.7**3, 0.7**2, 0.7, 1.0])


@given(explorations(), st.randoms())
def test_a_value_is_a_share_and_the_order_of_the_continuations_changes_nothing(played, random):
    for episode in played:
        values = step_values(episode, played)
        assert len(values) == len(episode.turns) + 1
        assert values[-1] == float(episode.solved)
        assert all(value is None or 0 <= value <= 1 for value in values)
        shuffled = list(played)
        random.shuffle(shuffled)
        assert step_values(episode, shuffled) == values


@given(explorations())
def test_valued_are_the_whole_episodes_from_each_of_whose_steps_somebody_went_on(played):
    """In their order; nothing is learned if these are none, or none of several turns where some have several."""
    said = [e for e in played if e.turns]
    whole = [(e, step_values(e, said)) for e in said if not e.forced]
    known = [(e, values) for e, values in whole if None not in values]
    try:
        assert valued_episodes(played, [], "a reader") == known
    except NothingToLearn:
        single = all(len(e.turns) == 1 for e, _ in known)
        assert not known or (single and any(len(e.turns) > 1 for e, _ in whole))


@given(explorations())
def test_what_does_not_begin_in_a_state_does_not_count_for_it(played):
    """Another instance, other words before it, more or fewer given steps: each alone keeps an episode out."""
    for episode in played:
        values = step_values(episode, played)
        for t, value in enumerate(values[:-1]):
            here = [
                e.solved
                for e in played
                if (e.instance, e.forced, e.said[: e.forced])
                == (episode.instance, t, episode.said[:t])
            ]
            assert value == (sum(here) / len(here) if here else None)


@given(explorations())
def test_the_states_are_all_that_was_said_before_a_step_of_the_agents_own_each_once(played):
    group = [episode for episode in played if episode.seed == 0]
    found = states(group)
    assert len(set(found)) == len(found)
    assert set(found) == {e.said[:t] for e in group for t in range(len(e.turns)) if t >= e.forced}


def chance(drops, slips, both, steps):
    """P(at least so many slips among the drops) if the drops were drawn at random: a hypergeometric tail."""
    return sum(
        math.comb(slips, n) * math.comb(steps - slips, drops - n)
        for n in range(both, min(slips, drops) + 1)
    ) / math.comb(steps, drops)


def test_the_chance_of_a_coincidence_by_hand():
    """Two of four steps are slips, the value drops at two: both are slips in 1 of 6 draws."""
    assert chance(2, 2, 2, 4) == pytest.approx(1 / 6) and chance(2, 2, 0, 4) == 1


@pytest.mark.slow
def test_a_slip_of_the_clumsy_expert_is_where_the_value_drops(tmp_path):
    """On real pages, by its own continuations: these are as clumsy, so slips follow right steps, too."""
    tasks = "login-user,enter-password,click-checkboxes,form-sequence-2"
    clumsy = CollectCommand(policy="expert", noise=0.3, machine=Machine(pages=4))
    recorded, values = tmp_path / "recorded.jsonl", tmp_path / "values.jsonl"
    collect(replace(clumsy, tasks=tasks, split="base", instances=8, group=1, out=recorded))
    collect(replace(clumsy, values=4, recorded=recorded, out=values))
    continuations, steps = read(values), []
    for episode in read(recorded):
        actions = [parse(turn.action) for turn in episode.turns]
        drops = step_values(episode, continuations)
        steps += [
            (actions[t] != expert_action(episode, t, actions[:t]), drops[t] > drops[t + 1])
            for t in range(len(actions))
        ]
    slips, drops, both = (
        sum(map(test, steps)) for test in (lambda step: step[0], lambda step: step[1], all)
    )
    assert len(steps) > 40 and 5 < slips < len(steps) / 2
    assert chance(drops, slips, both, len(steps)) < 0.01
    assert both / slips > 2 * (drops - both) / (len(steps) - slips)
