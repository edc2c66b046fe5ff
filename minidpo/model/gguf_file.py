"""GGUF: a model in one file, as llama.cpp and Ollama run it, read as if it lay in the hub's layout.

`config_of` gives what `config.json` would hold, `tokenizer_of` what `tokenizer.json` would, and `GGUFWeights`
gives tensors under the checkpoint's names, so that nothing behind `model/checkpoint` knows where a model came
from. The container is read by llama.cpp's own `gguf` package, quantised blocks by `model/ggml`.
"""

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from gguf import GGUFReader, ReaderTensor
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor

from minidpo.model import ggml

NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK_NAMES = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
               "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
               "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
               "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
               "ffn_down": "mlp.down_proj"}
ROPE_FACTORS = "rope_freqs.weight"  # how Llama 3's rope scaling is stored: what each frequency is divided by

# how a text is cut before pairs of bytes are merged, by the name that llama.cpp gives it
_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
SPLITS = {"qwen2": _WORDS % "", "llama-bpe": _WORDS % "{1,3}", "smollm": None}


@functools.lru_cache(maxsize=2)
def _open(path: Path, _changed: int) -> GGUFReader:
    try:
        return GGUFReader(path)
    except Exception as error:  # the package checks little: a file cut short fails wherever numpy notices
        raise ValueError(f"{path}: not a whole GGUF file ({error}); download it again") from None


def read(path: Path) -> GGUFReader:
    """The file's metadata and tensors, mapped, not read. Raises ValueError for a file that is not whole."""
    return _open(path, path.stat().st_mtime_ns)


def value(path: Path, key: str, default=None):
    """A metadata value. Without a default, a missing key is a ValueError that names it."""
    field = read(path).fields.get(key)
    if field is None and default is None:
        raise ValueError(f"{path}: {key} is missing from the metadata")
    return default if field is None else field.contents()


def config_of(path: Path) -> dict:
    """The metadata as the values of a `config.json`."""
    architecture = value(path, "general.architecture")
    tensors = {tensor.name: tensor for tensor in read(path).tensors}

    def of(key, default=None):
        return value(path, f"{architecture}.{key}", default)

    if architecture not in ("llama", "qwen2", "qwen3"):
        raise ValueError(f"{path}: general.architecture is {architecture!r}, which is not implemented: "
                         "llama, qwen2 or qwen3")
    heads, width = of("attention.head_count"), of("embedding_length")
    config = {"model_type": architecture, "vocab_size": len(value(path, "tokenizer.ggml.tokens")),
              "hidden_size": width, "intermediate_size": of("feed_forward_length"),
              "num_hidden_layers": of("block_count"), "num_attention_heads": heads,
              "num_key_value_heads": of("attention.head_count_kv", heads),
              "head_dim": of("attention.key_length", width // heads),
              "rms_norm_eps": of("attention.layer_norm_rms_epsilon"),
              "rope_theta": of("rope.freq_base", 10_000.0),
              "tie_word_embeddings": "output.weight" not in tensors,
              "max_position_embeddings": of("context_length"), "torch_dtype": "float32"}
    if "token_embd.weight" in tensors:
        config["vocab_size"] = int(tensors["token_embd.weight"].shape[1])
    if of("rope.scaling.type", "none") != "none":
        config["rope_scaling"] = {"rope_type": of("rope.scaling.type")}
    if ROPE_FACTORS in tensors:
        factors = GGUFWeights(path).read_tensor(tensors[ROPE_FACTORS]).flatten()
        config["rope_scaling"] = {"rope_type": "llama3", "factor": round(float(factors.max()), 4),
                                  "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                  "original_max_position_embeddings": 8192}
    return config


class Piece(NamedTuple):
    """A tensor that is not read yet."""

    stored: ReaderTensor

    def get_shape(self) -> list[int]:
        return [int(size) for size in reversed(self.stored.shape)]  # the file counts from the innermost

    def get_dtype(self) -> str:
        return self.stored.tensor_type.name


class GGUFWeights:
    """A GGUF file with the face of an open safetensors file: tensors under the names of the hub's layout."""

    def __init__(self, path: Path):
        self.path, reader = path, read(path)
        self.architecture = value(path, "general.architecture")
        self.tensors = {self._name(tensor.name): tensor for tensor in reader.tensors
                        if tensor.name != ROPE_FACTORS}

    def __enter__(self) -> "GGUFWeights":
        return self

    def __exit__(self, *_) -> None:
        pass  # the file stays mapped; pages that were read can be dropped at any time

    @staticmethod
    def _name(stored: str) -> str:
        """A tensor's name in the hub's layout: `model.layers.3.input_layernorm.weight`."""
        stem, _, kind = stored.rpartition(".")
        if stem.startswith("blk."):
            _, layer, part = stem.split(".", 2)
            return f"model.layers.{layer}.{BLOCK_NAMES.get(part, part)}.{kind}"
        return f"{NAMES.get(stem, stem)}.{kind}"

    def keys(self) -> list[str]:
        return list(self.tensors)

    def metadata(self) -> dict:
        return {}

    def get_slice(self, name: str) -> "Piece":
        return Piece(self.tensors[name])

    def read_tensor(self, tensor: ReaderTensor) -> Tensor:
        stored = torch.from_numpy(tensor.data.copy()).view(torch.uint8)
        rows = stored.reshape(-1, stored.shape[-1])
        return ggml.decode(tensor.tensor_type.name, rows).view(Piece(tensor).get_shape())

    def get_tensor(self, name: str) -> Tensor:
        """A tensor in fp32, its quantised blocks written out."""
        weight = self.read_tensor(self.tensors[name])
        heads = {"q_proj": "head_count", "k_proj": "head_count_kv"}.get(name.split(".")[-2])
        if self.architecture == "llama" and heads:
            weight = unpermute(weight, value(self.path, f"llama.attention.{heads}"))
        return weight


def unpermute(weight: Tensor, heads: int) -> Tensor:
    """Rows of a llama's q or k as the hub has them: (i, i + D/2) turn as a pair, in the file (2i, 2i + 1)."""
    return weight.view(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def tokenizer_of(path: Path) -> Tokenizer:
    """The tokenizer in the file's metadata: byte-level pair encoding, as Llama 3, Qwen and SmolLM2 have it.

    A byte whose symbol the vocabulary lacks (SmolLM2 lacks 21) is left out of a text.
    """
    kind, split = value(path, "tokenizer.ggml.model"), value(path, "tokenizer.ggml.pre", "")
    if kind != "gpt2" or split not in SPLITS:
        raise ValueError(f"{path}: tokenizer {kind!r} with pre-tokenizer {split!r} is not implemented: "
                         f"gpt2 with {', '.join(SPLITS)}")
    tokens = value(path, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in value(path, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, merges,
                                     ignore_merges=split == "llama-bpe"))
    pattern = SPLITS[split]
    first = (pre_tokenizers.Digits(individual_digits=True) if pattern is None else
             pre_tokenizers.Split(Regex(pattern), "isolated"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    kinds = value(path, "tokenizer.ggml.token_type")
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)
                                  for token, kind in zip(tokens, kinds) if kind == 3])  # 3: control
    tokenizer.add_tokens([AddedToken(token, normalized=False)
                          for token, kind in zip(tokens, kinds) if kind == 4])  # 4: the user's own
    return tokenizer
