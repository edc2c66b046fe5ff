"""Mutual information of prompt and answer: 0 for templates, the entropy of the task for one answer each; and
how unlike the attempts at one instance are."""

import math
import random
from itertools import permutations
from statistics import fmean

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from minidpo.data.episodes import by_instance
from minidpo.data.information import answer_information, diversity


def answered(answers, **changes):
    """An episode for each answer to each prompt; answers: {number of the prompt: [answer]}."""
    return [
        tiny.episode(
            (str(answer),), seed=prompt, index=n, instruction=f"Click on {prompt}.", **changes
        )
        for prompt, said in answers.items()
        for n, answer in enumerate(said)
    ]


groups = st.dictionaries(
    st.integers(0, 5), st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=5
)


@pytest.mark.parametrize("kinds", [2, 50])
def test_answers_that_do_not_depend_on_the_prompt_have_no_information_however_few_there_are(kinds):
    """Eight answers to each of 400 prompts, drawn alike. The plug-in estimate says 1.9 nats for 50 kinds."""
    draw = random.Random(kinds)
    answers = {prompt: [draw.randrange(kinds) for _ in range(8)] for prompt in range(400)}
    # agreeing couples are 28 of each prompt, so of 50 kinds about 224 in all: a relative error of 1/15
    assert answer_information(answered(answers)) == pytest.approx(
        0, abs=3 / math.sqrt(400 * 28 / kinds)
    )


@given(st.lists(st.integers(0, 3), min_size=2, max_size=9))
def test_answers_that_the_prompt_determines_have_the_collision_entropy_of_the_answers(answer_to):
    shares = [answer_to.count(answer) / len(answer_to) for answer in set(answer_to)]
    found = answer_information(
        answered({prompt: [answer] * 3 for prompt, answer in enumerate(answer_to)})
    )
    assert found == pytest.approx(-math.log(sum(share**2 for share in shares)))


def test_both_probabilities_are_counted_without_bias():
    """By hand: of "aab" 2 of 6 ordered couples agree, of "aaa" all 6: 2/3 on average. Across the prompts
    2 of 3 agree. So of two prompts drawn at random (2/3)/2 + (2/3)/2 agree."""
    assert answer_information(answered({1: "aab", 2: "aaa"})) == pytest.approx(
        math.log((2 / 3) / (2 / 3))
    )
    assert answer_information(answered({1: "aab", 2: "ccc"})) == pytest.approx(
        math.log((2 / 3) / (1 / 3))
    )


@given(groups, st.randoms())
def test_order_names_and_lone_answers_change_nothing_and_the_most_is_the_log_of_the_prompts(
    answers, random
):
    episodes = answered(answers)
    found = answer_information(episodes)
    several = [said for said in answers.values() if len(said) > 1]
    assert (found is None) == (
        len(several) < 2 or all(len(set(said)) == len(said) for said in several)
    )
    shuffled = episodes + answered({9: ["x"]})
    random.shuffle(shuffled)
    renamed = answered(
        {prompt: [f"word {answer}" for answer in said] for prompt, said in answers.items()}
    )
    for other in (shuffled, renamed):
        assert answer_information(other) == (
            found if found is None else pytest.approx(found, abs=1e-9)
        )
    assert found is None or found <= math.log(len(several)) + 1e-9


def test_attempts_from_two_states_are_not_unlike_by_what_was_given():
    behind = [tiny.episode((given, "x"), forced=1, index=n) for n, given in enumerate("aabb")]
    assert diversity(behind) == {"diversity": 0.0, "mixed": 0.0} and diversity(behind[::2]) == {}


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from("ab"), st.sampled_from(["solved", "failed"]))
    ),
    st.randoms(use_true_random=False),
)
def test_diversity_counts_unlike_couples_and_mixed_instances_in_any_order(attempts, shuffled):
    """By its definition: of all couples of an instance, those that said something else."""
    played = [
        tiny.episode(word, outcome, seed=seed, index=n)
        for n, (seed, word, outcome) in enumerate(attempts)
    ]
    several = [group for group in by_instance(played).values() if len(group) > 1]
    couples = [[a.said != b.said for a, b in permutations(group, 2)] for group in several]
    found = diversity(played)
    assert bool(found) == bool(several)
    if several:
        assert found["diversity"] == pytest.approx(fmean(map(fmean, couples)))
        mixed = [len({e.solved for e in group}) == 2 for group in several]
        assert found["mixed"] == pytest.approx(sum(mixed) / len(several))
    shuffled.shuffle(played)
    assert diversity(played) == pytest.approx(found)
