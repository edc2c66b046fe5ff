"""Importing this module ends the program with one line, not a traceback, if packages are missing."""

import importlib.util
import sys
from pathlib import Path

NEEDED = ("torch", "tyro", "playwright", "miniwob", "safetensors", "tokenizers", "gguf")
if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
    installed = (Path(__file__).parents[1] / "configs").is_dir()  # not a checkout, which has make
    way = (
        "pip install " + " ".join(missing)
        if installed
        else ("run make setup, then source .venv/bin/activate")
    )
    sys.exit(f"{sys.executable} has no {', '.join(missing)}: {way}")
