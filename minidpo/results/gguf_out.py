"""GGUF out: what was trained here, as llama.cpp and Ollama run it.

A merged model is one file with its tokenizer and template. An adapter alone is a small file: `--lora` of
llama.cpp puts it beside the base that it was trained on, whatever that base is quantised to.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from gguf import (
    MODEL_ARCH,
    GGUFType,
    GGUFValueType,
    GGUFWriter,
    LlamaFileType,
    TensorNameMap,
    TokenType,
    get_tensor_name_map,
)
from torch import Tensor

from minidpo.memory.lora import LoRALinear
from minidpo.model import gguf_file
from minidpo.model.chat import Chat
from minidpo.model.checkpoint import token_ids
from minidpo.model.decoder import ModelConfig, Transformer
from minidpo.system.files import replacing

WEIGHTS = "minidpo.weights"  # a key of both files: the fingerprint of base and adapter in one
# what the tokens of a conversation are: written for every base, not copied from a GGUF file
CONVERSATION = [
    f"tokenizer.ggml.{key}"
    for key in (*gguf_file.TOKEN_IDS.values(), "eot_token_id", "add_bos_token")
]


def write_model(path: Path, model: Transformer, base: Path, *, chat: Chat, weights: str) -> None:
    """Write a plain model: matrices in F16, norms and biases in F32. base: the folder or file whose tokenizer
    it has. weights: the model's fingerprint. Raises ValueError for a tokenizer that
    llama.cpp cannot have, and for weights beyond F16."""
    config = model.config
    writer = GGUFWriter(None, config.model_type)
    writer.add_type(GGUFType.MODEL)
    writer.add_file_type(LlamaFileType.MOSTLY_F16)
    writer.add_string(WEIGHTS, weights)
    writer.add_name(path.stem)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, base, chat, config.vocab_size)
    _add_token_ids(writer, token_ids(base), chat)
    writer.add_chat_template(chat.template.source)
    names = _stored_names(config)
    tensors = {
        names.get_name(name, (".weight", ".bias")): _stored_rows(name, weight, config)
        for name, weight in model.state_dict().items()
    }
    if config.rope_scaling is not None:
        tensors[gguf_file.ROPE_FACTORS] = gguf_file.rope_divisors(
            config.head_dim, config.rope_theta, config.rope_scaling
        )
    _write(path, writer, tensors, torch.float16)


def write_adapter(
    path: Path, config: ModelConfig, layers: Mapping[str, LoRALinear], weights: str
) -> None:
    """Write an adapter, its maps by name, in F32, as `convert_lora_to_gguf.py` of llama.cpp does. weights:
    the fingerprint of base and adapter in one."""
    writer = GGUFWriter(None, config.model_type)
    writer.add_type(GGUFType.ADAPTER)
    writer.add_string(WEIGHTS, weights)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", next(iter(layers.values())).config.alpha)
    names, tensors = _stored_names(config), {}
    for name, layer in layers.items():
        stored = names.get_name(name)
        tensors[f"{stored}.weight.lora_a"] = layer.lora_A  # (R,in)
        tensors[f"{stored}.weight.lora_b"] = _stored_rows(
            f"{name}.weight", layer.lora_B, config
        )  # (out,R)
    _write(path, writer, tensors, torch.float32)


def weights_in(path: Path) -> str | None:
    """The fingerprint that `write_model` or `write_adapter` wrote; None if the file is not one of theirs."""
    try:
        return gguf_file.value(path, WEIGHTS)
    except ValueError:
        return None


def _stored_names(config: ModelConfig) -> TensorNameMap:
    """What llama.cpp calls the tensors of such a model."""
    return get_tensor_name_map(MODEL_ARCH[config.model_type.upper()], config.num_hidden_layers)


def _write(
    path: Path, writer: GGUFWriter, tensors: Mapping[str, Tensor], matrix_dtype: torch.dtype
) -> None:
    """Write metadata and tensors, one after another: of a large model, one is held twice."""
    dtypes = {
        name: matrix_dtype if tensor.ndim == 2 else torch.float32
        for name, tensor in tensors.items()
    }
    for name, tensor in tensors.items():
        stored = torch.empty(0, dtype=dtypes[name]).numpy().dtype
        writer.add_tensor_info(name, tensor.shape, stored, tensor.numel() * stored.itemsize)
    with replacing(path) as temporary:
        writer.write_header_to_file(temporary)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in tensors.items():
            stored = tensor.detach().to("cpu", dtypes[name])
            if not stored.isfinite().all():
                raise ValueError(
                    f"{path}: {name} is not finite in {dtypes[name]}: use --export merged"
                )
            writer.write_tensor_data(stored.numpy())
        writer.close()


def _stored_rows(name: str, rows: Tensor, config: ModelConfig) -> Tensor:
    """The rows of a tensor in the file's order, which is another for a llama's q and k."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    if config.model_type == "llama" and (n := heads.get(name.split(".")[-2])):
        return gguf_file.permute(rows, n)
    return rows


def _add_token_ids(writer: GGUFWriter, ids: dict, chat: Chat) -> None:
    """What ends, begins and fills a text: the base's ids, and the conversation's where it has none."""
    ends = ids.get("eos_token_id", chat.end)
    ends = ends if isinstance(ends, list) else [ends]
    writer.add_eos_token_id(chat.end if chat.end in ends else ends[0])
    writer.add_eot_token_id(chat.end)  # the agent's answers end with it: llama.cpp stops at both
    writer.add_add_bos_token(bool(chat.begin))
    if chat.begin:  # without it llama.cpp begins a text with token 11
        writer.add_bos_token_id(chat.begin[0])
    elif "bos_token_id" in ids:
        writer.add_bos_token_id(ids["bos_token_id"])
    if "pad_token_id" in ids:
        writer.add_pad_token_id(ids["pad_token_id"])


def _add_tokenizer(writer: GGUFWriter, base: Path, chat: Chat, vocab_size: int) -> None:
    """The tokenizer's metadata: that of a GGUF base as it is there, else made from tokenizer.json."""
    if gguf_file.is_gguf(base):
        for key, field in gguf_file.read(base).fields.items():
            if key.startswith("tokenizer.ggml.") and key not in CONVERSATION:
                # a type, or a list's and then its items'
                items = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
                writer.add_key_value(key, field.contents(), field.types[0], items)
        return
    described = json.loads(chat.tokenizer.to_str())
    model, split = described["model"], gguf_file.split_name(described["pre_tokenizer"])
    if model["type"] != "BPE" or split is None:
        raise ValueError(
            f"{base / 'tokenizer.json'}: llama.cpp has no name for how this tokenizer splits "
            f"text: it can be that of {', '.join(gguf_file.SPLITS)}"
        )
    kinds = {
        token["id"]: TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
        for token in described["added_tokens"]
    }
    tokens, types = [], []
    for n in range(vocab_size):
        token = chat.tokenizer.id_to_token(n)
        if token is None:  # a model may have spare rows
            tokens.append(f"[PAD{n}]")
            types.append(TokenType.UNUSED)
        else:
            tokens.append(token)
            types.append(kinds.get(n, TokenType.NORMAL))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
