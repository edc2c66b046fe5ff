"""The study as a document: the recorded lines become docs/results.md and results/study.json.

Every number and every verdict is computed from the lines. The document names each row that was not run.
"""

from pathlib import Path

from benchmarks.records import RESULTS, record
from benchmarks.study.grid import BASE, RUNS
from benchmarks.study.preface import preface
from benchmarks.study.rates import (
    Study,
    at_round,
    compared,
    config_of,
    difference,
    figures,
    first_policy,
    home_of,
    sft_of,
    share,
    studied,
)
from benchmarks.study.rows import (
    HEAD,
    WHERE,
    bullets,
    cells,
    other_cut,
    other_rate,
    over_seeds,
    paragraph,
    rate,
    several,
    table,
    verdicts,
)
from envs.miniwob.tasks import resolve

DOCUMENT = Path(__file__).parents[2] / "docs" / "results.md"

METHODS = (
    "sft",
    "sft-best",
    BASE,
    "rft",
    "bc",
    "rwr",
    "expert",
    "stepwise",
    "mixture",
    "kto",
    "kto-unpaired",
    "dmpo-0.9",
    "dmpo-0.9-clean",
    "dmpo-0.5",
    "ipo",
    "simpo",
    "orpo",
    "plain",
    "sft-selfplay",
    "selfplay",
    "rounds",
    "rounds-fixed",
    "rounds-rft",
    "focus",
    "curriculum",
)
LEARNED = [arm for arm in METHODS if not first_policy(arm)]
AFTER_SFT = [arm for arm in LEARNED if sft_of(arm) == "sft"]
DEMONSTRATIONS = "6. Demonstrations a task: 1, 5, 20"
COMPARED = (
    ("sft", AFTER_SFT, "demo"),
    ("sft", AFTER_SFT, "unseen"),
    ("sft-selfplay", ["selfplay"], "demo"),
    (BASE, [arm for arm in LEARNED if arm != BASE], "demo"),
)
# Each question: a title, the rows of its table, and its comparisons (a row -> the rows that differ from it in
# what the question asks).
QUESTIONS = (
    (
        "3. Beta",
        ("beta-0.1", "beta-0.3", BASE, "beta-3"),
        {BASE: ("beta-0.1", "beta-0.3", "beta-3")},
    ),
    (
        "4. Gamma: DMPO, and DPO with the same beta",
        ("dmpo-0.5", "dmpo-0.9", "beta-0.3"),
        {"dmpo-0.9": ("dmpo-0.5",), "beta-0.3": ("dmpo-0.5", "dmpo-0.9")},
    ),
    (
        "5. Episodes in a group: 2, 4, 8, 16",
        ("group-2", "group-4", BASE, "group-16"),
        {BASE: ("group-2", "group-4", "group-16")},
    ),
    (
        DEMONSTRATIONS,
        ("sft-demos-1", "demos-1", "sft", BASE, "sft-demos-20", "demos-20"),
        {"sft": ("sft-demos-1", "sft-demos-20"), BASE: ("demos-1", "demos-20")},
    ),
    (
        "7. Noisy losers against clean ones",
        ("dmpo-0.9", "dmpo-0.9-clean", BASE, "clean"),
        {"dmpo-0.9": ("dmpo-0.9-clean",), BASE: ("clean",)},
    ),
    ("8. Dense pairs", (BASE, "dense"), {BASE: ("dense",)}),
    (
        "9. The reference: moving (`rounds`) or fixed",
        ("rounds", "rounds-fixed"),
        {"rounds": ("rounds-fixed",)},
    ),
)
LAST_QUESTION = ("11. Without the NLL term", (BASE, "no-nll"), {BASE: ("no-nll",)})
ROUNDS = ("rounds", "rounds-fixed", "rounds-rft")
THIRD = 3  # the round at which section 10 compares


def asked(study: Study) -> set[tuple[str, str, str]]:
    """All verdicts by p in the document, as (row, row compared with it, kind of task)."""
    questions = [
        (before, arms, suite)
        for _, _, comparisons in (*QUESTIONS, LAST_QUESTION)
        for before, arms in comparisons.items()
        for suite in WHERE
    ]
    return {
        (before, arm, suite)
        for before, arms, suite in (*COMPARED, *questions)
        for arm in arms
        if compared(study, before, arm, suite)
    }


