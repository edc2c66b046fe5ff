"""What is written is read back, a torn line is the only damage, and a bad one is named."""

import json
import math
from collections import Counter
from dataclasses import replace

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from minidpo.data.episodes import Cost, Episode, Turn, Writer, arrange, in_a_loop, read

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
    "line",
    [
        b'{"task": "cli"',
        b'{"task": "\xff"}',
        b"[" * 100_000,
        changed(version=2),
        without("seed"),
        changed(seed=True),
        changed(reward=10**400),
        changed(outcome="Solved"),
        changed(colour="red"),
        changed(shots=[1]),
        turn(answer="a\ud800"),
        turn(ids=[-1]),
        turn(logps=[math.nan]),
    ],
)
def test_a_bad_line_is_named_by_file_and_number_and_left_alone(tmp_path, line):
    path = tmp_path / "played.jsonl"
    path.write_bytes(before := tiny.episode().to_json().encode() + b"\n" + line + b"\n")
    for use in (read, Writer):
        with pytest.raises(ValueError) as error:
            use(path)
        assert str(error.value).startswith(f"{path}, line 2: ") and "\n" not in str(error.value)
    assert path.read_bytes() == before


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
        ({"reward": float("nan")}, "'reward' should be a number"),
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
