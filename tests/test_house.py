"""The house rules a machine can check: layers, sizes, docstrings, what README and docs promise."""

import ast
import contextlib
import doctest
import functools
import graphlib
import importlib
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import MISTAKES, missing, mutated

from minidpo.config import LoopCommand
from minidpo.learning.preferences import pair_loss_of
from minidpo.system.command_line import parse
from minidpo.system.files import file_sha256
from minidpo.system.result_file import read_result

ROOT = Path(__file__).parents[1]
# A package imports only what stands left of it; config and loop are single files.
LAYERS = (
    "system",
    "objective",
    "model",
    "memory",
    "data",
    "config",
    "learning",
    "acting",
    "results",
    "loop",
    "commands",
    "laws",
    "exercises",
)
SCRIPTS = {"train.py", "collect.py", "evaluate.py"}


def module_name(path):
    """minidpo/data/tree.py is minidpo.data.tree, minidpo/data/__init__.py is minidpo.data."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(path): path
    for package in ("minidpo", "envs")
    for path in sorted((ROOT / package).rglob("*.py"))
}
SOURCES = [
    *sorted(ROOT.glob("*.py")),
    *(
        path
        for folder in ("minidpo", "envs", "tests", "benchmarks")
        for path in sorted((ROOT / folder).rglob("*.*"))
        if path.suffix in (".py", ".js", ".html")
    ),
]
PLAYWRIGHT = {
    "envs.miniwob.browser.driver",
    "envs.miniwob.browser.chromium",
    "envs.miniwob.browser.page",
}
WORLDS = ("envs.miniwob", "envs.web")
# What may name a world: `acting` any part of any world, and outside of `acting` these modules these parts.
MAY_NAME_A_WORLD = {
    "minidpo.results.replay": {"envs.miniwob.browser.driver"},
    "minidpo.results.evaluate": {"envs.miniwob.tasks", "envs.miniwob.browser.remote"},
    "minidpo.loop": {"envs.miniwob.tasks"},
}

modules = pytest.mark.parametrize("name", MODULES)


@functools.cache
def imports(name):
    """All that a module imports, anywhere in it: `from a import b` is a.b if that is a module, else a."""
    imported = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute here"
            for alias in node.names:
                path = f"{node.module}.{alias.name}"
                imported.add(path if path in MODULES else node.module)
    return imported


def layer(name):
    """The place of a module of minidpo in LAYERS: minidpo.data.tree is of `data`."""
    package = name.split(".")[1]
    assert package in LAYERS, f"{name} is in none of the layers {' '.join(LAYERS)}"
    return LAYERS.index(package)


@modules
def test_every_module_imports_and_its_examples_run(name):
    if name == "minidpo.memory.nf4_cuda":  # the one module of a GPU's PyTorch alone
        pytest.importorskip("triton")
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("minidpo.")])
def test_a_package_imports_only_what_stands_left_of_it(name):
    ours = {imported for imported in imports(name) if imported.startswith("minidpo.")}
    assert [imported for imported in sorted(ours) if layer(imported) > layer(name)] == []


@pytest.mark.parametrize("package", ["minidpo", "envs"])
def test_no_module_imports_itself_by_way_of_others(package):
    graph = {
        name: [imported for imported in imports(name) if imported in MODULES]
        for name in MODULES
        if name.split(".")[0] == package
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("minidpo.objective")])
def test_the_objective_imports_torch_alone(name):
    roots = {
        ".".join(imported.split(".")[:2])
        if imported.startswith("minidpo")
        else imported.split(".")[0]
        for imported in imports(name)
    }
    assert roots <= {"torch", "minidpo.objective", *sys.stdlib_module_names}


@modules
def test_worlds_browsers_and_other_libraries_are_imported_in_the_agreed_places_only(name):
    roots = {imported.split(".")[0] for imported in imports(name)}
    assert roots.isdisjoint({"transformers", "peft", "trl"})
    assert roots.isdisjoint({Path(script).stem for script in SCRIPTS}), f"{name} imports a script"
    assert "playwright" not in roots or name in PLAYWRIGHT
    if name.split(".")[0] == "envs":
        assert roots.isdisjoint({"torch", "minidpo"})
    elif not name.startswith("minidpo.acting"):
        worlds = {imported for imported in imports(name) if imported.startswith(WORLDS)}
        assert worlds <= MAY_NAME_A_WORLD.get(name, set())


def lines_of(path):
    return (ROOT / path).read_text().count("\n")


def test_the_root_holds_three_scripts_that_parse_call_and_print():
    assert {path.name for path in ROOT.glob("*.py")} == SCRIPTS
    assert {script: lines_of(script) for script in SCRIPTS if lines_of(script) >= 60} == {}


def too_large(path):
    """Functions of more than 50 lines or 7 parameters (less self and cls), as text."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = node.args
            names = [
                argument.arg
                for argument in (
                    *arguments.posonlyargs,
                    *arguments.args,
                    *arguments.kwonlyargs,
                    *filter(None, (arguments.vararg, arguments.kwarg)),
                )
                if argument.arg not in ("self", "cls")
            ]
            lines = node.end_lineno - node.lineno + 1
            scores = {"policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected"}
            count = len(names) - 3 * (
                scores <= set(names)
            )  # the four scores of a pair are one argument
            if lines > 50 or count > 7:
                yield f"{path.relative_to(ROOT)}: {node.name} has {lines} lines, {len(names)} parameters"


