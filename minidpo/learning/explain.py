"""Explain: one pair, as the loss sees it.

`train.py dpo --explain` prints each token with its mask, turn, weight and log-probs, then the four scores,
the loss and its gradient by the policy's two scores; nothing is trained or written. The report colours its
tokens by the same log-probs, those of two agents.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from minidpo.data.batch import batch_logps, batch_scores, collate
from minidpo.data.pairs import Pair
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
    """A token of a dialogue; it has log-probs if the agent wrote it."""

    text: str
    turn: int  # the agent's turn, from 0; -1: not written by the agent
    before: float | None  # log π of the first agent, nats
    after: float | None  # log π of the second agent, nats


@torch.no_grad()
def written_logps(model: Transformer, dialogues: Sequence[Dialogue]) -> list[list[float]]:
    """For each dialogue, log π of the tokens that the agent wrote, in order. All dialogues are one tree."""
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
    """The tokens of each pair's "chosen" and "rejected", with their log-probs under two adapters of a base."""
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

    The policy is `adapter`; the reference is `reference` or the same. Give a trained adapter, and the one it
    started from as the reference, to see how training moved a pair.
    """
    settings = pair_loss_of(options)
    machine = to_compute(context.machine, adapter, reference)
    chat, limit = open_chat(context.model)
    elsewhere = [pair for pair in pairs if pair.chosen.instance != pairs[0].chosen.instance]
    # for KTO's baseline, which reads a step's pairs and needs two instances
    some = [*pairs[: options.batch], *elsewhere[:1]]
    data = tokenise(some, chat, limit, context.world.system_prompt, settings.until)
    sides = [data.dialogues[d] for d in data.pairs[0]]
    model = open_model(context.model, machine)
    lora.switch_adapter(model, reference or adapter)
    before = written_logps(model, sides)
    ref = score_all(model, data, settings, machine).cpu()
    if not settings.loss.needs_reference:
        ref = torch.zeros_like(ref)
    baseline_data, ref_baseline = None, None
    if settings.loss.needs_baseline:
        baseline_data = mismatched(data, limit)
        ref_baseline = score_all(model, baseline_data, settings, machine).cpu()
    lora.switch_adapter(model, adapter)
    after = written_logps(model, sides)
    step = range(min(options.batch, len(pairs)))
    baseline = step_baseline(model, baseline_data, ref_baseline, step, settings, machine)
    device = model.head_weight.device
    batch = next(pair_batches(data, [0], ref, settings, machine, device, baseline))
    with torch.no_grad():
        scores = batch_scores(model, batch.trees)
    loss, numbers = pair_loss(settings, batch, scores.requires_grad_())
    loss.backward()

    names = [data.names[d] for d in data.pairs[0]]
    lengths = [len(side.ids) for side in sides]
    print(
        f"The first of {len(pairs)} pairs, {pairs[0].source}: {names[0]} over {names[1]}.\n"
        f"One by one they have {lengths[0]} + {lengths[1]} tokens, their tree has {batch.trees.tokens}."
    )
    for name, row, *side in zip(
        ("chosen", "rejected"), (batch.chosen, batch.rejected), sides, before, after
    ):
        weights = batch.trees.weight[batch.trees.row == row].tolist()
        print(f"\n{name}", *lines_of(chat, *side, weights), sep="\n")
    result = {"loss": loss.item(), **{name: value.item() for name, value in numbers.items()}}
    print(f"\nscore = sum of W x logp{'':9}reference    policy  log-ratio   d loss / d score")
    for name, row, score in (
        ("chosen", batch.chosen, batch.ref_chosen),
        ("rejected", batch.rejected, batch.ref_rejected),
    ):
        policy, gradient = scores[row].item(), scores.grad[row].item()
        result |= {f"policy_{name}": policy, f"gradient_{name}": gradient}
        shown, ratio = "none", ""
        if settings.loss.needs_reference:
            result[f"ref_{name}"] = score.item()
            shown, ratio = f"{score.item():.4f}", f"{policy - score.item():.4f}"
        print(f"  {name:30}{shown:>10}{policy:10.4f}{ratio:>11}{gradient:19.4f}")
    nll = settings.nll * batch.solved.item()  # a failure is not imitated
    of_it = ""
    if nll:
        mean, gradient = scores[-1].item(), scores.grad[-1].item()
        print(f"  {'chosen, mean a token (nll)':40}{mean:10.4f}{'':11}{gradient:19.4f}")
        of_it = f", of it nll {-nll * mean:.4f}, which raises the chosen"
    print(f"\n{options.loss}: loss {loss.item():.4f}{of_it}")
    return result


def lines_of(
    chat: Chat,
    dialogue: Dialogue,
    before: Sequence[float],
    after: Sequence[float],
    weights: Sequence[float],
) -> Iterator[str]:
    """A line for each token of the agent; other tokens, which no loss reads, are folded into one line."""
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
