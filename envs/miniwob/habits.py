"""8. Habits: an expert made clumsy, with slips systematic enough for a model to learn them.

A policy that is trained on clumsy demonstrations fails in recognisable ways, and learning from its own rollouts has
something to mend. Each slip is a pure function of what is seen and what would be right: it returns the wrong
decision, or None where it does not apply. The thought quotes the element that is used, so thought and action agree.
"""
import random
from collections.abc import Callable

from envs.actions import Action
from envs.miniwob.elements import Element, look
from envs.miniwob.experts import Decision, Expert, click, fill
from envs.protocol import Observation

Habit = Callable[[Observation, Decision], Decision | None]
FINISH = frozenset({"Submit", "OK", "Login", "Search", "Go!"})


def _target(seen: Observation, right: Decision) -> Element:
    return next(thing for thing in look(seen) if thing.line == right.thought)


def hurry(seen: Observation, right: Decision) -> Decision | None:
    """Press the form's last button although a field, box or section before it is not yet done."""
    if _target(seen, right).role == "button":
        return None
    last = [thing for thing in look(seen, "button", "item", "tab") if thing.text in FINISH][-1:]
    slip = click(last[0]) if last else right
    return slip if slip != right else None


def sloppy(seen: Observation, right: Decision) -> Decision | None:
    """Type the text without its last character."""
    if right.action.command != "TYPE" or len(right.action["text"]) < 2:
        return None
    return fill(_target(seen, right), right.action["text"][:-1])


def first_in_sight(seen: Observation, right: Decision) -> Decision | None:
    """Use the first element of the same role instead of the right one; in a list, the first option."""
    target = _target(seen, right)
    action = dict(right.action.args)
    if right.action.command == "SELECT":
        action["option"] = target.options[0]
    else:
        target = look(seen, target.role)[0]
        action["ref"] = target.ref
    slip = Decision(target.line, Action(right.action.command, **action))
    return slip if slip != right else None


HABITS: dict[str, Habit] = {"hurry": hurry, "first_in_sight": first_in_sight, "sloppy": sloppy}


def clumsy(expert: Expert, noise: float, rng: random.Random) -> Expert:
    """The expert, but each decision is with probability `noise` a slip; of those that apply, each is twice as likely
    as the next in HABITS. Where none applies the expert's decision stands. Raises ValueError unless 0 <= noise <= 1.
    """
    if not 0 <= noise <= 1:
        raise ValueError(f"noise is a probability, got {noise}")

    def act(seen: Observation, done: list[Action]) -> Decision:
        right = expert(seen, done)
        if rng.random() >= noise:
            return right
        slips = [slip for habit in HABITS.values() if (slip := habit(seen, right)) is not None]
        return rng.choices(slips, [2.0**-n for n in range(len(slips))])[0] if slips else right

    return act