def test_functions_files_and_totals_are_small_enough_to_read():
    """Experts' tables and the one file of options may be longer than a file else."""
    paths = [*MODULES.values(), *(ROOT / script for script in SCRIPTS)]
    alarms = [alarm for path in paths for alarm in too_large(path)]
    alarms += [
        f"{path.relative_to(ROOT)} has {lines_of(path)} lines, at most 400"
        for path in paths
        if lines_of(path) > 400 and path.name != "config.py" and path.parent.name != "experts"
    ]
    rooms = [path.relative_to(ROOT) for path in paths if path.relative_to(ROOT).parts[0] != "envs"]
    taught = [path for path in rooms if "laws" in path.parts or path.name == "exercises.py"]
    heart = [path for path in rooms if path not in taught]
    evening = [
        f"minidpo/{name}.py"
        for name in (
            "objective/scores",
            "objective/losses",
            "data/pairs",
            "data/tree",
            "data/batch",
            "learning/preferences",
            "learning/dpo",
            "learning/trainer",
            "loop",
        )
    ]
    for what, total, limit in (
        ("minidpo/objective", [path for path in rooms if "objective" in path.parts], 687),
        ("the evening path", [path for path in evening if (ROOT / path).is_file()], 2_000),
        # the ceiling is what stands there: who raises it says in the commit what for
        ("minidpo and the scripts", heart, 13_653),
        ("laws and exercises", taught, 1_361),
    ):
        if (lines := sum(map(lines_of, total))) > limit:
            alarms.append(f"{what}: {lines} lines, at most {limit}")
    alarms += [
        f"{path} is named in the evening path and does not exist"
        for path in evening
        if not (ROOT / path).is_file()
    ]
    assert not alarms, "\n".join(alarms)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_source_file_says_what_it_is_in_lines_one_can_read(path):
    text = path.read_text()
    if path.suffix == ".py":
        assert ast.get_docstring(ast.parse(text))
    lines = list(enumerate(text.splitlines(), start=1))
    assert [number for number, line in lines if len(line) > 110] == []
    assert [number for number, line in lines if re.search("TODO|FIXME|XXX", line)] == []
    assert [number for number, line in lines if re.search(r"\b[Cc]hapters? \d", line)] == []


def test_each_package_names_all_its_files_in_its_reading_order():
    for package in (path.parent for path in (ROOT / "minidpo").glob("*/__init__.py")):
        told = ast.get_docstring(ast.parse((package / "__init__.py").read_text()))
        for path in package.glob("[!_]*.py"):
            assert path.name.startswith("test_") or re.search(rf"\b{path.stem}\b", told), path


