"""Training by hand: one learner, files in, an adapter out. What a user gives is checked here, once."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from minidpo.algorithms.grpo import ADVANTAGES
from minidpo.data import recorded, trl_files
from minidpo.data.episodes import Episode, read, read_all
from minidpo.data.pairs import (
    NothingToLearn,
    check_prompts,
    choose,
    contrast,
    outcome_pairs,
    stepwise_pairs,
    unpaired,
)
from minidpo.data.selection import answers_of_experts, solved
from minidpo.experiment import adapter_sha256, model_sha256
from minidpo.learning import average as averages
from minidpo.learning.dpo import DPO, dpo
from minidpo.learning.explain import explain
from minidpo.learning.policy_gradient import PolicyGradient, mixed_groups, policy_gradient
from minidpo.learning.ppo import PPO, after_last_turn, ppo
from minidpo.learning.rm import RewardModel, reward_model
from minidpo.learning.rollouts import own_rollouts
from minidpo.learning.sft import SFT, sft
from minidpo.memory.context import ContextOptions
from minidpo.memory.lora import LoRAConfig, located, read_config
from minidpo.system import processes
from minidpo.system.files import file_sha256
from minidpo.system.ranges import Checked
from minidpo.system.run_folder import RunFolder
from minidpo.system.tracking import Tracker


@dataclass(frozen=True, kw_only=True)
class Command(ContextOptions):
    """What all commands have that train a model."""

    data: tuple[Path, ...] = (Path("runs/rollouts.jsonl"),)
    "episodes, as collect.py writes them, or what evaluate.py --serve recorded; for sft and dpo also conversations, \
as TRL has them"
    adapter: Path | None = Path("runs/sft/adapter")
    "adapter to start from: folder or hub id"
    out: Path = Path("runs/mine")
    "run folder: adapter/, metrics.jsonl, config.json"
    track: Tracker | None = None
    "copy each step to MLflow (where MLFLOW_TRACKING_URI says), to TensorBoard (OUT/tensorboard) or to trackio"

    def __post_init__(self):
        super().__post_init__()
        if len({path.resolve() for path in self.data}) < len(self.data):
            raise ValueError("--data names a file twice, and what is in it would count twice")

    def open_run(self, *also: Path, **adapters: Path | None) -> RunFolder:
        """The run's folder, which knows its inputs by content: model, `data`, `also` and adapters. Raises
        ValueError if it holds another run, or something that this one reads."""
        adapters = {"adapter": self.adapter, **adapters}
        files = [*self.data, *also]
        written = ("adapter", "pairs.jsonl", "metrics.jsonl")
        for path in filter(None, [*files, *adapters.values()]):
            if path.resolve() in [(self.out / name).resolve() for name in written]:
                raise ValueError(
                    f"--out {self.out} would overwrite {path}, which it reads: give another"
                )
        hashes = {
            "data_sha256": [file_sha256(path) for path in files],
            "model_sha256": model_sha256(self.model),
        }
        for name, adapter in adapters.items():
            hashes[f"{name}_sha256"] = adapter_sha256(adapter) if adapter else None
        return RunFolder(self.out, {**asdict(self), **hashes})


@dataclass(frozen=True, kw_only=True)
class SFTCommand(Command):
    """Fine-tune LoRA adapters on episodes: demonstrations, or what an agent solved by itself."""

    data: tuple[Path, ...] = (Path("runs/demos.jsonl"),)
    adapter: Path | None = None
    out: Path = Path("runs/sft")
    sft: SFT = SFT()
    lora: LoRAConfig = field(default_factory=LoRAConfig)


def run_sft(command: SFTCommand) -> Path:
    if trl_files.are_trl_files(command.data):
        examples = trl_files.read_demonstrations(command.data)
    else:
        examples = imitated(played_in(command.data), command.data)
    if command.adapter and command.lora not in (LoRAConfig(), read_config(command.adapter)):
        raise ValueError(
            f"--adapter {command.adapter} has a shape of its own: leave out lora's options"
        )
    run, context = command.open_run(), command.context()
    return sft(run, context, examples, command.sft, start=command.adapter, shape=command.lora)


def played_in(files: Sequence[Path]) -> list[Episode]:
    """The episodes of some files, recorded ones among them."""
    return recorded.read(files) if recorded.are_recorded(files) else read_all(files)


def imitated(episodes: Sequence[Episode], files: Sequence[Path]) -> list[Episode]:
    """The episodes that were solved; of an expert in an agent's states, the first answers."""
    played = [e for e in episodes if not e.relabelled]
    found = [*solved(played), *answers_of_experts([e for e in episodes if e.relabelled])]
    if not found:
        raise NothingToLearn(
            f"{' '.join(map(str, files))}: none of {len(episodes)} episodes was solved: explore more, or "
            "easier tasks"
        )
    return found


