"""The options of every command: frozen dataclasses, of which tyro makes the command line.

The string under a field is its help text, there is no other. A TOML file gives defaults, flags win. Those of
`--machine` stand in memory/machine.py, of `--lora` in memory/lora.py, because `memory` may not import this.
"""

import math
from collections import Counter
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from minidpo.data.pairs import is_about_successes
from minidpo.memory.lora import LoRAConfig
from minidpo.memory.machine import Machine
from minidpo.model.checkpoint import NANO
from minidpo.objective.scores import check_parameters
from minidpo.system.ranges import Checked, NotNegative, Positive, Range, Share

Tracker = Literal["mlflow", "tensorboard"]
Seed = Annotated[int, Range("from 0 to 2^32 - 1", lambda x: 0 <= x < 2**32)]
POLICY_GRADIENTS = ("grpo", "rloo", "gigpo")  # of what a loop's round may do, those that are `GRPO`
Learner = Literal[
    "dpo", "rft", "bc", "rwr", "vwr", "evolve", "dagger", "grpo", "rloo", "gigpo", "ppo"
]
FRESH: tuple[Learner, ...] = ("rft", "evolve", "dagger")  # these train a new adapter in each round
NO_MARGIN = (
    "margin prefers by reward, failures too: leave it out with the loss orpo, with dense, and with "
    "pairs other than outcome, expert, eto and value"
)


@dataclass(frozen=True)
class Sampling(Checked):
    """How a model answers."""

    temperature: NotNegative[float] = 1.0
    "of the sampler; 0 is greedy"
    temperatures: tuple[float, ...] = ()
    "in place of one: dealt out in turn to the episodes of each instance, by their number"
    top_p: Share[Positive[float]] = 1.0
    "keep the most probable tokens up to this mass"
    max_new_tokens: Positive[int] = 96
    "tokens an answer may have"

    def __post_init__(self):
        super().__post_init__()
        if any(not 0 <= t < math.inf for t in self.temperatures):
            raise ValueError(f"temperatures must be finite and at least 0, got {self.temperatures}")
        if self.temperatures and self.temperature != Sampling.temperature:
            raise ValueError("temperatures names that of each episode: leave temperature out")
        if self.top_p < 1 and not any(self.temperatures or (self.temperature,)):
            raise ValueError(
                f"top_p {self.top_p:g} does nothing at temperature 0, which takes the likeliest "
                "token: leave top_p out, or raise the temperature"
            )

    def record(self, seed: int) -> dict:
        """How an episode was sampled, as it is written down with it."""
        drawn = (
            {"temperatures": list(self.temperatures)}
            if self.temperatures
            else {"temperature": self.temperature}
        )
        return {**drawn, "top_p": self.top_p, "seed": seed, "max_new_tokens": self.max_new_tokens}


@dataclass(frozen=True)
class Optimizer(Checked):
    """How long something trains, how fast, and by which optimizer."""

    steps: Positive[int] = 100
    "optimizer steps"
    lr: Positive[float] = 1e-3
    "full learning rate, after the warm-up"
    warmup: NotNegative[int] = 10
    "steps of linear warm-up"
    weight_decay: NotNegative[float] = 0.0
    "decoupled weight decay"
    clip: Positive[float] = 1.0
    "largest norm of the gradient"
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    "adamw8bit keeps its two moments in 2 bytes a weight in place of 8"
    save_every: Positive[int] = 25
    "steps between two states that a killed run can go on from"
    epochs: Positive[float | None] = None
    "passes over the data, in place of steps"
    warmup_ratio: Share[float | None] = None
    "share of the steps that warm up, in place of warmup"
    constant: bool = False
    "keep the full rate after the warm-up, in place of half a cosine down to 0"


@dataclass(frozen=True)
class SFT(Optimizer):
    """Supervised fine-tuning: episodes are imitated."""

    steps: NotNegative[int] = 100
    "optimizer steps; 0: none, the adapter changes nothing, and what is trained from it starts at the base"
    batch: Positive[int] = 8
    "episodes a step"
    weighting: Literal["solved", "advantage", "reward", "value"] = "solved"
    "solved: the solved count, all alike; advantage: all, by exp((verdict - instance's mean) / temperature); \
reward: those that reach the threshold, by their reward; value: all, each step by the value behind it over \
that before it, as collect.py --values tells"
    select: Literal["threshold", "top", "rejection"] = "threshold"
    "of what the agent played; threshold: what the weighting says; top: the best of each instance; \
rejection: each with probability exp((reward - its instance's highest) / temperature) (RSO)"
    threshold: Share[Positive[float | None]] = None
    "of weighting reward: least reward of what is imitated (None: 1); of top, rejection (None: above 0)"
    ratio: Share[Positive[float | None]] = None
    "of weighting reward: share of these that is drawn; of top: share of each instance that is its best; the \
expert's are all taken; None: all"
    per_instance: Positive[int | None] = None
    "of the agent's episodes of an instance, the best so many; None: all"
    per_task: Positive[int | None] = None
    "of a task, the best so many, as evenly from its instances as can be; None: all"
    temperature: Positive[float] = 0.5
    "of weighting advantage, select rejection: towards 0 those alone that are furthest above their instance, \
or its best; large: all alike"
    distinct: bool = False
    "of episodes of one instance in which the same was said, take one"

    def __post_init__(self):
        super().__post_init__()
        if self.epochs is not None and not self.steps:
            raise ValueError("steps 0 asks for no training, and epochs for some: leave one out")
        if self.distinct and self.weighting in ("advantage", "value"):
            raise ValueError(
                f"distinct leaves episodes out, but weighting {self.weighting} needs all: drop one"
            )
        if self.select == "top" and self.ratio is None and self.per_instance is None:
            raise ValueError(
                "select top takes the best of each instance: say how many with per_instance, or "
                "which share with ratio"
            )
        if self.select == "rejection" and self.ratio is not None:
            raise ValueError(
                "select rejection draws by the reward: leave out ratio, or set temperature"
            )

    def selects(self) -> bool:
        """Whether other episodes are taken than the weighting alone says."""
        return bool(self.changed("select", "per_instance", "per_task"))

    def check_weighting(self, name: str, weighting: str | None = None) -> None:
        """Refuse the numbers of another weighting than this one; `name`: the option that these are."""
        weighting = weighting or self.weighting
        if weighting in ("advantage", "value") and self.selects():
            raise ValueError(
                f"weighting {weighting} needs all: leave out {name}.select, per_instance and "
                "per_task"
            )
        if (
            weighting != "advantage"
            and self.select != "rejection"
            and self.temperature != SFT.temperature
        ):
            raise ValueError(
                f"{name}.temperature is of weighting advantage and select rejection alone: "
                "leave it out"
            )
        if (
            weighting != "reward"
            and self.select == "threshold"
            and (self.threshold is not None or self.ratio is not None)
        ):
            raise ValueError(
                f"{name}.threshold and ratio are of weighting reward, and of select top and "
                "rejection, alone: leave them out"
            )


