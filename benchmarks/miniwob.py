"""All of MiniWoB++ with one small model: five demonstrations a task, then what it explored.

    python benchmarks/miniwob.py run                        every part with seed 1
    python benchmarks/miniwob.py run --parts unseen-1 --seed 2
    python benchmarks/miniwob.py run --flags "--sft.steps 146 --rounds 1 --no-focus"
    python benchmarks/miniwob.py run --parts whole --agent second=FOLDER --after averaged --how "ETO, then the
                       mean of the weights before and after" --learned "verdicts, 796 golden episodes"
                       an adapter that was trained elsewhere plays beside those of the part's line, with its
                       place among them and what it learned from. `--agent sft=FOLDER` begins a new line
    python benchmarks/miniwob.py run --parts whole --agent second=FOLDER --sampled 4
                       an agent that has played greedily plays again at temperature 1, four instances a task
    python benchmarks/miniwob.py ship --agent second=FOLDER    this adapter becomes minidpo/miniwob. Ship it
                       before it plays: its weights are rounded
    python benchmarks/miniwob.py table             results/miniwob.json and docs/miniwob.md of what has run

    whole       `train.py loop --config configs/miniwob.toml`, on the tasks that have a scripted expert. Then
                SFT (`sft`) and the round that validation chose (`rounds`) play all 125 tasks greedily: 10
                held-out instances of each, 25 of those on webgum-56
    unseen-K    the same loop on three quarters of these tasks; both agents play the rest, 10 instances each.
                Siblings (`families`) lie on the same side; K = 1, 2, 3 hold out different families

A finished part is a line in results/miniwob.jsonl. In results/miniwob.json the agent that stands last in a
line is `trained`, too, and `gain_points` and `p_value` are its own over SFT. `run` goes on where it was
stopped. Of several seeds those count there that end with the same agent as the first. On two cores two
processes of one thread each play faster than one of two:

    torchrun --nproc-per-node 2 benchmarks/miniwob.py run
"""

import argparse
import fcntl
import json
import math
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from minidpo.config import POLICY_GRADIENTS, CollectCommand, LoopCommand, Sampling  # noqa: E402
from minidpo.loop import Loop, loop  # noqa: E402

from benchmarks.records import RESULTS, record, verdicts  # noqa: E402
from benchmarks.study.rates import student_t  # noqa: E402
from envs.miniwob.experts.by_task import EXPERTS  # noqa: E402
from envs.miniwob.tasks import SUITES, resolve  # noqa: E402
from minidpo.acting.causes import CAUSES, causes  # noqa: E402
from minidpo.acting.collect import make_jobs, play_to_file  # noqa: E402
from minidpo.acting.policies import make_policy  # noqa: E402
from minidpo.data.episodes import Episode, read  # noqa: E402
from minidpo.memory import lora  # noqa: E402
from minidpo.model.checkpoint import MINIWOB, SMOLLM2_HUB  # noqa: E402
from minidpo.results.success import circumstances, mcnemar_exact, wilson  # noqa: E402
from minidpo.system import command_line, processes  # noqa: E402
from minidpo.system.files import file_sha256, read_json, write_text  # noqa: E402
from minidpo.system.run_folder import Clock  # noqa: E402
from minidpo.system.tensors import open_weights  # noqa: E402

CONFIG = ROOT / "configs" / "miniwob.toml"
LINES, DOCUMENT = RESULTS / "miniwob.jsonl", ROOT / "docs" / "miniwob.md"
NEW_PAGES = RESULTS / "miniwob_pages.json"
PARTS = ("whole", "unseen-1", "unseen-2", "unseen-3")
VERSIONS = ("torch", "playwright", "miniwob", "tokenizers")
SFT, ROUNDS = "sft", "rounds"  # the agents that a part makes itself
DEMONSTRATIONS = "5 demonstrations a task"
SUITE_NAMES = (("webgum-56", "webgum56"), ("all", "all125"))
INSTANCES = {"all": 10, "webgum-56": 25}  # held-out instances of each task
FIRST = 25  # of them: on those before it failures have been read, and pages and thoughts mended after them
SIBLINGS = {
    "drag-circle": "drag-shapes",
    "drag-single-shape": "drag-shapes",
    "multi-orderings": "multi-layouts",
    "enter-time": "enter-date",
    "click-shape": "count-shape",
    "identify-shape": "count-shape",
    "text-editor": "highlight-text",
    "simple-algebra": "simple-arithmetic",
    "phone-book": "social-media",
}

