"""A GGUF file's blocks as the frozen base: the same numbers as when they are written out, in fewer bytes."""

import os

import gguf
import numpy as np
import pytest
import torch
from test_families import CASES, write_gguf
from test_lora import trained

from minidpo.memory import lora
from minidpo.memory.frozen import FrozenLinear, FrozenTable
from minidpo.memory.ggml_matrix import GGMLMatrix
from minidpo.memory.loading import open_policy
from minidpo.memory.machine import Machine
from minidpo.memory.plan import weights_of
from minidpo.memory.quantised import expand, load_quantised, tensor_formats
from minidpo.model import ggml
from minidpo.model.checkpoint import load

K = gguf.GGMLQuantizationType
HERE = Machine(device="cpu", dtype="float32", quantize="keep")
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def random_blocks(array, kind):
    """Random codes with scales of an ordinary size: the gguf package makes no blocks of most K formats."""
    form = ggml.FORMATS[kind.name]
    shape = (len(array), array.shape[1] // form.weights, form.bytes)
    rng = np.random.default_rng(array.size)
    stored = rng.integers(0, 256, shape, dtype=np.uint8)
    for at in form.halves:
        scales = rng.uniform(1e-5, 1e-4, (*shape[:2], 1)).astype(np.float16)
        stored[..., at : at + 2] = scales.view(np.uint8)
    return stored.reshape(len(array), -1)


def wide(case):
    """The same family with rows of 256 weights, as the K formats need."""
    config = {**case["config"], **WIDE}
    C = {
        "embed_tokens": (case["shapes"]["model.embed_tokens.weight"][0], 256),
        "q_proj": (256, 256),
        "k_proj": (128, 256),
        "v_proj": (128, 256),
    }
    shapes = {}
    for name in case["shapes"]:
        part = name.split(".")[-2]
        if "layers.1" not in name and part != "lm_head":
            matrix = C.get(part, (256, 256))
            shapes[name] = (
                matrix
                if name.endswith("weight") and len(case["shapes"][name]) == 2
                else (64,)
                if part in ("q_norm", "k_norm")
                else matrix[:1]
            )
    return {**case, "config": {**config, "tie_word_embeddings": True}, "shapes": shapes}


@pytest.fixture(
    params=[
        *((family, kind) for family in ("llama", "qwen3") for kind in ("Q4_0", "Q4_K", "F16")),
        *(("qwen2", kind) for kind in ggml.FORMATS),
    ],
    ids="-".join,
)
def file(request, tmp_path):
    family, kind = request.param
    if kind == "F16":
        return write_gguf(tmp_path / "base.gguf", CASES[family], K[kind])
    case = wide(CASES[family]) if ggml.FORMATS[kind].weights == 256 else CASES[family]
    return write_gguf(tmp_path / "base.gguf", case, K[kind], quantise=random_blocks)


def with_adapter(model):
    return trained(model.requires_grad_(False), lora.LoRAConfig(rank=2))


def logits_and_gradients(model):
    logits = model.head(model(torch.tensor([[1, 5, 2, 9, 9, 3]])))
    logits.logsumexp(-1).sum().backward()
    return [logits.detach(), *(weight.grad for weight in lora.parameters(model))]


def test_forward_and_gradients_are_those_of_the_weights_written_out(file):
    kept, full = (
        load_quantised(file, torch.float32, formats=tensor_formats(file)),
        load(file, torch.float32),
    )
    plain = (
        load(file).config,
        [module for module in kept.modules() if type(module) is torch.nn.Linear],
    )
    matrices = [module for module in kept.modules() if isinstance(module, GGMLMatrix)]
    assert bool(matrices) != bool(plain[1])  # all are kept, but F16, which is no block format
    held, whole = weights_of(kept), weights_of(full)
    assert not matrices or sum(held.values()) < 0.5 * sum(whole.values())
    both = (logits_and_gradients(with_adapter(model)) for model in (kept, full))
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    lora.detach(kept), lora.detach(full)
    expand(kept)
    assert all(map(torch.equal, kept.state_dict().values(), full.state_dict().values()))
    assert not any(isinstance(module, (FrozenLinear, FrozenTable)) for module in kept.modules())


def test_an_adapter_fits_the_blocks_that_it_learned_beside_and_acts_on_their_values(tmp_path):
    """In fp32 on a CPU a policy acts with all weights written out and merged."""
    case = CASES["llama"]
    base = write_gguf(
        tmp_path / "base.gguf",
        {
            **case,
            "shapes": {
                **case["shapes"],
                "model.embed_tokens.weight": [420, case["config"]["hidden_size"]],
            },
        },
        K.Q8_0,
    )
    model = with_adapter(load_quantised(base, torch.float32, formats=tensor_formats(base)))
    lora.save(model, tmp_path / "adapter", str(base))
    acting, *_ = open_policy(str(base), tmp_path / "adapter", HERE)
    ids = torch.tensor([[1, 5, 2, 9]])
    torch.testing.assert_close(
        acting.head(acting(ids)), model.head(model(ids)), rtol=1e-4, atol=1e-4
    )
    assert type(acting.model.layers[0].mlp.up_proj) is torch.nn.Linear


def test_a_scale_that_is_not_finite_is_refused_by_the_name_of_its_tensor(tmp_path):
    def spoiled(array, kind):
        blocks = gguf.quantize(array, kind)
        blocks[-1, :2] = np.array([np.inf], dtype=np.float16).view(np.uint8)
        return blocks

    path = write_gguf(tmp_path / "base.gguf", CASES["llama"], K.Q4_0, quantise=spoiled)
    with pytest.raises(
        ValueError, match=r"base.gguf: tensor model.\S+ holds values that are not finite"
    ):
        load_quantised(path, torch.float32, formats=tensor_formats(path))


@pytest.mark.parametrize("kind", ["IQ2_XS", "TQ1_0", "MXFP4", "Q8_K"])
def test_a_format_that_is_not_read_is_refused_by_its_name_and_the_tensors(tmp_path, kind):
    def zeros(array, kind):
        weights, size = gguf.GGML_QUANT_SIZES[kind]
        return np.zeros((len(array), array.shape[1] // weights * size), np.uint8)

    path = write_gguf(tmp_path / "base.gguf", wide(CASES["qwen2"]), K[kind], quantise=zeros)
    with pytest.raises(ValueError, match=rf"base.gguf: tensor \S+ is {kind}") as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_a_cache_is_that_of_all_parts_of_a_split_file(tmp_path):
    write_gguf(tmp_path / "cut.gguf", CASES["llama"], K.Q8_0, split_max_tensors=7)
    first, *_, last = sorted(tmp_path.glob("cut-*.gguf"))
    formats, cache = tensor_formats(first), tmp_path / "cache"
    made = load_quantised(first, torch.float32, cache=cache, formats=formats)
    again = load_quantised(first, torch.float32, cache=cache, formats=formats)
    assert all(map(torch.equal, made.state_dict().values(), again.state_dict().values()))
    os.utime(last, (1, 1))
    with pytest.raises(ValueError, match="another checkpoint"):
        load_quantised(first, torch.float32, cache=cache, formats=formats)
