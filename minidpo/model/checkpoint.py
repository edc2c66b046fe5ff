"""Checkpoints: a hub id or a folder in, a model out, and back to disk in the same layout.

Loading is strict, because a wrong model rarely crashes: it answers a little worse. Names and shapes are
compared before the first weight is read. The model is built without memory, so each tensor is held once.
"""

import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

import torch
from huggingface_hub import snapshot_download, split_torch_state_dict_into_shards
from torch import Tensor
from tqdm import tqdm

from minidpo.model.decoder import Qwen2, Qwen2Config
from minidpo.system.files import read_json, replacing, write_json
from minidpo.system.tensors import open_weights, write_weights

NANO = "minidpo/nano"  # the shipped model, wherever it is called from
HUB_FILES = ["config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer*.json"]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16,
          "float16": torch.float16, "float64": torch.float64}


def locate(source: str | Path, files: Sequence[str] = HUB_FILES) -> Path:
    """The folder of a model: a path, `minidpo/nano`, or a hub id `owner/name` (offline: the hub's cache)."""
    if str(source) == NANO:
        return Path(__file__).parents[1] / "nano"
    if Path(source).is_dir():
        return Path(source)
    if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(source)):
        raise ValueError(f"{source}: no such folder, and not a hub id like Qwen/Qwen2-0.5B-Instruct")
    try:
        return Path(snapshot_download(str(source), allow_patterns=list(files)))
    except (OSError, ValueError) as error:  # offline and not cached, unknown, gated, bad id
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{source}: no such folder, and the hub cannot provide it ({reason})") from None