ANY_REWARD, OWN_LIST = "solved from any reward above 0; 10 steps", "a list of their own"
# (who, weights, trained on, list, success in per cent, what differs from our rows, source)
PUBLISHED = (
    (
        "WebN-T5-XL",
        "3 B",
        "12,000 demonstrations by people",
        "webgum-56",
        48.4,
        "",
        "WebGUM, table 1",
    ),
    ("LLaMA2", "7 B", "SFT", "webgum-56", 42.8, "", "AutoWebGLM, table 4"),
    ("WebGUM Base, HTML", "0.25 B", "2,800 demonstrations", "webgum-56", 55.7, "", "WebGUM"),
    (
        "WebGUM XL, HTML and picture",
        "3 B",
        "347,000 demonstrations",
        "webgum-56",
        80.3,
        "",
        "WebGUM",
    ),
    ("AutoWebGLM", "6 B", "SFT, DPO, RFT", "webgum-56", 89.3, "", "AutoWebGLM, table 4"),
    (
        "CC-Net, imitation",
        "",
        "2.4 million demonstrations",
        "webgum-56",
        32.0,
        "pixels",
        "WebGUM, table 1",
    ),
    (
        "CC-Net",
        "",
        "2.4 million demonstrations, billions of frames",
        "webgum-56",
        93.5,
        "pixels",
        "WebGUM, table 1",
    ),
    ("GPT-4", "", "zero-shot", "webgum-56", 32.1, "", "AutoWebGLM, table 4"),
    ("random clicks", "", "", "all", 10.7, "solved from 1; 10 steps", "a public re-scoring, 2026"),
    ("GPT-4o-mini", "", "prompted", "all", 56.6, ANY_REWARD, "BrowserGym"),
    ("GPT-4o", "", "prompted", "all", 63.8, ANY_REWARD, "BrowserGym"),
    ("GPT-5", "", "prompted", "all", 71.5, ANY_REWARD, "BrowserGym"),
    (
        "Llama-3.1, SFT",
        "8 B",
        "episodes of a 70 B teacher",
        "30 tasks",
        55.2,
        OWN_LIST,
        "2507.04103",
    ),
    (
        "Llama-3.1, GRPO",
        "8 B",
        "episodes of a 70 B teacher, then verdicts",
        "30 tasks",
        67.2,
        OWN_LIST,
        "2507.04103",
    ),
    (
        "Qwen2.5, RL",
        "7 B",
        "a 72 B teacher, then verdicts",
        "30 tasks",
        65.0,
        OWN_LIST,
        "2507.04103",
    ),
)


def families(tasks: Sequence[str]) -> list[list[str]]:
    """The tasks in families, in their order. Siblings: the first two words of their names agree, or the same
    expert solves them, or SIBLINGS says so.

    >>> families(["click-tab-2-hard", "multi-orderings", "click-tab", "multi-layouts", "click-collapsible-2"])
    [['click-tab-2-hard', 'click-tab', 'click-collapsible-2'], ['multi-orderings', 'multi-layouts']]
    """
    found: list[tuple[set, list[str]]] = []
    for task in tasks:
        words = "-".join(SIBLINGS.get(task, task).split("-")[:2])
        marks, members = {words, EXPERTS.get(task, words)}, [task]
        for other in [family for family in found if family[0] & marks]:
            found.remove(other)
            marks, members = marks | other[0], other[1] + members
        found.append((marks, members))
    return sorted((members for _, members in found), key=lambda family: tasks.index(family[0]))


def split(tasks: Sequence[str], number: int, parts: int = 4) -> tuple[list[str], list[str]]:
    """Tasks to train on and tasks to hold out, by whole families: of `parts` shares the one with this number.

    The families are shuffled once and dealt out, the largest first, each to the smallest share so far. Raises
    ValueError where a share would be empty.
    """
    groups = families(sorted(tasks))
    if len(groups) < parts:
        raise ValueError(f"{len(groups)} families of tasks make no {parts} shares: name more tasks")
    random.Random(0).shuffle(groups)
    shares: list[list[str]] = [[] for _ in range(parts)]
    for group in sorted(groups, key=lambda group: -len(group)):
        min(shares, key=len).extend(group)
    held_out = set(shares[number - 1])
    return [task for task in tasks if task not in held_out], [
        task for task in tasks if task in held_out
    ]


def config_of(part: str, seed: int, work: Path, more: Sequence[str]) -> LoopCommand:
    """What a part trains: the configuration, with more options over it."""
    flags = [
        "--config",
        str(CONFIG),
        "--seed",
        str(seed),
        "--out",
        str(work / f"{part}-{seed}"),
        *more,
    ]
    return command_line.parse(LoopCommand, flags, "miniwob.py", "")


def recipe(config: LoopCommand) -> list:
    """SFT's steps, rounds, and what a round trains, in words: a run by another recipe is another run."""
    options = {
        "dpo": config.dpo,
        "ppo": config.ppo,
        **dict.fromkeys(POLICY_GRADIENTS, config.grpo),
    }.get(config.learn, config.imitation)
    length = f"{options.steps} steps" if options.epochs is None else f"{options.epochs:g} pass(es)"
    return [
        config.sft.steps,
        config.rounds,
        f"{length} of {config.learn.upper()} at {options.lr:g}" + ", averaged" * config.average,
    ]


