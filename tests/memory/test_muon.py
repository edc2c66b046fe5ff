"""Muon: what Newton-Schulz makes of singular values, and torch's own Muon."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minidpo.config import SFT
from minidpo.learning.training_run import optimizers_of
from minidpo.memory import lora, muon, plan
from minidpo.memory.machine import Machine
from minidpo.memory.plan import dpo_load, setup_of, step_plan

CPU = Machine(device="cpu", dtype="float32")
shapes, seeds = st.tuples(st.integers(1, 12), st.integers(1, 12)), st.integers(0, 2**32 - 1)


def drawn(shape, seed, least=0.0):
    """A float64 matrix as U, S and Vᵀ, with singular values from `least` to 1 and 1 the largest."""
    draw = torch.Generator().manual_seed(seed)
    u, s, vt = torch.linalg.svd(
        torch.randn(*shape, generator=draw, dtype=torch.float64), full_matrices=False
    )
    s = least + (1 - least) * torch.rand(s.shape, generator=draw, dtype=torch.float64)
    s[0] = 1.0
    return u, s, vt


@given(shapes, seeds)
def test_singular_vectors_stay_and_singular_values_go_through_the_polynomial(shape, seed):
    u, s, vt = drawn(shape, seed)
    x = s / s.norm()  # Frobenius
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    torch.testing.assert_close(muon.orthogonalise(u * s @ vt), u * x @ vt, rtol=1e-6, atol=1e-9)


@given(shapes, seeds)
def test_a_step_is_nearly_orthogonal_whatever_the_scale_and_that_of_the_transposed_matrix(
    shape, seed
):
    u, s, vt = drawn(shape, seed, least=0.05)  # above 0.05 / √12 of the norm
    matrix = u * s @ vt
    found = muon.orthogonalise(matrix)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.65 and values.max() < 1.25
    torch.testing.assert_close(muon.orthogonalise(1e3 * matrix), found, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(muon.orthogonalise(-matrix.T), -found.T, rtol=1e-6, atol=1e-9)
    assert not muon.orthogonalise(0 * matrix).any()


def stepped(kind, grads, start):
    """A matrix after steps with these gradients."""
    weight = torch.nn.Parameter(start.clone())
    optimizer = kind([weight])
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (8, 8)])
def test_steps_are_torchs_but_for_bfloat16(shape, monkeypatch):
    """Torch's Newton-Schulz runs in bfloat16; with ours in its place the weights agree in float32."""
    draw = torch.Generator().manual_seed(3)
    start, *grads = torch.randn(6, *shape, generator=draw)
    options = {"lr": 0.02, "weight_decay": 0.1}
    ours = stepped(lambda p: muon.Muon(p, options), grads, start)

    def torchs(p):
        return torch.optim.Muon(p, adjust_lr_fn="match_rms_adamw", **options)

    moved = (ours - start).norm()
    assert (stepped(torchs, grads, start) - ours).norm() < 0.02 * moved
    monkeypatch.setattr(
        "torch.optim._muon._zeropower_via_newtonschulz", lambda g, *_: muon.orthogonalise(g)
    )
    torch.testing.assert_close(stepped(torchs, grads, start), ours, rtol=1e-5, atol=1e-6)


def test_matrices_of_one_shape_move_together_as_each_would_alone():
    """Of unlike sizes, so that a norm over all of them would show; one has no gradient, and stays."""
    draw = torch.Generator().manual_seed(5)
    starts = [
        torch.randn(*shape, generator=draw) for shape in ((3, 8), (8, 3), (3, 8), (3, 8), (8, 3))
    ]
    grads = [
        [10.0**-n * torch.randn(start.shape, generator=draw) for n, start in enumerate(starts)]
        for _ in range(3)
    ]
    options = {"lr": 0.02, "weight_decay": 0.1}
    weights = [torch.nn.Parameter(start.clone()) for start in starts]
    optimizer = muon.Muon(weights, options)
    for several in grads:
        for weight, grad in zip(weights[1:], several[1:]):
            weight.grad = grad.clone()
        optimizer.step()
    alone = [
        stepped(lambda p: muon.Muon(p, options), [several[n] for several in grads], starts[n])
        for n in range(1, 5)
    ]
    assert torch.equal(weights[0], starts[0])
    for weight, expected in zip(weights[1:], alone):
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stack", [1, 60, 10**9])
def test_a_step_takes_as_many_bytes_as_the_plan_says_and_moves_the_same(stack, monkeypatch):
    """Alone, by the dozen or all of a shape together."""
    for module in (muon, plan):
        monkeypatch.setattr(module, "STACK", stack)
    model = plan.meta_model(setup_of("minidpo/nano", CPU, optimizer="muon"))
    maps = lora.parameters(model)
    optimizer = muon.Muon(maps, {"lr": 0.1, "weight_decay": 0.0})
    for p in maps:
        p.grad, optimizer.state[p]["momentum"] = torch.empty_like(p), torch.empty_like(p)
    with plan.ByteCounter() as counter:
        optimizer.step()
    found = step_plan(setup_of("minidpo/nano", CPU, optimizer="muon"), dpo_load(CPU))
    assert counter.peak == pytest.approx(found.phases["optimizer step"], rel=0.02)
    draw = torch.Generator().manual_seed(7)
    weights = [torch.nn.Parameter(torch.randn(3, 8, generator=draw)) for _ in range(5)]
    start = [weight.detach().clone() for weight in weights]
    for weight in weights:
        weight.grad = torch.randn(3, 8, generator=draw)
    muon.Muon(weights, {"lr": 0.1, "weight_decay": 0.0}).step()
    for weight, before in zip(weights, start):
        alone = stepped(
            lambda p: muon.Muon(p, {"lr": 0.1, "weight_decay": 0.0}), [weight.grad], before
        )
        torch.testing.assert_close(weight.detach(), alone, rtol=1e-5, atol=1e-6)


def test_muon_has_the_adapters_matrices_and_adamw_the_head():
    model = torch.nn.ModuleDict(
        {
            "q_proj": torch.nn.ParameterDict(
                {
                    "lora_A": torch.nn.Parameter(torch.zeros(2, 8)),
                    "lora_B": torch.nn.Parameter(torch.zeros(8, 2)),
                }
            )
        }
    )
    (alone,) = optimizers_of(SFT(optimizer="muon", lr=0.1, weight_decay=0.2), model)
    assert isinstance(alone, muon.Muon)
    assert [p.shape for p in alone.param_groups[0]["params"]] == [(2, 8), (8, 2)]
    assert (alone.param_groups[0]["lr"], alone.param_groups[0]["weight_decay"]) == (0.1, 0.2)
    model["head"] = torch.nn.Linear(8, 1, bias=False)
    first, second = optimizers_of(SFT(optimizer="muon"), model)
    assert isinstance(second, torch.optim.AdamW) and len(first.param_groups[0]["params"]) == 2
    assert second.param_groups[0]["params"] == [model["head"].weight]


def test_the_plan_counts_one_number_a_weight():
    machine = Machine(device="cpu", dtype="float32")
    plans = [
        step_plan(setup_of("Qwen/Qwen2-0.5B", machine, optimizer=kind), dpo_load(machine))
        for kind in ("adamw", "muon")
    ]
    adamw, ours = (plan.held["optimizer"] for plan in plans)
    assert 2 * ours == adamw > 0