def read_config(folder: str | Path) -> tuple[Qwen2Config, torch.dtype]:
    """A model's shape and its weights' dtype from `config.json`, in the old spelling or the new one. Raises
    ValueError with file and key for any value that `model/decoder` does not implement."""
    raw = read_json(path := Path(folder) / "config.json")
    rope_key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    rope = raw.get(rope_key) or {}
    for key, implemented in [
        ("model_type", raw.get("model_type") == "qwen2"),
        ("architectures", raw.get("architectures") in (None, ["Qwen2ForCausalLM"])),
        ("hidden_act", raw.get("hidden_act", "silu") == "silu"),
        (rope_key, rope.get("rope_type", rope.get("type", "default")) == "default"),
        ("use_sliding_window", not raw.get("use_sliding_window")),
        ("layer_types", set(raw.get("layer_types") or ()) <= {"full_attention"}),
        ("quantization_config", raw.get("quantization_config") is None),
    ]:
        if not implemented:
            raise ValueError(f"{path}: {key} is {raw.get(key)!r}, which is not implemented: plain Qwen2 only")

    # no default for the base of the angles: with 1e4 in place of 1e6 a model still writes, just worse
    raw = {"tie_word_embeddings": False, **raw, "rope_theta": rope.get("rope_theta", raw.get("rope_theta"))}
    values = {field.name: raw.get(field.name) for field in fields(Qwen2Config)}
    wanted = {bool: "true or false", int: "a positive integer", float: "a positive number"}
    for field in fields(Qwen2Config):
        value, types = values[field.name], (int, float) if field.type is float else (field.type,)
        if type(value) not in types or (field.type is not bool and value <= 0):
            raise ValueError(f"{path}: {field.name} is {value!r}, expected {wanted[field.type]}")
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise ValueError(f"{path}: dtype is {dtype!r}, expected one of {', '.join(DTYPES)}")
    try:
        config = Qwen2Config(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if raw.get("head_dim") not in (None, config.head_dim):
        raise ValueError(f"{path}: head_dim is {raw['head_dim']}, not hidden_size / num_attention_heads")
    return config, DTYPES[dtype]


def load(source: str | Path, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> Qwen2:
    """The model in a folder or on the hub, in `dtype` (by default that of its files). Raises ValueError with
    file and key or tensor for anything missing, left over, damaged or unsupported."""
    folder = locate(source)
    config, stored_dtype = read_config(folder)
    with torch.device("meta"):
        model = Qwen2(config)  # shapes without memory
    file_of = locate_tensors(folder, model)
    weights: dict[str, Tensor] = {}
    for path in dict.fromkeys(file_of.values()):
        with open_weights(path) as file:
            for name in tqdm(file.keys() & file_of.keys(), path.name, unit="tensor", delay=2, leave=False):
                # copy: a view into the mapped file is misaligned for vector units, and changes with the file
                weights[name] = file.get_tensor(name).to(device, dtype or stored_dtype, copy=True)
    model.load_state_dict(weights, assign=True)
    return model


def locate_tensors(folder: Path, model: Qwen2) -> dict[str, Path]:
    """The file of each tensor of the model. Raises ValueError for one missing, left over or misshapen."""
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    file_of: dict[str, Path] = {}
    for path, promised in _promised(folder).items():
        with open_weights(path) as file:
            if missing := promised - set(file.keys()):
                raise ValueError(f"{path}: tensor {min(missing)} is missing, though the index puts it here")
            for name in file.keys():
                piece = file.get_slice(name)
                shape, stored = tuple(piece.get_shape()), piece.get_dtype()
                # some tied checkpoints repeat the embedding as a head
                wanted = shapes.get(name, shapes[EMBEDDING] if name == HEAD else None)
                if wanted is None or name in file_of:
                    raise ValueError(f"{path}: tensor {name} has no place in the model of config.json")
                if shape != wanted:
                    raise ValueError(f"{path}: tensor {name} has shape {shape}, config.json wants {wanted}")
                if stored not in ("F32", "BF16", "F16", "F64"):
                    raise ValueError(f"{path}: tensor {name} is {stored}, expected floating point")
                file_of[name] = path
    if absent := shapes.keys() - file_of.keys():
        raise ValueError(f"{folder}: tensor {min(absent)} is missing from the checkpoint's files")
    if HEAD in file_of and HEAD not in shapes:
        path = file_of.pop(HEAD)
        with open_weights(path) as head_file, open_weights(file_of[EMBEDDING]) as embedding_file:
            if not torch.equal(head_file.get_tensor(HEAD), embedding_file.get_tensor(EMBEDDING)):
                raise ValueError(f"{path}: tensor {HEAD} is not {EMBEDDING}, but config.json ties them")
    return file_of


def _promised(folder: Path) -> dict[Path, set[str]]:
    """The files of a checkpoint, each with the tensors that the index, if there is one, promises in it."""
    if (folder / WEIGHTS).is_file():
        return {folder / WEIGHTS: set()}
    if not (folder / INDEX).is_file():
        raise ValueError(f"{folder}: holds neither {WEIGHTS} nor {INDEX}")
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{folder / INDEX}: weight_map does not say which file holds which tensor")
    promised: dict[Path, set[str]] = {}
    for name, file in weight_map.items():
        path = folder / Path(file).name  # a shard lies beside its index, whatever path is written there
        promised.setdefault(path, set()).add(name)
    return promised


def config_json(config: Qwen2Config, dtype: torch.dtype) -> dict:
    """The config.json of such a model on the hub."""
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu",
            "use_sliding_window": False, "torch_dtype": str(dtype).removeprefix("torch."), **asdict(config)}


def save(model: Qwen2, folder: str | Path, tokenizer_file: str | Path | None = None,
         max_shard_bytes: int = 5_000_000_000) -> None:
    """Write a model in the hub's layout: above `max_shard_bytes` in several files with an index. Raises
    ValueError for a model with tensors that its config does not have, such as an adapter's."""
    folder = Path(folder)
    weights = model.state_dict()
    with torch.device("meta"):
        names = Qwen2(model.config).state_dict().keys()
    if stray := weights.keys() ^ names:
        raise ValueError(f"cannot save this model: {min(stray)} is out of place; merge its adapter first")
    shards = split_torch_state_dict_into_shards(weights, max_shard_size=max_shard_bytes)
    for file, tensors in shards.filename_to_tensors.items():
        write_weights(folder / file, {name: weights[name] for name in tensors}, {"format": "pt"})
    if shards.is_sharded:
        write_json(folder / INDEX, {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename})
    write_json(folder / "config.json", config_json(model.config, next(iter(weights.values())).dtype))
    if tokenizer_file is not None:
        with replacing(folder / "tokenizer.json") as temporary:
            shutil.copyfile(tokenizer_file, temporary)
    written = {*shards.filename_to_tensors, *([INDEX] if shards.is_sharded else [])}
    for old in [folder / WEIGHTS, folder / INDEX, *folder.glob("model-*-of-*.safetensors")]:
        if old.name not in written:  # an earlier save in another number of files: no loader may meet it
            old.unlink(missing_ok=True)
