"""The reference: the policy at step 0, or another adapter, scored once.

The same code that scores the policy scores the reference before the first step and keeps the scores in a file.
So DPO's first loss without NLL is ln 2 (up to rounding, because trees differ), there is no second model, and no
adapter is switched off. The file's key covers all that the numbers depend on, up to rounding: base, adapter,
token ids, the weights W, dtype. A file with another key is refused, never used or replaced. The log-probs of
rollouts and PPO's values are kept in such files, too.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from minidpo.learning.preferences import PairLoss, Preferences, score_all
from minidpo.learning.trainer import check_finite
from minidpo.memory import lora
from minidpo.memory.machine import Machine
from minidpo.model.chat import Dialogue
from minidpo.model.decoder import Transformer
from minidpo.system.run_folder import RunFolder, write_tensors
from minidpo.system.tensors import fingerprint, read_weights

VERSION = "1"  # of the file


def reference_scores(
    run: RunFolder,
    model: Transformer,
    data: Preferences,
    name: str,
    *,
    settings: PairLoss,
    machine: Machine,
    weights: str,
) -> Tensor:
    """The scores (dialogues,) of the model in its present state, read from the run's file `name`, or computed and
    written there. weights: as in `key`. A loss without reference gets zeros, and no file. Raises ValueError if a
    score is not finite."""
    if not settings.loss.needs_reference:
        return torch.zeros(len(data.dialogues))
    wanted = key(weights, data.dialogues, f"{settings.loss.score} {settings.parameters.gamma}")
    return cached(
        run.folder / name,
        wanted,
        lambda: check_finite(score_all(model, data, settings, machine), data.names),
    )


def identity(model: Transformer, base: str, shape: lora.LoRAConfig) -> str:
    """What tells this model from every other: the fingerprint of its base, its adapter and the adapter's shape, and
    the dtype if that is not the base's own."""
    computed = f" {model.head_weight.dtype}" if model.read_in else ""
    return f"{base} {model.config} {fingerprint(lora.adapter_tensors(model))} {shape}{computed}"


def key(weights: str, dialogues: list[Dialogue], score: str) -> str:
    """SHA-256 of all that determines some numbers of these dialogues, up to rounding. weights: the model's
    `identity`. score: which numbers; for scores, the kind of W and its parameters."""
    digest = hashlib.sha256(f"{VERSION} {weights} {score}".encode())
    for dialogue in dialogues:
        digest.update(repr((dialogue.ids, dialogue.turns)).encode())
    return digest.hexdigest()


def cached(path: Path, wanted: str, compute: Callable[[], Tensor]) -> Tensor:
    """The scores (n,) in `path`, if their key is `wanted`; without a file they are computed and written there.
    Raises ValueError if the file has another key, is damaged or cannot be read."""
    if not path.is_file():
        values = compute().cpu()
        write_tensors(
            path,
            {"scores": values},
            {"version": VERSION, "key": wanted, "sha256": fingerprint({"scores": values})},
        )
        return values
    try:
        stored, metadata = read_weights(path)
    except ValueError as error:
        raise ValueError(f"{error}; delete it") from None
    if metadata.get("version") != VERSION:
        raise ValueError(f"{path}: made by another version of minidpo; delete it")
    if metadata.get("sha256") != fingerprint(stored):
        raise ValueError(f"{path}: damaged (its checksum is wrong); delete it")
    if metadata.get("key") != wanted:
        raise ValueError(
            f"{path}: scores of other weights, data or settings; delete it or give another --out"
        )
    return stored["scores"]
