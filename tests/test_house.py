"""The house rules a machine can check: chapters and imports, sizes, docstrings, what the README promises."""

import ast
import contextlib
import doctest
import functools
import importlib
import io
import itertools
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import MISTAKES, mutated

ROOT = Path(__file__).parents[1]
PACKAGES = ("minidpo", "envs")
SCRIPTS = sorted(ROOT.glob("*.py"))
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path
           for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))
           if path.name != "__init__.py"}
SOURCES = [*SCRIPTS, *(path for folder in (*PACKAGES, "tests", "benchmarks")
                       for path in sorted((ROOT / folder).rglob("*.*"))
                       if path.suffix in (".py", ".js", ".html"))]
PLAYWRIGHT = {"envs.miniwob.browser.driver", "envs.miniwob.browser.chromium", "envs.miniwob.browser.page"}
BRIDGE = {"minidpo.data.prompt", "minidpo.acting.rollout"}  # the only modules of minidpo that know of environments

modules = pytest.mark.parametrize("name", MODULES)


def chapter(name):
    """A module's chapter: the number that its docstring starts with."""
    docstring = ast.get_docstring(ast.parse(MODULES[name].read_text())) or ""
    found = re.match(r"(\d+)\. \S", docstring)
    assert found, f"{name}: the docstring must start with 'N. Title', got {docstring[:40]!r}"
    return int(found[1])


def imports(name):
    """All that a module imports, anywhere in it: `from a import b` is a.b if that is a module, else a."""
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute here"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (path if path in MODULES else node.module for path in inner)


