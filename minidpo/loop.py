"""The whole circle, as `train.py loop` and `make demo` run it: SFT, then rounds of exploring and learning.

Each stage leaves its files in a place of its own, and a note that it is done; so a loop that was killed goes
on with the stage it was in, one that is done goes on when it is told of more rounds, and another loop that
began alike can take what is there (`--start`).
"""

import shlex
from dataclasses import asdict, replace
from pathlib import Path

from envs.miniwob.tasks import SEEDS, resolve
from minidpo.acting.collect import collect
from minidpo.config import CollectCommand, DPOCommand, EvaluateCommand, LoopCommand, SFTCommand
from minidpo.data.episodes import Episode, read
from minidpo.data.pairs import NEEDS_GOLDEN, NothingToLearn
from minidpo.learning.schedule import (
    began_alike,
    best_round,
    done,
    enough,
    entered,
    figures,
    focused,
    forget_others,
    keep,
    mean,
    mixed,
    shares,
    source_of,
)
from minidpo.learning.stages import dpo, sft, where_cut
from minidpo.results.evaluate import held_out, play_held_out
from minidpo.results.replay import Report, make_report, shown_pairs
from minidpo.results.success import circumstances, compare, result_metrics, summary, table
from minidpo.system import processes
from minidpo.system.command_line import changed_flags
from minidpo.system.files import write_text
from minidpo.system.result_file import write_result
from minidpo.system.run_folder import Clock, RunFolder, records

SEEDS_APART = 10_000  # instances between those of one loop and those of a loop with the next seed


