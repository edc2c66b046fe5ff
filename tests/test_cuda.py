"""On a GPU: the numbers of a CPU, no waiting, no more memory than asked for (`benchmarks/gpu.py`)."""

import random
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import tiny
import torch
import toy

from benchmarks.answers import generate
from minidpo.data.batch import batch_scores, collate
from minidpo.learning import trainer
from minidpo.memory import adamw8bit, frozen, lora, nf4, recompute
from minidpo.memory.ggml_matrix import GGMLMatrix
from minidpo.memory.lora import LoRAConfig
from minidpo.memory.machine import Machine
from minidpo.memory.quantised import load_quantised
from minidpo.model import checkpoint, ggml
from minidpo.model.attention import additive_mask, attend
from minidpo.model.chat import Dialogue
from minidpo.model.decoder import RopeScaling
from minidpo.model.sampling import Request
from minidpo.system.tensors import to_device

pytestmark = pytest.mark.gpu
CPU = Machine(device="cpu", dtype="float32")
GPU = Machine(device="cuda", dtype="float32")
FAMILIES = {
    "qwen2": {},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "llama3": {"model_type": "llama", "rope_scaling": RopeScaling(8.0, 1.0, 4.0, 64)},
    "untied": {"tie_word_embeddings": False, "num_key_value_heads": 4},
}
LEARNERS = {
    "sft": toy.sft,
    "dpo": toy.dpo,
    "kto": partial(toy.dpo, loss="kto"),
    "grpo": toy.grpo,
    "ppo": toy.ppo,
}
family = pytest.mark.parametrize("changes", FAMILIES.values(), ids=FAMILIES)


def trees(rows=2):
    """Groups of three trajectories that share a prompt, of unlike lengths, on the CPU."""
    rng = random.Random(0)

    def drawn(n):
        return [rng.randrange(420) for _ in range(n)]

    groups = []
    for group in range(rows):
        prompt = drawn(30 + 7 * group)
        groups.append(
            [Dialogue(prompt + drawn(n), [-1] * len(prompt) + [0] * n) for n in (9, 12, 5)]
        )
    return collate(groups)


def gradients(model, batch, device, walk_above=sys.maxsize):
    """Scores of the batch, and the adapter's gradient of their sum."""
    scores = batch_scores(model, to_device(batch, torch.device(device)), walk_above)
    scores.sum().backward()
    return scores.detach().cpu(), {
        name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None
    }


def adapted(model):
    """The model with an adapter that does something."""
    lora.attach(model, LoRAConfig(rank=4), torch.Generator().manual_seed(0))
    for n, layer in enumerate(lora.layers(model).values()):
        update = 0.05 * torch.randn(layer.lora_B.shape, generator=torch.Generator().manual_seed(n))
        layer.lora_B.data.copy_(update)
    return model


# the model


@family
@pytest.mark.parametrize("dtype, near", [(torch.float64, 1e-9), (torch.float32, 2e-4)])
def test_logits_of_a_gpu_are_those_of_a_cpu(changes, dtype, near):
    model, ids = tiny.model(dtype=dtype, **changes), torch.randint(420, (2, 75))
    here = model.head(model(ids))
    model.cuda()
    there = model.head(model(ids.cuda()))
    torch.testing.assert_close(there.cpu(), here, rtol=near, atol=near)


@family
@pytest.mark.parametrize(
    "way", ["plain", "recompute", "offload", "depth first", "depth first, recompute"]
)
def test_scores_and_gradients_of_trees_are_those_of_a_cpu(changes, way):
    walks = "depth first" in way
    batch = trees(1 if walks else 2)
    model = adapted(tiny.model(dtype=torch.float64, **changes))
    expected = gradients(model, batch, "cpu")
    model.zero_grad()
    model.cuda()
    recompute.switch(model, way.endswith(("recompute", "offload")), way == "offload")
    scores, grads = gradients(model, batch, "cuda", walk_above=0 if walks else sys.maxsize)
    torch.testing.assert_close(scores, expected[0], rtol=1e-9, atol=1e-9)
    assert grads.keys() == expected[1].keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[1][name], rtol=1e-7, atol=1e-9)


