"""The chunked head against log_softmax, and W @ logp against the dense product."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_nf4 import Large

from minidpo.model.head import token_logps
from minidpo.objective.scores import mean_weights, scores, sum_weights

seeds = st.integers(0, 2**32 - 1)
sizes = st.fixed_dictionaries(
    {"T": st.integers(0, 12), "C": st.integers(1, 5), "V": st.integers(1, 11)}
)
chunks = st.integers(1, 14)


def head(seed, T, C, V, dtype=torch.float64):
    """hidden (T,C), weight (V,C), targets (T,) and the gradient (T,) that arrives from above."""
    g = torch.Generator().manual_seed(seed)
    hidden, weight = (
        torch.randn(T, C, generator=g).to(dtype),
        torch.randn(V, C, generator=g).to(dtype),
    )
    targets, upstream = torch.randint(V, (T,), generator=g), torch.randn(T, generator=g)
    return hidden, weight, targets, upstream.to(torch.promote_types(dtype, torch.float32))


def full_head(hidden, weight, targets):
    """The same log-probs with all logits alive: log_softmax in at least float32, then gather."""
    logits = hidden @ weight.t()
    log_softmax = logits.log_softmax(1, dtype=torch.promote_types(logits.dtype, torch.float32))
    return log_softmax.gather(1, targets[:, None]).squeeze(1)


def value_and_gradients(function, hidden, weight, targets, upstream):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logps = function(hidden, weight, targets)
    logps.backward(upstream)
    return logps.detach(), hidden.grad, weight.grad


def trajectories(seed, T, n):
    """logps (T,), segment (T,) and action_mask (T,), where each of the n trajectories has an action token."""
    g = torch.Generator().manual_seed(seed)
    segment = torch.cat([torch.arange(n), torch.randint(n, (T,), generator=g)])
    mask = torch.cat([torch.ones(n, dtype=torch.bool), torch.rand(T, generator=g) < 0.5])
    order = torch.randperm(n + T, generator=g)
    return -10 * torch.rand(n + T, generator=g, dtype=torch.float64), segment[order], mask[order]


# token_logps


@given(seeds, sizes, chunks, st.none() | chunks)
def test_the_head_in_pieces_equals_the_full_head_in_value_and_gradients(seed, size, chunk, rows):
    problem = head(seed, **size)
    ours = value_and_gradients(lambda *inputs: token_logps(*inputs, chunk, rows), *problem)
    torch.testing.assert_close(
        ours, value_and_gradients(full_head, *problem), rtol=1e-12, atol=1e-12
    )


def test_a_bf16_head_collects_many_small_gradients_in_fp32():
    """512 equal tokens, one a chunk, add 1/2 each to the gradient; a sum of halves in bf16 stands at 128."""
    hidden, weight = (
        torch.ones(512, 1, dtype=torch.bfloat16),
        torch.zeros(2, 1, dtype=torch.bfloat16),
    )
    weight.requires_grad_()
    token_logps(hidden, weight, torch.zeros(512, dtype=torch.int64), chunk=1).sum().backward()
    assert weight.grad.tolist() == [[256.0], [-256.0]]


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient_and_the_other_its_own(frozen):
    hidden, weight, targets, upstream = head(0, T=5, C=3, V=7)
    _, grad_hidden, grad_weight = value_and_gradients(full_head, hidden, weight, targets, upstream)
    leaf, expected = (weight, grad_weight) if frozen == "hidden" else (hidden, grad_hidden)
    leaf.requires_grad_()
    token_logps(hidden, weight, targets, chunk=2).backward(upstream)
    torch.testing.assert_close(leaf.grad, expected)
    assert (hidden if frozen == "hidden" else weight).grad is None


def test_neither_forward_nor_backward_makes_more_than_one_chunk_of_logits_or_a_frozen_heads_gradient():
    T, C, V, chunk = (
        20,
        6,
        30,
        4,
    )  # the gradient of hidden is as large as a chunk, the head's is larger
    hidden, weight, targets, upstream = head(0, T, C, V)
    hidden.requires_grad_()
    with Large(chunk * V + 1) as large:
        token_logps(hidden, weight, targets, chunk).backward(upstream)
    assert large.made == 0


def test_a_bf16_state_collects_the_gradients_of_many_pieces_of_the_head_in_fp32():
    """At hidden = 0 each of 512 rows has probability 1/512. Row 0, the target, gives 256 · 511/512 to the
    gradient, each other -1/512 · -256 = 1/2: together 511. A sum in bf16 would stand still at 256."""
    hidden = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.full((512, 1), -256.0, dtype=torch.bfloat16)
    weight[0] = 256.0
    token_logps(hidden, weight, torch.tensor([0]), rows=1).sum().backward()
    assert hidden.grad.item() == torch.tensor(511.0).bfloat16().item()


def test_backward_keeps_the_inputs_and_no_logits():
    kept = []
    hidden, weight, targets, _ = head(0, T=40, C=2, V=30)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(tuple(x.shape)) or x, lambda x: x
    ):
        token_logps(hidden.requires_grad_(), weight, targets, chunk=4)
    assert sorted(kept) == [
        (30, 2),
        (40,),
        (40,),
        (40,),
        (40, 2),
    ]  # also two numbers a token: its softmax


# scores and the common weights


@given(seeds, st.integers(1, 200), st.integers(1, 4))
def test_in_fp32_the_order_of_the_tokens_does_not_show_in_the_last_bit(seed, T, n):
    logps, segment, mask = trajectories(seed, T, n)
    logps, weight = logps.float(), mask.float()
    order = torch.randperm(len(logps), generator=torch.Generator().manual_seed(seed))
    result = scores(logps, segment, weight, n)
    assert result.dtype == torch.float32
    assert torch.equal(scores(logps[order], segment[order], weight[order], n), result)


@given(seeds, st.integers(0, 12), st.integers(1, 4), st.integers(1, 3))
def test_mean_weights_make_the_score_of_a_repeated_trajectory_the_same(seed, T, n, times):
    logps, segment, mask = trajectories(seed, T, n)
    once = scores(logps, segment, mean_weights(mask, segment, n), n)
    for i in range(n):  # and it is the mean of the log-probs that the agent wrote
        torch.testing.assert_close(once[i], logps[mask & (segment == i)].mean())
    logps, segment, mask = logps.repeat(times), segment.repeat(times), mask.repeat(times)
    torch.testing.assert_close(scores(logps, segment, mean_weights(mask, segment, n), n), once)


@pytest.mark.parametrize("weights", [sum_weights, mean_weights])
def test_a_trajectory_in_which_the_agent_wrote_nothing_is_refused(weights):
    segment = torch.tensor([0, 0, 1, 1])
    with pytest.raises(ValueError, match="trajectory 1 of 2 has no token that the agent wrote"):
        weights(torch.tensor([True, False, False, False]), segment, 2)
    with pytest.raises(ValueError, match="trajectory 2 of 3"):
        weights(torch.tensor([True, True, True, True]), segment, 3)
