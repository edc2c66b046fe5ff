"""Laws of the functions of preference learning, yours or ours: `python -m minidpo.laws --help`.

for_all    a law is a claim about a function; a broken one says the smallest input that shows it
loss       of four log-probs            --loss
head       of a vocabulary's log-probs  --head
advantage  of a group's rewards         --advantage
code       four bits a weight           --code
scores, masks, moment   of the other functions in docs/exercises.md
plugin     the options, for pytest, and test_yours, which they run; ours: what minidpo has to offer
"""

from importlib.util import find_spec
from pathlib import Path


def missing(*also: str) -> str:
    """In a line what must be installed before a law can run; "" if nothing."""
    absent = [name for name in ("torch", "hypothesis", *also) if find_spec(name) is None]
    return f"the laws need {' and '.join(absent)}: pip install {' '.join(absent)}" if absent else ""


def page(name: str) -> Path:
    """A page of docs: an installed minidpo has it in minidpo/docs, a checkout beside minidpo."""
    package = Path(__file__).parents[1]
    return next(
        path for folder in (package, package.parent) if (path := folder / "docs" / name).is_file()
    )
