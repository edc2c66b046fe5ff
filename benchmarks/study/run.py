"""What helps an agent that only knows solved or not solved: a grid of loops on the shipped model, on a CPU.

    python benchmarks/study/run.py run --seeds 1              all rows with one seed
    python benchmarks/study/run.py run --arms rft,kto         some rows, all three seeds
    python benchmarks/study/run.py table                      write docs/results.md and results/study.json
    python benchmarks/study/run.py again --arms kto --seeds 2 make a row anew and print it beside the record

`run` appends a line to `results/study.jsonl` for each finished run; started again, it goes on where it
stopped. Runs of one seed share what they have in common (SFT, the first exploration). Different seeds may run
side by side, each in a process of its own. Every run uses one thread, so no number depends on the number of
cores.

`again` works in a new folder, so everything it prints was made by the present code. Its rows share one `dpo`
a seed. `--resume` goes on with the last call if that was killed, with the files that it had made by then:
after a change of the code, start afresh without it.
"""

import argparse
import fcntl
import json
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from minidpo.config import EvaluateCommand, LoopCommand  # noqa: E402
from minidpo.loop import loop  # noqa: E402

from benchmarks.records import verdicts  # noqa: E402
from benchmarks.study.document import write_document  # noqa: E402
from benchmarks.study.grid import ALONE, BASE, BEST_OF, GRID, RUNS, UNSEEN  # noqa: E402
from benchmarks.study.rates import studied  # noqa: E402
from benchmarks.study.rows import made_anew  # noqa: E402
from envs.miniwob.tasks import resolve  # noqa: E402
from minidpo.data.episodes import Episode  # noqa: E402
from minidpo.results.evaluate import play_held_out  # noqa: E402
from minidpo.results.success import machine_name  # noqa: E402
from minidpo.system import command_line, processes  # noqa: E402
from minidpo.system.command_line import parse  # noqa: E402
from minidpo.system.files import as_json  # noqa: E402
from minidpo.system.run_folder import changed_settings  # noqa: E402

LINES = ROOT / "benchmarks" / "results" / "study.jsonl"
AGAIN = Path("runs/study-again")


def flags(arm: str, seed: int, runs: Path = RUNS) -> list[str]:
    """A row's flags, as `train.py loop` takes them."""
    out = runs / f"seed-{seed}"
    start = [] if arm in (BASE, *ALONE) else ["--start", str(out / BASE)]
    return [
        "--config",
        "configs/study.toml",
        *GRID[arm].split(),
        "--seed",
        str(seed),
        "--out",
        str(out / arm),
        *start,
    ]


def outcome(episodes: list[Episode], tasks: list[str], instances: int) -> dict:
    """What the tables need of an evaluation: verdicts of each task as a string of 0 and 1; turns.

    Instances stand in the same order for every agent. Raises ValueError if a task lacks an instance.
    """
    turns = [turn for episode in episodes for turn in episode.turns]
    return {
        "solved": verdicts(episodes, dict.fromkeys(tasks, instances)),
        "turns": len(turns),
        "usable": sum(turn.error is None for turn in turns),
    }


def evaluate_policy(config: LoopCommand, adapter: Path, name: str, **changes) -> dict:
    """What a policy solves of held-out instances of its own tasks and, if it plays greedily, of UNSEEN.

    changes: settings of EvaluateCommand other than the greedy evaluation's; with any, UNSEEN is left out.
    """

    def play(tasks: str, episodes: int, folder: str) -> dict:
        command = EvaluateCommand(
            model=config.model,
            tasks=tasks,
            episodes=episodes,
            seed=config.seed,
            out=config.out / folder,
            machine=config.machine,
            **changes,
        )
        return outcome(play_held_out(command, name, adapter), resolve(tasks), episodes)

    demo = play(config.tasks, config.episodes, "evaluation")
    return {"demo": demo} if changes else {"demo": demo, "unseen": play(UNSEEN, 10, "unseen")}


def played_with(seed: int) -> dict:
    """What a line tells of its run beside the results."""
    return {
        "seed": seed,
        "date": date.today().isoformat(),
        "threads": torch.get_num_threads(),
        "versions": {
            name: version(name) for name in ("torch", "playwright", "miniwob", "tokenizers")
        },
        "machine": machine_name(),
    }


def run(arm: str, seed: int, runs: Path = RUNS) -> list[dict]:
    """Play one row with one seed and return its line.

    A row that begins by itself (BASE and ALONE) also returns the lines of its first policy. Every other row
    begins with the files of that seed's BASE, which is made first if `runs` does not hold it.
    """
    config = parse(LoopCommand, flags(arm, seed, runs), "run.py", "")
    if runs == RUNS:
        refuse_mixed(arm, config)
    if arm not in (BASE, *ALONE) and not (runs / f"seed-{seed}" / BASE / "result.json").is_file():
        loop(parse(LoopCommand, flags(BASE, seed, runs), "run.py", ""))
    result, about = loop(config), played_with(seed)
    adapter = config.out / f"round-{result['kept_round']}" / config.learn / "adapter"
    line = {
        "arm": arm,
        "command": f"train.py loop {' '.join(flags(arm, seed))}",
        **about,
        **evaluate_policy(config, adapter, config.learn),
        "validation": result["validation"],
        "kept_round": result["kept_round"],
        "seconds": result["seconds"],
        "config": as_json(asdict(config)),
    }
    if arm not in (BASE, *ALONE):
        return [line]
    first = config.out / "sft" / "adapter"
    lines = [
        line,
        {
            "arm": "sft" if arm == BASE else f"sft-{arm}",
            **about,
            "command": line["command"],
            **evaluate_policy(config, first, "sft"),
        },
    ]
    if arm == BASE:
        best = replace(config, out=config.out / "best")
        tries = (
            f"evaluate.py --best-of {BEST_OF} --temperature 1 --episodes {config.episodes} "
            f"--seed {seed} --adapters sft={first} --out {best.out}"
        )
        lines.append(
            {
                "arm": "sft-best",
                "command": tries,
                **about,
                **evaluate_policy(best, first, "sft", best_of=BEST_OF, temperature=1.0),
            }
        )
    return lines


