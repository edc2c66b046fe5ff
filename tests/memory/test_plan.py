"""The memory plan: a training step takes the bytes that it counts, and its advice helps."""

import contextlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minidpo.data.batch import batch_scores, collate
from minidpo.memory import lora
from minidpo.memory.adamw8bit import AdamW8bit
from minidpo.memory.loading import open_model
from minidpo.memory.lora import LoRAConfig
from minidpo.memory.machine import (
    GIB,
    MIB,
    Machine,
)
from minidpo.memory.plan import (
    PUBLISHED,
    ByteCounter,
    FusedAttention,
    Load,
    Setup,
    step_plan,
)
from minidpo.memory.quantised import quantise_layout
from minidpo.model import checkpoint
from minidpo.model.attention import query_blocks
from minidpo.model.chat import Dialogue
from minidpo.model.decoder import ModelConfig, Transformer, rotary_angles
from minidpo.system.tensors import to_device

ROOT = Path(__file__).parents[2]
few = settings(max_examples=settings.default.max_examples // 33)  # each makes a dozen plans
SMALL = ModelConfig(500, 64, 160, 3, 4, 2, max_position_embeddings=2048)
SEVEN = PUBLISHED["Qwen/Qwen2-7B-Instruct"]
LAPTOP = Machine(device="cuda", quantize="nf4", recompute=True)


def setup(
    config=SMALL, machine=Machine(), optimizer="adamw", dtype=torch.float32, cuda=False, rank=16
):
    return Setup(config, LoRAConfig(rank=rank), machine, optimizer, dtype, cuda)


def seven(machine=LAPTOP, optimizer="adamw8bit", config=SEVEN):
    return setup(config, machine, optimizer, torch.bfloat16, cuda=True)


# the bytes of a block, counted on the meta device


def test_views_cost_nothing_and_what_dies_is_given_back():
    outside = torch.zeros(1000)
    with ByteCounter() as counter:
        a = torch.zeros(250)  # 1,000 bytes
        b = outside[3:].view(1, -1).t()  # of a tensor that was there before
        c = a[5:].t()
        assert counter.now == counter.peak == 1000
        d = a + 1
        assert counter.now == counter.peak == 2000
        del a, d
        assert counter.now == 1000  # c still holds a's memory
        del c
        e = torch.zeros(250)
        e.add_(1).mul_(2)
    assert counter.now == 1000 and counter.peak == 2000 and len(b) == 997 and len(e) == 250


def block_bytes(device, dtype, quantised, B, T, H, K, branched):
    """Kept by one block's forward, peak of forward, and peak with backward."""
    config = ModelConfig(50, 16 * H, 100, 1, H, K)
    with torch.device(device):
        model = Transformer(config).to(dtype)
    if quantised:
        quantise_layout(model, dtype)
        model.to_empty(device=device)
        for codes in model.buffers():
            codes.zero_()
    lora.attach(model, LoRAConfig(rank=4), torch.Generator())
    like = {"device": device, "dtype": dtype}
    x = torch.zeros(B, T, 16 * H, **like, requires_grad=True)
    angles = rotary_angles(torch.arange(T, device=device).expand(B, T), 16, 1e4, dtype)
    mask = query_blocks(None, x) if branched else None  # on a CPU
    fused = FusedAttention(cuda=False) if device == "meta" else contextlib.nullcontext()
    with fused, ByteCounter() as counter:
        y = model.model.layers[0](x, *angles, mask, None, 0)
        kept, forward = counter.now, counter.peak
        y.backward(torch.ones_like(y))
    return kept, forward, counter.peak


@pytest.fixture(scope="module")
def tables():
    """NF4's tables are made when they are first used, 3 KB that no later run makes again."""
    for device in ("meta", "cpu"):
        block_bytes(device, torch.float32, True, 1, 2, 1, 1, False)


@pytest.mark.usefixtures("tables")
@settings(max_examples=settings.default.max_examples // 4)
@given(
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
    st.integers(1, 3),
    st.integers(2, 40),
    st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 2)]),
    st.booleans(),
)
def test_a_block_takes_on_a_cpu_what_it_was_counted_to_take(
    dtype, quantised, B, T, heads, branched
):
    what = dtype, quantised, B, T, *heads, branched
    for counted, real in zip(block_bytes("meta", *what), block_bytes("cpu", *what)):
        assert counted == real