class Part:
    """A part: the loop that it trains by, and the held-out instances that its agents play."""

    def __init__(self, name: str, seed: int, work: Path, more: Sequence[str] = ()):
        config = config_of(name, seed, work, more)
        if config.adapter:
            raise SystemExit(
                "the part begins with SFT: leave --adapter out of --flags (--agent plays one)"
            )
        self.counts = {task: count for suite, count in INSTANCES.items() for task in SUITES[suite]}
        if name != "whole":
            train, unseen = split(resolve(config.tasks), int(name.rpartition("-")[2]))
            config, self.counts = (
                replace(config, tasks=",".join(train)),
                dict.fromkeys(unseen, INSTANCES["all"]),
            )
        # the loop's own evaluation is as small as can be: what counts is played here
        self.name, self.seed, self.config = name, seed, replace(config, episodes=1, sampled=1)
        self.flags = " ".join(more)
        self.seconds = Clock(config.out / "held-out" / "seconds.json")

    def lines(self) -> list[dict]:
        """Its lines, by whatever recipe, the newest first."""
        return [
            line
            for line in reversed(recorded())
            if (line["part"], line["seed"]) == (self.name, self.seed)
        ]

    def recorded(self) -> dict | None:
        """Its newest line, if it has run."""
        return next(iter(self.lines()), None)

    def done(self) -> bool:
        """Whether it has run to its end by this recipe."""
        line = self.recorded()
        return (
            line is not None
            and ROUNDS in line["agents"]
            and SFT not in line["made"]
            and line["recipe"] == recipe(self.config)
            and line.get("flags", self.flags) == self.flags
        )

    def episodes(
        self,
        line: dict,
        agent: str,
        adapter: Path,
        file: str,
        counts: dict[str, int],
        temperature: float = 0.0,
    ) -> list[Episode]:
        """This agent's episodes on as many held-out instances of each task, played where `file` lacks them."""
        out, config = self.config.out / "held-out" / f"{file}.jsonl", self.config
        policy = make_policy(
            CollectCommand(
                model=config.model,
                adapter=adapter,
                seed=self.seed,
                machine=config.machine,
                sampling=Sampling(temperature),
            )
        )
        jobs = make_jobs(counts, "test", first=line.get("first", 0), group=1)
        self.seconds.time(
            f"held-out {file}", play_to_file, policy, jobs, out, config.machine.page_count(), agent
        )
        keys = {job.key for job in jobs}  # an older line's instances may stand there, too
        return [episode for episode in read(out) if episode.key in keys]

    def play(self, line: dict, agent: str, adapter: Path, file: str) -> dict:
        """The line with this agent on the held-out instances: its verdicts, by task, as strings of 0 and 1,
        the checksum of its weights, the causes of its failures, and the seconds that they took."""
        episodes = self.episodes(line, agent, adapter, file, self.counts)
        return line | {
            "agents": line["agents"] | {agent: verdicts(episodes, self.counts)},
            "weights": line.get("weights", {}) | {agent: file_sha256(adapter / lora.WEIGHTS)},
            "causes": line.get("causes", {}) | {agent: causes(episodes)},
            "seconds": line["seconds"]
            | {f"held-out {agent}": self.seconds.seconds[f"held-out {file}"]},
        }

    def new_line(self) -> dict:
        """Its line, before anybody has played."""
        return {
            "part": self.name,
            "seed": self.seed,
            "first": FIRST,
            "agents": {},
            "made": {},
            "causes": {},
            "seconds": {},
            "trained_on": resolve(self.config.tasks),
            "cores": processes.cores(),
            "recipe": recipe(self.config),
            "flags": self.flags,
            **circumstances(*VERSIONS),
        }

    def run(self) -> Iterator[dict]:
        """Train and play. Its line, with SFT alone as soon as that has played, then with ROUNDS, too."""
        if lost := [agent for line in self.lines() for agent in line["made"]]:
            raise SystemExit(
                f"{LINES}: the line of {self.name}, seed {self.seed}, holds {', '.join(lost)}, "
                "which this run does not train: copy that line elsewhere and delete it"
            )
        stages = Loop(self.config)
        processes.on_rank_0(stages.run.begin)  # from here on the folder refuses other settings
        sft, _ = stages.first_policy()
        line = self.play(self.new_line(), SFT, sft, SFT)
        yield line | {"seconds": Clock(self.config.out / "seconds.json").seconds | line["seconds"]}
        result = loop(self.config)
        line = self.play(line, ROUNDS, self.config.out / "adapter", ROUNDS)
        shown = sum(
            len(read(path)) for path in sorted(self.config.out.glob("round-*/golden.jsonl"))
        )
        yield line | {
            "validation": result["validation"],
            "kept_round": result["kept_round"],
            **({"golden": shown} if shown else {}),
            "seconds": result["seconds"] | line["seconds"],
        }

    def judge(self, agent: str, adapter: Path, made: dict) -> dict:
        """Its line with an agent that was trained elsewhere and plays here. made: the agents that it began
        with (`after`), how it came from there (`how`), what it learned from (`learned`).

        Another agent of that name goes, with those that began with it. SFT begins a new line.
        """
        line = (
            self.new_line() if agent == SFT else without(self.recorded() or self.new_line(), agent)
        )
        if unknown := [f"`{other}`" for other in made["after"] if other not in line["agents"]]:
            raise SystemExit(
                f"{LINES}: {', '.join(unknown)} has not played in {self.name}, seed "
                f"{self.seed}: --after takes some of: {', '.join(line['agents']) or 'none yet'}"
            )
        if gone := [
            other for other in agents_of(self.lines()) if other not in (agent, *line["agents"])
        ]:
            print(
                f"{LINES}: {'once another agent has played, ' * (agent == SFT)}its line will be without "
                f"{', '.join(gone)}, made of what is replaced"
            )
        if agent == SFT:  # the part's own recipe says nothing of agents that were trained elsewhere
            line = {key: value for key, value in line.items() if key not in ("recipe", "flags")}
        line = self.play(
            line, agent, adapter, f"{agent}-{file_sha256(adapter / lora.WEIGHTS)[:12]}"
        )
        made = made | {"adapter": os.path.relpath(adapter, ROOT), **circumstances(*VERSIONS)}
        return line | {"made": line["made"] | {agent: made}}

    def sample(self, agent: str, adapter: Path, count: int) -> dict:
        """Its recorded line with this agent at temperature 1, on `count` instances of each task. It must be
        the one that has played greedily, by the checksum of its weights."""
        line, sha256 = self.recorded() or {}, file_sha256(adapter / lora.WEIGHTS)
        if sha256 != line.get("weights", {}).get(agent):
            raise SystemExit(
                f"{LINES}: {adapter} is not known to be the agent `{agent}` of {self.name}, "
                f"seed {self.seed}, that has played greedily: leave --sampled out to play it so"
            )
        file = f"{agent}-{sha256[:12]}-sampled"
        counts = {task: min(count, most) for task, most in self.counts.items()}
        episodes = self.episodes(line, agent, adapter, file, counts, 1.0)
        return line | {
            "sampled": line.get("sampled", {})
            | {
                agent: {
                    "solved": verdicts(episodes, counts),
                    **circumstances(*VERSIONS),
                    "seconds": self.seconds.seconds[f"held-out {file}"],
                }
            }
        }


