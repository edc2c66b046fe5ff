"""`train.py loop` and `make demo`: a first policy, by SFT unless it is given, then rounds.

One round is EF-DPO; several are ETO (Song et al. 2024, arXiv:2403.02502, Algorithm 1). Each stage writes to a
place of its own and marks it as done. So a killed loop goes on with the stage it was in, a finished loop goes
on when it is given more rounds, and another loop with the same beginning can use its files (`--start`).
"""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from envs.miniwob.tasks import SEEDS, resolve
from minidpo.acting.collect import collect
from minidpo.acting.policies import require_experts
from minidpo.config import (
    FRESH,
    POLICY_GRADIENTS,
    AverageCommand,
    CollectCommand,
    DPOCommand,
    EvaluateCommand,
    GRPOCommand,
    LoopCommand,
    PPOCommand,
    Sampling,
    SFTCommand,
)
from minidpo.data.episodes import Episode, read, read_all
from minidpo.data.pairs import NEEDS_GOLDEN, NothingToLearn
from minidpo.learning import schedule
from minidpo.learning.average import average
from minidpo.learning.dpo import dpo
from minidpo.learning.grpo import grpo
from minidpo.learning.ppo import ppo
from minidpo.learning.preferences import pair_loss_of
from minidpo.learning.rollouts import group_numbers
from minidpo.learning.schedule import done_marker, mean_success
from minidpo.learning.sft import sft
from minidpo.learning.training_run import adapter_sha256, keep_inputs
from minidpo.memory import lora
from minidpo.memory.loading import as_trained
from minidpo.memory.machine import device_of
from minidpo.memory.plan import acting_setup, setup_of
from minidpo.results.evaluate import held_out, play_held_out
from minidpo.results.replay import make_report, shown_pairs
from minidpo.results.success import (
    circumstances,
    compare,
    made_by,
    rates_by_task,
    result_metrics,
    summary,
    table,
)
from minidpo.system import processes
from minidpo.system.command_line import PACKAGED, as_started, changed_flags
from minidpo.system.files import write_text
from minidpo.system.result_file import write_result
from minidpo.system.run_folder import Clock, RunFolder, records

SEEDS_APART = 10_000  # a loop and the loop of the next seed begin so many instances apart


def loop(config: LoopCommand) -> dict:
    """Train a first policy, improve it in rounds, evaluate it and the best round on held-out instances.

    Returns what result.json holds. Raises NothingToLearn if the first round has nothing to learn from.
    """
    stages = Loop(config)
    processes.on_rank_0(stages.run.begin)  # locks the folder to the end of this loop
    processes.on_rank_0(stages.run.truncate_log, 0)  # finished rounds are logged again
    first, demos = stages.first_policy()
    # a single round leaves nothing to choose, but its instances may be chosen by success
    validates = config.rounds > 1 or config.curriculum is not None or config.focus
    success = stages.validate(0, first) if validates else {}
    validation = [mean_success(success)] if validates else []
    adapter, explored, trained, variance = first, [], [], {}
    for number in range(1, config.rounds + 1):
        instances = schedule.round_instances(config, stages.tasks, success, variance)
        files = stages.explore(number, adapter, instances)
        episodes = stages.read_explored(number, files.played)
        explored.append(files.played + files.onward)
        variance |= schedule.outcome_variance(episodes)
        try:
            trained.append(stages.learn(number, adapter, first, demos, explored, files.golden))
        except NothingToLearn as error:
            if number == 1:
                raise
            print(f"round {number}: {error}; so the loop ends here")
            break
        adapter = stages.adapter_of(trained[-1])
        if validates:
            success = stages.validate(number, adapter)
            validation.append(mean_success(success))
            stages.report_round(number, adapter, success, validation, episodes)
            if schedule.should_stop(validation, config.patience) and number < config.rounds:
                print(f"no better round among the last {config.patience}: the loop ends here")
                break
    best = schedule.best_round(validation[1:]) if validates else 0
    return finish(stages, first, trained, best, validation)