def test_every_requirement_is_pinned():
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        assert line.startswith("#") or re.fullmatch(r"[a-z0-9-]+==[0-9.]+", line), line


def commands(text):
    """The lines in a document's fenced blocks that run this project; a trailing backslash joins two."""
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in () if kind in ("python", "text") else block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words and words[0] in ("python", ".venv/bin/python", "make", "timeout", "torchrun"):
                yield words


@functools.cache
def help_of(*program):
    """What `python PROGRAM --help` prints: a script's in this process, where torch is imported already."""
    wide = {"COLUMNS": "200", "NO_COLOR": "1"}
    if program[0] == "-m":
        done = subprocess.run(
            [sys.executable, *program, "--help"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env={**os.environ, **wide},
        )
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


README = (ROOT / "README.md").read_text()
# docs/log.md keeps the commands of its day, the study makes docs/results.md, test_tour runs the tour
PAGES = {
    path.name: path.read_text()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if path.name not in ("log.md", "results.md", "tour.md")
}


@pytest.mark.parametrize(
    "words",
    list(
        map(
            list, dict.fromkeys(tuple(words) for text in PAGES.values() for words in commands(text))
        )
    ),
    ids=" ".join,
)
def test_a_command_in_readme_and_docs_exists(words):
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
        done = subprocess.run(
            [*words, "--dry-run"], cwd=ROOT, capture_output=True, text=True, env=clean
        )
        assert done.returncode == 0, done.stderr
        return
    program, *rest = (
        [["-m", words[2]], *words[3:]] if words[1] == "-m" else [[words[1]], *words[2:]]
    )
    if rest and re.fullmatch(r"[a-z][a-z-]*", rest[0]):  # a sub-command
        program = [*program, rest[0]]
    if "--pyargs" in rest:  # whose options pytest has only then
        program = [*program, *rest[rest.index("--pyargs") :][:2]]
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
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), (
            f"{path} has no {name}"
        )
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert [law for law in sorted(laws) if f"def {law}(" not in tests] == []


def recorded(name):
    """A result under benchmarks/results/."""
    return read_result(ROOT / "benchmarks" / "results" / f"{name}.json")


def figures(name):
    """The figures of a recorded benchmark, which must say when, where and how it was measured."""
    result = recorded(name)
    assert {"figures", "machine", "versions", "date", "command"} <= result.keys()
    return result["figures"]


def success(result, *agents):
    """What each agent solved greedily, as it is printed: `51.5 %`."""
    return [f"{100 * result['agents'][agent]['all']['success']:.1f} %" for agent in agents]


def blocks(text):
    """The paragraphs of a document without their line breaks; each row of a table is one."""
    for block in re.split(r"\n\s*\n|\n(?=\|)|(?<=\|)\n", text):
        yield " ".join(block.split())


def is_told(text, *cells):
    """Whether a paragraph or a row of a table has all cells, in this order; a number is a whole number."""
    pattern = ".*?".join(rf"(?<![\d.,]){re.escape(cell)}(?!\d|[.,]\d)" for cell in cells)
    return any(re.search(pattern, block) for block in blocks(text))


def assert_told(*cells):
    assert any(is_told(text, *cells) for text in PAGES.values()), (
        f"no paragraph or row of README and docs has {', '.join(cells)}"
    )


def test_the_measured_speeds_and_sizes_are_the_recorded_ones():
    speed = figures("dpo_step")
    for work in "abcd":
        row = {name.removeprefix(f"{work}_"): value for name, value in speed.items()}
        apart = f"{row['largest_loss_difference']:.0e}" if work != "d" else "-"
        assert_told(
            f"| {work}: ",
            f"| {row['trl_pairs_per_s']:.1f} | {row['minidpo_pairs_per_s']:.1f} | "
            f"{row['pairs_per_s_ratio']:.1f} | {row['training_memory_ratio']:.2f} | {apart} |",
        )
    head, mutants = figures("head_memory"), figures("mutants")
    assert_told(f"{head['ours_4096_mib']:,.0f} MiB", f"{head['full_4096_mib']:,.0f} MiB")
    assert_told(f"{mutants['mistakes']} plausible mistakes")
    assert mutants["killed"] == mutants["mistakes"]


