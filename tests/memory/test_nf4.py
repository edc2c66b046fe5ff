"""NF4: the published levels, the nearest of them, and matrices that are expanded one at a time."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import minidpo.model.head
from minidpo.memory import nf4
from minidpo.memory.frozen import FrozenLinear, FrozenTable
from minidpo.memory.nf4 import (
    BLOCK,
    GROUP,
    Int8Matrix,
    NF4Matrix,
    code_book,
    dequantise,
    dequantise_scales,
    nearest,
    quantise_scales,
    two_a_byte,
)
from minidpo.model.head import token_logps

BOOK = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
]
seeds = st.integers(0, 2**32 - 1)
shapes = st.tuples(st.integers(1, 9), st.integers(1, 700))
both = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def wild(seed, shape, sizes=(0.0, 1e-30, 1e-6, 1.0, 1e6)):
    """Weights of which each run of 50 has a size of its own: blocks of zeros, tiny ones, outliers."""
    weight = torch.randn(shape, generator=generator(seed)).view(-1)
    size = torch.tensor(sizes)[
        torch.randint(len(sizes), (len(weight) // 50 + 1,), generator=generator(seed))
    ]
    return (weight * size.repeat_interleave(50)[: len(weight)]).view(shape)


def quantised(kind, weight, dtype=torch.float32):
    matrix = kind(weight.shape, dtype)
    matrix.load_state_dict(kind.encode(weight))
    return matrix


def same(buffers, others):
    return buffers.keys() == others.keys() and all(
        torch.equal(buffers[key], others[key]) for key in buffers
    )


class Large(TorchDispatchMode):
    """How many tensors of at least so many numbers were ever alive at once, of those made under it."""

    def __init__(self, numbers):
        super().__init__()
        self.numbers, self.alive, self.peak, self.made = numbers, {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {
            StorageWeakRef(t.untyped_storage())
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.numel() >= self.numbers:
                storage = StorageWeakRef(tensor.untyped_storage())
                # made here, and no view of an input
                if storage not in known and storage not in self.alive:
                    self.alive[storage], self.made = True, self.made + 1
        self.alive = {storage: True for storage in self.alive if not storage.expired()}
        self.peak = max(self.peak, len(self.alive))
        return out


# law 18: the levels


def test_the_levels_are_the_published_ones_bit_for_bit():
    assert code_book().dtype == torch.float32 and code_book().tolist() == BOOK


@given(seeds, shapes)
def test_quantising_again_changes_nothing(seed, shape):
    """Double quantisation included: with the paper's scales, each pass would move the mean."""
    first = quantised(NF4Matrix, wild(seed, shape))
    assert same(NF4Matrix.encode(first.dense()), dict(first.named_buffers()))


def test_a_block_too_small_for_its_groups_scale_becomes_zeros_with_the_codes_of_zeros():
    """1e-6 of the largest: sqrt(1e-6) · 255 = 0.255 rounds to 0, and so does all below (1/510)² = 3.8e-6."""
    weight = torch.ones(4, BLOCK) * torch.tensor([1.0, 1e-6, 3.7e-6, 4e-6])[:, None]
    matrix = quantised(NF4Matrix, weight)
    assert matrix.scales.tolist() == [255, 0, 0, 1]
    assert not matrix.dense()[1:3].any() and matrix.dense()[3].all()
    assert (matrix.codes[1:3] == 0x77).all()


def test_the_first_of_two_codes_is_in_the_upper_half_of_the_byte():
    assert two_a_byte(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)).tolist() == [[0x12, 0xF0]]
    packed = torch.tensor([[0x0F] + 31 * [0x77]], dtype=torch.uint8)
    dense = dequantise(
        packed, torch.tensor([255], dtype=torch.uint8), torch.tensor([3.0]), torch.float32
    )
    assert dense[0, :3].tolist() == [-3.0, 3.0, 0.0]


# double quantisation