@dataclass(frozen=True)
class LossParameters(Checked):
    """The numbers that losses read (`learning/loss_table`); None: the loss's own, or it reads none."""

    beta: float | None = None
    "how strongly the policy is held to the reference; None: the loss's own"
    gamma: float | None = None
    "dmpo: discount of later turns; None: the loss's own"
    label_smoothing: float | None = None
    "cdpo, robust: share of pairs that are the wrong way round; None: the loss's own"
    target_margin: float | None = None
    "simpo: margin to reach; None: the loss's own"
    odds_weight: float | None = None
    "orpo: weight of the odds ratio; None: the loss's own"
    penalty_weight: float | None = None
    "dpop: weight of a chosen log-prob that falls below the reference; None: the loss's own"
    desirable_weight: float | None = None
    "kto: weight of the chosen; None: the loss's own"
    undesirable_weight: float | None = None
    "kto: weight of the rejected; None: the loss's own"

    def __post_init__(self):
        super().__post_init__()
        check_parameters(**self.given())

    def given(self) -> dict[str, float]:
        """Those that are not None, by name."""
        return {
            p.name: vars(self)[p.name]
            for p in fields(LossParameters)
            if vars(self)[p.name] is not None
        }


@dataclass(frozen=True)
class PairLearning(Optimizer):
    """What is learned from pairs of episodes, and which pairs are made."""

    steps: Positive[int] = 50
    lr: Positive[float] = 2e-4
    warmup: NotNegative[int] = 5
    batch: Positive[int] = 16
    "pairs a step; those of one instance are taken together, because they share their tokens"
    pairs_per_instance: Positive[int] = 4
    "pairs taken from one task instance at most; episodes that were used least so far come first"
    pairs_per_task: Positive[int | None] = None
    "pairs taken from one task at most, as evenly from its instances as can be; None: all"
    pairs: Literal[
        "outcome",
        "expert",
        "eto",
        "stepwise",
        "mixture",
        "segments",
        "efficient",
        "unpaired",
        "value",
        "dagger",
    ] = "outcome"
    "outcome: successes over failures; expert: golden episodes over failures (ETO); eto: both; stepwise: two \
ways on from one golden step, by how they end (ETO); mixture: eto, stepwise; segments: expert, \
and golden thirds over what was done in place of each (HPL); efficient: successes in fewer turns over those \
in more; unpaired: each outcome alone (kto); value: a continuation that solved over the step at which the \
value of a failure dropped (IPR); its continuations are files of data as well; dagger: the expert's answer \
in a state that a failure reached over what this did there"
    margin: NotNegative[float | None] = None
    "outcome, expert, eto: prefer the reward that is higher by more than this (None: by the verdict); \
value: drops of more than this (None: 0)"
    clean: bool = False
    "leave out failures with an unusable action, or one (no arrow key, no WAIT) repeated on an unchanged page"
    noisy: bool = False
    "of the failures, take those alone (DMPO's noisy setting)"
    dense: bool = False
    "where nothing was solved, rank the failures, if the page or its form says which came nearer"
    until: Literal["end", "turn", "token"] | None = None
    "where pairs are cut; end: nowhere, turn: both behind the first turn that differs, token: the rejected \
alone behind the first token that differs (None: the loss's own; a reward model's: end)"

    def __post_init__(self):
        super().__post_init__()
        if self.clean and self.noisy:
            raise ValueError(
                "clean leaves out the failures that noisy alone takes: drop one of the two"
            )
        if self.pairs == "value" and (self.clean or self.noisy):
            raise ValueError(
                "pairs value counts all failures in its values: leave out clean and noisy"
            )
        if self.pairs == "efficient" and not self.dense and (self.clean or self.noisy):
            raise ValueError(
                "pairs efficient compares successes: leave out clean and noisy, or set dense"
            )
        if (
            self.margin is not None
            and self.pairs != "value"
            and (self.pairs not in ("outcome", "expert", "eto") or self.dense)
        ):
            raise ValueError(NO_MARGIN)


