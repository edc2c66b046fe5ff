"""A packed model computes what it did before, and each row has the same bits whatever rows are beside it."""

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from minidpo.memory.machine import multiplies_bfloat16
from minidpo.memory.packing import Packed, can_pack, pack

sizes = st.integers(1, 70)
BF16 = pytest.param(
    torch.bfloat16,
    marks=pytest.mark.skipif(
        not multiplies_bfloat16(), reason="this processor has no instructions for bfloat16"
    ),
)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, BF16])


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), sizes, sizes, sizes, st.booleans())
def test_a_packed_layer_computes_what_the_linear_layer_does(seed, rows, ins, outs, bias):
    g = torch.Generator().manual_seed(seed)
    weight, x = torch.randn(outs, ins, generator=g), torch.randn(2, rows, ins, generator=g)
    b = torch.randn(outs, generator=g) if bias else None
    exact = nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
    torch.testing.assert_close(Packed(weight, b)(x).double(), exact, rtol=1e-5, atol=1e-4)


@pytest.fixture(scope="module", params=[(64, 96, "none"), (2048, 64, "none"), (64, 1600, "swish")])
def layer_of(request):
    """Inputs' width and a layer: small; so wide that oneDNN adds up in parts; shared among threads."""
    ins, outs, activation = request.param
    weight = torch.randn(outs, ins, generator=torch.Generator().manual_seed(1)) / ins**0.5
    return ins, {
        dtype: Packed(weight.to(dtype), None, activation)
        for dtype in (torch.float32, torch.bfloat16)
        if can_pack(weight.to(dtype))
    }


@dtypes
@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.data())
def test_a_row_is_the_same_to_the_last_bit_however_many_there_are(layer_of, dtype, seed, data):
    """In bf16 on a processor with AMX oneDNN takes another kernel from 33 rows on, and with more than two
    threads from 11 on: there the sampler's check of the whole model decides."""
    ins, layer = layer_of[0], layer_of[1][dtype]
    tiles = dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    rows = data.draw(st.integers(1, 32 if tiles else 70))
    threads = data.draw(st.sampled_from([1, 2] if tiles else [1, 2, 3, 5]))
    x = torch.randn(rows, 1, ins, generator=torch.Generator().manual_seed(seed))
    part = slice(*sorted((data.draw(st.integers(0, rows)), rows)))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole, alone = layer(x), layer(x[:1])
        assert torch.equal(whole[part], layer(x[part])) and torch.equal(whole[:1], alone)
    finally:
        torch.set_num_threads(before)


@dtypes
@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_model_is_the_model(tied, dtype):
    """In bf16 it is the model of the rounded weights, up to rounding of what goes in and out of a product."""
    model, packed = (tiny.model(tie_word_embeddings=tied, dtype=dtype) for _ in range(2))
    assert pack(packed) is packed
    assert not any(type(module) is nn.Linear for module in packed.model.modules())
    ids = torch.randint(420, (2, 30), generator=torch.Generator().manual_seed(1))
    logits, exact = packed.head(packed(ids)), model.float().head(model(ids))
    assert logits.dtype == torch.float32
    near = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.1}
    torch.testing.assert_close(logits, exact, **near)
    assert (logits - exact).norm() < (1e-5 if dtype == torch.float32 else 0.02) * exact.norm()
