"""A missing package is one line, in the words of whoever started it."""

import subprocess
import sys
from pathlib import Path

import pytest

HIDE = """
import importlib.util, pathlib
find = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in ("tyro", "miniwob") else find(name)
"""
INSTALLED = "pathlib.Path.is_dir = lambda path: True\n"


@pytest.mark.parametrize(
    "where, way", [("", "make setup"), (INSTALLED, "pip install tyro miniwob")]
)
def test_missing_packages_are_named_in_one_line(where, way):
    code = f"{HIDE}{where}import minidpo.system.needed"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "tyro, miniwob" in done.stderr and way in done.stderr
