"""A quantised model: NF4 in its blocks, 8 bits for its vocabulary, made from a checkpoint larger than memory.

The checkpoint is read and quantised tensor by tensor: of 15 GB of bf16, memory holds the result and one
tensor. That takes two minutes on two cores, so the result can be kept in a cache folder, which loads in
seconds: one file for each block, whole or absent, and an index, written last, that names the checkpoint.
Norms and biases are not quantised.
"""

import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from minidpo.memory.nf4 import Int8Matrix, Int8Table, NF4Linear, NF4Matrix
from minidpo.model.checkpoint import locate, locate_tensors, read_config
from minidpo.model.decoder import Qwen2
from minidpo.system.files import read_json, write_json
from minidpo.system.tensors import open_weights, write_weights

VERSION = "1"  # of the cache: the layout of its files, and how weights become codes
INDEX = "index.json"


def quantise_layout(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace linear maps of blocks, embedding and head by quantised modules, which hold no values yet."""
    for name, module in list(model.named_modules()):
        with torch.device("meta"):
            if type(module) is nn.Linear and ".layers." in name:
                model.set_submodule(name, NF4Linear(NF4Matrix(module.weight.shape, dtype), module.bias))
            elif name in ("model.embed_tokens", "lm_head"):
                model.set_submodule(name, Int8Table(Int8Matrix(module.weight.shape, dtype)))


@torch.no_grad()
def expand(model: nn.Module) -> None:
    """Replace every quantised matrix by its values in full. The plain model computes the same, up to rounding
    if the head was read in pieces."""
    # only names: a list of modules would keep all codes in memory to the end
    names = [name for name, module in model.named_modules() if isinstance(module, (NF4Linear, Int8Table))]
    for name in tqdm(names, "expanding", unit="matrix", delay=2, leave=False):
        module = model.get_submodule(name)
        rows, columns = module.weight.shape
        bias = module.bias if isinstance(module, NF4Linear) else None
        with torch.device("meta"):  # takes no memory and no random numbers
            plain = (nn.Embedding(rows, columns) if name.endswith("embed_tokens") else
                     nn.Linear(columns, rows, bias=bias is not None))
        plain.weight = nn.Parameter(module.weight.dense(), requires_grad=False)
        if bias is not None:
            plain.bias = bias
        model.set_submodule(name, plain)


def is_quantised(model: nn.Module) -> bool:
    """Whether some of the model's weights are codes."""
    return any(isinstance(module, (NF4Linear, Int8Table)) for module in model.modules())


def load_quantised(source: str | Path, dtype: torch.dtype, device: str | torch.device = "cpu",
                   cache: str | Path | None = None) -> Qwen2:
    """The model of a folder or hub id, frozen on `device`, with blocks in NF4 and vocabulary in 8 bits.

    dtype: of the products, and of the weights that are not quantised. cache: a folder for the quantised
    weights, made if it is not there. Raises ValueError as `checkpoint.load` does, for a weight that is not
    finite, and for the cache of another checkpoint or version, which is not overwritten.
    """
    folder = locate(source)
    config, _ = read_config(folder)
    with torch.device("meta"):
        model = Qwen2(config)
    file_of, groups = locate_tensors(folder, model), _groups(list(model.state_dict()))
    quantise_layout(model, dtype)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    store = None if cache is None else Cache(Path(cache), folder, set(file_of.values()))
    cached = store is not None and store.complete
    weights: dict[str, Tensor] = {}
    for group, names in tqdm(groups.items(), "reading quantised weights" if cached else "quantising",
                             unit="part", disable=None):
        part: dict[str, Tensor] = {}
        if cached:
            part = store.read(group, shapes)
        else:
            for name in names:
                part |= _encode(model, name, file_of[name], device)
            if store:
                store.write(group, part)
        for name, tensor in part.items():
            # a cache's tensors are views into a mapped file, and would change with it
            weights[name] = tensor.to(device, dtype if name in file_of else None, copy=cached)
    if store and not cached:
        store.finish(groups)
    model.load_state_dict(weights, assign=True)
    return model.requires_grad_(False)


def _groups(names: list[str]) -> dict[str, list[str]]:
    """The checkpoint's tensors in groups that are read and cached together: a block, or a matrix by itself.

    >>> _groups(["model.layers.0.a.weight", "model.layers.0.b.weight", "lm_head.weight"])
    {'model.layers.0': ['model.layers.0.a.weight', 'model.layers.0.b.weight'], 'lm_head': ['lm_head.weight']}
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        group = ".".join(parts[:3] if "layers" in parts else parts[:-1])
        groups.setdefault(group, []).append(name)
    return groups


def _encode(model: nn.Module, name: str, path: Path, device) -> dict[str, Tensor]:
    """A tensor of the checkpoint as the model holds it: its codes and scales, or the tensor itself."""
    parent, _, leaf = name.rpartition(".")
    owner = model.get_submodule(parent)
    matrix = owner.weight if leaf == "weight" else None
    with open_weights(path) as file:  # opened for each tensor: closing frees the pages that were read
        tensor = file.get_tensor(name)
        if isinstance(matrix, (NF4Matrix, Int8Matrix)):
            encoded = {f"{name}.{part}": codes for part, codes in matrix.encode(tensor.to(device)).items()}
        else:
            encoded = {name: tensor.to(device, copy=True)}
    for part in encoded.values():  # nan or inf in a matrix shows in its scales
        if part.is_floating_point() and not part.isfinite().all():
            raise ValueError(f"{path}: tensor {name} holds values that are not finite")
    return encoded


class Cache:
    """A folder with the quantised weights of one checkpoint; `complete` once it can be read."""

    def __init__(self, folder: Path, checkpoint: Path, files: set[Path]):
        self.folder = folder
        self.key = {"version": VERSION, "checkpoint": _checkpoint_digest(checkpoint, files)}
        self.complete = (folder / INDEX).is_file()
        if folder.resolve() == checkpoint.resolve():
            raise ValueError(f"{folder}: holds the checkpoint itself: give the cache a folder of its own")
        try:
            index = read_json(folder / INDEX) if self.complete else self.key
        except ValueError as error:
            raise ValueError(f"{error}; delete the folder {folder}, and it will be made anew") from None
        if index != {**index, **self.key}:
            raise ValueError(f"{folder}: holds quantised weights of another checkpoint than {checkpoint}, or "
                             "of another version of minidpo: give another cache, or delete the folder")

    def read(self, group: str, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
        """A group's tensors, views into its file. Raises ValueError if it is absent, damaged or another's."""
        path = self.folder / f"{group}.safetensors"
        try:
            with open_weights(path) as file:
                part = {name: file.get_tensor(name) for name in file.keys()}
                written_for = (file.metadata() or {}).get("checkpoint")
            expected = {name: shape for name, shape in shapes.items() if name.startswith(f"{group}.")}
            stored = {name: tensor.shape for name, tensor in part.items()}
            # two runs that fill one folder may leave a part of another checkpoint than the index names
            if stored != expected or written_for != self.key["checkpoint"]:
                raise ValueError(f"{path}: does not hold this part of the model")
        except ValueError as error:
            raise ValueError(f"{error}; delete the folder {self.folder}, and it will be made anew") from None
        return part

    def write(self, group: str, part: dict[str, Tensor]) -> None:
        on_host = {name: tensor.cpu() for name, tensor in part.items()}
        metadata = {"format": "pt", "checkpoint": self.key["checkpoint"]}
        write_weights(self.folder / f"{group}.safetensors", on_host, metadata)

    def finish(self, groups: dict[str, list[str]]) -> None:
        """Write the index: all parts are there."""
        write_json(self.folder / INDEX, {**self.key, "parts": list(groups)})


def _checkpoint_digest(folder: Path, files: set[Path]) -> str:
    """SHA-256 that tells checkpoints apart: over the config, and each file's name, size, date and samples."""
    digest = hashlib.sha256(json.dumps(read_json(folder / "config.json"), sort_keys=True).encode())
    for path in sorted(files):
        status = path.stat()
        digest.update(json.dumps([path.name, status.st_size, status.st_mtime_ns]).encode())
        with open(path, "rb") as file:
            for n in range(64):  # 4 KiB each; the first holds the names and shapes
                file.seek(status.st_size * n // 64)
                digest.update(file.read(4096))
    return digest.hexdigest()