class Circle:
    """The stages of a loop. What is done is not done again, nor are episodes that a browser gave up."""

    def __init__(self, config: LoopCommand):
        self.config, self.out = config, config.out
        self.tasks = resolve(config.tasks)
        self.clock = Clock(config.out / "seconds.json", processes.rank() == 0)
        # With focus a task may get all the instances that there are, so each round has room for that.
        self.block = config.instances * (len(self.tasks) if config.focus else 1)
        room = len(SEEDS["rollouts"]) // SEEDS_APART
        if config.rounds * self.block > SEEDS_APART or config.seed > room:
            raise ValueError(f"a task may have {SEEDS_APART:,} instances in all rounds, and seeds go up to "
                             f"{room}: beyond that two loops, or two splits, would play the same pages")
        if config.learn == "dpo":
            where_cut(config.dpo, config.reference == "sft")  # now, not after an hour of exploring
        self.shared = began_alike(config)
        self.run = RunFolder(config.out, asdict(config))
        self.evaluation = EvaluateCommand(
            model=config.model, tasks=config.tasks, episodes=config.episodes, out=config.out / "evaluation",
            seed=config.seed, machine=config.machine, max_new_tokens=config.sampling.max_new_tokens)
        self.exploration = CollectCommand(
            model=config.model, tasks=config.tasks, split="rollouts", instances=config.instances,
            group=config.group, sampling=config.sampling, seed=config.seed, machine=config.machine)

    def place(self, path: str) -> Path:
        """Where a file of the loop lies: in its own folder, or in that of the loop it starts from."""
        return (self.config.start if path in self.shared else self.out) / path

    def log(self, record: dict) -> None:
        """A line of the loop's own metrics.jsonl."""
        if processes.rank() == 0:
            self.run.log(record)

    def first_instance(self, instances: int, number: int = 1) -> int:
        """The place in its split of a round's first instance: loops with other seeds play other pages."""
        return SEEDS_APART * (self.config.seed - 1) + instances * (number - 1)

    def collected(self, stage: str, path: str, command: CollectCommand,
                  instances: dict[str, int] | None = None) -> Path:
        """Play to a file of the loop, unless that is done."""
        out = self.place(path)
        if path not in self.shared and not done(out).is_file():
            counts = self.clock.time(stage, collect, replace(command, out=out), instances)
            if not counts["episodes"]:
                raise ValueError(f"{out}: not one episode could be played, because the browser failed")
            processes.on_rank_0(write_text, done(out), "complete\n")
        return out

    def played(self, stage: str, folder: str, name: str, command: EvaluateCommand,
               adapter: Path) -> list[Episode]:
        """Held-out episodes in a file of the loop, unless that is done."""
        path = self.place(f"{folder}/{name}.jsonl")
        command = replace(command, out=path.parent)
        if not done(path).is_file():
            self.clock.time(stage, play_held_out, command, name, adapter)
            processes.on_rank_0(write_text, done(path), "complete\n")
        return held_out(command, name)

    def first_policy(self) -> tuple[Path, Path]:
        """SFT on demonstrations or, without any, on what the base solved by itself: adapter and data."""
        config = self.config
        if config.demonstrations:
            show = CollectCommand(policy="expert", tasks=config.tasks, split="demos", group=1,
                                  instances=config.demonstrations, seed=config.seed, machine=config.machine,
                                  first=self.first_instance(config.demonstrations))
            data = self.collected("demonstrations", "demos.jsonl", show)
        else:
            own = replace(self.exploration, split="demos", first=self.first_instance(config.instances))
            data = self.collected("demonstrations", "selfplay.jsonl", own)
        out = self.place("sft")
        if "sft" not in self.shared:
            options = replace(config.sft, distinct=config.sft.distinct or not config.demonstrations)
            self.clock.time("sft", sft, SFTCommand(
                model=config.model, data=(data,), out=out, seed=config.seed, sft=options, lora=config.lora,
                machine=config.machine, track=config.track))
        return out / "adapter", data

    def explore(self, number: int, adapter: Path,
                counts: dict[str, int] | None) -> tuple[list[Path], Path | None]:
        """The round's rollouts, and the golden episodes of its instances if its pairs need them."""
        config, folder = self.config, f"round-{number}"
        command = replace(self.exploration, adapter=adapter, first=self.first_instance(self.block, number))
        golden = None
        if source_of(config) in NEEDS_GOLDEN:
            show = replace(command, policy="expert", adapter=None, group=1)
            golden = self.collected("golden", f"{folder}/golden.jsonl", show, counts)
        free, stepwise = shares(config)
        rollouts = []
        if free:
            rollouts.append(self.collected("explore", f"{folder}/rollouts.jsonl",
                                           replace(command, group=free), counts))
        if stepwise:  # numbered behind the free ones: other samples
            rollouts.append(self.collected("explore", f"{folder}/stepwise.jsonl", replace(
                command, group=stepwise, index=free, golden=golden), counts))
        return rollouts, golden

    def learn(self, number: int, adapter: Path, first: Path, demos: Path, rounds: list[list[Path]],
              golden: Path | None) -> Path:
        """Train on what was explored; `rounds`: the rollouts of each, the last are this round's."""
        config, out = self.config, self.out / f"round-{number}" / self.config.learn
        if config.learn == "dpo":
            reference = first if config.reference == "sft" and adapter != first else None
            self.clock.time("dpo", dpo, DPOCommand(
                model=config.model, adapter=adapter, reference=reference, data=tuple(rounds[-1]),
                golden=golden, out=out, seed=config.seed, dpo=config.dpo, machine=config.machine,
                track=config.track))
        else:
            again = config.learn == "rft"
            options = replace(config.imitation, distinct=again,
                              weighting="advantage" if config.learn == "rwr" else "solved")
            data = (demos, *(path for paths in rounds for path in paths)) if again else tuple(rounds[-1])
            self.clock.time(config.learn, sft, SFTCommand(
                model=config.model, data=data, adapter=None if again else adapter, out=out, seed=config.seed,
                sft=options, lora=config.lora, machine=config.machine, track=config.track))
        return out / "adapter"

    def validate(self, number: int, adapter: Path) -> dict[str, float]:
        """Greedy success by task on validation seeds."""
        command = replace(self.evaluation, split="validation", episodes=self.config.validation)
        episodes = self.played("validate", "validation", f"round-{number}", command, adapter)
        success = {task: row["success"] for task, row in summary(episodes)["tasks"].items()}
        self.log({"step": number, "validation_success": mean(success)})
        return success

    def evaluate(self, name: str, adapter: Path) -> tuple[list[Episode], list[Episode]]:
        """Held-out episodes, greedy and at temperature 1."""
        sampled = replace(self.evaluation, episodes=self.config.sampled, temperature=1.0)
        return (self.played(f"evaluate_{name}", "evaluation", name, self.evaluation, adapter),
                self.played(f"evaluate_{name}", "evaluation/sampled", name, sampled, adapter))


