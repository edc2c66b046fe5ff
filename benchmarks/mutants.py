"""What `make mutants` found: mutmut's notes under mutants/, as benchmarks/results/mutants.json.

    python benchmarks/mutants.py

A survivor is a change that no test notices. Each has a reason why it may live, written by hand into that file;
this script keeps the reasons, and leaves "" where one is missing.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from records import RESULTS, record

ROOT = Path(__file__).parents[1]
NOTES = ROOT / "mutants"
STATES = {
    None: "not_tried",
    0: "survived",
    5: "no_test",
    33: "no_test",
}  # by exit code; else killed


def change(name: str) -> str:
    """The lines that a mutant replaces and puts in their place."""
    words = [sys.executable, "-m", "mutmut", "show", name]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = [
        line for line in said.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]
    return "\n".join(f"{line[:1]} {line[1:].strip()}" for line in lines)


def main() -> None:
    out = RESULTS / "mutants.json"
    known = {
        (survivor["function"], survivor["change"]): survivor["reason"]
        for survivor in (json.loads(out.read_text()).get("survivors", []) if out.exists() else [])
    }
    figures: Counter[str] = Counter()
    survivors = []
    for notes in sorted(NOTES.rglob("*.py.meta")):
        module = notes.name.removesuffix(".py.meta")
        for name, code in json.loads(notes.read_text())["exit_code_by_key"].items():
            state = STATES.get(code, "killed")
            figures[f"{module}_mutants"] += 1
            figures[f"{module}_{state}"] += 1
            if state in ("survived", "no_test"):
                function = name.partition("__mutmut_")[0]
                it = {"function": function, "change": change(name)}
                survivors.append({**it, "reason": known.get((function, it["change"]), "")})
    tried = sum(
        n for name, n in figures.items() if name.endswith(("_killed", "_survived", "_no_test"))
    )
    killed = sum(n for name, n in figures.items() if name.endswith("_killed"))
    print(f"{killed} of {tried} killed")
    for survivor in survivors:
        if not survivor["reason"]:
            print(f"\n{survivor['function']}\n{survivor['change']}")
    record(out, figures, {"mutmut": "3.8.1"}, survivors=survivors)


if __name__ == "__main__":
    main()
