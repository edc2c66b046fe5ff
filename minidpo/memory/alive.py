"""32. Alive: how many bytes a computation has at once, without having them.

PyTorch's `meta` device runs any code on tensors that have shapes and no data. Counting what is made there,
and what dies, tells what the same code will take on a real device: on a CPU the count is the same to the
byte. Attention alone is put in by hand, because without a device there is no fused kernel. Next: 33 budget.
"""

import weakref

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """Counts the bytes of tensors made inside: those alive `now`, and the `peak`."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in tree_leaves((args, kwargs)):  # not made inside: a view of it is nothing new either
            self._meet(tensor, 0)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            self._meet(tensor, 1)
        self.peak = max(self.peak, self.now)
        return result

    def _meet(self, tensor, counts: int) -> None:
        if isinstance(tensor, Tensor):
            storage = tensor.untyped_storage()  # views share it, and it goes with the last of them
            if storage._cdata not in self.known:
                self.known.add(storage._cdata)
                size = counts * storage.nbytes()
                self.now += size
                weakref.finalize(storage, self._freed, storage._cdata, size)

    def _freed(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


class _Attention(torch.autograd.Function):
    """What a fused attention kernel allocates and keeps: inputs, output, a number a query and head."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        out, sums = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, mask, out, sums)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None


class FusedAttention(TorchFunctionMode):
    """Puts that in the place of PyTorch's attention, which has no fused kernel for tensors without data."""

    def __init__(self, cuda: bool):
        super().__init__()
        self.cuda = cuda

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        (q, k, v), mask = args, kwargs["attn_mask"]
        if self.cuda and (mask is not None or q.itemsize > 2):  # as chapter 5 does there
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        return _Attention.apply(q, k, v, mask)
