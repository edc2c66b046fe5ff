"""Which of our losses keeps which of minidpo/laws/loss.py.

Each of our losses keeps the laws that the table in docs/your-own-loss.md says, no more and no fewer, and each
law is broken by a loss that deserves it.
"""

import inspect
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from minidpo.laws import loss as laws
from minidpo.laws.for_all import SEARCH
from minidpo.laws.ours import LOSSES, broken_by
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


def beta_forgotten(pc, pr, rc, rr, beta=0.1):
    return dpo_loss(pc, pr, rc, rr, 0.1)


def beta_before_the_logarithm(pc, pr, rc, rr, beta=0.1):
    return beta * dpo_loss(pc, pr, rc, rr, 1.0)


def beta_divides(pc, pr, rc, rr, beta=0.1):
    return dpo_loss(pc, pr, rc, rr, 1 / beta)


def beta_twice(pc, pr, rc, rr, beta=0.1):
    return dpo_loss(pc, pr, rc, rr, 2 * beta)


def squeezed(pc, pr, rc, rr):
    return dpo_loss(pc, pr, rc, rr, 0.1).squeeze()


def content_with_a_large_margin(pc, pr, rc, rr):
    return -F.logsigmoid((0.1 * ((pc - rc) - (pr - rr))).clamp(max=12))


WRONG = {
    function.__name__: function
    for function in (
        squeezed,
        content_with_a_large_margin,
        swapped_pair,
        mean_over_the_batch,
        whitened_over_the_batch,
        log_of_the_sigmoid,
        logit_cut_off,
        rejected_without_gradient,
        reference_with_the_wrong_sign,
        reference_added,
        in_float32,
        reference_negated_in_place,
        normal_instead_of_logistic,
        beta_forgotten,
        beta_before_the_logarithm,
        beta_divides,
        beta_twice,
    )
}

BROKEN_BY = broken_by()
# Law: losses that are wrong on purpose and that it is there to catch, where none of ours breaks it or more.
CATCHES = {
    laws.gives_each_pair_a_loss_of_its_own: "mean_over_the_batch whitened_over_the_batch squeezed",
    laws.computes_in_the_dtype_of_the_log_probs: "in_float32",
    laws.leaves_its_inputs_as_they_were: "reference_negated_in_place",
    laws.refuses_a_log_prob_that_is_not_finite: "log_of_the_sigmoid",
    laws.is_finite_in_float32_at_margins_of_thousands: "log_of_the_sigmoid",
    laws.has_the_gradient_of_its_value: "rejected_without_gradient",
    laws.ignores_what_a_prompt_adds_to_the_reference: "reference_added",
    laws.sees_the_policy_only_as_a_ratio_to_the_reference: "reference_with_the_wrong_sign",
    laws.is_log_2_where_the_policy_is_the_reference: "reference_added",
    laws.pulls_the_chosen_up_and_the_rejected_down_at_first: "swapped_pair whitened_over_the_batch",
    laws.pulls_both_sides_equally_hard: "rejected_without_gradient",
    laws.never_pulls_a_won_pair_back: "swapped_pair",
    laws.pulls_a_won_pair_further_however_large_its_margin: "content_with_a_large_margin",
    laws.still_pulls_a_pair_that_is_hopelessly_lost: "logit_cut_off log_of_the_sigmoid",
    laws.pulls_in_proportion_to_the_chance_of_being_wrong: "normal_instead_of_logistic content_with_a_large_margin",
    laws.reads_beta: "beta_forgotten",
    laws.is_the_loss_at_beta_1_of_beta_times_the_log_probs: "beta_forgotten beta_before_the_logarithm beta_divides",
    laws.pulls_with_half_of_beta_at_first: "beta_forgotten beta_divides beta_twice",
}


def breakers(law):
    """The names of our losses that break a law, and of those that are wrong on purpose."""
    return set(BROKEN_BY[law.__name__.replace("_", " ")]), set(CATCHES.get(law, "").split())


def asked(law, name):
    """Whether the law says something of this loss of ours: ORPO has no beta."""
    return not law.is_of_beta or "beta" in inspect.signature(LOSSES[name]).parameters


each_law = pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)


@pytest.mark.parametrize("name", LOSSES)
@each_law
def test_of_our_losses_those_break_a_law_that_the_table_says(law, name):
    if not asked(law, name):
        assert name == "orpo" and name not in breakers(law)[0]
    elif name in breakers(law)[0]:
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


def test_the_page_has_every_law_and_every_loss():
    assert list(BROKEN_BY) == [law.__name__.replace("_", " ") for law in laws.LAWS]
    text = DOCUMENT.read_text()
    assert [name for name in LOSSES if f"`{name}`" not in text] == []
