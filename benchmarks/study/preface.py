"""The text before the tables: the best recipe, what is missing, how the study was made, how to read it."""

import tomllib
from statistics import median

from benchmarks.miniwob import families
from benchmarks.study.grid import ALONE, BASE, BEST_OF, GRID, ROOT
from benchmarks.study.rates import (
    Spread,
    Study,
    compared,
    cut,
    cut_elsewhere,
    recipes,
    sft_of,
    success,
)
from benchmarks.study.rows import CUT, in_full, quoted, rate, several
from envs.miniwob.tasks import resolve

MADE = tomllib.loads((ROOT / "configs" / "nano-base.toml").read_text())  # how the base was made
READING = (
    """Rates are means over the training seeds, in parentheses with a 95 % interval: mean ± t · s / √n of
    the rates of n seeds, with t = 4.303 for three seeds and 12.706 for two, cut at 0 and 100. With one seed
    there is no interval. If all seeds give the same rate, the interval has width 0. It describes how
    training seeds differ on these instances, and says nothing about other instances or tasks.""",
    f"""`golden`: expert episodes a task in the row's own training; the base was made from
    {MADE["careful"] + MADE["clumsy"]} scripted ones of each demo task (`docs/shipped-model.md`).
    `explored`: episodes a task that the row played to learn from, at most. `report`: click-button and
    login-user out of the demo episodes. `steps`: turns an episode; `valid`: share of turns with a
    usable action; both on the demo suite.""",
    f"""`against`: gain in points and exact McNemar p on the instances that both rows played; n counts an
    instance once for every seed. SFT is `sft`; for {quoted(ALONE)} it is their own, `sft-{ALONE[0]}` and so
    on. This p speaks of instances, not of training seeds: each seed meets the same instances, so the n are
    not independent. How far the seeds agree is said beside a verdict: `up 2/3` is a gain in two of three,
    and from two seeds on `seeds` is the 95 % interval of their gains, mean ± t · s / √n: where 0 lies in
    it, another training may well turn the verdict round.""",
    f"""Verdicts: a row is better or worse if p < 0.01 and the seeds' interval excludes 0. With one seed only
    p is used, and the verdict is of that training alone. If p < 0.01 but the interval includes 0, the text
    says so. Otherwise no difference is shown. In sections 2 and 10: better or worse where the 95 % interval
    of the difference over seeds leaves out 0. `sft-best` is an oracle, not an agent: the page's own verdict
    picks the best of {BEST_OF} tries at temperature 1. Rows of several rounds are of the round that
    validation chose.""",
)


def against(share: float, found: Spread) -> str:
    """Whether a mean and its interval lie above or below `share`."""
    side, other = ("at least", "below") if found.mean >= share else ("below", "above")
    said = f"Its mean is {side} {100 * share:.0f} %"
    if found.low is None:
        return f"{said}, of one seed, which has no interval"
    crosses = found.low < share <= found.high
    return (
        f"{said}, but its 95 % interval includes values {other} that"
        if crosses
        else f"{said}, and so is its whole interval"
    )


def best(study: Study) -> str:
    """The best recipe, whether it reaches 90 %, and whether it beats SFT on tasks never trained on."""
    rows = recipes(study)
    if not rows:
        return (
            "No row with at most five golden episodes a task was run, so there is no best recipe."
        )
    arm = max(rows, key=rows.get)
    demo, own = success(study, arm, "demo"), sft_of(arm)
    unseen = compared(study, own, arm, "unseen")
    beats = f"cannot be compared with `{own}` on tasks never trained on" if own else "is SFT itself"
    if unseen:
        does = "beats" if unseen.word() == "better" else "does not beat"
        beats = f"{does} `{own}` on tasks never trained on ({in_full(unseen)})"
    return f"""**The best recipe** with at most five golden episodes a task and no oracle is `{arm}`:
        {rate(demo)} % on the demo suite, {several(demo.seeds, "seed")}. {against(0.9, demo)}. It {beats}. It
        was picked after the fact from {several(len(rows), "such row")} on the same instances, so its mean
        flatters it a little."""


def missing(
    study: Study, known=("sft", "sft-best", *GRID, *(f"sft-{arm}" for arm in ALONE))
) -> list[str]:
    """Sentences that name the rows not run, of those known, and those with fewer than three seeds."""
    absent = [arm for arm in known if arm not in study]
    few = [f"`{arm}` ({len(seeds)})" for arm, seeds in study.items() if len(seeds) < 3]
    said = [f"Not run: {quoted(absent)}."] if absent else []
    return said + ([f"Fewer than three seeds: {', '.join(few)}."] if few else [])


