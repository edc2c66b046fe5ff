"""A quantised model: NF4 in its blocks, 8 bits for its vocabulary, made from a checkpoint larger than memory.

The checkpoint is read and quantised tensor by tensor: of 15 GB of bf16, memory holds the result and one
tensor. That takes two minutes on two cores. A cache folder keeps the result, which loads in seconds: one file
for each block, and an index, written last, that names the checkpoint. Norms and biases are not quantised. A
GGUF file's blocks can also be held as they are (`memory/ggml_matrix`).
"""

import hashlib
import json
import zlib
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from minidpo.memory.frozen import FrozenLinear, FrozenTable, Matrix
from minidpo.memory.ggml_matrix import GGMLMatrix
from minidpo.memory.nf4 import Int8Matrix, NF4Matrix
from minidpo.model import checkpoint, ggml, gguf_file
from minidpo.model.checkpoint import locate, locate_tensors
from minidpo.model.decoder import Transformer
from minidpo.model.gguf_file import is_gguf
from minidpo.system.files import read_json, write_json
from minidpo.system.tensors import bytes_of, read_weights, require_finite, write_weights

VERSION = "1"  # of the cache: the layout of its files, and how weights become codes
INDEX = "index.json"


def quantise_layout(
    model: nn.Module, dtype: torch.dtype, formats: Mapping[str, str] | None = None
) -> None:
    """Replace linear maps of blocks, embedding and head by quantised modules without values. `formats`: those
    of a GGUF file by tensor, to hold its own blocks; what is stored plain there stays plain."""
    for name, module in list(model.named_modules()):
        is_table = name in ("model.embed_tokens", "lm_head")
        is_block_map = type(module) is nn.Linear and ".layers." in name
        format_name = (formats or {}).get(f"{name}.weight")
        if not (is_table or is_block_map) or format_name in ggml.PLAIN:
            continue
        with torch.device("meta"):
            if format_name:
                matrix = GGMLMatrix(module.weight.shape, dtype, format_name)
            else:
                matrix = (Int8Matrix if is_table else NF4Matrix)(module.weight.shape, dtype)
            model.set_submodule(
                name, FrozenTable(matrix) if is_table else FrozenLinear(matrix, module.bias)
            )


@torch.no_grad()
def expand(model: nn.Module) -> None:
    """Replace every quantised matrix by its values in full; only a head read in pieces rounds otherwise."""
    # only names: a list of modules would keep all codes in memory to the end
    quantised = (FrozenLinear, FrozenTable)
    names = [name for name, module in model.named_modules() if isinstance(module, quantised)]
    for name in tqdm(names, "expanding", unit="matrix", delay=2, leave=False):
        module = model.get_submodule(name)
        rows, columns = module.weight.shape
        with torch.device("meta"):  # takes no memory and no random numbers
            if name.endswith("embed_tokens"):
                plain = nn.Embedding(rows, columns)
            else:
                plain = nn.Linear(columns, rows, bias=False)
        plain.weight = nn.Parameter(module.weight.dense(), requires_grad=False)
        if isinstance(module, FrozenLinear):
            plain.bias = module.bias
        model.set_submodule(name, plain)


def load_quantised(
    source: str | Path,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    cache: str | Path | None = None,
    formats: Mapping[str, str] | None = None,
) -> Transformer:
    """The model of a folder, GGUF file or hub id, frozen on `device`: blocks in NF4 and vocabulary in 8 bits,
    or with `formats`, a GGUF file's `tensor_formats`, the blocks that it has.

    dtype: of the products, and of weights that are not quantised. cache: a folder for the result. Raises
    ValueError as `checkpoint.load` does, for another model's cache, and for a weight that is not finite.
    """
    folder = locate(source)
    model, file_of = locate_tensors(folder)
    parts = {part: list(names) for part, names in groupby(model.state_dict(), _part_of)}
    quantise_layout(model, dtype, formats)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    files = set(gguf_file.read(folder).files if is_gguf(folder) else file_of.values())
    store = None if cache is None else Cache(Path(cache), folder, files)
    cached = store is not None and store.complete
    weights: dict[str, Tensor] = {}
    for part, names in tqdm(parts.items(), "quantised weights", unit="part", disable=None):
        if cached:
            tensors = store.read(part, shapes)
        else:
            tensors = {}
            for name in names:
                tensors |= _encode(model, name, file_of[name], device)
            if store:
                store.write(part, tensors)
        for name, tensor in tensors.items():
            # a cache's tensors are views into a mapped file, and would change with it
            weights[name] = tensor.to(device, dtype if name in file_of else None, copy=cached)
            require_finite(file_of.get(name, folder), name, weights[name])
    if store and not cached:
        write_json(store.folder / INDEX, {**store.key, "parts": list(parts)})
    model.load_state_dict(weights, assign=True)
    return model.requires_grad_(False)