def test_the_measured_figures_of_pages_and_sampling_are_the_recorded_ones():
    env = figures("env_speed")
    for side, digits, ratio in (
        ("farama", 1, "farama"),
        ("farama_without_screenshots", 1, None),
        ("browsergym", 2, "browsergym"),
        ("browsergym_tuned", 2, None),
    ):
        best = env[f"{side}_{env[f'{side}_best_number']:.0f}_episodes_per_s"]
        times = env[f"vs_{ratio or side}_ratio"]
        assert_told(f"| {best:.{digits}f} | {times:.{1 if times < 100 else 0}f} |")
    ours = env[f"minidpo_{env['minidpo_best_number']:.0f}_episodes_per_s"]
    assert_told(f"| minidpo, {env['minidpo_best_number']:.0f} pages | {ours:.0f} | |")
    floor = env[f"floor_{env['floor_best_number']:.0f}_episodes_per_s"]
    assert_told(f"| {floor:.0f} | 1 / {env['vs_floor_ratio']:.1f} |")
    memory = figures("env_memory")
    assert_told(
        f"{memory['pages_16_pss_mib']:.0f} MiB",
        "1,920",
        f"{memory['growth_mib']:.0f} MiB",
        f"{memory['full_after_1000_mib']:.0f} MiB",
    )
    tokens = figures("generate")
    for name in ("batch1", "batch16", "batch64", "groups"):
        cells = [
            f"{tokens[f'{name}_{side}_tokens_per_s']:,.0f}" for side in ("transformers", "minidpo")
        ]
        cells += [f"{tokens[f'{name}_{ratio}']:.1f}" for ratio in ("ratio", "limit")]
        assert_told(f"| {' | '.join(cells)} |")
    rollout = figures("rollout")
    assert_told(
        f"{rollout['16_episodes_per_s']:.0f} episodes/s",
        "16 pages",
        f"{100 * rollout['16_model_busy']:.0f} % of the time",
    )


