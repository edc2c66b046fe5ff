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
    ("count-sides",): "the shape is drawn on a canvas, which has no text",
    ("draw-circle", "draw-line"): "a drag starts at the middle of an element and goes straight",
    (
        "find-greatest",
    ): "a card hides its number when the next one opens, and experts see only the current page",
    (
        "highlight-text",
        "highlight-text-2",
    ): "a drag cannot start in plain text, which has no reference",
    (
        "drag-cube",
        "stock-market",
    ): "the page changes before the action arrives",
}
