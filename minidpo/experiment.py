"""An experiment: a folder of stages that resume by themselves. Algorithms are pages written on these stages.

Each method of `Experiment` is a stage: numbered in the order of calls and named (`03-play.jsonl`, `04-dpo/`),
done once. Beside it a note (`04-dpo.json`) holds its key: the settings, and the content of all that determined
its tokens and numbers. The same program started again finds what is done and goes on in the middle of what is
not. A stage whose note says otherwise is refused, never overwritten.
"""

import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from envs.protocol import World
from minidpo.acting.collect import play_to_file
from minidpo.acting.jobs import (
    Job,
    continuations,
    make_jobs,
    split_instances,
    to_agent_states,
    with_golden_steps,
    with_shots,
)
from minidpo.acting.policies import Policy as Player
from minidpo.acting.policies import Sampling, expert_policy, model_policy
from minidpo.acting.reflection import retry_jobs, words_after
from minidpo.data.episodes import Episode, grouped, instances_of, read
from minidpo.data.information import group_numbers
from minidpo.data.pairs import NothingToLearn, choose
from minidpo.learning.average import average
from minidpo.learning.dpo import DPO, dpo
from minidpo.learning.policy_gradient import PolicyGradient, policy_gradient
from minidpo.learning.ppo import PPO, ppo
from minidpo.learning.rm import (
    RewardModel,
    episode_rewards,
    reward_model,
    step_model,
    step_rewards,
)
from minidpo.learning.sft import SFT, sft
from minidpo.learning.trainer import Optimizer
from minidpo.memory import lora
from minidpo.memory.context import Context, ContextOptions
from minidpo.memory.lora import LoRAConfig
from minidpo.memory.machine import Machine, device_and_dtype
from minidpo.memory.plan import acting_in
from minidpo.model import scalar_head
from minidpo.model.checkpoint import files_of
from minidpo.system import processes
from minidpo.system.files import as_json, file_sha256, read_json, write_json, write_text
from minidpo.system.ranges import NotNegative, Positive
from minidpo.system.run_folder import RunFolder, changed_settings, lock
from minidpo.system.tracking import Tracker

VERSION = 1  # of a stage's note
SEEDS = 100  # of experiments that share no instance: each has a hundredth of a split's seeds
SHARED_BELOW = (
    10_000  # instances, too few for that: each experiment has them all, from its own place round
)

Instance = tuple[str, int]  # task, seed


@dataclass(frozen=True, kw_only=True)
class ExperimentOptions(ContextOptions):
    """What every algorithm has: the model, the tasks, how policies are measured, and where all is written."""

    model: str = "smollm2"
    tasks: str = "demo"
    "suites or task names, separated by commas"
    out: Path = Path("runs/mine")
    "folder of the experiment: numbered stages, adapter/, result.json, report.html"
    seed: Positive[int] = 1
    "of everything random; experiments of other seeds play other instances"
    reuse: Path | None = None
    "folder of another experiment: its finished stages with the same settings and inputs are taken"
    shots: NotNegative[int] = 0
    "solved examples of its task that are shown before each episode, by the scripted experts"
    validation: Positive[int] = 20
    "validation instances a task, played greedily by each policy: the best policy is kept"
    patience: Positive[int] = 2
    "stop after so many policies that were not better than the best before them"
    episodes: Positive[int] = 100
    "held-out instances a task, played greedily by the first policy and the best one"
    sampled: Positive[int] = 25
    "held-out instances a task that these two play at temperature 1 as well"
    least_instances: Positive[int] = 8
    "a round whose pairs come from fewer instances is skipped: so few teach little and can do harm"
    track: Tracker | None = None
    "copy all numbers to MLflow (where MLFLOW_TRACKING_URI says), to TensorBoard (OUT/tensorboard) or to trackio"
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    sampling: Sampling = field(default_factory=Sampling)


class Policy(NamedTuple):
    """An adapter that acts, named after the stage that made it."""

    adapter: Path | None  # None: the base model alone
    name: str
    sha256: str  # of the adapter's files


