"""MiniWoB++ in a real Chromium.

Read in this order: `tasks` (tasks, seeds, step limits, thresholds), `browser` (a page as text and input into
it), `experts` (scripted demonstrators), `progress` (how near a failed episode came). `install` gets a
Chromium, and `table` writes docs/tasks.md.
"""
