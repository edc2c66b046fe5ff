"""MiniWoB++ in a real Chromium: which tasks, one page as text, the browser's life, scripted experts.

Read `tasks` (3), `chromium` (4), `page` (5) with its scripts, `browser` (6), `elements` (7), `decisions` (8),
the experts (9 - 20), `habits` (21).
"""