@modules
def test_every_module_imports_and_its_examples_run(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


@pytest.mark.parametrize("package", PACKAGES)
def test_no_two_modules_are_the_same_chapter(package):
    numbers = sorted((chapter(name), name) for name in MODULES if name.startswith(f"{package}."))
    assert [(one, other) for one, other in itertools.pairwise(numbers) if one[0] == other[0]] == []


def test_each_chapter_names_the_next():
    order = sorted((chapter(name), name.split(".")[-1]) for name in MODULES if name.startswith("minidpo."))
    for (_, name), (number, following) in itertools.pairwise(order):
        docstring = ast.get_docstring(ast.parse(MODULES[f"minidpo.{name}"].read_text()))
        said = re.search(r"Next(?:, part \w+)?: (\d+ \w+)", " ".join(docstring.split()))
        assert said and said[1] == f"{number} {following}", f"{name}: next is {number} {following}"


@modules
def test_a_module_imports_lower_chapters_only(name):
    package = name.split(".")[0]
    for other in imports(name):
        if other in MODULES and other.startswith(f"{package}."):
            assert chapter(other) < chapter(name), f"{name} imports {other}"


@modules
def test_imports_cross_the_house_in_the_agreed_places_only(name):
    roots = {other.split(".")[0] for other in imports(name)}
    assert roots.isdisjoint({"transformers", "peft", "trl"})
    assert roots.isdisjoint({path.stem for path in SCRIPTS}), f"{name} imports a script"
    assert "playwright" not in roots or name in PLAYWRIGHT
    if name.startswith("envs."):
        assert roots.isdisjoint({"torch", "minidpo"})
    else:
        crossing = {other for other in imports(name) if other.startswith("envs")}
        assert crossing <= ({"envs.protocol", "envs.actions"} if name in BRIDGE else set())


@modules
def test_a_module_is_short_enough_to_be_one_idea(name):
    lines = MODULES[name].read_text().count("\n")
    assert lines <= 250


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_source_file_says_what_it_is_in_lines_one_can_read(path):
    text = path.read_text()
    if path.suffix == ".py":
        assert ast.get_docstring(ast.parse(text))
    lines = list(enumerate(text.splitlines(), start=1))
    assert [number for number, line in lines if len(line) > 110] == []
    assert [number for number, line in lines if re.search("TO" "DO|FIX" "ME|XX" "X", line)] == []


def test_every_requirement_is_pinned():
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        assert line.startswith("#") or re.fullmatch(r"[a-z0-9-]+==[0-9.]+", line), line


def commands(text):
    """The lines in a document's fenced blocks that run this project; a trailing backslash joins two."""
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words and words[0] in ("python", ".venv/bin/python", "make", "timeout", "torchrun"):
                yield words


@functools.cache
def help_of(*program):
    """What `python PROGRAM --help` prints: a script's in this process, where torch is imported already."""
    wide = {"COLUMNS": "200", "NO_COLOR": "1"}
    if program[0] == "-m":
        done = subprocess.run([sys.executable, *program, "--help"], cwd=ROOT, capture_output=True, text=True,
                              env={**os.environ, **wide})
        assert done.returncode == 0, f"{program}: {done.stderr}"
        return done.stdout
    script, said = ROOT / program[0], io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        for name, value in wide.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", [*program, "--help"])
        patch.syspath_prepend(script.parent)
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            assert not end.code, f"{program}: {end}"
    return said.getvalue()


README, MEASURED, GUIDE, WHERE, *OTHERS = ((ROOT / path).read_text() for path in (
    "README.md", "docs/measured.md", "docs/guide.md", "docs/what-runs-where.md", "docs/shipped-model.md",
    "docs/any-page.md", "docs/other-tools.md", "docs/long-runs.md"))
PAGES = (README, MEASURED, GUIDE, WHERE, *OTHERS)


@pytest.mark.parametrize("words", list(map(list, dict.fromkeys(
    tuple(words) for text in PAGES for words in commands(text)))), ids=" ".join)
def test_a_command_in_the_readme_exists(words):
    check_command(words)


def check_command(words):
    """There is such a program, and it takes these options."""
    if words[0] == "timeout":  # timeout -s KILL SECONDS COMMAND
        words = words[4:]
    if words[0] == "torchrun":  # torchrun --nproc-per-node N SCRIPT
        words = ["python", *words[3:]]
    if words[0] == "make":
        # without MAKEFLAGS: these tests may themselves run under make, with its flags in the environment
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        done = subprocess.run([*words, "--dry-run"], cwd=ROOT, capture_output=True, text=True, env=clean)
        assert done.returncode == 0, done.stderr
        return
    program, *rest = [["-m", words[2]], *words[3:]] if words[1] == "-m" else [[words[1]], *words[2:]]
    if rest and re.fullmatch(r"[a-z][a-z-]*", rest[0]):  # a sub-command
        program = [*program, rest[0]]
    if "--url" in rest:  # another command by the same name
        program = [*program, "--url", "x"]
    text = help_of(*program)
    for flag in (word.split("=")[0] for word in rest if word.startswith("--")):
        assert re.search(rf"{re.escape(flag)}(?![\w-])", text), f"{' '.join(program)} has no {flag}"


def test_every_function_and_every_law_in_the_table_of_equations_exists():
    """docs/equations.md names functions as `file: function` and tests by their name."""
    text = (ROOT / "docs" / "equations.md").read_text()
    functions = re.findall(r"`(\S+\.py): (\w+)`", text)
    laws = set(re.findall(r"`(test_\w+)`", text))
    assert len(functions) > 20 and len(laws) > 20
    for path, name in functions:
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path} has no {name}"
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    assert [law for law in sorted(laws) if f"def {law}(" not in tests] == []


def figures(name):
    """The figures of a recorded benchmark, which must say when, where and how it was measured."""
    result = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    assert {"figures", "machine", "versions", "date", "command"} <= result.keys()
    return result["figures"]


