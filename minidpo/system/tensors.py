"""Tensors on disk: safetensors files that are read, written whole or not at all, and compared by content.

The same tensors and metadata always give the same bytes, so two files can be compared with `cmp`.
"""

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
    """Open a safetensors file for reading. Raises ValueError if it is missing, cut short or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (FileNotFoundError, SafetensorError) as error:
        raise ValueError(f"{path}: not a complete safetensors file ({error})") from None


def write_weights(path: str | Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file, whole or not at all. Raises OSError if it cannot be written."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        try:
            save_file(tensors, temporary, metadata)
        except SafetensorError as error:  # safetensors does not raise OSError on a full disk
            raise OSError(f"{path}: cannot be written ({error})") from None
        with open(temporary, "rb+") as file:  # safetensors writes metadata in any order: files would differ
            header = json.loads(file.read(size := int.from_bytes(file.read(8), "little")))
            header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
            text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
            assert len(text) <= size, f"{path}: the sorted header is longer than the original"
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
