"""Attention of new tokens over all that they see: by PyTorch's kernel or, on a CPU, in blocks.

In a tree of episodes a token sees its ancestors only, and most of the T x T scores are masked. PyTorch's
kernel for a CPU computes them all. In blocks, SIZE queries are multiplied only with the keys that at least
one of them sees: a tree of 2,000 tokens takes a quarter of the time. As in FlashAttention, backward makes the
weights again, so that only q, k and v are kept (Dao et al. 2022, arXiv:2205.14135). Differs from the paper: a
block has all its keys at once, so that softmax is PyTorch's own, and in bf16 a score is rounded to bf16.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

SIZE = 128  # queries in a block; 64 to 256 take about as long
# With a mask, cuDNN's backward on an H100 or H200 returns NaN for some lengths once a row's scores are far
# below 0 (PyTorch 2.11 to 2.13, github.com/pytorch/pytorch/issues/196678): a step of DPO would end there. So
# this process goes without it, and PyTorch takes one of its other kernels. On a CPU this changes nothing.
torch.backends.cuda.enable_cudnn_sdp(False)


class QueryBlock(NamedTuple):
    """Queries that stand side by side, and the keys that at least one of them sees."""

    at_queries: tuple  # where they are in (B,K,T,...)
    at_keys: tuple  # in (B,K,S,D)
    shared: int  # how many of these keys, counted from the first, every query sees
    added: Tensor  # (queries, other keys): 0, or -inf where a query does not see a key


Mask = Tensor | list[QueryBlock] | None  # for `attend`; None: a token sees itself and all before it


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """softmax(q·kᵀ/√D + mask)·v, (B,H,T,D), for q (B,H,T,D), k and v (B,K,S,D). Vaswani et al. 2017, Eq. 1.

    Query head h reads key/value head h // (H/K). mask: what `prepared` returns.
    """
    (B, H, T, D), K = q.shape, k.shape[1]
    if isinstance(mask, list):
        q = (q * D**-0.5).view(B, K, H // K, T, D).transpose(2, 3)  # (B,K,T,G,D): heads of one key
        y = _InBlocks.apply(q.contiguous(), k.contiguous(), v.contiguous(), mask)
        return y.transpose(2, 3).reshape(B, H, T, D)
    if H != K and q.is_cuda and (mask is not None or q.itemsize > 2):
        # CUDA's kernel for masks and for fp32 has no grouped heads; SDPA would keep all T x S weights
        k, v = k.repeat_interleave(H // K, dim=1), v.repeat_interleave(H // K, dim=1)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=k.shape[1] != H
    )


def prepared(mask: Tensor | None, like: Tensor, in_blocks: bool) -> Mask:
    """The mask that `attend` takes, for hidden states `like` (B,T,C).

    mask (B,T,S) bool, True = the query may read the key; None: causal. On a CPU, if `in_blocks` allows it,
    these are blocks, except for causal attention in fp32, which PyTorch's kernel computes as fast.
    """
    if in_blocks and like.is_cpu and (mask is not None or like.dtype == torch.bfloat16):
        return query_blocks(mask, like)
    return None if mask is None else additive_mask(mask, like)


def query_blocks(mask: Tensor | None, like: Tensor) -> list[QueryBlock]:
    """The blocks of a mask (B,T,S), or of causal attention, for hidden states `like` (B,T,C).

    Every query must see a key.

    >>> mask = torch.tensor([[[True, False, False], [True, True, False], [True, False, True]]])
    >>> [block] = query_blocks(mask, torch.zeros(1, 3, 8))
    >>> block.at_keys[2], block.shared, block.added.tolist()
    (slice(0, 3, None), 1, [[-inf, -inf], [0.0, -inf], [-inf, 0.0]])
    """
    B, T, _ = like.shape
    parts = []
    for text in range(B if mask is not None else 1):
        for first in range(0, T, SIZE):
            queries = slice(first, min(first + SIZE, T))
            if mask is None:
                texts, keys, shared = slice(0, B), slice(0, queries.stop), first
                size = queries.stop - first
                sees = torch.ones(size, size, dtype=torch.bool, device=like.device).tril()
            else:
                texts, sees = slice(text, text + 1), mask[text, queries]
                assert sees.any(1).all(), "a query that sees no key has no softmax"
                keys = sees.any(0).nonzero()[:, 0]
                shared = int(sees[:, keys].all(0).cumprod(0).sum())
                sees = sees[:, keys[shared:]]
                if len(keys) == keys[-1] + 1:
                    keys = slice(0, len(keys))  # is not copied
            added = like.new_zeros(sees.shape).masked_fill_(~sees, -torch.inf)
            parts.append(
                QueryBlock((texts, slice(None), queries), (texts, slice(None), keys), shared, added)
            )
    return parts


class _InBlocks(torch.autograd.Function):
    """softmax(q·kᵀ + mask)·v, (B,K,T,G,D), for q (B,K,T,G,D), where G queries share a key; k, v (B,K,S,D)."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, parts: list[QueryBlock]) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.parts = parts
        y = torch.empty_like(q)
        for part in parts:
            queries = q[part.at_queries]
            weights = _weights(queries, k[part.at_keys], part)
            y[part.at_queries] = (weights @ v[part.at_keys]).view_as(queries)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        """P: the weights. dV = Pᵀ dO, dP = dO Vᵀ, dS = P ∘ (dP - rowsum(P ∘ dP)), dQ = dS K, dK = dSᵀ Q."""
        q, k, v = ctx.saved_tensors
        # a key adds up what all the blocks send it
        real = torch.promote_types(k.dtype, torch.float32)
        dq, dk, dv = (
            torch.empty_like(q),
            torch.zeros_like(k, dtype=real),
            torch.zeros_like(v, dtype=real),
        )
        for part in ctx.parts:
            queries, keys = q[part.at_queries], k[part.at_keys]
            do = grad[part.at_queries].flatten(2, 3)
            weights = _weights(queries, keys, part)
            dv[part.at_keys] += weights.mT @ do
            ds = torch._softmax_backward_data(do @ v[part.at_keys].mT, weights, -1, weights.dtype)
            dq[part.at_queries] = (ds @ keys).view_as(queries)
            dk[part.at_keys] += ds.mT @ queries.flatten(2, 3)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None


def _weights(q: Tensor, keys: Tensor, part: QueryBlock) -> Tensor:
    """How much each query (B,K,n,G,D) of a block takes of each key (B,K,m,D), (B,K,n·G,m)."""
    scores = q.flatten(2, 3) @ keys.mT
    scores.view(*q.shape[:4], -1)[..., part.shared :] += part.added[:, None]
    return scores.softmax(-1)


def additive_mask(mask: Tensor, like: Tensor) -> Tensor:
    """A bool mask (B,T,S), True = visible, as what is added to scores, 0 or -inf: (B,1,T,S), for all heads.

    Made once a pass, because SDPA would convert a bool mask in each layer and keep it for backward. On CUDA
    it would copy a mask whose rows do not begin at a multiple of eight.
    """
    B, T, S = mask.shape
    return like.new_full((B, T, S + -S % 8), -torch.inf)[..., :S].masked_fill_(mask, 0)[:, None]
