"""25. Configuration: every option, its default, its unit, in one place.

One frozen dataclass a command, made of smaller ones that commands share. The string under a field is its help text,
there is no other. A TOML file gives defaults, flags win; what a run used is written beside its results. Read by the
scripts.
"""

import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from minidpo.lora import LoRAConfig

NANO = "minidpo/nano"


def _positive(config, *names: str) -> None:
    for name in names:
        if getattr(config, name) <= 0:
            raise ValueError(f"{name} must be greater than 0, got {getattr(config, name)}")


@dataclass(frozen=True)
class Machine:
    """Where it runs."""

    device: str = "auto"
    "cpu, cuda, cuda:1 ...; auto takes a GPU if there is one"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    "of the base's weights; auto is bfloat16 on a GPU and float32 on a CPU"
    pages: int = 32
    "browser pages played at once, which is also the batch of the sampler"
    micro_tokens: int = 8192
    "tokens (with padding) in one forward pass of training; lower saves memory and changes no result"
    recompute: bool = False
    "gradient checkpointing: keep only block inputs, compute the rest again in backward (saves memory, costs time)"

    def __post_init__(self):
        _positive(self, "pages", "micro_tokens")


@dataclass(frozen=True)
class Sampling:
    """How a model answers."""

    temperature: float = 1.0
    "of the sampler; 0 is greedy"
    top_p: float = 1.0
    "keep the most probable tokens up to this mass"
    max_new_tokens: int = 96
    "tokens an answer may have"

    def __post_init__(self):
        _positive(self, "max_new_tokens")
        if self.temperature < 0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")


@dataclass(frozen=True)
class Optimizer:
    """AdamW with a cosine schedule."""

    steps: int = 100
    "optimizer steps"
    lr: float = 1e-3
    "full learning rate, after the warm-up"
    warmup: int = 10
    "steps of linear warm-up"
    weight_decay: float = 0.0
    "AdamW's decoupled weight decay"
    clip: float = 1.0
    "largest norm of the gradient"
    save_every: int = 25
    "steps between two states that a killed run can go on from"

    def __post_init__(self):
        _positive(self, "steps", "lr", "clip", "save_every")
        if self.warmup < 0 or self.weight_decay < 0:
            raise ValueError("warmup and weight_decay must be at least 0")


@dataclass(frozen=True)
class SFT(Optimizer):
    """Supervised fine-tuning on demonstrations."""

    batch: int = 8
    "episodes a step"

    def __post_init__(self):
        super().__post_init__()
        _positive(self, "batch")


@dataclass(frozen=True)
class DPO(Optimizer):
    """Preference learning on pairs of episodes."""

    steps: int = 50
    "optimizer steps"
    lr: float = 2e-4
    "full learning rate, after the warm-up"
    warmup: int = 5
    "steps of linear warm-up"
    batch: int = 16
    "pairs a step"
    loss: str = "dpo"
    "which objective: see minidpo/losses.py and minidpo/variants.py"
    beta: float | None = None
    "how strongly the policy is held to the reference (default: the loss's own)"
    gamma: float | None = None
    "dmpo: discount of later turns (default: the loss's own)"
    label_smoothing: float | None = None
    "cdpo, robust: share of pairs that are the wrong way round (default: the loss's own)"
    target_margin: float | None = None
    "simpo: margin to reach (default: the loss's own)"
    odds_weight: float | None = None
    "orpo: weight of the odds ratio (default: the loss's own)"
    penalty_weight: float | None = None
    "dpop: weight of a chosen log-prob that falls below the reference (default: the loss's own)"
    nll: float = 0.0
    "weight of an added -log π a token of the chosen episode, against falling chosen log-probs"
    pairs_per_instance: int = 4
    "pairs taken from one task instance at most, no episode twice before all were used"
    until: Literal["end", "divergence"] = "end"
    "how far a pair's episodes are compared: to their ends, or only through the first turn in which they differ"

    def __post_init__(self):
        super().__post_init__()
        _positive(self, "batch", "pairs_per_instance")
        if self.nll < 0:
            raise ValueError(f"nll must be at least 0, got {self.nll}")


