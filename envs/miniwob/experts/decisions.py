"""8. Decisions: what an expert answers, and what most pages come down to: click, fill, choose, hand in.

An expert compares the instruction with the page as it stands now and does the next thing that is missing. So
it needs no memory and goes on sensibly after any mistake that can still be mended, its own or another's. Its
thought is the line of the element it is about to use, word for word; where several steps must be told apart,
the task's own words come first, as far as this step. Read `experts_forms` next.
"""
from collections.abc import Callable
from typing import NamedTuple

from envs.actions import Action
from envs.miniwob.experts.elements import Element
from envs.protocol import Observation


class Decision(NamedTuple):
    """What the agent answers: a thought, then an action."""

    line: str  # the element that is used
    action: Action
    words: str = ""  # the task's own, as far as this step

    @property
    def thought(self) -> str:
        return f"{self.words}: {self.line}" if self.words else self.line


Expert = Callable[[Observation, list[Action]], Decision]
"What is seen, and the actions done so far in this episode -> what to do."


def click(thing: Element) -> Decision:
    """Click on the element."""
    return Decision(thing.line, Action("CLICK", ref=thing.ref))


def fill(field: Element, text: str) -> Decision:
    """Type the text over whatever the field holds."""
    return Decision(field.line, Action("TYPE", ref=field.ref, text=text))


def choose(box: Element, name: str) -> Decision:
    """Choose an option of a list; the thought names it, as the list's own line would say nothing of it."""
    return Decision(f'select "{name}" [{box.ref}]', Action("SELECT", ref=box.ref, option=name))


def complete(wanted: list[tuple[Element, str]], button: Element) -> Decision:
    """Fill the first field that does not yet hold its text; press the button when all do."""
    for field, text in wanted:
        if field.value != text:
            return fill(field, text)
    return click(button)


def quoting(words: str, decision: Decision) -> Decision:
    """The same decision, thinking of the task's own words first: what to use next is then read off them."""
    return decision._replace(words=words)
