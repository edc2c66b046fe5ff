"""Environments: real web pages, with text as the observation and actions as text.

Nothing here knows of models: no torch, no minidpo. Read in this order: `actions` (what an agent may do),
`protocol` (what an environment promises), `miniwob` (the benchmark's pages in a real Chromium), `gym` (the
same tasks as Gymnasium environments), `web` (any page, confined to its origin).
"""