def section(study: Study, title: str, rows, comparisons: dict) -> list[str]:
    """A question: the table of its rows, and which row is better on each kind of task."""
    said = [
        sentence
        for before, arms in comparisons.items()
        for suite in WHERE
        for sentence in verdicts(study, before, arms, suite)
    ]
    for before, arms in comparisons.items():
        said += other_cut(study, before, arms)
    if title == DEMONSTRATIONS and (config := config_of(study, BASE)):
        said.append(
            f"- At a learning rate of {config['sft']['lr']:g} SFT moves the base little, so this "
            "says little about demonstrations as such."
        )
    return [f"## {title}", table(HEAD, [cells(study, arm) for arm in rows]), bullets(said)]


def methods(study: Study) -> list[str]:
    """Section 1: the large table, and each of its rows against SFT and against DPO."""
    said = [
        sentence
        for before, arms, suite in COMPARED
        for sentence in verdicts(study, before, arms, suite)
    ]
    said += other_rate(study, BASE, LEARNED)
    return ["## 1. Methods", table(HEAD, [cells(study, arm) for arm in METHODS]), bullets(said)]


def curve(study: Study, arm: str) -> list[str]:
    """A table row: validation after each round over the seeds that played it, and which rounds were kept."""
    if arm not in study:
        return [f"`{arm}`", "not run", *["-"] * 7]
    means = [at_round(study, arm, number) for number in range(6)]
    kept = ", ".join(str(line["kept_round"]) for line in study[arm].values())
    short = [f" [{several(len(m), 'seed')}]" * (len(m) < len(study[arm])) for m in means]
    return [
        f"`{arm}`",
        str(len(study[arm])),
        *(
            rate(share([*m.values()])) + note * bool(m)
            for m, note in zip(means, short, strict=True)
        ),
        kept,
    ]


def does_a_later_round_hurt(study: Study, arm: str) -> str:
    """A sentence: the last round against the first, and how often validation fell in between."""
    if arm not in study:
        return f"- `{arm}` was not run."
    curves = [line["validation"][1:] for line in study[arm].values()]
    last = min(map(len, curves))
    if last < 2:
        return f"- `{arm}` has a seed with one round only: nothing can be said of later ones."
    steps = [(a, b) for rates in curves for a, b in zip(rates, rates[1:])]
    change = difference(at_round(study, arm, 1), at_round(study, arm, last))
    means = [sum(rates[k] for rates in curves) / len(curves) for k in range(last)]
    word = {
        "better": f"round {last} is better than round 1",
        "worse": f"round {last} is worse than round 1",
        "no difference": f"no difference between rounds 1 and {last} that these seeds can show",
    }
    if change.seeds == 1:
        word["no difference"] = f"one seed, so nothing can be said of rounds 1 and {last}"
    return f"""- `{arm}`: {word[change.word()]} ({over_seeds(change)}). Validation fell in
        {sum(b < a for a, b in steps)} of {several(len(steps), "step")} from a round to the next; its mean
        is highest after round {1 + means.index(max(means))}."""


def rounds(study: Study) -> list[str]:
    """Section 2: validation by round, and whether later rounds hurt."""
    config, cost = config_of(study, "rounds"), ""
    if config:
        tasks, dpo = len(resolve(config["tasks"])), config["dpo"]
        played, looks = config["instances"] * config["group"], config["validation"] * tasks
        cost = f"""Later rounds are not free: each explores {played * tasks:,} episodes more
            ({config["instances"]} instances of each of {tasks} tasks, {config["group"]} episodes each) and
            takes {dpo["steps"]} steps of {dpo["batch"]} pairs more, as much as `{BASE}` after its SFT; and
            the verdicts on {several(looks, "validation episode")} after each pick the round that is kept,
            which `explored` does not count. So `rounds` against `{BASE}` is not a comparison at one price."""
    about = """Greedy success on validation seeds, mean over the training seeds (95 % interval). The
        reference of `rounds` is the policy that the round began with, that of `rounds-fixed` the first
        policy; `rounds-rft` learns by imitation. ETO (arXiv:2403.02502) found that later rounds may hurt."""
    head = [
        "row",
        "seeds",
        "first policy",
        *(f"round {number}" for number in range(1, 6)),
        "kept, by seed",
    ]
    return [
        "## 2. Rounds",
        *map(paragraph, filter(None, (about, cost))),
        table(head, [curve(study, arm) for arm in ROUNDS]),
        bullets([does_a_later_round_hurt(study, arm) for arm in ROUNDS]),
    ]