def tensor_formats(path: Path) -> dict[str, str]:
    """A GGUF file's formats by tensor, such as Q4_K. ValueError for another file or a format not read."""
    if not is_gguf(path):
        raise ValueError(
            f"{path}: quantize keep holds the blocks of a GGUF file, and this is none: use "
            "--machine.quantize nf4"
        )
    locate_tensors(path)  # refuses what is not read
    with checkpoint.open_weights(path) as file:
        return {name: file.get_slice(name).get_dtype() for name in file.keys()}


def _part_of(name: str) -> str:
    """What a tensor is read and cached with: its block, as model.layers.0, or its own module, as lm_head."""
    words = name.split(".")
    return ".".join(words[:3] if "layers" in words else words[:-1])


def _encode(model: nn.Module, name: str, path: Path, device) -> dict[str, Tensor]:
    """A tensor of the checkpoint as the model holds it: its codes and scales, or itself."""
    parent, _, leaf = name.rpartition(".")
    matrix = model.get_submodule(parent).weight if leaf == "weight" else None
    # opened for each tensor: closing frees the pages that were read
    with checkpoint.open_weights(path) as file:
        if isinstance(matrix, GGMLMatrix):
            blocks = file.get_blocks(name)
            if not ggml.is_finite(matrix.format, blocks):
                raise ValueError(f"{path}: tensor {name} holds values that are not finite")
            return {f"{name}.codes": blocks.to(device)}
        tensor = file.get_tensor(name)
        if isinstance(matrix, Matrix):
            codes = matrix.encode(tensor.to(device))
            encoded = {f"{name}.{part}": values for part, values in codes.items()}
        else:
            encoded = {name: tensor.to(device, copy=True)}
    require_finite(path, name, *encoded.values())  # nan or inf in a matrix shows in its scales
    return encoded


class Cache:
    """A folder with the quantised weights of one checkpoint; `complete` once it can be read."""

    def __init__(self, folder: Path, checkpoint: Path, files: set[Path]):
        if folder.resolve() == checkpoint.resolve():
            raise ValueError(
                f"{folder}: holds the checkpoint itself: give the cache another folder"
            )
        self.folder = folder
        self.key = {"version": VERSION, "checkpoint": _checkpoint_digest(checkpoint, files)}
        self.complete = (folder / INDEX).is_file()
        index = read_json(folder / INDEX) if self.complete else self.key
        if not self.key.items() <= index.items():
            raise ValueError(
                f"{folder}: holds quantised weights of another checkpoint than {checkpoint}, or "
                "of another version of minidpo: give another cache, or delete the folder"
            )

    def read(self, part: str, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
        """A part's tensors, views into its file. Raises ValueError if it is absent, damaged or another's."""
        path = self.folder / f"{part}.safetensors"
        try:
            tensors, said = read_weights(path)
            stored = {name: tensor.shape for name, tensor in tensors.items()}
            wanted = {name: shape for name, shape in shapes.items() if name.startswith(f"{part}.")}
            # two runs that fill one folder may leave a part of another checkpoint than the index names
            if stored != wanted or said.get("checkpoint") != self.key["checkpoint"]:
                raise ValueError(f"{path}: does not hold this part of the model")
            if said.get("crc32") != crc32(tensors):
                raise ValueError(f"{path}: is damaged, its checksum is another")
        except ValueError as error:
            raise ValueError(
                f"{error}; delete the folder {self.folder}, and it will be made anew"
            ) from None
        return tensors

    def write(self, part: str, tensors: dict[str, Tensor]) -> None:
        on_host = {name: tensor.cpu() for name, tensor in tensors.items()}  # once, for both
        write_weights(
            self.folder / f"{part}.safetensors",
            on_host,
            {"format": "pt", "checkpoint": self.key["checkpoint"], "crc32": crc32(on_host)},
        )


def crc32(tensors: Mapping[str, Tensor]) -> str:
    """Checksum of the tensors' bytes, in the order of their names."""
    total = 0
    for name in sorted(tensors):
        total = zlib.crc32(bytes_of(tensors[name]), total)
    return f"{total:08x}"


def _checkpoint_digest(folder: Path, files: set[Path]) -> str:
    """SHA-256 that tells checkpoints apart: over the config, and each file's name, size, date and samples."""
    # a GGUF file says all itself
    settings = {} if is_gguf(folder) else read_json(folder / "config.json")
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for path in sorted(files):
        status = path.stat()
        digest.update(json.dumps([path.name, status.st_size, status.st_mtime_ns]).encode())
        with open(path, "rb") as file:
            for n in range(64):  # 4 KiB each; the first holds the names and shapes
                file.seek(status.st_size * n // 64)
                digest.update(file.read(4096))
    return digest.hexdigest()
