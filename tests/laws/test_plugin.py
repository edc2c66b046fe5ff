"""`pytest --pyargs minidpo.laws --loss mine:loss`, anywhere: what it says, and what it refuses."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from minidpo.laws import loss
from minidpo.laws.plugin import named

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "your-own-loss.md"
PLUGIN = ("-p", "minidpo.laws.plugin")  # what an installed minidpo declares in pyproject.toml


@pytest.mark.parametrize("spec, complaint", [
    ("my_losses", "wanted package.module:function"),
    (":loss", "wanted package.module:function"),
    ("folder/my_losses.py:loss", "wanted package.module:function"),
    ("no.such:loss", "cannot import no.such: No module named 'no'"),
    ("my_broken:loss", "cannot import my_broken: "),
    ("my_losses:none", "none does not exist in .*my_losses.py"),
    ("my_losses:BETA", "BETA is not a function in .*my_losses.py"),
    ("torch:add", "add is built in and does not say what it takes"),
    ("my_losses:needs_more", "give beta, gamma a default"),
    ("my_losses:takes_two", "cannot be called with .*: too many positional arguments"),
])
def test_a_loss_that_cannot_be_called_is_refused_in_one_line(spec, complaint, tmp_path, monkeypatch):
    (tmp_path / "my_broken.py").write_text("def loss(:\n")
    (tmp_path / "my_losses.py").write_text(
        "BETA = 0.1\n"
        "def needs_more(a, b, c, d, beta, e=1, *, gamma): pass\n"
        "def takes_two(a, b): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)
    with pytest.raises(pytest.UsageError, match=complaint) as refused:
        named(spec, "loss")
    assert "\n" not in str(refused.value)


def judge(folder, *options):
    """The exit code and words of `pytest --pyargs minidpo.laws OPTIONS` in FOLDER, outside of the checkout."""
    done = subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *PLUGIN, "--pyargs",
                           "minidpo.laws", *options], cwd=folder, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"})
    return done.returncode, done.stdout + done.stderr


def test_the_example_in_the_document_runs_and_says_what_the_document_says(tmp_path):
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    code, output = (next(text for kind, text in blocks if kind == wanted) for wanted in ("python", "text"))
    assert len(code.splitlines()) <= 10 and "def exponential(" in code
    assert '"exponential": Loss(exponential, ' in DOCUMENT.read_text()
    (tmp_path / "my_losses.py").write_text(code)
    exit_code, said = judge(tmp_path, "--loss", "my_losses:exponential")
    assert exit_code == 1
    assert [line for line in output.splitlines() if line != "..." and line not in said.splitlines()] == []
    verdicts = re.findall(r"^(?:holds|does not hold)  ", said, re.MULTILINE)
    assert len(verdicts) == len(loss.LAWS)


@pytest.mark.slow
def test_a_misspelt_loss_is_one_line_at_the_command_line(tmp_path):
    exit_code, said = judge(tmp_path, "--loss", "my_losses:exponential")
    assert exit_code == pytest.ExitCode.USAGE_ERROR
    assert re.fullmatch(r"ERROR: --loss my_losses:exponential: cannot import my_losses: .*", said.strip())
