"""11. Gradient checkpointing: forget what a block computed, compute it again on the way back.

Saves all that a block keeps for backward but its input, C numbers a token: with LoRA at C = 256 and 4 blocks
15,400 numbers a token become 1,345, and of a 7B's 12.4 GiB for 2,048 tokens remain 0.4. Costs the blocks'
forward pass once more: half a step of LoRA, a third of full training. Backward must compute what forward
did, so the random state is restored for dropout, and a key/value cache, which would be written twice, is
refused: then, on a CPU, the gradients are the same bit for bit.
The inputs can also wait in the host's memory: that saves the L · C numbers a token that were left, and costs
two copies of them in the GPU's queue, for which the host does not wait.
Chen et al. 2016, arXiv:1604.06174. Differs from the paper: every block is a segment. Next: 12 adamw8bit.
"""

from torch import Tensor, empty_like, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from minidpo.model.decoder import Qwen2
from minidpo.model.kvcache import KVCache


def recompute(block: nn.Module, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None,
              cache: KVCache | None, layer: int) -> Tensor:
    """block(x, ...), of which backward keeps x (B,T,C) alone."""
    assert cache is None, "a block that writes a key/value cache cannot run twice: sample without gradients"
    # not the reentrant kind: that one gives no gradient at all where x needs none, as before the first LoRA
    return checkpoint(block, x, cos, sin, mask, None, layer, use_reentrant=False)


def recompute_from_host(block: nn.Module, x: Tensor, *arguments) -> Tensor:
    """The same, but x waits in pinned host memory until backward asks for it. For a model on a GPU."""
    address = x.data_ptr()

    def to_host(saved: Tensor) -> tuple[Tensor, Tensor | None]:
        if saved.data_ptr() != address:
            return saved, None  # angles and mask, which all blocks share
        # A copy to or from pinned memory does not block the host: it is one more thing in the GPU's queue.
        host = empty_like(saved, device="cpu", pin_memory=saved.is_cuda)
        return host.copy_(saved, non_blocking=True), saved.new_empty(0)

    def to_device(kept: tuple[Tensor, Tensor | None]) -> Tensor:
        saved, home = kept
        return saved if home is None else saved.to(home.device, non_blocking=True)

    with saved_tensors_hooks(to_host, to_device):
        return recompute(block, x, *arguments)


def switch(model: Qwen2, on: bool, offload: bool = False) -> None:
    """Recompute the blocks of this model in backward, or keep what they computed."""
    model.recompute = (recompute_from_host if offload else recompute) if on else None
