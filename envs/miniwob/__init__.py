"""MiniWoB++ in a real Chromium: which tasks, one page as text, the browser's life, scripted experts.

Read `tasks` (3), `page` (4) with `page.js`, `browser` (5), `experts` (6).
"""