def test_a_mask_and_scores_far_below_0_leave_the_gradient_finite():
    """As a tree padded to 1,088 tokens: where cuDNN attended, grad q was NaN (pytorch#196678)."""
    q, k, v = (
        0.1 * torch.randn(1, 2, 1088, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    q[..., 0], k[..., 0] = 1.0, -120 * 8.0  # every score about -120
    for each in (q, k, v):
        each.requires_grad_()
    mask = torch.ones(1, 1088, 1088, dtype=torch.bool, device="cuda").tril()
    attend(q, k, v, additive_mask(mask, q)).sum().backward()
    assert all(each.grad.isfinite().all() for each in (q, k, v))


# weights in few bits


@pytest.mark.parametrize("kernel", [True, False], ids=["one kernel", "tiles"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_has_the_same_codes_and_weights_to_the_bit(kernel, dtype, monkeypatch):
    weight = torch.randn(257, 131, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    if not kernel:
        monkeypatch.setattr(nf4, "one_kernel", lambda *_, **__: None)
    for matrix_type in (nf4.NF4Matrix, nf4.Int8Matrix):
        here, there = matrix_type(weight.shape, dtype), matrix_type(weight.shape, dtype).cuda()
        here.load_state_dict(matrix_type.encode(weight))
        there.load_state_dict(matrix_type.encode(weight.cuda()))
        for name, buffer in here.named_buffers():
            assert torch.equal(there.get_buffer(name).cpu(), buffer), name
        assert torch.equal(there.dense().cpu(), here.dense())


@pytest.mark.parametrize("name", sorted(ggml.FORMATS))
def test_blocks_of_a_gguf_file_mean_the_same_weights(name):
    matrix = GGMLMatrix((8, 512), torch.float32, name)
    codes = np.random.default_rng(0).integers(0, 256, matrix.codes.shape, dtype=np.uint8)
    matrix.codes.copy_(torch.from_numpy(codes))
    here = matrix.dense()
    there = matrix.cuda().dense().cpu()
    blocks, others = (weights.view(-1, matrix.format.weights) for weights in (here, there))
    finite = blocks.isfinite().all(1)  # of random bytes some are a scale of inf or nan
    assert finite.float().mean() > 0.5
    apart = (others - blocks)[finite].abs().amax(1)  # a compiler may round product and sum at once
    assert (apart <= 1e-6 * blocks[finite].abs().amax(1)).all()


@pytest.mark.parametrize("way", ["plain", "recompute", "offload"])
def test_a_quantised_model_scores_and_learns_as_on_a_cpu(way, tmp_path):
    checkpoint.save(tiny.model(hidden_size=64, intermediate_size=100), tmp_path / "m")
    results = []
    for device in ("cpu", "cuda"):
        model = adapted(load_quantised(tmp_path / "m", torch.float32, device))
        recompute.switch(model, way != "plain", way == "offload" and device == "cuda")
        results.append(gradients(model, trees(), device))
    (scores, grads), (others, other_grads) = results
    torch.testing.assert_close(others, scores, rtol=1e-4, atol=1e-3)
    for name, grad in grads.items():
        torch.testing.assert_close(other_grads[name], grad, rtol=1e-2, atol=1e-3)


def test_one_kernel_is_really_made_where_a_compiler_is():
    matrix = nf4.NF4Matrix((256, 128), torch.bfloat16).cuda()
    for _ in range(2):
        matrix.dense()
    if not frozen._kernels.get((nf4._expand_on_gpu, matrix.device)):
        pytest.skip("PyTorch cannot compile for this GPU: tiles do the work")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        matrix.dense()
        torch.cuda.synchronize()
    assert sum(event.count for event in profile.key_averages() if event.self_device_time_total) == 1


# learning


def test_moments_in_8_bits_are_rounded_as_on_a_cpu():
    x = torch.randn(100 * adamw8bit.BLOCK, generator=torch.Generator().manual_seed(0))
    for here, there in zip(
        adamw8bit.maps(torch.device("cpu")), adamw8bit.maps(torch.device("cuda"))
    ):
        codes, scale = adamw8bit.quantise(x, here)
        other_codes, other_scale = adamw8bit.quantise(x.cuda(), there)
        assert torch.equal(other_scale.cpu(), scale)
        apart = (other_codes.cpu().int() - codes.int()).abs()
        assert apart.max() <= 1 and (apart > 0).float().mean() < 1e-3


@pytest.mark.parametrize("learner", LEARNERS)
def test_a_training_is_that_of_a_cpu(folder, tmp_path, learner):
    _, here = LEARNERS[learner](folder, tmp_path / "cpu", CPU)
    _, there = LEARNERS[learner](folder, tmp_path / "gpu", GPU)
    for step, (record, other) in enumerate(zip(here, there, strict=True)):
        if step == 0:  # policy and reference agree: rounding alone says which of a pair is ahead
            record.pop("accuracy", None), other.pop("accuracy", None)
        assert other == pytest.approx(record, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("stage", [toy.sft, toy.dpo], ids=["sft", "dpo"])
def test_the_host_waits_once_a_step(folder, tmp_path, stage, monkeypatch):
    """Only where the step's numbers come back: batches, passes and optimizers are queued without waiting."""
    transfer, waits = trainer._StepSums.transfer, []

    def allowed(sums, norm):
        torch.cuda.set_sync_debug_mode("default")
        waits.append(1)
        totals = transfer(sums, norm)
        torch.cuda.set_sync_debug_mode("error" if len(waits) < 4 else "default")
        return totals

    monkeypatch.setattr(trainer._StepSums, "transfer", allowed)
    try:
        stage(folder, tmp_path / "out", replace(GPU, dtype="bfloat16"), steps=5, save_every=5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == 5


# acting


def requests_of(lengths, new=12):
    rng = random.Random(1)
    return [
        Request(
            tuple(rng.randrange(420) for _ in range(n)), tuple(rng.random() for _ in range(new))
        )
        for n in lengths
    ]


@family
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_those_of_a_cpu(changes, temperature):
    requests = requests_of([1, 40, 3, 3, 17])
    requests += requests[1:2]  # two rows with one prompt
    model = tiny.model(dtype=torch.float64, **changes)
    here = generate(model, requests, 4, temperature)
    there = generate(model.cuda(), requests, 4, temperature)
    assert [answer.ids for answer in there] == [answer.ids for answer in here]
    for answer, other in zip(here, there):
        assert other.logps == pytest.approx(answer.logps, abs=1e-5)
