"""A row of the study's tables, and what a comparison comes to in words.

The rule for two agents: better or worse if the exact McNemar p of the instances that both played is below
0.01. Where there are only means of rounds: if the 95 % interval of the difference over seeds leaves out 0.
"""

import textwrap

from study import BASE
from study_numbers import Comparison, Spread, Study, compared, needs, sft_of, success

WHERE = {"demo": "the demo suite", "unseen": "tasks never trained on"}
HEAD = ["row", "seeds", "golden", "explored", "demo, %", "report, %", "unseen, %", "steps", "valid, %",
        "against SFT", "against `dpo`", "unseen, against SFT"]


def several(n: int, what: str) -> str:
    return f"{n:,} {what}{'s' * (n != 1)}"


def quoted(arms) -> str:
    return ", ".join(f"`{arm}`" for arm in arms)


def paragraph(text: str) -> str:
    """Lines of at most 120 characters, in which `p = 0.5` stays together."""
    whole = " ".join(text.split()).replace(" = ", "\0=\0")
    filled = textwrap.fill(whole, 120, break_long_words=False, break_on_hyphens=False,
                           subsequent_indent="  " * text.startswith("- "))
    return filled.replace("\0", " ")


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def rate(found: Spread | None) -> str:
    if found is None:
        return "-"
    return f"{100 * found.mean:.1f}" + (
        "" if found.low is None else f" ({100 * found.low:.1f} - {100 * found.high:.1f})")


def gain(found: Comparison | None) -> str:
    return "-" if found is None else f"{found.points:+.1f}, p = {found.p:.2g}"


def in_full(found: Comparison) -> str:
    return f"{gain(found)}, n = {found.n:,}, up {found.up}/{found.seeds}"


def over_seeds(found: Spread) -> str:
    said = f"{100 * found.mean:+.1f} points on {several(found.seeds, 'seed')}"
    if found.low is None:
        return said
    return f"{said}, 95 % interval {100 * found.low:+.1f} to {100 * found.high:+.1f}"


def cells(study: Study, arm: str) -> list[str]:
    """A row of the tables."""
    name = f"`{arm}`" + " (oracle)" * arm.endswith("-best")
    if arm not in study:
        return [name, "not run", *["-"] * (len(HEAD) - 2)]
    played = [line["demo"] for line in study[arm].values()]
    turns, usable = (sum(demo[key] for demo in played) for key in ("turns", "usable"))
    episodes = sum(len(verdicts) for demo in played for verdicts in demo["solved"].values())
    return [name, str(len(played)), *map(str, needs(study, arm) or ("-", "-")),
            *(rate(success(study, arm, suite)) for suite in ("demo", "report", "unseen")),
            f"{turns / episodes:.2f}", f"{100 * usable / max(1, turns):.1f}",
            gain(compared(study, sft_of(arm), arm)),
            gain(None if arm == BASE else compared(study, BASE, arm)),
            gain(compared(study, sft_of(arm), arm, "unseen"))]


def verdicts(study: Study, before: str, arms, suite: str) -> list[str]:
    """What the comparisons with `before` come to: a sentence for each verdict."""
    if before not in study:
        return [f"- `{before}` was not run, so nothing is compared with it on {WHERE[suite]}."]
    begin = {"better": f"Better than `{before}` on {WHERE[suite]}",
             "worse": f"Worse than `{before}` on {WHERE[suite]}",
             "no difference": f"No difference from `{before}` on {WHERE[suite]} that n instances can show"}
    found = {arm: compared(study, before, arm, suite) for arm in arms}
    said = [(text, [f"`{arm}` ({in_full(c)})" for arm, c in found.items() if c and c.word() == word])
            for word, text in begin.items()]
    said.append((f"Not compared with `{before}` on {WHERE[suite]}, for want of a seed that both have",
                 [f"`{arm}`" for arm, c in found.items() if c is None]))
    return [f"- {text}: {', '.join(named)}." for text, named in said if named]


def bullets(sentences: list[str]) -> str:
    return "\n".join(map(paragraph, sentences))