@dataclass(frozen=True)
class SFTCommand:
    """Fine-tune LoRA adapters on demonstrations."""

    model: str = NANO
    "folder or hub id of the base model"
    data: Path = Path("runs/demos.jsonl")
    "demonstrations, as collect.py writes them; only solved ones are used"
    out: Path = Path("runs/sft")
    "run folder: adapter/, metrics.jsonl, config.json"
    seed: int = 1
    "of LoRA's start, the order of episodes and dropout"
    sft: SFT = field(default_factory=SFT)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    machine: Machine = field(default_factory=Machine)


@dataclass(frozen=True)
class DPOCommand:
    """Train an adapter on pairs of its own successes and failures."""

    model: str = NANO
    "folder or hub id of the base model"
    adapter: Path = Path("runs/sft/adapter")
    "adapter to start from; it is also the reference"
    data: Path = Path("runs/rollouts.jsonl")
    "rollouts, as collect.py writes them"
    out: Path = Path("runs/dpo")
    "run folder: adapter/, metrics.jsonl, config.json, reference.safetensors"
    seed: int = 1
    "of the order of pairs and dropout"
    dpo: DPO = field(default_factory=DPO)
    machine: Machine = field(default_factory=Machine)


@dataclass(frozen=True)
class CollectCommand:
    """Play episodes: demonstrations by scripted experts, or rollouts by a model."""

    policy: Literal["model", "expert"] = "model"
    "who acts"
    noise: float = 0.0
    "expert only: chance that a decision is replaced by a bad habit (clumsy demonstrations)"
    model: str = NANO
    "model only: folder or hub id of the base model"
    adapter: Path | None = None
    "model only: LoRA adapter folder"
    tasks: str = "demo"
    "suites (report, demo, all) or task names, separated by commas"
    split: Literal["base", "demos", "rollouts", "validation", "test"] = "rollouts"
    "which seeds: the splits are disjoint by construction"
    instances: int = 20
    "task instances (seeds) for each task"
    first: int = 0
    "number of the first instance within the split"
    group: int = 8
    "episodes for each instance"
    sampling: Sampling = field(default_factory=Sampling)
    out: Path = Path("runs/rollouts.jsonl")
    "JSONL file, appended episode by episode; started again, it goes on where it stopped"
    seed: int = 1
    "of the sampling streams and the experts' noise"
    machine: Machine = field(default_factory=Machine)

    def __post_init__(self):
        _positive(self, "instances", "group")
        if not 0 <= self.noise <= 1:
            raise ValueError(f"noise is a probability, got {self.noise}")
        if self.first < 0:
            raise ValueError(f"first must be at least 0, got {self.first}")
        if self.policy == "model" and self.noise:
            raise ValueError("noise belongs to --policy expert: a model makes its own mistakes")
        if self.policy == "expert" and self.adapter:
            raise ValueError("adapter belongs to --policy model: an expert is a script")


@dataclass(frozen=True)
class EvaluateCommand:
    """Success on held-out instances, several adapters side by side."""

    model: str = NANO
    "folder or hub id of the base model"
    adapters: tuple[str, ...] = ()
    "NAME=FOLDER of each adapter, in order; the base itself is called `base`; none: the base alone"
    tasks: str = "demo"
    "suites (report, demo, all) or task names, separated by commas"
    split: Literal["validation", "test"] = "test"
    "which held-out seeds"
    episodes: int = 100
    "instances for each task, the same for every adapter"
    temperature: float = 0.0
    "of the sampler; 0 is greedy"
    max_new_tokens: int = 96
    "tokens an answer may have"
    out: Path = Path("runs/evaluation")
    "folder: NAME.jsonl with the episodes, result.json, report.html"
    seed: int = 1
    "of the sampling streams, when the temperature is not 0"
    machine: Machine = field(default_factory=Machine)

    def __post_init__(self):
        _positive(self, "episodes")


