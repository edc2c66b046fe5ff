"""The table of preference losses: which scores each reads, and which parameters it has.

A new loss is a pure function in `objective/variants` and a line in LOSSES. A new parameter is a field of
`LossParameters`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

from torch import Tensor

from minidpo.objective.losses import dpo_loss
from minidpo.objective.scores import check_parameters
from minidpo.objective.variants import (
    cdpo_loss,
    dpop_loss,
    hinge_loss,
    ipo_loss,
    kto_loss,
    orpo_loss,
    robust_loss,
    simpo_loss,
)
from minidpo.system.ranges import Checked


@dataclass(frozen=True)
class LossParameters(Checked):
    """The parameters of losses. None: the loss's own default, or the loss does not have it."""

    beta: float | None = None
    "how strongly the policy is held to the reference"
    gamma: float | None = None
    "dmpo: discount of later turns"
    label_smoothing: float | None = None
    "cdpo, robust: share of pairs that may be mislabelled"
    target_margin: float | None = None
    "simpo: margin to reach"
    odds_weight: float | None = None
    "orpo: weight of the odds ratio"
    penalty_weight: float | None = None
    "dpop: weight of the penalty on a chosen log-prob below the reference"
    desirable_weight: float | None = None
    "kto: weight of the chosen"
    undesirable_weight: float | None = None
    "kto: weight of the rejected"

    def __post_init__(self):
        super().__post_init__()
        check_parameters(**self.given())

    def given(self) -> dict[str, float]:
        """The parameters that are not None, by name."""
        values = {p.name: getattr(self, p.name) for p in fields(LossParameters)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Loss:
    """One loss: its function, the scores that it reads, and its parameters."""

    function: Callable[..., Tensor]  # of four scores (P,) and its parameters, by name
    score: str  # "sum", "mean" or "dmpo": the weights that make its scores (`objective/scores`)
    defaults: LossParameters  # None: this loss does not have the parameter
    needs_reference: bool = True
    needs_baseline: bool = False  # reads `kto_baseline` of the whole step

    @property
    def cancels(self) -> bool:
        """Whether the tokens that both sides share cancel, so that one side may be cut at a token."""
        return self.score == "sum" and not self.needs_baseline

    def of_scores(
        self, parameters: LossParameters, baseline: Tensor | float | None
    ) -> Callable[..., Tensor]:
        """The loss (P,) as a function of four scores (P,). baseline: KTO's, of the whole step."""
        numbers = parameters.given()
        if self.needs_baseline:
            numbers["baseline"] = baseline
        if self.score == "dmpo":
            numbers.pop("gamma", None)  # it is in the weights of the scores already
        return partial(self.function, **numbers)


LOSSES = {
    "dpo": Loss(dpo_loss, "sum", LossParameters(beta=0.1)),
    "dmpo": Loss(dpo_loss, "dmpo", LossParameters(beta=0.1, gamma=0.9)),
    "cdpo": Loss(cdpo_loss, "sum", LossParameters(beta=0.1, label_smoothing=0.1)),
    "robust": Loss(robust_loss, "sum", LossParameters(beta=0.1, label_smoothing=0.1)),
    "ipo_sum": Loss(ipo_loss, "sum", LossParameters(beta=0.1)),
    "ipo_mean": Loss(ipo_loss, "mean", LossParameters(beta=0.1)),
    "hinge": Loss(hinge_loss, "sum", LossParameters(beta=0.1)),
    "simpo": Loss(
        simpo_loss, "mean", LossParameters(beta=2.0, target_margin=0.5), needs_reference=False
    ),
    "orpo": Loss(orpo_loss, "mean", LossParameters(odds_weight=0.1), needs_reference=False),
    "kto": Loss(
        kto_loss,
        "sum",
        LossParameters(beta=0.1, desirable_weight=1.0, undesirable_weight=1.0),
        needs_baseline=True,
    ),
    "dpop": Loss(dpop_loss, "sum", LossParameters(beta=0.1, penalty_weight=5.0)),
}
