"""All of MiniWoB++ with one small model: five demonstrations a task, then what it explored.

    python benchmarks/miniwob.py run                        every part with seed 1
    python benchmarks/miniwob.py run --parts unseen-1 --seed 2
    python benchmarks/miniwob.py run --flags "--sft.steps 146 --rounds 1 --no-focus"
    python benchmarks/miniwob.py run --parts whole --trained FOLDER
                       of a part whose SFT is recorded: this adapter plays, and none is trained. With
                       --sft FOLDER its start plays, too; with --eto FOLDER --golden N one that was shown N
                       of the expert's episodes beside its own failures; with --averaged FOLDER the mean
                       of --trained and --eto (train.py average); with --second FOLDER --golden N the same
                       again from there, N counting those of both rounds, with --third once more
    python benchmarks/miniwob.py run --parts whole --sampled 4 --averaged FOLDER
                       agents that have played greedily play again at temperature 1, four instances a task
    python benchmarks/miniwob.py ship --trained FOLDER         this adapter becomes minidpo/miniwob; likewise
                       --averaged, --second or --third. Ship it before it plays: its weights are rounded
    python benchmarks/miniwob.py table             results/miniwob.json and docs/miniwob.md of what has run

    whole       `train.py loop --config configs/miniwob.toml`, on the tasks that have a scripted expert. Then
                SFT and the round that validation chose play all 125 tasks greedily: 10 held-out instances of
                each, 25 of those on webgum-56
    unseen-K    the same loop on three quarters of these tasks; both agents play the rest, 10 instances each.
                Siblings (`families`) lie on the same side; K = 1, 2, 3 hold out different families

A finished part is a line in results/miniwob.jsonl. `run` goes on where it was stopped. On two cores two
processes of one thread each play faster than one of two:

    torchrun --nproc-per-node 2 benchmarks/miniwob.py run
"""

import argparse
import fcntl
import json
import math
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.records import RESULTS, record, verdicts  # noqa: E402
from envs.miniwob.experts.by_task import EXPERTS  # noqa: E402
from envs.miniwob.tasks import SUITES, resolve  # noqa: E402
from minidpo.acting.causes import CAUSES, causes  # noqa: E402
from minidpo.acting.collect import make_jobs, play_to_file  # noqa: E402
from minidpo.acting.policies import make_policy  # noqa: E402
from minidpo.config import POLICY_GRADIENTS, CollectCommand, LoopCommand, Sampling  # noqa: E402
from minidpo.data.episodes import Episode, read  # noqa: E402
from minidpo.loop import Loop, loop  # noqa: E402
from minidpo.memory import lora  # noqa: E402
from minidpo.model.checkpoint import MINIWOB, SMOLLM2_HUB  # noqa: E402
from minidpo.results.success import circumstances, mcnemar_exact, wilson  # noqa: E402
from minidpo.system import command_line, processes  # noqa: E402
from minidpo.system.files import file_sha256, read_json, write_text  # noqa: E402
from minidpo.system.run_folder import Clock  # noqa: E402
from minidpo.system.tensors import open_weights  # noqa: E402

CONFIG = ROOT / "configs" / "miniwob.toml"
LINES, DOCUMENT = RESULTS / "miniwob.jsonl", ROOT / "docs" / "miniwob.md"
PARTS = ("whole", "unseen-1", "unseen-2", "unseen-3")
VERSIONS = ("torch", "playwright", "miniwob", "tokenizers")
OF_SFT = ("demonstrations", "sft", "held-out sft")  # stages before the rounds
# our agents, and what each learned from
GOLDEN = "5 demonstrations a task, verdicts, {golden} golden episodes over failures"
MEANS = "each time the mean of the weights before and after"
AGENTS = {"sft": "5 demonstrations a task", "trained": "5 demonstrations a task, {kind}", "eto": GOLDEN,
          "averaged": f"{GOLDEN}; mean of the weights of `trained` and `eto`",
          "second": f"{GOLDEN} in two rounds, {MEANS}", "third": f"{GOLDEN} in three rounds, {MEANS}"}
