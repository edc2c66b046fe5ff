"""Decoder-only transformers by hand: Qwen2, Qwen3 and Llama.

Token embedding, L blocks of (RMSNorm, grouped-query attention with rotary positions, RMSNorm, SwiGLU), a last
RMSNorm, and a vocabulary head. The head is not part of `forward`: it is expensive, and training needs it only
where the agent wrote (`model/head`). Submodules carry the checkpoint's own names.

The families differ in three named things: biases at q, k and v (Qwen2), norms of q and k (Qwen3), and
slower rotary angles for long texts (Llama 3). SmolLM2 and TinyLlama are Llamas.

Sources: Qwen2 report (arXiv:2407.10671), Qwen3 (2505.09388), Llama 3 (2407.21783), RoFormer (2104.09864), GQA
(2305.13245), SwiGLU (2002.05202).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidpo.model.attention import Mask, attend, prepared
from minidpo.model.head import tiles
from minidpo.model.kvcache import KVCache


class Family(NamedTuple):
    """What the models have in common that `config.json` calls by one `model_type`."""

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False


FAMILIES = {
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
    "llama": Family("LlamaForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True),
}


class RopeScaling(NamedTuple):
    """How Llama 3 was stretched to texts longer than those of its first training."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model, under the names that `config.json` uses. head_dim 0: hidden_size / heads."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32_768
    model_type: str = "qwen2"
    head_dim: int = 0
    rope_scaling: RopeScaling | None = None

    def __post_init__(self):
        C, H, K = self.hidden_size, self.num_attention_heads, self.num_key_value_heads
        if (not self.head_dim and C % H) or H % K:
            raise ValueError(
                f"hidden_size {C} is not a multiple of num_attention_heads {H}, or {H} not of "
                f"num_key_value_heads {K}"
            )
        object.__setattr__(self, "head_dim", self.head_dim or C // H)
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim {self.head_dim} is odd: a head's numbers are rotated in pairs"
            )

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, in fp32 inside."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


def stretched(frequency: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3's rotary frequencies, (D/2,): slow ones divided by `factor`, fast ones kept, a ramp between."""
    # in one of the first texts
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    fast = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * ((1 - fast) / scaling.factor + fast)


def rotary_frequencies(head_dim: int, theta: float, dtype: torch.dtype, device=None) -> Tensor:
    """theta^(-2i/D), (D/2,)."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=dtype, device=device) / head_dim)


def rotary_angles(
    positions: Tensor,
    head_dim: int,
    theta: float,
    dtype: torch.dtype,
    scaling: RopeScaling | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin of position · theta^(-2i/D), (...,1,T,D) each, for positions (...,T). RoFormer, Eq. 34."""
    real = torch.float64 if dtype == torch.float64 else torch.float32  # bf16 cannot count past 256
    frequency = rotary_frequencies(head_dim, theta, real, positions.device)
    if scaling is not None:
        frequency = stretched(frequency, scaling)
    angle = positions.to(real)[..., None] * frequency
    angle = torch.cat((angle, angle), dim=-1)[..., None, :, :]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs (x[i], x[i + D/2]) by their angles; x (B,H,T,D). Differs from the paper: (2i, 2i + 1)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention: query head h reads key/value head h // (H/K)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        C, D = config.hidden_size, config.head_dim
        self.H, self.K, self.D = config.num_attention_heads, config.num_key_value_heads, D
        bias, norm = config.family.qkv_bias, config.family.qk_norm
        self.q_proj = nn.Linear(C, self.H * D, bias)
        self.k_proj = nn.Linear(C, self.K * D, bias)
        self.v_proj = nn.Linear(C, self.K * D, bias)
        self.o_proj = nn.Linear(self.H * D, C, bias=False)
        self.q_norm = RMSNorm(D, config.rms_norm_eps) if norm else nn.Identity()
        self.k_norm = RMSNorm(D, config.rms_norm_eps) if norm else nn.Identity()

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask, cache: KVCache | None, layer: int
    ) -> Tensor:
        B, T, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(B, T, self.H, self.D)).transpose(1, 2)  # (B,H,T,D)
        k = self.k_norm(self.k_proj(x).view(B, T, self.K, self.D)).transpose(1, 2)  # (B,K,T,D)
        v = self.v_proj(x).view(B, T, self.K, self.D).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        # softmax(q·kᵀ/√D + mask)·v, (B,H,T,D)
        y = attend(q, k, v, mask) if cache is None else cache.attend(layer, q, k, v, mask)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, self.H * self.D))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x))."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        C, hidden = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(C, hidden, bias=False)
        self.up_proj = nn.Linear(C, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, C, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos, sin, mask, cache, layer) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask, cache, layer)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """The `model.` part of the checkpoint: everything but the head."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Transformer(nn.Module):
    """The whole model. `recompute`, if set by `memory/recompute`, runs a block and repeats it in backward;
    `read_in`, if set by `memory/loading`, is the dtype that the weights were rounded to as they were read."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        tied, C, V = config.tie_word_embeddings, config.hidden_size, config.vocab_size
        self.lm_head = None if tied else nn.Linear(C, V, bias=False)
        self.recompute: Callable | None = None
        self.read_in: torch.dtype | None = None
        self.packed_head: nn.Module | None = None  # set by `memory/packing`

    @property
    def head_weight(self):
        """(V,C): the head's own matrix, or the embedding table when they are tied; perhaps quantised."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Last hidden states (B,T,C) for token ids (B,T).

        positions (B,T): by default 0..T-1, or those behind the cache. mask (B,T,S) bool, True = query may
        read key, of which each query needs one: by default causal; right padding then needs no mask. With a
        cache, new tokens are written behind each row's end, and the caller adds their number to
        `cache.lengths`.
        """
        T = ids.shape[1]
        if positions is None:
            positions = torch.arange(T, device=ids.device)
            if cache is not None:
                positions = cache.positions(T)
        if mask is None and cache is not None:
            mask = cache.mask(T)
        x = self.model.embed_tokens(ids)
        config = self.config
        cos, sin = rotary_angles(
            positions, config.head_dim, config.rope_theta, x.dtype, config.rope_scaling
        )
        # with a cache a few new tokens see all that was read: no block would be spared anything
        mask = prepared(mask, x, in_blocks=not isinstance(cache, KVCache))
        for layer, block in enumerate(self.model.layers):
            if self.recompute is not None and torch.is_grad_enabled():
                x = self.recompute(block, x, cos, sin, mask, cache, layer)
            else:
                x = block(x, cos, sin, mask, cache, layer)
        return self.model.norm(x)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (...,V) of hidden states (...,C)."""
        if self.packed_head is not None:
            return self.packed_head(hidden)
        logits = [F.linear(hidden, rows) for _, rows in tiles(self.head_weight)]
        return logits[0] if len(logits) == 1 else torch.cat(logits, dim=-1)
