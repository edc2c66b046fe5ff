"""A row of the study's tables, and the verdict of a comparison in words.

Of two agents one is better or worse if the exact McNemar p of the instances that both played is below 0.01
and the seeds' interval leaves out 0. Rounds have only means: there the 95 % interval of the difference over
seeds must leave out 0.
"""

import textwrap

from benchmarks.study.grid import BASE
from benchmarks.study.rates import (
    Comparison,
    Spread,
    Study,
    compared,
    config_of,
    cut,
    cut_elsewhere,
    needs,
    sft_of,
    solved,
    spread,
    success,
)

WHERE = {"demo": "the demo suite", "unseen": "tasks never trained on"}
HEAD = [
    "row",
    "seeds",
    "golden",
    "explored",
    "demo, %",
    "report, %",
    "unseen, %",
    "steps",
    "valid, %",
    "against SFT",
    "against `dpo`",
    "unseen, against SFT",
]
CUT = {
    "token": "behind the first token that differs, the rejected alone",
    "turn": "behind the first turn that differs, both sides",
    "end": "nowhere",
}


def several(n: int, what: str) -> str:
    return f"{n:,} {what}{'s' * (n != 1)}"


def quoted(arms) -> str:
    return ", ".join(f"`{arm}`" for arm in arms)


def paragraph(text: str) -> str:
    """Text filled to lines of at most 120 characters; `p = 0.5` is never broken."""
    whole = " ".join(text.split()).replace(" = ", "\0=\0")
    filled = textwrap.fill(
        whole,
        120,
        break_long_words=False,
        break_on_hyphens=False,
        subsequent_indent="  " * text.startswith("- "),
    )
    return filled.replace("\0", " ")


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def of_seeds(study: Study, arm: str) -> str:
    """Which seeds a row was run with, as "1 - 3" or "1, 4, 5"."""
    seeds = sorted(study[arm])
    in_a_row = len(seeds) > 2 and seeds == list(range(seeds[0], seeds[-1] + 1))
    return f"{seeds[0]} - {seeds[-1]}" if in_a_row else ", ".join(map(str, seeds))


def rate(found: Spread | None) -> str:
    if found is None:
        return "-"
    return f"{100 * found.mean:.1f}" + (
        "" if found.low is None else f" ({100 * found.low:.1f} - {100 * found.high:.1f})"
    )


def gain(found: Comparison | None) -> str:
    return "-" if found is None else f"{found.points:+.1f}, p = {found.p:.2g}"


def in_full(found: Comparison) -> str:
    up = f"up {sum(points > 0 for points in found.gains)}/{len(found.gains)}"
    said = f"{gain(found)}, n = {found.n:,}, {up}"
    if len(found.gains) < 2:
        return said
    seeds = spread([*found.gains])
    return f"{said}, seeds {seeds.low:+.1f} to {seeds.high:+.1f}"


def over_seeds(found: Spread) -> str:
    said = f"{100 * found.mean:+.1f} points on {several(found.seeds, 'seed')}"
    if found.low is None:
        return said
    return f"{said}, 95 % interval {100 * found.low:+.1f} to {100 * found.high:+.1f}"


def cells(study: Study, arm: str) -> list[str]:
    """The cells of a row, under HEAD."""
    name = f"`{arm}`" + " (oracle)" * arm.endswith("-best")
    if arm not in study:
        return [name, "not run", *["-"] * (len(HEAD) - 2)]
    played = [line["demo"] for line in study[arm].values()]
    turns, usable = (sum(demo[key] for demo in played) for key in ("turns", "usable"))
    episodes = sum(len(verdicts) for demo in played for verdicts in demo["solved"].values())
    return [
        name,
        str(len(played)),
        *map(str, needs(study, arm) or ("-", "-")),
        *(rate(success(study, arm, suite)) for suite in ("demo", "report", "unseen")),
        f"{turns / episodes:.2f}",
        f"{100 * usable / max(1, turns):.1f}",
        gain(compared(study, sft_of(arm), arm)),
        gain(None if arm == BASE else compared(study, BASE, arm)),
        gain(compared(study, sft_of(arm), arm, "unseen")),
    ]


def verdicts(
    study: Study, before: str, arms, suite: str, where: dict[str, str] = WHERE
) -> list[str]:
    """One sentence for each verdict of the comparisons with `before`; `where`: the suites in words."""
    if before not in study:
        return [f"- `{before}` was not run, so nothing is compared with it on {where[suite]}."]
    begin = {
        "better": f"Better than `{before}` on {where[suite]}",
        "worse": f"Worse than `{before}` on {where[suite]}",
        "0 in the interval": (
            f"p < 0.01 against `{before}` on {where[suite]}, but 0 lies in the seeds' interval"
        ),
        "no difference": f"No difference from `{before}` is shown on {where[suite]}",
    }
    found = {arm: compared(study, before, arm, suite) for arm in arms}
    said = [
        (text, [f"`{arm}` ({in_full(c)})" for arm, c in found.items() if c and c.word() == word])
        for word, text in begin.items()
    ]
    said.append(
        (
            f"Not compared with `{before}` on {where[suite]}, for want of a seed that both have",
            [f"`{arm}`" for arm, c in found.items() if c is None],
        )
    )
    return [f"- {text}: {', '.join(named)}." for text, named in said if named]


def other_cut(study: Study, before: str, arms) -> list[str]:
    """A sentence for the rows whose pairs are cut elsewhere than those of `before`."""
    return [
        f"- Pairs of {quoted(others)} are cut {CUT[where]}, those of `{before}` "
        f"{CUT[cut(study, before)]}: so they differ in that, too."
        for where, others in cut_elsewhere(study, before, arms).items()
    ]


def other_rate(study: Study, before: str, arms) -> list[str]:
    """A sentence for each row whose SFT had another learning rate than that of `before`."""
    rates = {
        arm: config["sft"]["lr"] for arm in (before, *arms) if (config := config_of(study, arm))
    }
    return [
        f"- SFT has a learning rate of {rates[arm]:g} in `{arm}` and `{sft_of(arm)}`, of "
        f"{rates[before]:g} in `{before}` and `{sft_of(before)}`: so they differ in that, too."
        for arm in arms
        if before in rates and rates.get(arm, rates[before]) != rates[before]
    ]


def made_anew(study: Study, line: dict) -> list[str]:
    """A sentence for each kind of task: the new line of a row beside its recorded one."""
    arm, seed = line["arm"], line["seed"]
    both, said = {"again": {seed: line}}, []
    if recorded := study.get(arm, {}).get(seed):
        both["recorded"] = {seed: recorded}
    for suite in WHERE:
        if not solved(line, suite):
            continue
        text = (
            f"{arm}, seed {seed}, {WHERE[suite]}: {rate(success(both, 'again', suite))} % again, "
        )
        found, row = compared(both, "recorded", "again", suite), success(study, arm, suite)
        if found:
            text += (
                f"{rate(success(both, 'recorded', suite))} % recorded; of {found.n} instances "
                f"{found.won} won and {found.lost} lost, p = {found.p:.2g}"
            )
        else:
            text += "nothing recorded with this seed"
        if row and row.low is not None:
            inside = row.low <= success(both, "again", suite).mean <= row.high
            text += (
                f"; {'inside' if inside else 'outside'} the row's 95 % interval over {row.seeds} seeds, "
                f"{100 * row.low:.1f} - {100 * row.high:.1f}"
            )
        elif row:
            text += "; recorded with one seed, so there is no interval"
        said.append(text)
    return said


def bullets(sentences: list[str]) -> str:
    return "\n".join(map(paragraph, sentences))
