"""Laws of preference losses. A loss takes four tensors (P,), log-probs in nats, and gives P numbers, (P,).

A law is a sentence about a loss, a property and not a verdict: IPO pulls a won pair back because it means to.
Which loss of minidpo keeps which law: docs/your-own-loss.md.
"""

import functools
import math

import torch
from hypothesis import strategies as st

from minidpo.laws.for_all import for_all, same, shown, tensor_of, unchanged, unlike

SIDES = ("policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected")

# Log-probs as sums or as means: negative, often near 0, where odds (ORPO) bend, but not so near that slopes
# cannot be measured. A state is one pair: its four log-probs, in SIDES' order.
logps = st.one_of(st.floats(-30, -0.1), st.floats(-3, -0.1))
states = st.tuples(logps, logps, logps, logps)
prompts = st.floats(-30, -1)  # log-prob of what both sides share
betas = st.floats(0.01, 5)
wide = st.one_of(logps, st.sampled_from([-150.0, -0.1]), st.floats(-150, -0.1))
wide_states = st.tuples(wide, wide, wide, wide)
# the policy prefers the chosen, and more than the reference does, whichever of the two a loss looks at
won_states = wide_states.map(lambda s: (max(s[:2]), min(s[:2]), min(s[2:]), max(s[2:])))
far_states = st.tuples(*[st.sampled_from([0.0, -1.0, -1001.0])] * 4)  # 0: the policy is certain


def tensors(*pairs, dtype=torch.float64):
    """Four tensors (P,) from P states."""
    return [torch.tensor(column, dtype=dtype) for column in zip(*pairs, strict=True)]


def called(loss, inputs):
    result = loss(*inputs)
    assert isinstance(result, torch.Tensor), f"returns a {type(result).__name__}, not a tensor"
    return result


def value(loss, state, dtype=torch.float64):
    """The loss of a pair; its shape is the first law's matter alone."""
    return called(loss, tensors(state, dtype=dtype)).reshape(-1)[0].item()


def of(loss, beta):
    """The loss with this beta."""
    return functools.partial(loss, beta=beta)


def slopes(loss, state, dtype=torch.float64):
    """d loss / d policy_chosen and d loss / d policy_rejected at one pair; 0 where no gradient arrives."""
    inputs = tensors(state, dtype=dtype)
    policy = [x.requires_grad_() for x in inputs[:2]]
    result = called(loss, inputs).sum()
    if not result.requires_grad:
        return 0.0, 0.0
    gradients = torch.autograd.grad(result, policy, allow_unused=True)
    return tuple(0.0 if gradient is None else gradient.item() for gradient in gradients)


def moved(state, *by):
    return tuple(x + step for x, step in zip(state, by, strict=True))


def pulls_to_the_chosen(loss, state, dtype=torch.float64):
    up, down = slopes(loss, state, dtype)
    assert up < 0 < down, f"its slopes are {up:.6g} and {down:.6g}, wanted - and +"


def ignores(loss, state, *by):
    """Whether these constants on its four log-probs change nothing."""
    sides = " and ".join(side for side, step in zip(SIDES, by, strict=True) if step)
    moved_state = moved(state, *by)
    same(
        value(loss, state),
        value(loss, moved_state),
        f"the loss without and with a constant on {sides}",
    )


# What it takes and gives


@for_all(a=states, b=states, c=states)
def gives_each_pair_a_loss_of_its_own(loss, a, b, c):
    """(P,) in, (P,) out, and no pair's loss depends on another: no mean, no whitening over the batch."""
    together = called(loss, tensors(a, b, c))
    shape = tuple(together.shape)
    assert shape == (3,), f"three pairs give a loss of shape {shape}, wanted (3,)"
    tensor_of(loss(*tensors(a)), (1,), "the loss of one pair")
    for pair, among_others in zip((a, b, c), together.tolist(), strict=True):
        same(value(loss, pair), among_others, "a pair's loss alone and among others")


@for_all(state=states, dtype=st.sampled_from([torch.float32, torch.float64]))
def computes_in_the_dtype_of_the_log_probs(loss, state, dtype):
    result = called(loss, tensors(state, dtype=dtype))
    assert result.dtype == dtype, f"gives {result.dtype} for {dtype}"


@for_all(state=states)
def leaves_its_inputs_as_they_were(loss, state):
    inputs = tensors(state)
    loss(*inputs)
    unchanged(SIDES, inputs, tensors(state))


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
    assert result == without, f"gives {result:.6g}, and no ValueError"


@for_all(state=far_states)
def is_finite_in_float32_at_margins_of_thousands(loss, state):
    found = (value(loss, state, torch.float32), *slopes(loss, state, torch.float32))
    assert all(map(math.isfinite, found)), (
        f"its value is {found[0]:.6g}, its slopes {shown(found[1:])}"
    )


