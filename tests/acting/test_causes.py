"""A failed episode's cause is what a reader of the episode would say."""

from dataclasses import replace

import pytest

import envs
from minidpo.acting import causes as why
from minidpo.data.episodes import Episode, Turn

WORLD = envs.world("miniwob")
LOGIN = 'input #username{} [1]\ninput password #password [2]\nbutton "Login" [3]'
NAME = 'Enter the username "lina" and the password "8w" into the text fields and press login.'


def episode(*actions, task="login-user", outcome="failed", pages=None, errors=()):
    pages = pages or [LOGIN.format("")] * len(actions)
    turns = tuple(
        Turn(page, "answer", action, "no such element" if n in errors else None)
        for n, (page, action) in enumerate(zip(pages, actions, strict=True))
    )
    return Episode(task, 1, 0, NAME, turns, outcome, -1.0, "model")


TYPED = [LOGIN.format(""), LOGIN.format(' value="lina"')]


@pytest.mark.parametrize(
    "name, failed",
    [
        ("ended too early", episode('CLICK(ref="3")')),
        ("wrong text", episode('TYPE(ref="1", text="line")', outcome="limit", pages=TYPED[:1])),
        ("wrong action", episode('CLICK(ref="1")')),
        (
            "not known",
            episode('CLICK(ref="3")', task="click-tab-2", pages=["no page of that task"]),
        ),
        (
            "wrong element",
            episode(
                'TYPE(ref="2", text="lina")',
                'TYPE(ref="2", text="8w")',
                outcome="failed",
                pages=TYPED,
            ),
        ),
        ("unusable answer", episode(None, 'CLICK(ref="9")', errors=(0, 1), outcome="limit")),
        ("repeated itself", episode(*['CLICK(ref="1")'] * 6, outcome="limit")),
        (
            "wrong element",
            episode(*['PRESS(key="ArrowLeft")'] * 6, outcome="limit"),
        ),  # it may move a cursor
        ("not known", episode('CLICK(ref="3")', task="draw-line")),
        ("not known", episode('CLICK(ref="3")', pages=["a page that its expert does not know"])),
    ],
)
def test_the_cause_is_the_last_thing_that_the_expert_would_not_have_done(name, failed):
    limit = failed.outcome == "limit" and len(failed.turns) == 1
    turns = failed.turns * 6 if limit else failed.turns  # the limit of login-user is six steps
    if name == "wrong text":  # typed six times, each time on a page that shows nothing of it
        turns = tuple(
            replace(turn, observation=f'{turn.observation}\n"{n}"') for n, turn in enumerate(turns)
        )
    assert why.cause(WORLD, replace(failed, turns=turns)) == name


def test_an_episode_that_stopped_before_its_limit_was_too_long_for_the_model():
    short = episode('TYPE(ref="1", text="lina")', outcome="limit")
    assert (
        why.cause(WORLD, short) == "too long" != why.cause(WORLD, replace(short, policy="dagger"))
    )  # the script knew no more


def test_right_so_far_is_never_reached():
    pages = [LOGIN.format("") + f'\n"{n}"' for n in range(6)]
    right = ['TYPE(ref="1", text="lina")'] * 6
    assert why.cause(WORLD, episode(*right, outcome="limit", pages=pages)) == "never reached"
