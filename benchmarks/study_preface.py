"""What the study's document says before its tables: the best recipe, what is missing, how it was made."""

from study import ALONE, BASE, BEST_OF, GRID
from study_numbers import Study, compared, recipes, sft_of, success
from study_rows import in_full, quoted, rate, several

READING = (
    """Rates are means over the training seeds, in parentheses with a 95 % interval: mean ± t · s / √n of
    the rates of n seeds, with t = 4.303 for three seeds and 12.706 for two, cut at 0 and 100; one seed has
    no interval, seeds that agree leave it no width. It says how far training seeds differ on these
    instances, no more.""",
    """`golden`: expert episodes a task that the row saw. `explored`: episodes a task that it played to
    learn from, at most. `report`: click-button and login-user out of the demo episodes. `steps`: turns an
    episode; `valid`: share of turns with a usable action; both on the demo suite.""",
    f"""`against`: gain in points and exact McNemar p on the instances that both rows played; n counts an
    instance once for every seed. SFT is `sft`; for {quoted(ALONE)} it is their own, `sft-{ALONE[0]}` and so
    on. This p speaks of instances, not of training seeds: each seed meets the same instances, so the n are
    not independent. How far the seeds agree is said beside a verdict: `up 2/3` is a gain in two of three.""",
    f"""A verdict follows one rule: better or worse at p < 0.01, else no difference that n instances can
    show. `sft-best` is an oracle, not an agent: the page's own verdict picks the best of
    {BEST_OF} tries at temperature 1. Rows of several rounds are of the round that validation chose.""",
)


def best(study: Study) -> str:
    """Whether what was asked for is reached: 90 %, and better than SFT on tasks never trained on."""
    rows = recipes(study)
    if not rows:
        return "No row with at most five golden episodes a task was run, so there is no best recipe."
    arm = max(rows, key=rows.get)
    demo, own = success(study, arm, "demo"), sft_of(arm)
    unseen = compared(study, own, arm, "unseen")
    beats = f"cannot be compared with `{own}` on tasks never trained on" if own else "is SFT itself"
    if unseen:
        does = "beats" if unseen.word() == "better" else "does not beat"
        beats = f"{does} `{own}` on tasks never trained on at p < 0.01 ({in_full(unseen)})"
    return f"""**The best recipe** with at most five golden episodes a task and no oracle is `{arm}`:
        {rate(demo)} % on the demo suite, {several(demo.seeds, "seed")}. It
        {"reaches" if demo.mean >= 0.9 else "does not reach"} 90 %, and it {beats}. It was picked after the
        fact from {several(len(rows), "such row")} on the same instances, so its mean flatters it a little."""


def missing(study: Study) -> list[str]:
    """What was not run, or with fewer than three seeds."""
    known = ["sft", "sft-best", *GRID, *(f"sft-{arm}" for arm in ALONE)]
    absent = [arm for arm in known if arm not in study]
    few = [f"`{arm}` ({len(seeds)})" for arm, seeds in study.items() if len(seeds) < 3]
    said = [f"Not run: {quoted(absent)}."] if absent else []
    return said + ([f"Fewer than three seeds: {', '.join(few)}."] if few else [])


def settings(study: Study) -> str:
    """What all rows have in common, and whom that favours."""
    if BASE not in study:
        return f"`{BASE}` was not run; what the rows have in common stands in `configs/study.toml`."
    first = study[BASE][min(study[BASE])]
    lines = [line for seeds in study.values() for line in seeds.values()]
    config, demo, unseen = first["config"], first["demo"]["solved"], first["unseen"]["solved"]
    sft, dpo = config["sft"], config["dpo"]
    dates, seeds, machines, threads = (sorted({line[key] for line in lines})
                                       for key in ("date", "seed", "machine", "threads"))
    versions = sorted({f"{name} {number}" for line in lines for name, number in line["versions"].items()})
    others = [arm for arm in study if arm != BASE and compared(study, BASE, arm)]
    return f"""A row is `configs/study.toml` with the flags of its command (section 12). `{BASE}`: the model
        {config["model"]}, {several(config["demonstrations"], "golden episode")} for each of {len(demo)}
        tasks, {sft["steps"]} steps of SFT (learning rate {sft["lr"]:g}); then {config["instances"]}
        instances a task explored in groups of {config["group"]}, and {dpo["steps"]} steps of DPO with
        {dpo["batch"]} pairs (learning rate {dpo["lr"]:g}, beta {dpo["beta"]:g}, NLL {dpo["nll"]:g}).
        Evaluation: greedy, on {several(len(next(iter(demo.values()))), "held-out instance")} of each of
        these tasks, and {len(next(iter(unseen.values())))} of each of {len(unseen)} tasks never trained on
        ({", ".join(unseen)}); the same ones for every row and every seed. Seeds:
        {", ".join(map(str, seeds))}. Played from {dates[0]} to {dates[-1]} on {"; ".join(machines)};
        threads a run: {", ".join(map(str, threads))}; {", ".join(versions)}. The hyperparameters of the
        losses were not tuned one by one: learning rate, steps, batch and NLL are the same for all unless
        the row's command names them, and so are beta, gamma and weights. The common settings were found for
        DPO, on validation seeds (`docs/log.md`), which favours `{BASE}`. Rows compared with `{BASE}`:
        {len(others)}; were all just as good as it, about {len(others) / 100:.2f} of them would still show
        p < 0.01."""


def preface(study: Study) -> list[str]:
    """Paragraphs."""
    return [best(study), *missing(study), settings(study), *READING]
