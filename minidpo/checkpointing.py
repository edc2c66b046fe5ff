"""11. Gradient checkpointing: forget what a block computed, compute it again on the way back.

Saves all that a block keeps for backward but its input, C numbers a token: with LoRA at C = 256 and 4 blocks
25,032 numbers a token become 1,345. Costs the blocks' forward pass once more: half a step of LoRA, a third of
full training. Backward must compute what forward did, so the random state is restored for dropout, and a
key/value cache, which would be written twice, is refused: then the gradients are the same bit for bit.
Chen et al. 2016, arXiv:1604.06174. Differs from the paper: every block is a segment. Next: 13 packing.
"""

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minidpo.kvcache import KVCache
from minidpo.qwen2 import Qwen2


def recompute(block: nn.Module, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None,
              cache: KVCache | None, layer: int) -> Tensor:
    """block(x, ...), of which backward keeps x (B,T,C) alone."""
    assert cache is None, "a block that writes a key/value cache cannot run twice: sample without gradients"
    # not the reentrant kind: that one gives no gradient at all where x needs none, as before the first LoRA
    return checkpoint(block, x, cos, sin, mask, None, layer, use_reentrant=False)


def switch(model: Qwen2, on: bool) -> None:
    """Recompute the blocks of this model in backward, or keep what they computed."""
    model.recompute = recompute if on else None
