"""How many held-out instances of MiniWoB++ show a page that training had, and success on all others.

    python benchmarks/new_pages.py --played WORK/whole-1/held-out/NAME.jsonl --data FILE FILE ...

played: held-out episodes of an agent of `benchmarks/miniwob.py run --parts whole`, which say what page an
instance shows; data: the episodes that the agents learned from. The verdicts are those of the recorded line
(`results/miniwob.jsonl`), so agents count whose episodes are gone. A page is a task's, with its instruction.
"""

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.records import RESULTS, record  # noqa: E402
from envs.miniwob.tasks import resolve  # noqa: E402
from minidpo.data.episodes import read, read_all  # noqa: E402
from minidpo.results.success import mcnemar_exact, page  # noqa: E402

LISTS = {"all125": ("all", 10), "webgum56": ("webgum-56", 25)}  # tasks, instances of each


def counted(pages: dict[str, list], trained_on: set, agents: dict[str, dict[str, str]],
            tasks: tuple[str, ...], count: int) -> dict[str, float]:
    """Instances, pages that differ, and the agents' success in per cent on instances of new pages and of
    those that training had; the last agent against the first (SFT) on new ones."""
    shown = [(task, n, pages[task][n]) for task in tasks for n in range(count)]
    figures: dict[str, float] = {"n": len(shown), "pages": len({found for *_, found in shown})}
    for name, wanted in (("new", False), ("known", True)):
        here = [(task, n) for task, n, found in shown if (found in trained_on) == wanted]
        solved = {agent: [verdicts[task][n] == "1" for task, n in here] for agent, verdicts in agents.items()}
        first, last = list(solved.values())[0], list(solved.values())[-1]
        won = sum(b and not a for a, b in zip(first, last))
        lost = sum(a and not b for a, b in zip(first, last))
        figures |= {f"{name}_n": len(here), f"{name}_won": won, f"{name}_lost": lost,
                    f"{name}_p_value": mcnemar_exact(lost, won)}
        figures |= {f"{name}_{agent}": 100 * sum(each) / len(here) for agent, each in solved.items()}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--played", type=Path, required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    args = parser.parse_args()
    lines = [json.loads(line) for line in (RESULTS / "miniwob.jsonl").read_text().splitlines()]
    agents = next(line["agents"] for line in lines if line["part"] == "whole" and line["seed"] == 1)
    pages: dict[str, list] = {}
    for episode in sorted((e for e in read(args.played) if e.index == 0), key=lambda e: e.seed):
        pages.setdefault(episode.task, []).append(page(episode))
    known = read_all(args.data)
    trained_on = {page(episode) for episode in known}
    figures: dict[str, float] = {"training_episodes": len(known)}
    for name, (tasks, count) in LISTS.items():
        found = counted(pages, trained_on, agents, resolve(tasks), count)
        figures |= {f"{name}_{key}": value for key, value in found.items()}
    record(RESULTS / "miniwob_pages.json", figures, {"miniwob": version("miniwob")})
    print("\n".join(f"{name:28} {value:,.6g}" for name, value in sorted(figures.items())))


if __name__ == "__main__":
    main()
