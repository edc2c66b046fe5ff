"""Weights in 8 bits: what they compute, to the last bit the same each time, and where they are refused."""

from dataclasses import replace

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_families import CASES, write_gguf
from test_ggml_matrix import K

from minidpo.memory import int8, loading, lora
from minidpo.memory.int8 import MANY, STEP, Int8Linear, to_int8
from minidpo.memory.lora import LoRAConfig
from minidpo.memory.machine import Machine, multiplies_bfloat16
from minidpo.memory.nf4 import Int8Matrix
from minidpo.memory.packing import pack
from minidpo.memory.plan import PUBLISHED, acting_in, acting_plan, acting_setup, setup_of
from minidpo.model.sampling import Request, Sampler

ONE = Machine(device="cpu", dtype="float32", act_dtype="int8", pages=1)
CPU = replace(ONE, act_dtype=None)
IDS = torch.randint(420, (2, 30), generator=torch.Generator().manual_seed(1))


def rounded(weight):
    """What the codes of a matrix stand for."""
    matrix = Int8Matrix(weight.shape, torch.float32)
    matrix.load_state_dict(Int8Matrix.encode(weight))
    return matrix.dense()


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.integers(1, 80), st.integers(1, 6), st.integers(1, 70))
def test_a_product_is_that_of_the_codes_with_ends_in_bfloat16(seed, rows, steps, outs):
    """Inputs and sums are rounded to 8 bits of a mantissa, everything between is in fp32. Of many rows, the
    inputs may be in fp32 as well."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(outs, STEP * steps, generator=g)
    x, bias = torch.randn(2, rows, STEP * steps, generator=g), torch.randn(outs, generator=g)
    layer, codes = Int8Linear(weight, bias), rounded(weight).double()
    exact, y = 2 * rows >= MANY and not multiplies_bfloat16(), layer(x).double() - bias
    sums = (x if exact else x.bfloat16()).double() @ codes.t()
    assert ((y - sums).abs() <= (0 if exact else 2**-8) * sums.abs() + 1e-4).all()


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.data())
def test_a_row_of_a_product_has_the_same_bits_alone_and_beside_others(seed, data):
    g = torch.Generator().manual_seed(seed)
    layer = Int8Linear(torch.randn(96, 64, generator=g), None)
    x = torch.randn(data.draw(st.integers(1, 40)), 1, 64, generator=g)
    row = data.draw(st.integers(0, len(x) - 1))
    assert torch.equal(layer(x)[row], layer(x[row : row + 1])[0])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_in_8_bits_is_the_model_of_the_rounded_weights(tied, dtype):
    model, exact = (tiny.model(tie_word_embeddings=tied, dtype=dtype) for _ in range(2))
    to_int8(model)
    with torch.no_grad():
        for module in exact.float().model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.copy_(rounded(module.weight))
    expected = exact(IDS) @ rounded(exact.head_weight).t()
    logits = model.head(model(IDS))
    assert logits.dtype == torch.float32 and (logits - expected).norm() < 0.02 * expected.norm()
    assert pack(model) is model and type(model.packed_head) is Int8Linear


def test_an_adapter_beside_the_codes_is_the_one_that_was_merged(tmp_path):
    """An update as small as a twentieth of the codes' step acts, as it does where it is added in full."""
    base = str(tiny.checkpoint(tmp_path / "base"))
    trained, _ = loading.open_base(base, CPU)
    lora.attach(trained, LoRAConfig(rank=3), torch.Generator().manual_seed(2))
    with torch.no_grad():
        for layer in lora.layers(trained).values():
            layer.lora_B.normal_(0, 1e-3, generator=torch.Generator().manual_seed(3))
    lora.save(trained, tmp_path / "adapter", base)
    beside, _, mark = loading.open_policy(base, tmp_path / "adapter", ONE)
    alone, _, other = loading.open_policy(base, None, ONE)
    assert lora.layers(beside) and not lora.layers(alone) and mark != other
    merged, *_ = loading.open_policy(base, tmp_path / "adapter", CPU)
    plain, *_ = loading.open_policy(base, None, CPU)
    wanted, got = merged(IDS) - plain(IDS), beside(IDS) - alone(IDS)
    for model in (beside, merged):
        assert not any(parameter.requires_grad for parameter in model.parameters())
    assert (got - wanted).norm() < (beside(IDS) - merged(IDS)).norm()
    maps = lora.layers(beside)
    for name, layer in lora.layers(trained).items():
        x = torch.randn(3, layer.base.in_features, generator=torch.Generator().manual_seed(4))
        update = layer(x) - layer.base(x)
        torch.testing.assert_close(maps[name](x) - maps[name].base(x), update, rtol=0, atol=1e-5)