def recorded_lines(record: Path | None = None) -> list[dict]:
    """One line for each run on record."""
    record = record or LINES
    return (
        [json.loads(line) for line in record.read_text().splitlines()] if record.is_file() else []
    )


def append_lines(lines: list[dict], record: Path | None = None) -> None:
    """Append lines to the record at once, under a lock, because other processes may append too."""
    with open(record or LINES, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("".join(json.dumps(line) + "\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())


def refuse_mixed(arm: str, config: LoopCommand, record: Path | None = None) -> None:
    """Raise ValueError if the row is on record with other settings: one row's seeds would not be alike."""
    now, defaults = as_json(asdict(config)), as_json(asdict(LoopCommand()))
    for line in recorded_lines(record):
        if line["arm"] == arm and (
            changed := changed_settings(line["config"] | {"seed": config.seed}, now, defaults)
        ):
            raise ValueError(
                f"it is on record with other settings ({changed}): restore these, or delete its "
                f"lines from {record or LINES}"
            )


def folder_of_call(resume: bool, within: Path = AGAIN) -> Path:
    """The folder in which a call of `again` works: a new one or, to resume, the last if it is not finished.

    Raises ValueError if there is nothing to resume.
    """
    last = max((int(path.name) for path in within.glob("*") if path.name.isdigit()), default=0)
    if resume and (not last or (within / str(last) / "done").is_file()):
        raise ValueError(f"no call of `again` in {within} waits to go on: leave out --resume")
    runs = within / str(last if resume else last + 1)
    runs.mkdir(parents=True, exist_ok=resume)
    return runs


def again(arm: str, seed: int, runs: Path) -> None:
    """Make a row anew in `runs` and print it beside the recorded one; the record stays as it is."""
    for line in run(arm, seed, runs):
        print("\n".join(made_anew(studied(recorded_lines()), line)), flush=True)


def run_missing(
    asked: list[tuple[str, int]], play: Callable[[str, int], list[dict]], record: Path | None = None
) -> None:
    """Play the rows and seeds that are not on record, and append their lines to it. Exits with 1 if one was
    left out."""
    left_out = []
    for arm, seed in asked:
        if not any((line["arm"], line["seed"]) == (arm, seed) for line in recorded_lines(record)):
            print(f"==== {arm}, seed {seed}", flush=True)
            try:
                processes.on_rank_0(append_lines, play(arm, seed), record)
            except (
                ValueError
            ) as error:  # for example nothing to learn; other rows do not depend on it
                print(f"{arm}, seed {seed}, is left out: {error}", flush=True)
                left_out.append((arm, seed))
    if left_out:
        sys.exit(1)


def parser_of(
    description: str, what: tuple[str, ...], rows: Collection[str]
) -> argparse.ArgumentParser:
    """A parser of what to do, of seeds, and of some of the rows."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=what)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--arms", default=",".join(rows))
    return parser


def asked_of(
    parser: argparse.ArgumentParser, options: argparse.Namespace, rows: Collection[str]
) -> list[tuple[str, int]]:
    """The rows that are asked for, each with every seed. Ends the program, with one line, on unknown ones."""
    arms, seeds = options.arms.split(","), options.seeds.split(",")
    if unknown := set(arms) - set(rows):
        parser.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(rows)}")
    if not {*seeds} <= {str(seed) for seed in range(1, 11)}:
        parser.error(f"--seeds takes some of 1 to 10, as in 1,2,3, got {options.seeds}")
    return [(arm, int(seed)) for arm in arms for seed in seeds]


def main() -> None:
    parser = parser_of(__doc__, ("run", "table", "again"), GRID)
    parser.add_argument(
        "--resume", action="store_true", help="again: go on with a call that was killed"
    )
    options = parser.parse_args()
    asked = asked_of(parser, options, GRID)
    os.chdir(ROOT)
    if options.resume and options.what != "again":
        parser.error("--resume goes with again; run goes on where it stopped by itself")
    if options.what == "table":
        write_document(recorded_lines())
        return
    torch.set_num_threads(1)
    if options.what == "run":
        run_missing(asked, run)
        return
    try:
        runs = folder_of_call(options.resume)
    except ValueError as error:
        parser.error(str(error))
    print(f"in {runs}, {'from where it stopped' if options.resume else 'from nothing'}", flush=True)
    for arm, seed in asked:
        again(arm, seed, runs)
    (runs / "done").touch()


if __name__ == "__main__":
    command_line.main(lambda _: main())
