"""A tree that goes depth first has the log-probs and gradients of the whole tree, in the memory of a path."""

import random

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tree import MODEL, seeds, trajectories

from minidpo.data.batch import batch_logps, batch_scores, collate
from minidpo.memory import lora, recompute
from minidpo.memory.plan import ByteCounter
from minidpo.model import attention
from minidpo.model.chat import Dialogue


def gradients(logps, weights):
    for p in lora.parameters(MODEL):
        p.grad = None
    (logps * weights).sum().backward()
    return [p.grad for p in lora.parameters(MODEL)]


@settings(max_examples=settings.default.max_examples // 6)
@given(seeds, st.integers(2, 8), st.booleans())
def test_depth_first_a_tree_has_its_log_probs_and_its_gradients(seed, count, recomputed):
    batch = collate([trajectories(seed, count)])
    weights = torch.randn(
        len(batch.targets), generator=torch.Generator().manual_seed(seed)
    ).double()
    whole = batch_logps(MODEL, batch)
    wanted = gradients(whole, weights)
    recompute.switch(MODEL, recomputed)
    try:
        walked = batch_logps(MODEL, batch, walk_above=0)
        found = gradients(walked, weights)
    finally:
        recompute.switch(MODEL, False)
    torch.testing.assert_close(walked, whole, rtol=1e-10, atol=1e-10)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


def test_only_a_tree_of_more_tokens_and_with_a_branch_goes_depth_first(monkeypatch):
    walked = []
    monkeypatch.setattr(
        "minidpo.data.batch.read_depth_first",
        lambda model, ids, *_: walked.append(len(ids)) or torch.zeros(2),
    )
    shared = Dialogue([1, 2, 3], [-1, 0, 0])
    tree = collate([[shared, Dialogue([1, 4, 5], [-1, -1, 0])]])  # five tokens
    batch_logps(MODEL, tree, walk_above=5)
    batch_logps(MODEL, collate([[shared]]), walk_above=1)
    batch_logps(
        MODEL, collate([[shared, Dialogue([1, 4], [-1, 0])]] * 2), walk_above=1
    )  # two trees
    assert walked == []
    batch_logps(MODEL, tree, walk_above=4)
    assert walked == [5]


def peak(model, batch, walk_above):
    with ByteCounter() as counter:
        batch_scores(model, batch, walk_above).sum().backward()
    return counter.peak


@pytest.mark.parametrize("recomputed, more", [(False, 1.2), (True, 1.4)])
def test_depth_first_memory_follows_the_longest_path(recomputed, more, monkeypatch):
    """Eight episodes share 32 tokens and go on alone for 96: a path has 128 tokens, the tree 800. Beside a
    path's graph there are its keys and values, put together for each segment, and their gradients."""
    # in so small a model scores of 128 queries would be the most
    monkeypatch.setattr(attention, "SIZE", 16)
    model, rng = tiny.adapted(torch.float32, num_hidden_layers=3), random.Random(1)
    for p in lora.parameters(model):
        p.grad = torch.zeros_like(p)
    begin = [rng.randrange(420) for _ in range(32)]
    rows = [
        Dialogue(begin + [rng.randrange(420) for _ in range(96)], [-1] * 32 + [0] * 96)
        for _ in range(8)
    ]
    recompute.switch(model, recomputed)
    tree, path = collate([rows]), collate([rows[:1]])
    walked, alone, whole = peak(model, tree, 0), peak(model, path, 10**6), peak(model, tree, 10**6)
    assert walked < more * alone < whole / 2