@dataclass(frozen=True)
class LoopCommand:
    """The whole circle: demonstrations, SFT, rollouts, pairs, DPO, evaluation, report."""

    model: str = NANO
    "folder or hub id of the base model"
    tasks: str = "demo"
    "suites (report, demo, all) or task names, separated by commas"
    out: Path = Path("runs/demo")
    "folder for everything: result.json, report.html, one folder a stage"
    seed: int = 1
    "of everything random"
    demonstrations: int = 5
    "golden episodes for each task, by the scripted experts"
    instances: int = 24
    "task instances explored in each round, for each task"
    group: int = 8
    "episodes for each instance explored"
    rounds: int = 1
    "how often to explore and train; 1 is EF-DPO"
    validation: int = 8
    "validation instances for each task, on which the better of a round's adapters is kept"
    episodes: int = 100
    "held-out instances for each task in the evaluation"
    sft: SFT = field(default_factory=SFT)
    dpo: DPO = field(default_factory=DPO)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    sampling: Sampling = field(default_factory=Sampling)
    machine: Machine = field(default_factory=Machine)

    def __post_init__(self):
        _positive(self, "demonstrations", "instances", "group", "rounds", "episodes")


@dataclass(frozen=True)
class BaseCommand:
    """Make the small base model from nothing: tokenizer, the copying stage, clumsy demonstrations."""

    tasks: str = "demo"
    "suites or task names to read demonstrations of"
    out: Path = Path("runs/nano-base")
    "run folder; the model itself goes to OUT/model"
    seed: int = 1
    "of everything random"
    clumsy: int = 450
    "episodes with bad habits, for each task"
    noise: float = 0.8
    "chance that a decision in them is replaced by a bad habit"
    careful: int = 150
    "episodes without, for each task: what the good habits are, and what comes late in an episode"
    vocab: int = 1024
    "tokens of the byte-level BPE tokenizer, Qwen2's special ones among them"
    width: int = 256
    "hidden size"
    layers: int = 4
    "blocks"
    heads: int = 8
    "query heads; there are two key/value heads"
    mlp: int = 512
    "inner width of the SwiGLU"
    rope_theta: float = 10_000.0
    "base of the rotary angles"
    context: int = 4096
    "tokens the model says it can read"
    copy_steps: int = 3000
    "steps that the copying stage may take at most"
    copy_rows: int = 64
    "rows a step of the copying stage"
    steps: int = 600
    "steps on demonstrations"
    warmup: int = 20
    "steps of linear warm-up"
    batch: int = 24
    "episodes a step"
    muon_lr: float = 5e-3
    "Muon's learning rate, scaled to the size of AdamW's updates"
    adamw_lr: float = 3e-3
    "AdamW's learning rate, for all that is not a matrix"
    machine: Machine = field(default_factory=Machine)

    def __post_init__(self):
        _positive(self, "clumsy", "careful", "vocab", "width", "layers", "heads", "mlp", "copy_steps", "copy_rows",
                  "steps", "batch", "muon_lr", "adamw_lr")


def flags_of(path: str | Path) -> list[str]:
    """A TOML file as the flags it stands for: `[sft] lr = 0.001` is `--sft.lr 0.001`.

    Raises ValueError when the file is missing or not TOML; whether an option exists is the parser's to say.
    """
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such configuration file") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not TOML: {error}") from None
    return list(_flags(values, ""))


def _flags(values: dict, prefix: str) -> Iterator[str]:
    for name, value in values.items():
        flag = f"--{prefix}{name.replace('_', '-')}"
        if isinstance(value, dict):
            yield from _flags(value, f"{prefix}{name.replace('_', '-')}.")
        elif isinstance(value, bool):
            yield flag if value else f"--{prefix}no-{name.replace('_', '-')}"
        elif isinstance(value, list):
            yield from (flag, *map(str, value))
        else:
            yield from (flag, str(value))


def parse(kind: type, arguments: list[str], program: str, description: str):
    """The command's dataclass from `--config FILE` and flags; the file's values come first, so flags win."""
    file = None
    if "--config" in arguments:
        at = arguments.index("--config")
        if at + 1 == len(arguments):
            raise ValueError("--config needs the name of a TOML file")
        file, arguments = arguments[at + 1], arguments[:at] + arguments[at + 2:]
        try:
            tyro.cli(kind, args=flags_of(file), prog=program)
        except SystemExit:
            raise ValueError(f"{file} holds an option that {program} does not take: see above") from None
    text = f"{description}\n\n--config FILE reads a TOML file first; flags win over it."
    return tyro.cli(kind, args=[*(flags_of(file) if file else []), *arguments], prog=program, description=text)


def main(run: Callable[[list[str]], object]) -> None:
    """Run a script: an expected error is one line and exit code 2, never a traceback."""
    try:
        run(sys.argv[1:])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
