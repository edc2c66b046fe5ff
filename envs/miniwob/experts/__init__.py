"""Scripted demonstrators. An expert sees only the text that the agent sees.

Read in this order: `elements` (parses the text), `decisions` (what an expert answers), then the experts by family:
`forms`, `mail`, `pickers`, `shapes`, `guesses`. In these files each docstring is an instruction that the function
follows. `by_task` is the table of all experts; `habits` makes an expert clumsy.
"""