def test_the_measured_figures_of_a_real_model_are_the_recorded_ones():
    real, dtypes = figures("real_model"), ("float32", "bfloat16")
    for dtype in dtypes:
        trl, ours = (real[f"sft_{side}_{dtype}_tokens_per_s"] for side in ("trl", "minidpo"))
        floor = real[f"sft_{dtype}_floor_tokens_per_s"]
        assert_told(
            f"| {dtype}, tokens/s | {trl:.0f} | {ours:.0f} | {ours / trl:.1f} | {floor:.0f} |"
        )
    fair = figures("real_model-float32")  # the peer in passes that suit it
    assert_told(
        f"| {fair['sft_vs_trl_ratio']:.1f} times the tokens/s, "
        f"{fair['sft_memory_ratio']:.2f} of the memory |"
    )
    for rows in (1, 2, 4, 8):
        assert_told(
            f"| {rows} | {fair[f'sft_trl_float32_{rows}_rows_tokens_per_s']:.0f} | "
            f"{fair[f'sft_trl_float32_{rows}_rows_training_mib']:,.0f} |"
        )
    for side in ("trl", "minidpo"):
        assert_told(
            f"| {fair[f'sft_{side}_float32_tokens_per_s']:.0f} | "
            f"{fair[f'sft_{side}_float32_training_mib']:,.0f} |"
        )
    for key, ratio, memory in (
        ("dpo", "dpo_vs_trl_pairs_ratio", "training_memory_ratio"),
        ("groups", "groups_vs_trl_pairs_ratio", "groups_memory_ratio"),
    ):
        trl, ours = (
            max(real[f"{key}_{side}_{dtype}_pairs_per_s"] for dtype in dtypes)
            for side in ("trl", "minidpo")
        )
        assert_told(f"| {trl:.2f} | {ours:.2f} | {real[ratio]:.1f} | {real[memory]:.2f} |")
    for case in ("1", "16", "64", "groups"):
        cells = [
            f"{real[f'generate_{case}_{side}_{dtype}_tokens_per_s']:.0f}"
            for side in ("transformers", "minidpo")
            for dtype in dtypes
        ]
        assert_told(
            f"| {' | '.join(cells)} | {real[f'generate_{case}_ratio']:.1f} | "
            f"{real[f'generate_{case}_of_floor']:.2f} |"
        )
    assert_told("llama.cpp", f"{real['llamacpp_16_ratio']:.1f} times as fast")
    rollouts = [f"{real[f'rollouts_{dtype}_episodes_per_s']:.2f}" for dtype in dtypes]
    assert_told("60 steps of SFT", *rollouts)
    whole = figures("miniwob")
    low, high = whole["webgum56_sft_low"], whole["webgum56_sft_high"]
    assert_told(
        f"{whole['all125_sft']:.1f} %", f"{whole['webgum56_sft']:.1f} % ({low:.1f} - {high:.1f})"
    )
    lines = (ROOT / "benchmarks/results/miniwob.jsonl").read_text().splitlines()
    line = next(line for line in map(json.loads, lines) if line["part"] == "whole")
    for agent in (
        "verdicts",
        [*line["agents"]][-1],
    ):  # docs/miniwob.md, which a script writes, has them all
        success = [f"{whole[f'{name}_{agent}']:.1f} %" for name in ("all125", "webgum56")]
        keys = "gain_points", "gain_low", "gain_high", "p_value"
        gains = [
            "{:+.1f} ({:+.1f} to {:+.1f}), p = {:.1g}".format(
                *(whole[f"{of}{agent}_to_sft_{key}"] for key in keys)
            )
            for of in ("", "webgum56_")
        ]
        assert_told(*success, *gains)
    found = [
        [f"{whole[f'{name}_trained{end}']:.1f}" for end in ("", "_low", "_high")]
        for name in ("all125", "webgum56")
    ]
    assert_told("rounds of ETO with", *(f"{rate} % ({low} - {high})" for rate, low, high in found))
    ships = file_sha256(ROOT / "minidpo/miniwob/adapter_model.safetensors")
    assert ships == line["weights"][[*line["agents"]][-1]]


def test_the_measured_figures_of_a_7b_are_the_recorded_ones():
    seven = figures("qwen2_7b")
    assert seven["host_peak_gib"] < 8 and abs(seven["dpo_loss"] - 0.6931) < 1e-3
    assert_told(f"{seven['checkpoint_gib']:.1f} GiB on disk | {seven['quantise_s']:.0f} |")
    for part, digits in (("quantise", 0), ("cached_load", 1), ("sft", 0), ("dpo", 0)):
        assert_told(f"| {seven[f'{part}_s']:.{digits}f} | {seven[f'{part}_peak_gib']:.2f} GiB |")
    assert_told(*success(recorded("nf4-demo-1"), "sft", "dpo"), "seed 1")
    assert_told(
        f"{seven['cached_load_s']:.0f} s",
        f"{max(seven['sft_peak_gib'], seven['dpo_peak_gib']):.1f} GiB",
        f"{seven['quantise_peak_gib']:.1f}",
    )