@dataclass(frozen=True, kw_only=True)
class DPOCommand(Command):
    """Train an adapter on pairs of episodes, of which one went better."""

    pairs: Literal["outcome", "contrast", "steps", "unpaired"] = "outcome"
    "outcome: successes over failures; contrast: golden episodes against the agent's (ETO); steps: ways on from \
golden steps (ETO, appendix C); unpaired: each episode, or row with a label, alone (kto)"
    golden: Path | None = None
    "with contrast and steps: solved episodes of the same instances"
    reference: Path | None = None
    "adapter of the reference; None: the one it starts from"
    export: bool = False
    "train nothing; write the pairs as TRL's DPOTrainer reads them, to OUT/pairs-trl.jsonl"
    explain: bool = False
    "train nothing; print the first pair as the loss sees it, token by token"
    out: Path = Path("runs/dpo")
    dpo: DPO = DPO()

    def __post_init__(self):
        super().__post_init__()
        if self.adapter is None:
            raise ValueError("DPO starts from an adapter: name it with --adapter")
        if (self.pairs in ("contrast", "steps")) != (self.golden is not None):
            raise ValueError(
                "golden episodes are for --pairs contrast and steps: give both, or neither"
            )
        if (self.pairs == "unpaired") != (self.dpo.loss == "kto"):
            raise ValueError(
                "--pairs unpaired and --dpo.loss kto judge each episode alone: give both"
            )
        if self.export and self.explain:
            raise ValueError("explain shows a pair and export writes them all: ask for one")


def run_dpo(command: DPOCommand) -> Path | dict:
    options = command.dpo
    if trl_files.are_trl_files(command.data):
        if command.changed("golden", "export"):  # golden is there with its two rules for pairs
            raise ValueError("--data holds rows to learn from: leave out pairs, golden and export")
        if command.pairs == "unpaired":
            pairs = trl_files.read_judged(command.data, command.seed)
        else:
            pairs = trl_files.read_preferences(command.data, options.until)
    else:
        limits = {"per_task": options.pairs_per_task, "until": options.until}
        pairs = choose(pairs_of(command), options.pairs_per_instance, command.seed, **limits)
    if command.export:
        if recorded.are_recorded(command.data):
            raise ValueError("recorded calls are token ids, no messages: leave out export")
        path = command.out / "pairs-trl.jsonl"
        system = command.context().world.system_prompt
        return processes.on_rank_0(trl_files.write_pairs, pairs, path, options.until, system)
    reference = command.reference
    if command.explain:
        processes.refuse_torchrun("a pair is not explained")
        context = command.context()
        return explain(context, pairs, options, adapter=command.adapter, reference=reference)
    golden = [command.golden] if command.golden else []
    run = command.open_run(*golden, reference=reference)
    return dpo(run, command.context(), pairs, options, start=command.adapter, reference=reference)


