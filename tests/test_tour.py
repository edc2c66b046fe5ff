"""The tour: its code stands in the source, each stop has all it promises, its commands work."""

import ast
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from test_house import LAYERS, check_command, commands

ROOT = Path(__file__).parents[1]
TOUR = (ROOT / "docs" / "tour.md").read_text()
STOPS = re.findall(r"^## (\d+\. .*?)\n(.*?)(?=^## |\Z)", TOUR, re.MULTILINE | re.DOTALL)
QUOTES = re.findall(r"^```python\n# (\S+): (\S+)\n(.*?)^```", TOUR, re.MULTILINE | re.DOTALL)

# in bold, and behind it in brackets who found it, when and where
EQUATION = re.compile(r"\*\*[^*]*[=≈≻←][^*]*\*\*\s\([^()]+\s(?:19|20)\d\d,\s[^()]+\)")

stops = pytest.mark.parametrize("title, text", STOPS, ids=[title for title, _ in STOPS])


def source_of(path, name):
    """The text of a function, or of a method as Class.method, without its indentation."""
    text = (ROOT / path).read_text()
    body = ast.parse(text).body
    for part in name.split("."):
        found = next(node for node in body if getattr(node, "name", None) == part)
        body = found.body
    return textwrap.dedent("\n".join(text.splitlines()[found.lineno - 1 : found.end_lineno]))


@pytest.mark.parametrize(
    "path, name, code", QUOTES, ids=[f"{path}-{name}" for path, name, _ in QUOTES]
)
def test_code_in_the_tour_stands_in_the_source(path, name, code):
    lines = source_of(path, name).splitlines()
    quoted = code.rstrip("\n").splitlines()
    runs = [textwrap.dedent("\n".join(lines[i : i + len(quoted)])) for i in range(len(lines))]
    assert "\n".join(quoted) in runs, f"{path}: {name} has no such lines (any more)"
    assert len(quoted) <= 6


@stops
def test_a_stop_is_one_file_with_an_equation_code_a_command_and_an_exercise_that_is_answered(
    title, text
):
    file = re.search(r"`(minidpo/\w+/\w+\.py)`$", title)
    assert file and (ROOT / file[1]).is_file()
    assert [path for path, _, _ in QUOTES if f"# {path}:" in text] == [file[1]]
    assert re.search(r"^See it:", text, re.MULTILINE) and list(commands(text))
    assert EQUATION.search(text.split("```python")[0])
    assert text.count("**Exercise.**") == text.count("<details><summary>Answer</summary>") == 1


def test_the_stops_are_numbered_and_enter_the_rooms_in_the_order_of_the_layers():
    assert [int(title.split(".")[0]) for title, _ in STOPS] == list(range(1, 19))
    files = [re.search(r"`minidpo/(\w+)/(\w+)\.py`", title).groups() for title, _ in STOPS]
    assert len(set(files)) == len(files)
    rooms = list(dict.fromkeys(room for room, _ in files))
    assert rooms == [layer for layer in LAYERS if layer in rooms] and len(rooms) == 7


@pytest.mark.parametrize("words", list(commands(TOUR)), ids=" ".join)
def test_a_command_of_the_tour_exists(words):
    check_command(words)


def test_laws_that_the_tour_names_are_tests():
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for law in set(re.findall(r"`(test_\w+)`", TOUR)):
        assert f"def {law}(" in tests, law


@pytest.mark.slow
def test_the_commands_of_the_tour_run_one_after_the_other(tmp_path):
    """All but the last, which is `make demo-nano`, in a folder of their own."""
    for path in (
        "minidpo",
        "envs",
        "tests",
        "configs",
        "benchmarks",
        "docs",
        "README.md",
        *(script.name for script in ROOT.glob("*.py")),
    ):
        (tmp_path / path).symlink_to(ROOT / path)
    for words in commands(TOUR):
        if words[2:3] == ["loop"]:
            continue
        laws = "minidpo.laws" in words  # of which IPO does not keep all
        expected = (-9, 137) if words[0] == "timeout" else (1,) if laws else (0,)
        words = [sys.executable if word == "python" else word for word in words]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode in expected, (
            f"{' '.join(words)}: {done.stdout[-500:]} {done.stderr[-2000:]}"
        )