@dataclass(frozen=True)
class DPO(PairLearning, LossParameters):
    """Preference learning on pairs of episodes."""

    loss: Annotated[str, arg(aliases=("--loss",))] = "dpo"
    "which objective, a name in minidpo/learning/loss_table.py"
    nll: NotNegative[float] = 0.0
    "weight of an added -log π a token of the chosen episode, against falling chosen log-probs"
    rehearse: NotNegative[int] = 0
    "solved episodes that a step imitates beside its pairs, of instances that made no pair; their mean loss \
a token is multiplied by nll"

    def __post_init__(self):
        super().__post_init__()
        if self.rehearse and not self.nll:
            raise ValueError(
                "rehearse imitates with the weight of nll, which is 0: set nll above 0"
            )
        if self.rehearse and self.pairs == "unpaired":
            raise ValueError(
                "pairs unpaired leaves no solved episode to rehearse: leave rehearse out"
            )
        if self.dense and self.loss == "orpo":
            raise ValueError(
                "orpo imitates the chosen, which dense takes from failures: drop one of the two"
            )
        if self.margin is not None and self.loss == "orpo" and self.pairs != "value":
            raise ValueError(NO_MARGIN)
        if self.pairs == "unpaired":
            if self.loss != "kto" or self.dense:
                raise ValueError(
                    "pairs unpaired judges each episode alone, as only the loss kto does, and "
                    "ranks none: set loss kto and no dense, or other pairs"
                )
            if self.pairs_per_task or self.pairs_per_instance != DPO.pairs_per_instance:
                raise ValueError(
                    "pairs unpaired makes no pairs for pairs_per_instance and pairs_per_task to "
                    "count: leave them out"
                )


@dataclass(frozen=True)
class RM(PairLearning):
    """A reward model, learned from pairs of episodes or from the values of their steps."""

    targets: Literal["pairs", "values"] = "pairs"
    "pairs: which of two episodes went better; values: the value behind each turn, as collect.py --values \
tells (IPR); its continuations are files of data as well, and batch counts episodes"
    held_out: Share[Positive[float]] = 0.2
    "share of the instances that is not trained on; these say how far the model can be trusted (instances \
that show one page lie on one side)"

    def __post_init__(self):
        super().__post_init__()
        given = self.changed(
            "pairs",
            "pairs_per_instance",
            "pairs_per_task",
            "margin",
            "clean",
            "noisy",
            "dense",
            "until",
        )
        if self.targets == "values" and given:
            raise ValueError(f"targets values makes no pairs: leave out {', '.join(given)}")
        if self.pairs == "unpaired":
            raise ValueError(
                "pairs unpaired compares no two episodes, as a reward model must: choose others"
            )
        if self.until == "token":
            raise ValueError(
                "until token shortens the rejected alone, so a reward model would learn to see "
                "the cut: use turn or end"
            )


@dataclass(frozen=True)
class PolicyGradient(Optimizer):
    """The agent's own episodes are weighed by their advantage, several steps on the same ones."""

    lr: Positive[float] = 2e-4
    warmup: NotNegative[int] = 5
    batch: Positive[int] = 64
    "episodes a step; those of one instance are taken together, because they share their tokens"
    low: Share[float] = 0.2
    "a token whose ratio to the policy that played has fallen by this share is pushed down no further"
    high: NotNegative[float] = 0.2
    "one whose ratio has risen by this share is pushed up no further"
    kl: NotNegative[float] = 0.0
    "weight of an added KL to the reference; of ppo: at the first step"

    def __post_init__(self):
        super().__post_init__()
        check_parameters(low=self.low)


@dataclass(frozen=True)
class GRPO(PolicyGradient):
    """Policy gradients on groups of the agent's own episodes."""

    steps: Positive[int] = 24
    advantage: Literal["grpo", "drgrpo", "rloo", "gigpo"] = "grpo"
    "how much better an episode was; grpo: than its group's mean, by the std; drgrpo: without the std; rloo: \
than the others' mean; gigpo: drgrpo, and each turn among those on the same page"
    gamma: Share[float] = 0.95
    "gigpo: discount of the verdict for turns before the last"
    state_weight: NotNegative[float] = 1.0
    "gigpo: weight of a turn's advantage among those on the same page"

    def check_gigpo(self) -> None:
        """Refuse what only gigpo reads where another advantage is asked for."""
        if self.advantage != "gigpo" and self.changed("gamma", "state_weight"):
            raise ValueError(
                f"grpo.gamma and grpo.state_weight are of the advantage gigpo, not of "
                f"{self.advantage}: leave them out"
            )


@dataclass(frozen=True)
class PPO(PolicyGradient):
    """PPO: policy gradients with a value function in place of groups."""

    steps: Positive[int] = 36
    kl: NotNegative[float] = 0.05
    kl_target: Positive[float | None] = 0.02
    "nats a token: kl grows while the KL to the reference is above it, and falls below it (None: kl stays)"
    gamma: Share[float] = 1.0
    "discount of the verdict, a turn"
    lam: Share[float] = 0.95
    "of the advantage (GAE): 1 reads the verdict alone, 0 the value of the next page alone"
    outcome_weight: NotNegative[float] = 1.0
    "of the verdict, paid after the last turn"
    step_weight: NotNegative[float] = 0.0
    "of the rise in the page's value by a turn, paid after it; values by continuations (collect --values)"
    whiten: bool = True
    "scale the advantages of a pass to mean 0 and variance 1"
    value_weight: Positive[float] = 0.1
    "weight of the value's loss beside the policy's"
    value_clip: NotNegative[float] = 0.2
    "a value gains nothing by going further from what it was when its pass began"

    def __post_init__(self):
        super().__post_init__()
        if not self.outcome_weight + self.step_weight:
            raise ValueError(
                "outcome_weight and step_weight are 0, so no turn is paid: set one above 0"
            )
        if not self.kl and self.kl_target not in (None, PPO.kl_target):
            raise ValueError(
                "kl 0 stays 0, whatever kl_target is: set kl above 0, or leave kl_target out"
            )


@dataclass(frozen=True)
class Command(Checked):
    """What all commands have that open a model."""

    model: str = NANO
    "the base model: folder, hub id, GGUF file, or smollm2"
    _: KW_ONLY
    seed: Seed = 1
    "of all that is random in this command"
    machine: Machine = field(default_factory=Machine)


