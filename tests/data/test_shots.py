"""Solved examples before a task: shown to the agent, kept in its episode, and never learned."""

from dataclasses import replace

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from minidpo.acting.collect import with_shots
from minidpo.acting.policies import Job
from minidpo.config import SFT, CollectCommand, DPOCommand, EvaluateCommand
from minidpo.data import trl_files
from minidpo.data.episodes import Episode, Turn, Writer, read
from minidpo.data.pairs import Pair, check_prompts
from minidpo.data.prompt import SYSTEM, as_shots, conversation, dialogue_of, next_prompt
from minidpo.learning.dpo import load_pairs
from minidpo.learning.rm import load_valued
from minidpo.learning.rollouts import own_rollouts
from minidpo.learning.sft import imitated

CHAT = tiny.chat()
episodes = st.builds(
    lambda answers, **changes: tiny.episode(answers, **changes),
    st.lists(st.sampled_from([tiny.CLICK_1, tiny.CLICK_2, "?"]), min_size=1, max_size=3),
    seed=st.integers(1, 9),
)
shots = st.lists(episodes, max_size=3).map(as_shots)


def learned(episode):
    """The tokens that count, with the number of the turn of each."""
    dialogue = dialogue_of(episode, CHAT)
    return [
        (token, turn) for token, turn in zip(dialogue.ids, dialogue.turns, strict=True) if turn >= 0
    ]


@given(episodes, shots)
def test_what_is_learned_is_what_the_agent_said_whatever_it_was_shown_before(episode, shown):
    behind = replace(episode, shots=shown)
    assert learned(behind) == learned(episode)
    ids, alone = dialogue_of(behind, CHAT).ids, dialogue_of(episode, CHAT).ids
    system = len(CHAT.dialogue(conversation("", ())).ids)
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
    trained = dialogue_of(replace(episode, shots=shown), CHAT).ids
    for t, turn in enumerate(episode.turns):
        asked = CHAT.prompt(
            next_prompt(episode.instruction, episode.turns[:t], turn.observation, shown)
        )
        assert trained[: len(asked)] == list(asked)


def test_an_example_is_its_pages_and_answers_in_turn():
    turns = Turn("p1", "a1", None, "no"), Turn("p2", "a2", "x")
    example = Episode("t", 1, 0, "do it", turns, "solved", 1.0, "me")
    assert as_shots([example]) == ("task: do it\npage:\np1", "a1", "error: no\npage:\np2", "a2")
    messages = next_prompt("new", (), "p", as_shots([example]))
    assert [m.role for m in messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    assert (messages[0].content, messages[-1].content) == (SYSTEM, "task: new\npage:\np")


@pytest.fixture
def examples(tmp_path):
    """Of a task: seeds 1 and 2 solved, 3 failed, 4 solved."""
    with Writer(tmp_path / "examples.jsonl") as writer:
        writer.extend(
            tiny.episode((f"by {seed}",), seed=seed, outcome="failed" if seed == 3 else "solved")
            for seed in (1, 2, 3, 4)
        )
    return tmp_path / "examples.jsonl"


def test_each_episode_has_the_first_solved_examples_of_its_task_that_are_of_other_instances(
    examples,
):
    jobs = [Job("click-button", seed, n, 5) for seed in (1, 7) for n in range(2)]
    shown = with_shots(jobs, examples, 2)
    assert [job._replace(shots=()) for job in shown] == jobs
    said = [[text for text in job.shots if text.startswith("by")] for job in shown]
    assert said == [["by 2", "by 4"]] * 2 + [["by 1", "by 2"]] * 2
    with pytest.raises(ValueError, match=": 2 solved examples of click-button beside seed 1, n"):
        with_shots(jobs, examples, 3)
    with pytest.raises(ValueError, match="0 solved examples of click-link beside seed 1, not 1"):
        with_shots([Job("click-link", 1, 0, 5)], examples, 1)


def test_a_file_keeps_them_and_older_ones_had_none(tmp_path):
    with Writer(tmp_path / "a.jsonl") as writer:
        writer.add(tiny.episode(shots=("shown", "said")))
    assert read(tmp_path / "a.jsonl")[0].shots == ("shown", "said")
    assert Episode.from_json(tiny.episode().to_json().replace('"shots": [], ', "")).shots == ()
    with pytest.raises(ValueError, match="'shots' should be list"):
        Episode.from_json(tiny.episode().to_json().replace('"shots": []', '"shots": "one"'))


def test_answers_to_other_prompts_are_not_compared(tmp_path):
    solved, failed = tiny.episode("a", shots=("x", "y")), tiny.episode("b", "failed", index=1)
    elsewhere = replace(failed, seed=2)
    check_prompts([solved, elsewhere])
    for refuses in (
        check_prompts,
        lambda both: own_rollouts(both, []),
        lambda both: imitated(both, SFT(weighting="advantage")),
    ):
        for other in (failed, replace(failed, shots=solved.shots, instruction="Buy pears")):
            with pytest.raises(
                ValueError, match="of tiny: played behind other examples, or told another"
            ):
                refuses([solved, other])
    with (
        Writer(tmp_path / "rollouts.jsonl") as rollouts,
        Writer(tmp_path / "golden.jsonl") as golden,
    ):
        rollouts.add(replace(failed, index=0))
        golden.add(replace(solved, policy="expert"))
    command = DPOCommand(data=(tmp_path / "rollouts.jsonl",), golden=tmp_path / "golden.jsonl")
    with Writer(tmp_path / "solved.jsonl") as others:
        others.add(replace(solved, index=2))
    for refused in (
        lambda: load_pairs(replace(command, dpo=replace(command.dpo, pairs="expert")), "token"),
        lambda: load_pairs(
            DPOCommand(data=(tmp_path / "solved.jsonl",), failures=(tmp_path / "rollouts.jsonl",)),
            "token",
        ),
        lambda: load_valued((tmp_path / "rollouts.jsonl", tmp_path / "solved.jsonl")),
    ):
        with pytest.raises(ValueError, match="played behind other examples"):
            refused()


def test_another_trainer_reads_them_as_part_of_the_prompt(tmp_path):
    sides = [tiny.episode(*side, shots=("x", "y")) for side in (("a", "solved"), ("b", "failed"))]
    row = trl_files._row(Pair(*sides))
    assert [m["content"] for m in row["prompt"][:3]] == [SYSTEM, "x", "y"] and len(
        row["prompt"]
    ) == 4
    assert [m["content"] for m in row["chosen"] + row["rejected"]] == ["a", "b"]


@pytest.mark.parametrize("command", [CollectCommand, EvaluateCommand])
@pytest.mark.parametrize("options", [{"shots": 1}, {"examples": "e.jsonl"}])
def test_how_many_and_from_where_belong_together(command, options):
    with pytest.raises(ValueError, match="give both, or leave both out"):
        command(**options)