def without(line: dict, agent: str) -> dict:
    """A part's line less this agent and all that began with it."""
    gone = {agent}
    while more := {other for other, made in line["made"].items() if gone & {*made["after"]}} - gone:
        gone |= more
    names = gone | {f"held-out {each}" for each in gone}
    by_agent = {"agents", "made", "weights", "causes", "seconds", "sampled"} & line.keys()
    return line | {
        key: {name: each for name, each in line[key].items() if name not in names}
        for key in by_agent
    }


def about(line: dict, agent: str) -> dict:
    """What an agent of a line began with (`after`), how it came from there (`how`), and what it learned from
    beside demonstrations (`learned`)."""
    if agent == SFT:
        return {"after": [], "how": "SFT", "learned": ""}
    if agent in line["made"]:
        return line["made"][agent]
    golden = f", {line['golden']:,} golden episodes" if line.get("golden") else ""
    return {
        "after": [SFT],
        "how": f"{line['recipe'][1]} round(s) of {line['recipe'][2]}",
        "learned": f"verdicts{golden}",
    }


def compared_with(line: dict, agent: str) -> list[str]:
    """The agents of a line to which one of them is compared: those that it began with, and SFT."""
    return [*dict.fromkeys([*about(line, agent)["after"], SFT])] if agent != SFT else []


def recorded() -> list[dict]:
    """The lines of all parts that have run."""
    lines = [json.loads(line) for line in LINES.read_text().splitlines()] if LINES.is_file() else []
    if any("made" not in line for line in lines):
        raise SystemExit(
            f"{LINES}: a line without `made` is of an older form: take this repository's file, "
            "or delete that line"
        )
    return lines


def rate(agent: dict[str, str], tasks: Sequence[str], count: int) -> dict[str, float]:
    """Success in per cent over the first `count` instances of these tasks, with its interval."""
    solved = sum(agent[task][:count].count("1") for task in tasks)
    low, high = wilson(solved, n := count * len(tasks))
    return {"success": 100 * solved / n, "low": 100 * low, "high": 100 * high, "n": n}


def difference(
    before: dict[str, str], after: dict[str, str], tasks: Sequence[str], count: int
) -> dict[str, float]:
    """Instances won and lost from one agent's verdicts to another's, and McNemar's exact p."""
    verdicts = ("".join(agent[task][:count] for task in tasks) for agent in (before, after))
    pairs = list(zip(*verdicts, strict=True))
    won, lost = pairs.count(("0", "1")), pairs.count(("1", "0"))
    return {"won": won, "lost": lost, "p": mcnemar_exact(lost, won)}


def figures_of(lines: Sequence[dict]) -> dict[str, float]:
    """The figures of all parts; of several seeds the mean, but for the p-value, which is the largest. A newer
    SFT whose rounds have not been played stands alone: it is not what the others began with."""
    standing = told(lines)
    whole = [line for line in standing if line["part"] == "whole"]
    alone = [line for line in lines if line["part"] == "whole" and line not in standing]
    last = [line for line in finished(whole) if newest(line) == newest(finished(whole)[0])]
    figures: dict[str, float] = {"seeds": len(last)}
    for suite, name in SUITE_NAMES:
        rows = {
            agent: [line["agents"][agent] for line in whole if agent in line["agents"]]
            for agent in agents_of(whole)
        }
        rows |= {
            "trained": [line["agents"][newest(line)] for line in last],
            "sft_alone": [line["agents"][SFT] for line in alone[-1:]],
        }
        for row, played in rows.items():
            if rates := [rate(agent, SUITES[suite], INSTANCES[suite]) for agent in played]:
                figures |= {
                    f"{name}_{row}{end}": fmean(r[key] for r in rates)
                    for end, key in (("", "success"), ("_low", "low"), ("_high", "high"))
                }
        for agent in agents_of(whole):
            if rates := [row for line in whole if (row := at_1(line, agent, SUITES[suite]))]:
                figures |= {
                    f"{name}_sampled_{agent}{end}": fmean(row[key] for row in rates)
                    for end, key in (
                        ("", "success"),
                        ("_low", "low"),
                        ("_high", "high"),
                        ("_n", "n"),
                        ("_greedy", "greedy"),
                    )
                }
        couples: dict[
            str, list[tuple[dict, dict]]
        ] = {}  # verdicts of the earlier agent and of the later
        for line in finished(whole):
            pairs = {
                f"{agent}_to_{before}_": (before, agent)
                for agent in line["agents"]
                for before in compared_with(line, agent)
            }
            for of, (before, after) in (
                pairs | ({"": (SFT, newest(line))} if line in last else {})
            ).items():
                couples.setdefault(of, []).append((line["agents"][before], line["agents"][after]))
        suite_of = "webgum56_" if suite == "webgum-56" else ""
        for of, agents in couples.items():
            found = over_families(task_gains(agents, SUITES[suite], INSTANCES[suite]))
            figures |= {
                f"{suite_of}{of}{key}": found[key]
                for key in ("gain_points", "gain_low", "gain_high")
            }
            figures[f"{suite_of}{of}p_value"] = max(
                difference(*couple, SUITES[suite], INSTANCES[suite])["p"] for couple in agents
            )
    if unseen := of_unseen(lines):
        figures |= {f"unseen_{key}": value for key, value in unseen_gain(unseen).items()}
    return figures


