"""Calls of functions: the grammar, and what keeps to a schema."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.calls import Call, Tool, Tools, render
from envs.protocol import ActionError

ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
TOOL = Tool("act", "Do it.", {"first": {}, "second": {}}, frozenset())
GUESS = Tool(
    "guess",
    "Say a number.",
    {"number": {"type": "integer"}, "way": {"enum": ["up", "down"]}},
    frozenset({"number"}),
)
CALLS = Tools([GUESS])


@given(given=st.dictionaries(st.sampled_from(["first", "second"]), ANY))
def test_a_call_that_is_written_can_be_read_back(given):
    ordered = {name: given[name] for name in ("first", "second") if name in given}
    call = Call("act", json.dumps(ordered, ensure_ascii=False))
    assert "\n" not in render(call) and Tools([TOOL]).parse(render(call)) == call


def test_arguments_may_come_in_their_order_or_by_name():
    wanted = Call("guess", '{"number": 3, "way": "up"}')
    for text in ('guess(3, "up")', 'guess(way="up", number=3).', '`guess( number = 3 ,"up")`'):
        assert CALLS.parse(text) == wanted


@pytest.mark.parametrize(
    "text, why",
    [
        ("look()", "guess"),
        ("guess", "looks like"),
        ("guess()", "number"),
        ('guess(number="3")', "integer"),
        ("guess(number=true)", "integer"),
        ('guess(3, "left")', '"up" or "down"'),
        ("guess(3, number=3)", "twice"),
        ('guess(3, "up", 5)', "one more"),
        ("guess(3 way=1)", "comma"),
        ("guess(3) guess(4)", "one call"),
        ("guess(3", "comma or a bracket"),
        ("guess(x)", "JSON"),
        ("guess(NaN)", "integer"),
        ("guess(" + "[" * 100_000, "JSON"),
        ("guess(" + "9" * 5_000 + ")", "JSON"),
    ],
)
def test_what_is_no_call_is_refused_in_a_line(text, why):
    with pytest.raises(ActionError, match=why) as error:
        CALLS.parse(text)
    assert "\n" not in str(error.value)


def test_half_a_character_and_endless_numbers_are_refused():
    for text in (r'act("\ud800")', "act(1e999)", "act(NaN)"):
        with pytest.raises(ActionError):
            Tools([TOOL]).parse(text)
