"""Averaged adapters: the mean of what each computes, up to the covariance; of others than one's, none."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from minidpo.config import AverageCommand
from minidpo.learning.average import average, distance, mean
from minidpo.memory import lora
from minidpo.memory.lora import LoRAConfig
from minidpo.system import processes
from minidpo.system.tensors import fingerprint
from tests.memory.test_lora import IDS, tiny, trained

seeds = st.integers(0, 2**32 - 1)


def noisy(tensors, seed, size=0.1):
    generator = torch.Generator().manual_seed(seed)
    return {name: tensor + size * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
            for name, tensor in tensors.items()}


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64)
            for name, shape in (("lora_A", (3, 8)), ("lora_B", (5, 3)))}


@given(seeds, st.integers(2, 5))
def test_the_mean_is_blind_to_order_and_a_mean_of_the_same_is_that(seed, n):
    ones = [weights(seed + i) for i in range(n)]
    for name, tensor in mean(ones).items():
        torch.testing.assert_close(tensor, mean(ones[::-1])[name])
        torch.testing.assert_close(tensor, sum(one[name] for one in ones) / n)
        torch.testing.assert_close(mean(ones[:1] * n)[name], ones[0][name])


@given(seeds, st.integers(2, 4))
def test_what_the_mean_adds_is_the_mean_of_what_each_adds_less_their_covariance(seed, n):
    start = weights(seed)
    ones = [noisy(start, seed + 1 + i) for i in range(n)]
    middle = mean(ones)
    apart = [{name: tensor - middle[name] for name, tensor in one.items()} for one in ones]
    covariance = sum(each["lora_B"] @ each["lora_A"] for each in apart) / n
    torch.testing.assert_close(middle["lora_B"] @ middle["lora_A"],
                               sum(one["lora_B"] @ one["lora_A"] for one in ones) / n - covariance)


@given(seeds)
def test_the_distance_is_a_length_in_lengths_of_the_center(seed):
    start = weights(seed)
    moved = {name: 1.25 * tensor for name, tensor in start.items()}
    assert distance(start, start) == 0
    assert distance(moved, start) == pytest.approx(0.25)
    opposite = {name: -tensor for name, tensor in start.items()}
    assert distance(opposite, start) == pytest.approx(2)


def saved(folder: Path, seed=0, size=0.0, config=LoRAConfig(rank=3), model=None, base="its base"):
    """An adapter in a folder: that of one seed, moved by noise of this size."""
    model = trained(model or tiny(0, torch.float32), config, seed=0 if size else seed)
    with torch.no_grad():
        for tensor in lora.adapter_tensors(model).values() if size else ():
            tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)), alpha=size)
    lora.save(model, folder, base, fingerprint(lora.base_tensors(model)))
    return folder


def test_it_writes_an_adapter_that_loads_for_the_same_base_and_computes_the_mean(tmp_path, capsys):
    start, after = saved(tmp_path / "start"), saved(tmp_path / "after", seed=3, size=1e-3)
    told = average(AverageCommand((start, after), tmp_path / "mean"))
    assert "the mean of 2 adapters" in capsys.readouterr().out and 0 < told["farthest"] < 0.5
    model, logits = tiny(0, torch.float32), []
    for folder in (start, after, tmp_path / "mean"):
        lora.load(model, folder)
        logits.append(model.head(model(IDS)).detach())
        lora.detach(model)
    apart = (logits[0] - logits[1]).abs().max()
    assert (logits[2] - (logits[0] + logits[1]) / 2).abs().max() < 0.1 * apart  # and not by more than a tenth
    assert lora.read_config(tmp_path / "mean") == lora.read_config(start)
    with pytest.raises(ValueError, match="made for another base: its weights"):
        lora.load(tiny(1, torch.float32), tmp_path / "mean")


def test_one_that_is_named_twice_weighs_twice_and_the_same_give_the_same_bytes(tmp_path):
    start, after = saved(tmp_path / "start"), saved(tmp_path / "after", seed=3, size=0.02)
    for name in ("one", "two"):
        average(AverageCommand((start, start, after), tmp_path / name))
    first, last, third = (load_file(folder / lora.WEIGHTS) for folder in (start, after, tmp_path / "one"))
    for name, tensor in third.items():
        torch.testing.assert_close(tensor, (2 * first[name] + last[name]) / 3)
    assert (tmp_path / "one" / lora.WEIGHTS).read_bytes() == (tmp_path / "two" / lora.WEIGHTS).read_bytes()


def test_half_precision_is_averaged_in_fp32_and_of_two_marks_of_a_base_one_is_enough(tmp_path):
    start, after = saved(tmp_path / "start"), saved(tmp_path / "after", seed=3, size=0.02)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(start / lora.WEIGHTS).items()}
    lora.write_weights(start / lora.WEIGHTS, tensors, {"format": "pt"})  # as the agent that ships
    average(AverageCommand((start, after), tmp_path / "mean"))
    stored, marks = lora.read_weights(tmp_path / "mean")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    assert marks[lora.BASE_FINGERPRINT] == lora.read_weights(after)[1][lora.BASE_FINGERPRINT]


FORM = "its rank, alpha, targets or base are not those of"


@pytest.mark.parametrize("other, says", [
    (dict(seed=1), "did not begin with one"), (dict(config=LoRAConfig(rank=4)), FORM),
    (dict(config=LoRAConfig(rank=3, alpha=8)), FORM),
    (dict(config=LoRAConfig(rank=3, targets=("q_proj",))), FORM),
    (dict(model=tiny(0, torch.float32, layers=1)), FORM),
    (dict(seed=3, size=0.02, model=tiny(5, torch.float32)), "by its base_fingerprint"),
    (dict(seed=3, size=0.02, model=tiny(0, torch.bfloat16)), "by its base_fingerprint")])
def test_adapters_that_did_not_begin_with_one_have_no_mean(tmp_path, other, says):
    given = (saved(tmp_path / "start"), saved(tmp_path / "other", **other))
    with pytest.raises(ValueError, match=says) as error:
        average(AverageCommand(given, tmp_path / "mean"))
    assert str(tmp_path / "other") in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "mean").exists()


def test_one_adapter_a_missing_one_and_several_processes_are_refused(tmp_path, monkeypatch):
    start = saved(tmp_path / "start")
    with pytest.raises(ValueError, match="two adapters or more: name them with --adapters"):
        average(AverageCommand((start,), tmp_path / "mean"))
    with pytest.raises(ValueError, match="nowhere: no such folder"):
        average(AverageCommand((start, tmp_path / "nowhere"), tmp_path / "mean"))
    monkeypatch.setattr(processes, "world_size", lambda: 2)
    with pytest.raises(ValueError, match="not averaged in 2 processes; start it without torchrun"):
        average(AverageCommand((start, start), tmp_path / "mean"))
