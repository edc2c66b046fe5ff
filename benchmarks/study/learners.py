"""Learners compared on the model that the demo runs: one round each, on the same explored episodes.

    python benchmarks/study/learners.py run --seeds 1          all rows with one seed
    python benchmarks/study/learners.py run --arms rft,grpo    some rows, all three seeds
    python benchmarks/study/learners.py table                  docs/learners.md and results/learners.json

A row is `configs/learners.toml` with the flags that ROWS gives it. Rows of one seed share SFT and what it
explored. `run` appends a line to `results/learners.jsonl` for each finished run and goes on where it stopped.
Every run uses one thread. Two calls may run side by side, on rows or seeds of their own.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from minidpo.config import EvaluateCommand, LoopCommand  # noqa: E402
from minidpo.loop import Loop, loop  # noqa: E402

from benchmarks.records import RESULTS  # noqa: E402
from benchmarks.study import credit  # noqa: E402
from benchmarks.study.document import record_study  # noqa: E402
from benchmarks.study.preface import missing  # noqa: E402
from benchmarks.study.rates import (
    Study,
    compared,
    config_of,
    difference,
    needs,
    sft_of,
    studied,
    success,
)
from benchmarks.study.rows import (
    bullets,
    gain,
    of_seeds,
    over_seeds,
    paragraph,
    rate,
    several,
    table,
    verdicts,
)
from benchmarks.study.run import (
    asked_of,
    outcome,
    parser_of,
    played_with,
    recorded_lines,
    refuse_mixed,
    run_missing,
)
from envs.miniwob.tasks import resolve  # noqa: E402
from minidpo.results.evaluate import held_out  # noqa: E402
from minidpo.system import command_line  # noqa: E402
from minidpo.system.command_line import parse  # noqa: E402
from minidpo.system.files import as_json, read_json  # noqa: E402
from minidpo.system.result_file import read_result  # noqa: E402

LINES, DOCUMENT = RESULTS / "learners.jsonl", ROOT / "docs" / "learners.md"
RUNS = Path("runs/learners")
BASE = "dpo"
WRITTEN = "--dpo.beta 0.1 --dpo.nll 0 --dpo.until end"
AUTHORS = "--dpo.epochs 3 --dpo.batch 32 --dpo.lr 1e-6 --dpo.warmup-ratio 0.1 --dpo.constant"
EVOLVE = "--learn evolve --imitation.threshold 0.5 --imitation.ratio 0.3"
ROWS = {  # a row's flags, and what it is
    BASE: ("", "DPO on its own pairs"),
    "rft": ("--learn rft", "imitates demonstrations and successes, from the base on"),
    "evolve": (f"{EVOLVE} --imitation.batch 12", "RFT on three successes of ten"),
    "ppo": ("--learn ppo --ppo.steps 24 --ppo.batch 32 --ppo.lr 2e-4 --ppo.warmup 3", "PPO"),
    "grpo": ("--learn grpo", "GRPO"),
    "rloo": ("--learn rloo", "RLOO"),
    "gigpo": ("--learn gigpo", "GiGPO"),
    "expert": ("--dpo.pairs expert", "a golden episode over a failure (ETO)"),
    "segments": ("--dpo.pairs segments", "and golden thirds over what came in place of each (HPL)"),
    "stepwise": (
        "--dpo.pairs stepwise --golden-steps every",
        "two ways on from each golden step (ETO)",
    ),
    "stepwise-slow": (
        "--dpo.pairs stepwise --golden-steps every --dpo.lr 5e-5 --dpo.beta 3",
        "the same, a tenth of the rate, three times beta",
    ),
    "dagger": (
        "--learn dagger --states 1 --imitation.batch 12",
        "imitates the expert's answer in a state of each instance",
    ),
    "dagger-pairs": ("--dpo.pairs dagger --states 1", "that answer over what failed in the state"),
    "ef-dpo": (f"--dpo.steps 50 --dpo.batch 4 --dpo.lr 5e-6 {WRITTEN}", "EF-DPO's DPO"),
    "eto": (f"--dpo.pairs eto --dpo.margin 0 {AUTHORS} {WRITTEN}", "ETO's DPO"),
    "dmpo": (
        f"--loss dmpo --dpo.gamma 0.7 --dpo.pairs expert --dpo.noisy {AUTHORS} {WRITTEN}",
        "DMPO, noisy setting",
    ),
    "agentevol": (
        f"{EVOLVE} --imitation.epochs 1 --imitation.batch 32 --imitation.lr 1e-5 "
        "--imitation.warmup-ratio 0.1",
        "AgentEvol's imitation",
    ),
    "dpo-muon": ("--dpo.optimizer muon", "DPO by Muon"),
}
SFT = "imitates six demonstrations"
HEAD = [
    "row",
    "what it is",
    "seeds",
    "golden",
    "greedy, %",
    "T = 1, %",
    "usable, %",
    "against SFT",
    "against `dpo`",
    "training, s",
]
WHERE = {"greedy": "held-out instances, greedily", "sampled": "held-out instances at T = 1"}


def flags(arm: str, seed: int) -> list[str]:
    """A row's flags, as `train.py loop` takes them."""
    out = RUNS / f"seed-{seed}"
    start = [] if arm == BASE else ["--start", str(out / BASE)]
    return [
        "--config",
        "configs/learners.toml",
        *ROWS[arm][0].split(),
        "--seed",
        str(seed),
        "--out",
        str(out / arm),
        *start,
    ]


