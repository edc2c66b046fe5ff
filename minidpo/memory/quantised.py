"""14. Streaming: a checkpoint larger than memory, quantised on its way in.

Saves the checkpoint itself: 15 GB of bf16 go by tensor after tensor, and what is held is the result and the
one tensor at hand. Costs two minutes on two cores, so the result can be kept in a folder that loads in
seconds: a file for each block, whole or not there, and an index, written last, that names the checkpoint.
A quantised model is chapter 5's with other leaves: NF4 in the blocks, 8 bits for the vocabulary, the rest
(norms, biases) as it was. Next: 15 episodes.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from minidpo.memory.nf4 import Int8Matrix, Int8Table, NF4Linear, NF4Matrix
from minidpo.model.checkpoint import checked, locate, read_config
from minidpo.model.decoder import Qwen2
from minidpo.system.files import read_json, write_json
from minidpo.system.tensors import open_weights, write_weights

VERSION = "1"  # of the cache: the layout of its files, and how weights become codes
INDEX = "index.json"


def quantise_layout(model: nn.Module, dtype: torch.dtype) -> None:
    """Put quantised leaves, as yet without values, where linear maps, embedding and head are."""
    for name, module in list(model.named_modules()):
        with torch.device("meta"):
            if type(module) is nn.Linear and ".layers." in name:
                model.set_submodule(name, NF4Linear(NF4Matrix(module.weight.shape, dtype), module.bias))
            elif name in ("model.embed_tokens", "lm_head"):
                model.set_submodule(name, Int8Table(Int8Matrix(module.weight.shape, dtype)))


@torch.no_grad()
def expand(model: nn.Module) -> None:
    """Write out for good all that was quantised, a matrix at a time: a plain model that computes the same,
    up to rounding where the head was read in pieces."""
    names = [name for name, module in model.named_modules() if isinstance(module, (NF4Linear, Int8Table))]
    # names alone: a list of modules would keep all codes alive to the end
    for name in tqdm(names, "writing out", unit="matrix", delay=2, leave=False):
        module = model.get_submodule(name)
        rows, columns = module.weight.shape
        bias = getattr(module, "bias", None)
        with torch.device("meta"):  # no memory, and no random numbers, for values that are there
            plain = (nn.Embedding(rows, columns) if name.endswith("embed_tokens") else
                     nn.Linear(columns, rows, bias=bias is not None))
        plain.weight = nn.Parameter(module.weight.dense(), requires_grad=False)
        if bias is not None:
            plain.bias = bias
        model.set_submodule(name, plain)


def is_quantised(model: nn.Module) -> bool:
    """Whether some of its weights are codes."""
    return any(isinstance(module, (NF4Linear, Int8Table)) for module in model.modules())


def load_quantised(source: str | Path, dtype: torch.dtype, device: str | torch.device = "cpu",
                   cache: str | Path | None = None) -> Qwen2:
    """The model of a folder or hub id with its blocks in NF4 and its vocabulary in 8 bits, on `device`.

    dtype: of the products, and of what is not quantised. cache: a folder that keeps the quantised weights;
    made if it is not there. Raises ValueError as `pretrained.load` does, for a weight that is not finite, and
    for a cache of another checkpoint or version; of that, nothing is overwritten.
    """
    folder = locate(source)
    config, _ = read_config(folder)
    with torch.device("meta"):
        model = Qwen2(config)  # shapes without memory
    home, names = checked(folder, model), list(model.state_dict())
    quantise_layout(model, dtype)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    kept = None if cache is None else Cache(Path(cache), folder, set(home.values()))
    weights: dict[str, Tensor] = {}
    groups = _groups(names)
    stored = kept is not None and kept.complete
    title = "reading quantised weights" if stored else "quantising"
    for group, members in tqdm(groups.items(), desc=title, unit="part", disable=None):
        if stored:
            part = kept.read(group, shapes)
        else:
            part = dict(item for name in members for item in _encode(model, name, home[name], device))
            if kept:
                kept.write(group, part)
        for name, tensor in part.items():
            # copy: a view into a mapped file would change with the file
            weights[name] = tensor.to(device, dtype if name in home else None, copy=stored)
    if kept and not stored:
        kept.finish(groups)
    model.load_state_dict(weights, assign=True)
    return model.requires_grad_(False)


def _groups(names: list[str]) -> dict[str, list[str]]:
    """The checkpoint's tensors in parts that are read and kept together: a block, or a table by itself.

    >>> _groups(["model.layers.0.a.weight", "model.layers.0.b.weight", "lm_head.weight"])
    {'model.layers.0': ['model.layers.0.a.weight', 'model.layers.0.b.weight'], 'lm_head': ['lm_head.weight']}
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        group = ".".join(parts[:3] if "layers" in parts else parts[:-1])
        groups.setdefault(group, []).append(name)
    return groups