@dataclass(frozen=True)
class SFTCommand(Command):
    """Fine-tune LoRA adapters on episodes: demonstrations, or what an agent solved by itself."""

    data: tuple[Path, ...] = (Path("runs/demos.jsonl"),)
    "episodes, as collect writes them; or conversations, JSONL with messages or with prompt and completion"
    adapter: Path | None = None
    "adapter to go on from, folder or hub id, whose shape it keeps; None: a new one"
    out: Path = Path("runs/sft")
    "run folder: adapter/, metrics.jsonl, config.json"
    track: Tracker | None = None
    "tell each step to MLflow (where MLFLOW_TRACKING_URI says) or to TensorBoard (OUT/tensorboard), too"
    sft: SFT = field(default_factory=SFT)
    lora: LoRAConfig = field(default_factory=LoRAConfig)

    def __post_init__(self):
        super().__post_init__()
        self.sft.check_weighting("sft")


def check_once(*files: Path) -> None:
    """Raises ValueError for a file that is named twice: an episode would be compared with itself."""
    if twice := [
        path for path, count in Counter(path.resolve() for path in files).items() if count > 1
    ]:
        raise ValueError(
            f"{twice[0]} is named twice, and what is in it would count twice: name it once"
        )


@dataclass(frozen=True)
class PairsCommand(Command):
    """What is learned from pairs of episodes, of which one went better."""

    adapter: Path = Path("runs/sft/adapter")
    "adapter to start from: folder or hub id"
    data: tuple[Path, ...] = (Path("runs/rollouts.jsonl"),)
    "rollouts, as collect writes them; or conversations, JSONL with prompt, chosen and rejected"
    golden: Path | None = None
    "solved episodes of the same instances, for pairs expert, eto, stepwise, mixture, segments and dagger \
(those by collect.py --policy dagger)"
    failures: tuple[Path, ...] = ()
    "earlier rollouts of the same instances: what failed in them is rejected, too, and never chosen"
    track: Tracker | None = None
    "tell each step to MLflow (where MLFLOW_TRACKING_URI says) or to TensorBoard (OUT/tensorboard), too"

    def __post_init__(self):
        super().__post_init__()
        check_once(*self.data, *self.failures)


@dataclass(frozen=True)
class DPOCommand(PairsCommand):
    """Train an adapter on pairs of episodes, of which one went better."""

    reference: Path | None = None
    "adapter of the reference; None: the one it starts from"
    export: Literal["trl"] | None = None
    "trl: train nothing; write the pairs as TRL's DPOTrainer reads them, to OUT/pairs-trl.jsonl"
    out: Path = Path("runs/dpo")
    "run folder: adapter/, metrics.jsonl, config.json, the reference's scores"
    explain: bool = False
    "print the first pair as the loss sees it, token by token, and train nothing"
    dpo: DPO = field(default_factory=DPO)

    def __post_init__(self):
        super().__post_init__()
        if self.export and self.explain:
            raise ValueError(
                "explain shows a pair and export writes them all: ask for one of the two"
            )
        if self.export and (
            unread := [*self.changed("track", "reference"), *self.dpo.changed("rehearse")]
        ):
            raise ValueError(f"export trains nothing: leave out {', '.join(unread)}")
        if self.export and self.dpo.pairs == "unpaired":
            raise ValueError(
                "export writes pairs, and dpo.pairs unpaired makes none: choose other pairs"
            )


@dataclass(frozen=True)
class RolloutsCommand(Command):
    """What is learned from an agent's own episodes."""

    adapter: Path = Path("runs/sft/adapter")
    "adapter that played them, folder or hub id; training goes on from it (ppo: and from its value head)"
    reference: Path | None = None
    "with a KL: adapter of the reference; None: the one it starts from"
    data: tuple[Path, ...] = (Path("runs/rollouts.jsonl"),)
    "its rollouts, as collect writes them"
    track: Tracker | None = None
    "tell each step to MLflow (where MLFLOW_TRACKING_URI says) or to TensorBoard (OUT/tensorboard), too"

    def __post_init__(self):
        super().__post_init__()
        check_once(*self.data)


@dataclass(frozen=True)
class GRPOCommand(RolloutsCommand):
    """Train an adapter on its own episodes by their advantage over others of the same instance."""

    out: Path = Path("runs/grpo")
    "run folder: adapter/, metrics.jsonl, config.json, log-probs before the first step"
    grpo: GRPO = field(default_factory=GRPO)

    def __post_init__(self):
        super().__post_init__()
        self.grpo.check_gigpo()
        if self.reference and not self.grpo.kl:
            raise ValueError(
                "grpo.kl is 0, so no reference is read: leave reference out, or set grpo.kl"
            )


@dataclass(frozen=True)
class PPOCommand(RolloutsCommand):
    """Train an adapter and a value function on the adapter's own episodes."""

    out: Path = Path("runs/ppo")
    "run folder: adapter/ with head.safetensors, metrics.jsonl, config.json, log-probs, values of each pass"
    ppo: PPO = field(default_factory=PPO)

    def __post_init__(self):
        super().__post_init__()
        if self.reference and not self.ppo.kl:
            raise ValueError(
                "ppo.kl is 0, so no reference is read: leave reference out, or set ppo.kl"
            )


@dataclass(frozen=True)
class RMCommand(PairsCommand):
    """Train a reward model: a scalar head and an adapter that order episodes, or value what was done."""

    out: Path = Path("runs/rm")
    "run folder: adapter/ with head.safetensors, metrics.jsonl, config.json, result.json (held-out instances)"
    rm: RM = field(default_factory=RM)

    def __post_init__(self):
        super().__post_init__()
        if self.rm.targets == "values" and (self.golden or self.failures):
            raise ValueError("rm.targets values makes no pairs: leave golden and failures out")


@dataclass(frozen=True)
class CheckCommand:
    """Check this machine: Python, PyTorch, disk, browser, model, memory, GPU; a line for each."""

    model: str = "smollm2"
    "the model to load: folder, hub id, GGUF file, or smollm2"
    out: Path = Path("runs")
    "where runs are to be written"
    track: Literal["mlflow"] | None = None
    "look for MLflow, too"