def run(arm: str, seed: int) -> list[dict]:
    """Play one row with one seed and return its line; BASE returns that of its SFT as well."""
    config = parse(LoopCommand, flags(arm, seed), "learners.py", "")
    refuse_mixed(arm, config, LINES)
    Loop(config)  # refuses a folder of other settings
    ended = config.out / "result.json"  # of a loop that has ended nothing is left to do
    result = read_result(ended) if ended.is_file() else loop(config)
    about = {"command": f"train.py loop {' '.join(flags(arm, seed))}", **played_with(seed)}
    greedy = EvaluateCommand(
        model=config.model,
        tasks=config.tasks,
        episodes=config.episodes,
        seed=config.seed,
        out=config.out / "evaluation",
        machine=config.machine,
    )
    at_1 = replace(greedy, episodes=config.sampled, temperature=1.0, out=greedy.out / "sampled")

    def played(name: str) -> dict:
        return {
            where: outcome(held_out(command, name), resolve(config.tasks), command.episodes)
            for where, command in (("greedy", greedy), ("sampled", at_1))
        }

    line = {
        "arm": arm,
        **about,
        **played(config.learn),
        "seconds": result["seconds"],
        "config": as_json(asdict(config)),
    }
    return [line] if arm != BASE else [line, {"arm": "sft", **about, **played("sft")}]


def golden(study: Study, arm: str) -> int:
    """Golden episodes, or answers, of all tasks together that a row learned from."""
    return len(resolve(config_of(study, arm)["tasks"])) * needs(study, arm)[0]


def cells(study: Study, arm: str) -> list[str]:
    """The cells of a row, under HEAD."""
    what = SFT if arm == "sft" else ROWS[arm][1]
    if arm not in study:
        return [f"`{arm}`", what, "not run", *["-"] * (len(HEAD) - 3)]
    lines = study[arm].values()
    turns, usable = (sum(line["greedy"][key] for line in lines) for key in ("turns", "usable"))
    return [
        f"`{arm}`",
        what,
        of_seeds(study, arm),
        str(golden(study, arm)),
        *(rate(success(study, arm, where)) for where in WHERE),
        f"{100 * usable / max(1, turns):.1f}",
        gain(compared(study, sft_of(arm), arm, "greedy")),
        gain(None if arm in (BASE, "sft") else compared(study, BASE, arm, "greedy")),
        "-" if arm == "sft" else cost(study, arm),
    ]