def agents_of(lines: Sequence[dict]) -> list[str]:
    """The agents of these lines, in the order in which they were made."""
    return [*dict.fromkeys(agent for line in lines for agent in line["agents"])]


def newest(line: dict) -> str:
    """The agent of a line that was made last."""
    return [*line["agents"]][-1]


def at_1(line: dict, agent: str, tasks: Sequence[str]) -> dict[str, float] | None:
    """Success in per cent at temperature 1, with its interval, and greedily on the same instances; None if
    the agent has not played so."""
    if agent not in line.get("sampled", {}):
        return None
    solved = line["sampled"][agent]["solved"]
    count = min(len(solved[task]) for task in tasks)
    return rate(solved, tasks, count) | {
        "greedy": rate(line["agents"][agent], tasks, count)["success"]
    }


def told(lines: Sequence[dict]) -> list[dict]:
    """Those that stand for their part and seed: SFT alone only where none else has played yet."""
    played = {(line["part"], line["seed"]) for line in finished(lines)}
    return [
        line
        for line in lines
        if len(line["agents"]) > 1 or (line["part"], line["seed"]) not in played
    ]


def finished(lines: Sequence[dict]) -> list[dict]:
    """Those in which more than SFT has played."""
    return [line for line in lines if len(line["agents"]) > 1]


def of_unseen(lines: Sequence[dict]) -> list[dict]:
    """Those of tasks never trained on whose rounds have played, too."""
    return [line for line in lines if line["part"] != "whole" and ROUNDS in line["agents"]]


def task_gains(
    couples: Sequence[tuple[dict, dict]], tasks: Sequence[str], count: int
) -> dict[str, float]:
    """Each task's gain in points from one agent's verdicts to another's, on its first `count` instances; the
    mean over couples. A task counts in those that played it."""
    return {
        task: fmean(
            100
            * (after[task][:count].count("1") - before[task][:count].count("1"))
            / len(before[task][:count])
            for before, after in couples
            if task in before
        )
        for task in tasks
    }


def over_families(gains: dict[str, float]) -> dict[str, float]:
    """The mean of the tasks' gains with its 95 % interval over families: those are drawn whole, and the tasks
    of one are alike, as are the instances of a task, which McNemar's test takes for independent."""
    gain, drawn = fmean(gains.values()), families(sorted(gains))
    apart = [sum(gains[task] - gain for task in family) for family in drawn]
    n, half = len(drawn), 100.0  # of one family nothing is known
    if n > 1:
        half = student_t(n - 1) * math.sqrt(n / (n - 1) * sum(a * a for a in apart)) / len(gains)
    return {"gain_points": gain, "gain_low": gain - half, "gain_high": gain + half, "families": n}


def unseen_gain(lines: Sequence[dict]) -> dict[str, float]:
    """SFT and gain on tasks never trained on, over all splits; a task counts once if several seeds played
    it."""
    couples = [(line["agents"][SFT], line["agents"][ROUNDS]) for line in lines]
    tasks = list(dict.fromkeys(task for before, _ in couples for task in before))
    sft = [
        fmean(
            100 * before[task].count("1") / len(before[task])
            for before, _ in couples
            if task in before
        )
        for task in tasks
    ]
    return {
        "sft": fmean(sft),
        **over_families(task_gains(couples, tasks, INSTANCES["all"])),
        "tasks": len(tasks),
        "parts": len(lines),
    }


def document(lines: Sequence[dict], figures: dict[str, float]) -> str:
    """docs/miniwob.md: our rows beside the published ones, tasks never trained on, every task, the cost."""
    whole = [line for line in told(lines) if line["part"] == "whole"]
    text = [HEAD, *of_new_pages(agents_of(whole))]
    if old := [f"{line['part']}, seed {line['seed']}" for line in lines if not line.get("first")]:
        text.append(
            f"The instances of some runs had been played by earlier agents: {'; '.join(old)}. "
            "Failures on some were read on\n2026-11-23, and pages and thoughts mended after them "
            "(`docs/miniwob-failures.md`), so the rates of these runs flatter. All\nothers play "
            "other instances. On these, too, two choices were made with results in view, to average "
            "and\nwhich tasks the last round explores, so the gains from `averaged` on may "
            "flatter.\n"
        )
    if whole:
        text += [our_agents(whole, figures), ladder(whole, figures)]
    if any("_sampled_" in name for name in figures):
        text.append(sampled_section(whole, figures))
    if unseen := of_unseen(lines):
        text.append(unseen_section(unseen, figures))
    if stopped := [
        line for line in whole if SFT in line.get("causes", ())
    ]:  # older lines have none
        text.append(what_stops_it(stopped))
    if whole:
        text += [by_task(whole), cost(lines)]
    return "\n".join(text)


HEAD = """\
# All of MiniWoB++

`python benchmarks/miniwob.py table` writes this page from `benchmarks/results/miniwob.jsonl`.

SmolLM2-135M-Instruct learns from five scripted demonstrations of each task that has an expert (SFT), then in
rounds from what it explored. `python benchmarks/miniwob.py run` does so by `configs/miniwob.toml`, which has
not been run to its end: the agents below but `sft` were made by hand, the last rounds in 60 to 80 minutes
each on two CPU cores with instructions for bfloat16. `python train.py plan --config configs/miniwob.toml`
says what memory it takes. `webgum-56` are the 56 tasks that WebGUM and others report on; a golden episode is
the scripted expert's on a page that the agent explored. An agent plays greedily on held-out instances.
Solved means the page's own reward at its maximum, or from the threshold in `docs/tasks.md`. Step limits
stand there, too. The clock inside the page is off, but for stock-market and drag-cube, whose episodes need
not be the same again. In ascending-numbers the order in which the page holds its lines gives the hidden
numbers away. Tasks without an expert are played as well. `docs/miniwob-failures.md` shows why the worst tasks
failed in an earlier run and with `fifth`, and what was cured.
"""


