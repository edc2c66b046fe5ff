"""How a benchmark's result is written: flat figures, and what they were measured with."""

import sys
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from minidpo.results.success import machine_name  # noqa: E402
from minidpo.system.files import write_json  # noqa: E402

RESULTS = Path(__file__).parent / "results"


def record(out: Path, figures: dict[str, float], versions: dict[str, str], device: str | None = None,
           **more) -> None:
    """Write the figures, to nine digits, with machine (`device`: its GPU), versions, date and command."""
    result = {"figures": {name: float(f"{value:.9g}") for name, value in sorted(figures.items())},
              "machine": machine_name(device),
              "versions": versions, "date": date.today().isoformat(), **more,
              "command": " ".join(["python", *sys.argv])}
    write_json(out, result)
