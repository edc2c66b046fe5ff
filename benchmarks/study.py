"""The two studies as lists of (page, options): what else can be made of the same episodes.

    python benchmarks/study.py run study --seeds 1              all rows of docs/learners.md with one seed
    python benchmarks/study.py run learners --rows rft,gigpo    some rows of docs/learners.md, all three seeds
    python benchmarks/study.py command study --rows rft --seeds 1     the command that trains a row

A row is a page, and what it changes in configs/study.toml or configs/learners.toml, which are the rows `dpo`. Rows
take what they have in common (SFT, the first exploration) from the folder of that seed's `dpo`, which is made first.
`run` appends a line for each finished run to results/study.jsonl or learners.jsonl; what is there is not made again.
A row's line says what it learned, even where that is worse than SFT: of several rounds, the best on validation.

Rows of results/*.jsonl that are not here were made by v1 (commit cf007b6): only its code repeats them.
"""

import argparse
import fcntl
import json
import os
import shlex
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import envs  # noqa: E402
from benchmarks.rates import RESULTS, recorded  # noqa: E402
from benchmarks.records import verdicts  # noqa: E402
from minidpo.algorithms import ALGORITHMS  # noqa: E402
from minidpo.commands.algorithms import combined, parse_page  # noqa: E402
from minidpo.data.episodes import Episode, read  # noqa: E402
from minidpo.data.pairs import NothingToLearn  # noqa: E402
from minidpo.experiment import Experiment, ExperimentOptions, Policy  # noqa: E402
from minidpo.results.circumstances import machine_name  # noqa: E402
from minidpo.runner import index_of_best  # noqa: E402
from minidpo.system import processes  # noqa: E402
from minidpo.system.command_line import main as run_main  # noqa: E402

BASE = "dpo"
# No agent was trained on these tasks, and the base read none. SFT solves some instances of each.
UNSEEN = (
    "click-dialog,click-tab,click-tab-2-easy,click-widget,click-collapsible,unicode-test,navigate-tree,"
    "identify-shape"
)
WHOLE = "--dpo.beta 0.1 --dpo.nll 0 --dpo.until end"  # DPO as published
AS_PAIRS = "--imitation.steps 25 --imitation.batch 32 --imitation.lr 1e-3 --imitation.warmup 10"
IMITATION = "--imitation.steps 24 --imitation.batch 24 --imitation.lr 5e-4 --imitation.warmup 3"
EVOLVE = "--threshold 0.5 --share 0.3"
GRADIENT = "--gradient.steps 24 --gradient.batch 32 --gradient.lr 2e-4 --gradient.warmup 3"
DMPO = "--dpo.loss dmpo --dpo.beta 0.3 --dpo.until end"

