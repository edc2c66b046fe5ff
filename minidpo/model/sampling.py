"""8. Sampling: conversations that one model writes side by side.

A sampler has a row for each page and writes a token a step in all rows that were asked. A row that has
finished can be asked again before the next step (continuous batching), and reads only what is new since its
last answer. A prompt that several rows have, and what all begin with, are read once. Every answer brings its
own uniform numbers, one a token. A prompt is read by itself, so with packed weights (13) an answer is the
same to the last bit whatever is written beside it; without, up to the rounding of a matrix product. Next: 9
lora.
"""

import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minidpo.model.decoder import Qwen2, additive, rotary_angles
from minidpo.model.kvcache import BLOCK, KVCache, Past


@dataclass(frozen=True)
class Request:
    """A prompt, all of its ids, and a uniform number in [0,1) for each token to come."""

    ids: tuple[int, ...]
    uniforms: tuple[float, ...]


@dataclass(frozen=True)
class Answer:
    """Sampled ids, with the stop token if it came; log π of each at temperature 1."""

    ids: tuple[int, ...]
    logps: tuple[float, ...]


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


@dataclass
class Writing:
    """An answer under way."""

    request: Request
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)


def rows_are_independent(model: Qwen2, rows: int) -> bool:
    """Whether this machine computes a row of a step alike, to the last bit, alone and beside others.

    What construction leaves to the libraries: a batch of n products, packed or not, is computed product by
    product and row by row, and so are norms, exponentials and sums over a fixed length. Here the first block
    and the head are asked, on random numbers, for one row alone and for the same row beside longer ones.
    """
    config, generator = model.config, torch.Generator().manual_seed(0)
    like = (1, config.num_key_value_heads, config.head_dim)
    cache = KVCache.empty(rows, like, model.head_weight.dtype, "cpu")
    cache.look(5 * BLOCK)
    cache.keys.normal_(generator=generator)
    cache.values.normal_(generator=generator)
    cache.lengths.random_(4 * BLOCK, 5 * BLOCK, generator=generator)[0] = BLOCK // 2
    x = torch.randn(rows, 1, config.hidden_size, generator=generator)

    def logits(part: KVCache) -> Tensor:
        cos, sin = rotary_angles(part.positions(1), config.head_dim, config.rope_theta, x.dtype)
        mask = additive(part.visible(1), x)
        return model.head(model.model.layers[0](x[:len(part.lengths)], cos, sin, mask, part, 0))

    beside = logits(cache)[0]
    cache.look(BLOCK)
    return torch.equal(logits(cache.rows(0, 1))[0], beside)


