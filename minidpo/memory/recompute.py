"""Gradient checkpointing: keep a block's input, drop what it computed, compute that again in backward.

Saves all that a block keeps for backward but its input, C numbers a token: of a 7B's 12.4 GiB for 2,048
tokens, 0.4 remain. Costs the blocks' forward pass once more: half a step of LoRA, a third of full training.
On a CPU the gradients are the same bit for bit, dropout's too; a key/value cache, which would be written
twice, is refused. The inputs can also wait in the host's memory, for two copies of them.
Chen et al. 2016, arXiv:1604.06174. Differs from the paper: every block is a segment.
"""

from torch import Tensor, empty_like, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from minidpo.model.attention import Mask
from minidpo.model.decoder import Transformer
from minidpo.model.kvcache import KVCache


def recompute(
    block: nn.Module,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Mask,
    cache: KVCache | None,
    layer: int,
) -> Tensor:
    """block(x, ...), of which only x (B,T,C) is kept for backward."""
    # a path's cache (`memory/depth_first`) does not keep what is written the second time
    assert not isinstance(cache, KVCache), "a block that writes a key/value cache cannot run twice"
    # the reentrant kind gives no gradient if x needs none, as the input of the first block with LoRA
    return checkpoint(block, x, cos, sin, mask, cache, layer, use_reentrant=False)


def recompute_from_host(block: nn.Module, x: Tensor, *arguments) -> Tensor:
    """As `recompute`, but x waits in pinned host memory until backward needs it. For a model on a GPU."""
    address, device = x.data_ptr(), x.device

    def to_host(saved: Tensor) -> Tensor:
        if saved.data_ptr() != address:
            return saved  # angles and mask, which all blocks share
        # a copy to or from pinned memory is queued on the GPU and does not block the host
        return empty_like(saved, device="cpu", pin_memory=saved.is_cuda).copy_(
            saved, non_blocking=True
        )

    with saved_tensors_hooks(to_host, lambda saved: saved.to(device, non_blocking=True)):
        return recompute(block, x, *arguments)


def switch(model: Transformer, on: bool, offload: bool = False) -> None:
    """Turn recomputing the model's blocks on or off; with `offload`, their inputs wait on the host."""
    model.recompute = (recompute_from_host if offload else recompute) if on else None
