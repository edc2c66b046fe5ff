"""Progress against the pages themselves: their experts, clumsy ones, and the verdicts that the pages give."""

import asyncio
import random
from collections import deque
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.actions import Action, render
from envs.miniwob.browser.driver import Browser
from envs.miniwob.experts.by_task import EXPERTS
from envs.miniwob.experts.decisions import Decision, click
from envs.miniwob.experts.elements import look
from envs.miniwob.experts.habits import clumsy, hurry
from envs.miniwob.progress import FLOORS, FORMS, progress
from envs.miniwob.tasks import SEEDS, STEP_LIMIT, THRESHOLD
from envs.protocol import Observation, Outcome

CHECKBOXES = ("click-checkboxes", "click-checkboxes-large", "click-checkboxes-transfer")
SEVERAL = (
    "login-user",
    "enter-password",
    "form-sequence-2",
    "click-checkboxes-large",
    "multi-layouts",
    "multi-orderings",
)  # fields, and an expert that sees to them one by one
forms = pytest.mark.parametrize("task", FORMS)


class Played(NamedTuple):
    """An episode: what was seen before and after each decision."""

    task: str
    seed: int
    seen: list[Observation]
    decisions: list[Decision]

    @property
    def end(self) -> Observation:
        return self.seen[-1]

    @property
    def turns(self) -> list[tuple[str, str]]:
        """As a recorded episode holds them."""
        return [(seen.text, render(decision.action))
                for seen, decision in zip(self.seen, self.decisions, strict=False)]  # fmt: skip

    def progress(self, turns=None) -> float | None:
        """Of the whole episode, or of these turns and no verdict."""
        return progress(self.end.instruction, self.task, self.turns if turns is None else turns,
                        self.end.reward, turns is None and self.end.outcome is not None)  # fmt: skip

    def standing(self) -> list[float]:
        """What each page that was seen shows, before anything is done on it."""
        return [
            self.progress([*self.turns[:n], (text, None)]) for n, (text, _) in enumerate(self.turns)
        ]


@pytest.fixture(scope="module")
def pages(run):
    """Four pages of a browser."""
    browser = Browser(pages=4)
    run(browser.__aenter__())
    yield browser.envs
    run(browser.__aexit__(None, None, None))


def play_all(run, pages, instances, make_expert) -> list[Played]:
    """All of them, on these pages."""
    waiting, episodes = deque(instances), []

    async def work(env):
        while waiting:
            task, seed, *more = waiting.popleft()
            expert, seen, decisions = (
                make_expert(task, seed, *more),
                [await env.reset(task, seed)],
                [],
            )
            while seen[-1].outcome is None and len(decisions) < STEP_LIMIT(task):
                decisions.append(expert(seen[-1], [decision.action for decision in decisions]))
                seen.append(await env.step(decisions[-1].action))
            episodes.append(Played(task, seed, seen, decisions))

    async def work_together():
        await asyncio.gather(*map(work, pages))

    run(work_together())
    return episodes


def every(tasks, number):
    return [(task, seed) for task in tasks for seed in SEEDS["validation"][:number]]


def of(task, episodes):
    return [episode for episode in episodes if episode.task == task]


@pytest.fixture(scope="module")
def golden(run, pages):
    return play_all(run, pages, every(FORMS, 4), lambda task, seed: EXPERTS[task])


@pytest.fixture(scope="module")
def novices(run, pages):
    def novice(task, seed):
        return clumsy(EXPERTS[task], 0.5, random.Random(f"{task} {seed}"))

    return play_all(run, pages, every(FORMS, 8), novice)


# ---- forms ----


@forms
def test_an_expert_has_made_all_progress_when_it_hands_in_and_not_before(golden, task):
    for episode in of(task, golden):
        *before, last = episode.standing()
        assert episode.end.outcome is Outcome.SOLVED
        assert max(before, default=0.0) < 1.0 == last == episode.progress()


@forms
def test_the_last_action_counts_as_the_next_page_shows_it(golden, novices, task):
    """But for the slider's keys, and for a message that pops up and swallows what is typed."""
    compared = 0
    for episode in of(task, golden + novices):
        turns, standing = episode.turns, episode.standing()
        for n, (_, action) in enumerate(turns[:-1], 1):
            if not action.startswith("PRESS") and 'button "Cancel"' not in turns[n][0]:
                compared += 1
                assert episode.progress(turns[:n]) == standing[n]
    assert compared > 5


def spoilt(seen, action) -> Action:
    """The action with another text, another option, or on another box."""
    used = next(thing for thing in look(seen) if thing.ref == action["ref"])
    if action.command == "TYPE":
        return Action("TYPE", ref=used.ref, text=action["text"] + "x")
    if action.command == "SELECT":
        return Action(
            "SELECT", ref=used.ref, option=next(o for o in used.options if o != action["option"])
        )
    return click(next(thing for thing in look(seen, used.role) if thing != used)).action