def cost(study: Study, arm: str) -> str:
    """A row's seconds of training, and over DPO's with the same seeds: the processor is not that of all."""
    seconds, base = (
        {seed: line["seconds"][line["config"]["learn"]] for seed, line in study.get(of, {}).items()}
        for of in (arm, BASE)
    )
    ratios = [seconds[seed] / base[seed] for seed in seconds.keys() & base.keys()]
    return f"{fmean(seconds.values()):.0f}" + (f" ({fmean(ratios):.1f})" if ratios else "")


# Each section: a title, what to know, the rows of its table, and what these are compared with, and where; if
# rows are named behind it, those alone.
SECTIONS = (
    (
        "1. Learners on the same episodes",
        """DPO has what it was tuned with, the others have not: their rates are one guess each. So these rows say
     what a user gets who changes the learner and nothing else, not how good a learner can be.""",
        ("sft", BASE, "rft", "evolve", "ppo", "grpo", "rloo", "gigpo"),
        (("sft", "greedy"), (BASE, "greedy"), (BASE, "sampled")),
    ),
    (
        "2. Golden episodes, parts of them, or the expert's answers",
        """`segments` and `stepwise` explore anew: some attempts of each group begin behind the first steps of a
     golden episode. These tasks take one or two steps, so there is little to divide. `dagger` and
     `dagger-pairs` ask the expert for one action on each instance: they have as many golden answers as
     `expert` has golden episodes, of two steps in enter-text and of one elsewhere.""",
        (BASE, "expert", "segments", "stepwise", "stepwise-slow", "dagger", "dagger-pairs"),
        (("expert", "greedy"), (BASE, "greedy"), ("stepwise", "greedy", "stepwise-slow")),
    ),
    (
        "3. What papers write, on this model",
        """The losses, pairs, rates, betas, batches and lengths of `configs/papers/`, from this study's SFT and
     on its episodes: the authors train models of 7 B in full, where such rates are usual. Here is one round,
     of eight attempts at an instance at temperature 1, without an example in the prompt. ETO has three rounds
     of one greedy attempt, AgentEvol five at 0.8, and both ETO and DMPO show an example. AgentEvol begins at
     the base again. `dpo`, `expert` and `evolve` are ours beside them.""",
        ("sft", BASE, "ef-dpo", "expert", "eto", "dmpo", "evolve", "agentevol"),
        (
            ("sft", "greedy"),
            (BASE, "greedy", "ef-dpo", "dmpo"),
            ("expert", "greedy", "eto"),
            ("evolve", "greedy", "agentevol"),
        ),
    ),
    (
        "4. Muon in place of AdamW",
        "At AdamW's rates; nothing was tuned for Muon.",
        (BASE, "dpo-muon"),
        ((BASE, "greedy"), (BASE, "sampled")),
    ),
)


def rows_of(rows: Sequence[str], before: str, arms: Sequence[str]) -> Sequence[str]:
    """Those that a section compares with the row `before`: as named, else all of its table but SFT's."""
    return arms or [arm for arm in rows if arm not in ("sft", before)]


def asked(study: Study) -> list[tuple[str, str, str]]:
    """The comparisons on which SECTIONS have a verdict by p: row, row compared with it, where."""
    return list(
        dict.fromkeys(
            (before, arm, where)
            for _, _, rows, comparisons in SECTIONS
            for before, where, *arms in comparisons
            for arm in rows_of(rows, before, arms)
            if compared(study, before, arm, where)
        )
    )


def section(
    study: Study,
    title: str,
    about: str,
    rows: Sequence[str],
    comparisons: Sequence[tuple[str, ...]],
) -> list[str]:
    """A table, what to know of it, and its verdicts."""
    said = [
        sentence
        for before, where, *arms in comparisons
        for sentence in verdicts(study, before, rows_of(rows, before, arms), where, WHERE)
    ]
    return [
        f"## {title}",
        paragraph(about),
        table(HEAD, [cells(study, arm) for arm in rows]),
        bullets(said),
    ]


