"""What helps an agent that only knows solved or not solved: a grid of loops on the shipped model, on a CPU.

    python benchmarks/study.py run --seeds 1              all rows with one seed; goes on where it stopped
    python benchmarks/study.py run --arms rft,kto         some rows, all three seeds
    python benchmarks/study.py table                      docs/results.md and results/study.json of the lines
    python benchmarks/study.py again --arms kto --seeds 2 a row anew, from nothing, beside what was recorded

A call of `again` has a folder of its own, so that all it prints was made now; its rows share a `dpo` of each
seed. `--resume` goes on with the last call if that was killed, with what it had made by then: after a change
of the code start afresh.

A row is `configs/study.toml` and the flags in GRID; each run ends as a line of `results/study.jsonl`. What
runs of one seed have in common (SFT, the first exploration) is made once. Different seeds may run side by
side, each in a process of its own; all run in one thread, so that no number depends on the number of cores.
"""

import argparse
import fcntl
import json
import os
import platform
import sys
from dataclasses import asdict, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from minidpo.config import (
    EvaluateCommand,  # noqa: E402
    LoopCommand,  # noqa: E402
)
from minidpo.data.episodes import Episode  # noqa: E402
from minidpo.loop import loop  # noqa: E402
from minidpo.results.evaluate import play_held_out  # noqa: E402
from minidpo.system.command_line import parse  # noqa: E402

LINES = ROOT / "benchmarks" / "results" / "study.jsonl"
RUNS, AGAIN = Path("runs/study"), Path("runs/study-again")
# Never trained on, nor read by the base; the SFT policy solves some of each (validation seeds).
UNSEEN = ("click-dialog,click-tab,click-tab-2-easy,click-widget,click-collapsible,unicode-test,navigate-tree,"
          "identify-shape")
BEST_OF = 4  # tries of the Best-of-N row

BASE = "dpo"
# In the order in which they are run: where time ends, so does the list. `sft` and `sft-best` are evaluations
# of the policy that BASE begins with.
GRID = {
    BASE: "",
    "rounds": "--rounds 5",
    "rft": "--learn rft",
    "bc": "--learn bc",
    "rwr": "--learn rwr",
    "expert": "--dpo.pairs expert",
    "dmpo-0.9": "--loss dmpo --dpo.beta 0.3 --dpo.gamma 0.9",
    "kto-unpaired": "--loss kto --dpo.pairs unpaired --dpo.batch 16",
    "stepwise": "--dpo.pairs stepwise",
    "dmpo-0.9-clean": "--loss dmpo --dpo.beta 0.3 --dpo.gamma 0.9 --dpo.clean",
    "mixture": "--dpo.pairs mixture",
    "ipo": "--loss ipo_sum --dpo.beta 0.25",
    "simpo": "--loss simpo --dpo.beta 2",
    "orpo": "--loss orpo --dpo.beta None --dpo.odds-weight 1 --dpo.nll 0",
    "dense": "--dpo.dense",
    "beta-0.1": "--dpo.beta 0.1",
    "beta-3": "--dpo.beta 3",
    "dmpo-0.5": "--loss dmpo --dpo.beta 0.3 --dpo.gamma 0.5",
    "group-4": "--group 4",
    "demos-1": "--demonstrations 1",
    "selfplay": "--demonstrations 0 --sft.lr 2e-4",
    "demos-20": "--demonstrations 20",
    "rounds-fixed": "--rounds 3 --reference sft",
    "group-16": "--group 16",
    "curriculum": "--rounds 3 --curriculum 0.7",
    "focus": "--rounds 3 --focus",
    "group-2": "--group 2",
    "clean": "--dpo.clean",
    "plain": "--dpo.beta 0.1 --dpo.nll 0 --dpo.until end",
    "no-nll": "--dpo.nll 0",
    "kto": "--loss kto",
    "rounds-rft": "--rounds 3 --learn rft",
    "beta-0.3": "--dpo.beta 0.3",
}
ALONE = ("demos-1", "demos-20", "selfplay")  # begin in another way than BASE does


def flags(arm: str, seed: int, runs: Path = RUNS) -> list[str]:
    """A row's flags, as `train.py loop` takes them."""
    out = runs / f"seed-{seed}"
    start = [] if arm in (BASE, *ALONE) else ["--start", str(out / BASE)]
    return ["--config", "configs/study.toml", *GRID[arm].split(), "--seed", str(seed),
            "--out", str(out / arm), *start]


def outcome(episodes: list[Episode], instances: int) -> dict:
    """Which instances were solved, and how: all that the table needs, in one order for every agent."""
    turns = [turn for episode in episodes for turn in episode.turns]
    solved: dict[str, str] = {}
    for episode in episodes:
        solved[episode.task] = solved.get(episode.task, "") + str(int(episode.solved))
    if short := [task for task, verdicts in solved.items() if len(verdicts) != instances]:
        raise ValueError(f"the browser gave up an episode of {short[0]}: run it again")
    return {"solved": solved, "turns": len(turns), "usable": sum(turn.error is None for turn in turns)}


