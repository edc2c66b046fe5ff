"""Laws of preference losses, and which loss keeps which; with `--loss package.module:function`, your own's.

A law is a sentence about a loss, a property and not a verdict: IPO pulls a won pair back because it means to.
Without --loss, each of our losses keeps the laws that BROKEN_BY says, no more and no fewer, and each law is
broken by a loss that deserves it. docs/your-own-loss.md tells how to use it and holds the table.
"""

import functools
import importlib
import inspect
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from minidpo.learning.loss_table import LOSSES
from minidpo.objective.losses import dpo_loss, log_ratio_gap

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "your-own-loss.md"
SIDES = ("policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected")
SEARCH, SHRINK = (Phase.generate,), (Phase.generate, Phase.shrink)

# Log-probs as sums or as means: negative, often near 0, where odds (ORPO) bend, but not so near that slopes
# cannot be measured. A state is one pair: its four log-probs, in SIDES' order.
logps = st.one_of(st.floats(-30, -0.1), st.floats(-3, -0.1))
states = st.tuples(logps, logps, logps, logps)
prompts = st.floats(-30, -1)  # log-prob of what both sides share
# the policy prefers the chosen, and more than the reference does, whichever of the two a loss looks at
won_states = states.map(lambda s: (max(s[:2]), min(s[:2]), min(s[2:]), max(s[2:])))
far_states = st.tuples(*[st.sampled_from([0.0, -1.0, -1001.0])] * 4)  # 0: the policy is certain


def for_all(**cases):
    """Make a claim about a loss and a case a law: the claim for 50 cases of those strategies.

    law(loss) raises AssertionError with the claim's message and the case, the simplest that hypothesis finds.
    """
    def of(claim):
        @functools.wraps(claim)
        def law(loss, phases=SHRINK):
            tries = settings.default.max_examples // 2
            if phases is SEARCH:  # one counterexample is wanted, and it ends the search
                tries *= 100

            @settings(max_examples=tries, phases=phases, database=None, report_multiple_bugs=False)
            @given(**cases)
            def attempt(**case):
                try:
                    claim(loss, **case)
                except AssertionError as wrong:
                    reason = str(wrong).partition("\n")[0]
                    found = ", ".join(f"{name} = {shown(value)}" for name, value in case.items())
                    raise AssertionError(f"{reason} ({found})") from None
            attempt()
        return law
    return of


def shown(case):
    """-30.0 as -30, (-1.25, nan) as (-1.25, nan): six digits of every number."""
    return f"({', '.join(map(shown, case))})" if isinstance(case, tuple) else (
        f"{case:.6g}" if isinstance(case, float) else str(case))


def tensors(*pairs, dtype=torch.float64):
    """Four tensors (P,) from P states."""
    return [torch.tensor(column, dtype=dtype) for column in zip(*pairs, strict=True)]


def called(loss, inputs):
    result = loss(*inputs)
    assert isinstance(result, torch.Tensor), f"returns a {type(result).__name__}, not a tensor"
    return result


def value(loss, *pairs, dtype=torch.float64):
    """The loss of these pairs, one after the other, as a list; its shape is the first law's matter alone."""
    return called(loss, tensors(*pairs, dtype=dtype)).reshape(-1).tolist()


def slopes(loss, state, dtype=torch.float64):
    """d loss / d policy_chosen and d loss / d policy_rejected at one pair; 0 where no gradient arrives."""
    inputs = tensors(state, dtype=dtype)
    policy = [x.requires_grad_() for x in inputs[:2]]
    result = called(loss, inputs).sum()
    if not result.requires_grad:
        return 0.0, 0.0
    gradients = torch.autograd.grad(result, policy, allow_unused=True)
    return tuple(0.0 if gradient is None else gradient.item() for gradient in gradients)


def same(a, b, what):
    """Fail with both numbers unless a and b are equal up to rounding in float64."""
    assert math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9), f"{what}: {a:.6g}, then {b:.6g}"


def moved(state, *by):
    return tuple(x + step for x, step in zip(state, by, strict=True))


# What it takes and gives


@for_all(a=states, b=states, c=states)
def gives_each_pair_a_loss_of_its_own(loss, a, b, c):
    """(P,) in, (P,) out, and no pair's loss depends on another: no mean, no whitening over the batch."""
    together = called(loss, tensors(a, b, c))
    shape = tuple(together.shape)
    assert shape == (3,), f"three pairs give a loss of shape {shape}, wanted (3,)"
    for pair, among_others in zip((a, b, c), together.tolist(), strict=True):
        same(value(loss, pair)[0], among_others, "a pair's loss alone and among others")