CURVES = (
    ("DPO", "bfloat16", "demo-{}"),
    ("DPO", "float32", "demo-{}-float32"),
    ("GRPO", "float32", "smollm2_grpo-rounds-{}"),
)  # learner, precision, and its results by seed


def rounds() -> list[str]:
    """The curve over rounds: validation of the recorded runs of `make demo`, SFT's and each round's."""
    about = """Greedy success on 60 validation instances after SFT and after each round of `make demo`, and on
        300 held-out ones after the last. Each round explores new instances. Runs of one seed and precision
        share SFT and the first round's episodes. A step of DPO has 24 pairs, one of GRPO 64 episodes; both
        take 24 steps a round. GRPO's rate is its default, 0.0002, and was not tuned."""
    rows, said = [], []
    for learner, dtype, name in CURVES:
        results = {
            seed: read_json(path)
            for seed in (1, 2, 3)
            if (path := RESULTS / f"{name.format(seed)}.json").is_file()
        }
        curves = {seed: result["validation"] for seed, result in results.items()}
        rows += [
            [
                learner,
                dtype,
                str(seed),
                *(f"{100 * share:.1f}" for share in curve),
                f"{100 * list(results[seed]['agents'].values())[-1]['all']['success']:.1f}",
            ]
            for seed, curve in curves.items()
        ]
        after = [dict(zip(curves, numbers)) for numbers in zip(*curves.values(), strict=True)]
        said += [
            f"- {learner}, {dtype}, from round {n} to {n + 1}: "
            f"{over_seeds(difference(after[n], after[n + 1]))}."
            for n in range(1, len(after) - 1)
        ]
        for seed, found in results.items():
            if "against_dpo" in found:
                last = found["against_dpo"]["greedy"]
                said.append(
                    f"- {learner}, seed {seed}, against DPO from the same SFT and first episodes: "
                    f"{last['gain_points']:+.1f} points held out, {last['only_after']} won, "
                    f"{last['only_before']} lost, p = {last['p_value']:.0e}."
                )
    head = ["learner", "computed in", "seed", "SFT", "round 1", "round 2", "held out"]
    return [
        f"## {len(SECTIONS) + 1}. Over rounds",
        paragraph(about),
        table(head, rows),
        bullets(said),
    ]


def preface(study: Study) -> list[str]:
    """What the rows have in common, and how to read them."""
    lines = [line for seeds in study.values() for line in seeds.values()]
    config = next(line["config"] for line in lines if "config" in line)
    tasks = resolve(config["tasks"])
    dates, machines, threads = (
        sorted({line[key] for line in lines}) for key in ("date", "machine", "threads")
    )
    of_base = [
        success({BASE: {seed: line}}, BASE, "greedy").mean for seed, line in study[BASE].items()
    ]
    return [
        f"""Each row trains {config["model"]} for one round. SFT takes {config["sft"]["steps"]} steps on
        {several(config["demonstrations"], "demonstration")} of each of {len(tasks)} tasks
        ({", ".join(tasks)}). The agent then explores {config["instances"] * config["group"] * len(tasks):,}
        episodes, {config["group"]} of each page, and learns from them in {config["dpo"]["steps"]} steps; a
        row may change the learner or the steps. All rows of a seed share SFT and, but for those that begin
        inside golden episodes, what was explored. A row is `configs/learners.toml` with the flags of section
        {len(SECTIONS) + 2}. DPO and imitation use a learning rate of {config["dpo"]["lr"]:g}, policy
        gradients {config["grpo"]["lr"]:g}, because DPO's rate broke the agent (`docs/log.md`). All other
        settings were chosen for DPO on validation seeds, and were not tuned for the other learners.""",
        f"""Evaluation: {config["episodes"]} held-out instances of each task greedily, {config["sampled"]} at
        temperature 1, the same for every row and seed. Rates are means over the training seeds, in
        parentheses with a 95 % interval: mean ± t · s / √n of the seeds' rates. Rows have seeds of
        their own, so compare them by `against`: gain in points and exact McNemar p on the instances
        that both rows played. n counts an instance once for every seed; `up 2/3`: a gain in two of
        three seeds; `seeds`: the 95 % interval of the seeds' gains. Better or worse: p < 0.01, and 0
        is not in that interval. `golden`: golden episodes of all tasks together
        (`dagger` and `dagger-pairs`: and states that the expert answered). `usable`: share of greedy
        turns with a usable action. `training`: seconds of the learner alone, on one thread beside
        another run, and in parentheses over those of `dpo` with the same seeds; a round's exploring
        comes on top, and golden episodes where a row needs them.""",
        f"""How far to trust this: each seed meets the same instances, so the n of a comparison are not
        independent; intervals over seeds are cut at 0 and 100. {several(len(asked(study)), "verdict")} by p
        stand in sections 1 to {len(SECTIONS)}: expect false ones well above 1 in 100. `{BASE}` alone goes
        from {100 * min(of_base):.1f} to {100 * max(of_base):.1f} % by seed.""",
        *missing(study, ("sft", *ROWS)),
        f"""Played on {" to ".join(sorted({dates[0], dates[-1]}))}, {"; ".join(machines)}, threads a run:
        {", ".join(map(str, threads))}. Where no processor is named, seeds 1 to 3 ran on an Intel Xeon with
        AMX, the others on an AMD EPYC.""",
    ]


