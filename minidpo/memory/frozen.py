"""Frozen matrices in few bits: linear maps and tables whose weights are written out for each use.

`memory/nf4` rounds a checkpoint's weights to codes, `memory/ggml_matrix` holds the codes of a GGUF file. Of
the linear maps, one at a time is written out, in forward and again in backward; tables are read by rows.
"""

from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from minidpo.model.head import tiles
from minidpo.system.errors import first_line


class Matrix(nn.Module):
    """A quantised matrix of shape (rows, columns). A subclass has `__getitem__`, rows in `dtype`, or its own
    `dense`; if it is made of plain weights, also `encode`."""

    codes: Tensor

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype):
        super().__init__()
        self.shape, self.dtype = tuple(shape), dtype

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def __len__(self) -> int:
        return self.shape[0]

    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    def dense(self) -> Tensor:
        """All weights, (rows, columns) in `dtype`."""
        whole = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for first, rows in tiles(self):
            whole[first : first + len(rows)] = rows
        return whole


class _Product(torch.autograd.Function):
    """x Wᵀ + bias. Backward expands W again and needs no x, because W is frozen: neither is kept."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return F.linear(x, weight.dense(), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return grad @ ctx.weight.dense(), None, None


class FrozenLinear(nn.Module):
    """nn.Linear with a matrix in few bits: x (...,in) -> (...,out). Neither matrix nor bias trains."""

    def __init__(self, weight: Matrix, bias: nn.Parameter | None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self.weight, self.bias)


class FrozenTable(nn.Module):
    """An embedding table or a head in few bits: ids (...) -> (...,C); as a head it is read by rows."""

    def __init__(self, weight: Matrix):
        super().__init__()
        self.weight = weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


_kernels: dict[tuple, Callable | None] = {}  # by function and device, for `one_kernel`


def one_kernel(function: Callable, *trial, compiler: Callable | None = None) -> Callable | None:
    """`function` as one kernel without intermediate tensors: made by `compiler`, or it is one already. None
    on a CPU and, with a printed line, if that fails. It is tried once with the arguments `trial`: the first
    is a tensor on the device, and the tensors' first dimension may differ later."""
    device, kernel = trial[0].device, function
    if device.type != "cuda" or not find_spec("triton"):
        return None
    if (function, device) in _kernels:
        return _kernels[function, device]
    try:
        if compiler is not None:
            # other sizes would make it slow: 9 times in NF4
            for tensor in filter(torch.is_tensor, trial):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
            kernel = compiler(function)
        kernel(*trial)
    except torch.OutOfMemoryError:  # what comes in its place would need more
        raise
    # many types: Triton needs a driver, a C compiler and Python's headers
    except Exception as error:
        print(
            f"PyTorch can't compile for {device}: weights take several kernels, slower: "
            f"{first_line(error)}"
        )
        kernel = None
    _kernels[function, device] = kernel
    return kernel