def test_the_measured_speeds_and_sizes_are_the_recorded_ones():
    speed = figures("dpo_step")
    for work in "abcd":
        of = {name.removeprefix(f"{work}_"): value for name, value in speed.items()}
        apart = f"{of['largest_loss_difference']:.0e}" if work != "d" else "-"
        cells = [f"{of['trl_pairs_per_s']:.1f}", f"{of['minidpo_pairs_per_s']:.1f}",
                 f"{of['pairs_per_s_ratio']:.1f}", f"{of['training_memory_ratio']:.2f}", apart]
        row = rf"^\| {work}: .* \| {re.escape(' | '.join(cells))} \|$"
        assert re.search(row, MEASURED, re.MULTILINE), row
    head, mutants = figures("head_memory"), figures("mutants")
    added = f"adds {head['ours_4096_mib']:,.0f} MiB to the model, {head['full_4096_mib']:,.0f} MiB with plain"
    assert added in " ".join(MEASURED.split())
    assert f"makes {mutants['mistakes']} plausible mistakes" in " ".join(GUIDE.split())
    assert mutants["killed"] == mutants["mistakes"]


def test_the_measured_figures_of_pages_and_sampling_are_the_recorded_ones():
    env = figures("env_speed")
    for side, digits, ratio in (("farama", 1, "farama"), ("farama_without_screenshots", 1, None),
                                ("browsergym", 2, "browsergym"), ("browsergym_tuned", 2, None)):
        best = env[f"{side}_{env[f'{side}_best_number']:.0f}_episodes_per_s"]
        times = env[f"vs_{ratio or side}_ratio"]
        assert f"| {best:.{digits}f} | {times:.{1 if times < 100 else 0}f} |" in MEASURED
    ours = env[f"minidpo_{env['minidpo_best_number']:.0f}_episodes_per_s"]
    assert f"| minidpo, {env['minidpo_best_number']:.0f} pages | {ours:.0f} | |" in MEASURED
    floor = env[f"floor_{env['floor_best_number']:.0f}_episodes_per_s"]
    assert f"| {floor:.0f} | 1 / {env['vs_floor_ratio']:.1f} |" in MEASURED
    memory = figures("env_memory")
    told = (f"up to {memory['pages_16_pss_mib']:.0f} MiB of Chromium's memory; 1,920 further episodes add "
            f"{memory['growth_mib']:.0f} MiB")
    assert told in " ".join(MEASURED.split())
    of = figures("generate")
    for name in ("batch1", "batch16", "batch64", "groups"):
        cells = [f"{of[f'{name}_{side}_tokens_per_s']:,.0f}" for side in ("transformers", "minidpo")]
        cells += [f"{of[f'{name}_{ratio}']:.1f}" for ratio in ("ratio", "limit")]
        assert f"| {' | '.join(cells)} |" in MEASURED
    rollout = figures("rollout")
    told = (f"plays {rollout['16_episodes_per_s']:.0f} episodes/s on 16 pages of two cores, and the model is "
            f"at work {100 * rollout['16_model_busy']:.0f} % of the time")
    assert told in " ".join(MEASURED.split())


def test_the_measured_figures_of_a_7b_are_the_recorded_ones():
    of = figures("qwen2_7b")
    assert of["host_peak_gib"] < 8 and abs(of["dpo_loss"] - 0.6931) < 1e-3
    assert f"{of['checkpoint_gib']:.1f} GiB on disk | {of['quantise_s']:.0f} |" in MEASURED
    for part, digits in (("quantise", 0), ("cached_load", 1), ("sft", 0), ("dpo", 0)):
        assert f"| {of[f'{part}_s']:.{digits}f} | {of[f'{part}_peak_gib']:.2f} GiB |" in MEASURED, part
    demo = json.loads((ROOT / "benchmarks" / "results" / "nf4-demo-1.json").read_text())
    before, after = (100 * demo[agent]["all"]["success"] for agent in ("sft", "dpo"))
    assert f"from {before:.1f} % to {after:.1f} % (seed 1" in " ".join(MEASURED.split())


