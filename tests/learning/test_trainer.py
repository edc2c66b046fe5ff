"""Accumulation is the big batch, and a killed run goes on as if nothing had happened."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from minidpo.learning.trainer import Optimizer, StepSettings, cosine, train
from minidpo.system.run_folder import RunFolder, records

TIMES = ("tokens_per_s", "peak_memory_mib")
STEPS = 7


class Rows:
    """A micro-batch of the toy problem."""

    def __init__(self, x, y, step_rows, number=0, passes=1):
        self.x, self.y, self.step_rows, self.trees = x, y, step_rows, SimpleNamespace(tokens=len(x))
        self.number, self.passes = number, passes  # of the step's micro-batches
        self.names = [f"row {i}" for i in range(len(x))]


def start(dropout):
    """The net of the toy problem, its inputs (8,3) and targets (8,)."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(dropout), nn.Linear(4, 1))
    with torch.no_grad():
        for i, weight in enumerate(net.parameters()):
            weight.copy_(torch.linspace(-1, 1, weight.numel()).view(weight.shape) * (i + 1) / 2)
    g = torch.Generator().manual_seed(1)
    return net, torch.randn(8, 3, generator=g), torch.randn(8, generator=g)


def mean_of_all(rows, errors):
    return errors.sum() / rows.step_rows


def toy(
    folder,
    micro=4,
    after=lambda step: None,
    steps=STEPS,
    dropout=0.2,
    fail=None,
    share=mean_of_all,
):
    """A small fit with dropout by AdamW at two rates: the run and the net. `fail(step)` is asked before a step,
    `after(step)` behind its log. share: a micro-batch's part of the loss."""
    net, x, y = start(dropout)

    def batches(step):
        if fail:
            fail(step)
        parts = list(zip(x.split(micro), y.split(micro)))
        return [Rows(*part, len(x), n, len(parts)) for n, part in enumerate(parts)]

    def score(rows):
        return net(rows.x).squeeze(1)

    def objective(rows, scores):
        loss = share(rows, (scores - rows.y) ** 2)
        return loss, {"positive": (rows.y > 0).sum() / rows.step_rows}

    optimizer = torch.optim.AdamW(
        [
            {"params": [net[0].weight, net[2].weight], "lr": 0.05},
            {"params": [net[0].bias, net[2].bias], "lr": 0.1},
        ]
    )

    class Watched(RunFolder):
        def log(self, record):
            super().log(record)
            after(record["step"] - 1)

    run = Watched(folder, {})
    train(
        run,
        net.train(),
        optimizer,
        batches=batches,
        score=score,
        objective=objective,
        settings=StepSettings(Optimizer(steps=steps, warmup=2, clip=0.5, save_every=3), 5, "toy"),
    )
    return run, net


def log(run):
    return [
        {name: value for name, value in record.items() if name not in TIMES}
        for record in records(run.folder)
    ]


def weights(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


class Killed(Exception):
    pass


def kill_at(moment):
    def fail(step):
        if step == moment:
            raise Killed

    return fail


def check_micro_batches(folder, share=mean_of_all):
    whole, net = toy(folder / "8", micro=8, dropout=0.0, share=share)
    for micro in (1, 3, 4):
        run, other = toy(folder / str(micro), micro, dropout=0.0, share=share)
        torch.testing.assert_close(weights(other), weights(net), rtol=0, atol=1e-6)
        for record, expected in zip(log(run), log(whole), strict=True):
            assert record == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_micro_batches_add_up_to_the_big_batch(tmp_path):
    """Two libraries broke this law in silence, and with it the baselines of a year of papers: Limozin et al. 2026,
    arXiv:2604.23747. Both mistakes are made below."""
    check_micro_batches(tmp_path)


def mean_of_means(rows, errors):
    """OpenRLHF's: right only where all micro-batches are of one size, as those of 1 and of 4 rows are here."""
    return errors.mean() / rows.passes


def dropped_after_the_first(rows, errors):
    """DeepSpeed's with CPU offload: the loss that is shown is right, the gradient is the first micro-batch's."""
    loss = mean_of_all(rows, errors)
    return loss if rows.number == 0 else loss.detach() + 0 * loss


@pytest.mark.parametrize("mistake", [mean_of_means, dropped_after_the_first])
def test_the_mistakes_of_other_libraries_break_that_law(tmp_path, mistake):
    with pytest.raises(AssertionError):
        check_micro_batches(tmp_path, mistake)


@pytest.mark.parametrize("moment", [0, 2, STEPS - 1])
@pytest.mark.parametrize("where", ["fail", "after"])
def test_killed_before_a_step_or_after_its_log_the_run_goes_on_the_same_bit_for_bit(
    tmp_path, moment, where
):
    whole, net = toy(tmp_path / "whole")
    with pytest.raises(Killed):
        toy(tmp_path / "killed", **{where: kill_at(moment)})
    torch.rand(9)  # what else the process did must not matter
    run, other = toy(tmp_path / "killed")
    assert torch.equal(weights(other), weights(net))
    assert log(run) == log(whole)


def fit(
    folder, net, optimizer=None, *, steps=1, seed=1, clip=100.0, pass_steps=math.inf, **functions
):
    """Steps of SGD at rate 1, or of another optimizer, on the sum of the scores; all logged and kept."""
    functions = {
        "batches": lambda step: [Rows([1], None, 1)],
        "objective": lambda rows, scores: (scores.sum(), {}),
        **functions,
    }
    options = Optimizer(steps=steps, warmup=0, clip=clip, save_every=1)
    settings = StepSettings(options, seed, "", pass_steps=pass_steps)
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=1.0)
    train(RunFolder(folder, {}), net, optimizer, settings=settings, **functions)


