"""Scores and losses together, against what eight libraries answer for 16 pairs (oracles/losses.json)."""

import json
import math
from pathlib import Path

import pytest
import torch

from minidpo.learning.loss_table import LOSSES
from minidpo.objective.losses import preference_metrics
from minidpo.objective.scores import mean_weights, scores, sum_weights
from minidpo.objective.variants import kto_baseline, kto_loss

SIDES = ("policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected")

# theirs, ours, our parameters, and whether their gradient is that of a token's log-prob or of the mean

AGREED = [
    ("trl.dpo.sigmoid.beta0.1", "dpo", {"beta": 0.1}, "token"),
    ("trl.dpo.sigmoid.beta0.5", "dpo", {"beta": 0.5}, "token"),
    ("mitchell.dpo.beta0.1", "dpo", {"beta": 0.1}, "token"),
    ("torchtune.dpo.beta0.1.eps0.0", "dpo", {"beta": 0.1}, "token"),
    ("halos.dpo.beta0.1", "dpo", {"beta": 0.1}, "token"),
    ("openrlhf.dpo.beta0.1.eps0.0", "dpo", {"beta": 0.1}, None),
    ("liger.dpo.sigmoid.beta0.1", "dpo", {"beta": 0.1}, None),
    ("mitchell.cdpo.beta0.1.eps0.1", "cdpo", {"beta": 0.1, "label_smoothing": 0.1}, "token"),
    ("mitchell.cdpo.beta0.5.eps0.3", "cdpo", {"beta": 0.5, "label_smoothing": 0.3}, "token"),
    ("torchtune.dpo.beta0.1.eps0.3", "cdpo", {"beta": 0.1, "label_smoothing": 0.3}, "token"),
    ("halos.cdpo.beta0.1.eps0.1", "cdpo", {"beta": 0.1, "label_smoothing": 0.1}, "token"),
    ("openrlhf.dpo.beta0.1.eps0.1", "cdpo", {"beta": 0.1, "label_smoothing": 0.1}, None),
    ("trl.dpo.robust.beta0.1.eps0.1", "robust", {"beta": 0.1, "label_smoothing": 0.1}, "token"),
    ("trl.dpo.robust.beta0.5.eps0.3", "robust", {"beta": 0.5, "label_smoothing": 0.3}, "token"),
    ("liger.dpo.robust.beta0.1.eps0.1", "robust", {"beta": 0.1, "label_smoothing": 0.1}, None),
    ("mitchell.ipo_sum.beta0.1", "ipo_sum", {"beta": 0.1}, "token"),
    ("mitchell.ipo_sum.beta0.5", "ipo_sum", {"beta": 0.5}, "token"),
    ("openrlhf.ipo_sum.beta0.1.eps0.0", "ipo_sum", {"beta": 0.1}, None),
    ("trl.dpo.ipo.beta0.1", "ipo_mean", {"beta": 0.1}, "token"),
    ("trl.dpo.ipo.beta0.5", "ipo_mean", {"beta": 0.5}, "token"),
    ("halos.ipo.tau0.1", "ipo_mean", {"beta": 0.1}, "token"),
    ("trl.dpo.hinge.beta0.1", "hinge", {"beta": 0.1}, "token"),
    ("trl.dpo.hinge.beta0.5", "hinge", {"beta": 0.5}, "token"),
    ("torchtune.rso_hinge.gamma0.1", "hinge", {"beta": 0.1}, "token"),
    ("trl.cpo.simpo.beta2.0.gamma0.5", "simpo", {"beta": 2.0, "target_margin": 0.5}, "score"),
    ("trl.cpo.simpo.beta2.5.gamma1.4", "simpo", {"beta": 2.5, "target_margin": 1.4}, "score"),
    ("llamafactory.simpo.beta2.0.gamma0.5", "simpo", {"beta": 2.0, "target_margin": 0.5}, "score"),
    ("liger.simpo.beta2.0.gamma0.5", "simpo", {"beta": 2.0, "target_margin": 0.5}, None),
    ("halos.simpo.beta2.0.gbr0.25", "simpo", {"beta": 2.0, "target_margin": 0.5}, "token"),
    ("llamafactory.orpo.beta0.1", "orpo", {"odds_weight": 0.1}, "score"),
    ("paddlenlp.dpop.beta0.1.lambda5", "dpop", {"beta": 0.1, "penalty_weight": 5.0}, "token"),
    ("paddlenlp.dpop.beta0.1.lambda50", "dpop", {"beta": 0.1, "penalty_weight": 50.0}, "token"),
    ("paddlenlp.dpop.beta0.3.lambda50", "dpop", {"beta": 0.3, "penalty_weight": 50.0}, "token"),
]