@for_all(state=states)
def has_the_gradient_of_its_value(loss, state):
    """Between the slopes measured to the left and to the right, so that a kink may choose."""
    in_float64 = called(loss, tensors(state)).dtype == torch.float64
    tiny, slack = (1e-5, 1e-5) if in_float64 else (1e-2, 1e-3)  # else it rounds in its own dtype
    here = value(loss, state)
    for side, gradient in enumerate(slopes(loss, state)):
        step = [tiny * (i == side) for i in range(4)]
        below = value(loss, moved(state, *(-x for x in step)))
        above = value(loss, moved(state, *step))
        low, high = sorted(((here - below) / tiny, (above - here) / tiny))
        most = slack + 1e-3 * abs(gradient)
        assert low - most <= gradient <= high + most, (
            f"its gradient by {SIDES[side]} is {gradient:.6g}, its slope {(low + high) / 2:.6g}"
        )


# What it sees


@for_all(state=states)
def reads_the_reference(loss, state):
    """Both sides of it, for a policy that is still the reference or a few nats away."""
    state = (*state[:2], *state[:2])
    start = value(loss, state)
    for name, lower in ((SIDES[2], (0, 0, -1, 0)), (SIDES[3], (0, 0, 0, -1))):
        found = [value(loss, moved(state, *(nats * x for x in lower))) for nats in (1, 3)]
        assert all(map(math.isfinite, found)), f"gives {found}"  # nan != nan
        assert found != [start, start], f"a lower {name} changes nothing"


@for_all(state=states, prompt=prompts)
def ignores_what_a_prompt_adds_to_the_policy(loss, state, prompt):
    ignores(loss, state, prompt, prompt, 0, 0)


@for_all(state=states, prompt=prompts)
def ignores_what_a_prompt_adds_to_the_reference(loss, state, prompt):
    ignores(loss, state, 0, 0, prompt, prompt)


@for_all(state=states, nats=prompts)
def sees_the_policy_only_as_a_ratio_to_the_reference(loss, state, nats):
    """Together with the two before: it sees h alone, the difference of two log-ratios."""
    ignores(loss, state, nats, 0, nats, 0)


# Where it starts


@for_all(chosen=logps, rejected=logps)
def is_log_2_where_the_policy_is_the_reference(loss, chosen, rejected):
    found = value(loss, (chosen, rejected, chosen, rejected))
    assert math.isclose(found, math.log(2), abs_tol=1e-12), f"it is {unlike(found, math.log(2))[0]}"


@for_all(chosen=logps, rejected=logps)
def pulls_the_chosen_up_and_the_rejected_down_at_first(loss, chosen, rejected):
    pulls_to_the_chosen(loss, (chosen, rejected, chosen, rejected))


@for_all(chosen=prompts, rejected=prompts, nats=st.floats(1, 30))
def does_not_let_both_log_probs_fall(loss, chosen, rejected, nats):
    """DPO does: it is as content with both lower by the same, and in training the chosen often falls."""
    state = (chosen, rejected, chosen, rejected)
    start, fallen = value(loss, state), value(loss, moved(state, -nats, -nats, 0, 0))
    assert fallen > start + 1e-9, (
        f"both fall {nats:.6g} nats below the reference: {start:.6g}, {fallen:.6g}"
    )


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
    pulls_to_the_chosen(loss, state)


@for_all(nats=st.floats(0, 1000))
def still_pulls_a_pair_that_is_hopelessly_lost(loss, nats):
    """In float32, for a policy that has moved so many nats the wrong way on both sides."""
    pulls_to_the_chosen(loss, (-1 - nats, -1.0, -1.0, -1 - nats), torch.float32)


@for_all(a=wide_states, b=wide_states)
def is_convex_in_the_policys_log_probs(loss, a, b):
    """So the further a pair is from being won, the harder it is pulled."""
    a = (*a[:2], *b[2:])  # one reference
    middle = tuple((x + y) / 2 for x, y in zip(a, b, strict=True))
    low, high = value(loss, middle), (value(loss, a) + value(loss, b)) / 2
    assert low <= high + 1e-9 * (1 + abs(high)), f"{low:.6g} half-way, {high:.6g} on average"


@for_all(state=states)
def is_never_negative(loss, state):
    found = value(loss, state)
    assert found >= 0, f"it is {found:.6g}"


# Whether it is a probability