def loop(config: LoopCommand) -> dict:
    """A first policy, then rounds of explore, train and validate; evaluation of first and best; report."""
    circle = Circle(config)
    processes.on_rank_0(circle.run.begin)  # the folder is this loop's to its end
    processes.on_rank_0(circle.run.truncate_log, 0)  # finished rounds are logged again as they are read
    first, demos = circle.first_policy()
    watched = config.rounds > 1 or config.curriculum is not None  # one round leaves nothing to choose
    success = circle.validate(0, first) if watched else {}
    validation = [mean(success)] if watched else []
    adapter, rollouts, trained, mixture = first, [], [], {}
    for number in range(1, config.rounds + 1):
        tasks = entered(success, config.curriculum) if config.curriculum is not None else circle.tasks
        counts = None
        if config.focus and number > 1:
            counts = focused({task: mixture.get(task, 0.25) for task in tasks}, config.instances)
        elif len(tasks) < len(circle.tasks):
            counts = dict.fromkeys(tasks, config.instances)
        explored, golden = circle.explore(number, adapter, counts)
        rollouts.append(explored)
        played = [episode for path in explored for episode in read(path)]
        circle.log({"step": number, "explored_success": sum(e.solved for e in played) / len(played)})
        mixture |= mixed(played)
        try:
            adapter = circle.learn(number, adapter, first, demos, rollouts, golden)
        except NothingToLearn as error:
            if number == 1:
                raise
            print(f"round {number}: {error}; so the loop ends here")
            break
        trained.append(adapter.parent)
        if watched:
            success = circle.validate(number, adapter)
            validation.append(mean(success))
            before = ", ".join(f"{100 * rate:.1f}" for rate in validation[:-1])
            print(f"round {number}: {100 * validation[-1]:.1f} % on validation (before: {before})")
            processes.on_rank_0(write_result, config.out / f"round-{number}" / "result.json", {
                "round": number, "validation": validation[-1], "tasks": success,
                "adapter": str(adapter),
                "explored": {task: row["success"] for task, row in summary(played)["tasks"].items()}})
            if enough(validation, config.patience) and number < config.rounds:
                print(f"{config.patience} rounds brought nothing better: the loop ends here")
                break
    return finish(circle, first, trained, best_round(validation[1:]) if watched else 0, validation)


def finish(circle: Circle, first: Path, trained: list[Path], kept: int, validation: list[float]) -> dict:
    """Held-out evaluation of the first policy and the round that is kept, result.json and the report."""
    config, out, name, seconds = circle.config, circle.out, circle.config.learn, circle.clock.seconds
    adapter = trained[kept] / "adapter"
    for folder in ("evaluation", "evaluation/sampled"):
        processes.on_rank_0(forget_others, out / folder / f"{name}.jsonl", adapter)
    episodes, sampled, learned = {}, {}, config.dpo.loss if name == "dpo" else name
    for policy, folder in (("sft", first), (name, adapter)):
        episodes[policy], sampled[policy] = circle.evaluate(policy, folder)
    comparison = compare(episodes["sft"], episodes[name])
    result = {
        "agents": {policy: summary(episodes[policy], sampled[policy]) for policy in episodes},
        "comparison": comparison, "gain_points": comparison["gain_points"], "p_value": comparison["p_value"],
        "validation": validation, "kept_round": kept + 1, "seconds": seconds, "seed": config.seed,
        "command": shlex.join(["python", "train.py", "loop", *changed_flags(config)]),
        **circumstances("torch", "playwright", "miniwob", "tokenizers")}
    result["figures"] = figures(result, name)
    best = out / "adapter"
    processes.on_rank_0(keep, adapter, best)
    processes.on_rank_0(write_result, out / "result.json", result)
    print("\n" + table(result))
    if len(trained) > 1:
        print(f"Of {len(trained)} rounds that was evaluated which was best on validation: round {kept + 1}.")
    if validation and validation[kept + 1] < validation[0]:
        print("On validation no round was as good as SFT: the last column is the best of what was trained.")
    settings = {"model": config.model, "seed": config.seed, "learn": name, "rounds": len(trained),
                "kept": kept + 1, **({"loss": config.dpo.loss} if name == "dpo" else {})}
    curves = {"rounds": [{"step": k, "validation_success": rate} for k, rate in enumerate(validation)],
              "sft": records(first.parent)}
    curves |= {"/".join(stage.parts[-2:]): records(stage) for stage in trained}

    def tell() -> None:
        pairs = []
        if name == "dpo":
            pairs = shown_pairs(trained[kept], config.model, config.machine, first, adapter)
        tasks = result["agents"]["sft"]["tasks"]
        make_report(out / "report.html", Report(
            title=f"{len(tasks)} MiniWoB++ tasks, SFT and {learned.upper()}", result=result,
            episodes=episodes, settings=settings | result["versions"], seconds=seconds, curves=curves,
            pairs=pairs))

    processes.on_rank_0(tell)
    circle.log({"step": len(trained), **result_metrics(result)})
    processes.on_rank_0(circle.run.tracking.finish)
    print(f"""
{sum(seconds.values()):.0f} seconds in all
report    {out / 'report.html'}
adapter   {best}   (SFT alone: {first})
next      .venv/bin/python evaluate.py --adapters {name}={best} --tasks report --out runs/mine
          .venv/bin/python collect.py --adapter {best} --tasks click-button --out runs/mine.jsonl""")
    if out == Path("runs/demo"):
        print("          SEED=2 make demo")
    return result
