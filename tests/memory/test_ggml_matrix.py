"""A GGUF file's blocks as the frozen base: the same numbers as when they are written out, in fewer bytes."""

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from test_families import CASES, write_gguf

from minidpo.config import LoopCommand
from minidpo.learning.plan_loop import plan_loop
from minidpo.loop import Loop
from minidpo.memory import lora, plan
from minidpo.memory.advice import savings
from minidpo.memory.frozen import FrozenLinear, FrozenTable
from minidpo.memory.ggml_matrix import GGMLMatrix
from minidpo.memory.loading import open_policy
from minidpo.memory.machine import Machine
from minidpo.memory.plan import Load, acting_plan, meta_model, setup_of, step_plan, weights_of
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
    """Blocks that the gguf package cannot make: random codes with scales of an ordinary size."""
    form = ggml.FORMATS[kind.name]
    shape = (len(array), array.shape[1] // form.weights, form.bytes)
    rng = np.random.default_rng(array.size)
    stored = rng.integers(0, 256, shape, dtype=np.uint8)
    halves = rng.uniform(1e-5, 1e-4, (*shape[:2], 2)).astype(np.float16).view(np.uint8)
    if kind == K.Q4_K:
        stored[..., :4] = halves.reshape(*shape[:2], 4)
    else:
        stored[..., 208:] = halves.reshape(*shape[:2], 4)[..., :2]
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
        (family, kind)
        for family in ("qwen2", "llama", "qwen3")
        for kind in ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "F16")
    ],
    ids="-".join,
)
def file(request, tmp_path):
    family, kind = request.param
    if kind in ("Q4_K", "Q6_K"):
        return write_gguf(
            tmp_path / "base.gguf", wide(CASES[family]), K[kind], quantise=random_blocks
        )
    return write_gguf(tmp_path / "base.gguf", CASES[family], K[kind])


def with_adapter(model):
    lora.attach(
        model.requires_grad_(False), lora.LoRAConfig(rank=2), torch.Generator().manual_seed(0)
    )
    for n, weight in enumerate(lora.parameters(model)):
        torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(n))
    return model


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


def test_a_table_is_read_by_rows(tmp_path):
    base = write_gguf(tmp_path / "base.gguf", CASES["qwen2"], K.Q4_1)
    model = load_quantised(base, torch.float32, formats=tensor_formats(base))
    table = model.head_weight
    dense, ids = table.dense(), torch.tensor([[3, 0], [7, 3]])
    assert torch.equal(table[ids], dense[ids]) and torch.equal(table[2:5], dense[2:5])
    assert torch.equal(model.model.embed_tokens(ids), dense[ids]) and len(table) == len(dense)


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


def test_what_cannot_be_kept_is_refused_in_one_line(tmp_path):
    with pytest.raises(
        ValueError, match="minidpo/nano: quantize keep holds the blocks of a GGUF file"
    ):
        setup_of("minidpo/nano", HERE)
    with pytest.raises(ValueError, match="cache keeps weights in NF4, but quantize is keep"):
        LoopCommand(machine=Machine(quantize="keep", cache=tmp_path))