@for_all(state=states)
def gives_a_pair_and_its_swap_probabilities_that_sum_to_1(loss, state):
    """exp(-loss) as a probability that the chosen is better: the labels' likelihood under some model."""
    pc, pr, rc, rr = state
    found = math.exp(-value(loss, state)) + math.exp(-value(loss, (pr, pc, rr, rc)))
    assert math.isclose(found, 1, rel_tol=1e-9), f"their sum is {unlike(found, 1)[0]}"


@for_all(a=wide_states, b=states)
def pulls_in_proportion_to_the_chance_of_being_wrong(loss, a, b):
    """-d loss / d policy_chosen = β (1 - exp(-loss)) with one β for all pairs: the logistic curve alone."""
    (up_a, _), (up_b, _) = slopes(loss, a), slopes(loss, b)
    wrong_a, wrong_b = -math.expm1(-value(loss, a)), -math.expm1(-value(loss, b))
    assert math.isclose(up_a * wrong_b, up_b * wrong_a, rel_tol=1e-6, abs_tol=1e-15), (
        f"pulls {-up_a:.6g} at a probability of {wrong_a:.6g}, {-up_b:.6g} at {wrong_b:.6g}"
    )


# What a parameter beta does, for a loss that takes one


@for_all(chosen=logps, beta=betas)
def reads_beta(loss, chosen, beta):
    """In its slopes, at the reference or a nat below it; a loss that does not ignores `--dpo.beta`."""
    both = [(chosen - down, -1.0, chosen, -1.0) for down in (0, 1)]
    at_beta = [slopes(of(loss, beta), state) for state in both]
    at_twice = [slopes(of(loss, 2 * beta), state) for state in both]
    assert at_beta != at_twice, f"its slopes are {shown(at_beta)}, and the same at twice the beta"


@for_all(state=states, beta=betas)
def is_the_loss_at_beta_1_of_beta_times_the_log_probs(loss, state, beta):
    """beta scales what the loss sees and nothing else. Precondition: loss(..., beta=1.0) works."""
    found = value(of(loss, beta), state)
    wanted = value(of(loss, 1.0), tuple(beta * x for x in state))
    same(found, wanted, "the loss with beta, and with 1 for beta and beta times the log-probs")


@for_all(chosen=logps, beta=betas)
def pulls_with_half_of_beta_at_first(loss, chosen, beta):
    """Where the policy is the reference, the slopes are -beta/2 and beta/2."""
    up, _ = slopes(of(loss, beta), (chosen, -1.0, chosen, -1.0))
    same(up, -beta / 2, "its slope by the chosen, and -beta/2")


@for_all(rejected=logps, beta=betas)
def is_0_where_h_is_1_over_2_beta(loss, rejected, beta):
    """h = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)."""
    won = (-1 + 1 / (2 * beta), rejected, -1.0, rejected)
    same(value(of(loss, beta), won), 0, "its value, and the one wanted")


@for_all(state=wide_states, step=st.floats(0.5, 5), beta=betas)
def bends_like_h_squared(loss, state, step, beta):
    """L(h + d) + L(h - d) - 2 L(h) = 2 d², wherever h is: a parabola with the factor 1."""
    at = [value(of(loss, beta), moved(state, by, 0, 0, 0)) for by in (step, 0, -step)]
    found = at[0] + at[2] - 2 * at[1]
    assert math.isclose(found, 2 * step**2, rel_tol=1e-6), (
        f"L(h + d) + L(h - d) - 2 L(h) is {found:.6g}, wanted {2 * step**2:.6g}"
    )


LAWS = (
    gives_each_pair_a_loss_of_its_own,
    computes_in_the_dtype_of_the_log_probs,
    leaves_its_inputs_as_they_were,
    refuses_a_log_prob_that_is_not_finite,
    is_finite_in_float32_at_margins_of_thousands,
    has_the_gradient_of_its_value,
    reads_the_reference,
    ignores_what_a_prompt_adds_to_the_policy,
    ignores_what_a_prompt_adds_to_the_reference,
    sees_the_policy_only_as_a_ratio_to_the_reference,
    is_log_2_where_the_policy_is_the_reference,
    pulls_the_chosen_up_and_the_rejected_down_at_first,
    does_not_let_both_log_probs_fall,
    pulls_both_sides_equally_hard,
    never_pulls_a_won_pair_back,
    pulls_a_won_pair_further_however_large_its_margin,
    still_pulls_a_pair_that_is_hopelessly_lost,
    is_convex_in_the_policys_log_probs,
    is_never_negative,
    gives_a_pair_and_its_swap_probabilities_that_sum_to_1,
    pulls_in_proportion_to_the_chance_of_being_wrong,
    reads_beta,
    is_the_loss_at_beta_1_of_beta_times_the_log_probs,
    pulls_with_half_of_beta_at_first,
)