# whose count of golden episodes is an agent's
SHOWN = {"eto": "eto", "averaged": "eto", "second": "second", "third": "third"}
# those of AGENTS that are made of it and go when another takes its place; another SFT begins a new line
MADE_OF = {agent: [*AGENTS][place + 1:] if place else [] for place, agent in enumerate(AGENTS)}
# gains that are told: what adds to what, from one of AGENTS to another, and how the figure's name begins
GAINS = (("`trained` adds", "SFT", "sft", "trained", ""),
         ("ETO adds", "that", "trained", "eto", "eto_alone_"), ("Both add", "SFT", "sft", "eto", "eto_"),
         ("The mean of the weights of both adds", "`trained`", "trained", "averaged", "averaged_to_trained_"),
         ("It adds", "`eto`", "eto", "averaged", "averaged_to_eto_"),
         ("It adds", "SFT", "sft", "averaged", "averaged_"),
         ("A second round of both adds", "that mean", "averaged", "second", "second_to_averaged_"),
         ("It adds", "SFT", "sft", "second", "second_"),
         ("A third round adds", "the second", "second", "third", "third_to_second_"),
         ("It adds", "SFT", "sft", "third", "third_"))
INSTANCES = {"all": 10, "webgum-56": 25}  # held-out instances of each task
FIRST = 25  # of them: on those before it failures have been read, and pages and thoughts mended after them
SIBLINGS = {"drag-circle": "drag-shapes", "drag-single-shape": "drag-shapes",
            "multi-orderings": "multi-layouts",
            "enter-time": "enter-date", "click-shape": "count-shape", "identify-shape": "count-shape",
            "text-editor": "highlight-text",
            "simple-algebra": "simple-arithmetic", "phone-book": "social-media"}

