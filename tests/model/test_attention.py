"""Attention in blocks: the same as all scores at once, and what no query of a block sees is not computed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minidpo.data.tree import ancestors, grow
from minidpo.model import attention
from minidpo.model.attention import attend, query_blocks

seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=settings.default.max_examples // 2)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of four queries: a few tokens make several."""
    monkeypatch.setattr(attention, "SIZE", 4)


def a_tree(branches, T):
    """The mask (1,T',T') of a tree: a shared beginning, and so many branches of T tokens."""
    tree = grow([[1] * T + [2 + n] * T for n in range(branches)])
    return ancestors(torch.tensor([tree.ends]))


def some_mask(generator, B, T, S):
    """(B,T,S) bool in which every query sees a key."""
    mask = torch.rand(B, T, S, generator=generator) < torch.rand((), generator=generator)
    return mask | (torch.randint(S, (B, T, 1), generator=generator) == torch.arange(S))


def with_gradients(q, k, v, grad, mask):
    tensors = [t.detach().requires_grad_() for t in (q, k, v)]
    y = attend(*tensors, mask)
    return y.detach(), *torch.autograd.grad(y, tensors, grad)


def by_hand(q, k, v, grad, mask):
    """softmax(q·kᵀ/√D + mask)·v as it is written, with the gradients that autograd finds."""
    q, k, v = tensors = [t.detach().requires_grad_() for t in (q, k, v)]
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    weights = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask[:, None], -torch.inf).softmax(-1)
    y = weights @ v
    return y.detach(), *torch.autograd.grad(y, tensors, grad)


def numbers(generator, B, H, K, T, S, dtype=torch.float64, D=8):
    return [
        torch.randn(B, heads, length, D, generator=generator).to(dtype)
        for heads, length in ((H, T), (K, S), (K, S), (H, T))
    ]


shapes = st.tuples(
    st.integers(1, 3),
    st.sampled_from([(1, 1), (4, 4), (4, 2), (3, 1)]),
    st.integers(1, 13),
    st.integers(1, 13),
)


@given(seeds, shapes)
def test_any_mask_in_blocks_is_all_scores_at_once(seed, shape):
    (B, (H, K), T, S), generator = shape, torch.Generator().manual_seed(seed)
    mask, inputs = some_mask(generator, B, T, S), numbers(generator, B, H, K, T, S)
    found = with_gradients(*inputs, query_blocks(mask, torch.zeros(B, T, 1, dtype=torch.float64)))
    torch.testing.assert_close(found, by_hand(*inputs, mask), rtol=1e-9, atol=1e-12)


def test_a_tree_of_eight_branches_costs_less_than_a_third_of_its_square():
    mask = a_tree(8, 16)
    T = mask.shape[1]
    parts = query_blocks(mask, torch.zeros(1, T, 1))
    queries = [part.at_queries[2] for part in parts]
    cost = sum((rows.stop - rows.start) * mask[0, rows].any(0).sum() for rows in queries)
    assert cost == sum(
        (rows.stop - rows.start) * (part.shared + part.added.shape[1])
        for rows, part in zip(queries, parts)
    )
    assert cost < T * T / 3