@given(seeds, st.integers(1, 600))
def test_double_quantisation_is_within_the_bound_that_it_states(seed, n):
    absmax = 10.0 ** -(8 * torch.rand(n, generator=generator(seed)))
    scales, largest = quantise_scales(absmax)
    assert scales.shape == (n,) and largest.shape == (-(-n // GROUP),)
    top = largest.double().repeat_interleave(GROUP)[:n]
    bound = top * ((absmax / top).sqrt() + 1 / 1020) / 255
    again = dequantise_scales(scales, largest)
    assert ((again - absmax).abs() <= bound * (1 + 1e-4)).all()  # sqrt(), too, is rounded
    for part, most in zip(absmax.split(GROUP), largest):
        assert part.max() == most
    at = absmax.argmax()
    assert again[at] == absmax[at]


# matrices


@given(seeds, shapes)
def test_a_matrix_of_any_size_is_its_blocks_and_the_filling_does_not_show(seed, shape):
    weight = torch.randn(shape, generator=generator(seed))
    matrix = quantised(NF4Matrix, weight)
    filled = F.pad(weight.view(-1), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    codes, absmax = nearest(filled)
    absmax = dequantise_scales(*quantise_scales(absmax))
    wanted = (code_book()[codes.int()] * absmax[:, None]).view(-1)[: weight.numel()].view(shape)
    assert matrix.dense().shape == shape and torch.equal(matrix.dense(), wanted)
    assert torch.equal(matrix.codes, two_a_byte(codes))
    assert len(matrix) == shape[0] and matrix.numel() == weight.numel()
    assert matrix.device == weight.device


@both
@pytest.mark.parametrize("tile", [BLOCK, 3 * BLOCK])
def test_in_tiles_the_bits_are_those_of_all_at_once(tile, dtype, monkeypatch):
    weight = wild(0, (37, 1001)).to(dtype)
    whole = [quantised(kind, weight, dtype) for kind in (NF4Matrix, Int8Matrix)]
    dense = [matrix.dense() for matrix in whole]
    monkeypatch.setattr(nf4, "TILE", tile)
    monkeypatch.setattr(minidpo.model.head, "TILE", tile)
    for matrix, before in zip(whole, dense):
        assert same(type(matrix).encode(weight), dict(matrix.named_buffers()))
        assert torch.equal(matrix.dense(), before)


def test_quantising_holds_no_second_copy_of_the_codes(monkeypatch):
    """Of tensors as large as the codes there is one, the codes: a list of pieces would have to be joined."""
    monkeypatch.setattr(nf4, "TILE", 2**12)
    weight = torch.randn(256, 1024, generator=generator())
    for kind, bytes_of_codes in ((NF4Matrix, weight.numel() // 2), (Int8Matrix, weight.numel())):
        with Large(bytes_of_codes // 2) as large:
            kind.encode(weight)
        assert large.peak == large.made == 1


INTERPRETED = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
sys.path[:0] = sys.argv[1:2]
import torch
from minidpo.memory import nf4, nf4_cuda
for shape in ((3, 150), (257, 131)):
    matrix = nf4.NF4Matrix(shape, torch.float32)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    matrix.load_state_dict(nf4.NF4Matrix.encode(weight))
    given = matrix.codes, matrix.scales, matrix.largest, nf4.tables(matrix.device)[0]
    flat = nf4_cuda.expand(*given, torch.float32).view(-1)[:matrix.numel()]
    assert torch.equal(flat.view(shape), matrix.dense()), shape
"""


def test_the_kernel_of_a_gpu_writes_the_bits_of_the_tiles():
    """Run by Triton's interpreter on a CPU; on a GPU by tests/test_cuda.py."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, str(Path(__file__).parents[2])],
        text=True,
        stderr=subprocess.PIPE,
    )
    assert done.returncode == 0, done.stderr


@both
def test_bitsandbytes_makes_the_same_of_the_same_weights(dtype):
    """Without double quantisation, where theirs is the paper's. Between two levels rounding may decide."""
    functional = pytest.importorskip("bitsandbytes").functional
    weight = torch.randn(96, 256, generator=generator()).to(dtype)
    theirs, state = functional.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
    codes, absmax = nearest(weight.float().view(-1, BLOCK))
    assert torch.equal(state.absmax, absmax)
    assert (two_a_byte(codes).view(-1) == theirs.view(-1)).double().mean() > 0.999
    ours = (code_book()[codes.int()] * absmax[:, None]).to(dtype).view_as(weight)
    agree = (functional.dequantize_4bit(theirs, state) == ours).double().mean()
    assert agree > 0.999


# 8 bits


@given(seeds, shapes)
def test_8_bits_are_within_half_a_step_of_the_row_and_keep_its_largest(seed, shape):
    weight = wild(seed, shape)
    matrix = quantised(Int8Matrix, weight)
    dense, step = matrix.dense().double(), matrix.scales.double()[:, None]
    assert ((dense - weight).abs() <= step * (0.5 + 1e-5)).all()
    torch.testing.assert_close(
        dense.abs().amax(1), weight.double().abs().amax(1), rtol=1e-6, atol=0
    )
    assert (matrix.codes.int().abs() <= 127).all()


@both
def test_rows_slices_and_ids_are_those_of_the_whole(dtype):
    matrix = quantised(Int8Matrix, torch.randn(11, 6, generator=generator()), dtype)
    dense, ids = matrix.dense(), torch.tensor([[3, 1, 4], [1, 5, 10]])
    assert dense.dtype == dtype and dense.shape == (11, 6)
    assert torch.equal(matrix[2:7], dense[2:7]) and torch.equal(matrix[9:99], dense[9:])
    assert torch.equal(matrix[ids], dense[ids]) and torch.equal(
        FrozenTable(matrix)(ids), dense[ids]
    )
    assert torch.equal(dense, (matrix.codes * matrix.scales[:, None]).to(dtype))


def test_a_head_in_8_bits_is_never_there_as_a_whole(monkeypatch):
    V, C = 512, 64
    monkeypatch.setattr(minidpo.model.head, "TILE", V * C // 8)
    matrix = quantised(Int8Matrix, torch.randn(V, C, generator=generator()), torch.bfloat16)
    hidden = torch.randn(3, C, generator=generator()).bfloat16().requires_grad_()
    with Large(V * C // 4) as large:
        token_logps(hidden, matrix, torch.tensor([1, 300, 511])).sum().backward()
    assert large.made == 0 and hidden.grad.any()
    # of tiles there are two, the last one and the next, which is cast
    with Large(V * C // 8) as large:
        token_logps(hidden, matrix, torch.tensor([1, 300, 511])).sum().backward()
    assert large.made >= 16 and large.peak <= 3


# the product


def linear(dtype, bias=True, out=48, width=70):
    matrix = quantised(NF4Matrix, torch.randn(out, width, generator=generator()), dtype)
    bias = (
        torch.nn.Parameter(torch.randn(out, generator=generator()).to(dtype), False)
        if bias
        else None
    )
    return FrozenLinear(matrix, bias)


@both
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (2, 3), (1, 1), (2, 3, 4)])
def test_the_product_and_its_gradient_are_those_of_the_dense_matrix_bit_for_bit(dtype, bias, shape):
    layer = linear(dtype, bias)
    x = torch.randn(*shape, 70, generator=generator(1)).to(dtype)
    upstream = torch.randn(*shape, 48, generator=generator(2)).to(dtype)
    results = []
    for product in (layer, lambda x: F.linear(x, layer.weight.dense(), layer.bias)):
        leaf = x.clone().requires_grad_()
        y = product(leaf)
        y.backward(upstream)
        results += [y.detach(), leaf.grad]
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])
    assert results[0].dtype == dtype and (layer.out_features, layer.in_features) == (48, 70)


def test_backward_keeps_neither_the_matrix_nor_what_it_was_multiplied_with():
    layer, kept = linear(torch.float32), []
    x = torch.randn(3, 70, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    assert kept == []
