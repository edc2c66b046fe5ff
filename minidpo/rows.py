"""16. Rows: trajectories as padded tensors, and where in them the agent's tokens are.

The head is needed only at positions that predict an agent token, so a batch names those positions instead of
carrying a mask as wide as itself: the loss never sees anything else. Padding is on the right, where causal
attention cannot look. Next: 17 reference.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minidpo.chat import Dialogue
from minidpo.losses import dmpo_weights
from minidpo.qwen2 import Qwen2
from minidpo.scores import mean_weights, sum_weights, token_logps


class Batch(NamedTuple):
    """B rows of T tokens, and the N tokens in them that the agent wrote, row by row."""

    ids: Tensor  # (B,T)
    predict: Tensor  # (N,) index into the flattened (B*T) positions: the one before the token
    targets: Tensor  # (N,) the token
    row: Tensor  # (N,) which row it is in
    turn: Tensor  # (N,) which of the agent's turns
    rows: int  # B
    tokens: int  # without padding


def collate(dialogues: Sequence[Dialogue], device) -> Batch:
    """Rows side by side, padded on the right.

    >>> b = collate([Dialogue([5, 6, 7], [-1, 0, 0]), Dialogue([5, 8], [-1, 0])], "cpu")
    >>> b.targets.tolist(), b.predict.tolist(), b.row.tolist()
    ([6, 7, 8], [0, 1, 3], [0, 0, 1])
    """
    T = max(len(d.ids) for d in dialogues)
    ids = torch.zeros(len(dialogues), T, dtype=torch.long)  # padding is token 0: nothing ever reads it
    predict, targets, row, turns = [], [], [], []
    for b, dialogue in enumerate(dialogues):
        ids[b, :len(dialogue.ids)] = torch.tensor(dialogue.ids)
        for t, turn in enumerate(dialogue.turns):
            if turn >= 0:  # t > 0 always: a dialogue begins with a header that the agent did not write
                predict.append(b * T + t - 1)
                targets.append(dialogue.ids[t])
                row.append(b)
                turns.append(turn)
    lists = (predict, targets, row, turns)
    labels = [torch.tensor(values, dtype=torch.long, device=device) for values in lists]
    return Batch(ids.to(device), *labels, rows=len(dialogues), tokens=sum(len(d.ids) for d in dialogues))


def batch_logps(model: Qwen2, batch: Batch) -> Tensor:
    """log π of the batch's N agent tokens, (N,), in nats."""
    hidden = model(batch.ids).flatten(0, 1)[batch.predict]  # (N,C)
    return token_logps(hidden, model.head_weight, batch.targets)


def row_weights(batch: Batch, score: str, gamma: float | None = None) -> Tensor:
    """W's entries for the batch's tokens, (N,): "sum", "mean" (chapter 1) or "dmpo" (chapter 2)."""
    mask = torch.ones_like(batch.row, dtype=torch.bool)
    if score == "dmpo":
        return dmpo_weights(mask, batch.row, batch.rows, batch.turn, gamma)
    return {"sum": sum_weights, "mean": mean_weights}[score](mask, batch.row, batch.rows)


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of rows in micro-batches of at most `budget` tokens with padding, rows of like length together.

    A row longer than the budget gets a micro-batch of its own: nothing is cut or dropped.

    >>> pack([3, 9, 4], budget=8)
    [[0, 2], [1]]
    """
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * lengths[i] <= budget:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def check_context(dialogues: Sequence[Dialogue], names: Sequence[str], limit: int) -> None:
    """Refuse, by name, a trajectory in which the agent wrote nothing or that is too long for the model."""
    for dialogue, name in zip(dialogues, names):
        if not any(turn >= 0 for turn in dialogue.turns):
            raise ValueError(f"{name}: the agent wrote nothing in it, so there is nothing to learn from")
        if len(dialogue.ids) > limit:
            raise ValueError(f"{name}: {len(dialogue.ids)} tokens, but the model reads at most {limit}")
