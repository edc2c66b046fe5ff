"""Averaged adapters: the mean of what each computes up to second order, and of strangers none."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_lora import tiny, trained

from minidpo.learning.average import average, checked, cosine_of_a, mean
from minidpo.memory import lora
from minidpo.memory.lora import LoRAConfig
from minidpo.model import scalar_head
from minidpo.system.run_folder import RunFolder
from minidpo.system.tensors import fingerprint, write_weights

seeds = st.integers(0, 2**32 - 1)
counts = st.lists(st.integers(1, 9), min_size=2, max_size=5)  # weights, of as many adapters
SHAPES = {"lora_A": (3, 8), "lora_B": (5, 3)}


def drawn(seed, center=None, size=1.0, dtype=torch.float64):
    """Tensors of an adapter: random ones, or noise of this size around others."""
    generator = torch.Generator().manual_seed(seed)
    noise = {
        name: size * torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }
    return {
        name: (tensor + (center[name] if center else 0)).to(dtype) for name, tensor in noise.items()
    }


@given(seeds, counts)
def test_a_mean_is_between_blind_to_order_and_to_the_scale_of_weights(seed, weights):
    adapters = [drawn(seed + i) for i in range(len(weights))]
    averaged = mean(adapters, weights)
    for name, tensor in averaged.items():
        stacked = torch.stack([adapter[name] for adapter in adapters])
        assert (stacked.amin(0) - 1e-12 <= tensor).all() and (
            tensor <= stacked.amax(0) + 1e-12
        ).all()
        torch.testing.assert_close(tensor, mean(adapters[::-1], weights[::-1])[name])
        torch.testing.assert_close(
            tensor, mean(adapters, [0.3 * weight for weight in weights])[name]
        )
        torch.testing.assert_close(
            mean([adapters[0]] * len(weights), weights)[name], adapters[0][name]
        )


@given(seeds, counts)
def test_what_the_mean_adds_is_the_mean_of_what_each_adds_less_their_covariance(seed, weights):
    center, n = drawn(seed), len(weights)
    adapters = [drawn(seed + 1 + i, center, 0.1) for i in range(n)]
    averaged = mean(adapters, [1] * n)
    apart = [
        {name: tensor - averaged[name] for name, tensor in adapter.items()} for adapter in adapters
    ]
    products, covariance = (
        sum(each["lora_B"] @ each["lora_A"] for each in group) / n for group in (adapters, apart)
    )
    torch.testing.assert_close(averaged["lora_B"] @ averaged["lora_A"], products - covariance)


@given(seeds)
def test_the_cosine_is_1_of_the_same_a_whatever_b_and_near_0_of_strangers(seed):
    one, other = drawn(seed), drawn(seed + 1)
    assert cosine_of_a(one, one | {"lora_B": other["lora_B"]}) == pytest.approx(1)
    assert cosine_of_a(one, {name: -2 * tensor for name, tensor in one.items()}) == pytest.approx(
        -1
    )
    wide = [
        {"lora_A": torch.randn(40, 500, generator=torch.Generator().manual_seed(i % 2**32))}
        for i in (seed, seed + 1)
    ]
    assert abs(cosine_of_a(*wide)) < 0.05


def saved(folder: Path, seed=0, size=0.0, config=LoRAConfig(rank=3), model=None):
    """An adapter in a folder: that of one seed, or the first one moved by noise of this size."""
    model = trained(model or tiny(0, torch.float32), config, seed=0 if size else seed)
    with torch.no_grad():
        for tensor in lora.adapter_tensors(model).values() if size else ():
            tensor.add_(
                torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)), alpha=size
            )
    lora.save(model, folder, "its base", fingerprint(lora.base_tensors(model)))
    return folder


@pytest.fixture
def start(tmp_path):
    return saved(tmp_path / "start" / "adapter")


@pytest.fixture
def after(tmp_path):
    return saved(
        tmp_path / "after" / "adapter", seed=3, size=0.02, config=LoRAConfig(rank=3, dropout=0.1)
    )


def test_it_writes_an_adapter_that_loads_for_the_same_base_alone(tmp_path, start, after):
    run = RunFolder(tmp_path / "mean", {})
    folder = average(run, (start, after), (3, 1))
    first, last, averaged = (load_file(each / lora.WEIGHTS) for each in (start, after, folder))
    for name, tensor in averaged.items():
        torch.testing.assert_close(tensor, (3 * first[name] + last[name]) / 4)
    assert lora.read_config(folder) == lora.read_config(start)
    assert lora.base_dtype(folder) == lora.base_dtype(start) == "float32"
    assert lora.read_weights(folder)[1][lora.ADAPTER_FINGERPRINT] == fingerprint(averaged)
    assert run.finished and average(run, (start, after), (1, 1)) == folder  # at once
    assert load_file(folder / lora.WEIGHTS).keys() == averaged.keys()
    with pytest.raises(ValueError, match="another base"):
        lora.load(tiny(1, torch.float32), folder)


def test_one_file_that_names_the_base_is_enough_and_a_head_is_left_out_aloud(
    tmp_path, start, after, capsys
):
    halves = {name: tensor.bfloat16() for name, tensor in load_file(start / lora.WEIGHTS).items()}
    write_weights(start / lora.WEIGHTS, halves, {"format": "pt"})  # as the agent that ships
    write_weights(after / scalar_head.FILE, {"reward": torch.zeros(16)}, {})
    folder = average(RunFolder(tmp_path / "mean", {}), (start, after))
    assert str(after / scalar_head.FILE) in capsys.readouterr().out
    stored, metadata = lora.read_weights(folder)
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    assert metadata[lora.BASE_FINGERPRINT] == lora.read_weights(after)[1][lora.BASE_FINGERPRINT]
    assert not (folder / scalar_head.FILE).exists()


@pytest.mark.parametrize(
    "other, named",
    [
        ({"seed": 1}, "not trained from"),
        ({"config": LoRAConfig(rank=3, alpha=8)}, "alpha 8"),
        ({"model": tiny(0, torch.float32, layers=1)}, "14 tensors"),
        ({"seed": 3, "size": 0.02, "model": tiny(5, torch.float32)}, lora.BASE_FINGERPRINT),
    ],
)
def test_strangers_have_no_mean(tmp_path, start, other, named):
    given = (start, saved(tmp_path / "other", **other))
    with pytest.raises(ValueError, match=named) as error:
        average(RunFolder(tmp_path / "mean", {}), given)
    assert str(error.value).startswith(f"{tmp_path / 'other'}: ") and "\n" not in str(error.value)
    assert not (tmp_path / "mean").exists()


@pytest.mark.parametrize(
    "changed, says",
    [
        ({"metadata": {lora.BASE_DTYPE: "bfloat16"}}, "base_dtype is not that of"),
        ({"prefix": "not_"}, "not_A"),
        ({"dtype": torch.float8_e4m3fn}, "not floating point"),
        ({"factor": float("nan")}, "lora_.* not finite"),
    ],
)
def test_a_file_that_another_program_wrote_is_checked(start, after, changed, says):
    dtype = changed.get("dtype", torch.float32)
    tensors = {
        name.replace("lora_", changed.get("prefix", "lora_")): (
            tensor * changed.get("factor", 1)
        ).to(dtype)
        for name, tensor in load_file(after / lora.WEIGHTS).items()
    }
    save_file(tensors, after / lora.WEIGHTS, changed.get("metadata"))
    with pytest.raises(ValueError, match=says):
        checked([start, after])
