"""Actions: the text is exact where it is ours, forgiving where it is a model's, and never more than text."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from envs.actions import FORMS, MAX_LETTERS, MAX_PIXELS, Action, ActionError, parse, render

VALUES = {str: st.text(), int: st.integers(-MAX_PIXELS, MAX_PIXELS)}


@st.composite
def actions(draw: st.DrawFn) -> Action:
    command = draw(st.sampled_from(sorted(FORMS)))
    form = draw(st.sampled_from(FORMS[command]))
    return Action(command, **{name: draw(VALUES[kind]) for name, kind in form.items()})


@given(actions())
@example(Action("TYPE", ref="4", text='back\\slash "quote" new\nline \\n \\'))
def test_parse_inverts_render(action):
    assert parse(render(action)) == action


@given(
    actions(),
    st.sampled_from(["{}", " {} ", "{}.", "`{}`", "```{}```", "`{}`.", "{};"]),
    st.booleans(),
)
def test_wrapping_and_case_of_the_command_do_not_matter(action, wrapping, lower):
    text = render(action)
    name, rest = text[: len(action.command)], text[len(action.command) :]
    assert parse(wrapping.format((name.lower() if lower else name) + rest)) == action


@pytest.mark.parametrize(
    "text, action",
    [
        ("CLICK(ref=3)", Action("CLICK", ref="3")),
        ("click( Ref = '3' )", Action("CLICK", ref="3")),
        ("TYPE(text='it\\'s', ref=4)", Action("TYPE", ref="4", text="it's")),
        ("TYPE(ref=4, text=42)", Action("TYPE", ref="4", text="42")),
        ('CLICK_AT(x="10", y=+20)', Action("CLICK_AT", x=10, y=20)),
        ("DRAG(ref=3, dx=-5, dy=0)", Action("DRAG", ref="3", dx=-5, dy=0)),
        ("DRAG(y=0, x=15, ref=3)", Action("DRAG", ref="3", x=15, y=0)),
        ("WAIT( )", Action("WAIT")),
    ],
)
def test_what_is_nearly_right_is_read_as_meant(text, action):
    assert parse(text) == action


@pytest.mark.parametrize(
    "text, reason",
    [
        ("I will click the button", "looks like"),
        ("FLY(ref=3)", "unknown command 'FLY'"),
        ("CLICK()", "CLICK needs CLICK(ref)"),
        ("CLICK(ref=3, text='a')", "CLICK needs CLICK(ref)"),
        ("DRAG(ref=3, to=4, dx=1, dy=1)", "or DRAG(ref, dx, dy) or DRAG(ref, x, y)"),
        ("CLICK(ref=3, ref=4)", "ref is given twice"),
        ("CLICK_AT(x='ten', y=1)", "x of CLICK_AT must be a whole number"),
        ("CLICK_AT(x=99999, y=1)", "within 10000 pixels"),
        (
            f"TYPE(ref=3, text='{'x' * (MAX_LETTERS + 1)}')",
            "text of TYPE must have at most 1,000 characters",
        ),
        ("TYPE(ref=3 text='a')", "a comma is missing"),
        ("CLICK(3)", 'name="value"'),
        ("CLICK(ref=3) CLICK(ref=4)", "a comma is missing"),
    ],
)
def test_what_is_wrong_is_said(text, reason):
    with pytest.raises(ActionError, match=re.escape(reason)):
        parse(text)
