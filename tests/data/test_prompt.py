"""What an agent means is understood, what it does not say is not guessed."""

import re

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

import envs
from envs.actions import FORMS, Action, render
from envs.protocol import ActionError
from minidpo.data import prompt
from minidpo.data.episodes import Turn
from minidpo.data.prompt import FOLD_FROM_LINES, changes, dialogues_of, thought, write

WORLD = envs.world("miniwob")
SYSTEM = WORLD.system_prompt
CLICK = Action("CLICK", ref="3")


def understand(answer, world=WORLD):
    return prompt.understand(answer, world)


def conversation(instruction, turns):
    return prompt.conversation(instruction, turns, SYSTEM)


def next_prompt(instruction, turns, observation):
    return prompt.next_prompt(instruction, turns, observation, SYSTEM)


@st.composite
def actions(draw):
    command = draw(st.sampled_from(sorted(FORMS)))
    form = draw(st.sampled_from(FORMS[command]))
    kinds = {str: st.text(max_size=8), int: st.integers(-999, 999)}
    return Action(command, **{name: draw(kinds[kind]) for name, kind in form.items()})


@given(st.text(max_size=20).filter(lambda text: "\n" not in text), actions())
def test_what_is_written_is_understood(said, action):
    answer = write(said, render(action))
    assert understand(answer) == action
    assert thought(answer) == said.strip()


@pytest.mark.parametrize(
    "answer",
    [
        'thought: the link\naction: CLICK(ref="3")',
        "Thought: I look.\n\nAction : click( ref = 3 ).\n",
        '**thought:** the link\n**action:** CLICK(ref="3")',
        "  `action: CLICK(ref='3')`  ",
        'thought: I could do more\nsuch as action: this\naction: CLICK(ref="3")\r',
        'action: CLICK(ref="3")\nthat is all',
    ],
)
def test_forms_that_a_model_gets_nearly_right_are_read_as_meant(answer):
    assert understand(answer) == CLICK


@pytest.mark.parametrize(
    "answer",
    [
        'CLICK(ref="3")',
        'my reaction: CLICK(ref="3")',
        'action: CLICK(ref="3")\naction: CLICK(ref="4")',
        "action: click the link",
    ],
)
def test_no_action_or_several_are_refused_with_a_sentence_for_the_agent(answer):
    with pytest.raises(ActionError) as error:
        understand(answer)
    assert "\n" not in str(error.value)


def test_an_answer_without_an_action_is_told_the_example_of_its_worlds_prompt():
    for example in ('CLICK(ref="1")', "OPEN 3"):
        world = type("Other", (type(WORLD),), {"system_prompt": f"Do.\naction: {example}\nor"})()
        with pytest.raises(ActionError, match=re.escape(f"action: {example}") + "$"):
            understand("hm", world)


def test_the_thought_is_what_stands_before_the_action():
    assert thought("thought: first\nthen \naction: WAIT()") == "first\nthen"
    assert thought("action: WAIT()") == "" == thought("")
    assert thought("**Thought:** nothing more") == "** nothing more"
    assert (
        thought(f"thought: a{' ' * 99_999}b") == f"a{' ' * 99_999}b"
    )  # not in quadratic time: minutes


def test_an_episode_is_this_conversation():
    """The task stands in the first page message alone, and an error before the page that follows it."""
    turns = [
        Turn('button "OK" [1]', "hm", None, "no action found", ids=(1, 2)),
        Turn('button "OK" [1]', 'action: CLICK(ref="1")', 'CLICK(ref="1")'),
    ]
    messages = conversation("Click on OK.", turns)
    assert [(m.role, m.content, m.ids) for m in messages] == [
        ("system", SYSTEM, None),
        ("user", 'task: Click on OK.\npage:\nbutton "OK" [1]', None),
        ("assistant", "hm", (1, 2)),
        ("user", 'error: no action found\npage:\nbutton "OK" [1]', None),
        ("assistant", 'action: CLICK(ref="1")', None),
    ]
    episode = tiny.episode()
    assert prompt.episode_messages(episode, SYSTEM) == conversation(
        episode.instruction, episode.turns
    )


BOXES = [f"checkbox [{n}]" for n in range(1, FOLD_FROM_LINES)]


