"""Chapter 32: what is counted on tensors without data is what a CPU allocates."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minidpo.memory import lora
from minidpo.memory.alive import Alive, FusedAttention
from minidpo.memory.lora import LoRAConfig
from minidpo.memory.quantised import quantise_layout
from minidpo.model.decoder import Qwen2, Qwen2Config, rotary_angles

few = settings(max_examples=settings.default.max_examples // 4)


def test_views_cost_nothing_and_what_dies_is_given_back():
    outside = torch.zeros(1000)
    with Alive() as alive:
        a = torch.zeros(250)  # 1,000 bytes
        b = outside[3:].view(1, -1).t()  # of a tensor that was there before
        c = a[5:].t()
        assert alive.now == alive.peak == 1000
        d = a + 1
        assert alive.now == alive.peak == 2000
        del a, d
        assert alive.now == 1000  # c still holds a's memory
        del c
        e = torch.zeros(250)
        e.add_(1).mul_(2)
    assert alive.now == 1000 and alive.peak == 2000 and len(b) == 997 and len(e) == 250


def block_bytes(device, dtype, quantised, B, T, H, K, branched):
    """Kept by one block's forward, peak of forward, and peak with backward."""
    config = Qwen2Config(50, 16 * H, 100, 1, H, K)
    with torch.device(device):
        model = Qwen2(config).to(dtype)
    if quantised:
        quantise_layout(model, dtype)
        model.to_empty(device=device)
        for codes in model.buffers():
            codes.zero_()
    lora.attach(model, LoRAConfig(rank=4), torch.Generator())
    like = {"device": device, "dtype": dtype}
    x = torch.zeros(B, T, 16 * H, **like, requires_grad=True)
    angles = rotary_angles(torch.arange(T, device=device).expand(B, T), 16, 1e4, dtype)
    mask = torch.zeros(B, 1, T, T, **like) if branched else None
    with FusedAttention(cuda=False) if device == "meta" else contextlib.nullcontext(), Alive() as alive:
        y = model.model.layers[0](x, *angles, mask, None, 0)
        kept, forward = alive.now, alive.peak
        y.backward(torch.ones_like(y))
    return kept, forward, alive.peak


@pytest.fixture(scope="module")
def tables():
    """NF4's tables are made when they are first used, 3 KB that no later run makes again."""
    for device in ("meta", "cpu"):
        block_bytes(device, torch.float32, True, 1, 2, 1, 1, False)


@pytest.mark.usefixtures("tables")
@few
@given(st.sampled_from([torch.float32, torch.bfloat16]), st.booleans(), st.integers(1, 3), st.integers(2, 40),
       st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 2)]), st.booleans())
def test_a_block_takes_on_a_cpu_what_it_was_counted_to_take(dtype, quantised, B, T, heads, branched):
    what = dtype, quantised, B, T, *heads, branched
    for counted, real in zip(block_bytes("meta", *what), block_bytes("cpu", *what)):
        assert counted == real


@pytest.mark.parametrize("dtype, masked, repeated", [
    (torch.bfloat16, True, True), (torch.bfloat16, False, False), (torch.float32, True, True),
    (torch.float32, False, True)])
def test_on_cuda_keys_are_repeated_for_each_query_head_for_a_mask_and_for_fp32(dtype, masked, repeated):
    q = torch.empty(1, 8, 5, 16, device="meta", dtype=dtype)
    k = torch.empty(1, 2, 5, 16, device="meta", dtype=dtype, requires_grad=True)
    mask = torch.empty(1, 1, 5, 5, device="meta", dtype=dtype) if masked else None
    kept = {}
    for cuda in (False, True):
        with FusedAttention(cuda), Alive() as alive:
            y = torch.nn.functional.scaled_dot_product_attention(
                q, k, k, attn_mask=mask, is_causal=not masked, enable_gqa=True)
            kept[cuda] = alive.now
            y.sum().backward()
    assert kept[True] - kept[False] == repeated * 2 * q.nbytes
