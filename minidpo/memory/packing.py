"""13. Packing: the same matrix products, faster on a CPU.

Saves about half the time that a policy takes to act (oneDNN is given each weight once, in the order in which
its kernels read it), costs the weights themselves: what is packed can act, but neither be trained nor saved.
A row of a packed product is the same to the last bit however many rows there are, which PyTorch's own does
not promise. SiLU is applied where the gate's product is written: PyTorch's own rounds whole SIMD vectors and
the remainder of a thread's share differently, and the number of rows decides where that remainder lies. fp32
on a CPU only; elsewhere the model stays as it is. Next: 14 streaming.
"""

import torch
from torch import Tensor, nn

from minidpo.model.decoder import Qwen2


class Packed(nn.Module):
    """What nn.Linear computes, from a packed copy of its weight: x (...,in) -> (...,out).

    `then` is applied to the result where it is written: "none", or "swish", which is SiLU.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, then: str = "none"):
        super().__init__()
        self.weight, self.bias = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None), bias
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        single = x.numel() == x.shape[-1]
        x = x.repeat(2, *[1] * (x.dim() - 1)) if single else x  # for a single row oneDNN adds up in another order
        y = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, self.then, [], "")
        return y[:1] if single else y


def can_pack(weight) -> bool:
    """Whether this weight can be packed, with this PyTorch on this machine."""
    if not isinstance(weight, Tensor):
        return False  # quantised: it has to be written out first (chapter 14)
    there = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    return there and weight.device.type == "cpu" and weight.dtype == torch.float32


def pack(model: Qwen2) -> Qwen2:
    """The model itself, with all linear layers and the head packed where that can be done."""
    if can_pack(model.head_weight):
        model.packed_head = Packed(model.head_weight, None)
        for parent in list(model.model.modules()):
            for name, child in parent.named_children():
                if type(child) is nn.Linear:
                    setattr(parent, name, Packed(child.weight, child.bias,
                                                 "swish" if name == "gate_proj" else "none"))
                elif type(child) is nn.SiLU:  # done where the gate's product is written
                    setattr(parent, name, nn.Identity())
    return model
