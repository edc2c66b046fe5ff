"""27. The report: one HTML file that says what a run found and lets a reader check it.

All is inside the file: figures, curves, episodes with their pictures, tokens, style, script. It asks the
network for nothing, so it can be mailed, archived and opened in ten years, and however large the run, it is
no larger than LIMIT. The page is `report.html` beside this module, with the scripts `report*.js`; here its
holes are filled. What web pages wrote reaches the reader as text only: the data stand in a JSON block that
no markup can end, and the scripts make text nodes of them, never HTML. Next: 28 options.
"""

import json
import math
from pathlib import Path

from minidpo.system.files import write_text

FOLDER = Path(__file__).parent
SCRIPTS = ("report.js", "report_curves.js", "report_episodes.js", "report_tokens.js")
LIMIT = 20_000_000  # bytes of the whole file
ROWS = 20_000  # of all curves together, 5 MB or so; a chart is 268 pixels wide


def _finite(value):
    """The same data with nan and infinities as None: JSON knows neither, and a curve shows None as a gap.

    >>> _finite({"loss": [0.5, float("nan")]})
    {'loss': [0.5, None]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value


def _json(data: object) -> str:
    # "<" stands in JSON strings only: its escape is the same data, and no "</script" or "<!--" can arise
    return json.dumps(_finite(data), allow_nan=False).replace("<", "\\u003c")


def _thinned(rows: list[dict], most: int) -> list[dict]:
    """Every k-th row and the last, `most` or one more.

    >>> [row["step"] for row in _thinned([{"step": k} for k in range(1, 8)], most=3)]
    [1, 4, 7]
    """
    every = math.ceil(len(rows) / most) or 1
    return rows[::every] + (rows[-1:] if (len(rows) - 1) % every else [])


def render(data: dict, limit: int = LIMIT) -> str:
    """The report as HTML, at most `limit` bytes: pairs and instances are left out from the end to fit.

    The keys of `data`:
    - `title`
    - `results`: {policy: {"all": row, "tasks": {task: row}}}, the baseline first, the same tasks each;
      "sampled", a row at temperature 1, may stand beside them; a row is `success`, `low`, `high` (fractions;
      the Wilson interval), `n`, `mean_steps`, `valid_action_rate`
    - `gain_points`, `p_value`: last policy against the one before it; None if there is only one;
      `comparisons`, of three or more: each against the one before it, as `results.comparisons` gives them
    - `curves`: {stage: rows of its metrics.jsonl}, each with its `step`; `x_chosen` and `x_rejected` share
      a chart, and so do stages "round-K/name"
    - `instances`: those to step through, as `replay.photograph` gives them; `played`: of how many
    - `pairs`: `task`, `seed`, `source`, `until` (where training cut them), and `chosen` and `rejected`, with
      `outcome` and `tokens`: rows of text, turn of the agent (-1: not its own), log-prob under one policy
      and under another: `agents`, without it the first and the last
    - `settings`: flat dict, of which `loss` names the agent `dpo`, and `best_of`, above 1, says that an
      oracle chose; `seconds`: {stage: seconds}

    >>> "</script><b>" in render({"title": "</script><b>"})
    False
    """
    page = (FOLDER / "report.html").read_text(encoding="utf-8").replace("__REPORT_SCRIPTS__", "\n".join(
        (FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS))
    curves = data.get("curves", {})
    most = max(2, ROWS // max(1, len(curves)))
    data = data | {"curves": {stage: _thinned(rows, most) for stage, rows in curves.items()}}
    wanted = {key: data.get(key, ()) for key in ("pairs", "instances")}
    data |= {key: [] for key in wanted} | {"policies": list(data.get("results", ()))}  # an object's keys move
    room = limit - len(page.encode()) - len(_json(data))
    for key, things in wanted.items():
        for thing in things:
            room -= len(_json(thing)) + 2  # JSON is ASCII: a character is a byte
            if room < 0:
                break
            data[key].append(thing)
    return page.replace("__REPORT_DATA__", _json(data))


def write_report(path: str | Path, data: dict) -> None:
    """Write `render(data)` to `path`, whole or not at all."""
    write_text(path, render(data))
