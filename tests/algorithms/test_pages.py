"""Every page runs from its first demonstration to an adapter, and the same command finds all of it done."""

from dataclasses import fields, replace

import pytest
import shelf

from minidpo.algorithms import ALGORITHMS
from minidpo.experiment import is_note
from minidpo.learning.trainer import Optimizer
from minidpo.memory import lora
from minidpo.runner import run_algorithm

SMALL = {
    "demonstrations": 2,
    "rounds": 1,
    "instances": 4,
    "group": 4,
    "continuations": 1,
    "retries": 4,
    "losers": "all",
    "contrast": "mixture",
}
LEARNER = {"steps": 2, "batch": 3, "lr": 1e-3, "warmup": 0.0}
TRAINED = {"averaged-eto": 4, "rlhf": 3, "r3": 3}  # of the others two


def small(name):
    """The page's options, as few of everything as still has both verdicts."""
    options = ALGORITHMS[name].options()
    values = {f.name: getattr(options, f.name) for f in fields(options)}
    learners = {n: replace(v, **LEARNER) for n, v in values.items() if isinstance(v, Optimizer)}
    return replace(options, **{n: SMALL[n] for n in values if n in SMALL}, **learners)


def notes(out):
    """When each stage's note was written."""
    return {path: path.stat().st_mtime_ns for path in out.rglob("*.json") if is_note(path)}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_page_leaves_an_adapter_and_is_not_run_twice(name, shelf_base, tmp_path):
    page, setup = ALGORITHMS[name], shelf.options(shelf_base, tmp_path)
    result = run_algorithm(name, page.run, small(name), setup)
    made = notes(tmp_path)
    trainings = [path for path in made if (path.with_suffix("") / "adapter").is_dir()]
    assert len(trainings) == TRAINED.get(name, 2) and len(result["validation"]) > 1
    weights = {(path.with_suffix("") / "adapter" / lora.WEIGHTS).read_bytes() for path in trainings}
    assert len(weights) == len(trainings)
    assert (tmp_path / "adapter" / lora.CONFIG).is_file()
    again = run_algorithm(name, page.run, small(name), setup)
    assert notes(tmp_path) == made and again["figures"] == result["figures"]
