"""Packing: the same matrix products on a CPU in about half the time.

oneDNN reorders each weight once into the layout that its kernels read. A packed model can act, but neither
be trained nor saved. Only a model on a CPU is packed, in fp32, or in bf16 where the processor can. Of a bf16
model only the products are in bf16, added up in fp32; norms, attention and cache are in fp32. `int8` is for
one conversation at a time.

A row of a packed product has the same bits however many rows are beside it (in bf16 with AMX up to 32; the
sampler checks), as PyTorch's own product has not. SiLU is fused into the gate's product for the same reason:
PyTorch's own rounds SIMD vectors and their remainder differently; the number of rows moves that remainder.
"""

import torch
from torch import Tensor, nn

from minidpo.memory.machine import multiplies_bfloat16
from minidpo.model.decoder import Transformer

# weights of a model that is slower packed, in fp32 with one row: the shipped one wrote 48 tokens in 933 ms, not
# 487, on one thread of an AMD EPYC, and in 1796, not 1054, on two (fastest of 20 and of 6)
SMALL = 20_000_000


class Packed(nn.Module):
    """nn.Linear with a packed weight, x (...,in) -> (...,out); `activation` "swish" (SiLU) is fused in."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str = "none"):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        self.bias = None if bias is None else bias.detach()  # no parameter, so it keeps its dtype
        self.activation, self.dtype = activation, weight.dtype

    def forward(self, x: Tensor) -> Tensor:
        assert x.dim() >= 2, f"a packed product takes rows (...,in), got shape {tuple(x.shape)}"
        single = x.numel() == x.shape[-1]
        if single:  # oneDNN sums a single row in another order, so the row is multiplied twice
            x = x.repeat(2, *[1] * (x.dim() - 1))
        y = torch.ops.mkldnn._linear_pointwise(
            x.to(self.dtype), self.weight, self.bias, self.activation, [], ""
        )
        return (y[:1] if single else y).float()


def can_pack(weight) -> bool:
    """Whether this PyTorch on this machine can pack this weight: no quantised one, for example."""
    if not isinstance(weight, Tensor) or not weight.is_cpu:
        return False
    fast = weight.dtype == torch.bfloat16 and multiplies_bfloat16()
    return torch.backends.mkldnn.is_available() and (fast or weight.dtype == torch.float32)


def saves_time(model: Transformer, pages: int) -> bool:
    """Whether the model is faster packed with so many pages. One page has more rows than one, too: those of
    its guesses."""
    weights = sum(tensor.numel() for tensor in model.state_dict().values())
    return pages > 1 or model.head_weight.dtype == torch.bfloat16 or weights > SMALL


def pack(model: Transformer) -> Transformer:
    """The model itself, with its linear layers and its head packed if they can be."""
    if model.packed_head is not None:  # packed, or in int8
        return model
    adapted = any(".lora_" in name for name, _ in model.named_parameters())
    products = (module.weight for module in model.model.modules() if hasattr(module, "in_features"))
    if adapted or not can_pack(model.head_weight) or not all(map(can_pack, products)):
        return model
    model.packed_head = Packed(model.head_weight, None)
    # only names: a list of modules would keep all weights in memory to the end, beside the packed ones
    for name in [name for name, _ in model.model.named_modules()]:
        module = model.model.get_submodule(name)
        if type(module) is nn.Linear:
            activation = "swish" if name.endswith("gate_proj") else "none"
            model.model.set_submodule(name, Packed(module.weight, module.bias, activation))
        elif type(module) is nn.SiLU:  # fused into the gate's product
            model.model.set_submodule(name, nn.Identity())
    model.float()  # what is not a product
    return model
