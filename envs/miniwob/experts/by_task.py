"""The scripted demonstrators by task.

They show how a task is done, and prove that observation and actions suffice for it.
"""

from envs.miniwob.experts import forms, guesses, mail, pickers, shapes
from envs.miniwob.experts.decisions import Expert

EXPERTS: dict[str, Expert] = {
    **forms.EXPERTS, **shapes.EXPERTS, **mail.EXPERTS, **pickers.EXPERTS, **guesses.EXPERTS
}  # fmt: skip
