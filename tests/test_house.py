"""The house rules a machine can check: imports, layers, what README and docs promise."""

import ast
import contextlib
import doctest
import functools
import graphlib
import importlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A room imports only what is left of it. The kit and the exercises look at everything.
LAYERS = [
    "system",
    "objective",
    "model",
    "memory",
    "data",
    "learning",
    "acting",
    "results",
    "experiment",
    "runner",
    "algorithms",
    "commands",
    "laws",
    "exercises",
]
DOORS = {"envs", "envs.protocol", "envs.actions", "envs.panel"}  # all that minidpo knows of worlds
EXTRAS = {  # what is not always installed, by the modules that need it
    "minidpo.memory.nf4_cuda": "triton",  # the one module of a GPU's PyTorch alone
    "envs.babyai.bot": "minigrid",
    "envs.babyai.rooms": "minigrid",
    "envs.babyai.sight": "minigrid",
    "envs.openenv": "websockets",
}


def module_name(path):
    """minidpo/data/tree.py is minidpo.data.tree, minidpo/data/__init__.py is minidpo.data."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {
    module_name(path): path
    for package in ("minidpo", "envs")
    for path in sorted((ROOT / package).rglob("*.py"))
}
ours = pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("minidpo.")])


@functools.cache
def imports(name):
    """All that a module imports, anywhere in it: `from a import b` is a.b if that is a module, else a."""
    imported = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute here"
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
            imported |= {path if path in MODULES else node.module for path in paths}
    return imported


def layer(name):
    room = name.split(".")[1]
    assert room in LAYERS, f"{name} is in no room of {LAYERS}"
    return LAYERS.index(room)


@pytest.mark.parametrize("name", MODULES)
def test_every_module_imports_and_its_examples_run(name):
    for module, package in EXTRAS.items():
        if name.startswith(module):
            pytest.importorskip(package)
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


@ours
def test_a_room_imports_only_what_is_left_of_it(name):
    inside = {imported for imported in imports(name) if imported.startswith("minidpo.")}
    assert [imported for imported in sorted(inside) if layer(imported) > layer(name)] == []


@ours
def test_no_module_names_a_world_or_another_library_that_does_our_work(name):
    roots = {imported.split(".")[0] for imported in imports(name)}
    assert roots.isdisjoint({"transformers", "peft", "trl", "playwright"})
    worlds = {imported for imported in imports(name) if imported.split(".")[0] == "envs"}
    assert worlds <= DOORS
    if name.startswith("minidpo.objective"):
        assert roots <= {"torch", "minidpo", *sys.stdlib_module_names}
        inside = {imported for imported in imports(name) if imported.startswith("minidpo.")}
        assert all(imported.startswith("minidpo.objective") for imported in inside)


def test_worlds_know_neither_minidpo_nor_torch():
    for name in MODULES:
        if name.startswith("envs"):
            roots = {imported.split(".")[0] for imported in imports(name)}
            assert roots.isdisjoint({"minidpo", "torch", "transformers", "peft", "trl"}), name


def test_no_import_goes_in_a_circle():
    graph = {name: imports(name) & MODULES.keys() for name in MODULES}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize("words", (["check"], ["format", "--check"]), ids=" ".join)
def test_ruff_has_nothing_to_say(words):
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *words, "-q", "."], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


# README and docs

PAGES = {
    path: path.read_text() for path in (*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md")))
}
# docs/log.md keeps the commands of its day
COMMANDS = (text for path, text in PAGES.items() if path.name != "log.md")


def commands(text):
    """The lines in a document's fenced blocks that run this project; a trailing backslash joins two."""
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in () if kind in ("python", "text") else block.replace("\\\n", " ").splitlines():
            words = tuple(shlex.split(line.removeprefix("$ "), comments=True))
            if words[:1] == ("timeout",):  # timeout -s KILL SECONDS COMMAND
                words = words[4:]
            if words[:1] == ("torchrun",):  # torchrun --nproc-per-node N SCRIPT
                words = ("python", *words[3:])
            if words and words[0] in ("python", ".venv/bin/python", "make"):
                yield words


@functools.cache
def help_of(*program):
    """What `python PROGRAM --help` prints of all options, in this process, where torch is imported already."""
    said = io.StringIO()
    short = program[0] in ("train.py", "collect.py", "evaluate.py")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setenv("COLUMNS", "200")
        patch.setenv("NO_COLOR", "1")
        patch.setattr(sys, "argv", [*program, "--help-all" if short else "--help"])
        patch.syspath_prepend(ROOT / "benchmarks")
        with contextlib.suppress(SystemExit):
            if program[0] == "-m":
                runpy.run_module(program[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(ROOT / program[0]), run_name="__main__")
    return said.getvalue()


@pytest.mark.parametrize(
    "words", dict.fromkeys(words for text in COMMANDS for words in commands(text)), ids=" ".join
)
def test_a_command_in_readme_and_docs_exists(words):
    """There is such a program, and its help has these options."""
    if words[0] == "make":
        # without MAKEFLAGS: these tests may themselves run under make, with its flags in the environment
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        subprocess.run([*words, "--dry-run"], cwd=ROOT, capture_output=True, env=clean, check=True)
        return
    split = 3 if words[1] == "-m" else 2
    program, rest = words[1:split], words[split:]
    if program == ("-m", "pytest"):
        assert all((ROOT / word).exists() for word in rest if word.startswith("tests"))
        return
    if rest and re.fullmatch(r"[a-z][a-z0-9-]*", rest[0]):  # a sub-command
        program = (*program, rest[0])
        if rest[0] in ("run", "plan"):  # of a page
            program = (*program, rest[1])
    if "--url" in rest:
        program = (*program, "--url", "URL", "--goal", "GOAL")
    if "--serve" in rest:
        program = (*program, "--serve", "8000")
    text = help_of(*program)
    for flag in (word.split("=")[0] for word in rest if word.startswith("--")):
        assert re.search(rf"{re.escape(flag)}(?![\w-])", text), f"{' '.join(program)} has no {flag}"


def test_every_function_and_every_law_that_the_docs_name_exists():
    """They name functions as `file: function`, and tests and laws by their name."""
    sources = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "minidpo").rglob("*.py")]
    defined = set(re.findall(r"def (\w+)\(", "\n".join(path.read_text() for path in sources)))
    for page, text in PAGES.items():
        laws = {law for law in re.findall(r"`(test_\w+)`", text) if "/" not in law}
        assert laws - {path.stem for path in sources} <= defined, page
        for path, name in re.findall(r"`(\S+\.py): (\w+)`", text):
            source = (ROOT / path).read_text()
            assert re.search(rf"^\s*(async def|def|class) {name}\b", source, re.M)


WITH_CODE = PAGES[ROOT / "README.md"] + PAGES[ROOT / "docs" / "tour.md"]


@pytest.mark.parametrize(
    "path, name, code", re.findall(r"^```python\n# (\S+): (\S+)\n(.*?)^```", WITH_CODE, re.M | re.S)
)
def test_code_in_readme_and_tour_is_the_sources(path, name, code):
    strip = functools.partial(re.sub, r"^ +", "", flags=re.M)
    assert strip(code) in strip((ROOT / path).read_text()), f"{path}: {name} has no such lines"
