"""What attention, positions and norms must obey, and the reference values of transformers."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from minidpo.model.checkpoint import load, save
from minidpo.model.decoder import ModelConfig, RMSNorm, Transformer, rotary_angles, rotate

seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=settings.default.max_examples // 5)
positions = st.integers(0, 5_000)


def tiny(seed, heads=4, groups=2, layers=2, tied=False, theta=10_000.0):
    torch.manual_seed(seed)
    config = ModelConfig(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        rope_theta=theta,
        tie_word_embeddings=tied,
    )
    model = Transformer(config).double().requires_grad_(False)
    for weight in model.parameters():
        weight.normal_(std=0.4)
    return model


def tokens(seed, *shape):
    return torch.randint(23, shape, generator=torch.Generator().manual_seed(seed))


def padding_mask(real):
    """(B,T,T) causal mask that hides padding, from real (B,T) bool. A padding position sees itself alone: a
    query with no key at all would be 0/0."""
    T = real.shape[1]
    causal, itself = torch.ones(T, T, dtype=torch.bool).tril(), torch.eye(T, dtype=torch.bool)
    return (causal & real[:, None, :]) | itself


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
    attention = tiny(3, heads, groups).model.layers[0].self_attn
    attention.o_proj.weight.copy_(torch.eye(16))
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    cos, sin = rotary_angles(torch.arange(5), attention.D, 1e4, torch.float64)
    for kv in range(groups):
        weight, bias = attention.v_proj.weight.clone(), attention.v_proj.bias.clone()
        attention.v_proj.weight.view(groups, attention.D, 16)[kv] = 0
        attention.v_proj.bias.view(groups, attention.D)[kv] = 0
        out = attention(x, cos, sin, None, None, 0).view(5, heads, attention.D)
        silent = [h for h in range(heads) if not out[:, h].any()]
        assert silent == [h for h in range(heads) if h // (heads // groups) == kv]
        attention.v_proj.weight.copy_(weight)
        attention.v_proj.bias.copy_(bias)


@given(seeds, st.integers(2, 8), st.data())
@few
def test_nothing_looks_ahead_and_everything_looks_back(seed, T, data):
    model, ids = tiny(0), tokens(seed, 1, T)
    at = data.draw(st.integers(0, T - 1))
    other = ids.clone()
    other[0, at] = (ids[0, at] + 1) % 23
    same = (model(ids) == model(other)).all(-1)[0]
    assert same[:at].all() and not same[at:].any()


@given(seeds, st.lists(st.integers(1, 6), min_size=1, max_size=3), st.booleans())
@few
def test_padding_of_any_junk_on_either_side_changes_nothing(seed, sizes, left):
    model, T = tiny(0), max(sizes) + 1
    ids, real = tokens(seed, len(sizes), T), torch.zeros(len(sizes), T, dtype=torch.bool)
    rows = [tokens(seed + b, size) for b, size in enumerate(sizes)]
    for b, row in enumerate(rows):
        where = slice(T - len(row), T) if left else slice(0, len(row))
        ids[b, where], real[b, where] = row, True
    at = (real.cumsum(1) - 1).clamp(min=0)
    hidden = model(ids, positions=at, mask=padding_mask(real))
    assert hidden.isfinite().all()
    for b, row in enumerate(rows):
        torch.testing.assert_close(hidden[b, real[b]], model(row[None])[0], rtol=1e-10, atol=1e-10)


def test_rmsnorm_of_bf16_is_computed_in_fp32_and_given_back_in_bf16():
    x = torch.full((1, 4096), 3.0, dtype=torch.bfloat16)
    norm = RMSNorm(4096, 1e-6).bfloat16()
    assert norm(x).dtype == torch.bfloat16 and (norm(x) == 1).all()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_attention_heads": 3}, "not a multiple"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"hidden_size": 36}, "head_dim 9 is odd"),
    ],
)
def test_a_shape_that_does_not_divide_is_refused(change, says):
    shape = {
        "vocab_size": 8,
        "hidden_size": 16,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    with pytest.raises(ValueError, match=says):
        ModelConfig(**{**shape, **change})


@pytest.fixture(scope="module", params=["qwen2_tied", "qwen2_sharded_bf16"])
def reference(request, oracles):
    """A model in fp32 and what transformers computed with it."""
    about = json.loads((oracles / f"{request.param}.json").read_text())
    model = load(oracles / request.param, dtype=torch.float32)
    return model, load_file(oracles / f"{request.param}.safetensors"), about


def close(got, wanted, tolerance=1e-5):
    torch.testing.assert_close(got.detach(), wanted, rtol=tolerance, atol=tolerance)


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


@pytest.mark.parametrize("shape", [(4, 2, True, 1e4), (4, 4, False, 1e6), (2, 1, False, 500.0)])
def test_transformers_reads_our_files_and_computes_our_logits(tmp_path, shape):
    transformers = pytest.importorskip("transformers")
    heads, groups, tied, theta = shape
    model = tiny(5, heads, groups, 3, tied, theta).float()
    save(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.dtype == torch.float32 and theirs.config.tie_word_embeddings == tied
    ids = tokens(5, 2, 30)
    close(model.head(model(ids)), theirs(ids).logits, 2e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_we_read_the_files_of_transformers_and_compute_its_logits(tmp_path, tied):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(6)
    theirs = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=23,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
            rope_parameters={"rope_type": "default", "rope_theta": 777.0},
        )
    )
    theirs.save_pretrained(tmp_path, max_shard_size="20kB")
    model, ids = load(tmp_path), tokens(6, 2, 30)
    close(model.head(model(ids)), theirs(ids).logits)