def evaluated(config: LoopCommand, adapter: Path, name: str, **changes) -> dict:
    """Held-out episodes of one policy, on the tasks it was trained on and, greedy, on others."""
    def play(tasks: str, episodes: int, folder: str) -> dict:
        command = EvaluateCommand(model=config.model, tasks=tasks, episodes=episodes, seed=config.seed,
                                  out=config.out / folder, machine=config.machine, **changes)
        return outcome(play_held_out(command, name, adapter), episodes)

    demo = play(config.tasks, config.episodes, "evaluation")
    return {"demo": demo} if changes else {"demo": demo, "unseen": play(UNSEEN, 10, "unseen")}


def run(arm: str, seed: int, runs: Path = RUNS) -> list[dict]:
    """One row with one seed: its line; of a row that begins by itself also those of its first policy.

    The others begin with that seed's BASE, which is made first where `runs` does not hold it.
    """
    if arm not in (BASE, *ALONE) and not (runs / f"seed-{seed}" / BASE / "result.json").is_file():
        loop(parse(LoopCommand, flags(BASE, seed, runs), "study.py", ""))
    config = parse(LoopCommand, flags(arm, seed, runs), "study.py", "")
    result = loop(config)
    about = {"seed": seed, "date": date.today().isoformat(), "threads": torch.get_num_threads(),
             "versions": {name: version(name) for name in ("torch", "playwright", "miniwob", "tokenizers")},
             "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores"}
    adapter = config.out / f"round-{result['kept_round']}" / config.learn / "adapter"
    line = {"arm": arm, "command": f"train.py loop {' '.join(flags(arm, seed))}", **about,
            **evaluated(config, adapter, config.learn), "validation": result["validation"],
            "kept_round": result["kept_round"], "seconds": result["seconds"],
            "config": json.loads(json.dumps(asdict(config), default=str))}
    if arm not in (BASE, *ALONE):
        return [line]
    first = config.out / "sft" / "adapter"
    lines = [line, {"arm": "sft" if arm == BASE else f"sft-{arm}", **about, "command": line["command"],
                    **evaluated(config, first, "sft")}]
    if arm == BASE:
        best = replace(config, out=config.out / "best")
        tries = (f"evaluate.py --best-of {BEST_OF} --temperature 1 --episodes {config.episodes} "
                 f"--seed {seed} --adapters sft={first} --out {best.out}")
        lines.append({"arm": "sft-best", "command": tries, **about,
                      **evaluated(best, first, "sft", best_of=BEST_OF, temperature=1.0)})
    return lines


def lines() -> list[dict]:
    """All that was run."""
    return [json.loads(line) for line in LINES.read_text().splitlines()] if LINES.is_file() else []


def write(found: list[dict]) -> None:
    """Add lines, all at once; another process may do the same."""
    with open(LINES, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("".join(json.dumps(line) + "\n" for line in found))
        file.flush()
        os.fsync(file.fileno())


def folder(resume: bool, within: Path = AGAIN) -> Path:
    """Where a call of `again` works: a new folder or, to resume, the last one if it was not finished."""
    last = max((int(path.name) for path in within.glob("*") if path.name.isdigit()), default=0)
    if resume and (not last or (within / str(last) / "done").is_file()):
        raise ValueError(f"no call of `again` in {within} waits to go on: leave out --resume")
    runs = within / str(last if resume else last + 1)
    runs.mkdir(parents=True, exist_ok=resume)
    return runs


def again(arm: str, seed: int, runs: Path) -> None:
    """A row anew in `runs`, beside what was recorded; nothing is recorded."""
    from study_numbers import studied
    from study_rows import made_anew
    for line in run(arm, seed, runs):
        print("\n".join(made_anew(studied(lines()), line)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table", "again"))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--arms", default=",".join(GRID))
    parser.add_argument("--resume", action="store_true", help="again: go on with a call that was killed")
    options = parser.parse_args()
    if unknown := set(options.arms.split(",")) - set(GRID):
        parser.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(GRID)}")
    if not {*options.seeds.split(",")} <= {str(seed) for seed in range(1, 11)}:
        parser.error(f"--seeds takes some of 1 to 10, as in 1,2,3, got {options.seeds}")
    os.chdir(ROOT)
    if options.what == "table":
        from study_table import write_table
        write_table(lines())
        return
    torch.set_num_threads(1)
    asked = [(arm, int(seed)) for arm in options.arms.split(",") for seed in options.seeds.split(",")]
    if options.what == "again":
        try:
            runs = folder(options.resume)
        except ValueError as error:
            parser.error(str(error))
        print(f"in {runs}, {'from where it stopped' if options.resume else 'from nothing'}", flush=True)
        for arm, seed in asked:
            again(arm, seed, runs)
        (runs / "done").touch()
        return
    for arm, seed in asked:
        if not any((line["arm"], line["seed"]) == (arm, seed) for line in lines()):
            print(f"==== {arm}, seed {seed}", flush=True)
            try:
                write(run(arm, seed))
            except ValueError as error:  # nothing to learn, say: the other rows do not depend on it
                print(f"{arm}, seed {seed}, is left out: {error}", flush=True)


if __name__ == "__main__":
    main()
