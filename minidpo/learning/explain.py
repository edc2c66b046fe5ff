"""Explain: one pair, as the loss sees it.

`train.py dpo --explain` prints each token with its mask, turn, weight and log-probs, then the four scores,
the loss and its gradient on the policy's two; nothing is trained or written. The same log-probs of two
agents, side by side, are the colours of the report.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from minidpo.data.batch import batch_logps, batch_scores, collate
from minidpo.data.pairs import Pair
from minidpo.data.tree import grow
from minidpo.learning.dpo import DPO, pair_loss_of
from minidpo.learning.preferences import (
    mismatched,
    pair_batches,
    pair_dialogues,
    pair_loss,
    score_all,
    step_baseline,
    tokenise,
)
from minidpo.memory import lora
from minidpo.memory.context import Context
from minidpo.memory.loading import open_chat, open_model, to_compute
from minidpo.model.chat import Chat, Dialogue
from minidpo.model.decoder import Transformer
from minidpo.system.tensors import to_device


class Token(NamedTuple):
    """A token of a dialogue; its log-probs are there if the agent wrote it."""

    text: str
    turn: int  # of the agent, from 0; -1: not its own
    before: float | None  # log π of the one agent, nats
    after: float | None  # and of the other


@torch.no_grad()
def written_logps(model: Transformer, dialogues: Sequence[Dialogue]) -> list[list[float]]:
    """log π of the tokens that the agent wrote, in order, of each of some dialogues; they make one tree."""
    batch = to_device(collate([dialogues]), model.head_weight.device)
    logps = batch_logps(model, batch)[batch.column].cpu()
    return [
        part.tolist() for part in logps.split([len(dialogue.written) for dialogue in dialogues])
    ]


def tokens_of(
    chat: Chat, dialogue: Dialogue, before: Sequence[float], after: Sequence[float]
) -> list[Token]:
    """A dialogue's tokens with the log-probs of two agents, as `written_logps` gives them."""
    logps = iter(zip(before, after, strict=True))
    return [
        Token(
            chat.tokenizer.decode([token], skip_special_tokens=False),
            turn,
            *(next(logps) if turn >= 0 else (None, None)),
        )
        for token, turn in zip(dialogue.ids, dialogue.turns)
    ]


def movements(
    context: Context, before: Path, after: Path, pairs: Sequence[Pair]
) -> list[dict[str, list[Token]]]:
    """Of each pair, "chosen" and "rejected", the tokens with their log-probs under two adapters of a base."""
    chat, limit = open_chat(context.model)
    dialogues, _ = pair_dialogues(pairs, chat, limit, context.world.system_prompt)
    model, logps = open_model(context.model, to_compute(context.machine, after)), []
    for adapter in (before, after):
        lora.switch_adapter(model, adapter)
        logps.append(
            [
                side
                for c in tqdm(range(0, len(dialogues), 2), "pairs", delay=2, leave=False)
                for side in written_logps(model, dialogues[c : c + 2])
            ]
        )
    sides = [tokens_of(chat, *side) for side in zip(dialogues, *logps)]
    return [
        {"chosen": chosen, "rejected": rejected}
        for chosen, rejected in zip(sides[::2], sides[1::2])
    ]