class Explored(NamedTuple):
    """The files of what a round explored."""

    played: list[Path]
    onward: list[Path]  # how these went on from each step, if the learner reads that
    golden: Path | None  # golden episodes or experts' answers, if it learns from such


class Loop:
    """The stages of a loop. What is done is not repeated, nor single episodes that a browser gave up."""

    def __init__(self, config: LoopCommand):
        self.config, self.out = config, config.out
        if config.rates_of not in (None, config.model):
            raise ValueError(
                f"the learning rates here are for {config.rates_of}: give {config.model} its "
                f"own (sft.lr, dpo.lr, imitation.lr) and say so: --rates-of {config.model}"
            )
        self.tasks = resolve(config.tasks)
        self.clock = Clock(config.out / "seconds.json")
        # With focus one task may get the instances of all, so each round reserves that many.
        self.block = config.instances * (len(self.tasks) if config.focus else 1)
        max_seed = len(SEEDS["rollouts"]) // SEEDS_APART
        total = config.demonstrations_in_total
        self.demonstrated = schedule.deal(self.tasks, total) if total else None
        count = config.demonstrations or config.instances
        self.most_demos = max(self.demonstrated.values()) if total else count  # of a task
        most = max(
            (1 if config.explore else config.rounds) * self.block,
            self.most_demos + (config.shots and config.shots + 4),
        )
        if most > SEEDS_APART or config.seed > max_seed:
            raise ValueError(
                f"a task may have {SEEDS_APART:,} instances in all rounds, and as many for "
                f"demonstrations and examples, and seeds go up to {max_seed}: beyond that two "
                "loops, or two splits, would play the same pages"
            )
        if config.learn == "dpo":
            pair_loss_of(
                config.dpo, config.reference == "sft"
            )  # raises now, not after an hour of exploring
        if config.asks_experts() or (config.learn == "dpo" and config.dpo.pairs in NEEDS_GOLDEN):
            require_experts(self.tasks)  # likewise
        machine = as_trained(config.machine, config.adapter)
        recorded = lora.base_dtype(config.adapter) if config.average and config.adapter else None
        if (
            recorded not in (None, machine.dtype.replace("rounded", "bfloat16"))
            and not machine.quantize
        ):
            raise ValueError(
                f"{config.adapter}: trained beside a base of {recorded}, so it has no mean with "
                "what is trained beside another: leave out machine.dtype, or average"
            )
        acting_setup(setup_of(config.model, machine))  # likewise: how the machine is to be used
        processes.require_own_gpu(device_of(machine))
        self.reused = schedule.reusable_files(config)
        keep_inputs(config.out, config.adapter)
        settings = {**asdict(config), "adapter_sha256": adapter_sha256(config.adapter)}
        self.run = RunFolder(config.out, settings, asdict(LoopCommand()))
        self.first_name = "start" if config.adapter else "sft"  # of the first policy, in results
        self.shared = {"model": config.model, "seed": config.seed, "machine": config.machine}
        shown = (
            {"shots": config.shots, "examples": self.path_of("examples.jsonl")}
            if config.shots
            else {}
        )
        self.evaluation = EvaluateCommand(
            **self.shared,
            **shown,
            tasks=config.tasks,
            episodes=config.episodes,
            out=config.out / "evaluation",
            max_new_tokens=config.sampling.max_new_tokens,
        )
        self.exploration = CollectCommand(
            **self.shared,
            **shown,
            tasks=config.tasks,
            split="rollouts",
            instances=config.instances,
            group=config.group,
            sampling=config.sampling,
        )
        self.expert = replace(self.exploration, policy="expert", group=1, sampling=Sampling())
        self.imitation = SFTCommand(**self.shared, lora=config.lora, track=config.track)
        self.seen: set[tuple[str, str]] = set()  # the first prompts that training has had so far

    def path_of(self, name: str) -> Path:
        """Where a file of the loop lies: in its own folder, or in that of the loop it starts from."""
        return (self.config.start if name in self.reused else self.out) / name

    def first_instance(self, number: int = 1) -> int:
        """The place in its split of a round's first instance; loops of other seeds play other pages."""
        return SEEDS_APART * (self.config.seed - 1) + self.block * (number - 1)

    def collect_once(
        self,
        stage: str,
        name: str,
        command: CollectCommand,
        instances: dict[str, int] | None = None,
    ) -> Path:
        """Play episodes to a file of the loop, unless it is complete."""
        path = self.path_of(name)
        if name not in self.reused and not done_marker(path).is_file():
            counts = self.clock.time(stage, collect, replace(command, out=path), instances)
            if not counts["episodes"]:
                raise ValueError(
                    f"{path}: not one episode could be played, because the browser failed"
                )
            processes.on_rank_0(write_text, done_marker(path), "complete\n")
        if not self.config.adapter:  # what a given one has seen nobody knows
            self.seen |= {episode.first_prompt for episode in read(path)}
        return path

    def play_once(
        self, stage: str, name: str, command: EvaluateCommand, adapter: Path
    ) -> list[Episode]:
        """Play held-out episodes to a file of the loop, unless it is complete, and read them."""
        path = self.path_of(name)
        command = replace(command, out=path.parent)
        marker, complete = done_marker(path), f"complete {' '.join(adapter_sha256(adapter))}\n"
        if marker.is_file():
            if marker.read_text() not in (
                "complete\n",
                complete,
            ):  # before 2026-11-27 without the hash
                raise ValueError(
                    f"{path} was played before {adapter} was trained anew: delete {path.name} "
                    f"and {marker.name}, so that it is played again"
                )
            return held_out(command, path.stem)
        self.clock.time(stage, play_held_out, command, path.stem, adapter)
        episodes = held_out(command, path.stem)
        if missed := {*self.tasks} - {
            e.task for e in episodes
        }:  # a mean over tasks would leave them out
            raise ValueError(
                f"{path}: no episode of {', '.join(sorted(missed))} could be played, as the "
                "browser failed: start the loop again, or play the other tasks by evaluate.py"
            )
        processes.on_rank_0(write_text, marker, complete)
        return episodes

    def first_policy(self) -> tuple[Path, Path | None]:
        """The adapter to start from and the demonstrations. The adapter is given, or made by SFT on
        demonstrations or, without any, on what the base solved itself."""
        config = self.config
        if config.adapter and config.explore != "demonstrations":
            return config.adapter, None
        if (
            config.shots
        ):  # all episodes are shown solved ones, of instances behind the demonstrations'
            expert = replace(
                self.expert,
                split="demos",
                shots=0,
                examples=None,
                instances=config.shots + 4,
                first=self.first_instance() + self.most_demos,
            )
            self.collect_once("demonstrations", "examples.jsonl", expert)
        who, name = (
            (self.expert, "demos") if config.demonstrations else (self.exploration, "selfplay")
        )
        command = replace(
            who, split="demos", first=self.first_instance(), instances=self.most_demos
        )
        data = self.collect_once("demonstrations", f"{name}.jsonl", command, self.demonstrated)
        if config.adapter:
            return config.adapter, data
        out = self.path_of("sft")
        if "sft" not in self.reused:
            options = replace(config.sft, distinct=config.sft.distinct or not config.demonstrations)
            self.clock.time("sft", sft, replace(self.imitation, data=(data,), out=out, sft=options))
        return out / "adapter", data

    def explore(self, number: int, adapter: Path, instances: dict[str, int] | None) -> Explored:
        """Let the agent play the round's instances, and ask experts where the learner needs them."""
        command = replace(self.exploration, adapter=adapter, first=self.first_instance(number))
        folder, golden, played, onward = f"round-{number}", None, [], []
        if (
            revisited := self.config.explore
        ):  # other samples of the same instances, so the indices go on
            command = replace(
                command, first=self.first_instance(), index=self.config.group * (number - 1)
            )
        if revisited == "demonstrations":
            command = replace(command, split="demos")
            instances = self.demonstrated or dict.fromkeys(self.tasks, self.config.demonstrations)
        expert = replace(self.expert, split=command.split, first=command.first)
        if self.config.dpo.pairs in NEEDS_GOLDEN and not self.config.asks_experts():
            golden = (
                self.path_of("demos.jsonl")
                if revisited == "demonstrations"
                else self.collect_once("golden", f"{folder}/golden.jsonl", expert, instances)
            )
        free, stepwise = schedule.split_group(self.config)
        if free:
            agent = replace(command, group=free)
            played.append(
                self.collect_once("explore", f"{folder}/rollouts.jsonl", agent, instances)
            )
        if stepwise:  # their indices follow those of the free episodes, so they are other samples
            steps = "thirds" if self.config.dpo.pairs == "segments" else self.config.golden_steps
            agent = replace(
                command,
                group=stepwise,
                index=command.index + free,
                golden=golden,
                golden_steps=steps,
            )
            played.append(
                self.collect_once("explore", f"{folder}/stepwise.jsonl", agent, instances)
            )
        if self.config.reads_values():
            agent = CollectCommand(
                **self.shared,
                adapter=adapter,
                sampling=self.config.sampling,
                values=self.config.values,
                recorded=played[0],
            )
            onward.append(self.collect_once("values", f"{folder}/values.jsonl", agent))
        if self.config.asks_experts():
            expert = replace(
                expert,
                policy="dagger",
                states=tuple(played),
                group=self.config.states or command.group,
            )
            golden = self.collect_once("dagger", f"{folder}/dagger.jsonl", expert, instances)
        return Explored(played, onward, golden)

    def read_explored(self, number: int, played: Sequence[Path]) -> list[Episode]:
        """What a round explored, of each task what began on its first page, if anything did: others began
        nearer to the goal. Logs success and `group_numbers`."""
        episodes = read_all(played)
        free = {e.task for e in episodes if not e.forced}
        episodes = [e for e in episodes if not e.forced or e.task not in free]
        seen = {"success": sum(e.solved for e in episodes) / len(episodes)} | group_numbers(
            episodes
        )
        processes.on_rank_0(
            self.run.log,
            {"step": number, **{f"explored_{name}": share for name, share in seen.items()}},
        )
        return episodes

    def learn(
        self,
        number: int,
        adapter: Path,
        first: Path,
        demos: Path | None,
        explored: list[list[Path]],
        golden: Path | None,
    ) -> Path:
        """Train on the rollouts; `explored` has those of all rounds so far. Returns the training's folder."""
        config, out = self.config, self.out / f"round-{number}" / self.config.learn
        reference = first if config.reference == "sft" and adapter != first else None
        given = {
            **self.shared,
            "adapter": adapter,
            "reference": reference,
            "data": tuple(explored[-1]),
            "out": out,
            "track": config.track,
        }
        if config.learn == "dpo":
            earlier = tuple(chain(*explored[:-1])) if config.keep_failures else ()
            self.clock.time(
                "dpo", dpo, DPOCommand(**given, golden=golden, failures=earlier, dpo=config.dpo)
            )
        elif config.learn in POLICY_GRADIENTS:
            self.clock.time(config.learn, grpo, GRPOCommand(**given, grpo=config.policy_gradient()))
        elif (
            config.learn == "ppo"
        ):  # whose adapter has its value head beside it, for the next round
            self.clock.time("ppo", ppo, PPOCommand(**given, ppo=config.ppo))
        else:
            fresh, data = config.learn in FRESH, tuple(explored[-1])
            if fresh:  # on all so far
                data = (
                    chain(*explored)
                    if config.learn != "dagger"
                    else (self.path_of(f"round-{n}/dagger.jsonl") for n in range(1, number + 1))
                )
            shown = fresh or config.keep_demonstrations
            options = replace(config.imitation, weighting=config.weighting(), distinct=shown)
            self.clock.time(
                config.learn,
                sft,
                replace(
                    self.imitation,
                    data=(demos, *data) if shown else data,
                    adapter=None if fresh else adapter,
                    out=out,
                    sft=options,
                ),
            )
        if config.average:
            mean = AverageCommand((adapter, out / "adapter"), out=out.parent / "average")
            processes.on_rank_0(average, mean)
        return out

    def adapter_of(self, training: Path) -> Path:
        """What a round leaves: what it trained in this folder, or the mean of that and what it began with."""
        return (training.parent / "average" if self.config.average else training) / "adapter"

    def validate(self, number: int, adapter: Path) -> dict[str, float]:
        """Greedy success by task on validation seeds."""
        command = replace(self.evaluation, split="validation", episodes=self.config.validation)
        episodes = self.play_once("validate", f"validation/round-{number}.jsonl", command, adapter)
        success = success_by_task(episodes)
        processes.on_rank_0(
            self.run.log, {"step": number, "validation_success": mean_success(success)}
        )
        return success

    def report_round(
        self,
        number: int,
        adapter: Path,
        success: dict[str, float],
        validation: list[float],
        episodes: list[Episode],
    ) -> None:
        """Print a round's success on validation seeds, and write its result.json."""
        before = ", ".join(f"{100 * rate:.1f}" for rate in validation[:-1])
        print(f"round {number}: {100 * validation[-1]:.1f} % on validation (before: {before})")
        processes.on_rank_0(
            write_result,
            self.out / f"round-{number}" / "result.json",
            {
                "round": number,
                "validation": validation[-1],
                "tasks": success,
                "adapter": str(adapter),
                "explored": success_by_task(episodes),
            },
        )


