"""Which losses there are: which scores each reads, and which numbers it has.

A new loss is a pure function in `objective/variants` and a line here. A number that no loss had so far is a
field of `config.LossParameters`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from minidpo.config import LossParameters
from minidpo.objective.losses import dpo_loss
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


@dataclass(frozen=True)
class Loss:
    """What one loss needs: its function, which scores that reads, and which parameters it has."""

    function: Callable[..., Tensor]  # of four scores (P,) and its parameters, by name
    score: str  # "sum", "mean" or "dmpo": the weights that make its scores (`objective/scores`)
    defaults: LossParameters  # what is None here is no parameter of this loss
    needs_reference: bool = True
    needs_baseline: bool = False  # reads `kto_baseline` of the whole step
    until: str = "token"  # where pairs are cut by default (`data/pairs`)

    def __post_init__(self):
        if self.until == "token" and self.score != "sum":
            raise ValueError(
                f"{self.function.__name__}: a cut at a token shortens one side alone, which is "
                "right for differences of sums, where what both share cancels: set until"
            )

    def of_scores(
        self, parameters: LossParameters, baseline: Tensor | float | None
    ) -> Callable[..., Tensor]:
        """The loss (P,) as a function of four scores (P,). baseline: KTO's, of the whole step."""
        numbers = parameters.given() | ({"baseline": baseline} if self.needs_baseline else {})
        if self.score == "dmpo":
            numbers.pop("gamma", None)  # which the scores' weights have read
        return partial(self.function, **numbers)


LOSSES = {
    "dpo": Loss(dpo_loss, "sum", LossParameters(beta=0.1)),
    "dmpo": Loss(dpo_loss, "dmpo", LossParameters(beta=0.1, gamma=0.9), until="end"),
    "cdpo": Loss(cdpo_loss, "sum", LossParameters(beta=0.1, label_smoothing=0.1)),
    "robust": Loss(robust_loss, "sum", LossParameters(beta=0.1, label_smoothing=0.1)),
    "ipo_sum": Loss(ipo_loss, "sum", LossParameters(beta=0.1)),
    "ipo_mean": Loss(ipo_loss, "mean", LossParameters(beta=0.1), until="turn"),
    "hinge": Loss(hinge_loss, "sum", LossParameters(beta=0.1)),
    "simpo": Loss(
        simpo_loss,
        "mean",
        LossParameters(beta=2.0, target_margin=0.5),
        needs_reference=False,
        until="turn",
    ),
    "orpo": Loss(
        orpo_loss, "mean", LossParameters(odds_weight=0.1), needs_reference=False, until="turn"
    ),
    "kto": Loss(
        kto_loss,
        "sum",
        LossParameters(beta=0.1, desirable_weight=1.0, undesirable_weight=1.0),
        needs_baseline=True,
        until="turn",
    ),
    "dpop": Loss(dpop_loss, "sum", LossParameters(beta=0.1, penalty_weight=5.0)),
}