@for_all(state=states, dtype=st.sampled_from([torch.float32, torch.float64]))
def computes_in_the_dtype_of_the_log_probs(loss, state, dtype):
    result = called(loss, tensors(state, dtype=dtype))
    assert result.dtype == dtype, f"gives {result.dtype} for {dtype}"


@for_all(state=states)
def leaves_its_inputs_as_they_were(loss, state):
    inputs = tensors(state)
    loss(*inputs)
    for name, before, after in zip(SIDES, tensors(state), inputs, strict=True):
        assert torch.equal(before, after), f"{name} was {before.item():.6g} and is now {after.item():.6g}"


@for_all(side=st.sampled_from(SIDES), odd=st.sampled_from([math.nan, -math.inf, math.inf]))
def refuses_a_log_prob_that_is_not_finite(loss, side, odd):
    """By ValueError; a reference that the loss does not read may hold anything."""
    state = [-2.0, -3.0, -2.0, -3.0]
    without = value(loss, state)
    state[SIDES.index(side)] = odd
    try:
        result = value(loss, state)
    except ValueError:
        return
    assert result == without, f"gives {result[0]:.6g}, and no ValueError"


@for_all(state=far_states)
def is_finite_in_float32_at_margins_of_thousands(loss, state):
    found = (*value(loss, state, dtype=torch.float32), *slopes(loss, state, torch.float32))
    assert all(map(math.isfinite, found)), f"its value is {found[0]:.6g}, its slopes {shown(found[1:])}"


@for_all(state=states)
def has_the_gradient_of_its_value(loss, state):
    """Between the slopes measured to the left and to the right, so that a kink may choose."""
    tiny = 1e-5
    for side, gradient in enumerate(slopes(loss, state)):
        below, here, above = (value(loss, moved(state, *[at * (i == side) for i in range(4)]))[0]
                              for at in (-tiny, 0, tiny))
        low, high = sorted(((here - below) / tiny, (above - here) / tiny))
        slack = 1e-5 + 1e-3 * abs(gradient)
        assert low - slack <= gradient <= high + slack, (
            f"its gradient by {SIDES[side]} is {gradient:.6g}, its slope {(low + high) / 2:.6g}")


# What it sees


@for_all(state=states)
def reads_the_reference(loss, state):
    """Both sides of it, for a policy that is still the reference or a few nats away."""
    chosen, rejected = state[:2]
    at_reference = value(loss, (chosen, rejected, chosen, rejected))
    for side, step in ((2, (1, 0)), (3, (0, 1))):
        results = [value(loss, moved((chosen, rejected, chosen, rejected), 0, 0, *(-nats * s for s in step)))
                   for nats in (1, 3)]
        assert all(math.isfinite(x) for result in results for x in result), f"gives {results}"  # nan != nan
        assert any(result != at_reference for result in results), f"a lower {SIDES[side]} changes nothing"


@for_all(state=states, prompt=prompts)
def ignores_what_a_prompt_adds_to_the_policy(loss, state, prompt):
    same(value(loss, state)[0], value(loss, moved(state, prompt, prompt, 0, 0))[0],
         "the loss without and with a constant on both of the policy's log-probs")


@for_all(state=states, prompt=prompts)
def ignores_what_a_prompt_adds_to_the_reference(loss, state, prompt):
    same(value(loss, state)[0], value(loss, moved(state, 0, 0, prompt, prompt))[0],
         "the loss without and with a constant on both of the reference's log-probs")


@for_all(state=states, nats=prompts)
def sees_the_policy_only_as_a_ratio_to_the_reference(loss, state, nats):
    """Together with the two before: it sees h alone, the difference of two log-ratios."""
    same(value(loss, state)[0], value(loss, moved(state, nats, 0, nats, 0))[0],
         "the loss without and with a constant on the chosen's log-prob, policy's and reference's")


# Where it starts


@for_all(chosen=logps, rejected=logps)
def is_log_2_where_the_policy_is_the_reference(loss, chosen, rejected):
    (found,) = value(loss, (chosen, rejected, chosen, rejected))
    assert math.isclose(found, math.log(2), abs_tol=1e-12), f"it is {found:.6g}"


