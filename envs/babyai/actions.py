"""Minigrid's six actions in words."""

from envs.protocol import ActionError

ACTIONS = ("turn left", "turn right", "move forward", "pick up", "drop", "toggle")
"By minigrid's number."


def parse(text: str) -> str:
    """The action that a text means. Raises ActionError and nothing else.

    >>> parse("`Turn left`.")
    'turn left'
    """
    action = " ".join(text.lower().strip(" \t\r\n`.\"'").split())
    if action not in ACTIONS:
        raise ActionError(f"an action is one of {', '.join(ACTIONS)}; got {text.strip()[:40]!r}")
    return action