@dataclass(frozen=True)
class PushCommand:
    """Upload an adapter, or a model that evaluate --export merged wrote, to the Hugging Face hub."""

    to: str
    "hub id, OWNER/NAME; it is made if it is not there"
    folder: Path = Path("runs/dpo/adapter")
    "what to upload: a folder with an adapter or with a merged model"
    result: Path | None = None
    "result.json of an evaluation, for the model card"
    private: bool = False
    "if it is to be made: for its owner alone"


@dataclass(frozen=True)
class AverageCommand:
    """Make one adapter of several that were trained from the same one: the mean of their weights."""

    adapters: tuple[Path, ...]
    "two or more: folders or hub ids"
    weights: tuple[float, ...] = ()
    "how much each counts, in the order of the adapters; by default all the same"
    out: Path = Path("runs/average")
    "run folder; the mean goes to OUT/adapter"

    def __post_init__(self):
        if len(self.adapters) < 2:
            raise ValueError("a mean is of two adapters or more: name them all behind --adapters")
        if self.weights and len(self.weights) != len(self.adapters):
            raise ValueError(
                f"{len(self.weights)} weights for {len(self.adapters)} adapters: give one each"
            )
        if not all(weight > 0 for weight in self.weights) or not sum(self.weights) < math.inf:
            raise ValueError(f"weights must be above 0 and have a finite sum, got {self.weights}")


@dataclass(frozen=True)
class CollectCommand(Command):
    """Play episodes: demonstrations by scripted experts, or rollouts by a model."""

    policy: Literal["model", "expert", "dagger"] = "model"
    "who acts; dagger: the expert, in states that an agent reached"
    noise: Share[float] = 0.0
    "expert only: chance that a decision is replaced by a bad habit (clumsy demonstrations)"
    adapter: Path | None = None
    "model only: folder or hub id of a LoRA adapter"
    tasks: str = "demo"
    "suites (report, demo, webgum-56, expert, all) or task names, separated by commas"
    split: Literal["base", "demos", "rollouts", "validation", "test"] = "rollouts"
    "which seeds: the splits are disjoint by construction"
    instances: Positive[int] = 20
    "task instances (seeds) for each task"
    first: NotNegative[int] = 0
    "number of the first instance within the split"
    group: Positive[int | None] = None
    "episodes for each instance; of dagger: states of each instance, at most (None: 8; 1 of the expert \
without noise, who would do the same again)"
    index: NotNegative[int] = 0
    "number of the first of them; other numbers are other samples"
    golden: Path | None = None
    "model only: golden episodes of the same instances, whose first steps are given"
    golden_steps: Literal["drawn", "every", "thirds"] = "drawn"
    "of golden: up to which step; drawn: one for each instance; every: each, in turn over a group; thirds: \
up to where one begins, in turn"
    states: tuple[Path, ...] = ()
    "dagger only: an agent's rollouts, whose states are played again up to where the expert begins"
    shots: NotNegative[int] = 0
    "solved examples of its task that stand before each episode in its prompt"
    examples: Path | None = None
    "of shots: demonstrations of these tasks, as collect.py --policy expert writes them"
    values: Positive[int | None] = None
    "continuations from each later step of the episodes in recorded, for values; dpo.pairs value reads them"
    recorded: Path | None = None
    "of values: episodes, as collect writes them; their instances are played"
    sampling: Sampling = field(default_factory=Sampling)
    out: Path = Path("runs/rollouts.jsonl")
    "JSONL file, appended episode by episode; started again, it goes on where it stopped"
    watch: bool = False
    "open the browser, act slowly, print thoughts and actions; one page, unless machine.pages is set"

    def __post_init__(self):
        super().__post_init__()
        check_shots(self)
        if self.policy == "model" and self.noise:
            raise ValueError("noise belongs to --policy expert: a model makes its own mistakes")
        if self.policy != "model" and (self.adapter or self.golden):
            raise ValueError("adapter and golden belong to --policy model: an expert is a script")
        if self.policy != "model" and self.sampling != Sampling():
            raise ValueError("sampling is how a model answers: leave it out, or set --policy model")
        if (self.policy == "dagger") != bool(self.states) or (self.states and self.noise):
            raise ValueError(
                "--policy dagger plays on, without noise, from the states of rollouts: name "
                "these with --states, and give states to no other policy"
            )
        if self.golden_steps != "drawn" and not self.golden:
            raise ValueError(
                "golden_steps are those of golden episodes: name these with --golden, too"
            )
        if (self.values is None) != (self.recorded is None):
            raise ValueError(
                "values are those of recorded episodes' steps: give both, or leave both out"
            )
        if self.recorded and self.recorded.resolve() == self.out.resolve():
            raise ValueError(
                f"the continuations would be written among the episodes in {self.out}: give "
                "another --out"
            )
        given = self.changed(
            "tasks", "split", "instances", "first", "group", "index", "golden", "shots"
        )
        if self.values and self.policy == "dagger":
            raise ValueError(
                "dagger plays on from the states of rollouts, values from recorded: choose one"
            )
        if self.values and given:
            raise ValueError(
                f"values goes on where recorded episodes say: leave out {', '.join(given)}"
            )

    def attempts(self) -> int:
        """Episodes for each instance."""
        return self.group or (1 if self.policy == "expert" and not self.noise else 8)


def check_shots(command: "CollectCommand | EvaluateCommand") -> None:
    """Raises ValueError if only one of the two options is given."""
    if bool(command.shots) != (command.examples is not None):
        raise ValueError(
            "shots says how many examples, examples from which file: give both, or leave both out"
        )