def siblings(tasks) -> list[str]:
    """Those of `tasks` of whose family the base or SFT read another: click-tab, because of click-tab-2."""
    read = resolve(MADE["tasks"])
    alike = [family for family in families([*read, *tasks]) if {*family} & {*read}]
    return [task for task in tasks if any(task in family for family in alike)]


def cuts(study: Study) -> str:
    """Where pairs are cut, and which rows differ in that."""
    others = "; ".join(
        f"{CUT[where]}: {quoted(arms)}" for where, arms in cut_elsewhere(study, BASE, study).items()
    )
    said = f"""Pairs are cut where the loss has it by default, or where the row's command says:
        {CUT[cut(study, BASE)]}"""
    if not others:
        return f"{said}."
    return f"""{said} in `{BASE}` and all other rows of pairs; {others}. So these rows differ from `{BASE}` in
        that, too."""


def trust(study: Study, asked: set) -> str:
    """How far to trust the p of this document: they do not cover how much trainings of one row differ."""
    apart = {}
    for arm, seeds in study.items():
        rates = [success({arm: {seed: line}}, arm, "demo").mean for seed, line in seeds.items()]
        if len(rates) > 1:
            apart[arm] = 100 * (max(rates) - min(rates))
    said = f"""This document holds {several(len(asked), "verdict")} by p
        ({sum(before == BASE for before, _, _ in asked)} against `{BASE}`). Their p compares the
        trained agents on these instances, not the recipes."""
    if apart:
        most = max(apart, key=apart.get)
        said += f""" Training a row with another seed moves it: of {several(len(apart), "row")} with several
            seeds, the best and the worst seed lie {median(apart.values()):.1f} points apart in the median,
            {apart[most]:.1f} at most (`{most}`)."""
    alone = any(len(seeds) == 1 for seeds in study.values())
    return f"{said} So expect false verdicts well above 1 in 100{', most where a row has one seed' * alone}."


def settings(study: Study) -> str:
    """The settings that all rows have in common, and which row they favour."""
    if BASE not in study:
        return f"`{BASE}` was not run; what the rows have in common stands in `configs/study.toml`."
    first = study[BASE][min(study[BASE])]
    lines = [line for seeds in study.values() for line in seeds.values()]
    config, demo, unseen = first["config"], first["demo"]["solved"], first["unseen"]["solved"]
    sft, dpo = config["sft"], config["dpo"]
    dates, seeds, machines, threads = (
        sorted({line[key] for line in lines}) for key in ("date", "seed", "machine", "threads")
    )
    versions = sorted(
        {f"{name} {number}" for line in lines for name, number in line["versions"].items()}
    )
    return f"""A row is `configs/study.toml` with the flags of its command (section 12). `{BASE}`: the model
        {config["model"]}, {several(config["demonstrations"], "golden episode")} for each of {len(demo)}
        tasks, {sft["steps"]} steps of SFT (learning rate {sft["lr"]:g}); then {config["instances"]}
        instances a task explored in groups of {config["group"]}, and {dpo["steps"]} steps of DPO with
        {dpo["batch"]} pairs (learning rate {dpo["lr"]:g}, beta {dpo["beta"]:g}, NLL {dpo["nll"]:g}).
        Evaluation: greedy, on {several(len(next(iter(demo.values()))), "held-out instance")} of each of
        these tasks, and {len(next(iter(unseen.values())))} of each of {len(unseen)} tasks never trained on
        ({", ".join(unseen)}); the same ones for every row and every seed. Siblings of
        tasks that the base or SFT read: {", ".join(siblings(unseen)) or "none"}. {cuts(study)} Seeds:
        {", ".join(map(str, seeds))}. Played from {dates[0]} to {dates[-1]} on {"; ".join(machines)};
        threads a run: {", ".join(map(str, threads))}; {", ".join(versions)}. The hyperparameters of the
        losses were not tuned one by one: learning rate, steps, batch and NLL are the same for all unless
        the row's command names them, and so are beta, gamma and weights. The common settings were found for
        DPO, on validation seeds, but for the rate of SFT, which was lowered after a look at test seeds
        (`docs/log.md`): all this favours `{BASE}`."""


def preface(study: Study, asked: set) -> list[str]:
    """The paragraphs before the tables; `asked` are the verdicts by p that follow."""
    return [best(study), *missing(study), settings(study), *READING, trust(study, asked)]