@forms
def test_a_wrong_value_is_less_than_the_right_one(golden, task):
    filled = [episode for episode in of(task, golden) if len(episode.turns) > 1]
    assert len(filled) > 1
    for episode in filled:
        *turns, (text, action), _ = episode.turns
        wrong = render(spoilt(episode.seen[-3], episode.decisions[-2].action))
        assert (
            episode.progress([*turns, (text, wrong)])
            < episode.progress([*turns, (text, action)])
            == 1.0
        )


@forms
def test_a_form_that_was_handed_in_is_solved_exactly_if_all_of_it_was_right(golden, novices, task):
    """The page is the judge. form-sequence-2 takes any radio button for the one it asks for."""
    verdicts = [(episode.end.outcome is Outcome.SOLVED, episode.progress() == 1.0)
                for episode in of(task, golden + novices) if episode.end.outcome is not None]  # fmt: skip
    assert {complete for _, complete in verdicts} == {True, False}
    for solved, complete in verdicts:
        assert solved == complete or (solved and task == "form-sequence-2")


@pytest.mark.parametrize("task", CHECKBOXES)
def test_as_many_checkboxes_are_wrong_as_the_page_counts(novices, task):
    """The page pays the mean over its boxes, 1 for a right one and -1 for a wrong one."""
    for episode in of(task, novices):
        if episode.end.outcome is not None:
            boxes = [box.text for box in look(episode.seen[0], "checkbox")]
            listed = episode.end.instruction.removeprefix("Select ").removesuffix(
                " and click Submit."
            )
            asked = max(1, len(set(listed.split(", ")) & set(boxes)))
            wrong = (1 - episode.end.reward) / 2 * len(boxes)
            assert episode.progress() == pytest.approx(max(0.0, 1 - wrong / asked))


@pytest.fixture(scope="module")
def hurried(run, pages):
    """Of each instance: the form handed in after no step, after one, and so on, by the expert's bad habit."""

    def until(task, seed, steps):
        def act(seen, done):
            right = EXPERTS[task](seen, done)
            return hurry(seen, right) or right if len(done) >= steps else right

        return act

    instances = [(*instance, steps) for instance in every(SEVERAL, 2) for steps in range(4)]
    return play_all(run, pages, instances, until)


@pytest.mark.parametrize("task", SEVERAL)
def test_of_two_forms_handed_in_too_early_the_one_with_more_in_it_came_nearer(hurried, task):
    for seed in SEEDS["validation"][:2]:
        failed = sorted((len(episode.turns), episode.progress()) for episode in of(task, hurried)
                        if episode.seed == seed and episode.end.outcome is Outcome.FAILED)  # fmt: skip
        shares = [share for _, share in failed]
        assert len(shares) > 1 and shares[0] == 0.0 and shares[-1] < 1.0
        assert all(less < more for less, more in pairwise(shares))


LOGIN = 'Enter the username "olin" and the password "h1" into the text fields and press login.'
FORM = 'Check the 2nd radio button and enter the number "7" into the 1st textbox.'
OPTIONS = 'radio "a" [1]\nradio "b" checked [2]'
FILM = "Search for drama movies directed by Wolf from year 1999."
ASKED = [LOGIN, FORM, FILM, "Select a and click Submit.", "Select a from the list",
         'Enter "a" into the field', "Select 5 with the slider, click the 9th checkbox"]  # fmt: skip


def numbered(*first_and_second):
    """form-sequence-2's page, told what its first two radio buttons and its first two text fields hold."""
    radios, texts = first_and_second[:2], first_and_second[2:]
    return "\n".join([*(f"radio {flag} [{n}]" for n, flag in enumerate(radios, 1)), "radio [3]",
                      *(f"input text #input-{n} {value} [{n + 3}]" for n, value in enumerate(texts, 1)),
                      "input text #input-3 [6]", 'button "Submit" [7]'])  # fmt: skip