ROWS = {
    "study": {
        BASE: ("ef-dpo", ""),
        "rounds": ("ef-dpo", "--rounds 5"),
        "rft": ("rft", AS_PAIRS),
        "rwr": ("rft", f"--weighting advantage {AS_PAIRS}"),
        "rounds-rft": ("rft", f"--rounds 3 {AS_PAIRS}"),
        "dmpo-0.9": ("ef-dpo", f"{DMPO} --dpo.gamma 0.9"),
        "dmpo-0.5": ("ef-dpo", f"{DMPO} --dpo.gamma 0.5"),
        "kto-unpaired": ("kto", "--dpo.loss kto --dpo.batch 16 --dpo.until end"),
        "kto": ("ef-dpo", "--dpo.loss kto --dpo.until turn"),
        "ipo": ("ef-dpo", "--dpo.loss ipo_sum --dpo.beta 0.25"),
        "simpo": ("ef-dpo", "--dpo.loss simpo --dpo.beta 2 --dpo.until turn"),
        "orpo": (
            "ef-dpo",
            "--dpo.loss orpo --dpo.beta None --dpo.odds-weight 1 --dpo.nll 0 --dpo.until turn",
        ),
        "plain": ("ef-dpo", WHOLE),
        "no-nll": ("ef-dpo", "--dpo.nll 0"),
        "beta-0.1": ("ef-dpo", "--dpo.beta 0.1"),
        "beta-0.3": ("ef-dpo", "--dpo.beta 0.3"),
        "beta-3": ("ef-dpo", "--dpo.beta 3"),
        "group-2": ("ef-dpo", "--group 2"),
        "group-4": ("ef-dpo", "--group 4"),
        "group-16": ("ef-dpo", "--group 16"),
        "demos-1": ("ef-dpo", "--demonstrations 1"),
        "demos-20": ("ef-dpo", "--demonstrations 20"),
        "selfplay": ("self-play", "--sft.lr 2e-4"),
    },
    "learners": {
        BASE: ("ef-dpo", ""),
        "rft": ("rft", IMITATION),
        "evolve": ("agentevol", f"{IMITATION} {EVOLVE} --imitation.batch 12"),
        "grpo": ("online-grpo", GRADIENT),
        "rloo": ("online-grpo", f"{GRADIENT} --advantage rloo"),
        "gigpo": ("gigpo", GRADIENT),
        "dagger": ("dagger", f"{IMITATION} --states 1 --imitation.batch 12"),
        "ef-dpo": ("ef-dpo", f"{WHOLE} --dpo.steps 50 --dpo.batch 4 --dpo.lr 5e-6"),
        "agentevol": (
            "agentevol",
            f"{EVOLVE} --imitation.epochs 1 --imitation.batch 32 --imitation.lr 1e-5 "
            "--imitation.warmup 0.1",
        ),
    },
}
FIRST = {"demos-1": "sft-demos-1", "demos-20": "sft-demos-20", "selfplay": "sft-selfplay"}
FIRST |= {BASE: "sft"}  # rows that begin with a first policy of their own, which is a row, too


def arguments(study: str, row: str, seed: int) -> list[str]:
    """A row's flags: those of the study's file that its page has, and what the row changes."""
    page, changes = ROWS[study][row]
    known = {f.name for f in fields(combined(ALGORITHMS[page].options))}
    settings = {}
    for name, value in tomllib.loads((ROOT / f"configs/{study}.toml").read_text()).items():
        if name in known and isinstance(value, dict):
            settings |= {f"--{name}.{key}": each for key, each in value.items()}
        elif name in known:
            settings[f"--{name}"] = value
    words = changes.split()
    folder = Path("runs") / study / f"seed-{seed}"
    settings |= dict(zip(words[::2], words[1::2]))
    settings |= {"--seed": seed, "--out": folder / row}
    if row != BASE:
        settings["--reuse"] = folder / BASE
    return [
        str(part) for flag, value in settings.items() for part in (flag.replace("_", "-"), value)
    ]


def options_of(study: str, row: str, seed: int) -> tuple:
    """The options of the row's page, and the experiment's."""
    page = ROWS[study][row][0]
    return parse_page(ALGORITHMS[page], arguments(study, row, seed), f"train.py {page}")


def command(study: str, row: str, seed: int) -> str:
    return shlex.join(["train.py", ROWS[study][row][0], *arguments(study, row, seed)])


def outcome(episodes: Sequence[Episode], tasks: Sequence[str], instances: int) -> dict:
    """What the tables need of held-out play: verdicts of each task as a string of 0 and 1; turns."""
    turns = [turn for episode in episodes for turn in episode.turns]
    return {
        "solved": verdicts(episodes, dict.fromkeys(tasks, instances)),
        "turns": len(turns),
        "usable": sum(turn.error is None for turn in turns),
    }


