"""Whole episodes, thirds of them, or single steps: pairs of three sizes from one exploration.

    python benchmarks/study/credit.py run --seeds 1        every row with one seed
    torchrun --nproc-per-node 2 benchmarks/study/credit.py run --seeds 1     the same by two processes
    python benchmarks/study/learners.py table              docs/learners.md, which has these rows, too

The agent that ships plays tasks whose golden episodes have three steps and more: each instance from its
beginning and, as ETO explores, from its golden steps on, in turn. All rows of a seed are trained from that
agent on this one file, each on the pairs that it can make of it. `run` appends a line to
`results/credit.jsonl` for each finished row and goes on where it stopped.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from minidpo.config import DPO, CollectCommand, DPOCommand, EvaluateCommand  # noqa: E402
from minidpo.learning.schedule import done_marker  # noqa: E402

from benchmarks.records import RESULTS  # noqa: E402
from benchmarks.study.rates import Study, compared, studied, success  # noqa: E402
from benchmarks.study.rows import bullets, gain, of_seeds, paragraph, rate, table, verdicts  # noqa: E402
from benchmarks.study.run import (
    asked_of,
    outcome,
    parser_of,
    played_with,
    recorded_lines,
    run_missing,
)
from minidpo.acting.collect import collect  # noqa: E402
from minidpo.learning.dpo import dpo  # noqa: E402
from minidpo.learning.training_run import adapter_sha256  # noqa: E402
from minidpo.memory.machine import Machine  # noqa: E402
from minidpo.model.checkpoint import MINIWOB  # noqa: E402
from minidpo.results.evaluate import play_held_out  # noqa: E402
from minidpo.system import command_line, processes  # noqa: E402
from minidpo.system.files import write_text  # noqa: E402

LINES, RUNS = RESULTS / "credit.jsonl", Path("runs/credit")
TASKS = (
    "email-inbox-forward-nl",
    "email-inbox-forward-nl-turk",
    "read-table-2",
    "sign-agreement",
    "text-editor",
    "use-spinner",
)
START, ROWS = (
    "start",
    {  # a row's pairs, where they are cut, and what it is
        "whole": ("expert", "end", "a golden episode over a failure"),
        "thirds": ("segments", "end", "and golden thirds over what was done in place of each"),
        "steps": (
            "stepwise",
            "end",
            "a golden step, or one that led to a solution, over one that did not",
        ),
        "whole-cut": (
            "expert",
            "token",
            "as `whole`, the failure cut behind its first token that differs",
        ),
    },
)
LEARNING = DPO(steps=12, batch=16, lr=3e-4, warmup=3, beta=1.0, nll=5.0)
INSTANCES, GROUP, EPISODES = 10, 6, 20  # explored a task, episodes of each; held out a task
MACHINE = Machine(dtype="bfloat16", pages=32, page_tokens=4096)
FIRST = 600  # of the explored instances: those before it were explored for the agent that ships
WHERE = {"greedy": "held-out instances, greedily"}


def folder_of(seed: int) -> Path:
    """Of the runs from the agent that ships now, by its weights."""
    return RUNS / f"{adapter_sha256(Path(MINIWOB))[-1][:8]}-seed-{seed}"


def explored(seed: int) -> tuple[Path, Path]:
    """The files of one seed that all rows learn from: rollouts from golden steps on, and golden episodes."""
    out = folder_of(seed)
    agent = CollectCommand(
        "smollm2",
        seed=seed,
        machine=MACHINE,
        adapter=Path(MINIWOB),
        tasks=",".join(TASKS),
        instances=INSTANCES,
        first=FIRST + 10_000 * (seed - 1),
        group=GROUP,
        golden=out / "golden.jsonl",
        golden_steps="every",
        out=out / "rollouts.jsonl",
    )
    if not (
        complete := done_marker(agent.out)
    ).is_file():  # then it is as it is, whatever a browser gave up
        collect(
            replace(
                agent,
                policy="expert",
                adapter=None,
                golden=None,
                golden_steps="drawn",
                group=1,
                out=agent.golden,
            )
        )
        collect(agent)
        processes.on_rank_0(write_text, complete, "complete\n")
    return agent.out, agent.golden


def run(arm: str, seed: int) -> list[dict]:
    """Train a row, unless it is START, and play it. Returns one line. Raises ValueError, before it trains, if
    the rows on record began with another agent."""
    out, adapter, about = folder_of(seed), Path(MINIWOB), played_with(seed)
    about |= {"processes": processes.world_size(), "start": adapter_sha256(adapter)}
    if others := [
        line["start"][-1] for line in recorded_lines(LINES) if line["start"] != about["start"]
    ]:
        raise ValueError(
            f"{MINIWOB} is not the agent that the rows of {LINES} began with: bring that one "
            f"back (weights {others[0][:8]}; `git log {MINIWOB}`), or delete these lines"
        )
    if arm != START:
        rollouts, golden = explored(seed)
        pairs, until, _ = ROWS[arm]
        dpo(
            DPOCommand(
                "smollm2",
                seed=seed,
                machine=MACHINE,
                adapter=adapter,
                data=(rollouts,),
                golden=golden,
                out=out / arm,
                dpo=replace(LEARNING, pairs=pairs, until=until),
            )
        )
        adapter = out / arm / "adapter"
        about["pairs"] = len((out / arm / "pairs.jsonl").read_text().splitlines())
    command = EvaluateCommand(
        "smollm2",
        seed=seed,
        machine=MACHINE,
        tasks=",".join(TASKS),
        episodes=EPISODES,
        out=out / "evaluation",
    )
    played = play_held_out(command, arm, adapter)
    return [{"arm": arm, **about, "greedy": outcome(played, list(TASKS), EPISODES)}]


def document(number: int) -> list[str]:
    """The section of docs/learners.md with this number, if the agent that all begin with is on record."""
    study: Study = studied(lines := recorded_lines(LINES))
    if START not in study:
        return []
    if len({str(line["start"]) for line in lines}) > 1:
        raise ValueError(
            f"{LINES}: its rows began with different agents (`start`): delete the lines of one"
        )
    weights = str(next(iter(study[START].values()))["start"][-1])[:8]
    about = f"""`benchmarks/study/credit.py`: the agent that shipped when it ran (`minidpo/miniwob`, weights
        {weights}) plays {INSTANCES} instances of each of {len(TASKS)} tasks whose golden episodes have three
        steps and more ({", ".join(TASKS)}), {GROUP} times each. The attempts start in turn at the beginning
        and behind each golden step but the last, then at the beginning again. `whole` uses the attempts from
        the beginning, `thirds` those that start where a third starts, too, `steps` all. All rows are trained
        from this agent on that one file, {LEARNING.steps} steps of {LEARNING.batch} pairs,
        {LEARNING.pairs_per_instance} of an instance at most, at {LEARNING.lr:g}, beta {LEARNING.beta:g}, NLL
        {LEARNING.nll:g}; only the pairs of `whole-cut` are cut. Nothing was tuned for a row. Evaluation:
        {EPISODES} held-out instances of each task. `start` is one agent, played once a seed, and comparisons
        with it count it that often. Played on {", ".join(sorted({line["date"] for line in lines}))} by
        {max(line["processes"] for line in lines)} processes of one thread."""
    head = ["row", "pairs", "number", "seeds", "greedy, %", "against the start", "against `whole`"]
    ran, rows = [arm for arm in ROWS if arm in study], []
    comparisons = ((START, ran), ("whole", [arm for arm in ran if arm != "whole"]))
    for arm in (START, *ran):
        gains = [
            gain(compared(study, before, arm, "greedy") if arm in arms else None)
            for before, arms in comparisons
        ]
        what = "that agent" if arm == START else ROWS[arm][2]
        greedy = success(study, arm, "greedy")
        if arm == START:  # no training: it is one agent, which was played once a seed
            greedy = greedy._replace(low=None, high=None)
        rows.append(
            [f"`{arm}`", what, counted(study, arm), of_seeds(study, arm), rate(greedy), *gains]
        )
    said = [
        sentence
        for before, arms in comparisons
        for sentence in verdicts(study, before, arms, "greedy", WHERE)
    ]
    said += [
        f"- Not run: `{arm}` ({what})." for arm, (_, _, what) in ROWS.items() if arm not in study
    ]
    return [
        f"## {number}. Whole episodes, thirds or steps, from the same rollouts",
        paragraph(about),
        table(head, rows),
        bullets(said),
    ]


def counted(study: Study, arm: str) -> str:
    """How many pairs a row was given, of all seeds."""
    return ", ".join(str(line["pairs"]) for line in study[arm].values()) if arm in ROWS else "-"


def main() -> None:
    parser = parser_of(__doc__, ("run",), (START, *ROWS))
    asked = asked_of(parser, parser.parse_args(), (START, *ROWS))
    os.chdir(ROOT)
    torch.set_num_threads(1)
    run_missing(asked, run, LINES)


if __name__ == "__main__":
    command_line.main(lambda _: main())