class Experiment:
    """The stages of one experiment. Use as a context manager, which locks the folder."""

    def __init__(self, options: ExperimentOptions, world: World, tasks: Sequence[str]):
        self.options, self.world, self.tasks = options, world, list(tasks)
        self.folder, self.seed = options.out, options.seed
        self.context = Context(options.model, world, options.seed, options.machine)
        self.base = Policy(None, "base", "")
        self.examples: list[Episode] = []  # shown before each episode
        self.seen: set[tuple] = set()  # first prompts that training has had
        self.seconds: dict[str, float] = {}  # by kind of stage
        self.curves: dict[str, Path] = {}  # training stages, by the name of what they made
        self.pairs: dict[str, tuple] = {}  # by a policy's name: its pairs, their cut, its start
        self.metrics: list[dict] = []
        self.greedy: dict[str, list[Episode]] = {}  # held-out episodes, by the policy's name
        self._number = 0
        self._names: Counter[str] = Counter()
        self._taken: Counter[tuple[str, str]] = Counter()  # instances, by split and task
        self._validated: dict[str, dict[str, float]] = {}  # success by task, by the policy's sha256
        self._lock = None

    def __enter__(self) -> "Experiment":
        if self.options.reuse is not None:
            require_experiment(self.options.reuse)
        if self.seed > SEEDS:
            raise ValueError(
                f"--seed goes up to {SEEDS}, got {self.seed}: others share no instances"
            )
        self._lock = processes.on_rank_0(lock, self.folder)
        self.common = {
            "world": self.world.name,
            "seed": self.seed,
            "base": kept_sha256(self.options.model, self.folder / "base.json"),
            **numbers_of(acting_in(self.options.model, self.options.machine)),
        }
        if self.options.shots:
            self.examples = self.experts(self._take("demos", self.options.shots + 4), "examples")
        return self

    def __exit__(self, *_) -> None:
        if self._lock is not None:
            self._lock.close()

    # ---- instances ----

    def instances(self, count: int | Mapping[str, int]) -> list[Instance]:
        """The next unseen instances: so many of each task, or as many as it is told for each."""
        return self._take("rollouts", count)

    def _take(self, split: str, count: int | Mapping[str, int]) -> list[Instance]:
        counts = count if isinstance(count, Mapping) else dict.fromkeys(self.tasks, count)
        instances = []
        for task, n in counts.items():
            taken = self._taken[split, task]
            total = len(self.world.instances(task, split))
            most = total // SEEDS
            first = most * (self.seed - 1) + taken
            if total < SHARED_BELOW:
                first = total * (self.seed - 1) // SEEDS + taken
                every = split_instances(self.world, {task: total}, split)
                instances += [every[k % total] for k in range(first, first + min(n, total))]
            elif taken + n <= most:
                instances += split_instances(self.world, {task: n}, split, first)
            else:
                raise ValueError(
                    f"{task}: an experiment may play {most:,} instances of a task, beyond which it would meet "
                    "those of the next seed: ask for fewer"
                )
            self._taken[split, task] += n
        return instances

    def panel(self, split: str, count: int) -> list[Instance]:
        """The first instances of each task in a split: policies are measured on them, whatever the seed."""
        return split_instances(self.world, dict.fromkeys(self.tasks, count), split)

    # ---- playing ----

    def demonstrations(self, count: int) -> list[Episode]:
        """`count` golden episodes of each task, by the world's scripted experts, on unseen instances."""
        return self.experts(self._take("demos", count), "demonstrations")

    def experts(self, instances: Sequence[Instance], name: str = "experts") -> list[Episode]:
        """Golden episodes of these instances."""
        return self._play_experts(name, make_jobs(self.world, instances)) if instances else []

    def play(
        self,
        policy: Policy,
        instances: Sequence[Instance],
        group: int = 1,
        *,
        index: int = 0,
        golden: Sequence[Episode] = (),
        on_policy: bool = False,
    ) -> list[Episode]:
        """The policy plays each instance `group` times, as `--sampling` says.

        index: the number of the first episode of a group; other numbers are other samples. golden: each episode
        begins with the first steps of its instance's golden episode, each number of steps in turn (ETO, appendix
        C). on_policy: raises ValueError unless episodes are samples of the policy itself, at temperature 1.
        """
        sampling = self.options.sampling
        if on_policy and replace(sampling, max_new_tokens=Sampling.max_new_tokens) != Sampling():
            raise ValueError(
                "policy gradients take samples of the policy itself: leave out sampling.temperature, "
                "sampling.temperatures and sampling.top_p"
            )
        jobs = make_jobs(self.world, instances, group, index)
        if golden:
            jobs = with_golden_steps(jobs, golden)
        episodes = self._play("play", jobs, policy, sampling)
        self._learned_from(episodes)
        free = [e for e in episodes if not e.forced] or episodes
        self.log({"explored_success": rate(free), **group_numbers(free)})
        return episodes

    def continue_from(
        self, policy: Policy, episodes: Sequence[Episode], count: int
    ) -> list[Episode]:
        """`count` continuations by the policy from each later step of these episodes (for `step_values`)."""
        jobs = continuations(self.world, episodes, count)
        return self._play("continue", jobs, policy, self.options.sampling)

    def ask_experts(self, episodes: Sequence[Episode], states: int) -> list[Episode]:
        """The experts play on from up to `states` states of each instance that these episodes reached (DAgger)."""
        instances = instances_of(episodes)
        jobs = to_agent_states(make_jobs(self.world, instances, states), episodes, self.seed)
        return self._play_experts("ask-experts", jobs, relabels=True)

    def reflect(self, policy: Policy, failed: Sequence[Episode], retries: int) -> list[Episode]:
        """The policy says of each failure what went wrong, and plays its instance again after these words.

        Returns the new attempts as if the words had not been shown, so that they can be imitated without them.
        """
        if not failed:
            return []
        sampling = self.options.sampling
        inputs = {"policy": policy.sha256, "failed": content(failed)}

        def make(path: Path) -> None:
            pages = self.options.machine.page_count()
            player = model_policy(self.context, policy.adapter, sampling, pages=pages)
            words = words_after(player, failed)
            processes.on_rank_0(write_json, path, {"words": words})

        path = self.stage("reflect", {"sampling": asdict(sampling)}, inputs, make, ".words.json")
        words = read_json(path)["words"]
        jobs = retry_jobs(self.world, failed, words, retries)
        if not jobs:
            return []
        again = self._play("retry", jobs, policy, sampling)
        shots = {episode.instance: episode.shots for episode in failed}
        return [replace(episode, shots=shots[episode.instance]) for episode in again]

    def validate(self, policy: Policy) -> float:
        """The policy's greedy success on the validation instances, a mean over tasks."""
        return mean_of(self.success_by_task(policy))

    def success_by_task(self, policy: Policy) -> dict[str, float]:
        """The same by task."""
        if policy.sha256 not in self._validated:
            jobs = make_jobs(self.world, self.panel("validation", self.options.validation))
            episodes = self._play("validate", jobs, policy, self._greedy())
            tasks = grouped(episodes, lambda e: e.task)
            by_task = {task: rate(played) for task, played in tasks.items()}
            self._validated[policy.sha256] = by_task
            self.log({"validation_success": mean_of(by_task)})
        return self._validated[policy.sha256]

    def held_out(self, policy: Policy, episodes: int, temperature: float) -> list[Episode]:
        """The policy plays the first held-out instances of each task."""
        jobs = make_jobs(self.world, self.panel("test", episodes))
        sampling = replace(self._greedy(), temperature=temperature)
        name = f"held-out/{policy.name}" + ("" if temperature == 0 else "-sampled")
        return self._play(name, jobs, policy, sampling)

    def _greedy(self) -> Sampling:
        return Sampling(0.0, max_new_tokens=self.options.sampling.max_new_tokens)

    def _play(
        self, name: str, jobs: list[Job], policy: Policy, sampling: Sampling
    ) -> list[Episode]:
        def player() -> Player:
            pages = self.options.machine.page_count()
            return model_policy(self.context, policy.adapter, sampling, pages=pages)

        settings = {"sampling": asdict(sampling)}
        return self._to_file(name, jobs, player, settings, {"policy": policy.sha256})

    def _play_experts(self, name: str, jobs: list[Job], *, relabels: bool = False) -> list[Episode]:
        def player() -> Player:
            return expert_policy(self.context, self.tasks, relabels=relabels)

        player()  # a task without an expert is refused now, not after an hour
        episodes = self._to_file(name, jobs, player, {}, {})
        self._learned_from(episodes)
        return episodes

    def _to_file(
        self,
        name: str,
        jobs: list[Job],
        player: Callable[[], Player],
        settings: dict,
        inputs: dict,
    ) -> list[Episode]:
        """Play jobs as a stage: all that they are is in its key, first steps and examples, too."""
        if self.examples and not any(job.shots for job in jobs):
            jobs = with_shots(jobs, self.examples, self.options.shots)

        def make(path: Path) -> None:
            counts = play_to_file(player(), jobs, path, context=self.context, title=name)
            if not counts["episodes"]:
                raise ValueError(
                    f"{path}: not one episode could be played, because the world failed"
                )

        inputs = {**inputs, "jobs": content(jobs)}
        return read(self.stage(name, settings, inputs, make, ".jsonl"))

    def _learned_from(self, episodes: Sequence[Episode]) -> None:
        self.seen |= {episode.first_prompt for episode in episodes}

    # ---- training ----

    def sft(
        self,
        episodes: Sequence[Episode],
        options: SFT,
        *,
        weights: Sequence[float] | None = None,
        start: Policy | None = None,
    ) -> Policy:
        """Imitate episodes. weights: how much each counts; start: the policy to go on from (None: the base).
        Raises NothingToLearn without episodes."""
        if not episodes:
            raise NothingToLearn("no episode is to be imitated: explore more, or easier tasks")
        shape = self.options.lora
        return self._train("sft", sft, [episodes], options, start, weights=weights, shape=shape)

    def dpo(
        self,
        policy: Policy,
        pairs: Sequence,
        options: DPO,
        *,
        reference: Policy | None = None,
        rehearsed: Sequence[Episode] = (),
        rehearse: int = 0,
    ) -> Policy:
        """Train the policy on pairs, a few of each instance. reference: None is the policy as it is now.

        Returns the same policy, and says so, where the pairs come from fewer than `--least-instances` instances.
        rehearsed, rehearse: as in `learning/dpo`.
        """
        limits = {"per_task": options.pairs_per_task, "until": options.until}
        try:
            chosen = choose(pairs, options.pairs_per_instance, self.seed, **limits)
        except NothingToLearn:
            chosen = []
        instances = {pair.chosen.instance for pair in chosen}
        tasks = {task for task, _ in instances}
        told = f"{len(chosen)} pairs of {len(instances)} instances of {len(tasks)} tasks"
        least = self.options.least_instances
        if len(instances) < least:
            print(
                f"{told}: fewer than {least} instances teach little and can do harm, so this round is skipped"
            )
            return policy
        print(told)
        more = {"reference": reference, "rehearsed": rehearsed, "rehearse": rehearse}
        trained = self._train("dpo", dpo, [chosen], options, policy, **more)
        self.pairs[trained.name] = chosen, options.until, policy
        return trained

    def policy_gradient(
        self,
        policy: Policy,
        episodes: Sequence[Episode],
        options: PolicyGradient,
        advantages: Sequence[Tensor],
        *,
        reference: Policy | None = None,
    ) -> Policy:
        """Train the policy on its own episodes, each turn weighed by its advantage: (turns,) of each episode."""
        more = {"advantages": advantages, "reference": reference}
        return self._train("grpo", policy_gradient, [episodes], options, policy, **more)

    def ppo(
        self,
        policy: Policy,
        episodes: Sequence[Episode],
        options: PPO,
        rewards: Sequence[Tensor],
        *,
        reference: Policy | None = None,
    ) -> Policy:
        """Train the policy and its value head on its own episodes and what each turn was paid, (turns,) each."""
        more = {"rewards": rewards, "reference": reference}
        return self._train("ppo", ppo, [episodes], options, policy, **more)

    def reward_model(
        self,
        policy: Policy,
        pairs: Sequence,
        options: RewardModel,
        *,
        attempts: Sequence[Episode] = (),
    ) -> Policy:
        """A Bradley-Terry reward model on pairs, from the policy's adapter. attempts: the agent's episodes, by
        which it is told what the best of n would gain. Raises NothingToLearn without pairs."""
        if not pairs:
            raise NothingToLearn("no two episodes of one instance differ in their verdict")
        more = {"attempts": attempts}
        return self._train("reward-model", reward_model, [pairs], options, policy, **more)

    def step_model(
        self,
        policy: Policy,
        episodes: Sequence[Episode],
        values: Sequence[Sequence[float]],
        options: RewardModel,
    ) -> Policy:
        """A step head: at each turn's end it is to say the value there, `step_values` of each episode."""
        return self._train("step-model", step_model, [episodes, values], options, policy)

    def episode_rewards(self, model: Policy, episodes: Sequence[Episode]) -> list[float]:
        """What a reward model says of each episode."""
        return episode_rewards(self.context, model.adapter, episodes)

    def step_rewards(self, model: Policy, episodes: Sequence[Episode]) -> list[Tensor]:
        """What a step head says of each turn, (turns,) of each episode."""
        return step_rewards(self.context, model.adapter, episodes)

    def average(self, *policies: Policy) -> Policy:
        """The mean of the policies' weights (WiSE-FT)."""
        inputs = {"policies": content(policies)}
        adapters = [policy.adapter for policy in policies]

        def make(folder: Path) -> None:
            average(RunFolder(folder, inputs), adapters)

        return self._named("average", self.stage("average", {}, inputs, make))

    def _train(
        self,
        name: str,
        learner: Callable[..., Path],
        data: list,
        options: Optimizer,
        start: Policy | None,
        **more,
    ) -> Policy:
        """A stage in which a learner makes an adapter of data, from the policy `start`."""
        settings = {"options": asdict(options)}
        given = {"data": data, "start": start, **more}
        inputs = {key: content(value) for key, value in given.items()}
        adapters = {key: value.adapter for key, value in more.items() if isinstance(value, Policy)}
        first = start.adapter if start else None

        def make(folder: Path) -> None:
            run = RunFolder(folder, {**settings, "inputs": inputs})
            learner(run, self.context, *data, options, start=first, **{**more, **adapters})

        return self._named(name, self.stage(name, settings, inputs, make))

    def _named(self, name: str, folder: Path) -> Policy:
        self._names[name] += 1
        if self._names[name] > 1:
            name = f"{name}-{self._names[name]}"
        self.curves[name] = folder
        return self.policy(folder / "adapter", name)

    def policy(self, adapter: Path, name: str = "start") -> Policy:
        """An adapter from elsewhere as a policy."""
        return Policy(adapter, name, adapter_sha256(adapter))

    # ---- stages ----

    def stage(
        self,
        name: str,
        settings: dict,
        inputs: dict,
        make: Callable[[Path], None],
        suffix: str = "",
    ) -> Path:
        """Do a stage once: `make` writes to the path that is returned, and goes on there after a kill.

        settings and inputs are its key. Raises ValueError if the stage was made with another one. A name within
        a folder has no number: these stages come after all others.
        """
        stem = name
        if "/" not in name:
            self._number += 1
            stem = f"{self._number:02}-{name}"
        path, note = self.folder / f"{stem}{suffix}", self.folder / f"{stem}.json"
        key = as_json({"settings": {**self.common, **settings}, "inputs": inputs})
        processes.on_rank_0(self._claim, path, note, suffix, key)
        found = read_json(note)
        seconds = found["seconds"]
        if not found["done"]:
            began = time.perf_counter()
            make(path)
            seconds = round(time.perf_counter() - began, 1)  # of a killed stage since its restart
            record = {"version": VERSION, **key, "done": True, "seconds": seconds}
            processes.on_rank_0(write_json, note, record)
        kind = name.partition("/")[0]
        self.seconds[kind] = round(self.seconds.get(kind, 0.0) + seconds, 1)
        return path

    def _claim(self, path: Path, note: Path, suffix: str, key: dict) -> None:
        """Write the stage's note, unless there is one, or another experiment has the finished stage."""
        if note.is_file():
            found = read_json(note)
            changed = changed_settings(found["settings"], key["settings"])
            others = [name for name, x in key["inputs"].items() if found["inputs"].get(name) != x]
            if changed or others:
                told = "; ".join(filter(None, [changed, *(f"other {name}" for name in others)]))
                raise ValueError(
                    f"{path}: this stage was made with other settings ({told}): give another --out, with "
                    f"--reuse {self.folder} to take what is the same, or delete this stage and what follows"
                )
            return
        if self.options.reuse is not None and self._reused(path, note, suffix, key):
            return
        note.parent.mkdir(parents=True, exist_ok=True)
        write_json(note, {"version": VERSION, **key, "done": False, "seconds": 0.0})

    def _reused(self, path: Path, note: Path, suffix: str, key: dict) -> bool:
        for other in filter(is_note, sorted(self.options.reuse.rglob("*.json"))):
            found, made = read_json(other), other.with_suffix(suffix)
            if found["done"] and made.exists() and all(found[name] == key[name] for name in key):
                note.parent.mkdir(parents=True, exist_ok=True)
                if made.is_dir():
                    shutil.copytree(made, path, dirs_exist_ok=True)
                else:
                    shutil.copyfile(made, path)
                shutil.copyfile(other, note)
                print(f"{path}: taken from {made}")
                return True
        return False

    # ---- what a reader and a tracker get ----

    def log(self, record: dict) -> None:
        """Add a line to the experiment's metrics.jsonl; `step` is the number of the stage."""
        self.metrics.append({"step": self._number, **record})
        text = "".join(json.dumps(line) + "\n" for line in self.metrics)
        processes.on_rank_0(write_text, self.folder / "metrics.jsonl", text)


