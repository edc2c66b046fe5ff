"""30. Recipes: the commands made of other commands: the whole circle, and a base model from nothing.

The string under a field is its help text, there is no other. Next: 31 commandline, which fills them.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from minidpo.lora import LoRAConfig
from minidpo.options import DPO, SFT, Machine, Sampling, Tracker, positive
from minidpo.pretrained import NANO


@dataclass(frozen=True)
class LoopCommand:
    """The whole circle: demonstrations, SFT, then rounds of rollouts and training, evaluation, report."""

    model: str = NANO
    "folder or hub id of the base model"
    tasks: str = "demo"
    "suites (report, demo, all) or task names, separated by commas"
    out: Path = Path("runs/demo")
    "folder for everything: result.json, report.html, one folder a stage"
    seed: int = 1
    "of everything random"
    start: Path | None = None
    "folder of another loop that began alike: what of it is done already is taken from there"
    demonstrations: int = 5
    "golden episodes for each task, by the scripted experts; 0: self-play, fine-tuned on what the base solved"
    instances: int = 24
    "task instances explored in each round, for each task"
    group: int = 8
    "episodes for each instance explored"
    rounds: int = 1
    "how often to explore and train; 1 is EF-DPO"
    learn: Literal["dpo", "rft", "bc", "rwr"] = "dpo"
    "what a round does; dpo: preferences; rft: a new policy on demonstrations and all successes so far; \
bc: goes on with the round's successes; rwr: with all its episodes, by their advantage"
    reference: Literal["previous", "sft"] = "previous"
    "dpo's reference: the policy that the round starts from, or the first one throughout"
    validation: int = 20
    "validation instances for each task, played greedily after each of several rounds: the best is kept"
    patience: int = 2
    "stop after so many rounds without a better one (than any before, SFT included)"
    curriculum: float | None = None
    "explore the easiest tasks only: one more while those before have this mean success on validation"
    focus: bool = False
    "explore most where the groups of the round before were mixed: success nearest one half"
    episodes: int = 100
    "held-out instances for each task in the evaluation, played greedily"
    sampled: int = 25
    "held-out instances for each task that are played at temperature 1 as well"
    track: Tracker | None = None
    "tell everything to MLflow (where MLFLOW_TRACKING_URI says) or to TensorBoard (OUT/tensorboard), too"
    sft: SFT = field(default_factory=SFT)
    dpo: DPO = field(default_factory=DPO)
    imitation: SFT = field(default_factory=lambda: SFT(steps=50, lr=2e-4))
    "what a round of rft, bc or rwr trains with"
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    sampling: Sampling = field(default_factory=Sampling)
    machine: Machine = field(default_factory=Machine)

    def __post_init__(self):
        positive(self, "instances", "group", "rounds", "episodes", "sampled", "seed", "validation",
                 "patience")
        if self.demonstrations < 0 or not 0 <= (self.curriculum or 0) <= 1:
            raise ValueError("demonstrations must be at least 0 and curriculum, a success rate, within "
                             f"[0, 1], got {self.demonstrations} and {self.curriculum}")
        if self.focus and self.rounds == 1:
            raise ValueError("focus looks at the round before, and there is one: set rounds, or drop focus")
        if self.imitation.weighting != "solved" or self.imitation.distinct:
            raise ValueError("learn says what is imitated: leave out imitation.weighting and distinct")
        self.sft.check_temperature("sft")
        self.imitation.check_temperature("imitation", "advantage" if self.learn == "rwr" else "solved")
        if not self.demonstrations and self.sft.weighting != "solved":
            raise ValueError("self-play imitates what the base solved: leave out sft.weighting")
        if self.learn != "dpo" and self.reference != "previous":
            raise ValueError(f"learn {self.learn} has no reference: leave reference out")
        for name in ("loss", "pairs", "clean", "dense"):  # rates and sizes stand in files for all of them
            if self.learn != "dpo" and getattr(self.dpo, name) != getattr(DPO, name):
                raise ValueError(f"learn {self.learn} imitates, and compares no pairs: leave dpo.{name} out")


@dataclass(frozen=True)
class BaseCommand:
    """Make the small base model from nothing: tokenizer, copying, careful and clumsy demonstrations."""
    tasks: str = "demo"
    "suites or task names to read demonstrations of"
    out: Path = Path("runs/nano-base")
    "run folder; the model itself goes to OUT/model"
    seed: int = 1
    "of everything random"
    clumsy: int = 80
    "episodes with bad habits, for each task"
    noise: float = 0.6
    "chance that a decision in them is replaced by a bad habit"
    careful: int = 600
    "episodes without, for each task: what the good habits are, and what comes late in an episode"
    tokenizer: Path | None = None
    "tokenizer.json to use; by default one is trained on the demonstrations"
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
    "steps that each of the two copying stages may take at most"
    copy_rows: int = 64
    "rows a step of the copying stages"
    muon_lr: float = 5e-3
    "Muon's learning rate while copying, scaled to the size of AdamW's updates"
    adamw_lr: float = 3e-3
    "AdamW's learning rate while copying, for all that is not a matrix"
    steps: int = 900
    "steps on careful episodes"
    habit_steps: int = 80
    "steps on clumsy episodes"
    warmup: int = 20
    "steps of linear warm-up"
    batch: int = 12
    "episodes a step"
    imitation_muon_lr: float = 3e-3
    "Muon's learning rate on careful episodes; on clumsy ones about a third of it"
    imitation_adamw_lr: float = 1.5e-3
    "AdamW's, likewise"
    machine: Machine = field(default_factory=Machine)

    def __post_init__(self):
        positive(self, "clumsy", "careful", "vocab", "width", "layers", "heads", "mlp", "copy_steps",
                  "copy_rows", "steps", "habit_steps", "batch", "muon_lr", "adamw_lr", "imitation_muon_lr",
                  "imitation_adamw_lr")
