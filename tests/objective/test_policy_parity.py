"""Advantages, policy-gradient losses and the reward model's, against TRL's trainers.

oracles/policy_gradient.json holds their answers and versions; `benchmarks/trl_policy.py` of v1 (commit cf007b6) made it.
"""

import json
from pathlib import Path

import pytest
import torch

from minidpo.learning.policy_gradient import PolicyGradient, RolloutBatch, clipped_objective
from minidpo.objective.policy_gradient import (
    clipped_loss,
    group_advantages,
    kl_k3,
    leave_one_out_advantages,
)
from minidpo.objective.reward_model import bradley_terry_loss

DOUBLE = torch.float64
THEIRS = json.loads((Path(__file__).parents[1] / "oracles" / "policy_gradient.json").read_text())
LENGTHS = torch.tensor(THEIRS["lengths"])
SEQUENCE = torch.arange(len(LENGTHS)).repeat_interleave(LENGTHS)  # of each token
OLD, REF = (torch.tensor(THEIRS[name], dtype=DOUBLE) for name in ("old_logps", "ref_logps"))
ADVANTAGE = torch.tensor(THEIRS["advantage"], dtype=DOUBLE)


def close(ours, theirs, **tolerance):
    torch.testing.assert_close(
        torch.as_tensor(ours, dtype=DOUBLE),
        torch.tensor(theirs, dtype=DOUBLE),
        **tolerance or {"rtol": 1e-12, "atol": 1e-15},
    )


def check(kind, loss_of, corrected=False):
    """Ours, of (log-probs, low, high, KL's weight), against the recorded losses of a kind and gradients."""
    cases = [
        case for case in THEIRS["losses"] if (case["kind"], case["corrected"]) == (kind, corrected)
    ]
    assert len(cases) == (2 if kind == "rloo" or corrected else 4)
    for case in cases:
        logps = torch.tensor(THEIRS["logps"], dtype=DOUBLE).requires_grad_()
        loss = loss_of(logps, case["low"], case["high"], case["kl"])
        loss.backward()
        close(loss.detach(), case["loss"])
        close(logps.grad, case["gradient"])


def test_the_advantages_of_groups_are_trls_but_for_what_it_adds_to_the_std():
    """TRL computes in float32 and divides by std + 1e-4."""
    reward = torch.tensor(THEIRS["rewards"], dtype=DOUBLE)
    group = torch.arange(len(reward)) // THEIRS["group"]
    std = reward.view(-1, THEIRS["group"]).std(dim=1)[group]
    float32 = {"rtol": 1e-6, "atol": 1e-6}
    close(
        group_advantages(reward, group) * std / (std + 1e-4),
        THEIRS["advantages"]["grpo.group"],
        **float32,
    )
    close(
        group_advantages(reward, group, scale=False), THEIRS["advantages"]["grpo.none"], **float32
    )
    close(leave_one_out_advantages(reward, group), THEIRS["advantages"]["rloo"], **float32)


@pytest.mark.parametrize("kind", ["bnpo", "dapo"])
def test_our_step_of_grpo_is_trls_mean_over_all_tokens(kind):
    """Ratio, clip on both sides and k3: the whole objective, with the KL's weight."""

    def ours(logps, low, high, kl):
        batch = RolloutBatch(None, [], len(SEQUENCE), ADVANTAGE[SEQUENCE], OLD, REF)
        return clipped_objective(PolicyGradient(low=low, high=high, kl=kl), batch, logps)[0]

    check(kind, ours)


def test_trls_default_weighs_the_kl_by_the_ratio_and_ours_does_not():
    """With the ratio, k3 has the gradient of KL(policy || reference); without, as in GRPO's paper, not."""

    def ours(logps, low, high, kl):
        weighed = (logps - OLD).exp() * kl_k3(logps, REF)
        return (clipped_loss(logps, OLD, ADVANTAGE[SEQUENCE], low, high) + kl * weighed).mean()

    check("bnpo", ours, corrected=True)


def test_a_reward_model_has_trls_loss_with_a_margin_or_without():
    cases = THEIRS["reward_model"]
    assert [bool(case["margin"]) for case in cases] == [False, True, True]
    for case in cases:
        sides = [
            torch.tensor(case[side], dtype=DOUBLE).requires_grad_()
            for side in ("chosen", "rejected")
        ]
        margins = case["margin"] or [0.0] * len(sides[0])  # ours has one margin for all pairs
        losses = torch.cat(
            [bradley_terry_loss(c[None], r[None], m) for c, r, m in zip(*sides, margins)]
        )
        losses.mean().backward()
        close(losses.mean().detach(), case["loss"])
        close(torch.cat([side.grad for side in sides]), case["gradient"])
        assert (sides[0] > sides[1]).float().mean().item() == pytest.approx(case["accuracy"])
