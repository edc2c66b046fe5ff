"""`python -m minidpo.laws --loss mine:loss`, anywhere: what it says, and what it refuses."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from minidpo.laws import code, head, loss
from minidpo.laws.plugin import named

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "your-own-loss.md"
PLUGIN = ("-p", "minidpo.laws.plugin")  # what an installed minidpo declares in pyproject.toml


@pytest.mark.parametrize(
    "spec, complaint",
    [
        ("my_losses", "wanted package.module:function"),
        (":loss", "wanted package.module:function"),
        ("no.such:loss", "cannot import no.such: No module named 'no'"),
        ("my_script:loss", "cannot import my_script: 3 "),
        ("my_losses:BETA", "my_losses.py.* BETA"),
        ("torch:add", "add is built in and does not say what it takes"),
        ("my_losses:needs_more", "cannot be called with .*beta"),
    ],
)
def test_a_loss_that_cannot_be_called_is_refused_in_one_line(
    spec, complaint, tmp_path, monkeypatch
):
    (tmp_path / "my_script.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "my_losses.py").write_text("BETA = 0.1\ndef needs_more(a, b, c, d, beta): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)
    with pytest.raises(pytest.UsageError, match=complaint) as refused:
        named(spec, "loss")
    assert "\n" not in str(refused.value)


def judge(folder, *options):
    """The exit code and words of `python -m minidpo.laws OPTIONS` in a folder outside."""
    done = subprocess.run(
        [sys.executable, "-m", "minidpo.laws", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"},
    )
    return done.returncode, done.stdout + done.stderr


def block(kind):
    """The first such block of code in the document."""
    return re.search(rf"^```{kind}\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)[1]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """A loss, a head, an advantage and a code judged at once, in a folder where pytest has settings: that
    folder, the exit code, what was said and of it what each function's section says."""
    folder = tmp_path_factory.mktemp("laws")
    (folder / "pytest.ini").write_text(
        "[pytest]\naddopts = -x -k mine\npython_functions = check_*\n"
    )
    (folder / "conftest.py").write_text("raise SystemExit\n")
    (folder / "my_losses.py").write_text(block("python"))
    (folder / "mine.py").write_text(
        "import torch\n"
        "from minidpo.laws.ours import nf4\n"
        "from minidpo.model.head import token_logps\n"
        "def advantage(reward, group): return reward - reward.mean()\n"
    )
    exit_code, said = judge(
        folder,
        "--loss",
        "my_losses:exponential",
        "--head",
        "mine:token_logps",
        "--advantage",
        "mine:advantage",
        "--code",
        "mine:nf4",
    )
    parts = re.findall(r"^=+ laws of \w+:(\w+) =+\n(.*?)(?=^=|\Z)", said, re.MULTILINE | re.DOTALL)
    return folder, exit_code, said, {name: f"\n{text}" for name, text in parts}


def test_the_example_in_the_document_runs_and_says_what_the_document_says(four):
    folder, exit_code, said, parts = four
    assert len(block("python").splitlines()) <= 10 and "def exponential(" in block("python")
    assert '"exponential": Loss(exponential, ' in DOCUMENT.read_text()
    assert exit_code == 1
    told = [line for line in block("text").splitlines() if line != "..."]
    assert [line for line in told if line not in said.splitlines()] == []
    verdicts = re.findall(r"^(?:holds|does not hold)  ", parts["exponential"], re.MULTILINE)
    assert len(verdicts) == len(loss.LAWS)
    assert said.count("it is 1 (chosen = -1, rejected = -1)") == 1 and "FAILED" not in said
    assert not list(folder.glob(".pytest*"))


def test_a_head_an_advantage_and_a_code_are_tested_together_anywhere(four):
    _, exit_code, _, parts = four
    assert exit_code == 1
    counts = {name: text.count("\nholds") for name, text in parts.items() if name != "exponential"}
    assert counts == {"token_logps": len(head.LAWS), "advantage": 4, "nf4": len(code.LAWS)}
    assert "does not hold  sums to 0 in each group: the sum over group 0 is " in parts["advantage"]


def test_other_runs_of_pytest_have_no_such_options(tmp_path):
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser): parser.addoption('--loss', default='mine')\n"
    )
    (tmp_path / "test_it.py").write_text(
        "def test_it(request): assert request.config.getoption('--loss') == 'mine'\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *PLUGIN],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
