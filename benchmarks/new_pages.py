"""How many held-out instances of MiniWoB++ show a page that training had, and success on all others.

    python benchmarks/new_pages.py --played WORK/whole-1/held-out/NAME.jsonl --data FILE FILE ...

played: held-out episodes of an agent of `benchmarks/miniwob.py run --parts whole`, which say what page an
instance shows; data: the episodes that the agents learned from. The verdicts are those of the recorded line
(`results/miniwob.jsonl`), so agents count whose episodes are gone. A page counts with its instruction.
"""

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.miniwob import INSTANCES, NEW_PAGES, SUITE_NAMES, difference
from benchmarks.records import RESULTS, record
from envs.miniwob.tasks import resolve
from minidpo.data.episodes import read, read_all


def counted(
    pages: dict[str, list],
    trained_on: set,
    agents: dict[str, dict[str, str]],
    tasks: tuple[str, ...],
    count: int,
) -> dict[str, float]:
    """Instances, pages that differ, and the agents' success in per cent on instances of new pages and of
    those that training had; the last agent against the first (SFT) on new ones."""
    shown = {task: pages[task][:count] for task in tasks}
    figures: dict[str, float] = {
        "n": count * len(tasks),
        "pages": len(set().union(*shown.values())),
    }
    for name, wanted in (("new", False), ("known", True)):
        here = {
            agent: {
                task: "".join(
                    verdict
                    for verdict, found in zip(verdicts[task], shown[task])
                    if (found in trained_on) == wanted
                )
                for task in tasks
            }
            for agent, verdicts in agents.items()
        }
        rates = {agent: "".join(verdicts.values()) for agent, verdicts in here.items()}
        if not next(iter(rates.values())):
            raise SystemExit(
                f"no instance shows a page that is {name} to training: nothing to compare"
            )
        gain = difference(*(here[[*here][place]] for place in (0, -1)), tasks, count)
        figures |= {
            f"{name}_n": len(next(iter(rates.values()))),
            f"{name}_won": gain["won"],
            f"{name}_lost": gain["lost"],
            f"{name}_p_value": gain["p"],
        }
        figures |= {
            f"{name}_{agent}": 100 * text.count("1") / len(text) for agent, text in rates.items()
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--played", type=Path, required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    args = parser.parse_args()
    lines = [json.loads(line) for line in (RESULTS / "miniwob.jsonl").read_text().splitlines()]
    agents = next(
        (line["agents"] for line in lines if line["part"] == "whole" and line["seed"] == 1), None
    )
    if agents is None:
        raise SystemExit(
            f"{RESULTS / 'miniwob.jsonl'} has no line of the part whole, seed 1: run it first"
        )
    pages: dict[str, list] = {}
    for episode in sorted((e for e in read(args.played) if e.index == 0), key=lambda e: e.seed):
        pages.setdefault(episode.task, []).append(episode.first_prompt)
    known = read_all(args.data)
    trained_on = {episode.first_prompt for episode in known}
    figures: dict[str, float] = {"training_episodes": len(known)}
    for suite, name in SUITE_NAMES:
        found = counted(pages, trained_on, agents, resolve(suite), INSTANCES[suite])
        figures |= {f"{name}_{key}": value for key, value in found.items()}
    record(NEW_PAGES, figures, {"miniwob": version("miniwob")})
    print("\n".join(f"{name:28} {value:,.6g}" for name, value in sorted(figures.items())))


if __name__ == "__main__":
    main()