@dataclass(frozen=True)
class EvaluateCommand(Command):
    """Success on held-out instances, several adapters side by side."""

    adapters: tuple[str, ...] = ()
    "NAME=FOLDER or NAME=OWNER/NAME (on the hub) of each, in order; `base=` (the default) is the model alone"
    tasks: str = "demo"
    "suites (report, demo, webgum-56, expert, all) or task names, separated by commas"
    split: Literal["validation", "test"] = "test"
    "which held-out seeds"
    episodes: Positive[int] = 100
    "instances for each task, the same for every adapter"
    temperature: NotNegative[float] = 0.0
    "of the sampler; 0 is greedy"
    best_of: Positive[int] = 1
    "episodes for each instance, of which the best counts: what an oracle would pick (Best-of-N)"
    judge: Path | None = None
    "of best_of: the adapter folder of a reward model (train.py rm), which picks in the oracle's place"
    max_new_tokens: Positive[int] = 96
    "tokens an answer may have"
    shots: NotNegative[int] = 0
    "solved examples of its task that stand before each episode in its prompt"
    examples: Path | None = None
    "of shots: demonstrations of these tasks, as collect.py --policy expert writes them"
    out: Path = Path("runs/evaluation")
    "folder: NAME.jsonl with the episodes, result.json, report.html"
    export: Literal["merged", "gguf"] | None = None
    "play nothing; write each adapter, added to the base, as a model of its own: merged, to OUT/NAME-merged, \
for transformers; gguf, to OUT/NAME-merged.gguf, for llama.cpp and Ollama, and the adapter alone to \
OUT/NAME-lora.gguf"
    watch: bool = False
    "open the browser, act slowly, print thoughts and actions; one page, unless machine.pages is set"
    track: Tracker | None = None
    "tell the results to MLflow (where MLFLOW_TRACKING_URI says) or to TensorBoard (OUT/tensorboard), too"

    def __post_init__(self):
        super().__post_init__()
        check_shots(self)
        if self.best_of > 1 and not self.temperature:
            raise ValueError(
                "best_of tries several times, all alike when greedy: set --temperature above 0"
            )
        if self.judge and self.best_of == 1:
            raise ValueError("judge picks one of several episodes: set best_of above 1")
        given = self.changed(
            "tasks",
            "split",
            "episodes",
            "temperature",
            "best_of",
            "judge",
            "seed",
            "max_new_tokens",
            "shots",
            "examples",
            "watch",
            "track",
        )
        if self.export and given:
            raise ValueError(f"export plays nothing: leave out {', '.join(given)}")


@dataclass(frozen=True, kw_only=True)
class BrowseCommand(Command):
    """Let an agent act on a page outside the benchmark, confined to the page's origin."""

    url: str
    "http://, https:// or file://; the agent stays within this origin, or this file's folder"
    goal: str
    "what the agent is to do, in the words of a task"
    adapter: Path | None = None
    "folder or hub id of a LoRA adapter"
    steps: Positive[int] = 10
    "answers the agent may give"
    yes: bool = False
    "act without asking before each action"
    watch: bool = False
    "open the browser's window, to see what the agent does"
    temperature: NotNegative[float] = 0.0
    "of the sampler; 0 is greedy"
    max_new_tokens: Positive[int] = 96
    "tokens an answer may have"
    out: Path = Path("runs/page")
    "folder: episode.jsonl, to which each visit is added, and the pictures"


