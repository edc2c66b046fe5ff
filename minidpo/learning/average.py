"""Averaging: the mean of the weights of adapters that began with one, such as a round's and its start's.

Training that teaches something new also unteaches. Half the way from the weights before it to those after
it, often most of the new is there already and most of the old still is.

Wortsman et al. 2022, arXiv:2109.01903 (WiSE-FT), with α = 1/2 for two adapters; after RLHF and DPO: Lin et
al. 2023, arXiv:2309.06256. Differs: they average W, this A and B, so that the rank stays. mean(B) mean(A) is
the mean of the B A less their covariance, which is of second order where adapters lie close to each other.
"""

import shutil
from collections.abc import Sequence

import torch
from torch import Tensor

from minidpo.config import AverageCommand
from minidpo.memory import lora
from minidpo.model.checkpoint import locate
from minidpo.system import processes
from minidpo.system.tensors import fingerprint, write_weights

APART = 0.5  # of the mean's length: adapters from two beginnings lie 1 from it, a round and its start 0.04


def average(config: AverageCommand) -> dict:
    """Write the mean of A and of B to `out`, with the first adapter's settings. Returns its fingerprint.

    Raises ValueError, and writes nothing, if there is one adapter only, if their shapes or bases are not the
    same, or if they did not begin with one adapter.
    """
    processes.refuse_torchrun("adapters are not averaged")
    if len(config.adapters) < 2:
        raise ValueError("a mean is of two adapters or more: name them with --adapters")
    first, loaded = config.adapters[0], [lora.read_weights(folder) for folder in config.adapters]
    forms, marks = [], {}  # marks of the base that they were made for; a file need not have them
    for folder, (tensors, metadata) in zip(config.adapters, loaded, strict=True):
        shape = lora.read_config(folder)
        forms.append((shape.rank, shape.alpha, {name: tensor.shape for name, tensor in tensors.items()}))
        if forms[-1] != forms[0]:
            raise ValueError(f"{folder}: its rank, alpha, targets or base are not those of {first}")
        for key in (lora.BASE_FINGERPRINT, lora.BASE_DTYPE):
            if key in metadata and marks.setdefault(key, metadata[key]) != metadata[key]:
                raise ValueError(f"{folder}: by its {key} trained beside another base than {first}")
    tensors = mean([tensors for tensors, _ in loaded])
    farthest = max(distance(each, tensors) for each, _ in loaded)
    if farthest > APART:
        raise ValueError(f"{', '.join(map(str, config.adapters))}: they did not begin with one adapter: the "
                         f"mean lies {farthest:.2f} of its length from them, {APART} at most has a meaning")
    write_weights(config.out / lora.WEIGHTS, tensors, {"format": "pt", **marks,
                                                       lora.ADAPTER_FINGERPRINT: fingerprint(tensors)})
    shutil.copyfile(locate(first, lora.FILES) / lora.CONFIG, config.out / lora.CONFIG)
    print(f"{config.out}: the mean of {len(loaded)} adapters, which lie {farthest:.3f} of its length from it")
    return {"fingerprint": fingerprint(tensors), "farthest": farthest}


def mean(adapters: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of each tensor over adapters of the same names and shapes, in fp32 or wider.

    >>> mean([{"a": torch.tensor([1.0])}, {"a": torch.tensor([2.0])}])["a"]
    tensor([1.5000])
    """
    def wide(tensor: Tensor) -> Tensor:
        return tensor.to(torch.promote_types(tensor.dtype, torch.float32))

    return {name: torch.stack([wide(tensors[name]) for tensors in adapters]).mean(0) for name in adapters[0]}


def distance(tensors: dict[str, Tensor], center: dict[str, Tensor]) -> float:
    """The length of the way from `center` to `tensors`, in lengths of `center`."""
    squared = sum((tensors[name] - there).square().sum() for name, there in center.items())
    return float((squared / sum(there.square().sum() for there in center.values())).sqrt())