def of_new_pages(agents: Sequence[str]) -> list[str]:
    """A paragraph: success on pages that training had not, as far as `benchmarks/new_pages.py` counted it."""
    found = read_json(NEW_PAGES)["figures"]
    counted = [agent for agent in agents if f"webgum56_new_{agent}" in found]
    if not counted:
        return []
    n, pages, known, new = (found[f"webgum56_{key}"] for key in ("n", "pages", "known_n", "new_n"))
    on_56, on_all = (
        f"{found[f'{suite}_new_{SFT}']:.1f} % and `{counted[-1]}` "
        f"{found[f'{suite}_new_{counted[-1]}']:.1f} % (p = {found[f'{suite}_new_p_value']:.0e})"
        for suite in ("webgum56", "all125")
    )
    return [
        f"An instance is a seed, and some tasks show one page for many seeds: of the {n:,} of "
        f"`webgum-56` {pages:,} are\ndifferent, as text. {known} show a page that is in the "
        f"{found['training_episodes']:,} training episodes that were at hand (some of\nthe first round "
        f"are lost). On the {new:,} others `{SFT}` solves {on_56};\non the "
        f"{found['all125_new_n']:,} such instances of all 125 tasks `{SFT}` solves {on_all}.\n"
    ]


def our_agents(whole: Sequence[dict], figures: dict[str, float]) -> str:
    """Who our agents are, and what each adds to those that it began with and to SFT."""
    lines = {agent: line for line in whole for agent in line["agents"]}
    rows = [
        "## Our agents",
        "",
        "| agent | began with | and then | learned from |",
        "|---|---|---|---|",
    ]
    for agent, line in lines.items():
        after = ", ".join(f"`{other}`" for other in about(line, agent)["after"]) or "the base"
        rows.append(
            f"| `{agent}` | {after} | {about(line, agent)['how']} | {learned_from(line, agent)} |"
        )
    if by_hand := [f"`{agent}`" for agent, line in lines.items() if agent in line["made"]]:
        rows += ["", f"Made by hand, in steps that `docs/log.md` tells: {', '.join(by_hand)}."]
    if "gain_points" not in figures:
        return "\n".join([*rows, "", "No rounds have been played to their end yet.", ""])
    of_56, of_all = (len(families(SUITES[suite])) for suite, _ in SUITE_NAMES)
    rows += [
        "",
        "Gains in points on the same held-out instances. p is McNemar's exact test, which takes "
        "instances for independent.",
        "Those of one task are not: guess-number shows one page for every "
        "seed, and all its instances change at once. So the",
        "95 % interval is over families of tasks "
        f"({of_all} of all, {of_56} of `webgum-56`): where 0 lies in it, other tasks of this kind",
        "may well show no gain. The two columns have 560 instances in common"
        + ", and all agents are of one training" * (figures["seeds"] == 1)
        + ".",
        "",
        "| agent | adds to | all 125 tasks | `webgum-56` |",
        "|---|---|---|---|",
    ]
    for agent, line in lines.items():
        for before in compared_with(line, agent):
            gains = [
                "{:+.1f} ({:+.1f} to {:+.1f}), p = {:.1g}".format(
                    *(
                        figures[f"{of}{key}"]
                        for key in ("gain_points", "gain_low", "gain_high", "p_value")
                    )
                )
                for of in (f"{agent}_to_{before}_", f"webgum56_{agent}_to_{before}_")
            ]
            rows.append(f"| `{agent}` | `{before}` | {' | '.join(gains)} |")
    return "\n".join(rows) + "\n"


def learned_from(line: dict, agent: str) -> str:
    """What an agent of a line learned from, beside text."""
    return ", ".join(filter(None, (DEMONSTRATIONS, about(line, agent)["learned"])))


def ladder(whole: Sequence[dict], figures: dict[str, float]) -> str:
    """The rows of our agents on both lists, among the published ones."""
    lines = {agent: line for line in whole for agent in line["agents"]}
    rows = [(*row[:4], f"{row[4]:.1f}", "; ".join(filter(None, row[5:]))) for row in PUBLISHED]
    for suite, name in SUITE_NAMES:
        ours = [(agent, learned_from(line, agent), "") for agent, line in lines.items()]
        for agent, how, differs in (
            *ours,
            ("sft_alone", DEMONSTRATIONS, "; newer, its rounds have not been played"),
        ):
            if f"{name}_{agent}" not in figures:
                continue
            seeds = sum(agent in line["agents"] for line in whole) or 1
            success, low, high = (figures[f"{name}_{agent}{end}"] for end in ("", "_low", "_high"))
            rows.append(
                (
                    f"**minidpo, {agent.replace('_', ' ')}**",
                    "0.135 B",
                    how,
                    suite,
                    f"{success:.1f} ({low:.1f} - {high:.1f})",
                    f"n = {INSTANCES[suite] * len(SUITES[suite]):,}, "
                    f"{seeds} seed{'s' * (seeds > 1)}{differs}",
                )
            )
    rows.sort(key=lambda row: (row[3], float(row[4].partition(" ")[0])))
    return "\n".join(
        [
            "## The ladder",
            "",
            "| who | weights | learned from | tasks | success, % | how it differs, source |",
            "|---|---|---|---|---|---|",
            *(f"| {' | '.join(row)} |" for row in rows),
            "",
            "Other people's rows count other instances, some by other rules, as their last column "
            "says; no interval is known\nof them.",
            "",
        ]
    )