@pytest.mark.parametrize(
    ("task", "instruction", "page", "action", "share"),
    [
        # two of three boxes, and one that was not asked for: two to mend
        ("click-checkboxes", "Select a, b, c and click Submit.",
         'checkbox "a" checked [1]\ncheckbox "b" checked [2]\ncheckbox "c" [3]\ncheckbox "d" checked [4]',
         None, 1 / 3),
        ("click-checkboxes", "Select nothing and click Submit.", 'checkbox "a" [1]', None, 1),
        ("click-checkboxes", "Select nothing and click Submit.", 'checkbox "a" [1]', 'CLICK(ref="1")', 0),
        ("click-checkboxes", "Select a and click Submit.", 'checkbox "a" checked [1]', 'CLICK(ref="1")', 0),
        ("click-checkboxes", "Select ab and click Submit.", 'checkbox "a" [1]\ncheckbox "ab" checked [2]',
         None, 1),
        ("click-option", "Select a and click Submit.", OPTIONS, None, 0),
        ("click-option", "Select a and click Submit.", OPTIONS, 'CLICK(ref="1")', 1),
        ("form-sequence-2", FORM, numbered("checked", "", "", 'value="7"'), None, 0),
        ("form-sequence-2", FORM, numbered("checked", "", 'value="7"', 'value="7"'), None, 0),
        ("form-sequence-2", FORM, numbered("", "checked", 'value="7"', 'value="7"'), None, 0.5),
        ("form-sequence-2", FORM, numbered("checked", "", 'value="7"', ""), None, 0.5),
        ("form-sequence-2", FORM, numbered("checked", "", 'value="7"', ""), 'CLICK(ref="2")', 1),
        ("form-sequence", "Select -3 with the slider, click the 2nd checkbox, then hit Submit.",
         'icon "slider-handle" [1]\ntext "-3"\ncheckbox [2]\ncheckbox [3]\ncheckbox [4]', None, 0.5),
        ("multi-layouts", FILM, 'input text value="Drama" [1]\ntext "Genre"\ninput text [2]\n'
         'text "Director"\ninput text value="1999" [3]\ntext "Released Date"\nbutton "Go!" [4]', None, 2 / 3),
        # an option that is not there changes nothing, and spaces around a text are not shown by the next page
        ("choose-list", "Select Chad from the list and click Submit.",
         'select options "Peru", "Chad" value="Chad" [1]', 'SELECT(ref="1", option="Oz")', 1),
        ("login-user", LOGIN, "input text [1]\ninput password [2]", 'TYPE(ref="1", text=" olin ")', 0.5),
        # a password in the field of the name
        ("login-user", LOGIN, "input text [1]\ninput password [2]", 'TYPE(ref="1", text="h1")', 0),
    ],
)  # fmt: skip
def test_worked_examples_of_forms(task, instruction, page, action, share):
    assert progress(instruction, task, [(page, action)], -1.0, True) == pytest.approx(share)
    assert progress(instruction, task, [(page, action)], 0.0, False) == pytest.approx(share)


def test_behind_a_message_the_form_is_as_it_was_and_what_was_typed_is_lost():
    form = 'input text value="olin" [1]\ninput password [2]\nbutton "OK" [3]'
    turns = [
        (form, 'TYPE(ref="2", text="h1")'),
        ('button "OK" [4]\nbutton "Cancel" [5]', 'CLICK(ref="4")'),
    ]
    assert progress(LOGIN, "login-user-popup", turns, -1.0, True) == 0.5


# ---- pages that pay by closeness ----


@pytest.mark.parametrize(
    ("task", "reward", "share"),
    [
        ("phone-book", 0.4, 0.7), ("phone-book", -0.4, 0.3), ("phone-book", -1.0, 0.0),
        ("odd-or-even", 0.0, 0.5), ("circle-center", 0.6, 0.6), ("circle-center", -1.0, 0.0),
        ("tic-tac-toe", -0.75, 0.0), ("tic-tac-toe", -0.5, 1 / 7), ("draw-circle", -0.3, 0.0),
        ("bisect-angle", float("nan"), 0.0), ("find-greatest", 0.1, None), ("buy-ticket", -0.5, None),
        ("click-button", -1.0, None), ("click-tab-2", -1.0, None),
    ],
)  # fmt: skip
def test_a_reward_is_brought_to_a_share_if_the_page_gave_a_verdict(task, reward, share):
    assert progress("", task, [], reward, True) == (
        share if share is None else pytest.approx(share)
    )
    assert progress("", task, [], reward, False) is None


@pytest.mark.parametrize("task", FLOORS)
def test_the_reward_that_solves_is_nearly_all_progress_and_less_is_less(task):
    below, solved = (progress("", task, [], reward, True) for reward in (0.5, THRESHOLD(task)))
    assert 0.0 < below < solved and solved >= 0.8


# ---- unusable text ----


LINES = ["radio [1]", "checkbox [2]", 'input text value="olin" [3]', 'text "Year"', 'button "Submit" [4]',
         'select options "Peru", "Chad" [5]', "radio checked [6]"]  # fmt: skip
ACTIONS = ['CLICK(ref="1")', 'CLICK(ref="2")', 'TYPE(ref="3", text="h1")', 'SELECT(ref="5", option="Oz")',
           'SELECT(ref="4", option="Chad")', 'TYPE(ref="5", text="")', 'PRESS(key="Tab")']  # fmt: skip
texts = st.lists(st.sampled_from(LINES) | st.text()).map("\n".join)
actions = st.none() | st.sampled_from(ACTIONS) | st.text()
whatever = st.tuples(st.sampled_from(ASKED) | st.text(), st.sampled_from([*FORMS, *FLOORS]) | st.text(),
                     st.lists(st.tuples(texts, actions), max_size=3), st.floats(), st.booleans())  # fmt: skip


@settings(max_examples=5 * settings.default.max_examples)
@given(whatever)
def test_progress_of_whatever_it_is_told_is_a_share_or_unknown(told):
    share = progress(*told)
    assert share is None or 0.0 <= share <= 1.0
