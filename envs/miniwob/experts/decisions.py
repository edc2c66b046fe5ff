"""What an expert answers, and the decisions that most pages need: click, fill, choose, press.

An expert compares the instruction with the page and does the next thing that is missing. So it needs no memory, and
continues sensibly after any mistake that can be corrected, its own or another's. Its thought is the line of the element
that it uses, word for word, without a long value or label, which no model could copy. Words before the line say which
of several steps this is, where on the page the answer was found, or what the step follows from (a count, a sum, a
comparison), because a small model can do one thing at a time.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from envs.actions import Action
from envs.miniwob.experts.elements import Element
from envs.protocol import Observation


class Decision(NamedTuple):
    """What the agent answers: a thought, then an action."""

    line: str  # of the element that is used
    action: Action
    words: str = ""  # from the instruction (up to this step) or the page, or what follows from them

    @property
    def thought(self) -> str:
        line = re.sub(r' "(?:[^"\\]|\\.){60,}"| \w+="(?:[^"\\]|\\.){40,}"', "", self.line)
        return f"{self.words}: {line}" if self.words else line


Expert = Callable[[Observation, list[Action]], Decision]
"(observation, actions so far in this episode) -> decision"


def click(thing: Element) -> Decision:
    """Click on the element."""
    return Decision(thing.line, Action("CLICK", ref=thing.ref))


def fill(field: Element, text: str) -> Decision:
    """Type the text over whatever the field holds."""
    return Decision(field.line, Action("TYPE", ref=field.ref, text=text))


def choose(box: Element, name: str) -> Decision:
    """Choose an option of a list. The thought names the option, because the list's line does not."""
    return Decision(f'select "{name}" [{box.ref}]', Action("SELECT", ref=box.ref, option=name))


def press(thing: Element, key: str) -> Decision:
    """Press a key while the element has the focus."""
    return Decision(thing.line, Action("PRESS", key=key))


def complete(wanted: list[tuple], button: Element) -> Decision:
    """Fill the first field that does not yet hold its text; press the button when all do. wanted: (field, text)
    or (field, text, words from which the text is taken)."""
    for field, text, *words in wanted:
        if field.value != text:
            return quoting("".join(words), fill(field, text))
    return click(button)


def after(used: list[Element], step: Decision) -> Decision:
    """The step, with words that begin with the last used element that is before this one on the page."""
    before = [thing.ref for thing in used if int(thing.ref) < int(step.action["ref"])]
    return quoting(f"after {before[-1]}, {step.words}", step) if before else step


def quoting(words: str, decision: Decision) -> Decision:
    """The same decision with a thought that begins with words from the task or page that say what to use next."""
    return decision._replace(words=words)