ANY_REWARD, OWN_LIST = "solved from any reward above 0; 10 steps", "a list of their own"
# (who, weights, trained on, list, success in per cent, what differs from our rows, source)
PUBLISHED = (
    ("WebN-T5-XL", "3 B", "12,000 demonstrations by people", "webgum-56", 48.4, "", "WebGUM, table 1"),
    ("LLaMA2", "7 B", "SFT", "webgum-56", 42.8, "", "AutoWebGLM, table 4"),
    ("WebGUM Base, HTML", "0.25 B", "2,800 demonstrations", "webgum-56", 55.7, "", "WebGUM"),
    ("WebGUM XL, HTML and picture", "3 B", "347,000 demonstrations", "webgum-56", 80.3, "", "WebGUM"),
    ("AutoWebGLM", "6 B", "SFT, DPO, RFT", "webgum-56", 89.3, "", "AutoWebGLM, table 4"),
    ("CC-Net, imitation", "", "2.4 million demonstrations", "webgum-56", 32.0, "pixels", "WebGUM, table 1"),
    ("CC-Net", "", "2.4 million demonstrations, billions of frames", "webgum-56", 93.5, "pixels",
     "WebGUM, table 1"),
    ("GPT-4", "", "zero-shot", "webgum-56", 32.1, "", "AutoWebGLM, table 4"),
    ("random clicks", "", "", "all", 10.7, "solved from 1; 10 steps", "a public re-scoring, 2026"),
    ("GPT-4o-mini", "", "prompted", "all", 56.6, ANY_REWARD, "BrowserGym"),
    ("GPT-4o", "", "prompted", "all", 63.8, ANY_REWARD, "BrowserGym"),
    ("GPT-5", "", "prompted", "all", 71.5, ANY_REWARD, "BrowserGym"),
    ("Llama-3.1, SFT", "8 B", "episodes of a 70 B teacher", "30 tasks", 55.2, OWN_LIST, "2507.04103"),
    ("Llama-3.1, GRPO", "8 B", "episodes of a 70 B teacher, then verdicts", "30 tasks", 67.2, OWN_LIST,
     "2507.04103"),
    ("Qwen2.5, RL", "7 B", "a 72 B teacher, then verdicts", "30 tasks", 65.0, OWN_LIST, "2507.04103"),
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
    return [task for task in tasks if task not in held_out], [task for task in tasks if task in held_out]


def config_of(part: str, seed: int, work: Path, more: Sequence[str]) -> LoopCommand:
    """What a part trains: the configuration, with more options over it."""
    flags = ["--config", str(CONFIG), "--seed", str(seed), "--out", str(work / f"{part}-{seed}"), *more]
    return command_line.parse(LoopCommand, flags, "miniwob.py", "")


def recipe(config: LoopCommand) -> list:
    """SFT's steps, rounds, and what a round trains, in words: a run by another recipe is another run."""
    options = {"dpo": config.dpo, "ppo": config.ppo, **dict.fromkeys(POLICY_GRADIENTS, config.grpo)}.get(
        config.learn, config.imitation)
    length = f"{options.steps} steps" if options.epochs is None else f"{options.epochs:g} pass(es)"
    return [config.sft.steps, config.rounds,
            f"{length} of {config.learn.upper()} at {options.lr:g}" + ", averaged" * config.average]


class Part:
    """A part: the loop that it trains by, and the held-out instances that its agents play."""

    def __init__(self, name: str, seed: int, work: Path, more: Sequence[str] = ()):
        config = config_of(name, seed, work, more)
        if config.adapter:
            raise SystemExit("the part begins with SFT: leave --adapter out of --flags (--trained plays one)")
        self.counts = {task: count for suite, count in INSTANCES.items() for task in SUITES[suite]}
        if name != "whole":
            train, unseen = split(resolve(config.tasks), int(name.rpartition("-")[2]))
            config, self.counts = replace(config, tasks=",".join(train)), dict.fromkeys(unseen,
                                                                                        INSTANCES["all"])
        # the loop's own evaluation is as small as can be: what counts is played here
        self.name, self.seed, self.config = name, seed, replace(config, episodes=1, sampled=1)
        self.flags = " ".join(more)
        self.seconds = Clock(config.out / "held-out" / "seconds.json")

    def recorded(self) -> dict | None:
        """Its newest line, if it has run, by whatever recipe."""
        return next((line for line in reversed(recorded())
                     if (line["part"], line["seed"]) == (self.name, self.seed)), None)

    def done(self) -> bool:
        """Whether it has run to its end by this recipe."""
        line = self.recorded()
        return (line is not None and "trained" in line["agents"] and not {"sft", "trained"} & line.keys()
                and line["recipe"] == recipe(self.config) and line.get("flags", self.flags) == self.flags)

    def episodes(self, line: dict, agent: str, adapter: Path, file: str, counts: dict[str, int],
                 temperature: float = 0.0) -> list[Episode]:
        """This agent's episodes on as many held-out instances of each task, played where `file` lacks them.
        """
        out, config = self.config.out / "held-out" / f"{file}.jsonl", self.config
        policy = make_policy(CollectCommand(model=config.model, adapter=adapter, seed=self.seed,
                                            machine=config.machine, sampling=Sampling(temperature)))
        jobs = make_jobs(counts, "test", first=line.get("first", 0), group=1)
        self.seconds.time(f"held-out {file}", play_to_file, policy, jobs, out, config.machine.page_count(),
                          agent)
        keys = {job.key for job in jobs}  # an older line's instances may stand there, too
        return [episode for episode in read(out) if episode.key in keys]

    def play(self, line: dict, agent: str, adapter: Path, file: str) -> dict:
        """The line with this agent on the held-out instances: its verdicts, by task, as strings of 0 and 1,
        the checksum of its weights, the causes of its failures, and the seconds that they took."""
        episodes = self.episodes(line, agent, adapter, file, self.counts)
        return line | {"agents": line["agents"] | {agent: verdicts(episodes, self.counts)},
                       "weights": line.get("weights", {}) | {agent: file_sha256(adapter / lora.WEIGHTS)},
                       "causes": line.get("causes", {}) | {agent: causes(episodes)},
                       "seconds": line["seconds"] | {
                           f"held-out {agent}": self.seconds.seconds[f"held-out {file}"]}}

    def new_line(self) -> dict:
        """Its line, before anybody has played."""
        return {"part": self.name, "seed": self.seed, "first": FIRST, "agents": {}, "causes": {},
                "seconds": {}, "trained_on": resolve(self.config.tasks), "cores": os.cpu_count(),
                "recipe": recipe(self.config), "flags": self.flags, **circumstances(*VERSIONS)}

    def run(self) -> Iterator[dict]:
        """Train and play. Its line, with SFT alone as soon as that has played, then with both agents."""
        stages = Loop(self.config)
        processes.on_rank_0(stages.run.begin)  # from here on the folder refuses other settings
        sft, _ = stages.first_policy()
        line = self.play(self.new_line(), "sft", sft, "sft")
        yield line | {"seconds": Clock(self.config.out / "seconds.json").seconds | line["seconds"]}
        result = loop(self.config)
        line = self.play(line, "trained", self.config.out / "adapter", "trained")
        shown = sum(len(read(path)) for path in sorted(self.config.out.glob("round-*/golden.jsonl")))
        yield line | {"validation": result["validation"], "kept_round": result["kept_round"],
                      **({"golden": shown} if shown else {}),
                      "seconds": result["seconds"] | line["seconds"]}

    def judge(self, given: dict[str, Path], golden: int | None = None) -> dict:
        """Its line with the adapters of these AGENTS, which were trained elsewhere and play here. golden: the
        expert's episodes that `eto`, `second` or `third` was shown.

        Without `sft`, the recorded line of SFT goes on, less the agents that are made of one of these.
        """
        line = self.new_line() if "sft" in given else self.recorded()
        if line is None:
            raise SystemExit(f"{LINES}: no line of {self.name}, seed {self.seed}, so this agent would stand "
                             "alone: name its start, too (--sft), or run the part without adapters")
        old = {agent for each in given for agent in MADE_OF[each]}
        for agent in given:
            for source in (source for source, made in MADE_OF.items() if agent in made):
                if source not in {*line["agents"]} - old | {*given}:
                    raise SystemExit(f"{LINES}: of {self.name}, seed {self.seed}, --{agent} is made of one "
                                     f"that has not played beside the others: name it with --{source}")
        if gone := [agent for agent in line["agents"] if agent in old and agent not in given]:
            print(f"{LINES}: its line will be without {', '.join(gone)}, made of what is replaced")
        for agent in {*old, *given}:
            line.get("sampled", {}).pop(agent, None)  # as a rule another one's weights sampled this
        old |= {f"held-out {agent}" for agent in old}
        line = {key: {name: each for name, each in value.items() if name not in old}
                if key in ("agents", "weights", "causes", "seconds") else value
                for key, value in line.items() if key not in old}
        if "trained" in given:
            # recipe and flags say nothing of agents that were both trained elsewhere
            elsewhere = ("recipe", "flags") if "sft" in given else ()
            line = {key: value for key, value in line.items()
                    if key not in ("validation", "kept_round", *elsewhere)}
            # nor are their rounds counted, so those of an agent that they replace are not either
            line["seconds"] = {stage: line["seconds"][stage] for stage in OF_SFT if stage in line["seconds"]}
        for agent, adapter in given.items():
            name, sha256 = os.path.relpath(adapter, ROOT), file_sha256(adapter / lora.WEIGHTS)
            line = self.play(line, agent, adapter, f"{agent}-{sha256[:12]}")
            line[agent] = {"adapter": name, "sha256": sha256, **circumstances(*VERSIONS),
                           **({"golden": golden} if agent in SHOWN.values() else {})}
        return line

    def sample(self, given: dict[str, Path], count: int) -> dict:
        """Its recorded line with these agents at temperature 1, on `count` instances of each task. Each must
        be the one that has played greedily, by the checksum of its weights."""
        line = self.recorded() or {}
        sha256s = {agent: file_sha256(adapter / lora.WEIGHTS) for agent, adapter in given.items()}
        for agent, sha256 in sha256s.items():
            # older lines tell it only of agents that were trained elsewhere
            if sha256 not in (line.get("weights", {}).get(agent), line.get(agent, {}).get("sha256")):
                raise SystemExit(f"{LINES}: {given[agent]} is not known to be the agent `{agent}` of "
                                 f"{self.name}, seed {self.seed}, that has played greedily: leave --sampled "
                                 "out to play it so")
        counts = {task: min(count, most) for task, most in self.counts.items()}
        for agent, sha256 in sha256s.items():
            adapter = given[agent]
            episodes = self.episodes(line, agent, adapter, f"{agent}-{sha256[:12]}-sampled", counts, 1.0)
            line["sampled"] = line.get("sampled", {}) | {agent: {
                "solved": verdicts(episodes, counts), "sha256": sha256, **circumstances(*VERSIONS),
                "seconds": self.seconds.seconds[f"held-out {agent}-{sha256[:12]}-sampled"]}}
        return line


def recorded() -> list[dict]:
    """The lines of all parts that have run."""
    return [json.loads(line) for line in LINES.read_text().splitlines()] if LINES.is_file() else []


def rate(agent: dict[str, str], tasks: Sequence[str], count: int) -> dict[str, float]:
    """Success in per cent over the first `count` instances of these tasks, with its interval."""
    solved = sum(agent[task][:count].count("1") for task in tasks)
    low, high = wilson(solved, n := count * len(tasks))
    return {"success": 100 * solved / n, "low": 100 * low, "high": 100 * high, "n": n}


def difference(before: dict[str, str], after: dict[str, str], tasks: Sequence[str], count: int
               ) -> dict[str, float]:
    """Gain in points from one agent's verdicts to another's on the same instances, and McNemar's exact p."""
    verdicts = ("".join(agent[task][:count] for task in tasks) for agent in (before, after))
    pairs = list(zip(*verdicts, strict=True))
    won, lost = pairs.count(("0", "1")), pairs.count(("1", "0"))
    return {"won": won, "lost": lost, "p": mcnemar_exact(lost, won), "gain": 100 * (won - lost) / len(pairs)}


def figures_of(lines: Sequence[dict]) -> dict[str, float]:
    """The figures of all parts; of several seeds the mean, but for the p-value, which is the largest. A newer
    SFT whose rounds have not been played stands alone: it is not what the trained agent began with."""
    standing = told(lines)
    whole = [line for line in standing if line["part"] == "whole"]
    alone = [line for line in lines if line["part"] == "whole" and line not in standing]
    figures: dict[str, float] = {"seeds": len(finished(whole))}
    for suite, name in (("webgum-56", "webgum56"), ("all", "all125")):
        for row, agent, of in (*((agent, agent, finished(whole, agent)) for agent in AGENTS),
                               ("sft_alone", "sft", alone[-1:])):
            if rates := [rate(line["agents"][agent], SUITES[suite], INSTANCES[suite]) for line in of]:
                figures |= {f"{name}_{row}{end}": fmean(r[key] for r in rates)
                            for end, key in (("", "success"), ("_low", "low"), ("_high", "high"))}
        for agent in AGENTS:
            if rates := [row for line in whole if (row := at_1(line, agent, SUITES[suite]))]:
                figures |= {f"{name}_sampled_{agent}{end}": fmean(row[key] for row in rates) for end, key in (
                    ("", "success"), ("_low", "low"), ("_high", "high"), ("_n", "n"), ("_greedy", "greedy"))}
    for suite, name in (("webgum-56", "webgum56_"), ("all", "")):
        for _, _, before, after, of in GAINS:
            if gains := [difference(line["agents"][before], line["agents"][after], SUITES[suite],
                                    INSTANCES[suite]) for line in finished(whole, after)]:
                figures |= {f"{name}{of}gain_points": fmean(g["gain"] for g in gains),
                            f"{name}{of}p_value": max(g["p"] for g in gains)}
    if unseen := [line for line in finished(lines) if line["part"] != "whole"]:
        figures |= {f"unseen_{key}": value for key, value in unseen_gain(unseen).items()}
    return figures


def at_1(line: dict, agent: str, tasks: Sequence[str]) -> dict[str, float] | None:
    """Success in per cent at temperature 1, with its interval, and greedily on the same instances; None if
    the agent has not played so."""
    if agent not in line.get("sampled", {}):
        return None
    solved = line["sampled"][agent]["solved"]
    count = min(len(solved[task]) for task in tasks)
    return rate(solved, tasks, count) | {"greedy": rate(line["agents"][agent], tasks, count)["success"]}


def told(lines: Sequence[dict]) -> list[dict]:
    """Those that stand for their part and seed: SFT alone only where no trained agent has played yet."""
    played = {(line["part"], line["seed"]) for line in finished(lines)}
    return [line for line in lines
            if "trained" in line["agents"] or (line["part"], line["seed"]) not in played]


def finished(lines: Sequence[dict], agent: str = "trained") -> list[dict]:
    """The parts in which this agent has played, too."""
    return [line for line in lines if agent in line["agents"]]


def student_t(degrees: int) -> float:
    """The 97.5 % point of Student's t (Abramowitz and Stegun 1964, 26.7.5; from 5 degrees on 0.1 % at most
    too low).

    >>> round(student_t(14), 2), round(student_t(10**6), 2)
    (2.14, 1.96)
    """
    z = 1.959964
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def unseen_gain(lines: Sequence[dict]) -> dict[str, float]:
    """SFT and gain on tasks never trained on, over all splits. The interval is over families: whole families
    were drawn, and their tasks are alike, as are the instances of a task, which counts once if several seeds
    played it."""
    before: dict[str, list[float]] = {}
    gains: dict[str, list[float]] = {}
    for line in lines:
        for task, text in line["agents"]["sft"].items():
            before.setdefault(task, []).append(100 * text.count("1") / len(text))
            after = line["agents"]["trained"][task]
            gains.setdefault(task, []).append(100 * after.count("1") / len(after) - before[task][-1])
    means = [fmean(gain) for gain in gains.values()]
    gain, drawn = fmean(means), families(sorted(gains))
    apart = [sum(fmean(gains[task]) - gain for task in family) for family in drawn]
    n, half = len(drawn), 100.0  # of one family nothing is known
    if n > 1:
        half = student_t(n - 1) * math.sqrt(n / (n - 1) * sum(a * a for a in apart)) / len(means)
    return {"sft": fmean(map(fmean, before.values())), "gain_points": gain, "gain_low": gain - half,
            "gain_high": gain + half, "tasks": len(means), "families": n, "parts": len(lines)}


def document(lines: Sequence[dict], figures: dict[str, float]) -> str:
    """docs/miniwob.md: our rows beside the published ones, tasks never trained on, every task, the cost."""
    whole = [line for line in told(lines) if line["part"] == "whole"]
    text = [HEAD]
    if by_hand := [f"`{agent}`" for agent in AGENTS if any(agent in line for line in whole)]:
        text.append("The agents: `sft`; `trained`, after its rounds from there; `eto`, after ETO from there; "
                    "`averaged`, the mean of\nthe weights of these two; `second` and `third`, ETO and a mean "
                    f"once more each. Made by hand, in steps that\n`docs/log.md` tells: {', '.join(by_hand)}."
                    "\n")
    if old := [f"{line['part']}, seed {line['seed']}" for line in lines if not line.get("first")]:
        text.append(f"The instances of some runs had been played by earlier agents: {'; '.join(old)}. "
                    "Failures on some were read on\n2026-11-23, and pages and thoughts mended after them "
                    "(`docs/miniwob-failures.md`), so the rates of these runs flatter. All\nothers play "
                    "other instances.\n")
    if whole:
        text.append(ladder(whole, figures))
    if any("_sampled_" in name for name in figures):
        text.append(sampled_section(figures))
    if unseen := [line for line in finished(lines) if line["part"] != "whole"]:
        text.append(unseen_section(unseen, figures))
    if stopped := [line for line in whole if "sft" in line.get("causes", ())]:  # older lines have none
        text.append(what_stops_it(stopped))
    if whole:
        text += [by_task(whole), cost(lines)]
    return "\n".join(text)


HEAD = """\
# All of MiniWoB++

`python benchmarks/miniwob.py table` writes this page from `benchmarks/results/miniwob.jsonl`.

SmolLM2-135M-Instruct learns from five scripted demonstrations of each task that has an expert (SFT), then
in rounds from what it explored: `python benchmarks/miniwob.py run`, by `configs/miniwob.toml`; `python
train.py plan --config configs/miniwob.toml` says what memory it takes. An agent plays greedily on held-out
instances. Solved means the page's own reward at its maximum, or from the threshold in `docs/tasks.md`. Step
limits stand there, too. The clock inside the page is off. Tasks without an expert are played as well.
`docs/miniwob-failures.md` shows why the worst tasks failed in an earlier run, and what was cured since.
"""


def ladder(whole: Sequence[dict], figures: dict[str, float]) -> str:
    """The rows of our agents on both lists, among the published ones."""
    golden = {agent: max((line[source]["golden"] for line in finished(whole, source)), default=0)
              for agent, source in SHOWN.items()}
    rows = [(*row[:4], f"{row[4]:.1f}", "; ".join(filter(None, row[5:]))) for row in PUBLISHED]
    for suite, name in (("webgum-56", "webgum56"), ("all", "all125")):
        for agent, how, differs in (*((agent, how, "") for agent, how in AGENTS.items()),
                                    ("sft_alone", AGENTS["sft"],
                                     "; newer, its rounds have not been played")):
            if f"{name}_{agent}" not in figures:
                continue
            seeds = sum(agent in line["agents"] for line in whole) or 1
            how = how.format(golden=golden.get(agent), kind=learned_from(whole))
            success, low, high = (figures[f"{name}_{agent}{end}"] for end in ("", "_low", "_high"))
            rows.append((f"**minidpo, {agent.replace('_', ' ')}**", "0.135 B", how, suite,
                         f"{success:.1f} ({low:.1f} - {high:.1f})",
                         f"n = {INSTANCES[suite] * len(SUITES[suite]):,}, "
                         f"{seeds} seed{'s' * (seeds > 1)}{differs}"))
    rows.sort(key=lambda row: (row[3], float(row[4].partition(" ")[0])))
    added = (f"{what} {figures[f'{of}gain_points']:+.1f} points to {to} on all 125 tasks (McNemar's exact p "
             f"= {figures[f'{of}p_value']:.1g}), {figures[f'webgum56_{of}gain_points']:+.1f} on `webgum-56` "
             f"(p = {figures[f'webgum56_{of}p_value']:.1g}).\n"
             for what, to, _, _, of in GAINS if f"{of}gain_points" in figures)
    gain = "".join(added) or "The rounds that learn from verdicts have not been played to their end yet. "
    return "\n".join(["## The ladder", "",
                      "| who | weights | learned from | tasks | success, % | how it differs, source |",
                      "|---|---|---|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows), "",
                      f"{gain}Other people's rows count other instances, some by other rules,",
                      "as their last column says; no interval is known of them.", ""])


def learned_from(whole: Sequence[dict]) -> str:
    """What `trained` learned from in its rounds."""
    golden = max((line.get("golden", 0) for line in finished(whole)), default=0)
    return "verdicts" + f", {golden:,} golden episodes over failures" * (golden > 0)


def sampled_section(figures: dict[str, float]) -> str:
    """Success at temperature 1 beside the greedy one."""
    rows = []
    for suite, name in (("webgum-56", "webgum56"), ("all", "all125")):
        for agent in AGENTS:
            if (of := f"{name}_sampled_{agent}") in figures:
                success, low, high, n, greedy = (figures[of + end]
                                                 for end in ("", "_low", "_high", "_n", "_greedy"))
                rows.append(f"| {agent} | {suite} | {success:.1f} ({low:.1f} - {high:.1f}) | {greedy:.1f} | "
                            f"{n:,.0f} |")
    return "\n".join(["## At temperature 1", "",
                      "The first held-out instances of each task, sampled, and the same ones greedily.", "",
                      "| agent | tasks | success at temperature 1, % | greedily, % | instances |",
                      "|---|---|---|---|---|", *rows]) + "\n"


def unseen_section(lines: Sequence[dict], figures: dict[str, float]) -> str:
    """What training on some tasks does to others."""
    gain, low, high = (figures[f"unseen_gain_{end}"] for end in ("points", "low", "high"))
    said = "which may be chance" if low <= 0 <= high else "more than chance explains"
    return ("## Tasks never trained on\n\n"
            "Trained on three quarters of the tasks, played on the rest, siblings kept together:\n"
            f"{figures['unseen_tasks']:.0f} tasks in {len(lines)} run{'s' * (len(lines) > 1)}. SFT solves "
            f"{figures['unseen_sft']:.1f} %; a round of verdicts on other tasks changes this by\n{gain:+.1f} "
            f"points ({low:+.1f} to {high:+.1f}, 95 % interval over "
            f"{figures['unseen_families']:.0f} families of tasks), {said}.\n")


def played_by(lines: Sequence[dict]) -> list[str]:
    """Of AGENTS those that have a column: those made of `trained` only if they have played in each line."""
    return [agent for agent in AGENTS
            if agent not in MADE_OF["trained"] or finished(lines, agent) == [*lines]]


def what_stops_it(whole: Sequence[dict]) -> str:
    """How many held-out episodes failed for which cause, before training and after it, if that has played."""
    whole = finished(whole) or whole  # or the columns would count the episodes of other runs
    agents = played_by(whole)
    counts = [sum((Counter(line["causes"].get(agent)) for line in whole), Counter()) for agent in agents]
    rows = [f"| {name} | {' | '.join(str(count[name]) if count else '' for count in counts)} | {meaning} |"
            for name, meaning in CAUSES.items() if any(count[name] for count in counts)]
    played = sum(len(text) for line in whole for text in line["agents"]["sft"].values())
    return "\n".join(["## What stops the agent", "",
                      f"Failed episodes of {played:,}, by rule (`minidpo/acting/causes.py`): the last thing "
                      "it did that the task's expert would not have done.", "",
                      f"| cause | {' | '.join(agents)} | meaning |",
                      f"|---|{'---|' * len(agents)}---|", *rows]) + "\n"


def by_task(whole: Sequence[dict]) -> str:
    """A row a task: success of each agent over all seeds."""
    agents = played_by(whole)
    rows = ["## Every task", "", "Success in per cent of the instances played (10; 25 on `webgum-56`); "
            "learned: whether the agents were trained on this task.", "",
            f"| task | learned | {' | '.join(agents)} |",
            f"|---|---|{'---|' * len(agents)}"]
    for task in SUITES["all"]:
        cells = ["".join(line["agents"].get(agent, {}).get(task, "") for line in whole) for agent in agents]
        rates = [f"{100 * text.count('1') / len(text):.0f}" if text else "" for text in cells]
        rows.append(f"| {task} | {'yes' if task in whole[0]['trained_on'] else ''} | {' | '.join(rates)} |")
    return "\n".join(rows) + "\n"


def cost(lines: Sequence[dict]) -> str:
    """Core-hours and the curve over rounds of each run."""
    rows = ["## Curve and cost", "",
            "| part | seed | recipe | success on validation: SFT, then each round | kept | "
            "core-hours counted |",
            "|---|---|---|---|---|---|"]
    for line in lines:
        curve = ", ".join(f"{100 * success:.1f}" for success in line.get("validation", ()))
        hours = sum(line["seconds"].values()) * line["cores"] / 3600
        kept = str(line.get("kept_round", ""))
        sft, rounds, learned = line.get("recipe", (0, 0, ""))  # none: both were trained elsewhere
        stages = {"sft": f"SFT {sft} steps", "trained": f"{rounds} x {learned}"} | {
            agent: f"`{line[agent]['adapter']}` ({line[agent]['sha256'][:8]}), training not counted"
            for agent in AGENTS if agent in line}
        recipe = ", then ".join(stages[agent] for agent in line["agents"])
        machine = f" ({line['machine'].rpartition(', ')[2]})"
        cells = line["part"], str(line["seed"]), recipe, curve, kept, f"{hours:.1f}{machine}"
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "ship", "table"))
    parser.add_argument("--parts", default=",".join(PARTS), help="which of these")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "miniwob", help="folder of the runs")
    parser.add_argument("--flags", default="", help="options of train.py loop, over the configuration's")
    for agent in AGENTS:
        parser.add_argument(f"--{agent}", type=Path, help="adapter that plays in place of training one")
    parser.add_argument("--golden", type=int, help="of --eto, --second or --third: golden episodes shown")
    parser.add_argument("--sampled", type=int, help="play at temperature 1, so many instances a task")
    args = parser.parse_args()
    given = {agent: path.resolve() for agent in AGENTS if (path := getattr(args, agent))}
    if unknown := [part for part in args.parts.split(",") if part not in PARTS]:
        parser.error(f"--parts takes some of {', '.join(PARTS)}, got {', '.join(unknown)}")
    if args.what == "ship" and len(given) != 1:
        parser.error("ship copies one adapter: name it with --trained, --averaged, --second or --third")
    if (args.sft or args.eto) and args.what != "run":
        parser.error("--sft and --eto name adapters that play: they go with run")
    if args.sampled is not None and (args.sampled < 1 or not given or args.what != "run" or args.golden):
        parser.error("--sampled N, from 1 on, goes with run and with agents that have played greedily: name "
                     "them (--trained and others), without --golden")
    shown = {*SHOWN.values()} & {*given} if args.what == "run" else ()
    if not args.sampled and len(shown) != (args.golden is not None):
        parser.error("--golden says how many of the expert's episodes --eto, --second or --third was shown: "
                     "give it and one of these")
    if args.golden is not None and args.golden < 1:
        parser.error(f"--golden counts episodes, from 1 on, got {args.golden}")
    if given and args.what == "run" and args.parts.count(","):
        parser.error("adapters that are named learned one part's tasks: name it with --parts")
    args.work = args.work.resolve()
    os.chdir(ROOT)
    for name in args.parts.split(",") if args.what == "run" else ():
        part = Part(name, args.seed, args.work, args.flags.split())
        if not given and part.done():
            print(f"{name}, seed {args.seed}: done before")
            continue
        print(f"==== {name}, seed {args.seed}", flush=True)
        for line in ([part.sample(given, args.sampled)] if args.sampled else
                     [part.judge(given, args.golden)] if given else part.run()):
            processes.on_rank_0(add_line, line)
    if args.what == "ship":
        processes.on_rank_0(ship, *given.values(), ROOT / MINIWOB)
        return
    processes.on_rank_0(write_table)


