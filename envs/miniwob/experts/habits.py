"""Bad habits: slips of an expert, systematic enough for a model to learn them.

A policy trained on clumsy demonstrations fails in recognisable ways, so its rollouts contain both successes and
failures. A habit is a pure function of the observation and the right decision. It returns a wrong decision, or None if
the habit does not apply. A slip's thought ends with the element that the slip uses, so thought and action agree; the
words before it are those of the right decision.
"""

import random
from collections.abc import Callable

from envs.actions import Action
from envs.miniwob.experts.decisions import Decision, Expert, choose, click
from envs.miniwob.experts.elements import Element, look
from envs.protocol import Observation

Habit = Callable[[Observation, Decision], Decision | None]
FINISH = frozenset({"Submit", "OK", "Login", "Search", "Go!"})
"The names of buttons that submit a form."


def _target(seen: Observation, right: Decision) -> Element | None:
    """The element that the right decision uses; None if its action has none, such as a key press."""
    if "ref" not in right.action:
        return None
    return next(thing for thing in look(seen) if thing.ref == right.action["ref"])


def hurry(seen: Observation, right: Decision) -> Decision | None:
    """Submit the form while a field, box or section of it is still to be done."""
    target = _target(seen, right)
    buttons = [thing for thing in look(seen, "button", "item", "tab") if thing.text in FINISH]
    if target is None or target.role == "button" or not buttons or buttons[-1] == target:
        return None
    return click(buttons[-1])


def first_in_sight(seen: Observation, right: Decision) -> Decision | None:
    """Use the first element of the same role, or the first option of the list."""
    target = _target(seen, right)
    if target is None:
        return None
    if right.action.command == "SELECT":
        slip = choose(target, target.options[0])
    else:
        first = next(
            thing for thing in look(seen, target.role) if thing.ref is not None
        )  # some have none
        args = dict(right.action.args) | {"ref": first.ref}
        slip = Decision(first.line, Action(right.action.command, **args))
    return slip if slip.action != right.action else None


HABITS: dict[str, Habit] = {"hurry": hurry, "first_in_sight": first_in_sight}


def clumsy(expert: Expert, noise: float, rng: random.Random) -> Expert:
    """The expert, but with probability `noise` its decision is replaced by a slip.

    Of the habits that apply, each is twice as likely as the next one in HABITS. If none applies, the expert's
    decision is kept. Raises ValueError unless 0 <= noise <= 1.
    """
    if not 0 <= noise <= 1:
        raise ValueError(f"noise is a probability between 0 and 1, got {noise}")

    def act(seen: Observation, done: list[Action]) -> Decision:
        right = expert(seen, done)
        if rng.random() >= noise:
            return right
        slips = [slip for habit in HABITS.values() if (slip := habit(seen, right)) is not None]
        if not slips:
            return right
        return rng.choices(slips, [2.0**-n for n in range(len(slips))])[0]._replace(
            words=right.words
        )

    return act
