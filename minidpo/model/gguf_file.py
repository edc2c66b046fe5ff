"""GGUF: a model in one file, as llama.cpp and Ollama run it, read as if it lay in the hub's layout.

`config_of` gives what `config.json` would hold, `tokenizer_of` what `tokenizer.json` would, and `GGUFWeights`
gives tensors under the checkpoint's names, so that nothing behind `model/checkpoint` knows where a model came
from. The container is read by llama.cpp's own `gguf` package, quantised blocks by `model/ggml`. A model that
`gguf-split` cut into several files is read by its first, beside which the others are.
"""

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor

from minidpo.model import ggml
from minidpo.model.decoder import FAMILIES, RopeScaling, rotary_frequencies, stretched
from minidpo.system.files import begins_with, is_lfs_pointer

if TYPE_CHECKING:  # imported where a file is read: most models are none
    from gguf import GGUFReader, ReaderField, ReaderTensor

MAGIC = b"GGUF"
SPLIT_NAME = re.compile(r"(.+)-\d{5}-of-\d{5}\.gguf")
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EMBEDDING = "token_embd.weight"
# how Llama 3's rope scaling is stored: what each frequency is divided by
ROPE_FACTORS = "rope_freqs.weight"

# how config.json calls tokens, and what the metadata calls them
TOKEN_IDS = {
    "eos_token_id": "eos_token_id",
    "bos_token_id": "bos_token_id",
    "pad_token_id": "padding_token_id",
}

# how a text is cut before pairs of bytes are merged, by the name that llama.cpp gives it
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {"qwen2": _WORDS % "", "llama-bpe": _WORDS % "{1,3}", "smollm": None}


def is_gguf(path: Path) -> bool:
    """Whether a model is in a GGUF file, whatever it is called: a blob of Ollama's is named by its hash."""
    return begins_with(path, MAGIC)


def not_gguf(path: Path) -> str:
    """Why a file that is no GGUF file cannot be read as a model."""
    if is_lfs_pointer(path):
        return f"{path}: a Git LFS pointer in place of the file: run `git lfs pull` in its folder"
    return (
        f"{path}: not a GGUF file, because it does not begin with {MAGIC.decode()}: download it "
        "again, or give the folder if it is one of safetensors"
    )


class Stored(NamedTuple):
    """What is in a GGUF file, or in all parts of a split one."""

    fields: "dict[str, ReaderField]"  # the metadata, of the first part
    tensors: "list[ReaderTensor]"
    files: list[Path]


@functools.lru_cache(maxsize=2)
def read(path: Path) -> Stored:
    """A model's metadata and tensors, mapped once a process. Raises ValueError if a file is missing or not whole."""
    first = _reader(path)
    number, count = _part_of(first)
    named = SPLIT_NAME.fullmatch(path.name)
    name = f"{named[1] if named else 'NAME'}-{{:05d}}-of-{count:05d}.gguf"
    if number:
        raise ValueError(f"{path}: part {number + 1} of {count}: give the first, {name.format(1)}")
    if count > 1 and path.name != name.format(1):
        raise ValueError(
            f"{path}: part 1 of {count}: call it {name.format(1)}, and put the others beside it"
        )
    files, tensors = [path], list(first.tensors)
    for n in range(1, count):
        part = path.with_name(name.format(n + 1))
        if not part.is_file():
            raise ValueError(f"{part}: no such file: it is part {n + 1} of {count} of {path.name}")
        reader = _reader(part)
        if _part_of(reader) != (n, count):
            raise ValueError(f"{part}: not part {n + 1} of {count} of {path.name}, as it is called")
        files.append(part)
        tensors += reader.tensors
    wanted = _content(first, "split.tensors.count", len(tensors))
    if len(tensors) != wanted:
        raise ValueError(f"{path}: its {count} parts hold {len(tensors)} tensors, not {wanted}")
    return Stored(first.fields, tensors, files)


def _content(reader: "GGUFReader", key: str, default: int) -> int:
    return reader.fields[key].contents() if key in reader.fields else default


def _part_of(reader: "GGUFReader") -> tuple[int, int]:
    """The number of a file, from 0, among the parts of its model, and how many these are."""
    return _content(reader, "split.no", 0), _content(reader, "split.count", 1)