def explain(
    context: Context, pairs: Sequence, options: DPO, *, adapter: Path, reference: Path | None = None
) -> dict:
    """Print the first of the pairs as training would see it. Returns the numbers printed last.

    The policy is `adapter`; the reference is `reference` or the same. So a trained adapter, with the one it began
    from as the reference, shows what became of a pair.
    """
    settings = pair_loss_of(options)
    machine = to_compute(context.machine, adapter, reference)
    chat, limit = open_chat(context.model)
    elsewhere = [pair for pair in pairs if pair.chosen.instance != pairs[0].chosen.instance]
    # KTO's baseline reads a step's pairs, and needs two instances
    some = [*pairs[: options.batch], *elsewhere[:1]]
    data = tokenise(some, chat, limit, context.world.system_prompt, settings.until)
    baseline_data, ref_baseline = None, None
    sides = [data.dialogues[d] for d in data.pairs[0]]
    model = open_model(context.model, machine)
    lora.switch_adapter(model, reference or adapter)
    before, needs_reference = written_logps(model, sides), settings.loss.needs_reference
    ref = torch.zeros(len(data.dialogues))
    if needs_reference:
        ref = score_all(model, data, settings, machine).cpu()
    if settings.loss.needs_baseline:
        baseline_data = mismatched(data, limit)
        ref_baseline = score_all(model, baseline_data, settings, machine).cpu()
    if reference:
        lora.switch_adapter(model, adapter)
    after = written_logps(model, sides)
    step = range(min(options.batch, len(pairs)))
    baseline = step_baseline(model, baseline_data, ref_baseline, step, settings, machine)
    batch = next(
        pair_batches(data, [0], ref, settings, machine, model.head_weight.device, baseline)
    )
    with torch.no_grad():
        scores = batch_scores(model, batch.trees)
    loss, numbers = pair_loss(settings, batch, scores.requires_grad_())
    loss.backward()

    chosen, rejected = (data.names[d] for d in data.pairs[0])
    alone, together = [len(side.ids) for side in sides], len(grow([side.ids for side in sides]).ids)
    print(
        f"The first of {len(pairs)} pairs, {pairs[0].source}: {chosen} over {rejected}.\n"
        f"One by one they have {alone[0]} + {alone[1]} tokens, their tree has {together}."
    )
    rows = (batch.chosen, batch.rejected)
    weights = [batch.trees.weight[batch.trees.row == row].tolist() for row in rows]
    for name, *side in zip(("chosen", "rejected"), sides, before, after, weights):
        print(f"\n{name}", *lines_of(chat, *side), sep="\n")
    result = {}
    for side, row, score in (
        ("chosen", batch.chosen, batch.ref_chosen),
        ("rejected", batch.rejected, batch.ref_rejected),
    ):
        result[f"policy_{side}"] = scores[row].item()
        result[f"gradient_{side}"] = scores.grad[row].item()
        if needs_reference:
            result[f"ref_{side}"] = score.item()
    result |= {"loss": loss.item(), **{name: value.item() for name, value in numbers.items()}}
    nll = settings.nll * batch.solved.item()  # a failure is not imitated
    print_scores(options.loss, result, scores, nll)
    return result


def lines_of(
    chat: Chat,
    dialogue: Dialogue,
    before: Sequence[float],
    after: Sequence[float],
    weights: Sequence[float],
) -> Iterator[str]:
    """A line for each token of the agent; what it did not write, and no loss reads, is folded."""
    yield "  token  mask  turn       W  reference   policy   text"
    weight, t = iter(weights), 0
    for written, group in groupby(
        tokens_of(chat, dialogue, before, after), lambda token: token.turn >= 0
    ):
        tokens = list(group)
        if written:
            for place, token in enumerate(tokens, t):
                yield (
                    f"{place:7}     1{token.turn:6}{next(weight):8.3f}{token.before:11.4f}"
                    f"{token.after:9.4f}   {token.text!r}"
                )
        else:
            text = "".join(token.text for token in tokens)
            text = text if len(text) < 60 else f"{text[:24]} ... {text[-28:]}"
            yield f"{t:7}     0{'':35}{len(tokens)} tokens: {text!r}"
        t += len(tokens)


def print_scores(loss: str, numbers: dict[str, float], scores: Tensor, nll: float) -> None:
    """What the loss reads and what it gives back."""
    print(f"\nscore = sum of W x logp{'':9}reference    policy  log-ratio   d loss / d score")
    for side in ("chosen", "rejected"):
        policy, ref = numbers[f"policy_{side}"], numbers.get(f"ref_{side}")
        ref, ratio = ("none", "") if ref is None else (f"{ref:.4f}", f"{policy - ref:.4f}")
        print(f"  {side:30}{ref:>10}{policy:10.4f}{ratio:>11}{numbers[f'gradient_{side}']:19.4f}")
    if nll:
        print(
            f"  {'chosen, mean a token (nll)':30}{'':10}{scores[-1].item():10.4f}{'':11}"
            f"{scores.grad[-1].item():19.4f}"
        )
    print(
        f"\n{loss}: loss {numbers['loss']:.4f}"
        + (f", of it nll {-nll * scores[-1].item():.4f}, which raises the chosen" if nll else "")
        + f". One step down the two scores' gradient {direction(numbers['gradient_chosen'])} the chosen "
        f"and {direction(numbers['gradient_rejected'])} the rejected."
    )


def direction(gradient: float) -> str:
    """What a step down the gradient does to a score."""
    return "raises" if gradient < 0 else "lowers" if gradient > 0 else "leaves"