def test_the_measured_figures_of_a_gpu_are_the_recorded_ones():
    gpu = figures("gpu")
    for side, cells in (
        ("minidpo", [f"{gpu['seven_planned_gib']:.2f}"]),
        ("trl", ["-"]),
        ("minidpo_apart", [f"{gpu['seven_planned_apart_gib']:.2f}"]),
    ):
        assert_told(
            f"| {gpu[f'seven_{side}_step_s']:.2f} | {gpu[f'seven_{side}_tokens_per_s']:,.0f} | "
            f"{gpu[f'seven_{side}_peak_gib']:.2f} | {cells[0]} |"
        )
        assert gpu[f"seven_{side}_peak_gib"] < gpu["seven_cap_gib"]
    works = {
        name.removesuffix("_ratio")
        for name in gpu
        if name.startswith("steps_") and name.endswith("_ratio") and "memory" not in name
    }
    assert len(works) == 3
    for work in works:
        assert_told(
            f"| {gpu[f'{work}_trl_pairs_per_s']:.1f} | {gpu[f'{work}_minidpo_pairs_per_s']:.1f} | "
            f"{gpu[f'{work}_ratio']:.1f} | {gpu[f'{work}_memory_ratio']:.2f} |"
        )
    for case in ("batch1", "batch16", "batch64", "groups"):
        theirs, ours = (
            gpu[f"sampling_{case}_{side}_tokens_per_s"] for side in ("transformers", "minidpo")
        )
        assert_told(f"| {theirs:,.0f} | {ours:,.0f} | {gpu[f'sampling_{case}_ratio']:.1f} |")
    assert_told(
        *(
            f"{gpu[f'kernels_{name}_gb_per_s']:,.0f}"
            for name in ("nf4", "bitsandbytes_nf4", "copy", "q4_k", "q4_0", "q8_0")
        )
    )
    assert_told("differ between CPU and GPU by", f"{gpu['scores_largest_difference']:.0e}")
    passed, failed = (int(gpu[f"tests_{state}"]) for state in ("passed", "failed"))
    assert_told(f"Of the {passed + failed} tests, {passed} passed")


def test_the_summary_of_speeds_is_the_recorded_one():
    step, env, head = figures("dpo_step"), figures("env_speed"), figures("head_memory")
    assert_told(
        f"{step['d_pairs_per_s_ratio']:.1f} times the pairs/s",
        f"{step['d_training_memory_ratio']:.2f}",
        f"{step['c_pairs_per_s_ratio']:.1f} times",
    )
    assert_told(
        f"{env['vs_browsergym_ratio']:.0f}", f"{env['vs_farama_ratio']:.1f} times the episodes/s"
    )
    assert_told(f"{figures('generate')['groups_ratio']:.1f} times the tokens/s")
    assert_told(f"{head['ours_4096_mib']:,.0f} MiB", f"{head['full_4096_mib']:,.0f} MiB")
    planned = [
        max(
            int(mib.replace(",", "")) / 1024
            for mib in re.findall(r"\w ([\d,]+) MiB", path.read_text())
        )
        for path in (ROOT / "configs" / f"qwen2-{size}.toml" for size in ("0.5b", "1.5b", "7b-8gb"))
    ]
    assert_told(*(f"{gib:.1f}" for gib in planned))


def test_the_rows_of_the_study_are_the_recorded_ones():
    study = figures("study")
    for name, arm in (
        ("SFT", "sft"),
        ("one round of RFT", "rft"),
        ("one round of DPO", "dpo"),
        ("one round of DPO, a golden", "expert"),
        ("up to five rounds of DPO", "rounds"),
    ):
        assert study[f"{arm}_seeds"] == 3
        rates = [f"{100 * study[f'{arm}_{suite}_mean']:.1f} %" for suite in ("demo", "unseen")]
        assert_told(f"| {name}", *rates)
    before, after = success(recorded("ef-dpo-1"), "sft", "dpo")
    assert_told(before.removesuffix(" %"), after)


def test_the_demos_results_are_the_recorded_ones():
    """demo-*.json are results of `make demo`, those of the recorded recipe with a row each in the README;
    nano-*.json of `make demo-nano`; smollm2-*.json of an earlier recipe."""
    for demo in ("demo", "nano", "smollm2"):
        paths = sorted((ROOT / "benchmarks" / "results").glob(f"{demo}-*.json"))
        assert len(paths) >= 2
        for path in paths:
            result = recorded(path.stem)
            comparison, greedy = result["comparison"], success(result, "sft", "dpo")
            rates = [result["agents"][agent] for agent in ("sft", "dpo")]
            sampled = [f"{100 * agent['sampled']['success']:.1f} %" for agent in rates]
            ends = ", ".join(
                f"{100 * agent['all']['low']:.1f} - {100 * agent['all']['high']:.1f}"
                for agent in rates
            )
            minutes = f"{sum(result['seconds'].values()) / 60:.1f}"
            if demo == "demo" and path.stem.removeprefix("demo-").isdecimal():
                assert is_told(README, f"| {' | '.join([*greedy, ends, minutes])} |"), path.name
            if path.stem.endswith("float32"):
                assert is_told(README, "In float32", greedy[1].removesuffix(" %")), path.name
            assert_told(
                str(result["seed"]),
                *greedy,
                f"{comparison['gain_points']:+.1f}",
                f"{comparison['only_after']} / {comparison['only_before']}",
                f"{comparison['p_value']:.0e}",
                *sampled,
                f"{sum(result['seconds'].values()):.0f} s",
            )


