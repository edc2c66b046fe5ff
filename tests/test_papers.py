"""configs/: each file runs with its first line; those of papers have the papers' numbers, with sources beside them."""

import re
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.rates import recorded, studied, success
from minidpo.algorithms import ALGORITHMS
from minidpo.algorithms.agentevol import AgentEvol
from minidpo.algorithms.dmpo import DMPO
from minidpo.algorithms.ef_dpo import EFDPO
from minidpo.algorithms.eto import ETO
from minidpo.commands.algorithms import learners_of, parse_page
from minidpo.system.files import read_json

ROOT = Path(__file__).parents[1]
PAPERS = ROOT / "configs" / "papers"
CONFIGS = sorted(path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.toml"))
# What the sources say that the files name. A value that is not here is "ours" in the file.
SAID = {
    "ef-dpo": {
        "model": "Qwen/Qwen2-7B-Instruct",
        "tasks": "report",
        "demonstrations": 3,
        "rounds": 1,
        "machine": {"dtype": "bfloat16"},
        "sft": {"steps": 100, "lr": 2e-4, "batch": 4},
        "dpo": {"steps": 50, "lr": 5e-6, "batch": 4, "beta": 0.1, "nll": 0.0, "until": "end"},
    },
    "eto": {
        "rounds": 3,
        "patience": 3,
        "group": 1,
        "shots": 1,
        "sampling": {"temperature": 0.0, "max_new_tokens": 512},
        "machine": {"dtype": "bfloat16"},
        "sft": {"epochs": 3, "batch": 64, "lr": 2e-5, "warmup": 0.03, "weight_decay": 0.0},
        "dpo": {"epochs": 3, "batch": 32, "lr": 1e-6, "warmup": 0.1, "weight_decay": 0.0}
        | {"beta": 0.1, "constant": True, "until": "end"},
    },
    "agentevol": {
        "rounds": 5,
        "patience": 5,
        "threshold": 0.5,
        "share": 0.3,
        "sampling": {"temperature": 0.8},
        "sft": {"epochs": 1, "batch": 32, "lr": 1e-5, "warmup": 0.1}
        | {"weight_decay": 0.0, "clip": 1.0},
    },
}
ETO_SAID = SAID["eto"]
SAID["agentevol"]["imitation"] = SAID["agentevol"]["sft"]
SAID["dmpo"] = {
    "rounds": 1,
    "group": 1,
    "shots": 1,
    "losers": "noisy",
    "machine": {"dtype": "bfloat16"},
    "sft": ETO_SAID["sft"],
    "dpo": ETO_SAID["dpo"] | {"loss": "dmpo", "gamma": 0.7},
}
SAID["eto-stepwise"] = ETO_SAID | {
    "contrast": "steps",
    "dpo": {k: v for k, v in ETO_SAID["dpo"].items() if k != "until"} | {"lr": 1e-7, "beta": 0.3},
}
del SAID["eto-stepwise"]["group"]  # ours there: as many as an expert's steps
papers = pytest.mark.parametrize("paper", SAID)


def text_of(paper):
    return (PAPERS / f"{paper}.toml").read_text()


def parsed(path):
    """The page's options and the experiment's by the command in the file's first line."""
    words = (ROOT / path).read_text().split("\n")[0].split()
    assert words[:3] == ["#", "python", "train.py"] and words[4:] == ["--config", str(path)]
    given = ["--config", str(ROOT / path)]
    return parse_page(ALGORITHMS[words[3]], given, f"train.py {words[3]}")


@pytest.mark.parametrize("path", CONFIGS, ids=str)
def test_a_file_runs_with_its_first_line(path):
    options, setup = parsed(path)
    assert setup.out.parts[0] == "runs"
    assert learners_of(options)


@papers
def test_every_value_is_that_of_its_source_or_is_said_to_be_ours(paper):
    said = {}
    table = said
    for line in text_of(paper).splitlines():
        if match := re.match(r"\[(\w+)\]", line):
            table = said.setdefault(match[1], {})
        elif match := re.match(r"(\w+) = ([^#]+?) +# (.*)", line):
            if not match[3].startswith("ours"):
                table[match[1]] = tomllib.loads(f"x = {match[2]}")["x"]
        elif re.match(r"(?!out|#).* = ", line):
            pytest.fail(f"no source beside {line}")
    assert {name: value for name, value in said.items() if value != {}} == SAID[paper]


@pytest.mark.parametrize(
    "paper, page", [("eto", ETO), ("dmpo", DMPO), ("agentevol", AgentEvol), ("ef-dpo", EFDPO)]
)
def test_what_a_papers_page_has_by_default_are_the_papers_numbers(paper, page):
    """Of ETO and DMPO all numbers; of AgentEvol the brief's rounds, threshold and share are not the script's."""
    options, defaults = asdict(parsed(f"configs/papers/{paper}.toml")[0]), asdict(page())
    if paper in ("eto", "dmpo"):
        assert options == defaults
    if paper == "agentevol":
        assert options["imitation"]["lr"] == defaults["imitation"]["lr"]
    if paper == "ef-dpo":
        assert options["dpo"]["steps"] == defaults["dpo"]["steps"]
        assert options["dpo"]["beta"] == defaults["dpo"]["beta"]


@pytest.mark.parametrize("paper", ["eto", "dmpo", "agentevol"])
def test_what_a_second_file_says_of_the_paper_is_what_the_first_one_has(paper):
    first, table, compared = tomllib.loads(text_of(paper)), "", []
    for line in text_of(f"{paper}-smollm2").splitlines():
        table = match[1] if (match := re.match(r"\[(\w+)\]", line)) else table
        if match := re.match(r"(\w+) = \S+ +# the paper's(?: code)?: ([-\de.]+)( epochs)?$", line):
            name, number, epochs = match.groups()
            compared.append(name)
            wanted = (first[table] if table else first)["epochs" if epochs else name]
            assert float(number) == wanted, line
    assert len(compared) >= 6


@pytest.mark.parametrize("paper", ["eto", "dmpo"])
def test_a_second_file_quotes_what_the_recorded_run_found(paper):
    found = read_json(ROOT / f"benchmarks/results/smollm2_{paper}-1.json")["figures"]
    before, after = (100 * found[f"{agent}_success"] for agent in ("sft", "dpo"))
    assert f"{before:.1f} -> {after:.1f} %" in text_of(f"{paper}-smollm2")


def test_agentevols_second_file_quotes_what_the_study_of_learners_found():
    study = studied([line for line in recorded("learners") if line["seed"] == 1])
    sft, evolve, dpo, nothing = (
        100 * success(study, row, "greedy").mean for row in ("sft", "evolve", "dpo", "agentevol")
    )
    text = " ".join(text_of("agentevol-smollm2").replace("# ", "").split())
    assert f"{sft:.1f} -> {evolve:.1f} % on 180 held-out instances with seed 1" in text
    assert f"where DPO has {dpo:.1f} from the same episodes" in text
    assert nothing == 0 and "the agent solves nothing (row `agentevol`" in text