@dataclass(frozen=True)
class LoopCommand(Command):
    """The whole circle: demonstrations, SFT, then rounds of rollouts and training, evaluation, report."""

    tasks: str = "demo"
    "suites (report, demo, webgum-56, expert, all) or task names, separated by commas"
    out: Path = Path("runs/loop")
    "folder for everything: result.json, report.html, one folder a stage"
    seed: Positive[int] = 1
    start: Path | None = None
    "folder of another loop that began alike: what of it is done already is taken from there"
    adapter: Path | None = None
    "adapter that the first round starts from, folder or hub id, in place of SFT; its shape is kept"
    demonstrations: NotNegative[int] = 5
    "golden episodes for each task, by the scripted experts; 0: self-play, fine-tuned on what the base solved"
    demonstrations_in_total: Positive[int | None] = None
    "golden episodes of all tasks together, dealt out in turn, in place of so many for each"
    shots: NotNegative[int] = 0
    "solved examples of its task that stand before each episode in its prompt, by the scripted experts"
    instances: Positive[int] = 24
    "task instances explored in each round, for each task"
    explore: Literal["same", "demonstrations"] | None = None
    "same: the first round's instances in every round; demonstrations: their instances in every round (ETO); \
None: new ones in each round"
    keep_failures: bool = False
    "of dpo with explore: what failed on an instance in earlier rounds is rejected in later ones, too"
    keep_demonstrations: bool = False
    "of bc: each round imitates the demonstrations as well, and of equal successes one"
    group: Positive[int] = 8
    "episodes for each instance explored"
    rounds: Positive[int] = 1
    "how often to explore and train; the EF-DPO report has 1"
    learn: Learner = "dpo"
    "what a round does; dpo: preferences; rft: a new policy on demonstrations and all successes so far; \
bc: goes on with the round's successes; rwr: with all its episodes, by their advantage; vwr: with all their \
steps, by what these did to the value; evolve: rft on what reaches imitation.threshold, by its reward \
(AgentEvol); dagger: rft on what the experts do in states that the agent reached; others: policy gradients"
    states: Positive[int | None] = None
    "of learn or dpo.pairs dagger: states of each instance that the experts answer, at most; None: group"
    golden_steps: Literal["drawn", "every"] = "drawn"
    "of dpo.pairs stepwise and mixture: explore from one golden step, drawn for each instance, or from every \
one (ETO), in turn over the group"
    values: Positive[int] = 4
    "of dpo.pairs value, learn vwr and ppo.step_weight: continuations from each later step that it explored"
    average: bool = False
    "each round leaves the mean of the adapter that it began with and the one that it trained (WiSE-FT)"
    reference: Literal["previous", "sft"] = "previous"
    "of dpo, grpo.kl or ppo.kl: the policy that the round starts from, or the first one throughout"
    validation: Positive[int] = 20
    "validation instances for each task, played greedily before the first of several rounds (with focus \
or curriculum: of one, too) and after each: the best is kept"
    patience: Positive[int] = 2
    "stop after so many rounds without a better one (than any before, the first policy included)"
    curriculum: Share[float | None] = None
    "explore the easiest tasks only: one more while those before have this mean success on validation"
    focus: bool = False
    "explore most where success is nearest one half: in the first round on validation, later in the groups \
explored before (of tasks that have none, or whose instances were played once: on validation)"
    episodes: Positive[int] = 100
    "held-out instances for each task in the evaluation, played greedily"
    sampled: Positive[int] = 25
    "held-out instances for each task that are played at temperature 1 as well"
    rates_of: str | None = None
    "the model that the learning rates are for; another one is refused"
    track: Tracker | None = None
    "tell everything to MLflow (where MLFLOW_TRACKING_URI says) or to TensorBoard (OUT/tensorboard), too"
    sft: SFT = field(default_factory=SFT)
    dpo: DPO = field(default_factory=DPO)
    grpo: GRPO = field(default_factory=GRPO)
    ppo: PPO = field(default_factory=PPO)
    imitation: SFT = field(default_factory=lambda: SFT(steps=50, lr=2e-4))
    "what a round of rft, bc, rwr, vwr, evolve or dagger trains with"
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self):
        super().__post_init__()
        self.check_imitation()
        self.check_unread()
        self.check_groups()
        if self.adapter and (
            self.start
            or not self.demonstrations
            or self.shots
            or (self.demonstrations_in_total and self.explore != "demonstrations")
            or self.lora != LoRAConfig()
        ):
            raise ValueError(
                "adapter replaces SFT and has its own shape: leave out start, shots, lora, "
                "demonstrations 0, and demonstrations_in_total without explore demonstrations"
            )
        if self.adapter and self.learn in FRESH:
            raise ValueError(
                f"learn {self.learn} trains a new adapter on the base: leave adapter out"
            )
        if self.average and self.learn in (*FRESH, "ppo", "rm"):
            raise ValueError(
                f"learn {self.learn} has no mean with what a round began with: drop average"
            )
        if self.demonstrations_in_total and not self.demonstrations:
            raise ValueError("self-play has no demonstrations: leave out demonstrations_in_total")
        if self.keep_failures and not (self.explore and self.learn == "dpo" and self.rounds > 1):
            raise ValueError(
                "keep_failures needs pairs of earlier rounds' instances: set explore, rounds "
                "and learn dpo, or drop it"
            )
        if self.keep_demonstrations and (
            self.learn != "bc" or self.adapter or not self.demonstrations
        ):
            raise ValueError(
                "keep_demonstrations is of learn bc, and of demonstrations that the loop made: "
                "leave out adapter and demonstrations 0, or drop it"
            )
        if self.keep_failures and is_about_successes(self.dpo.pairs, self.dpo.dense):
            raise ValueError(
                f"dpo.pairs {self.dpo.pairs} asks what solved, and keep_failures keeps "
                "what failed alone: drop it, or choose other pairs"
            )
        if self.explore and (self.focus or self.curriculum is not None):
            raise ValueError(
                "focus and curriculum choose new instances, explore old ones: drop one of them"
            )
        if self.explore == "demonstrations" and (
            not self.demonstrations or self.instances != LoopCommand.instances
        ):
            raise ValueError(
                "explore demonstrations plays the demonstrations' instances: set demonstrations "
                "above 0, and leave instances out"
            )
        if not self.demonstrations and self.sft.weighting != "solved":
            raise ValueError("self-play imitates what the base solved: leave out sft.weighting")
        if self.learn in ("rloo", "gigpo") and self.grpo.advantage not in (
            GRPO.advantage,
            self.learn,
        ):
            raise ValueError(f"learn {self.learn} names the advantage: leave out grpo.advantage")
        self.policy_gradient().check_gigpo()
        policy_gradient = self.learn in (*POLICY_GRADIENTS, "ppo")
        if (
            policy_gradient
            and replace(self.sampling, max_new_tokens=Sampling.max_new_tokens) != Sampling()
        ):
            raise ValueError(
                f"learn {self.learn} takes samples of the policy itself: leave out "
                "sampling.temperature, sampling.temperatures and sampling.top_p"
            )
        reads_reference = self.learn == "dpo" or (
            policy_gradient and (self.ppo.kl if self.learn == "ppo" else self.grpo.kl)
        )
        if self.values != LoopCommand.values and not self.reads_values():
            raise ValueError(
                f"learn {self.learn} with dpo.pairs {self.dpo.pairs} reads no values: leave "
                "values out"
            )
        if self.reference != "previous" and not reads_reference:
            raise ValueError(f"learn {self.learn} has no reference: leave reference out")

    def check_groups(self) -> None:
        """Raises ValueError if episodes of an instance are to be compared, and no two of them differ."""
        pairs = self.dpo.pairs if self.learn == "dpo" else None
        compares = pairs in ("outcome", "efficient") or self.learn == "rwr"
        if self.group == 1 and (compares or pairs == "mixture" or self.learn in POLICY_GRADIENTS):
            raise ValueError(
                "one episode of an instance has nothing to be compared with: set group above 1"
            )
        if compares and not any(self.sampling.temperatures or (self.sampling.temperature,)):
            raise ValueError(
                "at temperature 0 the episodes of an instance are alike, and "
                f"{pairs or self.learn} compares them: set sampling.temperature above 0"
            )

    def check_imitation(self) -> None:
        """Raises ValueError for an option of imitation that a loop does not read."""
        if self.imitation.weighting != "solved" or self.imitation.distinct:
            raise ValueError(
                "learn says what is imitated: leave out imitation.weighting and distinct"
            )
        if not self.imitation.steps:
            raise ValueError("a round of no steps learns nothing: set imitation.steps above 0")
        if self.sft.weighting == "value":
            raise ValueError(
                "nobody plays on from a loop's demonstrations: leave out sft.weighting"
            )
        self.sft.check_weighting("sft")
        self.imitation.check_weighting("imitation", self.weighting())
        if self.imitation.selects() and self.learn not in ("rft", "bc", "evolve"):
            raise ValueError(
                f"learn {self.learn} selects no episodes to imitate: leave out "
                "imitation.select, per_instance and per_task"
            )
        if self.sft.selects() and self.demonstrations:
            raise ValueError(
                "demonstrations are all imitated: leave out sft.select, per_instance and "
                "per_task, or set demonstrations 0"
            )

    def check_unread(self) -> None:
        """Raises ValueError for an option of another learner."""
        # what says how pairs train, and not which, may stand in a file that all learners share
        of_pairs = self.dpo.changed("loss", "pairs", "clean", "dense", "noisy", "margin")
        of_groups = self.grpo.changed("advantage", "low", "high", "kl", "gamma", "state_weight")
        if self.learn not in POLICY_GRADIENTS and of_groups:
            raise ValueError(
                f"learn {self.learn} is no policy gradient of groups: of grpo, leave out "
                f"{', '.join(of_groups)}"
            )
        if self.states and not self.asks_experts():
            raise ValueError(
                f"learn {self.learn} with dpo.pairs {self.dpo.pairs} asks no expert: leave "
                "states out"
            )
        if self.golden_steps != "drawn" and self.dpo.pairs not in ("stepwise", "mixture"):
            raise ValueError(
                "golden_steps says where dpo.pairs stepwise and mixture explore from: choose "
                "one of these, or leave golden_steps out"
            )
        if self.learn != "ppo" and self.ppo != PPO():
            raise ValueError(f"learn {self.learn} is not ppo: leave out ppo's options")
        if self.learn not in ("dpo", "rm") and of_pairs:
            raise ValueError(
                f"learn {self.learn} has no pairs: leave out "
                f"{', '.join(f'dpo.{name}' for name in of_pairs)}"
            )

    def weighting(self) -> str:
        """How a round's learner weighs what it imitates."""
        return {"rwr": "advantage", "vwr": "value", "evolve": "reward"}.get(self.learn, "solved")

    def asks_experts(self) -> bool:
        """Whether a round lets the experts answer in the states that it explored."""
        return "dagger" in (self.learn, self.dpo.pairs)

    def reads_values(self) -> bool:
        """Whether a round goes on from each step of what it explored."""
        return self.dpo.pairs == "value" or self.learn == "vwr" or self.ppo.step_weight > 0

    def policy_gradient(self) -> GRPO:
        """What a round of policy gradients trains with: rloo and gigpo are grpo with that advantage."""
        return (
            replace(self.grpo, advantage=self.learn)
            if self.learn in ("rloo", "gigpo")
            else self.grpo
        )