def success_by_task(episodes: list[Episode]) -> dict[str, float]:
    return {task: rates["success"] for task, rates in rates_by_task(episodes).items()}


def finish(
    stages: Loop, first: Path, trained: list[Path], best: int, validation: list[float]
) -> dict:
    """Evaluate the first policy and the best round; write result.json, the adapter and the report."""
    config, out, learner, seconds = (
        stages.config,
        stages.out,
        stages.config.learn,
        stages.clock.seconds,
    )
    start = stages.first_name
    policies = {start: first, learner: stages.adapter_of(trained[best])}
    for folder in ("evaluation", "evaluation/sampled"):
        path = out / folder / f"{learner}.jsonl"
        processes.on_rank_0(schedule.remove_if_of_another_round, path, policies[learner])
    greedy, sampled, at_1 = (
        {},
        {},
        replace(stages.evaluation, episodes=config.sampled, temperature=1.0),
    )
    for name, adapter in policies.items():
        stage, file = f"evaluate_{name}", f"{name}.jsonl"
        greedy[name] = stages.play_once(stage, f"evaluation/{file}", stages.evaluation, adapter)
        sampled[name] = stages.play_once(stage, f"evaluation/sampled/{file}", at_1, adapter)
    comparison = compare(greedy[start], greedy[learner])
    result = {
        "agents": {name: summary(greedy[name], sampled[name], stages.seen) for name in policies},
        "comparison": comparison,
        "gain_points": comparison["gain_points"],
        "p_value": comparison["p_value"],
        "validation": validation,
        "kept_round": best + 1,
        "seconds": seconds,
        "seed": config.seed,
        "command": shlex.join(["python", "train.py", "loop", *changed_flags(config)]),
        **circumstances("torch", "playwright", "miniwob", "tokenizers"),
    }
    result["figures"] = flat_figures(result)
    processes.on_rank_0(schedule.copy_adapter, policies[learner], out / "adapter")
    processes.on_rank_0(write_result, out / "result.json", result)
    print("\n" + table(result))
    if len(trained) > 1:
        print(f"The last column is round {best + 1} of {len(trained)}, the best on validation.")
    if validation and validation[best + 1] < validation[0]:
        print(
            f"On validation no round was as good as {'the start' if config.adapter else 'SFT'}: "
            "the last column is the best of those trained."
        )
    processes.on_rank_0(write_loop_report, stages, result, greedy, trained, policies)
    processes.on_rank_0(stages.run.log, {"step": len(trained), **result_metrics(result)})
    further = replace(
        stages.evaluation,
        adapters=(f"{learner}={out}/adapter",),
        out=Path("runs/mine"),
        tasks=config.tasks if config.shots else "report",
        episodes=EvaluateCommand.episodes,
    )
    print(f"""
{sum(seconds.values()):.0f} seconds in all
report    {out / "report.html"}
adapter   {out / "adapter"}   ({"started from" if config.adapter else "SFT alone"}: {first})
next      {as_started(".venv/bin/python evaluate.py")} {shlex.join(changed_flags(further))}""")
    if out == Path("runs/demo") and not PACKAGED.is_dir():
        print("          SEED=2 make demo")
    processes.on_rank_0(stages.run.tracking.finish)  # says how to open what was tracked
    return result


