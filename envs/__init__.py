"""Environments: real web pages as text in, actions out.

Chapters: 1 `actions`, 2 `protocol`, and for MiniWoB++ all that follows, listed in `miniwob`.
Nothing here knows of models: no torch, no minidpo.
"""