@dataclass(frozen=True)
class PlanCommand(LoopCommand):
    """Where the memory of a loop, or of a reward model, will go, before any weight is read."""

    learn: Literal[Learner, "rm"] = "dpo"
    "as of the loop; rm: a reward model"
    rm: RM = field(default_factory=RM)

    def __post_init__(self):
        super().__post_init__()
        if self.learn != "rm" and self.rm != RM():
            raise ValueError(f"learn {self.learn} trains no reward model: leave out rm's options")


@dataclass(frozen=True)
class BaseCommand(Checked):
    """Make the small base model from nothing: tokenizer, copying, careful and clumsy demonstrations."""

    tasks: str = "demo"
    "suites or task names to read demonstrations of"
    out: Path = Path("runs/nano-base")
    "run folder; the model itself goes to OUT/model"
    seed: Seed = 1
    "of everything random"
    clumsy: Positive[int] = 80
    "episodes with bad habits, for each task"
    noise: Share[float] = 0.6
    "chance that a decision in them is replaced by a bad habit"
    careful: Annotated[int, Range("at least 2: one is held out", lambda x: x >= 2)] = 600
    "episodes without, for each task: what the good habits are, and what comes late in an episode"
    tokenizer: Path | None = None
    "tokenizer.json to use; by default one is trained on the demonstrations"
    vocab: Annotated[int, Range("at least 259: bytes, special tokens", lambda x: x >= 259)] = 1024
    "tokens of the byte-level BPE tokenizer, Qwen2's special ones among them"
    width: Positive[int] = 256
    "hidden size"
    layers: Positive[int] = 4
    "blocks"
    heads: Positive[int] = 8
    "query heads; there are two key/value heads"
    mlp: Positive[int] = 512
    "inner width of the SwiGLU"
    rope_theta: Positive[float] = 10_000.0
    "base of the rotary angles"
    context: Positive[int] = 4096
    "tokens the model says it can read"
    copy_steps: Positive[int] = 3000
    "steps that each of the two copying stages may take at most"
    copy_rows: Positive[int] = 64
    "rows a step of the copying stages"
    muon_lr: Positive[float] = 5e-3
    "Muon's learning rate while copying, scaled to the size of AdamW's updates"
    adamw_lr: Positive[float] = 3e-3
    "AdamW's learning rate while copying, for all that is not a matrix"
    steps: Positive[int] = 900
    "steps on careful episodes"
    habit_steps: Positive[int] = 80
    "steps on clumsy episodes"
    warmup: NotNegative[int] = 20
    "steps of linear warm-up"
    batch: Positive[int] = 12
    "episodes a step"
    imitation_muon_lr: Positive[float] = 3e-3
    "Muon's learning rate on careful episodes; on clumsy ones about a third of it"
    imitation_adamw_lr: Positive[float] = 1.5e-3
    "AdamW's, likewise"
    machine: Machine = field(default_factory=Machine)
