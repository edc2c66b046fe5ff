"""Environments: real web pages as text in, actions out.

Chapters: 1 `actions`, 2 `protocol`, and for MiniWoB++ 3 `tasks`, 4 `page`, 5 `browser`, 6 `experts`.
Nothing here knows of models: no torch, no minidpo.
"""
