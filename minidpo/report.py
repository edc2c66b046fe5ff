"""27. The report: one HTML file that says what a run found and lets a reader check it.

All is inside the file: figures, curves, screenshots, style, script. It asks the network for nothing, so it
can be mailed, archived and opened in ten years. The page is `report.html` beside this module; here its one
hole is filled with the data. What web pages wrote reaches the reader as text only: the data stand in a JSON
block that no markup can end, and the script makes text nodes of them, never HTML. Next: 28 options.
"""

import json
import math
from pathlib import Path

from minidpo.files import write_text

TEMPLATE = Path(__file__).with_name("report.html")
HOLE = "__REPORT_DATA__"


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


def render(data: dict) -> str:
    """The report as HTML; the keys of `data`:

    - `title`
    - `results`: {policy: {"all": row, "tasks": {task: row}}}, the baseline first, the same tasks each;
      "sampled", a row at temperature 1, may stand beside them; a row is `success`, `low`, `high` (fractions;
      the Wilson interval), `n`, `mean_steps`, `valid_action_rate`
    - `gain_points`, `p_value`: last policy against the first; None if there is only one
    - `curves`: {stage: rows of its metrics.jsonl}, each with its `step`; `x_chosen` and `x_rejected` share
      a chart
    - `episodes`: {policy: episode} of one instance, or None; an episode is `task`, `seed`, `instruction`,
      `outcome`, `reward`, `turns` (`observation`, `answer`, `thought`, `action`, `error`, `screenshot`) and
      `final_screenshot`; screenshots are PNG in base64, or None
    - `settings`: flat dict; `seconds`: {stage: seconds}

    >>> "</script><b>" in render({"title": "</script><b>"})
    False
    """
    # "<" stands in JSON strings only: its escape is the same data, and no "</script" or "<!--" can arise
    payload = json.dumps(_finite(data), allow_nan=False).replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace(HOLE, payload)


def write_report(path: str | Path, data: dict) -> None:
    """Write `render(data)` to `path`, whole or not at all."""
    write_text(path, render(data))