def mean_of(rates: Mapping[str, float]) -> float:
    """The mean over tasks, rounded, so that the order of a sum cannot decide between two equal policies."""
    return round(sum(rates.values()) / len(rates), 9)


def rate(episodes: Sequence[Episode]) -> float:
    return sum(e.solved for e in episodes) / len(episodes)


def sha256_of(value: object) -> str:
    """SHA-256 of a value's JSON."""
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()


def content(value: object) -> str:
    """SHA-256 of all that a stage reads: episodes whatever they cost, policies wherever their adapter is kept."""
    return sha256_of(_plain(value))


def _plain(value: object) -> object:
    if isinstance(value, Episode):
        player = value.policy.rpartition("@")[2]  # its fingerprint, without the adapter's place
        return asdict(replace(value, policy=player, cost=None))
    if isinstance(value, Policy):
        return value.sha256
    if isinstance(value, Tensor):
        return value.tolist()
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def files_sha256(model: str) -> list[list[str]]:
    """Name and SHA-256 of each of a base's files: weights, shape, tokenizer, chat template."""
    return [[file.name, file_sha256(file)] for file in files_of(model)]


def kept_sha256(model: str, kept: Path) -> str:
    """SHA-256 of `files_sha256`, which `kept` remembers beside sizes and times of change: fifteen gigabytes are
    read once."""
    state = [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in files_of(model)]
    found = read_json(kept) if kept.is_file() else {"files": None}
    if found["files"] != state:
        found = {"files": state, "sha256": sha256_of(files_sha256(model))}
        processes.on_rank_0(write_json, kept, found)
    return found["sha256"]


