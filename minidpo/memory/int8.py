"""Weights in 8 bits, for one conversation at a time on a CPU.

A step of one row takes the time in which its weights are read: a byte each is a quarter of float32. The
product is PyTorch's own weight-only kernel: it takes inputs in bfloat16, adds up in float32 and rounds the
sum to bfloat16. Its time grows with the rows, so a prompt takes a plain product of the codes written out, and
many pages are better `packing`'s. Each row of a matrix has
a scale (`nf4.Int8Matrix`). An adapter stays beside the codes, in float32, because an update is smaller than
the step between two codes. The embedding, norms, attention and cache are in float32.

A row of the product has the same bits whatever is beside it, the adapter's and SiLU's have not: the sampler
of one row lets only its own text decide what is read together.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from minidpo.memory.frozen import FrozenLinear
from minidpo.memory.machine import multiplies_bfloat16
from minidpo.memory.nf4 import Int8Matrix
from minidpo.memory.quantised import expand
from minidpo.model.decoder import Transformer

STEP = 16  # inputs at a time in the kernel, which reads past the end of a row of another length
MANY = 64  # rows from which on codes are written out; no step has so many


class Int8Linear(nn.Module):
    """nn.Linear with its weight in 8 bits, x (...,in) -> (...,out) in float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        codes = Int8Matrix.encode(weight.detach())
        # no buffers, so the scales keep their dtype
        self.codes, self.scales = codes["codes"], codes["scales"]
        self.bias = None if bias is None else bias.detach().float()
        # the kernel wants its scales in bfloat16, which would shift a whole row
        self.ones = torch.ones(len(weight), dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) >= MANY:  # codes are exact in either dtype
            dtype = torch.bfloat16 if multiplies_bfloat16() else torch.float32
            y = F.linear(rows.to(dtype), self.codes.to(dtype))
        else:
            y = torch._weight_int8pack_mm(rows.bfloat16(), self.codes, self.ones)
        y = y.float().mul_(self.scales)
        if self.bias is not None:
            y += self.bias
        return y.view(*x.shape[:-1], -1)


def require_int8(widths: set[int], cuda: bool, pages: int) -> None:
    """Raises ValueError where weights in int8 do not act. widths: of the products' inputs."""
    asked = "--machine.act-dtype int8"
    if cuda:
        raise ValueError(f"{asked} is for a CPU: use bfloat16 on a GPU, or --machine.device cpu")
    if not hasattr(torch, "_weight_int8pack_mm"):
        raise ValueError(f"PyTorch {torch.__version__} has no product for {asked}: use float32")
    if pages > 1:
        raise ValueError(
            f"{asked} is for one conversation at a time, and {pages} pages would play: use "
            "--machine.pages 1, or float32"
        )
    if odd := [width for width in sorted(widths) if width % STEP]:
        raise ValueError(
            f"{asked} takes matrices whose width is a multiple of {STEP}, and one is {odd[0]} wide: "
            "use float32"
        )


@torch.no_grad()
def to_int8(model: Transformer) -> None:
    """Put the products' weights into 8 bits: of the blocks, beside their adapter if they have one, and of the
    head. All else is written out in float32."""
    # only names: a list of modules would keep all weights in memory to the end
    names = [
        name
        for name, module in model.model.named_modules()
        if isinstance(module, (nn.Linear, FrozenLinear))
    ]
    for name in tqdm(names, "8 bits", unit="matrix", delay=2, leave=False):
        module = model.model.get_submodule(name)
        weight = module.weight if isinstance(module.weight, Tensor) else module.weight.dense()
        model.model.set_submodule(name, Int8Linear(weight, module.bias))
    expand(model)
    model.packed_head = Int8Linear(model.head_weight, None)
    model.float()
