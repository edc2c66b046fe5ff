"""Numbers that are not finite neither leave in a file nor come in from one."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from minidpo.system.tensors import FLOATS, open_weights, read_weights, require_finite, write_weights


@given(
    st.sampled_from(FLOATS),
    st.integers(1, 200),
    st.integers(0, 199),
    st.sampled_from([math.nan, math.inf, -math.inf]),
)
def test_one_odd_number_anywhere_is_found_and_the_largest_one_is_none(dtype, size, at, odd):
    numbers = torch.full((size,), torch.finfo(dtype).max, dtype=dtype)
    require_finite("file", "a", torch.empty(0, dtype=dtype), numbers, -numbers)
    numbers[at % size] = odd
    with pytest.raises(ValueError, match="file: tensor a "):
        require_finite("file", "a", numbers.requires_grad_())


def test_a_file_with_one_is_neither_written_nor_read(tmp_path):
    tensors = {"a": torch.zeros(3, dtype=torch.int32), "b": torch.tensor([[0.0, math.nan]])}
    path = tmp_path / "x.safetensors"
    with pytest.raises(ValueError, match="x.safetensors: tensor b "):
        write_weights(path, tensors, {})
    assert not list(tmp_path.iterdir())
    save_file(tensors, path)
    with pytest.raises(ValueError, match="x.safetensors: tensor b "):
        read_weights(path)


def test_a_pointer_of_git_lfs_is_called_one(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(ValueError, match="model.safetensors: .*git lfs pull"), open_weights(path):
        pass