def qwen2_7b_q4_k_m(path):
    """The header of Qwen2-7B-Instruct in Q4_K_M, and as many zeros as it has weights (a sparse file)."""
    writer = gguf.GGUFWriter(path, "qwen2")
    for add, number in (
        (writer.add_context_length, 32_768),
        (writer.add_embedding_length, 3584),
        (writer.add_block_count, 28),
        (writer.add_feed_forward_length, 18_944),
        (writer.add_head_count, 28),
        (writer.add_head_count_kv, 4),
        (writer.add_layer_norm_rms_eps, 1e-6),
        (writer.add_rope_freq_base, 1e6),
    ):
        add(number)
    size = 0

    def tensor(name, rows, columns, kind):
        nonlocal size
        n = rows * (columns or 1)
        form = ggml.FORMATS.get(kind)
        nbytes = 4 * n if form is None else n // form.weights * form.bytes
        shape = (rows, columns // form.weights * form.bytes) if form else (rows,)
        writer.add_tensor_info(
            name, shape, np.dtype(np.uint8 if form else np.float32), nbytes, raw_dtype=K[kind]
        )
        size += nbytes + -nbytes % 32

    tensor("token_embd.weight", 152_064, 3584, "Q4_K")
    tensor("output.weight", 152_064, 3584, "Q6_K")
    tensor("output_norm.weight", 3584, 0, "F32")
    for n in range(28):
        more = (
            "Q6_K" if n < 3 or n >= 24 or n % 3 == 2 else "Q4_K"
        )  # about half of them, as llama.cpp does
        for name, rows, columns, kind in (
            ("attn_q", 3584, 3584, "Q4_K"),
            ("attn_k", 512, 3584, "Q4_K"),
            ("attn_v", 512, 3584, more),
            ("attn_output", 3584, 3584, "Q4_K"),
            ("ffn_gate", 18_944, 3584, "Q4_K"),
            ("ffn_up", 18_944, 3584, "Q4_K"),
            ("ffn_down", 3584, 18_944, more),
        ):
            tensor(f"blk.{n}.{name}.weight", rows, columns, kind)
        for name, rows in (("attn_q", 3584), ("attn_k", 512), ("attn_v", 512)):
            tensor(f"blk.{n}.{name}.bias", rows, 0, "F32")
        for name in ("attn_norm", "ffn_norm"):
            tensor(f"blk.{n}.{name}.weight", 3584, 0, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with open(path, "rb+") as file:
        begin = file.seek(0, 2)
        file.truncate(begin + -begin % 32 + size)
    return path, size


def test_qwen2_7b_in_q4_k_m_learns_in_8_gb(tmp_path):
    path, size = qwen2_7b_q4_k_m(tmp_path / "7b.gguf")
    machine = Machine(device="cuda", dtype="bfloat16", quantize="keep", recompute=True, pages=8)
    try:
        setup = setup_of(
            str(path), Machine(device="cpu", dtype="bfloat16", quantize="keep", recompute=True)
        )
    finally:
        path.unlink()
    setup = setup._replace(machine=machine, cuda=True, optimizer="adamw8bit")
    step = step_plan(setup, Load(1, 2048, 1024))
    weights = step.held["blocks, weights"] + step.held["vocabulary, weights"]
    assert weights == pytest.approx(size, rel=0.001)  # norms and biases take half as much in bf16
    assert step.peak < 7.5e9
    assert acting_plan(setup, 1024).peak < 8e9
    in_full = setup._replace(machine=replace(machine, quantize=None))
    assert "--machine.quantize keep" in savings(in_full, plan.dpo_load)


def test_the_plan_of_a_loop_counts_the_blocks(tmp_path):
    base = str(write_gguf(tmp_path / "base.gguf", CASES["qwen2"], K.Q8_0))
    setups = [
        setup_of(base, Machine(device="cpu", quantize=kind)) for kind in (None, "keep", "nf4")
    ]
    full, held, fewest = (weights_of(meta_model(setup))["blocks, weights"] for setup in setups)
    assert full > held > fewest
    assert set(plan_loop(LoopCommand(base, machine=HERE))) == {"SFT", "DPO", "explore"}
    with pytest.raises(
        ValueError, match="Qwen/Qwen2-7B: quantize keep holds the blocks of a GGUF file"
    ):
        plan_loop(LoopCommand("Qwen/Qwen2-7B", machine=HERE))


def test_a_format_that_is_not_read_is_refused_before_anything_is_planned(tmp_path):
    base = write_gguf(tmp_path / "base.gguf", CASES["qwen2"], K.Q5_0)
    with pytest.raises(ValueError, match="is Q5_0, expected floating point") as caught:
        setup_of(str(base), HERE)
    assert "\n" not in str(caught.value)


def test_a_loop_says_at_once_what_its_machine_cannot_do(tmp_path):
    in_few_bits = Machine(device="cpu", quantize="nf4", act_dtype="bfloat16")
    for machine, says in (
        (HERE, "nano: quantize keep holds"),
        (in_few_bits, "stays in nf4 acts in"),
    ):
        with pytest.raises(ValueError, match=says):
            Loop(LoopCommand(machine=machine, out=tmp_path / "loop"))
        assert not (tmp_path / "loop").exists()


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
