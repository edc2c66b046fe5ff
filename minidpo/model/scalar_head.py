"""A scalar head: one number read off a hidden state, such as a reward model's reward or PPO's value."""

from pathlib import Path

import torch
from torch import Tensor, nn

from minidpo.model.decoder import Transformer
from minidpo.system.tensors import read_weights, require_finite, write_weights

FILE = "head.safetensors"  # beside the files of the adapter that makes its hidden states


class ScalarHead(nn.Linear):
    """w·h of hidden states h, (N,C) -> (N,), in fp32 (fp64 beside an fp64 model). w is 0 at first.

    There is no bias: in a pair it would cancel, and for a value, entries of h that hardly change serve as one.
    """

    def __init__(self, model: Transformer):
        norm = model.model.norm.weight
        dtype = torch.promote_types(norm.dtype, torch.float32)
        super().__init__(len(norm), 1, bias=False, device=norm.device, dtype=dtype)
        nn.init.zeros_(self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.to(self.weight.dtype))[..., 0]

    def save(self, folder: Path, kind: str) -> None:
        """Write it beside an adapter. kind: what its number is: "reward", "step" or "value"."""
        write_weights(folder / FILE, {kind: self.weight}, {})

    def load(self, folder: Path, kind: str) -> None:
        """Read the head in a folder, if there is one. ValueError if it is damaged, or of another kind or model."""
        if not (folder / FILE).is_file():
            return
        stored, _ = read_weights(folder / FILE)
        if list(stored) != [kind] or stored[kind].shape != self.weight.shape:
            raise ValueError(
                f"{folder / FILE}: not a {kind} head for this model: give another adapter"
            )
        weight = stored[kind].to(self.weight.dtype)
        require_finite(folder / FILE, kind, weight)
        self.weight.data.copy_(weight)


def kind_in(folder: Path) -> str | None:
    """The kind of the head in a folder; None if there is none."""
    if not (folder / FILE).is_file():
        return None
    return next(iter(read_weights(folder / FILE)[0]), None)