def sampled_section(whole: Sequence[dict], figures: dict[str, float]) -> str:
    """Success at temperature 1 beside the greedy one."""
    rows = []
    for suite, name in SUITE_NAMES:
        for agent in agents_of(whole):
            if (of := f"{name}_sampled_{agent}") in figures:
                success, low, high, n, greedy = (
                    figures[of + end] for end in ("", "_low", "_high", "_n", "_greedy")
                )
                rows.append(
                    f"| {agent} | {suite} | {success:.1f} ({low:.1f} - {high:.1f}) | {greedy:.1f} | "
                    f"{n:,.0f} |"
                )
    return (
        "\n".join(
            [
                "## At temperature 1",
                "",
                "The first held-out instances of each task, sampled, and the same ones greedily.",
                "",
                "| agent | tasks | success at temperature 1, % | greedily, % | instances |",
                "|---|---|---|---|---|",
                *rows,
            ]
        )
        + "\n"
    )


def unseen_section(lines: Sequence[dict], figures: dict[str, float]) -> str:
    """What training on some tasks does to others."""
    gain, low, high = (figures[f"unseen_gain_{end}"] for end in ("points", "low", "high"))
    said = "which may be chance" if low <= 0 <= high else "more than chance explains"
    rows = [
        "| run, seed | SFT, and then | learned from | tasks | SFT, % | gain, points |",
        "|---|---|---|---|---|---|",
    ]
    for line in lines:
        found = unseen_gain([line])
        rows.append(
            f"| {line['part']}, {line['seed']} | {line['recipe'][0]} steps, then "
            f"{about(line, ROUNDS)['how']} | {learned_from(line, ROUNDS)} | {found['tasks']} | "
            f"{found['sft']:.1f} | {found['gain_points']:+.1f} ({found['gain_low']:+.1f} to "
            f"{found['gain_high']:+.1f}) |"
        )
    return (
        "## Tasks never trained on\n\n"
        "Trained on three quarters of the tasks, played on the rest, siblings kept together:\n"
        f"{figures['unseen_tasks']:.0f} tasks in {len(lines)} run{'s' * (len(lines) > 1)}. SFT solves "
        f"{figures['unseen_sft']:.1f} %; training on other tasks after it changes this by\n{gain:+.1f} "
        f"points ({low:+.1f} to {high:+.1f}, 95 % interval over "
        f"{figures['unseen_families']:.0f} families of tasks), {said}. The interval does not cover how\n"
        "much trainings differ, nor do all runs have one recipe:\n\n" + "\n".join(rows) + "\n"
    )


def alike(lines: Sequence[dict]) -> list[dict]:
    """The lines in which all agents of the first have played: what is counted by agent is of these."""
    first, *others = finished(lines) or lines
    return [first, *(line for line in others if first["agents"].keys() <= line["agents"].keys())]


def what_stops_it(whole: Sequence[dict]) -> str:
    """How many held-out episodes failed for which cause, by agent."""
    whole = alike(whole)  # or the columns would count the episodes of other runs
    agents = list(whole[0]["agents"])
    counts = [
        sum((Counter(line["causes"].get(agent)) for line in whole), Counter()) for agent in agents
    ]
    rows = [
        f"| {name} | {' | '.join(str(count[name]) if count else '' for count in counts)} | {meaning} |"
        for name, meaning in CAUSES.items()
        if any(count[name] for count in counts)
    ]
    played = sum(len(text) for line in whole for text in line["agents"][SFT].values())
    return (
        "\n".join(
            [
                "## What stops the agent",
                "",
                f"Failed episodes of {played:,} ({INSTANCES['webgum-56']} of each task of `webgum-56`, "
                f"{INSTANCES['all']} of each other), by rule (`minidpo/acting/causes.py`): the last "
                "thing "
                "it did that the task's expert would not have done.",
                "",
                f"| cause | {' | '.join(agents)} | meaning |",
                f"|---|{'---|' * len(agents)}---|",
                *rows,
            ]
        )
        + "\n"
    )


def by_task(whole: Sequence[dict]) -> str:
    """A row a task: success of each agent over all seeds."""
    whole = alike(whole)
    agents = list(whole[0]["agents"])
    rows = [
        "## Every task",
        "",
        "Success in per cent of the instances played (10; 25 on `webgum-56`); "
        "learned: whether the agents were trained on this task.",
        "",
        f"| task | learned | {' | '.join(agents)} |",
        f"|---|---|{'---|' * len(agents)}",
    ]
    for task in SUITES["all"]:
        cells = ["".join(line["agents"][agent][task] for line in whole) for agent in agents]
        rates = [f"{100 * text.count('1') / len(text):.0f}" for text in cells]
        rows.append(
            f"| {task} | {'yes' if task in whole[0]['trained_on'] else ''} | {' | '.join(rates)} |"
        )
    return "\n".join(rows) + "\n"