def pairs_of(command: DPOCommand) -> list:
    """The pairs that the rule asked for finds in the files."""
    episodes = played_in(command.data)
    golden = read(command.golden) if command.golden else []
    check_prompts([*episodes, *golden])
    if any(episode.relabelled for episode in episodes):
        raise ValueError("--data has experts' answers to states, which train.py sft imitates")
    if command.pairs == "outcome":
        return outcome_pairs(episodes)
    if command.pairs == "contrast":
        return contrast(golden, episodes)
    if command.pairs == "steps":
        return stepwise_pairs(golden, episodes)
    return unpaired(episodes, command.seed)


@dataclass(frozen=True, kw_only=True)
class GRPOCommand(Command):
    """Train an adapter on its own episodes by their advantage over others of the same instance."""

    advantage: Literal["grpo", "dr-grpo", "rloo"] = "grpo"
    "how much better an episode was than its group, as in `algorithms/grpo`"
    out: Path = Path("runs/grpo")
    gradient: PolicyGradient = PolicyGradient()


def run_grpo(command: GRPOCommand) -> Path:
    episodes = mixed_groups(own_rollouts(played_in(command.data)))
    advantages = ADVANTAGES[command.advantage](episodes)
    more = {"start": command.adapter, "advantages": advantages}
    run, context = command.open_run(), command.context()
    return policy_gradient(run, context, episodes, command.gradient, **more)


@dataclass(frozen=True, kw_only=True)
class PPOCommand(Command):
    """Train an adapter and a value function on the adapter's own episodes and their verdicts."""

    out: Path = Path("runs/ppo")
    ppo: PPO = PPO()


def run_ppo(command: PPOCommand) -> Path:
    episodes = own_rollouts(played_in(command.data))
    if len({e.solved for e in episodes}) < 2:
        raise NothingToLearn(
            "all episodes were solved, or none, so no turn was better than another"
        )
    rewards = after_last_turn([float(e.solved) for e in episodes], episodes)
    run, context = command.open_run(), command.context()
    return ppo(run, context, episodes, command.ppo, start=command.adapter, rewards=rewards)


@dataclass(frozen=True, kw_only=True)
class RMCommand(Command):
    """Train a reward model: a scalar head and an adapter that order episodes."""

    out: Path = Path("runs/rm")
    rm: RewardModel = RewardModel()


def run_rm(command: RMCommand) -> Path:
    if trl_files.are_trl_files(command.data):
        pairs, attempts = trl_files.read_preferences(command.data, "end"), []
    else:
        episodes = played_in(command.data)
        check_prompts(episodes)
        pairs = choose(outcome_pairs(episodes), DPO.pairs_per_instance, command.seed)
        attempts = [e for e in episodes if e.turns and not e.forced]
    run, context = command.open_run(), command.context()
    return reward_model(run, context, pairs, command.rm, start=command.adapter, attempts=attempts)


@dataclass(frozen=True)
class AverageCommand(Checked):
    """Make one adapter of several that were trained from the same one: the mean of their weights."""

    adapters: tuple[Path, ...]
    "two or more: folders or hub ids"
    weights: tuple[float, ...] = ()
    "how much each counts, in the order of the adapters; by default all the same"
    out: Path = Path("runs/average")
    "run folder; the mean goes to OUT/adapter"

    def __post_init__(self):
        super().__post_init__()
        if len(self.adapters) < 2:
            raise ValueError("a mean is of two adapters or more: name them all after --adapters")
        if self.weights and len(self.weights) != len(self.adapters):
            raise ValueError(
                f"{len(self.weights)} weights for {len(self.adapters)} adapters: give one each"
            )
        if not all(0 < weight < math.inf for weight in self.weights):
            raise ValueError(f"weights must be finite and above 0, got {self.weights}")


def run_average(command: AverageCommand) -> Path:
    if (command.out / "adapter").resolve() in [path.resolve() for path in command.adapters]:
        raise ValueError(f"--out {command.out} would overwrite one of the adapters: give another")
    hashes = [adapter_sha256(located(adapter)) for adapter in command.adapters]
    run = RunFolder(command.out, {**asdict(command), "adapters_sha256": hashes})
    return averages.average(run, command.adapters, command.weights)
