"""What is written is read back, a torn line is the only damage, and a bad one is named."""

import fcntl
import json
import math
import os
from collections import Counter
from dataclasses import replace

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from minidpo.data.episodes import Cost, Episode, Turn, Writer, arrange, in_a_loop, read, read_all

KEY = 'PRESS(key="ArrowRight")'
texts = st.one_of(
    st.text(max_size=12), st.sampled_from(["\n", "\r\n", "\u2028", "\x85", '"\\', "\x00", ""])
)
numbers = st.floats(allow_nan=False, allow_infinity=False)
turns = st.builds(
    Turn,
    texts,
    texts,
    st.none() | texts,
    st.none() | texts,
    st.none() | st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    st.none() | st.lists(numbers, max_size=3).map(tuple),
)
episodes = st.builds(
    Episode,
    texts,
    st.integers(0, 2**40),
    st.integers(0, 99),
    texts,
    st.lists(turns, max_size=3).map(tuple),
    st.sampled_from(["solved", "failed", "limit"]),
    numbers,
    texts,
    st.dictionaries(texts, numbers | texts, max_size=2),
    st.none() | st.builds(Cost, st.integers(0), st.integers(0), numbers, numbers),
)


def write(path, played):
    with Writer(path) as writer:
        for episode in played:
            writer.add(episode)


@given(episodes)
def test_an_episode_is_one_line_and_comes_back_as_it_was(episode):
    line = episode.to_json()
    assert "\n" not in line and "\r" not in line
    assert Episode.from_json(line) == Episode.from_json(line.encode()) == episode
    assert (
        Episode.from_json(line).cost == episode.cost
    )  # which does not count when episodes are compared


def test_a_file_that_was_cut_anywhere_is_repaired_and_completed_to_the_same_bytes(tmp_path):
    path = tmp_path / "played.jsonl"
    played = [tiny.episode((), index=i, instruction="naïve") for i in range(3)]
    write(path, played)
    whole = path.read_bytes()
    first = whole.index(b"\n")
    for cut in (*range(0, len(whole) + 1, 7), first, first + 1):
        path.write_bytes(whole[:cut])
        with Writer(path) as writer:
            complete = [line for line in whole.splitlines() if line in whole[:cut].splitlines()]
            assert len(writer.done) == len(complete)  # the last one with or without its line break
            for episode in played:
                writer.add(episode)
        assert path.read_bytes() == whole


@pytest.mark.parametrize("field", [("note", 1), ("version", 2)])
def test_a_whole_last_line_that_is_no_episode_is_refused_and_kept(tmp_path, field):
    path = tmp_path / "played.jsonl"
    write(path, [tiny.episode()])
    with open(path, "a") as file:
        file.write(json.dumps(json.loads(tiny.episode(index=1).to_json()) | dict([field])))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="played.jsonl, line 2: "):
        Writer(path)
    assert path.read_bytes() == before


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"),
            st.sampled_from(["CLICK(1)", "WAIT()", KEY, None]),
            st.sampled_from(["one", "other"]),
            st.sampled_from([None, "no"]),
        ),
        max_size=12,
    )
)
def test_a_loop_is_the_same_on_the_same_page_for_the_third_time(said):
    """Where an answer held no action, the answer counts; waiting is no loop, nor an arrow key."""
    turns = [Turn(page, answer, action, error) for page, action, answer, error in said]
    seen = Counter()
    for n, (page, action, answer, error) in enumerate(said, 1):
        free = action in ("WAIT()", KEY) and error is None
        seen[page, action or answer] += not free
        assert in_a_loop(turns[:n]) == (not free and seen[page, action or answer] >= 3)
    assert not in_a_loop([])


def test_no_episode_is_written_twice_not_even_after_a_restart(tmp_path):
    path, episode = tmp_path / "played.jsonl", tiny.episode()
    for other in (episode, replace(episode, outcome="failed", reward=0.0)):
        with Writer(path) as writer:
            writer.add(other)
            writer.add(other)
    assert read(path) == [episode]


def changed(**values):
    return json.dumps({**json.loads(tiny.episode().to_json()), **values}).encode()


def turn(**values):
    record = json.loads(tiny.episode().to_json())
    record["turns"] = [{**record["turns"][0], **values}]
    return json.dumps(record).encode()


