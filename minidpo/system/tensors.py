"""Tensors on disk: safetensors files, written whole or not at all, and told apart by their content."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from minidpo.system.files import replacing


@contextmanager
def open_weights(path: Path) -> Iterator[safe_open]:
    """A safetensors file to read from. Raises ValueError when it is missing, cut short or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (FileNotFoundError, SafetensorError) as error:
        raise ValueError(f"{path}: not a complete safetensors file ({error})") from None


def write_weights(path: str | Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """A safetensors file, in place at once and whole. Raises OSError when it cannot be written."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as written:
        try:
            save_file(tensors, written, metadata)
        except SafetensorError as error:  # a full disk, which it does not call so
            raise OSError(f"{path}: cannot be written ({error})") from None
        _in_order(written)


def _in_order(path: Path) -> None:
    """Sort a file's metadata, whose order safetensors leaves to chance: the same shall be the same file."""
    with open(path, "rb+") as file:
        header = json.loads(file.read(size := int.from_bytes(file.read(8), "little")))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        assert len(text) <= size, f"{path}: the header came out longer than it was"
        file.seek(8)
        file.write(text.ljust(size))


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, in the order of the names; the device does not count.

    >>> fingerprint({"a": torch.zeros(2)})[:8], fingerprint({"a": torch.zeros(2, 1)})[:8]
    ('1815de51', '6385b3d9')
    """
    digest = hashlib.sha256()
    for name in tqdm(sorted(tensors), "fingerprint", unit="tensor", delay=2, leave=False):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