@pytest.mark.parametrize("adapted", [True, False])
def test_an_answer_repeats_itself_bit_for_bit(adapted):
    """Guesses are decided by the row's own text, so what was answered before changes nothing."""

    def answers(*prompts):
        model = tiny.adapted(torch.float32) if adapted else tiny.model()
        to_int8(model)
        sampler, said = Sampler(model, 1, 419, temperature=0.7, prefix=(1, 2)), []
        for prompt in prompts:
            sampler.ask(0, Request(prompt, tuple(torch.linspace(0.1, 0.9, 24).tolist())))
            ended = {}
            while not ended:
                ended = sampler.step()
            said.append((ended[0].ids, ended[0].logps))
        return said

    first, second = (1, 2, 7, 8, 9, 7, 8), (1, 2, 5, 7, 8, 9, 5, 7)
    assert answers(first, second)[1] == answers(second)[0] == answers(second, second)[1]


def test_where_it_does_not_act_is_refused_before_weights_are_read(tmp_path, monkeypatch):
    base = str(tiny.checkpoint(tmp_path / "base"))
    monkeypatch.setattr(loading, "open_model", lambda *_: pytest.fail("loaded the model"))
    with pytest.raises(ValueError, match="--machine.pages 1"):
        loading.open_policy(base, None, replace(ONE, pages=None))
    for widths, cuda, said in (({32}, True, "--machine.device cpu"), ({32, 40}, False, "40 wide")):
        with pytest.raises(ValueError, match=said):
            int8.require_int8(widths, cuda, 1)
    monkeypatch.delattr(torch, "_weight_int8pack_mm")
    with pytest.raises(ValueError, match="has no product"):
        loading.open_policy(base, None, ONE)


@pytest.mark.parametrize("kind", [K.Q8_0, K.F16])
def test_auto_takes_it_for_one_page_on_a_base_of_few_bits(tmp_path, kind):
    case = CASES["llama"]
    vocabulary = {"model.embed_tokens.weight": [420, case["config"]["hidden_size"]]}
    case = {**case, "shapes": {**case["shapes"], **vocabulary}}
    base = str(write_gguf(tmp_path / "base.gguf", case, kind))
    auto = replace(ONE, act_dtype="auto")
    model, *_ = loading.open_policy(base, None, auto)
    assert (type(model.packed_head) is Int8Linear) == (kind == K.Q8_0)
    for other in (replace(auto, pages=2), replace(auto, device="cuda")):
        assert acting_in(base, other).act_dtype is None
    assert acting_in(str(tiny.checkpoint(tmp_path / "folder")), auto).act_dtype is None
    assert acting_in(base, ONE) == ONE


def test_a_plan_counts_a_byte_a_weight():
    name = next(iter(PUBLISHED))
    setup = setup_of(name, ONE)
    full = acting_plan(acting_setup(setup_of(name, replace(ONE, act_dtype=None))), 512)
    eight = acting_plan(acting_setup(setup), 512)
    C, V = setup.config.hidden_size, setup.config.vocab_size
    assert eight.held["blocks, weights"] * 4 == full.held["blocks, weights"]
    assert eight.held["vocabulary, weights"] == 5 * V * C