def without(name):
    return json.dumps(
        {k: v for k, v in json.loads(tiny.episode().to_json()).items() if k != name}
    ).encode()


@pytest.mark.parametrize(
    "line, says",
    [
        (b'{"task": "cli"', "not JSON (Expecting ',' delimiter, column"),
        (b'{"task": "\xff"}', "can't decode byte 0xff"),
        (b"[]", "not an episode of format version 1"),
        (changed(version=2), "not an episode of format version 1"),
        (without("seed"), "episode: 'seed' is missing"),
        (changed(seed="1"), "episode: 'seed' should be int, got '1'"),
        (changed(seed=True), "episode: 'seed' should be int, got True"),
        (changed(reward=None), "episode: 'reward' should be float or int, got None"),
        (changed(turns={}), "episode: 'turns' should be list, got {}"),
        (changed(turns=[3]), "turn 0 is not a JSON object"),
        (changed(colour="red"), "episode: unknown field 'colour'"),
        (turn(answer=None), "turn 0: 'answer' should be str, got None"),
        (turn(action=4), "turn 0: 'action' should be null or str, got 4"),
        (turn(ids=5), "turn 0: 'ids' should be null or list, got 5"),
        (turn(taste="sweet"), "turn 0: unknown field 'taste'"),
        (turn(ids=["x"]), "turn 0: 'ids' should hold a token id, got 'x'"),
        (turn(ids=[-1]), "turn 0: 'ids' should hold a token id, got -1"),
        (turn(logps=[math.nan]), "turn 0: 'logps' should hold a number, got nan"),
        (changed(reward=math.inf), "episode: 'reward' should hold a number, got inf"),
        (turn(logps=[None]), "turn 0: 'logps' should hold a number, got None"),
        (changed(reward=10**400), "episode: 'reward' should hold a number, got 1000"),
        (turn(answer="a\ud800"), "turn 0: 'answer' should hold text, got 'a\\ud800'"),
        (changed(shots=[1]), "episode: 'shots' should hold text, got 1"),
        (
            changed(outcome="Solved"),
            "'outcome' should be solved, failed, limit or stopped, got 'Solved'",
        ),
        (b"[" * 100_000, "not JSON (nested too deep)"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number_with_what_is_wrong(tmp_path, line, says):
    path = tmp_path / "played.jsonl"
    path.write_bytes(tiny.episode().to_json().encode() + b"\n" + line + b"\n")
    for use in (read, Writer):
        with pytest.raises(ValueError) as error:
            use(path)
        assert str(error.value).startswith(f"{path}, line 2: ") and says in str(error.value)


def test_a_file_is_arranged_in_the_order_of_the_keys_with_others_behind(tmp_path):
    path = tmp_path / "played.jsonl"
    played = [tiny.episode(index=n) for n in (3, 0, 2, 7, 1)]
    write(path, played)
    arrange(path, [tiny.episode(index=n).key for n in range(4)])
    assert [episode.index for episode in read(path)] == [0, 1, 2, 3, 7]
    before = path.stat().st_mtime_ns
    arrange(path, [tiny.episode(index=n).key for n in range(4)])
    assert path.stat().st_mtime_ns == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"reward": float("nan")}, "'reward' should hold a number"),
        ({"outcome": "won"}, "'outcome' should be"),
        ({"reward": True}, "'reward' should be float"),
        ({"reward": 1j}, "not JSON serializable"),
    ],
)
def test_what_could_not_be_read_again_is_not_written(tmp_path, changes, says):
    """A world of one's own may pay anything; the episodes before stay, and a run goes on behind them."""
    with Writer(tmp_path / "a.jsonl") as writer:
        writer.add(tiny.episode(seed=1))
        with pytest.raises(
            ValueError, match=f"seed 2.*: the world or its policy gave .*: .*{says}"
        ):
            writer.extend(
                [tiny.episode(seed=3), tiny.episode(**{"seed": 2, "outcome": "failed", **changes})]
            )
    assert [episode.seed for episode in read(tmp_path / "a.jsonl")] == [1]


def test_two_cannot_write_to_one_file(tmp_path):
    path = tmp_path / "played.jsonl"
    with Writer(path) as writer:
        writer.add(tiny.episode())
        with pytest.raises(ValueError, match="another process is writing"):
            Writer(path)
    with Writer(path) as writer:
        assert writer.done == {tiny.episode().key}
