"""The report: one HTML file that shows what a run found and lets a reader check it.

The file contains everything it needs, so it can be mailed and archived, and is at most LIMIT bytes long. The
page is `report.html` beside this module, its scripts are `report*.js`; this module inserts the data. Text from
web pages is only ever shown as text: the data are in a JSON block that no markup can end, and the scripts turn
strings into text nodes, never into HTML.
"""

import json
import math
from pathlib import Path

FOLDER = Path(__file__).parent
SCRIPTS = ("report.js", "report_curves.js", "report_episodes.js", "report_tokens.js")
LIMIT = 20_000_000  # bytes of the whole file
ROWS = 20_000  # of all curves together, about 5 MB; a chart is 268 pixels wide


def render(data: dict, limit: int = LIMIT) -> str:
    """The report as HTML of at most `limit` bytes; the last pairs and instances are left out if necessary.

    The keys of `data`:
    - `title`; `headline`, an optional sentence before the numbers; `about`, a sentence or two: what was
      trained, by which code, when and where
    - `results`: {agent: {"all": row, "tasks": {task: row}}}, the baseline first, the same tasks for each. A
      row has `success`, `low`, `high` (fractions; Wilson's interval), `n`, `mean_reward` (missing in old
      results), `mean_steps`, `valid_action_rate`. `new` and `sampled`, a row each, are optional
    - `gain_points`, `p_value`: the last agent compared with the one before it; None if there is only one
    - `comparisons`: each of three or more agents with the one before it, from `success.comparisons`
    - `curves`: {stage: rows of its metrics.jsonl}, each with its `step`; `x_chosen` and `x_rejected` share
      a chart, and so do the rounds of a stage: "dpo", "dpo-2". A step of "stages" is a stage of an experiment
    - `instances`: the ones to step through, from `replay.shown_instance`; `played`: how many were played
    - `pairs`: each has `task`, `seed`, `source`, `until` (where training cut it), `agents` (two names)
      and `chosen` and `rejected` with `outcome` and `tokens`: rows of text, the agent's turn (-1: not written
      by the agent), and log-prob under the two agents
    - `settings`: a flat dict. If `best_of` is above 1, an oracle chose the episodes, or the reward model `judge`
    - `seconds`: {stage: seconds}

    >>> "</script><b>" in render({"title": "</script><b>"})
    False
    """
    page = (FOLDER / "report.html").read_text(encoding="utf-8")
    scripts = "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS)
    page = page.replace("__REPORT_SCRIPTS__", scripts)
    curves = data.get("curves", {})
    rows_each = max(2, ROWS // max(1, len(curves)))
    data = data | {"curves": {stage: _thinned(rows, rows_each) for stage, rows in curves.items()}}
    optional = {key: data.get(key, ()) for key in ("pairs", "instances")}
    # `policies` keeps the agents' order, which JavaScript may lose when it reads a JSON object
    data |= {key: [] for key in optional} | {"policies": list(data.get("results", ()))}
    room = limit - len(page.encode()) - len(_json(data))
    for key, entries in optional.items():
        for entry in entries:
            size = len(_json(entry)) + 2  # the JSON is ASCII: a character is a byte
            if size > room:
                break
            room -= size
            data[key].append(entry)
    return page.replace("__REPORT_DATA__", _json(data))


def _thinned(rows: list[dict], most: int) -> list[dict]:
    """Every k-th row and the last one: `most` rows, or one more.

    >>> [row["step"] for row in _thinned([{"step": k} for k in range(1, 8)], most=3)]
    [1, 4, 7]
    """
    every = math.ceil(len(rows) / most) or 1
    return rows[::every] + (rows[-1:] if (len(rows) - 1) % every else [])


def _json(data: object) -> str:
    """JSON for a script block. nan and infinities become null, which a curve shows as a gap.

    >>> _json({"loss": [0.5, float("nan")]})
    '{"loss": [0.5, null]}'
    """
    finite = json.loads(json.dumps(data), parse_constant=lambda name: None)
    # "<" occurs only inside JSON strings; its escape means the same, and prevents "</script" and "<!--"
    return json.dumps(finite).replace("<", "\\u003c")