def run_row(study: str, row: str, seed: int) -> Iterator[dict]:
    """Train a row and play it; its line, and that of its first policy if this is a row, too."""
    page = ALGORITHMS[ROWS[study][row][0]]
    options, setup = options_of(study, row, seed)
    world = envs.world(setup.world)
    tasks = envs.resolve(world, setup.tasks)
    began = {
        "seed": seed,
        "date": date.today().isoformat(),
        "threads": torch.get_num_threads(),
        "versions": {n: version(n) for n in ("torch", "playwright", "miniwob", "tokenizers")},
        "machine": machine_name(),
        "command": command(study, row, seed),
    }
    with Experiment(setup, world, tasks) as run:
        first, *learned = page.run(run, options)
        if not learned or learned[-1].sha256 == first.sha256:
            raise NothingToLearn("no round was trained")
        validation = [run.validate(policy) for policy in learned] if len(learned) > 1 else [1.0]
        kept = index_of_best(validation)
        played = {"arm": row, **began, **measured(study, run, learned[kept])}
        if len(learned) > 1:
            played |= {
                "validation": [run.validate(first), *validation],
                "kept_round": kept + 1,
            }
        shown = episodes_of(setup.out, "demonstrations")
        answered = episodes_of(setup.out, "ask-experts")
        yield played | {
            "golden": (shown + answered) / len(tasks),
            "explored": episodes_of(setup.out, "play") / len(tasks),
            "seconds": run.seconds,
        }
        if row in FIRST:
            line = {"arm": FIRST[row], **began, **measured(study, run, first)}
            yield line | {"golden": shown / len(tasks), "explored": 0}


def episodes_of(folder: Path, stage: str) -> int:
    """How many episodes the stages of this name have."""
    return sum(len(read(path)) for path in folder.glob(f"??-{stage}.jsonl"))


def measured(study: str, run: Experiment, policy: Policy) -> dict[str, dict]:
    """The policy on held-out instances: greedily and at temperature 1, or greedily and on tasks never trained on."""
    setup = run.options
    greedy = outcome(run.held_out(policy, setup.episodes, 0.0), run.tasks, setup.episodes)
    if study == "learners":
        sampled = outcome(run.held_out(policy, setup.sampled, 1.0), run.tasks, setup.sampled)
        return {"greedy": greedy, "sampled": sampled}
    unseen = replace(setup, tasks=UNSEEN, out=setup.out / "unseen", reuse=None)
    return {"demo": greedy, "unseen": played_elsewhere(unseen, policy, 10)}


def played_elsewhere(setup: ExperimentOptions, policy: Policy, instances: int) -> dict:
    world = envs.world(setup.world)
    tasks = envs.resolve(world, setup.tasks)
    with Experiment(setup, world, tasks) as run:
        return outcome(run.held_out(policy, instances, 0.0), tasks, instances)


def append(study: str, lines: Sequence[dict]) -> None:
    """Append lines to the record at once, under a lock, because other processes may append too."""
    with open(RESULTS / f"{study}.jsonl", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "command"))
    parser.add_argument("study", choices=tuple(ROWS))
    parser.add_argument("--rows", help="separated by commas; by default all")
    parser.add_argument("--seeds", default="1,2,3")
    args = parser.parse_args(words)
    rows = args.rows.split(",") if args.rows else list(ROWS[args.study])
    unknown = [row for row in rows if row not in ROWS[args.study]]
    if unknown:
        parser.error(f"no row {', '.join(unknown)}; there are {', '.join(ROWS[args.study])}")
    os.chdir(ROOT)
    torch.set_num_threads(1)  # so that no number depends on the number of cores
    for seed in map(int, args.seeds.split(",")):
        for row in rows if args.what == "command" else dict.fromkeys([BASE, *rows]):
            if args.what == "command":
                print("python", command(args.study, row, seed))
            elif not any((e["arm"], e["seed"]) == (row, seed) for e in recorded(args.study)):
                print(f"==== {row}, seed {seed}", flush=True)
                try:
                    lines = list(run_row(args.study, row, seed))
                    processes.on_rank_0(append, args.study, lines)
                except NothingToLearn as error:  # other rows do not depend on it
                    print(f"{row}, seed {seed}, is left out: {error}", flush=True)


if __name__ == "__main__":
    run_main(main)
