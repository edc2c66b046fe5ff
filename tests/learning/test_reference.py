"""The reference is scored once, and its file serves those weights, tokens and settings alone."""

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from minidpo.learning.reference import cached, identity, key
from minidpo.memory import lora
from minidpo.model.chat import Dialogue

SCORES = torch.tensor([-1.5, -20.25, -0.1])
rows = st.lists(
    st.lists(st.tuples(st.integers(0, 99), st.integers(-1, 3)), min_size=1, max_size=4),
    min_size=1,
    max_size=3,
)


def never():
    raise AssertionError("computed again")


def dialogues(rows):
    return [Dialogue([i for i, _ in row], [turn for _, turn in row]) for row in rows]


def test_what_was_kept_is_what_was_computed_bit_for_bit_and_computed_once(tmp_path):
    path = tmp_path / "run" / "reference.safetensors"
    first = cached(path, "a key", lambda: SCORES)
    again = cached(path, "a key", never)
    assert torch.equal(first, SCORES) and torch.equal(again, SCORES) and again.dtype == SCORES.dtype


def test_scores_of_anything_else_are_refused_and_not_replaced(tmp_path):
    path = tmp_path / "reference.safetensors"
    cached(path, "a key", lambda: SCORES)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="reference.safetensors"):
        cached(path, "another key", never)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content", [b"", b"longer than a header", b"\x08" + bytes(7) + b"{}      "]
)
def test_a_damaged_file_is_named_with_the_way_out(tmp_path, content):
    path = tmp_path / "reference.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"reference.safetensors.*; delete it"):
        cached(path, "a key", never)


@given(rows, st.data())
def test_one_changed_token_turn_weight_or_setting_is_another_key(rows, data):
    one = key("weights", dialogues(rows), "sum None")
    assert key("weights", dialogues(rows), "sum None") == one
    assert key("other weights", dialogues(rows), "sum None") != one
    assert key("weights", dialogues(rows), "mean None") != one
    assert key("weights", dialogues([*rows, rows[0]]), "sum None") != one
    r = data.draw(st.integers(0, len(rows) - 1))
    t = data.draw(st.integers(0, len(rows[r]) - 1))
    i, turn = rows[r][t]
    for changed in ((i + 1, turn), (i, turn + 1)):
        other = [list(row) for row in rows]
        other[r][t] = changed
        assert key("weights", dialogues(other), "sum None") != one


def test_another_base_adapter_or_shape_of_it_is_another_model():
    one, shape = tiny.adapted(), lora.LoRAConfig(rank=3)
    other = tiny.adapted()
    assert identity(other, "base", shape) == identity(one, "base", shape)
    assert identity(one, "another base", shape) != identity(one, "base", shape)
    assert identity(one, "base", lora.LoRAConfig(rank=3, alpha=1.0)) != identity(one, "base", shape)
    with torch.no_grad():
        next(iter(lora.layers(other).values())).lora_A[0, 0] += 1
    assert identity(other, "base", shape) != identity(one, "base", shape)


def test_where_one_dialogue_ends_and_the_next_begins_counts():
    split = [Dialogue([1], [0]), Dialogue([2], [0])]
    assert key("w", split, "sum") != key("w", [Dialogue([1, 2], [0, 0])], "sum")
    assert key("w", split, "sum") != key("w", split[::-1], "sum")
