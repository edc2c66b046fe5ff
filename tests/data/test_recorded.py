"""Recorded calls are read as the conversations that they were, or refused by file and line."""

import json

import pytest
import tiny

from minidpo.data import recorded
from minidpo.data.episodes import Writer
from minidpo.data.pairs import NothingToLearn, outcome_pairs
from minidpo.data.prompt import dialogue_of
from minidpo.data.trl_files import are_trl_files
from minidpo.learning.preferences import tokenise
from minidpo.learning.rollouts import own_rollouts

CHAT = tiny.chat()


def call(name, conversation="a", after=None, read=(5, 6), ids=(7,), **changes):
    line = recorded.Call(
        conversation,
        name,
        after,
        "page",
        f"said {ids}",
        read,
        ids,
        (-0.5,) * len(ids),
        f"tiny@w-{CHAT.fingerprint}",
        1.0,
        1.0,
    )
    return {**json.loads(line.to_json()), **changes}


def verdict(conversation="a", solved=True):
    return {"conversation": conversation, "solved": solved}


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_conversation_is_a_way_through_its_calls_and_a_branch_is_another(tmp_path):
    rows = [
        call("1"),
        call("2", after="1", read=(8,), ids=(9, 4)),
        call("3", after="1", read=(8,), ids=(9, 3)),  # the second answer was asked for again
        call("4", read=(1,), ids=(2,)),  # with another prompt, as a summary is
        call(
            "5", conversation="b", after="1", read=(8,), ids=(3,)
        ),  # a branch with its own verdict
    ]
    found = recorded.read([jsonl(tmp_path / "x", *rows, verdict(), verdict("b", False))])
    dialogues = [dialogue_of(episode, CHAT, "no system prompt") for episode in found]
    assert dialogues == [
        ([5, 6, 7, 8, 9, 4], [-1, -1, 0, -1, 1, 1]),
        ([5, 6, 7, 8, 9, 3], [-1, -1, 0, -1, 1, 1]),
        ([1, 2], [-1, 0]),
        ([5, 6, 7, 8, 3], [-1, -1, 0, -1, 1]),
    ]
    assert [e.instance for e in found] == [("conversation", n) for n in (0, 0, 1, 0)]
    assert [e.key[2] for e in found] == [0, 1, 0, 2] and [e.solved for e in found] == [True] * 3 + [
        False
    ]
    pairs = outcome_pairs(found)
    assert len(tokenise(pairs, CHAT, 1024, "", "end").pairs) == len(pairs) == 2
    assert own_rollouts(found) == found
    assert found[0].up_to(1).dialogue(CHAT) == ([5, 6, 7], [-1, -1, 0])


def test_the_last_verdict_counts_and_what_has_none_is_left_out_and_counted(tmp_path, capsys):
    rows = [call("1"), call("2", "b"), verdict(), verdict(solved=False)]
    (episode,) = recorded.read([jsonl(tmp_path / "x", *rows)])
    assert (episode.outcome, episode.name) == ("failed", "conversation a")
    assert capsys.readouterr().out.startswith("1 conversations are left out")
    with pytest.raises(NothingToLearn, match="/v1/verdicts"):
        recorded.read([jsonl(tmp_path / "x", *rows[:2])])


def test_verdicts_may_be_in_a_file_of_their_own_and_a_conversation_in_two(tmp_path):
    first, second = jsonl(tmp_path / "x", call("1")), jsonl(tmp_path / "y", call("2", after="1"))
    judged = jsonl(tmp_path / "z", verdict())
    assert recorded.are_recorded([judged, first]) and not are_trl_files([judged, first])
    (episode,) = recorded.read([first, second, judged])
    assert len(episode.turns) == 2
    with pytest.raises(ValueError, match="y: call 2 goes on from 1, which no line before it"):
        recorded.read([second, first, judged])


@pytest.mark.parametrize(
    "row",
    [
        "{",
        call("2", version=9),
        call("2", ids=[]),
        call("2", logps=[]),
        call("2", read=["a"]),
        call("2", top_p=None),
        {**call("2"), "what": 1},
        {"conversation": "a", "solved": 1},
        {"conversation": "a", "solved": True, "reward": 1},
        {"prompt": []},
    ],
    ids=str,
)
def test_a_line_that_cannot_be_read_is_refused_by_file_and_number(tmp_path, row):
    path = jsonl(tmp_path / "x", call("1"))
    with open(path, "a") as file:
        file.write(row if isinstance(row, str) else json.dumps(row))
    with pytest.raises(ValueError, match="x, line 2: ") as caught:
        recorded.read([path])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rows", [[call("1"), call("1")], [call("1"), verdict("b")]])
def test_a_call_that_is_there_twice_and_a_verdict_for_nobody_are_refused(tmp_path, rows):
    with pytest.raises(ValueError, match="twice|conversation b"):
        recorded.read([jsonl(tmp_path / "x", *rows, verdict())])


def test_files_of_two_kinds_are_refused(tmp_path):
    calls, episodes = jsonl(tmp_path / "x", call("1")), tmp_path / "y"
    with Writer(episodes) as writer:
        writer.add(tiny.episode())
    with pytest.raises(ValueError, match="x holds recorded calls and .*y does not"):
        recorded.are_recorded([calls, episodes])
    with pytest.raises(ValueError, match="no such file"):
        recorded.read([tmp_path / "missing"])


def test_what_was_sampled_at_another_temperature_is_no_sample_of_the_policy(tmp_path):
    warm = call("2", after="1", temperature=0.5)
    (episode,) = recorded.read([jsonl(tmp_path / "x", call("1"), warm, verdict())])
    assert episode.sampling["temperature"] == [1.0, 0.5]
    with pytest.raises(ValueError, match="conversation a: .*temperature 1"):
        own_rollouts([episode])


def test_a_record_goes_on_behind_what_a_kill_left_and_nobody_else_writes_to_it(tmp_path):
    from minidpo.acting.endpoint import Record

    path = jsonl(tmp_path / "x", call("1"))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"version": 1, "conv')
    with Record(path) as record:
        assert path.read_bytes() == whole and record.conversations == {"a"}
        record.add(recorded.Verdict("a", True))
        with pytest.raises(ValueError, match="another process"):
            Record(path)
    assert len(recorded.read([path])) == 1
    for other in ("text", tiny.episode().to_json()):
        (tmp_path / "y").write_text(f"{other}\n")
        with pytest.raises(ValueError, match="y, line 1: "):
            Record(tmp_path / "y")
        assert (tmp_path / "y").read_text() == f"{other}\n"