def model_sha256(model: str) -> dict[str, str]:
    """SHA-256 of a base's weights, whatever their files are called, and of each other file by its name."""
    hashes = files_sha256(model)
    others = {
        name: digest
        for name, digest in hashes
        if name.endswith((".json", ".jinja")) and not name.endswith(".index.json")
    }
    weights = [digest for name, digest in hashes if name not in others]
    return {"weights": sha256_of(weights), **others}


def adapter_sha256(adapter: Path) -> str:
    """SHA-256 of an adapter's files, with its head if it has one."""
    folder = lora.located(adapter)
    names = [*lora.FILES, *(path.name for path in folder.glob(scalar_head.FILE))]
    return sha256_of([file_sha256(folder / name) for name in names])


def numbers_of(machine: Machine) -> dict:
    """What of the machine decides numbers, and not only memory or time."""
    device, dtype = device_and_dtype(machine)
    return {
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "act_dtype": machine.act_dtype,
        "quantize": machine.quantize,
    }


def is_note(path: Path) -> bool:
    """Whether a JSON file is the note of a stage."""
    try:
        return {"settings", "inputs", "done", "seconds"} <= read_json(path).keys()
    except ValueError:
        return False


def require_experiment(folder: Path) -> None:
    """Raises ValueError if a folder holds no experiment."""
    if not any(is_note(path) for path in folder.glob("*.json")):
        raise ValueError(f"--reuse {folder}: no stage of an experiment in this folder")
