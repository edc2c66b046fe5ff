"""Importing this says in one line which packages are missing, where a traceback would say it in thirty."""

import importlib.util
import sys

NEEDED = ("torch", "tyro", "playwright", "miniwob", "safetensors", "tokenizers", "gguf")
if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
    sys.exit(f"{sys.executable} has no {', '.join(missing)}: run make setup, then source .venv/bin/activate")