@for_all(chosen=logps, rejected=logps)
def pulls_the_chosen_up_and_the_rejected_down_at_first(loss, chosen, rejected):
    up, down = slopes(loss, (chosen, rejected, chosen, rejected))
    assert up < 0 < down, f"at the reference its slopes are {up:.6g} and {down:.6g}, wanted - and +"


@for_all(chosen=prompts, rejected=prompts, nats=st.floats(1, 30))
def does_not_let_both_log_probs_fall(loss, chosen, rejected, nats):
    """DPO does: it is as content with both lower by the same, and in training the chosen often falls."""
    (start,), (fallen,) = (value(loss, moved((chosen, rejected, chosen, rejected), -by, -by, 0, 0))
                           for by in (0, nats))
    assert fallen > start + 1e-9, f"both fall {nats:.6g} nats below the reference: {start:.6g}, {fallen:.6g}"


# Where it pulls


@for_all(state=states)
def pulls_both_sides_equally_hard(loss, state):
    up, down = slopes(loss, state)
    same(-up, down, "its pull on the chosen and on the rejected")


@for_all(state=won_states)
def never_pulls_a_won_pair_back(loss, state):
    up, down = slopes(loss, state)
    assert up <= 0 <= down, f"its slopes are {up:.6g} and {down:.6g}, wanted - and +, or 0"


@for_all(state=won_states)
def pulls_a_won_pair_further_however_large_its_margin(loss, state):
    up, down = slopes(loss, state)
    assert up < 0 < down, f"its slopes are {up:.6g} and {down:.6g}, wanted - and +"


@for_all(nats=st.floats(0, 1000))
def still_pulls_a_pair_that_is_hopelessly_lost(loss, nats):
    """In float32, for a policy that has moved so many nats the wrong way on both sides."""
    up, down = slopes(loss, (-1 - nats, -1.0, -1.0, -1 - nats), torch.float32)
    assert up < 0 < down, f"its slopes are {up:.6g} and {down:.6g}, wanted - and +"


@for_all(a=states, b=states)
def is_convex_in_the_policys_log_probs(loss, a, b):
    """So the further a pair is from being won, the harder it is pulled."""
    a = (*a[:2], *b[2:])  # one reference
    middle = tuple((x + y) / 2 for x, y in zip(a, b, strict=True))
    low, high = value(loss, middle)[0], (value(loss, a)[0] + value(loss, b)[0]) / 2
    assert low <= high + 1e-9 * (1 + abs(high)), f"{low:.6g} half-way, {high:.6g} on average"


@for_all(state=states)
def is_never_negative(loss, state):
    (found,) = value(loss, state)
    assert found >= 0, f"it is {found:.6g}"


# Whether it is a probability


@for_all(state=states)
def gives_a_pair_and_its_swap_probabilities_that_sum_to_1(loss, state):
    """exp(-loss) as a probability that the chosen is better: the labels' likelihood under some model."""
    pc, pr, rc, rr = state
    found = math.fsum(math.exp(-x) for x in value(loss, state) + value(loss, (pr, pc, rr, rc)))
    assert math.isclose(found, 1, rel_tol=1e-9), f"their sum is {found:.6g}"


@for_all(a=states, b=states)
def pulls_in_proportion_to_the_chance_of_being_wrong(loss, a, b):
    """-d loss / d policy_chosen = β (1 - exp(-loss)) with one β for all pairs: the logistic curve alone."""
    (up_a, _), (up_b, _) = slopes(loss, a), slopes(loss, b)
    wrong_a, wrong_b = (-math.expm1(-x) for x in value(loss, a) + value(loss, b))
    assert math.isclose(up_a * wrong_b, up_b * wrong_a, rel_tol=1e-6, abs_tol=1e-15), (
        f"pulls {-up_a:.6g} at a probability of {wrong_a:.6g}, {-up_b:.6g} at {wrong_b:.6g}")


# Our losses, and some that are wrong on purpose


def our_losses():
    """Every loss of LOSSES with its default parameters, called with four log-probs; KTO's baseline is 0."""
    table = {}
    for name, entry in LOSSES.items():
        baseline = {"baseline": 0.0} if entry.needs_baseline else {}
        numbers = {key: value for key, value in entry.defaults.given().items() if key != "gamma"}
        table[name] = functools.partial(entry.function, **numbers, **baseline)
    return table


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
OURS = our_losses()