def _reader(path: Path) -> "GGUFReader":
    """One file. Raises ValueError if it is not whole."""
    from gguf import GGUFReader

    if not is_gguf(path):
        raise ValueError(not_gguf(path))
    try:
        return GGUFReader(path)
    # the package checks little: a file cut short fails wherever numpy notices
    except Exception as error:
        if "GGMLQuantizationType" in str(error):
            raise ValueError(f"{path}: a tensor's format is not read ({error})") from None
        raise ValueError(f"{path}: not a whole GGUF file ({error}); download it again") from None


@functools.lru_cache(maxsize=256)  # a list of tokens takes seconds
def value(path: Path, key: str, default=None):
    """A metadata value. Without a default, a missing key is a ValueError that names it."""
    if field := read(path).fields.get(key):
        content = field.contents()
        # stored in fp32: 1e-5 would come back as 9.999999747e-06
        return float(str(numpy.float32(content))) if isinstance(content, float) else content
    if default is None:
        raise ValueError(f"{path}: {key} is missing from the metadata")
    return default


def config_of(path: Path) -> dict:
    """The metadata as the values of a `config.json`."""
    architecture = value(path, "general.architecture")
    tensors = {tensor.name: tensor for tensor in read(path).tensors}

    def setting(key, default=None):
        return value(path, f"{architecture}.{key}", default)

    if architecture not in FAMILIES:
        raise ValueError(
            f"{path}: general.architecture is {architecture!r}, which is not implemented: "
            f"{', '.join(FAMILIES)}"
        )
    if EMBEDDING not in tensors:
        raise ValueError(f"{path}: tensor {EMBEDDING} is missing")
    heads, width = setting("attention.head_count"), setting("embedding_length")
    # without a type: linear
    stretch = setting("rope.scaling.factor", 0) or setting("rope.scale_linear", 1)
    scaling = setting("rope.scaling.type", "none" if stretch == 1 else "linear")
    config = {
        "model_type": architecture,
        "vocab_size": Piece(tensors[EMBEDDING]).get_shape()[0],
        "hidden_size": width,
        "intermediate_size": setting("feed_forward_length"),
        "num_hidden_layers": setting("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": setting("attention.head_count_kv", heads),
        "head_dim": setting("attention.key_length", width // heads),
        "rms_norm_eps": setting("attention.layer_norm_rms_epsilon"),
        "rope_theta": setting("rope.freq_base", 10_000.0),  # the format's own default
        "tie_word_embeddings": "output.weight" not in tensors,
        "max_position_embeddings": setting("context_length"),
        "torch_dtype": "float32",
        "rope_scaling": {"rope_type": scaling.replace("none", "default")},
    }
    for key, stored in TOKEN_IDS.items():
        if f"tokenizer.ggml.{stored}" in read(path).fields:
            config[key] = value(path, f"tokenizer.ggml.{stored}")
    if ROPE_FACTORS in tensors:
        divisors = read_tensor(tensors[ROPE_FACTORS]).flatten()
        config["rope_scaling"] = _llama3(path, divisors, config["rope_theta"])
    if (turned := setting("rope.dimension_count", config["head_dim"])) != config["head_dim"]:
        raise ValueError(
            f"{path}: {architecture}.rope.dimension_count is {turned}, and only all "
            f"{config['head_dim']} numbers of a head are turned here"
        )
    return config


def _llama3(path: Path, divisors: Tensor, theta: float) -> dict:
    """Llama 3's scaling from what it divides the frequencies by; Meta's models differ in `factor` alone."""
    scaling = RopeScaling(round(float(divisors.max()), 4), 1.0, 4.0, 8192)
    expected = rope_divisors(2 * len(divisors), theta, scaling)
    if not torch.allclose(expected, divisors, rtol=1e-3):
        raise ValueError(
            f"{path}: {ROPE_FACTORS} is no scaling of Llama 3's; no other is implemented"
        )
    return {"rope_type": "llama3", **scaling._asdict()}


class Piece(NamedTuple):
    """A tensor that is not read yet."""

    stored: "ReaderTensor"

    def get_shape(self) -> list[int]:
        # the file counts from the innermost
        return [int(size) for size in reversed(self.stored.shape)]

    def get_dtype(self) -> str:
        return self.stored.tensor_type.name


class GGUFWeights:
    """A GGUF file with the face of an open safetensors file: tensors under the names of the hub's layout."""

    def __init__(self, path: Path):
        self.path = path
        self.tensors = {hub_name(t.name): t for t in read(path).tensors if t.name != ROPE_FACTORS}

    def keys(self) -> list[str]:
        return list(self.tensors)

    def get_slice(self, name: str) -> Piece:
        return Piece(self.tensors[name])

    def get_tensor(self, name: str) -> Tensor:
        """A tensor in fp32, a llama's q and k in the hub's order of rows."""
        return self._hub_rows(name, read_tensor(self.tensors[name]))

    def get_blocks(self, name: str) -> Tensor:
        """A matrix as it is stored, bytes (rows, bytes a row), in the hub's order of rows."""
        return self._hub_rows(name, torch.from_numpy(self.tensors[name].data.copy()))

    def _hub_rows(self, name: str, rows: Tensor) -> Tensor:
        heads = {"q_proj": "head_count", "k_proj": "head_count_kv"}.get(name.split(".")[-2])
        if heads and value(self.path, "general.architecture") == "llama":
            # of keys as many, unless the file says
            count = value(self.path, "llama.attention.head_count")
            return unpermute(rows, value(self.path, f"llama.attention.{heads}", count))
        return rows


def hub_name(stored: str) -> str:
    """A tensor's name in the hub's layout: blk.3.attn_norm is model.layers.3.input_layernorm."""
    stem, _, kind = stored.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        return f"model.layers.{layer}.{NAMES.get(part, part)}.{kind}"
    return f"{NAMES.get(stem, stem)}.{kind}"


def read_tensor(tensor: "ReaderTensor") -> Tensor:
    """A tensor of the file in fp32, its quantised blocks written out."""
    stored = torch.from_numpy(tensor.data.copy()).view(torch.uint8)
    rows = stored.reshape(-1, stored.shape[-1])
    return ggml.decode(tensor.tensor_type.name, rows).view(Piece(tensor).get_shape())


def unpermute(weight: Tensor, heads: int) -> Tensor:
    """Rows of a llama's q or k as the hub has them: (i, i + D/2) turn as a pair, in the file (2i, 2i + 1)."""
    return weight.view(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def permute(weight: Tensor, heads: int) -> Tensor:
    """The inverse of `unpermute`."""
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def rope_divisors(head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """What Llama 3's scaling divides each rotary frequency by, (D/2,)."""
    frequency = rotary_frequencies(head_dim, theta, torch.float32)
    return frequency / stretched(frequency, scaling)


def split_name(described: dict | None) -> str | None:
    """The name in SPLITS of a `tokenizer.json`'s pre-tokenizer, which is [split, byte level]; else None."""
    parts = (described or {}).get("pretokenizers", [])
    if len(parts) != 2 or parts[1]["type"] != "ByteLevel":
        return None
    if parts[0]["type"] == "Digits":
        return "smollm"
    pattern = parts[0].get("pattern", {}).get("Regex")
    return next((name for name, known in SPLITS.items() if known and known == pattern), None)


def tokenizer_of(path: Path) -> Tokenizer:
    """The tokenizer in the file's metadata: byte-level pair encoding, as Llama 3, Qwen and SmolLM2 have it. A
    byte whose symbol the vocabulary lacks (SmolLM2 lacks 21) is left out of a text."""
    kind, split = value(path, "tokenizer.ggml.model"), value(path, "tokenizer.ggml.pre", "")
    if kind != "gpt2" or split not in SPLITS:
        raise ValueError(
            f"{path}: tokenizer {kind!r} with pre-tokenizer {split!r} is not implemented: "
            f"gpt2 with {', '.join(SPLITS)}"
        )
    tokens = value(path, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in value(path, "tokenizer.ggml.merges")]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split == "llama-bpe"))
    pattern = SPLITS[split]
    if pattern is None:
        first = pre_tokenizers.Digits(individual_digits=True)
    else:
        first = pre_tokenizers.Split(Regex(pattern), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    kinds = value(path, "tokenizer.ggml.token_type")
    # 3: control, 4: the user's own
    special = [token for token, kind in zip(tokens, kinds) if kind == 3]
    own = [token for token, kind in zip(tokens, kinds) if kind == 4]
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in special]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in own])
    return tokenizer


def template_of(path: Path) -> tuple[str | None, dict[str, str]]:
    """The chat template in the file's metadata, or None, and what its names of tokens stand for."""
    names = value(path, "tokenizer.ggml.tokens")
    ids = {key: value(path, f"tokenizer.ggml.{name}", -1) for key, name in TOKEN_IDS.items()}
    tokens = {key.removesuffix("_id"): names[id] for key, id in ids.items() if id >= 0}
    return value(path, "tokenizer.chat_template", "") or None, tokens