# what a step really takes: a process of its own trains, and the kernel counts

MEASURE = """
import json, sys
import torch
from pathlib import Path
sys.path[:0] = {root!r}, {root!r} + "/benchmarks"
from sides import forget_peak, memory_mib
from minidpo.memory import lora
from minidpo.memory import recompute as recomputing
from minidpo.model import checkpoint
from minidpo.memory.adamw8bit import AdamW8bit
from minidpo.memory.plan import Load, Setup, step_plan
from minidpo.model.chat import Dialogue
from minidpo.memory.lora import LoRAConfig
from minidpo.memory.loading import open_model
from minidpo.memory.machine import Machine, memory_now
from minidpo.memory.quantised import load_quantised
from minidpo.data.batch import batch_scores, collate

folder, quantize, dtype, recompute, optimizer, rows, length = json.loads(sys.argv[1])
machine = Machine(device="cpu", dtype=dtype, quantize=quantize, recompute=recompute, memory_gib=100)
kinds = dict(adamw=torch.optim.AdamW, adamw8bit=AdamW8bit)

def train(model, ids):
    lora.attach(model, LoRAConfig(), torch.Generator().manual_seed(0))
    optimizer_ = kinds[optimizer](lora.parameters(model), lr=1e-3)
    for step in range(2):
        for micro in range(1 + step):  # the most is taken by a second one, beside gradients and state
            batch = collate([[Dialogue(row, [-1] * (len(row) // 2) + [0] * (len(row) // 2)) for row in ids]])
            batch_scores(model, batch).sum().backward()
        optimizer_.step()
        optimizer_.zero_grad(set_to_none=True)

small = checkpoint.load(folder + "/small", getattr(torch, dtype)) if quantize is None else load_quantised(
    folder + "/small", getattr(torch, dtype))
recomputing.switch(small, recompute)
train(small, [list(range(300))])  # the libraries' own code and tables are in memory now
del small
config = checkpoint.read_config(folder + "/model")[0]
given = Setup(config, LoRAConfig(), machine, optimizer, getattr(torch, dtype), False)
ids = torch.randint(4000, (rows, length), generator=torch.Generator().manual_seed(0)).tolist()
load = Load(1, rows * length, rows * length // 2, branched=rows > 1)
step_plan(given, load)
program = memory_now()
plan = step_plan(given, load).peak
model = open_model(folder + "/model", machine)
forget_peak()
train(model, ids)
print(json.dumps([plan, memory_mib("VmHWM") * 2**20, program]))
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("budget")
    for name, config in (
        ("model", ModelConfig(12_000, 1024, 4096, 2, 8, 2)),
        ("small", ModelConfig(500, 256, 512, 1, 2, 1)),
    ):
        checkpoint.save(Transformer(config).bfloat16(), folder / name)
    return folder


@pytest.mark.parametrize(
    "quantize, dtype, recompute, optimizer, rows, length",
    [
        (None, "float32", True, "adamw8bit", 1, 256),
        ("nf4", "float32", True, "adamw", 1, 256),
        (None, "float32", False, "adamw", 2, 192),
        ("nf4", "bfloat16", True, "adamw8bit", 2, 256),
    ],
)
@pytest.mark.slow
def test_the_plan_and_the_measured_peak_lie_within_5_percent(
    checkpoints, tmp_path, quantize, dtype, recompute, optimizer, rows, length
):
    """And so without what the program takes before there is a model, but for 16 MiB of libraries' buffers."""
    given = json.dumps([str(checkpoints), quantize, dtype, recompute, optimizer, rows, length])
    script = tmp_path / "measure.py"
    script.write_text(MEASURE.replace("{root!r}", repr(str(ROOT))))
    done = subprocess.run([sys.executable, str(script), given], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    planned, measured, program = json.loads(done.stdout.splitlines()[-1])
    assert planned == pytest.approx(measured, rel=0.05)
    assert planned - program == pytest.approx(measured - program, rel=0.05, abs=16 * MIB)


@pytest.mark.gpu
def test_on_a_gpu_the_plan_and_the_allocators_peak_lie_within_5_percent(checkpoints):
    machine = Machine(device="cuda", quantize="nf4", recompute=True)
    config, _ = checkpoint.read_config(checkpoints / "model")
    given = setup(config, machine, "adamw8bit", torch.bfloat16, cuda=True)
    load = Load(1, 1024, 512)
    plan = step_plan(given, load)
    model = open_model(str(checkpoints / "model"), machine)
    lora.attach(model, LoRAConfig(), torch.Generator().manual_seed(0))
    optimizer = AdamW8bit(lora.parameters(model), lr=1e-3)
    ids = torch.randint(4000, (2, 512)).tolist()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        for _ in range(2):
            trees = collate([[Dialogue(row, [-1] * 256 + [0] * 256) for row in ids]])
            batch = to_device(trees, torch.device("cuda"))
            batch_scores(model, batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    planned = plan.peak - plan.held["CUDA context"] - plan.held["fragments"]
    assert planned == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.05)


# laws


@few
@given(
    st.integers(2, 400),
    st.sampled_from([None, "nf4"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["adamw", "adamw8bit"]),
)
def test_more_needs_more_and_each_way_to_save_saves(
    length, quantize, recompute, branched, optimizer
):
    machine = Machine(quantize=quantize, recompute=recompute)
    given = setup(
        ModelConfig(500, 256, 640, 3, 4, 2), machine, optimizer, torch.bfloat16, cuda=True
    )
    load = Load(2, length, length, branched)

    def peak(changed=given, load=load):
        return step_plan(changed, load).peak

    def on(**machine_):
        return peak(given._replace(machine=replace(machine, **machine_)))

    assert peak(load=load._replace(length=2 * length)) > peak()
    assert peak(load=load._replace(rows=3)) > peak()
    assert branched is False or peak(load=load._replace(branched=False)) < peak()
    assert peak(given._replace(dtype=torch.float32)) > peak()
    assert peak(given._replace(adapter=LoRAConfig(rank=64))) > peak()
    assert on(quantize="nf4") < on(quantize=None)
    assert on(recompute=True) < on(recompute=False)
    assert on(recompute=True, offload=True) < on(recompute=True)
    small, full = (
        step_plan(given._replace(optimizer=kind), load).held["optimizer"]
        for kind in ("adamw8bit", "adamw")
    )
    assert small < full


def test_a_7b_in_nf4_is_counted_term_by_term():
    """Maps: 4 bits a weight, a byte for 64, 4 bytes for 64 x 256. Norms (two a block, one at the end) and
    biases (of q, k and v) in bf16. The vocabulary twice, a byte a weight and 4 bytes a row."""
    plan = step_plan(seven(), Load(1, 2048, 1024))
    maps = 3584 * (3584 * 2 + 512 * 2 + 18_944 * 3)
    rest = 2 * (28 * (2 * 3584 + 3584 + 2 * 512) + 3584)
    blocks = 28 * maps * (1 / 2 + 1 / 64 + 4 / 64 / 256) + rest
    assert plan.held["blocks, weights"] == pytest.approx(blocks, rel=1e-5)
    assert plan.held["vocabulary, weights"] == 2 * 152_064 * (3584 + 4)
    trained = 28 * 16 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18_944))
    assert plan.held["adapter, weights"] == plan.held["adapter, gradients"] == 4 * trained
    assert plan.held["optimizer"] == pytest.approx(trained * (2 + 8 / 256), rel=1e-4)
    assert plan.held["block inputs"] == 28 * 2048 * 3584 * 2
    assert plan.peak < 6.5 * GIB


# shapes


def test_the_published_shapes_have_the_published_numbers_of_weights():
    """From the model cards: 0.49, 1.54 and 7.62 billion, of which 0.36, 1.31 and 6.53 are not embeddings."""
    for size, whole, inside in (("0.5B", 0.49, 0.36), ("1.5B", 1.54, 1.31), ("7B", 7.62, 6.53)):
        config = PUBLISHED[f"Qwen/Qwen2-{size}-Instruct"]
        with torch.device("meta"):
            weights = {name: p.numel() for name, p in Transformer(config).named_parameters()}
        table = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
        assert sum(weights.values()) / 1e9 == pytest.approx(whole, abs=0.006)
        assert (sum(weights.values()) - table) / 1e9 == pytest.approx(inside, abs=0.006)