@pytest.fixture(scope="module")
def reference():
    return json.loads((Path(__file__).parents[1] / "oracles" / "losses.json").read_text())


def side(reference, name, score):
    """Token log-probs (T,), a leaf; the scores (16,) made of them; where each trajectory begins; lengths."""
    rows = [
        torch.tensor(row, dtype=torch.float64) for row in reference["inputs"][f"{name}_token_logps"]
    ]
    lengths = torch.tensor([len(row) for row in rows])
    tokens, segment = torch.cat(rows).requires_grad_(), torch.arange(16).repeat_interleave(lengths)
    make_weights = {"sum": sum_weights, "mean": mean_weights}[score]
    weight = make_weights(torch.ones(len(tokens), dtype=torch.bool), segment, 16)
    return tokens, scores(tokens, segment, weight, 16), lengths.cumsum(0) - lengths, lengths


@pytest.mark.parametrize("theirs, ours, parameters, kind", AGREED, ids=[row[0] for row in AGREED])
def test_loss_and_gradient_agree_with_the_library(reference, theirs, ours, parameters, kind):
    """From token log-probs through `scores`. HALOs' IPO is 0/0 where policy = reference, and null here."""
    entry, expected = LOSSES[ours], reference["losses"][theirs]
    sides = {name: side(reference, name, entry.score) for name in SIDES}
    loss = entry.function(*(sides[name][1] for name in SIDES), **parameters)
    assert_agree(loss.detach(), expected["loss"])
    loss.sum().backward()
    for name in ("chosen", "rejected") if kind else ():
        tokens, _, begin, lengths = sides[f"policy_{name}"]
        gradient = tokens.grad[begin] * (lengths if kind == "score" else 1)
        assert_agree(gradient, expected[f"grad_{name}"])


def assert_agree(ours, theirs):
    known = [i for i, x in enumerate(theirs) if x is not None]
    theirs = torch.tensor([theirs[i] for i in known], dtype=torch.float64)
    torch.testing.assert_close(ours[known], theirs, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    "theirs, weights",
    [
        ("trl.kto.beta0.1", (1.0, 1.0)),
        ("trl.kto.beta0.1.w1.0,1.33", (1.0, 1.33)),
        ("trl.kto.beta0.1.kl_clamped", (1.0, 1.0)),
    ],
)
def test_kto_agrees_with_trl(reference, theirs, weights):
    """TRL's KL is the mean log-ratio of mismatched completions, and 0 if policy and ref change seats."""
    inputs, expected = reference["inputs"], reference["losses"][theirs]
    seats = ("ref", "policy") if theirs.endswith("clamped") else ("policy", "ref")
    kl = kto_baseline(
        *(torch.tensor(inputs[f"kto_kl_{who}_logps"], dtype=torch.float64) for who in seats)
    )
    assert math.isclose(kl.item(), expected["kl"], rel_tol=1e-12)
    leaves = [
        torch.tensor(inputs[f"{name}_logps"], dtype=torch.float64).requires_grad_()
        for name in SIDES
    ]
    loss = kto_loss(*leaves, 0.1, *weights, baseline=kl).mean()
    assert math.isclose(loss.item(), expected["loss"], rel_tol=1e-12)
    loss.backward()
    assert_agree(leaves[0].grad, expected["grad_chosen"])
    assert_agree(leaves[1].grad, expected["grad_rejected"])


def test_the_logged_quantities_are_those_of_trl(reference):
    """But for a tie: TRL adds row 0, policy = reference, up to a margin above 0 and counts 8 right, not 7."""
    inputs = [
        torch.tensor(reference["inputs"][f"{name}_logps"], dtype=torch.float64) for name in SIDES
    ]
    metrics = {
        name: value.mean().item() for name, value in preference_metrics(*inputs, beta=0.1).items()
    }
    trl = reference["losses"]["trl.dpo.sigmoid.beta0.1.batch"]["metrics"]
    same = {
        "reward_chosen": "rewards/chosen",
        "reward_rejected": "rewards/rejected",
        "margin": "rewards/margins",
        "logp_chosen": "logps/chosen",
        "logp_rejected": "logps/rejected",
    }
    for ours, theirs in same.items():
        assert math.isclose(metrics[ours], trl[theirs], rel_tol=1e-12), ours
    assert metrics["accuracy"] == 7 / 16 and trl["rewards/accuracies"] == 8 / 16
