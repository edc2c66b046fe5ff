"""8. Sampling: many unfinished conversations in, one answer each out.

One batch at a time: prompts that differ are read once each (episodes of a group share their first prompt,
all episodes the system prompt), then all rows are decoded together, and a row that has finished leaves the
batch. Every episode brings its own uniform numbers, one a token, so what it says does not depend on its
neighbours or on timing beyond the rounding of a matrix product. What was read stays in the row's `Past` for
the next turn. Next: 9 lora.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minidpo.kvcache import KVCache, Past
from minidpo.qwen2 import Qwen2


@dataclass(frozen=True)
class Request:
    """A prompt, all of its ids; what of it was read before; a uniform number in [0,1) for each token to come.

    The past may be anything from nothing to all but the last token of the prompt.
    """

    ids: tuple[int, ...]
    uniforms: tuple[float, ...]
    past: Past | None = None


@dataclass(frozen=True)
class Answer:
    """Sampled ids, with the stop token if it came; log π of each at temperature 1; all that was read."""

    ids: tuple[int, ...]
    logps: tuple[float, ...]
    past: Past


def pick(logits: Tensor, uniforms: Tensor, temperature: float, top_p: float) -> Tensor:
    """One token a row, (B,), from logits (B,V) and uniforms (B,) in fp64, by inverse transform sampling.

    temperature 0 is greedy. top_p keeps the fewest most probable tokens that have that mass (Holtzman et al.
    2020, arXiv:1904.09751).

    >>> logits = torch.tensor([[0.0, 2.0, 1.0]])  # probabilities 0.09, 0.67, 0.24
    >>> [pick(logits, torch.tensor([u]).double(), 1.0, 1.0).item() for u in (0.05, 0.5, 0.95)]
    [0, 1, 2]
    """
    if temperature == 0:
        return logits.argmax(-1)
    p = (logits / temperature).softmax(-1)
    if top_p < 1:
        ordered, index = p.sort(-1, descending=True)
        ordered = ordered * (ordered.cumsum(-1) - ordered < top_p)  # the first token always stays
        p = torch.zeros_like(p).scatter(-1, index, ordered)
    cumulative = p.double().cumsum(-1)
    # u < 1, so u · total < total: never past the end and never a token without probability; in fp32 a u close
    # to 1 would round to 1
    return torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)[:, 0]


@torch.inference_mode()
def read(model: Qwen2, ids: list[tuple[int, ...]], pasts: list[Past | None],
         room: int) -> tuple[Tensor, KVCache]:
    """Read B prompts at once: last hidden state of each (B,C), and the cache with room for `room` more."""
    config, device = model.config, model.head_weight.device
    new = [row[past.length if past else 0:] for row, past in zip(ids, pasts)]
    counts = [len(row) for row in new]
    assert min(counts) > 0, "a prompt needs a token behind its past: what follows it is what is predicted"
    T = max(counts)
    batch = torch.tensor([[*row, *[0] * (T - len(row))] for row in new], device=device)  # no one sees the 0s
    like = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    cache = KVCache.stack(pasts, T + room, like, model.head_weight.dtype, device)
    hidden = model(batch, cache=cache)
    counts_on_device = torch.tensor(counts, device=device)
    cache.advance(counts_on_device, max(len(row) for row in ids))
    return hidden[torch.arange(len(ids), device=device), counts_on_device - 1], cache


@torch.inference_mode()
def generate(model: Qwen2, requests: list[Request], stop: int, temperature: float = 1.0, top_p: float = 1.0,
             max_rows: int = 64) -> list[Answer]:
    """Answers in the order of the requests, at most `max_rows` of them at a time.

    Each row writes until `stop` or until its uniforms run out.
    """
    return [answer for at in range(0, len(requests), max_rows)
            for answer in _generate(model, requests[at:at + max_rows], stop, temperature, top_p)]


def _generate(model, requests, stop, temperature, top_p) -> list[Answer]:
    # prompts that are the same are read once: rows point at their prompt until they begin to differ
    prompts: dict[tuple, int] = {}
    prompt_of = [prompts.setdefault((request.ids, id(request.past)), len(prompts)) for request in requests]
    unique = [requests[prompt_of.index(i)] for i in range(len(prompts))]
    budget = [len(request.uniforms) for request in requests]
    assert min(budget) > 0, "an answer needs a uniform number for each of its tokens, and has at least one"
    hidden, cache = read(model, [r.ids for r in unique], [r.past for r in unique], max(budget))
    device = hidden.device
    lengths = [len(request.ids) for request in requests]  # tokens in the cache, kept on the host
    if len(unique) < len(requests):
        spread = torch.tensor(prompt_of, device=device)
        hidden = hidden[spread]
        cache.keep(spread, max(lengths))

    uniforms = torch.tensor([[*r.uniforms, *[0.0] * (max(budget) - len(r.uniforms))] for r in requests],
                            dtype=torch.float64, device=device)
    ids: list[list[int]] = [[] for _ in requests]
    logps: list[list[float]] = [[] for _ in requests]
    pasts: list[Past | None] = [None] * len(requests)
    rows: list[int | None] = list(range(len(requests)))  # the request of each cache row; None: finished
    for step in range(max(budget)):
        logits = model.head(hidden).float()
        token = pick(logits, uniforms[:, step], temperature, top_p)
        logp = logits.log_softmax(-1).gather(-1, token[:, None])[:, 0]
        for b, (row, t, lp) in enumerate(zip(rows, token.tolist(), logp.tolist())):
            if row is None:
                continue
            ids[row].append(t)
            logps[row].append(lp)
            if t == stop or len(ids[row]) == budget[row]:
                pasts[row] = cache.row(b, lengths[row])  # without the last token: the next turn reads it
                rows[b] = None
        alive = [b for b, row in enumerate(rows) if row is not None]
        if not alive:
            break
        if len(alive) <= 0.75 * len(rows):  # copying the cache costs about a step: only if it saves several
            keep = torch.tensor(alive, device=device)
            rows = [rows[b] for b in alive]
            token, uniforms = token[keep], uniforms[keep]
            cache.keep(keep, max(lengths[row] for row in rows))
        hidden = model(token[:, None], cache=cache)[:, 0]
        for row in rows:
            if row is not None:
                lengths[row] += 1
        cache.advance(torch.ones(len(rows), dtype=torch.long, device=device), cache.longest + 1)
    return [Answer(tuple(i), tuple(lp), past) for i, lp, past in zip(ids, logps, pasts)]
