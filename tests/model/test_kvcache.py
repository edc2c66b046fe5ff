"""A cached pass equals the full pass, however the text arrives and whoever shares it."""

from contextlib import contextmanager

import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minidpo.model.kvcache import KVCache, attend_rows

V = 23
MODEL = tiny.model(vocab=V, dtype=torch.float64)  # with biases and norms that would show if lost
DIMS = (MODEL.config.num_hidden_layers, MODEL.config.num_key_value_heads, MODEL.config.head_dim)
seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=settings.default.max_examples // 3)
lengths = st.lists(st.integers(1, 9), min_size=1, max_size=4)


def rows_of(seed, sizes):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(V, (size,), generator=g) for size in sizes]


def empty(rows):
    return KVCache(rows, DIMS, torch.float64, "cpu")


def read(cache, rows):
    """Read one chunk a row, padded on the right with junk; the hidden states of the real tokens."""
    counts = torch.tensor([len(row) for row in rows])
    ids = torch.full((len(rows), int(counts.max())), 7)
    for b, row in enumerate(rows):
        ids[b, : len(row)] = row
    cache.show(int(cache.lengths.max()) + ids.shape[1])
    hidden = MODEL(ids, cache=cache)
    cache.lengths += counts
    return [hidden[b, : len(row)] for b, row in enumerate(rows)]


@given(seeds, lengths, st.lists(st.integers(1, 4), max_size=6))
def test_a_cached_pass_is_the_full_pass_for_every_chunking_and_every_mix_of_lengths(
    seed, sizes, cuts
):
    rows = rows_of(seed, sizes)
    cache, at, got = empty(len(rows)), 0, [[] for _ in rows]
    for cut in [*cuts, max(sizes)]:  # a row that has ended is fed padding, which counts for nothing
        chunk = [row[at : at + cut] for row in rows]
        if any(len(part) for part in chunk):
            for b, hidden in enumerate(read(cache, chunk)):
                got[b].append(hidden)
        at += cut
    for row, parts in zip(rows, got):
        torch.testing.assert_close(torch.cat(parts), MODEL(row[None])[0], rtol=1e-10, atol=1e-10)
    assert cache.lengths.tolist() == sizes


@given(
    seeds, st.integers(1, 6), st.integers(0, 3), st.lists(st.integers(1, 6), min_size=1, max_size=3)
)
@few
def test_what_a_row_has_read_serves_others_which_forget_what_they_held(seed, shared, more, sizes):
    prompt, beyond, *rest = rows_of(seed, [shared, more, *sizes])
    cache = empty(len(rest) + 1)
    read(cache, [torch.cat([prompt, beyond]), *rest])
    before = cache.keys[:, 0].clone(), cache.values[:, 0].clone()
    for b in range(len(rest) + 1):
        cache.copy_row(0, b, 0, shared)
    assert torch.equal(cache.keys[:, 0], before[0]) and torch.equal(cache.values[:, 0], before[1])
    for row, hidden in zip([rest[0], *rest], read(cache, [rest[0], *rest])):
        full = MODEL(torch.cat([prompt, row])[None])[0, shared:]
        torch.testing.assert_close(hidden, full, rtol=1e-10, atol=1e-10)


@given(seeds, st.lists(st.integers(1, 9), min_size=2, max_size=4), st.data())
@few
def test_rows_that_change_places_take_all_they_hold_with_them(seed, sizes, data):
    rows = rows_of(seed, [size + 1 for size in sizes])
    cache = empty(len(rows))
    read(cache, [row[:-1] for row in rows])
    for a, b in data.draw(st.lists(st.permutations(range(len(rows))).map(lambda order: order[:2]))):
        cache.swap(a, b, max(len(rows[a]), len(rows[b])) - 1)
        rows[a], rows[b] = rows[b], rows[a]
    for row, hidden in zip(rows, read(cache, [row[-1:] for row in rows])):
        torch.testing.assert_close(hidden, MODEL(row[None])[0, -1:], rtol=1e-10, atol=1e-10)


@contextmanager
def threads(n):
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@few
@given(
    seeds,
    st.integers(1, 3),
    st.integers(1, 7),
    st.sampled_from([16, 32, 64]),
    st.lists(st.integers(1, 320) | st.just(77), min_size=1, max_size=9),
    st.integers(0, 99),
    st.sampled_from([1, 2, 3]),
)
def test_a_row_attends_to_the_same_bits_alone_and_beside_others(
    seed, K, shared, D, sizes, more, cores
):
    """And it is softmax(q·k/√D)·v. Any number of threads, of queries a key, of columns behind a row."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(len(sizes), K, shared, D, generator=g)
    room = max(sizes) + more
    keys, values = torch.randn(2, len(sizes), K, room + -room % 16, D, generator=g)
    with threads(cores):
        together = attend_rows(q, keys, values, range(len(sizes)), sizes)
        for b, size in enumerate(sizes):
            k, v = keys[b : b + 1, :, :size], values[b : b + 1, :, :size]
            assert torch.equal(attend_rows(q[b : b + 1], k, v, [0], [size])[0], together[b])
            weights = (q[b].double() @ k[0].double().mT / D**0.5).softmax(-1)
            torch.testing.assert_close(
                together[b].double(), weights @ v[0].double(), rtol=1e-5, atol=1e-5
            )