# Law: which of our losses break it, these and no others | some of the wrong ones that it is there to catch.
BROKEN_BY = {
    gives_each_pair_a_loss_of_its_own: "| mean_over_the_batch whitened_over_the_batch",
    computes_in_the_dtype_of_the_log_probs: "| in_float32",
    leaves_its_inputs_as_they_were: "| reference_negated_in_place",
    refuses_a_log_prob_that_is_not_finite: "| log_of_the_sigmoid",
    is_finite_in_float32_at_margins_of_thousands: "| log_of_the_sigmoid",
    has_the_gradient_of_its_value: "| rejected_without_gradient",
    reads_the_reference: "simpo orpo |",
    ignores_what_a_prompt_adds_to_the_policy: "orpo kto dpop |",
    ignores_what_a_prompt_adds_to_the_reference: "kto dpop | reference_added",
    sees_the_policy_only_as_a_ratio_to_the_reference: "simpo orpo | reference_with_the_wrong_sign",
    is_log_2_where_the_policy_is_the_reference: "ipo_sum ipo_mean hinge simpo orpo kto | reference_added",
    pulls_the_chosen_up_and_the_rejected_down_at_first: "| swapped_pair whitened_over_the_batch",
    does_not_let_both_log_probs_fall: "dpo dmpo cdpo robust ipo_sum ipo_mean hinge simpo kto |",
    pulls_both_sides_equally_hard: "orpo kto dpop | rejected_without_gradient",
    never_pulls_a_won_pair_back: "cdpo ipo_sum ipo_mean | swapped_pair",
    pulls_a_won_pair_further_however_large_its_margin: "cdpo ipo_sum ipo_mean hinge |",
    still_pulls_a_pair_that_is_hopelessly_lost: "kto | logit_cut_off log_of_the_sigmoid",
    is_convex_in_the_policys_log_probs: "orpo kto |",
    is_never_negative: "robust |",
    gives_a_pair_and_its_swap_probabilities_that_sum_to_1:
        "cdpo robust ipo_sum ipo_mean hinge simpo orpo kto dpop |",
    pulls_in_proportion_to_the_chance_of_being_wrong:
        "cdpo robust ipo_sum ipo_mean hinge orpo kto dpop | normal_instead_of_logistic",
}


def breakers(law):
    """The names of our losses that break a law, and of those that are wrong on purpose."""
    ours, _, wrong = BROKEN_BY[law].partition("|")
    return set(ours.split()), set(wrong.split())


def matrix():
    """BROKEN_BY as the Markdown table of docs/your-own-loss.md: a row a law, a column a loss."""
    rows = [["law", *OURS], ["---"] + [":-:"] * len(OURS)]
    rows += [[law.__name__.replace("_", " "), *("–" if name in breakers(law)[0] else "✓" for name in OURS)]
             for law in BROKEN_BY]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


laws = pytest.mark.parametrize("law", BROKEN_BY, ids=lambda law: law.__name__)


@pytest.mark.parametrize("name", OURS)
@laws
def test_of_our_losses_those_break_a_law_that_the_table_says(law, name):
    if name in breakers(law)[0]:
        with pytest.raises(AssertionError):
            law(OURS[name], SEARCH)
    else:
        law(OURS[name])


@laws
def test_each_law_is_broken_by_a_loss_that_deserves_it(law):
    ours, wrong = breakers(law)
    assert ours | wrong and ours <= set(OURS) and wrong <= set(WRONG)
    for name in wrong:
        with pytest.raises(AssertionError):
            law(WRONG[name], SEARCH)


def test_each_loss_that_is_wrong_on_purpose_is_caught():
    assert set().union(*(breakers(law)[1] for law in BROKEN_BY)) == set(WRONG)


def test_a_broken_law_says_what_it_found_and_the_simplest_case():
    with pytest.raises(AssertionError) as broken:
        is_log_2_where_the_policy_is_the_reference(OURS["ipo_sum"])
    assert re.fullmatch(r"it is 25 \(chosen = -?[\d.]+, rejected = -?[\d.]+\)", str(broken.value))


# Your loss