class Sampler:
    """`rows` places to write in. Every prompt is expected to begin with `prefix`, which is read only once."""

    @torch.inference_mode()
    def __init__(self, model: Qwen2, rows: int, stop: int, temperature: float = 1.0, top_p: float = 1.0,
                 prefix: Sequence[int] = ()):
        self.model, self.stop, self.temperature, self.top_p = model, stop, temperature, top_p
        config, weight = model.config, model.head_weight
        like = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
        self.cache = KVCache.empty(rows, like, weight.dtype, weight.device)
        # from which the next token is drawn
        self.hidden = torch.zeros(rows, config.hidden_size, dtype=weight.dtype, device=weight.device)
        # which row lies where in the cache: those that write come first, so that a step computes only them
        self.order = list(range(rows))
        self.held: list[tuple[int, ...]] = [()] * rows  # what each row has read, and its answers
        self.lengths = [0] * rows  # how many it has there in all; the cache knows, but on the device
        self.writing: dict[int, Writing] = {}
        self.shared: OrderedDict[tuple[int, ...], tuple[Past, Tensor]] = OrderedDict()
        self.prefix, self.prefix_past = tuple(prefix), None
        if rows > 1 and model.packed_head is not None and not rows_are_independent(model, rows):
            print("on this processor what an agent says depends, in the last digits of its log-probs, on what is "
                  "written beside it: the same seed may play other episodes (docs/long-runs.md)", file=sys.stderr)
        if prefix:
            self._read(0, self.prefix)
            self.prefix_past = self.cache.take(0, len(prefix))

    @torch.inference_mode()
    def ask(self, row: int, request: Request, share: bool = False) -> None:
        """Read the prompt and begin to write the answer, in place of whatever the row was writing.

        `share`: others will ask with the very same prompt, so remember it (the latest few are).
        """
        ids, held = request.ids, self.held[row]
        assert ids and request.uniforms, "a prompt and an answer have at least one token"
        if row not in self.writing:
            self._move(row, len(self.writing))
        place = self.order.index(row)
        if share and ids in self.shared:
            self.shared.move_to_end(ids)
            past, self.hidden[place] = self.shared[ids]
            self._begin(row, ids, past)
        else:
            if ids[:len(held)] != held or len(held) == len(ids) or len(held) < len(self.prefix):
                within = ids[:len(self.prefix)] == self.prefix != ids
                self._begin(row, self.prefix if within else (), self.prefix_past)
            self._read(row, ids)
            if share:
                self.shared[ids] = self.cache.take(place, len(ids)), self.hidden[place].clone()
                if len(self.shared) > len(self.held):
                    self.shared.popitem(last=False)
        self.writing[row] = Writing(request)

    @torch.inference_mode()
    def step(self) -> dict[int, Answer]:
        """One token for each row that writes; the answers that end with it, by row."""
        rows = self.order[:len(self.writing)]
        uniforms = [self.writing[row].request.uniforms[len(self.writing[row].ids)] for row in rows]
        logits = self.model.head(self.hidden[:len(rows)]).float()
        draws = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)
        token = pick(logits, draws, self.temperature, self.top_p)
        logp = logits.log_softmax(-1).gather(-1, token[:, None])[:, 0]
        both = torch.stack((token.double(), logp.double())).tolist()  # one transfer; a double holds any id
        finished = {}
        for row, token, logp in zip(rows, *both):
            writing = self.writing[row]
            writing.ids.append(int(token))
            writing.logps.append(logp)
            if writing.ids[-1] == self.stop or len(writing.ids) == len(writing.request.uniforms):
                finished[row] = Answer(tuple(writing.ids), tuple(writing.logps))
                self.held[row] += finished[row].ids[:-1]  # the last was never read: the next prompt brings it
                del self.writing[row]
                self._move(row, len(self.writing))
        if self.writing:
            self._feed()
        return finished

    def _move(self, row: int, place: int) -> None:
        """The row and the one that lies in this place change places."""
        here, other = self.order.index(row), self.order[place]
        if here != place:
            self.cache.swap(here, place, max(self.lengths[row], self.lengths[other]))
            self.hidden[[here, place]] = self.hidden[[place, here]]
            self.order[here], self.order[place] = other, row

    def _begin(self, row: int, ids: tuple[int, ...], past: Past | None) -> None:
        if ids:
            self.cache.look(len(ids))
            self.cache.put(self.order.index(row), past)
        self.held[row], self.lengths[row] = ids, len(ids)

    def _read(self, row: int, ids: tuple[int, ...]) -> None:
        """Read what the row does not hold yet."""
        place = self.order.index(row)
        self.cache.look(len(ids))
        part = self.cache.rows(place, place + 1)
        part.lengths.fill_(len(self.held[row]))
        new = torch.tensor([ids[len(self.held[row]):]], device=self.hidden.device)
        self.hidden[place] = self.model(new, cache=part)[0, -1]
        part.advance(new.shape[1])
        self.held[row], self.lengths[row] = ids, len(ids)

    def _feed(self) -> None:
        """Read the tokens just written."""
        rows = self.order[:len(self.writing)]
        self.cache.look(1 + max(self.lengths[row] for row in rows))
        part = self.cache.rows(0, len(rows))
        token = torch.tensor([[self.writing[row].ids[-1]] for row in rows], device=self.hidden.device)
        self.hidden[:len(rows)] = self.model(token, cache=part)[:, 0]
        part.advance(1)
        for row in rows:
            self.lengths[row] += 1


def generate(model: Qwen2, requests: Sequence[Request], stop: int, temperature: float = 1.0,
             top_p: float = 1.0, max_rows: int = 64) -> list[Answer]:
    """Answers in the order of the requests, at most `max_rows` of them at a time.

    Each row writes until `stop` or until its uniforms run out, and then takes the next request. For prompts
    that are all known before, as in the tests and benchmarks/generate.py; pages ask a Sampler themselves.
    """
    assert max_rows > 0
    sampler = Sampler(model, min(max_rows, len(requests)), stop, temperature, top_p)
    times = Counter(request.ids for request in requests)
    answers: list[Answer | None] = [None] * len(requests)
    waiting, asked = deque(range(len(requests))), {}
    while waiting or sampler.writing:
        for row in range(len(sampler.held)):
            if waiting and row not in sampler.writing:
                asked[row] = waiting.popleft()
                request = requests[asked[row]]
                sampler.ask(row, request, share=times[request.ids] > 1)
        for row, answer in sampler.step().items():
            answers[asked[row]] = answer
    return answers
