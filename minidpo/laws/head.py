"""Laws of a vocabulary head: head(hidden (T,C), weight (V,C), targets (T,) int64) gives log-probs (T,).

logp_t = log softmax(hidden_t @ weightᵀ)[target_t], in nats. Each target is in 0..V-1; T may be 0.
"""

import torch
from hypothesis import strategies as st

from minidpo.laws.for_all import close, f64, for_all, shown, tensor_of

V, C = 4, 2
numbers = st.integers(-4, 4)
weights = st.lists(st.tuples(numbers, numbers), min_size=V, max_size=V)
tokens = st.lists(
    st.tuples(st.tuples(numbers, numbers), st.integers(0, V - 1)), max_size=5
)  # hidden, target


def logps_of(head, tokens, weight, dtype=torch.float64):
    """The log-probs of some tokens, (T,), with the leaves hidden (T,C) and weight (V,C)."""
    hidden = f64([hidden for hidden, _ in tokens]).reshape(-1, C).to(dtype).requires_grad_()
    weight = f64(weight).to(dtype).requires_grad_()
    targets = torch.tensor([target for _, target in tokens], dtype=torch.int64)
    return tensor_of(head(hidden, weight, targets), (len(tokens),)), hidden, weight


@for_all(hidden=st.tuples(numbers, numbers), weight=weights)
def gives_all_targets_together_the_probability_1(head, hidden, weight):
    logps, *_ = logps_of(head, [(hidden, target) for target in range(V)], weight)
    close(logps.exp().sum(), f64(1.0), "the sum of exp(logp) over all targets")


@for_all(hidden=st.tuples(numbers, numbers), weight=weights)
def gives_log_probs_as_far_apart_as_the_logits(head, hidden, weight):
    """logp of target a - logp of target b = hidden · (weight_a - weight_b)."""
    logps, *_ = logps_of(head, [(hidden, target) for target in range(V)], weight)
    logits = f64(weight) @ f64(hidden)
    close(logps - logps[0], logits - logits[0], "logp less that of target 0, of target")


@for_all(tokens=tokens, weight=weights)
def gives_each_token_what_it_has_alone(head, tokens, weight):
    """(T,) for T tokens, without a mean; no token reads another's hidden state or target."""
    together, *_ = logps_of(head, tokens, weight)
    alone = [logps_of(head, [token], weight)[0] for token in tokens]
    close(together, torch.cat([*alone, f64([])]), "the log-prob of a token among others")


@for_all(tokens=tokens, weight=weights)
def has_the_gradient_of_log_softmax(head, tokens, weight):
    """∂ logp_t / ∂ logits_t = onehot(target_t) - softmax(logits_t), for a different pull on each token."""
    logps, *leaves = logps_of(head, tokens, weight)
    pull = torch.arange(1.0, len(tokens) + 1, dtype=torch.float64)
    assert logps.requires_grad, "no gradient arrives"
    found = torch.autograd.grad(logps @ pull, leaves)
    logits = leaves[0] @ leaves[1].t()
    onehot = torch.eye(V, dtype=torch.float64)[[target for _, target in tokens]].view(-1, V)
    grad_logits = pull[:, None] * (onehot - logits.softmax(1))
    close(found[0], grad_logits @ leaves[1], "the gradient by hidden")
    close(found[1], grad_logits.t() @ leaves[0], "the gradient by weight")


@for_all(size=st.sampled_from([1, 100, 10000]), target=st.integers(0, V - 1))
def is_finite_in_float32_at_logits_of_thousands(head, size, target):
    """Also beside a token whose logits are all 0: each has a largest logit of its own."""
    logps, hidden, _ = logps_of(
        head,
        [((size, 0), target), ((0, 0), target)],
        [(1, 0), (-1, 0), (0, 0), (0, 0)],
        torch.float32,
    )
    logps.sum().backward()
    assert logps.isfinite().all() and hidden.grad.isfinite().all(), (
        f"the two log-probs are {shown(logps.tolist())}, their gradients {shown(hidden.grad[:, 0].tolist())}"
    )


@for_all(tokens=tokens, weight=weights)
def gives_float32_for_bfloat16(head, tokens, weight):
    """The softmax runs in float32 where the products run in bfloat16."""
    logps, hidden, leaf = logps_of(head, tokens, weight, torch.bfloat16)
    assert logps.dtype == torch.float32, f"gives {logps.dtype}"
    full = (hidden @ leaf.t()).float().log_softmax(1)
    close(logps, full[range(len(tokens)), [target for _, target in tokens]], "a log-prob", 1e-6)


LAWS = (
    gives_all_targets_together_the_probability_1,
    gives_log_probs_as_far_apart_as_the_logits,
    gives_each_token_what_it_has_alone,
    has_the_gradient_of_log_softmax,
    is_finite_in_float32_at_logits_of_thousands,
    gives_float32_for_bfloat16,
)