def loss_named(spec):
    """The function that `package.module:function` names, or one of LOSSES; else pytest.UsageError, a line."""
    if spec in OURS:
        return OURS[spec]
    module_name, colon, name = spec.partition(":")
    if not (colon and all(part.isidentifier() for part in [*module_name.split("."), name])):
        raise pytest.UsageError(f"--loss {spec}: wanted package.module:function, e.g. my_losses:exponential, "
                                f"or one of {', '.join(OURS)}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything while it is imported
        raise pytest.UsageError(f"--loss {spec}: cannot import {module_name}: {error} (it is looked for in "
                                "this folder and in those of PYTHONPATH)") from None
    function = getattr(module, name, None)
    if not callable(function):
        what = "is not a function" if hasattr(module, name) else "does not exist"
        raise pytest.UsageError(f"--loss {spec}: {name} {what} in {module!r}")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:
        raise pytest.UsageError(f"--loss {spec}: {name} is built in and does not say what it takes: "
                                "wrap it in a def") from None
    more = [p.name for i, p in enumerate(parameters) if p.default is p.empty
            and (p.kind == p.KEYWORD_ONLY or p.kind == p.POSITIONAL_OR_KEYWORD and i >= 4)]
    if more:
        raise pytest.UsageError(f"--loss {spec}: give {', '.join(more)} a default, or name a "
                                "functools.partial that does: a loss is called with four tensors alone")
    try:
        inspect.signature(function).bind(*SIDES)
    except TypeError as error:
        raise pytest.UsageError(f"--loss {spec}: cannot be called with {', '.join(SIDES)}: {error}") from None
    return function


@laws
def test_your_loss(law, your_loss):
    """Only with --loss, and then nothing else; a law that does not hold fails with its reason alone."""
    reason = ""
    try:
        law(your_loss)
    except AssertionError as broken:
        reason = str(broken)
    if reason:
        pytest.fail(reason, pytrace=False)


@pytest.mark.parametrize("spec, complaint", [
    ("my_losses", "wanted package.module:function"),
    (":loss", "wanted package.module:function"),
    ("folder/my_losses.py:loss", "wanted package.module:function"),
    ("no.such:loss", "cannot import no.such: No module named 'no'"),
    ("my_broken:loss", "cannot import my_broken: "),
    ("my_losses:none", "none does not exist in .*my_losses.py"),
    ("my_losses:BETA", "BETA is not a function in .*my_losses.py"),
    ("torch:add", "add is built in and does not say what it takes"),
    ("my_losses:needs_more", "give beta, gamma a default"),
    ("my_losses:takes_two", "cannot be called with .*: too many positional arguments"),
])
def test_a_loss_that_cannot_be_called_is_refused_in_one_line(spec, complaint, tmp_path, monkeypatch):
    (tmp_path / "my_broken.py").write_text("def loss(:\n")
    (tmp_path / "my_losses.py").write_text(
        "BETA = 0.1\n"
        "def needs_more(a, b, c, d, beta, e=1, *, gamma): pass\n"
        "def takes_two(a, b): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)
    with pytest.raises(pytest.UsageError, match=complaint) as refused:
        loss_named(spec)
    assert "\n" not in str(refused.value)


def judge(spec, folder):
    """The exit code and words of `pytest tests/objective/test_loss_laws.py --loss SPEC`, SPEC in FOLDER."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/objective/test_loss_laws.py",
         "--loss", spec],
        cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "80", "HYPOTHESIS_PROFILE": "ci"})
    return done.returncode, done.stdout + done.stderr


def test_the_example_in_the_document_runs_and_says_what_the_document_says(tmp_path):
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    code, output = (next(text for kind, text in blocks if kind == wanted) for wanted in ("python", "text"))
    assert len(code.splitlines()) <= 10 and "def exponential(" in code
    assert '"exponential": Loss(exponential, ' in DOCUMENT.read_text()
    (tmp_path / "my_losses.py").write_text(code)
    exit_code, said = judge("my_losses:exponential", tmp_path)
    assert exit_code == 1
    assert [line for line in output.splitlines() if line != "..." and line not in said.splitlines()] == []
    verdicts = re.findall(r"^(?:holds|does not hold)  ", said, re.MULTILINE)
    assert len(verdicts) == len(BROKEN_BY)


@pytest.mark.slow
def test_a_misspelt_loss_is_one_line_at_the_command_line(tmp_path):
    exit_code, said = judge("my_losses:exponential", tmp_path)
    assert exit_code == pytest.ExitCode.USAGE_ERROR
    assert re.fullmatch(r"ERROR: --loss my_losses:exponential: cannot import my_losses: .*", said.strip())


def test_the_table_in_the_document_is_the_one_here():
    assert matrix() in DOCUMENT.read_text()
