"""What attention, positions and norms must obey, and the reference values of transformers."""

import json

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from minidpo.model.checkpoint import load
from minidpo.model.decoder import RMSNorm, rotary_angles, rotate

seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=settings.default.max_examples // 5)
positions = st.integers(0, 5_000)


def tokens(seed, *shape):
    return torch.randint(23, shape, generator=torch.Generator().manual_seed(seed))


# rotary positions (law 23)


@given(seeds, positions, positions, st.integers(1, 5_000))
def test_a_query_and_a_key_see_only_how_far_apart_they_are(seed, m, n, shift):
    q, k = torch.randn(
        2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )

    def product(m, n):
        turn = [
            rotary_angles(torch.tensor([position]), 8, 1e4, torch.float64) for position in (m, n)
        ]
        return (rotate(q, *turn[0]) * rotate(k, *turn[1])).sum()

    torch.testing.assert_close(product(m, n), product(m + shift, n + shift), rtol=0, atol=1e-9)


# attention


@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (4, 1), (4, 4), (8, 2)])
def test_query_head_h_reads_key_value_head_h_over_group_size(heads, groups):
    """One key/value head's values are silenced; o_proj is the identity, so silent query heads are zeros."""
    changes = {"num_attention_heads": heads, "num_key_value_heads": groups}
    attention = tiny.model(3, torch.float64, **changes).model.layers[0].self_attn
    attention.o_proj.weight.copy_(torch.eye(32))
    x = torch.randn(1, 5, 32, dtype=torch.float64)
    cos, sin = rotary_angles(torch.arange(5), attention.D, 1e4, torch.float64)
    for kv in range(groups):
        weight, bias = attention.v_proj.weight.clone(), attention.v_proj.bias.clone()
        attention.v_proj.weight.view(groups, attention.D, 32)[kv] = 0
        attention.v_proj.bias.view(groups, attention.D)[kv] = 0
        out = attention(x, cos, sin, None, None, 0).view(5, heads, attention.D)
        silent = [h for h in range(heads) if not out[:, h].any()]
        assert silent == [h for h in range(heads) if h // (heads // groups) == kv]
        attention.v_proj.weight.copy_(weight)
        attention.v_proj.bias.copy_(bias)


@given(seeds, st.integers(2, 8), st.data())
@few
def test_nothing_looks_ahead_and_everything_looks_back(seed, T, data):
    model, ids = tiny.model(dtype=torch.float64, vocab=23), tokens(seed, 1, T)
    at = data.draw(st.integers(0, T - 1))
    other = ids.clone()
    other[0, at] = (ids[0, at] + 1) % 23
    same = (model(ids) == model(other)).all(-1)[0]
    assert same[:at].all() and not same[at:].any()


def test_rmsnorm_of_bf16_is_computed_in_fp32_and_given_back_in_bf16():
    x = torch.full((1, 4096), 3.0, dtype=torch.bfloat16)
    norm = RMSNorm(4096, 1e-6).bfloat16()
    assert norm(x).dtype == torch.bfloat16 and (norm(x) == 1).all()


@pytest.fixture(scope="module", params=["qwen2_tied", "qwen2_sharded_bf16"])
def reference(request, oracles):
    """A model in fp32 and what transformers computed with it."""
    about = json.loads((oracles / f"{request.param}.json").read_text())
    model = load(oracles / request.param, dtype=torch.float32)
    return model, load_file(oracles / f"{request.param}.safetensors"), about


def close(got, wanted):
    torch.testing.assert_close(got.detach(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("row", ["row0", "row1"])
def test_logits_log_probs_and_every_hidden_state_are_those_of_transformers(reference, row):
    model, values, _ = reference
    ids = values[f"{row}.input_ids"][None]
    seen = []
    # transformers norms its last hidden state
    blocks = [model.model.embed_tokens, *model.model.layers[:-1], model.model.norm]
    hooks = [block.register_forward_hook(lambda _, __, out: seen.append(out)) for block in blocks]
    logits = model.head(model(ids))[0]
    for hook in hooks:
        hook.remove()
    close(logits, values[f"{row}.logits"])
    for layer, hidden in enumerate(seen):
        close(hidden[0], values[f"{row}.hidden_states.{layer}"])
    next_logp = logits[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    close(next_logp, values[f"{row}.logprobs_of_next"])


def test_gradients_of_every_weight_are_those_of_transformers(reference):
    model, values, _ = reference
    ids = values["row0.input_ids"][None]
    logp = model.head(model(ids))[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])
    nll = -logp.mean()
    close(nll, values["row0.nll"])
    model.zero_grad()
    nll.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    wanted = {
        name.removeprefix("grad."): value
        for name, value in values.items()
        if name.startswith("grad.")
    }
    assert gradients.keys() == wanted.keys()
    for name in wanted:
        close(gradients[name], wanted[name])
