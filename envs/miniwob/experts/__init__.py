"""Scripted demonstrators. An expert sees only the text that the agent sees.

Read in this order: `elements` (the text taken apart), `decisions` (what an expert answers), then the experts
by family: `forms`, `mail`, `pickers`, `shapes`, `guesses`. In these files each docstring is an instruction
that the function obeys. `by_task` is the table of all; `habits` makes an expert clumsy.
"""
