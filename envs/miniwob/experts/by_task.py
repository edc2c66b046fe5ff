"""The scripted demonstrators by task; each sees only what the agent sees.

They show how a task is done, and prove that what is seen and what can be done suffice for it.
"""

from envs.miniwob.experts import forms, guesses, mail, pickers, shapes
from envs.miniwob.experts.decisions import Expert

EXPERTS: dict[str, Expert] = {
    **forms.EXPERTS,
    **shapes.EXPERTS,
    **mail.EXPERTS,
    **pickers.EXPERTS,
    **guesses.EXPERTS,
}
