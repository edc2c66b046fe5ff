"""Averaging: the mean of the weights of several adapters that were trained from the same one.

Training that teaches something new also makes a model forget; the mean of the weights before and after can keep
most of both (on MiniWoB++: docs/miniwob.md).

Wortsman et al. 2022, arXiv:2109.01903 (WiSE-FT; α is a weight); after RLHF and DPO: Lin et al. 2023,
arXiv:2309.06256. Differs from the papers: they average W; we average A and B, so that the rank stays. The
product mean(B) mean(A) is the mean of the products B A less their covariance, which is of second order in the
distance between the adapters.
"""

from collections.abc import Sequence
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from minidpo.learning.training_run import finished
from minidpo.memory import lora
from minidpo.model import scalar_head
from minidpo.system.files import read_json
from minidpo.system.run_folder import RunFolder

# least cosine of an adapter's A with the first one's; adapters from different starts have about 0
SAME_START = 0.1


def mean(adapters: Sequence[dict[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """Σ w_i T_i / Σ w_i of each tensor T over adapters with the same names and shapes, for weights above 0.
    Summed in fp64 and rounded once, to fp32 or the widest dtype among them.

    >>> mean([{"lora_A": torch.tensor([1.0])}, {"lora_A": torch.tensor([2.0])}], [1, 3])["lora_A"]
    tensor([1.7500])
    """
    total, averaged = sum(weights), {}
    for name in adapters[0]:
        tensors = [adapter[name] for adapter in adapters]
        dtype = reduce(torch.promote_types, [tensor.dtype for tensor in tensors], torch.float32)
        parts = [w / total * tensor.double() for w, tensor in zip(weights, tensors, strict=True)]
        averaged[name] = torch.stack(parts).sum(0).to(dtype)
    return averaged


def average(run: RunFolder, adapters: Sequence[Path], weights: Sequence[float] = ()) -> Path:
    """Write the mean of the adapters to the run's adapter, with the first one's settings. Returns its folder.

    weights: how much each counts; (): all equally. Raises ValueError, and writes nothing, if the adapters cannot
    be averaged (`checked`).
    """
    if run.finished:
        return finished(run)
    folders = [lora.located(adapter) for adapter in adapters]
    tensors, base = checked(folders)
    averaged = mean(tensors, weights or [1.0] * len(folders))
    run.begin()
    run.call(
        lora.write, run.folder / "adapter", averaged, base, read_json(folders[0] / lora.CONFIG)
    )
    run.finish()
    print(
        f"{run.folder / 'adapter'}: the mean of {len(folders)} adapters, which may be worse than they are"
    )
    return run.folder / "adapter"


def checked(folders: Sequence[Path]) -> tuple[list[dict[str, Tensor]], dict[str, str]]:
    """The tensors of adapters, and the metadata of the base that they share. Raises ValueError that names the
    folder if adapters cannot be averaged; prints which files are left out."""
    adapters, forms, base = [], [], {}
    first = folders[0]
    for folder in folders:
        shape = lora.read_config(folder)
        tensors, metadata = lora.read_weights(folder)
        forms.append((shape.rank, shape.alpha, {name: t.shape for name, t in tensors.items()}))
        if forms[-1] != forms[0]:
            raise ValueError(
                f"{folder}: rank {shape.rank}, alpha {shape.alpha:g} and {len(tensors)} tensors "
                f"have no mean with {first}: its rank, alpha, targets or base are others"
            )
        for key in (lora.BASE_FINGERPRINT, lora.BASE_DTYPE):  # older adapters and PEFT's have none
            if key in metadata and base.setdefault(key, metadata[key]) != metadata[key]:
                raise ValueError(
                    f"{folder}: {key} is not that of {first}: trained beside another base, or "
                    "--machine.dtype or --machine.quantize was another"
                )
        adapters.append(tensors)
        cosine = cosine_of_a(adapters[0], tensors)
        if cosine < SAME_START:
            raise ValueError(
                f"{folder}: not trained from the adapter that {first} was trained from (their A "
                f"have the cosine {cosine:.2f}): these have no mean"
            )
        if (folder / scalar_head.FILE).is_file():
            print(f"{folder / scalar_head.FILE} is left out")
    return adapters, base


def cosine_of_a(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """The cosine, from -1 to 1, between two adapters' A matrices, each taken as one long vector."""
    names = [name for name in first if "lora_A" in name]
    flat = [
        torch.cat([each[name].double().flatten() for name in names]) for each in (first, second)
    ]
    return torch.cosine_similarity(*flat, dim=0).item()
