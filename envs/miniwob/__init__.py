"""MiniWoB++ in a real Chromium: which tasks, one page as text, the browser's life, scripted experts.

Read `tasks` (3), `page` (4) with its scripts, `browser` (5), `elements` (6), `experts` (7), `habits` (8).
"""
