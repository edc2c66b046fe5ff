"""20. Experts: scripted demonstrators that see only what the agent sees, one for each task that has one.

They show how a task is done, and prove that what is seen and what can be done suffice for it. Read `habits`
next.
"""
from envs.miniwob import experts_forms, experts_guesses, experts_mail, experts_pickers, experts_shapes
from envs.miniwob.decisions import Expert

EXPERTS: dict[str, Expert] = {
    **experts_forms.EXPERTS,
    **experts_shapes.EXPERTS,
    **experts_mail.EXPERTS,
    **experts_pickers.EXPERTS,
    **experts_guesses.EXPERTS,
}