def flat_figures(result: dict) -> dict[str, float]:
    """The figures of a loop, flat like those of a benchmark; `won` and `lost` count instances."""
    comparison = result["comparison"]
    rates = {
        f"{agent}_{name}": result["agents"][agent][part]["success"]
        for agent in result["agents"]
        for name, part in (("success", "all"), ("sampled_success", "sampled"))
    }
    return rates | {
        "gain_points": comparison["gain_points"],
        "won": comparison["only_after"],
        "lost": comparison["only_before"],
        "p_value": comparison["p_value"],
        "seconds": round(sum(result["seconds"].values()), 1),
    }


def write_loop_report(
    stages: Loop,
    result: dict,
    episodes: dict[str, list[Episode]],
    trained: list[Path],
    policies: dict[str, Path],
) -> None:
    """report.html: results, episodes, curves of all stages and, after DPO, some pairs of the best round."""
    config, method, pairs = stages.config, stages.config.learn, []
    first, best = policies.values()
    settings = {
        "model": config.model,
        "seed": config.seed,
        "learn": config.learn,
        "rounds": len(trained),
        "kept": result["kept_round"],
        **({"shots": config.shots} if config.shots else {}),
        **({"average": True} if config.average else {}),
    }
    if config.learn == "dpo":
        method = settings["loss"] = config.dpo.loss
        pairs = shown_pairs(
            trained[result["kept_round"] - 1], config.model, config.machine, first, best
        )
    rounds: dict[int, dict] = {}
    for record in records(stages.out):  # a round's exploring and its validation
        rounds.setdefault(record["step"], {}).update(record)
    curves = {"rounds": list(rounds.values()) if len(rounds) > 1 else []}
    curves |= {} if config.adapter else {"sft": records(first.parent)}
    curves |= {"/".join(folder.parts[-2:]): records(folder) for folder in trained}
    names = ("" if config.adapter else "SFT and ") + method.upper()
    title = f"{len(result['agents'][stages.first_name]['tasks'])} MiniWoB++ tasks, {names}"
    shown_to_it = (
        f"{config.demonstrations_in_total} in all"
        if config.demonstrations_in_total
        else f"{config.demonstrations} a task"
        if config.demonstrations
        else "what the base solved"
    )
    begin = (
        f"Started from {config.adapter}"
        if config.adapter
        else f"Demonstrations for SFT: {shown_to_it}"
    )
    explored = (
        "the instances of the demonstrations"
        if config.explore == "demonstrations"
        else f"{config.instances} instances a task"
        + " on the average" * config.focus
        + " of those unlocked" * (config.curriculum is not None)
    )
    about = (
        f"{config.model}. {begin}. Rounds of {method.upper()}: "
        f"{len(trained)}, of which number {result['kept_round']} was kept. Explored in each: "
        f"{explored}, {config.group} episodes of each. {made_by(result)}"
    )
    shown = {
        "title": title,
        "about": about,
        "settings": settings | result["versions"],
        "seconds": result["seconds"],
    }
    make_report(
        stages.out / "report.html", result, episodes, {**shown, "curves": curves, "pairs": pairs}
    )