def test_what_deep_trees_take_is_the_recorded_one():
    for way, name in (("whole", "whole"), ("split", "split"), ("depth_first", "depth first")):
        row = {key.removeprefix(f"{way}_"): value for key, value in figures("deep_trees").items()}
        assert_told(
            f"| {name}", f"{row['tokens']:,.0f}", f"{row['s']:.1f}", f"{row['peak_mib']:,.0f}"
        )


def test_what_waiting_awake_costs_beside_other_programs_is_recorded():
    seconds = figures("shared_cores")
    for name, told in (
        ("alone", "| alone"),
        ("beside_a_loop", "| beside a loop"),
        ("twice", "| two such"),
    ):
        assert_told(
            told,
            *(
                f"{seconds[f'{way}_{name}_{turn}_s']:.1f}"
                for way in ("awake", "asleep")
                for turn in ("fastest", "slowest")
            ),
        )


def test_what_the_allocator_costs_is_recorded():
    row = figures("allocator")
    assert_told(
        f"bfloat16; {3 * row['passes']:.0f} of them each way", f"--passes {row['passes']:.0f} "
    )
    for way, name in (
        ("exact", "rows as long"),
        ("padded", "rows of few"),
        ("pages", "the same, with"),
        ("preload", "the same, jemalloc"),
    ):
        speeds = (f"{row[f'{way}_{third}_tokens_per_s']:.0f}" for third in ("first", "last"))
        assert_told(
            f"| {name}",
            *speeds,
            f"{100 * row[f'{way}_kernel_share']:.0f} %",
            f"{row[f'{way}_peak_mib'] / 1024:.1f}",
        )


def test_what_other_learners_made_of_the_same_episodes_is_recorded():
    rows = {
        "dpo": "DPO",
        "rft": "RFT: a new policy",
        "eto": "ETO: a golden",
        "dmpo": "DMPO",
        "kto": "KTO",
        "grpo": "GRPO, 24 steps",
    }
    for learner, name in rows.items():
        told = []
        for path in sorted((ROOT / "benchmarks" / "results").glob(f"smollm2_{learner}-[12].json")):
            seed, agents = path.stem[-1], recorded(path.stem)["agents"]
            before, after = (agents[agent]["all"]["success"] for agent in agents)
            assert before == recorded(f"demo-{seed}")["agents"]["sft"]["all"]["success"]
            told.append(f"{100 * after:.1f} %")
        assert told
        assert_told(f"| {name}", *told)


def test_policy_gradients_improve_the_demos_agent_with_three_seeds():
    for seed in (1, 2, 3):
        result = recorded(f"smollm2_grpo-{seed}")
        before, after = success(result, "sft", "grpo")
        p_value = result["comparison"]["p_value"]
        assert before == success(recorded(f"demo-{seed}"), "sft")[0] and p_value < 0.01
        assert_told(before.removesuffix(" %"), after, f"seed {seed}", f"p = {p_value:.0e}")


def test_a_second_round_of_policy_gradients_is_told_beside_dpos():
    result, dpo = recorded("smollm2_grpo-rounds-3"), recorded("demo-3-float32")
    before, after = success(result, "sft", "grpo")
    assert [before] == success(dpo, "sft") and result["validation"][0] == dpo["validation"][0]
    found = result["comparison"]
    curve = [f"{100 * share:.1f}" for share in result["validation"]]
    assert_told(
        before.removesuffix(" %"),
        after,
        f"{found['only_after']} won, {found['only_before']} lost",
        f"p = {found['p_value']:.0e}",
        f"{curve[0]}, {curve[1]} and {curve[2]} %",
        *success(dpo, "dpo"),
    )


