"""The scripted demonstrators by task.

They show how a task is done, and prove that the observation and the actions are enough for it.
"""

from envs.miniwob.experts import forms, guesses, mail, pickers, shapes
from envs.miniwob.experts.decisions import Expert

EXPERTS: dict[str, Expert] = {
    **forms.EXPERTS, **shapes.EXPERTS, **mail.EXPERTS, **pickers.EXPERTS, **guesses.EXPERTS
}  # fmt: skip

# Tasks without an expert. An expert has the agent's actions and reads the agent's text of the present page.
WITHOUT = {
    ("count-sides",): "a canvas shows the shape, and no text tells what a canvas shows",
    ("draw-circle", "draw-line"): "a drag begins in the middle of an element and goes straight",
    (
        "find-greatest",
    ): "a card hides its number when another is opened, and an expert sees no earlier page",
    (
        "highlight-text",
        "highlight-text-2",
    ): "a drag cannot begin in plain text, which has no reference",
    (
        "drag-cube",
        "stock-market",
    ): "when the action arrives the page is no longer what it was chosen for",
}
