"""Actions in words: any line of text. The game decides what a command means, and its next text says what happened."""

from envs.protocol import ActionError

LONGEST = 200  # characters; the longest command on a golden path has 90


def parse(text: str) -> str:
    """The line without spaces around it. Raises ActionError for an empty text, several lines or a very long one.

    >>> parse(" open door to kitchen ")
    'open door to kitchen'
    """
    action = text.strip()
    if not action:
        raise ActionError("the action is empty: give a command, such as look around")
    if not action.isprintable():
        raise ActionError("an action is one line of plain text")
    if len(action) > LONGEST:
        raise ActionError(f"an action has at most {LONGEST} characters")
    return action


def render(action: str) -> str:
    """The same text."""
    return action
