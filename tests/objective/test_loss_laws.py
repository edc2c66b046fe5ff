"""Which of our losses keeps which of minidpo/laws/loss.py.

Each of our losses keeps the laws that BROKEN_BY says, no more and no fewer, and each law is broken by a loss
that deserves it. docs/your-own-loss.md holds the table.
"""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from minidpo.laws import loss as laws
from minidpo.laws.for_all import SEARCH
from minidpo.laws.ours import LOSSES
from minidpo.objective.losses import dpo_loss, log_ratio_gap

DOCUMENT = Path(__file__).parents[2] / "docs" / "your-own-loss.md"


def swapped_pair(pc, pr, rc, rr):
    return dpo_loss(pr, pc, rr, rc, 0.1)


def mean_over_the_batch(pc, pr, rc, rr):
    return dpo_loss(pc, pr, rc, rr, 0.1).mean()


def whitened_over_the_batch(pc, pr, rc, rr):
    h = log_ratio_gap(pc, pr, rc, rr)
    return -F.logsigmoid(0.1 * (h - h.mean()))


def log_of_the_sigmoid(pc, pr, rc, rr):
    return -torch.log(torch.sigmoid(0.1 * ((pc - rc) - (pr - rr))))


def logit_cut_off(pc, pr, rc, rr):
    return -F.logsigmoid((0.1 * log_ratio_gap(pc, pr, rc, rr)).clamp(-10, 10))


def rejected_without_gradient(pc, pr, rc, rr):
    return dpo_loss(pc, pr.detach(), rc, rr, 0.1)


def reference_with_the_wrong_sign(pc, pr, rc, rr):
    return dpo_loss(pc, pr, -rc, -rr, 0.1)


def reference_added(pc, pr, rc, rr):
    return -F.logsigmoid(0.1 * (pc - pr + rc + rr))


def in_float32(pc, pr, rc, rr):
    return dpo_loss(pc.float(), pr.float(), rc.float(), rr.float(), 0.1)


def reference_negated_in_place(pc, pr, rc, rr):
    return -F.logsigmoid(0.1 * (pc - pr + rc.neg_() - rr.neg_()))


def normal_instead_of_logistic(pc, pr, rc, rr):
    return -torch.special.log_ndtr(0.1 * log_ratio_gap(pc, pr, rc, rr))


WRONG = {function.__name__: function for function in (
    swapped_pair, mean_over_the_batch, whitened_over_the_batch, log_of_the_sigmoid, logit_cut_off,
    rejected_without_gradient, reference_with_the_wrong_sign, reference_added, in_float32,
    reference_negated_in_place, normal_instead_of_logistic)}

# Law: which of our losses break it, these and no others | some of the wrong ones that it is there to catch.
BROKEN_BY = {
    laws.gives_each_pair_a_loss_of_its_own: "| mean_over_the_batch whitened_over_the_batch",
    laws.computes_in_the_dtype_of_the_log_probs: "| in_float32",
    laws.leaves_its_inputs_as_they_were: "| reference_negated_in_place",
    laws.refuses_a_log_prob_that_is_not_finite: "| log_of_the_sigmoid",
    laws.is_finite_in_float32_at_margins_of_thousands: "| log_of_the_sigmoid",
    laws.has_the_gradient_of_its_value: "| rejected_without_gradient",
    laws.reads_the_reference: "simpo orpo |",
    laws.ignores_what_a_prompt_adds_to_the_policy: "orpo kto dpop |",
    laws.ignores_what_a_prompt_adds_to_the_reference: "kto dpop | reference_added",
    laws.sees_the_policy_only_as_a_ratio_to_the_reference: "simpo orpo | reference_with_the_wrong_sign",
    laws.is_log_2_where_the_policy_is_the_reference:
        "ipo_sum ipo_mean hinge simpo orpo kto | reference_added",
    laws.pulls_the_chosen_up_and_the_rejected_down_at_first: "| swapped_pair whitened_over_the_batch",
    laws.does_not_let_both_log_probs_fall: "dpo dmpo cdpo robust ipo_sum ipo_mean hinge simpo kto |",
    laws.pulls_both_sides_equally_hard: "orpo kto dpop | rejected_without_gradient",
    laws.never_pulls_a_won_pair_back: "cdpo ipo_sum ipo_mean | swapped_pair",
    laws.pulls_a_won_pair_further_however_large_its_margin: "cdpo ipo_sum ipo_mean hinge |",
    laws.still_pulls_a_pair_that_is_hopelessly_lost: "kto | logit_cut_off log_of_the_sigmoid",
    laws.is_convex_in_the_policys_log_probs: "orpo kto |",
    laws.is_never_negative: "robust |",
    laws.gives_a_pair_and_its_swap_probabilities_that_sum_to_1:
        "cdpo robust ipo_sum ipo_mean hinge simpo orpo kto dpop |",
    laws.pulls_in_proportion_to_the_chance_of_being_wrong:
        "cdpo robust ipo_sum ipo_mean hinge orpo kto dpop | normal_instead_of_logistic",
}


def breakers(law):
    """The names of our losses that break a law, and of those that are wrong on purpose."""
    ours, _, wrong = BROKEN_BY[law].partition("|")
    return set(ours.split()), set(wrong.split())


def matrix():
    """BROKEN_BY as the Markdown table of docs/your-own-loss.md: a row a law, a column a loss."""
    rows = [["law", *LOSSES], ["---"] + [":-:"] * len(LOSSES)]
    rows += [[law.__name__.replace("_", " "), *("–" if name in breakers(law)[0] else "✓" for name in LOSSES)]
             for law in BROKEN_BY]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


each_law = pytest.mark.parametrize("law", BROKEN_BY, ids=lambda law: law.__name__)


@pytest.mark.parametrize("name", LOSSES)
@each_law
def test_of_our_losses_those_break_a_law_that_the_table_says(law, name):
    if name in breakers(law)[0]:
        with pytest.raises(AssertionError):
            law(LOSSES[name], SEARCH)
    else:
        law(LOSSES[name])


@each_law
def test_each_law_is_broken_by_a_loss_that_deserves_it(law):
    ours, wrong = breakers(law)
    assert ours | wrong and ours <= set(LOSSES) and wrong <= set(WRONG)
    for name in wrong:
        with pytest.raises(AssertionError):
            law(WRONG[name], SEARCH)


def test_each_loss_that_is_wrong_on_purpose_is_caught():
    assert set().union(*(breakers(law)[1] for law in BROKEN_BY)) == set(WRONG)


def test_a_broken_law_says_what_it_found_and_the_simplest_case():
    with pytest.raises(AssertionError) as broken:
        laws.is_log_2_where_the_policy_is_the_reference(LOSSES["ipo_sum"])
    assert re.fullmatch(r"it is 25 \(chosen = -?[\d.]+, rejected = -?[\d.]+\)", str(broken.value))


def test_every_law_is_in_the_table_and_the_table_in_the_document():
    assert tuple(BROKEN_BY) == laws.LAWS
    assert matrix() in DOCUMENT.read_text()
