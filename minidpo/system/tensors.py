"""Tensors: in safetensors files, which are written whole or not at all, and on their way to a device.

The same tensors and metadata always give the same bytes, so two files can be compared with `cmp`.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from minidpo.system.files import is_lfs_pointer, replacing

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}  # what a file calls them
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@contextmanager
def open_weights(path: Path) -> Iterator[safe_open]:
    """Open a safetensors file for reading. Raises ValueError if it is missing, cut short or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (FileNotFoundError, SafetensorError) as error:
        if is_lfs_pointer(Path(path)):
            raise ValueError(
                f"{path}: a Git LFS pointer instead of the weights: run `git lfs pull` in its folder"
            ) from None
        raise ValueError(f"{path}: not a complete safetensors file ({error})") from None


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors of a safetensors file by name, and its metadata. Raises ValueError as `open_weights` and
    `require_finite` do."""
    with open_weights(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        metadata = file.metadata() or {}
    for name, tensor in tensors.items():
        require_finite(path, name, tensor)
    return tensors, metadata


def require_finite(path: str | Path, name: str, *values: Tensor) -> None:
    """Raise ValueError if a tensor holds a value that is not finite in its present dtype.

    A model with one such weight writes nonsense, or fails an hour later for no visible reason.
    """
    for part in values:
        # aminmax passes NaN on; isfinite() takes fifty times as long and allocates a second tensor
        if (
            part.dtype in FLOATS
            and part.numel()
            and not all(end.isfinite() for end in part.detach().aminmax())
        ):
            raise ValueError(
                f"{path}: tensor {name} holds values that are not finite in {name_of(part.dtype)}: "
                "NaN, infinity, or a number too large for it"
            )


def name_of(dtype: torch.dtype) -> str:
    """A dtype's name, such as float32."""
    return str(dtype).removeprefix("torch.")


def write_weights(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]
) -> None:
    """Write a safetensors file, whole or not at all. Raises OSError if it cannot be written, ValueError for
    a tensor that is not finite.

    The library's `save_file` chooses its own temporary name, which would stay after a kill, and writes metadata in
    any order. A file is the length of its header, the header in JSON, then the bytes.
    """
    for name, tensor in tensors.items():
        require_finite(path, name, tensor)
    header: dict = {"__metadata__": dict(sorted(metadata.items()))}
    end, ordered = 0, sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    for name, tensor in ordered:
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end := end + tensor.nbytes],
        }
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    # aligns all tensors, because the widest dtypes come first
    text += b" " * (-len(text) % 8)
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            file.write(bytes_of(tensor))


def to_device(value, device: torch.device):
    """A tensor, or a named tuple with its tensors, moved to the device. Other values stay as they are."""
    if isinstance(value, Tensor):
        # pinned memory: otherwise the copy would wait for all queued work of the GPU
        if device.type == "cuda":
            return value.pin_memory().to(device, non_blocking=True)
        return value.to(device)
    if hasattr(value, "_fields"):
        return value._make(to_device(item, device) for item in value)
    return value


def bytes_of(tensor: Tensor) -> np.ndarray:
    """The bytes of a tensor on any device, as uint8."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def fingerprint(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, in the order of the names, whatever the device.
    dtype: the tensors are converted to it first.

    >>> fingerprint({"a": torch.zeros(2)})[:8], fingerprint({"a": torch.zeros(2, 1)})[:8]
    ('1815de51', '6385b3d9')
    """
    digest = hashlib.sha256()
    for name in tqdm(sorted(tensors), "fingerprint", unit="tensor", delay=2, leave=False):
        tensor = tensors[name] if dtype is None else tensors[name].to(dtype)
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()