def test_the_summary_of_speeds_and_the_sizes_of_a_7b_are_the_recorded_ones():
    step, env, head = figures("dpo_step"), figures("env_speed"), figures("head_memory")
    for told in (f"{step['d_pairs_per_s_ratio']:.1f} times the pairs/s",
                 f"{step['d_training_memory_ratio']:.2f} of the memory (rollouts",
                 f"{step['c_pairs_per_s_ratio']:.1f} times for all pairs of a group of eight",
                 f"{env['vs_browsergym_ratio']:.0f} and {env['vs_farama_ratio']:.1f} times the episodes/s",
                 f"{figures('generate')['groups_ratio']:.1f} times the tokens/s",
                 f"{head['ours_4096_mib']:,.0f} MiB in place of {head['full_4096_mib']:,.0f} MiB"):
        assert told in MEASURED, told
    seven = figures("qwen2_7b")
    assert f"loads in {seven['cached_load_s']:.0f} s" in WHERE
    assert f"{max(seven['sft_peak_gib'], seven['dpo_peak_gib']):.1f} GiB at most" in WHERE
    assert f"{seven['quantise_peak_gib']:.1f} the first time" in WHERE
    planned = [max(int(mib.replace(",", "")) / 1024
                   for mib in re.findall(r"\w ([\d,]+) MiB", path.read_text()))
               for path in (ROOT / "configs" / f"qwen2-{size}.toml" for size in ("0.5b", "1.5b", "7b-8gb"))]
    assert "need {:.1f}, {:.1f} and {:.1f} GiB".format(*planned) in WHERE


def test_every_mistake_of_the_mutants_is_one_that_could_still_be_made():
    """Each text to be replaced is in its file, and the file with the mistake in it is still Python."""
    for name, mistakes in MISTAKES.items():
        for changes in mistakes:
            compile(mutated(name, changes), name, "exec")
    assert sum(map(len, MISTAKES.values())) > 100


def test_the_guides_rows_of_the_study_are_the_recorded_ones():
    of = figures("study")
    for name, arm in (("SFT", "sft"), ("one round of RFT", "rft"), ("one round of DPO", "dpo"),
                      ("one round of DPO, a golden", "expert"), ("up to five rounds of DPO", "rounds")):
        assert of[f"{arm}_seeds"] == 3
        cells = " | ".join(f"{100 * of[f'{arm}_{suite}_mean']:.1f} %" for suite in ("demo", "unseen"))
        assert re.search(rf"^\| {name}[^|]* \| {re.escape(cells)} \|$", GUIDE, re.MULTILINE), name
    alone = json.loads((ROOT / "benchmarks" / "results" / "ef-dpo-1.json").read_text())
    before, after = (100 * alone[agent]["all"]["success"] for agent in ("sft", "dpo"))
    assert f"{before:.1f} -> {after:.1f} %" in GUIDE


def test_the_readmes_results_are_the_recorded_ones():
    """benchmarks/results/demo-*.json are results of `make demo`; README and guide have a row for each."""
    recorded = sorted((ROOT / "benchmarks" / "results").glob("demo-*.json"))
    assert recorded
    for path in recorded:
        result = json.loads(path.read_text())
        sft, dpo, both = result["sft"], result["dpo"], result["comparison"]
        greedy, sampled = ([f"{100 * agent[part]['success']:.1f} %" for agent in (sft, dpo)]
                           for part in ("all", "sampled"))
        changed = f"{both['only_after']} / {both['only_before']}"
        seconds = f"{sum(result['seconds'].values()):.0f} s"
        cells = [str(result["seed"]), *greedy, f"{both['gain_points']:+.1f}", changed,
                 f"{both['p_value']:.0e}", *sampled, seconds]
        assert f"| {' | '.join(cells)} |" in GUIDE
        ends = ", ".join(f"{100 * agent['all']['low']:.1f} - {100 * agent['all']['high']:.1f}"
                         for agent in (sft, dpo))
        minutes = f"{sum(result['seconds'].values()) / 60:.1f}"
        assert f"| {' | '.join([*greedy, ends, minutes])} |" in README