def ship(adapter: Path, folder: Path) -> None:
    """Copy an adapter with its weights in bf16, half their size, for any copy of its base: the GGUF file's
    weights and the hub's are not the same to the bit."""
    with open_weights(adapter / lora.WEIGHTS) as file:
        tensors = {name: file.get_tensor(name).bfloat16() for name in file.keys()}
    lora.write(folder, tensors, {lora.BASE_DTYPE: lora.base_dtype(adapter) or "bfloat16"},
               read_json(adapter / lora.CONFIG) | {"base_model_name_or_path": SMOLLM2_HUB})


def add_line(line: dict) -> None:
    """Write a part's line to LINES, in place of older ones of this part and seed. SFT alone leaves a line
    there in which both agents have played."""
    with open(__file__) as lock:  # other parts may end at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        others = [old for old in recorded() if (old["part"], old["seed"]) != (line["part"], line["seed"])
                  or "trained" in old["agents"] and "trained" not in line["agents"]]
        write_text(LINES, "".join(json.dumps(each) + "\n" for each in (*others, line)))


def write_table() -> None:
    """Write the figures and the page of all parts that have run."""
    if lines := recorded():
        figures = figures_of(lines)
        record(RESULTS / "miniwob.json", figures, lines[-1]["versions"],
               ran_on=sorted({line["machine"] for line in lines}))
        write_text(DOCUMENT, document(lines, figures))
        print(f"{RESULTS / 'miniwob.json'}, {DOCUMENT}: {len(lines)} parts")


if __name__ == "__main__":
    command_line.main(lambda _: main())