def document(lines: Sequence[dict]) -> str:
    """The text of docs/learners.md."""
    study = studied(list(lines))
    commands = [[f"`{arm}`", f"`{flags or 'none'}`"] for arm, (flags, _) in ROWS.items()]
    about = """`python train.py loop --config configs/learners.toml --seed SEED --out
        runs/learners/seed-SEED/dpo` makes the first row, and with the flags of another row, another `--out`
        and `--start runs/learners/seed-SEED/dpo` that row; recorded with `OMP_NUM_THREADS=1`."""
    parts = [
        "# Learners: what else can be made of the same episodes",
        paragraph("""Made by `python benchmarks/study/learners.py table` from `learners.jsonl`,
                       `credit.jsonl` and the results of `make demo` in `benchmarks/results/`, not by
                       hand."""),
        *map(paragraph, preface(study)),
    ]
    for part in SECTIONS:
        parts += section(study, *part)
    parts += [
        *rounds(),
        f"## {len(SECTIONS) + 2}. Flags",
        paragraph(about),
        table(["row", "flags"], commands),
        *credit.document(len(SECTIONS) + 3),
    ]
    return "\n\n".join(parts) + "\n"


def figures(lines: Sequence[dict]) -> dict[str, float]:
    """The flat figures of results/learners.json: shares of 1, gains in points."""
    study, found = studied(list(lines)), {}
    for arm, seeds in study.items():
        name = arm.replace("-", "_")
        found[f"{name}_seeds"] = len(seeds)
        for where in WHERE:
            found[f"{name}_{where}"] = success(study, arm, where).mean
        for before in ("sft", BASE):
            if arm not in ("sft", before) and (against := compared(study, before, arm, "greedy")):
                found |= {
                    f"{name}_vs_{before}_points": against.points,
                    f"{name}_vs_{before}_p": against.p,
                }
    return found


def write_document(lines: Sequence[dict]) -> None:
    """Write docs/learners.md and results/learners.json."""
    DOCUMENT.write_text(document(lines))
    record_study(RESULTS / "learners.json", figures(lines), lines)


def main() -> None:
    parser = parser_of(__doc__, ("run", "table"), ROWS)
    options = parser.parse_args()
    asked = asked_of(parser, options, ROWS)
    os.chdir(ROOT)
    if options.what == "run":
        torch.set_num_threads(1)
        bases = [(BASE, seed) for _, seed in asked]  # which the other rows begin with
        run_missing([*dict.fromkeys([*bases, *asked])], run, LINES)
    elif lines := recorded_lines(LINES):
        write_document(lines)
    else:
        parser.error("nothing was run yet: python benchmarks/study/learners.py run")


if __name__ == "__main__":
    command_line.main(lambda _: main())
