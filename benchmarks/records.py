"""How a benchmark's result is written: flat figures, and what they were measured with; verdicts by task."""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from minidpo.data.episodes import Episode
from minidpo.results.circumstances import machine_name
from minidpo.system.files import write_json

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def run_ours(words: str) -> None:
    """Run a script of this project, as it is typed at its root."""
    subprocess.run([sys.executable, *shlex.split(words)], cwd=ROOT, check=True)


def command() -> str:
    """That of this process."""
    return " ".join(["python", *sys.argv])


def record(
    out: Path,
    figures: dict[str, float | str],
    versions: dict[str, str],
    device: str | None = None,
    **more,
) -> None:
    """Write the figures, numbers to nine digits, with machine (`device`: its GPU), versions, date and command."""
    result = {
        "figures": {
            name: value if isinstance(value, (int, str)) else float(f"{value:.9g}")
            for name, value in sorted(figures.items())
        },
        "machine": machine_name(device),
        "versions": versions,
        "date": date.today().isoformat(),
        **more,
        "command": command(),
    }
    write_json(out, result)


def verdicts(episodes: Sequence[Episode], counts: dict[str, int]) -> dict[str, str]:
    """For each task a string of 0 and 1, in the order of its instances, of which there are so many."""
    solved = dict.fromkeys(counts, "")
    for episode in episodes:
        solved[episode.task] += str(int(episode.solved))
    if short := [task for task, text in solved.items() if len(text) != counts[task]]:
        raise ValueError(f"the browser gave up an episode of {short[0]}: run it again")
    return solved
