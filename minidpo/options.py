"""28. Options: what can be set about machine, sampling and training, each with its default and unit.

The string under a field is its help text, there is no other. The commands (chapter 29) are made of these
groups. Next: 29 config.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg


Tracker = Literal["mlflow", "tensorboard"]


def positive(config, *names: str) -> None:
    """Refuse options that must be finite and greater than 0 and are not."""
    for name in names:
        if not 0 < getattr(config, name) < math.inf:  # nan fails every comparison
            raise ValueError(f"{name} must be finite and greater than 0, got {getattr(config, name)}")


@dataclass(frozen=True)
class Machine:
    """Where it runs."""

    device: str = "auto"
    "cpu, cuda, cuda:1 ...; auto takes a GPU if there is one"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    "of the base's weights; auto is bfloat16 on a GPU and float32 on a CPU"
    pages: int | None = None
    "browser pages played at once (default: 16, or one that is watched)"
    micro_tokens: int = 768
    "trees or episodes go through the model together up to this many tokens (with padding) in training; \
lower saves memory and changes no result"
    tree_tokens: int = 2048
    "tokens that the tree of a group may have; a larger group is split, and its prompt read once a part"
    recompute: bool = False
    "gradient checkpointing: keep only block inputs, compute the rest again in backward"
    offload: bool = False
    "with recompute, on a GPU: keep the block inputs in the host's memory"
    quantize: Literal["nf4"] | None = None
    "hold the base in 4 bits a weight (its vocabulary in 8): a model of 7B in 4.2 GiB"
    cache: Path | None = None
    "with quantize: folder that keeps the quantised weights, so that the next start takes seconds"
    memory_gib: float | None = None
    "what a run may take: of the GPU, whose allocator then gives no more, or on a CPU of the machine; a plan \
that needs more is refused before the weights are read (default: what is free)"

    def __post_init__(self):
        positive(self, "micro_tokens", "tree_tokens")
        positive(self, *(name for name in ("pages", "memory_gib") if getattr(self, name) is not None))
        if self.offload and not self.recompute:
            raise ValueError("offload keeps what recompute keeps, in another place: set recompute as well")
        if self.cache is not None and self.quantize is None:
            raise ValueError("cache keeps quantised weights, but quantize is not set: set it, or drop cache")

    def at_once(self, watched: bool = False) -> int:
        """Browser pages played at once."""
        return self.pages or (1 if watched else 16)


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
        positive(self, "max_new_tokens")
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
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    "adamw8bit keeps its two moments in 2 bytes a weight in place of 8"
    save_every: int = 25
    "steps between two states that a killed run can go on from"

    def __post_init__(self):
        positive(self, "steps", "lr", "clip", "save_every")
        if self.warmup < 0 or not 0 <= self.weight_decay < math.inf:
            raise ValueError("warmup and weight_decay must be finite and at least 0")


@dataclass(frozen=True)
class SFT(Optimizer):
    """Supervised fine-tuning: episodes are imitated."""

    batch: int = 8
    "episodes a step"
    weighting: Literal["solved", "advantage"] = "solved"
    "which count; solved: the solved episodes, all alike; advantage: all, by exp(advantage / temperature), \
the advantage over their instance's mean"
    temperature: float = 0.5
    "of weighting advantage: towards 0 those alone that are furthest above their instance, large: all alike"
    distinct: bool = False
    "of episodes of one instance in which the same was said, take one"

    def __post_init__(self):
        super().__post_init__()
        positive(self, "batch", "temperature")
        if self.distinct and self.weighting == "advantage":
            raise ValueError("distinct leaves episodes out, but weighting advantage needs all of an "
                             "instance: drop one of the two")

    def check_temperature(self, name: str, weighting: str | None = None) -> None:
        """Refuse a temperature where nothing is weighted by it; `name`: the option that these are."""
        if (weighting or self.weighting) != "advantage" and self.temperature != SFT.temperature:
            raise ValueError(f"{name}.temperature is of weighting advantage alone: leave it out")


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
    "pairs a step; those of one instance are taken together, because they share their tokens"
    loss: Annotated[str, arg(aliases=("--loss",))] = "dpo"
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
    desirable_weight: float | None = None
    "kto: weight of the chosen (default: the loss's own)"
    undesirable_weight: float | None = None
    "kto: weight of the rejected (default: the loss's own)"
    nll: float = 0.0
    "weight of an added -log π a token of the chosen episode, against falling chosen log-probs"
    pairs_per_instance: int = 4
    "pairs taken from one task instance at most, no episode twice before all were used"
    pairs_per_task: int | None = None
    "pairs taken from one task at most, as evenly from its instances as can be (default: all)"
    pairs: Literal["outcome", "expert", "stepwise", "mixture", "unpaired"] = "outcome"
    "their source; outcome: the agent's successes over its failures; expert: golden episodes over its \
failures (ETO); stepwise: two ways on from one golden step, by how they end (ETO); mixture: all three; \
unpaired: each outcome alone (kto)"
    clean: bool = False
    "leave out failures with an unusable action, or one repeated on a page that it had not changed"
    dense: bool = False
    "where nothing was solved, rank the failures, if the page or its form says which came nearer"
    until: Literal["end", "turn", "token"] | None = None
    "where pairs are cut; end: nowhere, turn: both behind the first turn that differs, token: the \
rejected alone behind the first token that differs (default: the loss's own)"

    def __post_init__(self):
        super().__post_init__()
        positive(self, "batch", "pairs_per_instance")
        if self.pairs_per_task is not None:
            positive(self, "pairs_per_task")
        if self.dense and self.loss == "orpo":
            raise ValueError("orpo imitates the chosen, which dense takes from failures: set another loss, "
                             "or no dense")
        if self.pairs == "unpaired":
            for name in ("pairs_per_instance", "pairs_per_task"):
                if getattr(self, name) != getattr(DPO, name):
                    raise ValueError(f"{name} counts pairs, and pairs unpaired makes none: leave it out")
        if self.pairs == "unpaired" and (self.loss != "kto" or self.dense):
            raise ValueError("pairs unpaired judges each episode alone, as only the loss kto does, and ranks "
                             "none: set loss kto and no dense, or other pairs")
        if not 0 <= self.nll < math.inf:
            raise ValueError(f"nll must be finite and at least 0, got {self.nll}")