def test_what_stands_behind_the_agents_last_token_takes_no_place_of_the_models():
    """An answer that was cut, of a prompt that just fitted: the end of its message stands behind it."""
    (whole,) = dialogues_of([tiny.episode()], tiny.chat(), 10_000, SYSTEM)[0]
    last = max(t for t, turn in enumerate(whole.turns) if turn >= 0)
    for limit in range(last + 1, len(whole.ids) + 1):
        (cut,) = dialogues_of([tiny.episode()], tiny.chat(), limit, SYSTEM)[0]
        assert cut == (whole.ids[:limit], whole.turns[:limit])
    with pytest.raises(ValueError, match=f"at most {last}"):
        dialogues_of([tiny.episode()], tiny.chat(), last, SYSTEM)


def boxes(*checked) -> str:
    """A page of FOLD_FROM_LINES lines, some of them checked."""
    lines = [
        box.replace(" ", " checked ") if n in checked else box for n, box in enumerate(BOXES, 1)
    ]
    return "\n".join([*lines, 'button "Submit" [99]'])


def test_a_long_page_is_shown_once_and_then_what_changed_on_it():
    assert changes(boxes(3), boxes()) == "... 2\ncheckbox checked [3]\n... 9"
    longer = "text\n" + boxes()
    assert changes(longer.replace("checkbox [4]\n", ""), longer) == "... 4\n(gone: 1)\n... 8"
    assert changes(longer, boxes()) == "(new)\ntext\n... 12"
    assert changes(boxes(*range(1, 8)), boxes()) is None  # more than half of it is new
    many = "\n".join(f"text {n}" for n in range(100))
    assert (
        changes("\n".join(many.split("\n")[40:60]), many) is None
    )  # most of the page before is gone
    turns = [Turn(boxes(), "a", None, "no action"), Turn(boxes(), "b", "WAIT()")]
    shown = [m.content for m in next_prompt("Draw 4.", turns, boxes(3)) if m.role == "user"]
    assert shown == [
        f"task: Draw 4.\npage:\n{boxes()}",
        "error: no action\npage, what changed:\n... 12",
        "page, what changed:\n... 2\ncheckbox checked [3]\n... 9",
    ]


def undone(shown: str, before: str) -> str:
    """The page of which `changes` were shown."""
    old, new, replaced, take = before.split("\n"), [], None, 0
    for line in shown.split("\n"):
        if same := re.fullmatch(r"\.\.\. (\d+)", line):
            take, replaced = take + (replaced or 0), None
            new += old[take : take + int(same[1])]
            take += int(same[1])
        elif gone := re.fullmatch(r"\(gone: (\d+)\)", line):
            replaced, take = 0, take + int(gone[1])
        elif line == "(new)":
            replaced = 0
        else:
            new.append(line)
            take += replaced is None
    return "\n".join(new)


lines = st.lists(
    st.sampled_from("abcdefgh"), min_size=FOLD_FROM_LINES, max_size=3 * FOLD_FROM_LINES
)
place = st.integers(0, 3 * FOLD_FROM_LINES)


@given(lines, lines, place, st.integers(0, 4))
def test_the_page_follows_exactly_from_its_changes_and_the_page_before(old, other, start, count):
    new = old[:start] + other[:count] + old[start + len(other) % 4 :]
    shown = changes("\n".join(new), "\n".join(old))
    if shown is not None:
        assert undone(shown, "\n".join(old)) == "\n".join(new)
        assert 2 * len(shown.split("\n")) <= len(new) >= FOLD_FROM_LINES


@given(st.lists(st.tuples(lines, st.sampled_from([None, "wrong"])), max_size=4), st.integers(0, 4))
def test_a_conversation_only_grows(pages, cut):
    """What was said and shown stays as it is, or the cache and the trees could not share it."""
    turns = [Turn("\n".join(page), "x", None, error) for page, error in pages]
    whole = conversation("t", turns)
    assert conversation("t", turns[:cut]) == whole[: 1 + 2 * cut]
    if turns[cut:]:
        assert next_prompt("t", turns[:cut], turns[cut].observation) == whole[: 2 + 2 * cut]


def test_the_system_prompt_names_every_command_with_the_arguments_of_one_of_its_forms():
    shown = {
        command: re.findall(r"(\w+)(?:=|,|$)", arguments)
        for command, arguments in re.findall(r"([A-Z_]+)\(([^)]*)\)", SYSTEM)
    }
    assert shown.keys() == FORMS.keys()
    for command, arguments in shown.items():
        assert arguments in [list(form) for form in FORMS[command]], command