def rate_and_interval(name, agent):
    rate = recorded(name)["agents"][agent]["all"]
    return rate[
        "n"
    ], f"{100 * rate['success']:.1f} % ({100 * rate['low']:.1f} - {100 * rate['high']:.1f})"


def test_what_is_told_of_new_pages_is_what_was_counted():
    """README and docs/miniwob.md: pages that differ, and success where training had no such page."""
    demo = recorded("demo-1-again")["agents"]
    before, after = (demo[agent]["new"] for agent in ("sft", "dpo"))
    assert is_told(
        README,
        f"{300 - before['n']} show a page that training had",
        f"the {before['n']} others",
        f"{100 * before['success']:.1f} to {100 * after['success']:.1f} %",
    )
    found = json.loads((ROOT / "benchmarks/results/miniwob_pages.json").read_text())["figures"]
    sft, fourth = (found[f"webgum56_new_{agent}"] for agent in ("sft", "fourth"))
    assert is_told(
        PAGES["miniwob.md"],
        f"of the {found['webgum56_n']:,} of `webgum-56`",
        f"On the {found['webgum56_new_n']:,} others",
        f"{sft:.1f} %",
        f"{fourth:.1f} %",
    )
    gain = figures("miniwob")["webgum56_fourth_to_sft_gain_points"]
    assert fourth - sft > gain and is_told(
        README, "on pages that training had not, the gain is as large"
    )


def test_what_more_sft_gives_in_place_of_verdicts_is_told_beside_the_result():
    (n, one), (_, other), (_, many) = (
        rate_and_interval(name, "sft60")
        for name in ("sft60-demo-1", "sft60-demo-2", "sft60-smollm2-2")
    )
    assert n == recorded("demo-1")["agents"]["dpo"]["all"]["n"] == 300
    assert_told("SFT of 60 steps on the same six", one, other)
    assert_told("SFT of 60 steps on the 30", many)
    assert is_told(README, "60 steps of SFT", *(rate.split(" (")[0] for rate in (one, other, many)))
    (n, before), (_, after) = (
        rate_and_interval("smollm2_unseen-2", agent) for agent in ("sft", "dpo")
    )
    assert n == 200 and is_told(PAGES["guide.md"], "never trained on", before, after)
    assert is_told(README, "never trained on", before.split(" % (")[0], after.split(" (")[0])
    (n, before), (_, after) = (
        rate_and_interval("full_sft-smollm2-1", agent)
        for agent in recorded("full_sft-smollm2-1")["agents"]
    )
    assert n == 144 and is_told(PAGES["guide.md"], before, after)


def test_the_rates_in_the_guide_are_those_of_the_files():
    table = re.findall(
        r"^\| .*?\(`(?:configs/)?([\w/*.-]+\.toml)`\) \| (.*?) \| (.*?) \| (.*?) \| (.*?) \|",
        PAGES["guide.md"],
        re.MULTILINE,
    )
    assert len(table) == 5
    for pattern, *cells in table:
        for path in (files := sorted((ROOT / "configs").glob(pattern))):
            config = parse(LoopCommand, ["--config", str(path)], "x", "")
            beta = pair_loss_of(config.dpo).parameters.beta
            assert [*map(float, cells)] == [config.sft.lr, config.dpo.lr, beta, config.dpo.nll], (
                path.name
            )
        assert files, pattern


def test_every_mistake_of_the_mutants_is_one_that_could_still_be_made():
    """Each text to be replaced is in its file, and the file with the mistake in it is still Python."""
    assert not missing(), "update tests/mutants.py:\n" + "\n".join(missing())
    for name, mistakes in MISTAKES.items():
        for changes in mistakes:
            compile(mutated(name, changes), name, "exec")
    assert sum(map(len, MISTAKES.values())) == 393