@pytest.mark.parametrize("killed", [None, 2, 5, 6])
def test_it_ends_when_the_loss_was_below_a_thousandth_for_a_whole_pass(tmp_path, killed):
    """A pass is three steps. Two in a row are not enough, whichever step it is killed in."""
    losses = [0.5, 9e-4, 9e-4, 0.002, 1e-4, 1e-5, 0.0, 0.5]
    net = nn.Linear(1, 1)

    def run(killed):
        def batches(step):
            kill_at(killed)(step)
            return [Rows([1], losses[step], 1)]

        functions = {"batches": batches, "score": lambda rows: net.weight[0]}
        functions["objective"] = lambda rows, scores: (0 * scores.sum() + rows.y, {})
        fit(tmp_path, net, steps=8, pass_steps=3, **functions)
        return [record["loss"] for record in records(tmp_path)]

    if killed is not None:
        with pytest.raises(Killed):
            run(killed)
    expected = pytest.approx(losses[:7], abs=1e-9)
    assert run(None) == expected
    assert run(0) == expected  # nothing is left to do


def test_a_gradient_is_clipped_before_the_step(tmp_path):
    """SGD at rate 1 moves by the gradient, here 100 for each of three weights: by 0.5 if clipped to that."""
    net = nn.Linear(3, 1, bias=False)
    before = net.weight.detach().clone()
    fit(tmp_path, net, clip=0.5, score=lambda rows: 100 * net.weight.sum()[None])
    assert (net.weight - before).norm().item() == pytest.approx(0.5, rel=1e-4)


def test_a_last_step_that_leaves_a_weight_infinite_is_an_error_and_nothing_is_kept(tmp_path):
    net = nn.Linear(1, 1)
    too_far = torch.optim.SGD(net.parameters(), lr=float("inf"))
    with pytest.raises(ValueError, match="step 1: a weight is not finite"):
        fit(tmp_path, net, too_far, score=lambda rows: net.weight[0] + net.bias)
    assert not list(tmp_path.glob("*state*")) and not records(tmp_path)


def test_each_step_and_each_seed_has_its_own_dropout(tmp_path):
    net, seen = nn.Linear(1, 1), []

    def score(rows):
        seen.append(tuple(nn.functional.dropout(torch.ones(32), 0.5).tolist()))
        return net.weight[0]

    for seed in (1, 2):
        fit(tmp_path / str(seed), net, steps=3, seed=seed, score=score)
    assert len(set(seen)) == 6


def test_what_is_logged_is_what_was_done(tmp_path):
    run, _ = toy(tmp_path, dropout=0.0, micro=8, steps=1)
    (record,) = records(run.folder)
    before, x, y = start(dropout=0.0)  # one step of gradient by hand
    loss = ((before(x).squeeze(1) - y) ** 2).mean()
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in before.parameters()]).norm()
    assert (record["step"], record["lr"]) == (1, 0.025)  # the first of two steps of warm-up
    assert record["loss"] == pytest.approx(loss.item()) and record["grad_norm"] == pytest.approx(
        norm.item()
    )
    assert record["positive"] == pytest.approx((y > 0).float().mean().item())
    assert all(record[name] > 0 for name in TIMES) and norm > 0.5  # logged before clipping


@pytest.mark.parametrize("start, says", [(0.0, "its gradient inf"), (-1.0, "the loss is nan")])
def test_a_loss_or_gradient_that_is_not_finite_ends_the_run_before_it_is_kept(
    tmp_path, start, says
):
    """The square root of 0 has a value and no gradient, that of -1 neither."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, start)
    with pytest.raises(ValueError, match=f"step 1: .*{says}"):
        fit(
            tmp_path,
            net,
            score=lambda rows: net.weight[0],
            objective=lambda rows, scores: (scores.sqrt().sum(), {}),
        )
    assert records(tmp_path) == [] and RunFolder(tmp_path, {}).load_state() is None


@pytest.mark.parametrize("odd", ["nan", "-inf"])
def test_a_score_that_is_not_finite_is_refused_by_the_name_of_its_trajectory_before_the_step(
    tmp_path, odd
):
    """Even where the loss would not show it: a hinge or a sigmoid is flat at infinity."""
    net = nn.Linear(1, 1, bias=False)
    before, wrong = net.weight.item(), torch.tensor([0.0, float(odd)])
    with pytest.raises(ValueError, match=f"row 1: its score is {odd}"):
        fit(
            tmp_path,
            net,
            batches=lambda step: [Rows([1, 2], None, 1)],
            score=lambda rows: net.weight[0] + wrong,
            objective=lambda rows, scores: (scores[0], {}),
        )
    assert records(tmp_path) == [] and net.weight.item() == before


@given(st.integers(1, 300), st.integers(0, 50))
def test_the_rate_rises_to_1_over_the_warm_up_and_falls_from_there(steps, warmup):
    rates = [cosine(step, steps, warmup) for step in range(steps)]
    assert all(0 < rate <= 1 for rate in rates)
    rise, fall = rates[:warmup], rates[warmup:]
    assert rise == sorted(rise) and fall == sorted(fall, reverse=True)
    if fall:
        assert fall[0] == 1 and fall[-1] <= 1
    if warmup and rise:
        assert rise[0] == 1 / warmup
