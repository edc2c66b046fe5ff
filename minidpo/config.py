"""29. Commands: what a script can be told, one frozen dataclass a command (`loop` and `base`: chapter 30).

The string under a field is its help text, there is no other. Next: 30 recipes.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from minidpo.lora import LoRAConfig
from minidpo.options import DPO, SFT, Machine, Sampling, Tracker, positive
from minidpo.pretrained import NANO


@dataclass(frozen=True)
class SFTCommand:
    """Fine-tune LoRA adapters on episodes: demonstrations, or what an agent solved by itself."""
    model: str = NANO
    "folder or hub id of the base model"
    data: tuple[Path, ...] = (Path("runs/demos.jsonl"),)
    "episodes to imitate, as collect.py writes them: demonstrations, or rollouts, or both; or conversations, \
JSONL with messages, or with prompt and completion"
    adapter: Path | None = None
    "adapter to go on from, folder or hub id, whose shape it keeps (default: a new one)"
    out: Path = Path("runs/sft")
    "run folder: adapter/, metrics.jsonl, config.json"
    seed: int = 1
    "of LoRA's start, the order of episodes and dropout"
    track: Tracker | None = None
    "tell each step to MLflow (where MLFLOW_TRACKING_URI says) or to TensorBoard (OUT/tensorboard), too"
    sft: SFT = field(default_factory=SFT)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    machine: Machine = field(default_factory=Machine)

    def __post_init__(self):
        self.sft.check_temperature("sft")


@dataclass(frozen=True)
class DPOCommand:
    """Train an adapter on pairs of episodes, of which one went better."""

    model: str = NANO
    "folder or hub id of the base model"
    adapter: Path = Path("runs/sft/adapter")
    "adapter to start from: folder or hub id"
    reference: Path | None = None
    "adapter of the reference (default: the one it starts from)"
    data: tuple[Path, ...] = (Path("runs/rollouts.jsonl"),)
    "rollouts, as collect.py writes them; or conversations, JSONL with prompt, chosen and rejected"
    golden: Path | None = None
    "solved episodes of the same instances, for pairs expert, stepwise and mixture"
    export: Literal["trl"] | None = None
    "trl: train nothing; write the pairs as TRL's DPOTrainer reads them, to OUT/pairs-trl.jsonl"
    out: Path = Path("runs/dpo")
    "run folder: adapter/, metrics.jsonl, config.json, the reference's scores"
    explain: bool = False
    "print the first pair as the loss sees it, token by token, and train nothing"
    seed: int = 1
    "of which pairs are made, and their order"
    track: Tracker | None = None
    "tell each step to MLflow (where MLFLOW_TRACKING_URI says) or to TensorBoard (OUT/tensorboard), too"
    dpo: DPO = field(default_factory=DPO)
    machine: Machine = field(default_factory=Machine)

    def __post_init__(self):
        if self.export and self.explain:
            raise ValueError("explain shows a pair and export writes them all: ask for one of the two")
        if self.export and self.dpo.pairs == "unpaired":
            raise ValueError("export writes pairs, and dpo.pairs unpaired makes none: choose other pairs")


@dataclass(frozen=True)
class PushCommand:
    """Upload an adapter, or a model that evaluate.py --export merged wrote, to the Hugging Face hub."""

    to: str
    "hub id, OWNER/NAME; it is made if it is not there"
    folder: Path = Path("runs/dpo/adapter")
    "what to upload: a folder with an adapter or with a merged model"
    result: Path | None = None
    "result.json of an evaluation, for the model card"
    private: bool = False
    "if it is to be made: for its owner alone"


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
    "model only: folder or hub id of a LoRA adapter"
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
    index: int = 0
    "number of the first of them; other numbers are other samples"
    golden: Path | None = None
    "model only: golden episodes of the same instances, whose first steps, up to one that is drawn, are given"
    sampling: Sampling = field(default_factory=Sampling)
    out: Path = Path("runs/rollouts.jsonl")
    "JSONL file, appended episode by episode; started again, it goes on where it stopped"
    seed: int = 1
    "of the sampling streams and the experts' noise"
    watch: bool = False
    "open the browser, act slowly, print thoughts and actions; one page, unless machine.pages is set"
    machine: Machine = field(default_factory=Machine)

    def __post_init__(self):
        positive(self, "instances", "group")
        if not 0 <= self.noise <= 1:
            raise ValueError(f"noise is a probability, got {self.noise}")
        if self.first < 0 or self.index < 0:
            raise ValueError(f"first and index must be at least 0, got {self.first} and {self.index}")
        if self.policy == "model" and self.noise:
            raise ValueError("noise belongs to --policy expert: a model makes its own mistakes")
        if self.policy == "expert" and (self.adapter or self.golden):
            raise ValueError("adapter and golden belong to --policy model: an expert is a script")


@dataclass(frozen=True)
class EvaluateCommand:
    """Success on held-out instances, several adapters side by side."""
    model: str = NANO
    "folder or hub id of the base model"
    adapters: tuple[str, ...] = ()
    "NAME=FOLDER of each adapter, or NAME=OWNER/NAME on the hub, in order; `base=` is the model without one, \
and the default"
    tasks: str = "demo"
    "suites (report, demo, all) or task names, separated by commas"
    split: Literal["validation", "test"] = "test"
    "which held-out seeds"
    episodes: int = 100
    "instances for each task, the same for every adapter"
    temperature: float = 0.0
    "of the sampler; 0 is greedy"
    best_of: int = 1
    "episodes for each instance, of which the best counts: what an oracle would pick (Best-of-N)"
    max_new_tokens: int = 96
    "tokens an answer may have"
    out: Path = Path("runs/evaluation")
    "folder: NAME.jsonl with the episodes, result.json, report.html"
    export: Literal["merged"] | None = None
    "merged: play nothing; write each adapter, added to the base, as a model of its own to OUT/NAME-merged"
    seed: int = 1
    "of the sampling streams, when the temperature is not 0"
    watch: bool = False
    "open the browser, act slowly, print thoughts and actions; one page, unless machine.pages is set"
    track: Tracker | None = None
    "tell the results to MLflow (where MLFLOW_TRACKING_URI says) or to TensorBoard (OUT/tensorboard), too"
    machine: Machine = field(default_factory=Machine)

    def __post_init__(self):
        positive(self, "episodes", "max_new_tokens", "best_of")
        if self.temperature < 0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        if self.best_of > 1 and not self.temperature:
            raise ValueError("best_of counts the best of several tries, which are one when greedy: "
                             "set --temperature above 0")