def cost(lines: Sequence[dict]) -> str:
    """Core-hours and the curve over rounds of each run."""
    rows = [
        "## Curve and cost",
        "",
        "| part | seed | recipe | success on validation: SFT, then each round | kept | "
        "core-hours counted |",
        "|---|---|---|---|---|---|",
    ]
    for line in lines:
        curve = ", ".join(f"{100 * success:.1f}" for success in line.get("validation", ()))
        hours = sum(line["seconds"].values()) * line["cores"] / 3600
        kept = str(line.get("kept_round", ""))
        sft, rounds, learned = line.get("recipe", (0, 0, ""))  # none: SFT was trained elsewhere
        stages = {SFT: f"SFT {sft} steps", ROUNDS: f"{rounds} x {learned}"} | {
            agent: f"`{made['adapter']}` ({line['weights'][agent][:8]}), training not counted"
            for agent, made in line["made"].items()
        }
        recipe = ", then ".join(stages[agent] for agent in line["agents"])
        machine = f" ({line['machine'].rpartition(', ')[2]})"
        cells = line["part"], str(line["seed"]), recipe, curve, kept, f"{hours:.1f}{machine}"
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "ship", "table"))
    parser.add_argument("--parts", default=",".join(PARTS), help="which of these")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--work", type=Path, default=ROOT / "runs" / "miniwob", help="folder of the runs"
    )
    parser.add_argument(
        "--flags", default="", help="options of train.py loop, over the configuration's"
    )
    parser.add_argument(
        "--agent", metavar="NAME=FOLDER", help="adapter that plays in place of training one"
    )
    parser.add_argument("--after", metavar="NAMES", help="agents on record that it began with")
    parser.add_argument("--how", help="how it was made from there, in words")
    parser.add_argument("--learned", help="what it learned from beside demonstrations, in words")
    parser.add_argument(
        "--sampled", type=int, help="play at temperature 1, so many instances a task"
    )
    args = parser.parse_args()
    if unknown := [part for part in args.parts.split(",") if part not in PARTS]:
        parser.error(f"--parts takes some of {', '.join(PARTS)}, got {', '.join(unknown)}")
    name, adapter, made = asked_agent(parser, args)
    args.work = args.work.resolve()
    os.chdir(ROOT)
    for part_name in args.parts.split(",") if args.what == "run" else ():
        part = Part(part_name, args.seed, args.work, args.flags.split())
        if not name and part.done():
            print(f"{part_name}, seed {args.seed}: done before")
            continue
        print(f"==== {part_name}, seed {args.seed}", flush=True)
        for line in (
            [part.sample(name, adapter, args.sampled)]
            if args.sampled
            else [part.judge(name, adapter, made)]
            if name
            else part.run()
        ):
            processes.on_rank_0(add_line, line)
    if args.what == "ship":
        processes.on_rank_0(ship, adapter, ROOT / MINIWOB)
        return
    processes.on_rank_0(write_table)


def asked_agent(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> tuple[str, Path, dict]:
    """The name, the folder and the description of --agent, an empty name without it. Ends with one line where
    the other options do not go with it."""
    made = {
        "after": args.after.split(",") if args.after else [],
        "how": args.how,
        "learned": args.learned,
    }
    if not args.agent:
        if args.what == "ship" or args.sampled is not None or any(made.values()):
            parser.error(
                "ship, --sampled, --after, --how and --learned are about an adapter: name it with "
                "--agent NAME=FOLDER"
            )
        return "", Path(), made
    name, _, folder = args.agent.partition("=")
    if not folder or not re.fullmatch("[a-z][a-z0-9-]*", name):
        parser.error(f"--agent takes NAME=FOLDER, the name in small letters, got {args.agent}")
    if args.what == "table" or (args.what == "run" and args.parts.count(",")):
        parser.error(
            "--agent goes with ship and with run, there with one of --parts: it learned these tasks"
        )
    if args.what == "ship" or args.sampled is not None:
        if any(made.values()) or (
            args.sampled is not None and (args.sampled < 1 or args.what == "ship")
        ):
            parser.error(
                "--after, --how and --learned go with an agent that plays greedily; --sampled N, "
                "from 1 on, with run"
            )
    elif name in ("trained", ROUNDS):
        parser.error(
            f"`{ROUNDS}` is what the part makes itself, `trained` what the figures call the agent "
            "that stands last: give this one another name"
        )
    elif any(made.values()) if name == SFT else not all(made.values()):
        parser.error(
            "--after, --how and --learned say what an agent is: give all three, and none of them to "
            f"`{SFT}`, which begins a line"
        )
    return name, Path(folder).resolve(), made


def ship(adapter: Path, folder: Path) -> None:
    """Copy an adapter with its weights in bf16, half their size, for any copy of its base: the GGUF file's
    weights and the hub's are not the same to the bit."""
    with open_weights(adapter / lora.WEIGHTS) as file:
        tensors = {name: file.get_tensor(name).bfloat16() for name in file.keys()}
    lora.write(
        folder,
        tensors,
        {lora.BASE_DTYPE: lora.base_dtype(adapter) or "bfloat16"},
        read_json(adapter / lora.CONFIG) | {"base_model_name_or_path": SMOLLM2_HUB},
    )


def add_line(line: dict) -> None:
    """Write a part's line to LINES, in place of older ones of this part and seed. SFT alone leaves a line
    there in which others have played, too."""
    with open(__file__) as lock:  # other parts may end at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        others = [
            old
            for old in recorded()
            if (old["part"], old["seed"]) != (line["part"], line["seed"])
            or (len(old["agents"]) > 1 and len(line["agents"]) == 1)
        ]
        write_text(LINES, "".join(json.dumps(each) + "\n" for each in (*others, line)))


def write_table() -> None:
    """Write the figures and the page of all parts that have run."""
    if lines := recorded():
        figures = figures_of(lines)
        record(
            RESULTS / "miniwob.json",
            figures,
            lines[-1]["versions"],
            ran_on=sorted({line["machine"] for line in lines}),
        )
        write_text(DOCUMENT, document(lines, figures))
        print(f"{RESULTS / 'miniwob.json'}, {DOCUMENT}: {len(lines)} parts")


if __name__ == "__main__":
    command_line.main(lambda _: main())
