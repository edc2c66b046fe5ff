"""Experts from golden paths: if a game knows a solution of each instance, the expert follows it."""

import re
from collections.abc import Callable, Mapping, Sequence

from envs.protocol import Decision, Expert, Observation


def follow(path: Callable[[], Sequence[str]], think: Callable[[str, str], str]) -> Expert:
    """An expert that follows the path. It raises LookupError after any other action, and at the end of the path.

    path: called for each decision. think: (text that is seen, action) -> thought.
    """

    def expert(seen: Observation, done: list[str]) -> Decision:
        golden = path()
        if list(golden[: len(done)]) != done or len(done) == len(golden):
            raise LookupError("the golden path does not go on from here")
        action = golden[len(done)]
        return Decision(think(seen.text, action), action)

    return expert


def in_words(words: Mapping[str, str], action: str) -> str:
    r"""The purpose of an action: the sentence of the first pattern that matches all of it.

    >>> in_words({r"go to (.+)": r"What I need may be in the \1."}, "go to kitchen")
    'What I need may be in the kitchen.'
    """
    for pattern, sentence in words.items():
        if found := re.fullmatch(pattern, action):
            return found.expand(sentence)
    raise AssertionError(f"no words for {action!r}: the last pattern fits everything")
