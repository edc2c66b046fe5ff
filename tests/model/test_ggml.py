"""Every block format is written out as the gguf package does it, bit for bit."""

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minidpo.model import ggml


@pytest.mark.parametrize("name", ggml.FORMATS)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 4), blocks=st.integers(1, 3))
def test_any_bytes_mean_the_same_numbers(name, seed, rows, blocks):
    size = blocks * ggml.FORMATS[name].bytes
    stored = np.random.default_rng(seed).integers(0, 256, (rows, size), dtype=np.uint8)
    with np.errstate(all="ignore"):  # scales may be infinite or no number
        theirs = gguf.dequantize(stored, gguf.GGMLQuantizationType[name])
    ours = ggml.decode(name, torch.from_numpy(stored))
    assert ours.shape == (rows, blocks * ggml.FORMATS[name].weights) and ours.dtype == torch.float32
    np.testing.assert_array_equal(ours.numpy(), theirs)
    finite = bool(ours.isfinite().all())
    assert ggml.is_finite(ggml.FORMATS[name], torch.from_numpy(stored)) == finite


def test_bfloat16_is_the_upper_half_of_a_float():
    numbers = torch.randn(3, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(ggml.decode("BF16", numbers.view(torch.uint8)), numbers.float())