def where_to_look(study: Study) -> list[str]:
    """Section 10: `rounds`, `focus` and `curriculum`, compared after the same round."""
    about = f"""`rounds` has five rounds, the other two have three: so all are compared after round {THIRD},
        by their success on validation seeds. The rows of section 1 are of the rounds that were kept. When
        `focus` was recorded, its first round explored all tasks alike; now success on validation says where
        to look first."""
    found = {arm: at_round(study, arm, THIRD) for arm in ("rounds", "focus", "curriculum")}
    rows, said = [], []
    for arm, rates in found.items():
        state = str(len(rates)) if rates else "ended before" if arm in study else "not run"
        rows.append([f"`{arm}`", state, rate(share([*rates.values()]))])
        change = difference(found["rounds"], rates)
        if arm == "rounds":
            continue
        if change is None:
            said.append(
                f"- `{arm}` is not compared with `rounds`, for want of a seed that both have."
            )
            continue
        word = {
            "better": "better than `rounds`",
            "worse": "worse than `rounds`",
            "no difference": "no difference from `rounds` that these seeds can show",
        }[change.word()]
        word = "one seed, so nothing can be said" if change.seeds == 1 else word
        said.append(f"- `{arm}`: {word} ({over_seeds(change)}).")
    return [
        "## 10. Where to look: focus and curriculum",
        paragraph(about),
        table(["row", "seeds", f"validation after round {THIRD}, %"], rows),
        bullets(said),
    ]


def commands(study: Study) -> list[str]:
    """Section 12: the command that makes each row again."""
    threads = sorted({str(line["threads"]) for seeds in study.values() for line in seeds.values()})
    about = f"""`python benchmarks/study/run.py again --arms ROW --seeds SEED` makes a row anew from nothing,
        evaluation included, and prints it beside what was recorded. The rows of SFT and of the oracle come
        with the row whose policies they are. By hand, a row with `--start` needs the folder of `{BASE}` with
        its seed, which the command of `{BASE}` makes. The commands, here with each row's first seed, give
        the demo column, as recorded with `OMP_NUM_THREADS={" or ".join(threads)}`:"""
    rows = [
        [f"`{arm}`", f"`python {seeds[min(seeds)]['command']}`", f"`{policy(study, arm)}`"]
        for arm, seeds in study.items()
    ]
    return [
        "## 12. Commands",
        paragraph(about),
        table(["row", "command", "its policy"], rows),
        *unseen_command(study),
    ]


def policy(study: Study, arm: str) -> str:
    """The adapter folder of a row's first seed. A line counts rounds from 1."""
    seed, home = min(study[arm]), home_of(arm)
    out = f"{RUNS}/seed-{seed}/{home}"
    if first_policy(arm):
        return f"{out}/sft/adapter"
    return f"{out}/round-{study[arm][seed]['kept_round']}/{study[arm][seed]['config']['learn']}/adapter"


def unseen_command(study: Study) -> list[str]:
    """The command that makes the column of tasks never trained on, as `evaluate_policy` plays it."""
    if BASE not in study:
        return []
    seed = min(study[BASE])
    unseen = study[BASE][seed]["unseen"]["solved"]
    about = f"""The column of tasks never trained on is an evaluation of its own, in the same way, of the
        policy in the last column; here of `{BASE}`, seed {seed}:"""
    command = (
        f"python evaluate.py --episodes {len(next(iter(unseen.values())))} --seed {seed} "
        f"--machine.pages {study[BASE][seed]['config']['machine']['pages']}",
        f"--tasks {','.join(unseen)}",
        f"--adapters dpo={policy(study, BASE)} --out {RUNS}/seed-{seed}/{BASE}/unseen",
    )
    return [paragraph(about), "```\n" + " \\\n    ".join(command) + "\n```"]


def document(lines: list[dict]) -> str:
    """The text of docs/results.md."""
    study = studied(lines)
    parts = [
        "# Results: what helps an agent that only knows solved or not solved",
        "Made by `python benchmarks/study/run.py table` from `benchmarks/results/study.jsonl`, not by "
        "hand.",
        *map(paragraph, preface(study, asked(study))),
        *methods(study),
        *rounds(study),
    ]
    for question in QUESTIONS:
        parts += section(study, *question)
    parts += [*where_to_look(study), *section(study, *LAST_QUESTION), *commands(study)]
    return "\n\n".join(parts) + "\n"


def write_document(lines: list[dict]) -> None:
    """Write docs/results.md and results/study.json. Raises ValueError if nothing was run."""
    if not lines:
        raise ValueError("nothing was run yet: python benchmarks/study/run.py run")
    text, found = document(lines), figures(lines)
    DOCUMENT.write_text(text)
    record_study(RESULTS / "study.json", found, lines)


def record_study(out: Path, found: dict[str, float], lines: list[dict]) -> None:
    """Write the figures of recorded lines, with the versions and machines that these were made with."""
    versions = {
        name: ", ".join(sorted({line["versions"][name] for line in lines}))
        for name in lines[0]["versions"]
    }
    record(out, found, versions, ran_on=sorted({line["machine"] for line in lines}))