def _encode(model: nn.Module, name: str, path: Path, device) -> Iterator[tuple[str, Tensor]]:
    """A tensor of the checkpoint as the model holds it: its codes and scales, or itself."""
    parent, _, leaf = name.rpartition(".")
    matrix = getattr(model.get_submodule(parent), leaf)
    with open_weights(path) as file:  # opened for each tensor: closing gives the pages that were read back
        tensor = file.get_tensor(name)
        if isinstance(matrix, (NF4Matrix, Int8Matrix)):
            kept = {f"{name}.{part}": codes for part, codes in matrix.encode(tensor.to(device)).items()}
        else:
            kept = {name: tensor.to(device, copy=True)}
    for part in kept.values():  # nan or inf shows in a matrix's maxima
        if part.is_floating_point() and not part.isfinite().all():
            raise ValueError(f"{path}: tensor {name} holds values that are not finite")
    yield from kept.items()


class Cache:
    """A folder with the quantised weights of one checkpoint; `complete` when it can be read."""

    def __init__(self, folder: Path, checkpoint: Path, files: set[Path]):
        self.folder = folder
        self.key = {"version": VERSION, "checkpoint": _identity(checkpoint, files)}
        self.complete = (folder / INDEX).is_file()
        if folder.resolve() == checkpoint.resolve():
            raise ValueError(f"{folder}: holds the checkpoint itself: give the cache a folder of its own")
        try:
            found = read_json(folder / INDEX) if self.complete else self.key
        except ValueError as error:
            raise ValueError(f"{error}; delete the folder {folder}, and it will be made anew") from None
        if found != {**found, **self.key}:
            raise ValueError(f"{folder}: holds quantised weights of another checkpoint than {checkpoint}, or "
                             "of another version of minidpo: give another cache, or delete the folder")

    def read(self, group: str, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
        """A part's tensors, views into its file. Raises ValueError if it is gone, damaged or another's."""
        path = self.folder / f"{group}.safetensors"
        try:
            with open_weights(path) as file:
                part = {name: file.get_tensor(name) for name in file.keys()}
                written_for = (file.metadata() or {}).get("checkpoint")
            wanted = {name: shape for name, shape in shapes.items() if name.startswith(f"{group}.")}
            # where two runs filled one folder, a part may not be of the checkpoint that the index names
            if ({name: tensor.shape for name, tensor in part.items()} != wanted
                    or written_for != self.key["checkpoint"]):
                raise ValueError(f"{path}: does not hold this part of the model")
        except ValueError as error:
            raise ValueError(f"{error}; delete the folder {self.folder}, and it will be made anew") from None
        return part

    def write(self, group: str, part: dict[str, Tensor]) -> None:
        on_host = {name: tensor.cpu() for name, tensor in part.items()}
        metadata = {"format": "pt", "checkpoint": self.key["checkpoint"]}
        write_weights(self.folder / f"{group}.safetensors", on_host, metadata)

    def finish(self, groups: dict[str, list[str]]) -> None:
        """All parts are there: say so."""
        write_json(self.folder / INDEX, {**self.key, "parts": list(groups)})


def _identity(folder: Path, files: set[Path]) -> str:
    """What tells a checkpoint from another: its config, and of each file name, size, date and samples."""
    digest = hashlib.sha256(json.dumps(read_json(folder / "config.json"), sort_keys=True).encode())
    for path in sorted(files):
        status = path.stat()
        digest.update(json.dumps([path.name, status.st_size, status.st_mtime_ns]).encode())
        with open(path, "rb") as file:
            for n in range(64):  # 4 KiB each; the first holds the names and shapes
                file.seek(status.st_size * n // 64)
                digest.update(file.read(4096))
    return digest.hexdigest()
