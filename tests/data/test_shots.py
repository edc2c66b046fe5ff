"""Solved examples before a task: shown to the agent, kept in its episode, and never learned."""

from dataclasses import replace

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from minidpo.data import prompt
from minidpo.data.episodes import Episode, Turn, Writer, read
from minidpo.data.prompt import as_shots, conversation, next_prompt

CHAT = tiny.chat()
SYSTEM = tiny.SYSTEM_PROMPT
episodes = st.builds(
    lambda answers, **changes: tiny.episode(answers, **changes),
    st.lists(st.sampled_from([tiny.CLICK_1, tiny.CLICK_2, "?"]), min_size=1, max_size=3),
    seed=st.integers(1, 9),
)
shots = st.lists(episodes, max_size=3).map(as_shots)


def dialogue_of(episode):
    return prompt.dialogue_of(episode, CHAT, SYSTEM)


def learned(episode):
    """The tokens that count, with the number of the turn of each."""
    dialogue = dialogue_of(episode)
    return [
        (token, turn) for token, turn in zip(dialogue.ids, dialogue.turns, strict=True) if turn >= 0
    ]


@given(episodes, shots)
def test_what_is_learned_is_what_the_agent_said_whatever_it_was_shown_before(episode, shown):
    behind = replace(episode, shots=shown)
    assert learned(behind) == learned(episode)
    ids, alone = dialogue_of(behind).ids, dialogue_of(episode).ids
    system = len(CHAT.dialogue(conversation("", (), SYSTEM)).ids)
    assert (
        ids[:system] == alone[:system] and ids[len(ids) - len(alone) + system :] == alone[system:]
    )


@given(episodes, shots)
def test_an_expert_who_plays_on_behind_examples_is_learned_from_his_first_answer(episode, shown):
    """The turns before it are the agent's and given."""
    taught = replace(episode, policy="dagger", forced=len(episode.turns) - 1, shots=shown)
    assert learned(taught) == learned(replace(taught, shots=()))
    assert {turn for _, turn in learned(taught)} == {0}


@given(episodes, shots)
def test_what_is_trained_on_is_what_the_agent_read(episode, shown):
    trained = dialogue_of(replace(episode, shots=shown)).ids
    for t, turn in enumerate(episode.turns):
        asked = CHAT.prompt(
            next_prompt(episode.instruction, episode.turns[:t], turn.observation, SYSTEM, shown)
        )
        assert trained[: len(asked)] == list(asked)


def test_an_example_is_its_pages_and_answers_in_turn():
    turns = Turn("p1", "a1", None, "no"), Turn("p2", "a2", "x")
    example = Episode("t", 1, 0, "do it", turns, "solved", 1.0, "me")
    assert as_shots([example]) == ("task: do it\npage:\np1", "a1", "error: no\npage:\np2", "a2")
    messages = next_prompt("new", (), "p", SYSTEM, as_shots([example]))
    assert [m.role for m in messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    assert (messages[0].content, messages[-1].content) == (SYSTEM, "task: new\npage:\np")


def test_a_file_keeps_them_and_older_ones_had_none(tmp_path):
    with Writer(tmp_path / "a.jsonl") as writer:
        writer.add(tiny.episode(shots=("shown", "said")))
    assert read(tmp_path / "a.jsonl")[0].shots == ("shown", "said")
    assert Episode.from_json(tiny.episode().to_json().replace('"shots": [], ', "")).shots == ()
    with pytest.raises(ValueError, match="'shots' should be a list"):
        Episode.from_json(tiny.episode().to_json().replace('"shots": []', '"shots": "one"'))
