"""Sampling: one model writes the answers of many conversations side by side.

A sampler has a row for each page. Each step writes a token in every row that was asked. A row that has
finished can be asked again before the next step (continuous batching), and reads only what is new since its
last answer. Every answer brings its own uniform numbers, one a token.

Attempts at the same page say much the same. What the cache holds is therefore a tree of texts
(`model/shared_texts`), and a text that stands there is not computed again: rows that agree share it, and a row
that comes later draws its tokens along it, until it says something else. With packed weights
(`memory/packing`) an answer has the same bits whatever is written beside it; without, up to the rounding of a
matrix product. On a GPU, where a step of one row takes as long as one of many, only prompts are shared: they
wait for each other and are read together, and a step is one launch (`model/step_graphs`).

On a CPU, while at most eight texts grow, each also reads a guess of what comes next (`model/guesses`): a
product of 16 rows takes half as long again as that of one. With packed weights a guess changes no bit.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from minidpo.model.decoder import Transformer, rotary_angles
from minidpo.model.guesses import LONGEST, Guesses
from minidpo.model.kvcache import KVCache
from minidpo.model.shared_texts import Node, Texts
from minidpo.model.step_graphs import StepGraphs
from minidpo.system.tensors import to_device

TOGETHER = 2048  # tokens of prompts, padding included, that a GPU reads at once
WAIT = 4  # a GPU reads prompts once a quarter as many rows wait as write: a pass takes five steps' time
WIDTH = 16  # tokens of a step, guesses included, up to which rows guess: attention is a call for each token
SPARE = 1  # places of the cache on a CPU beside one for each row: a text that forks needs one
# logits at a time on a CPU: of more, the copies in fp64 are fresh memory in each step: slow
DRAWN = 2**21
# divided by less, a logit may overflow fp32. Long before that only equal logits share a draw
COLDEST = 1e-30


class Request(NamedTuple):
    """All ids of a prompt, and a uniform number in [0,1) for each token that the answer may have.

    temperature: its own, which then all requests of the sampler have; None: the sampler's.
    """

    ids: tuple[int, ...]
    uniforms: tuple[float, ...]
    temperature: float | None = None


@dataclass
class Answer:
    """Sampled ids so far, the last the stop token if it was sampled, and log π of each at temperature 1."""

    request: Request
    ids: tuple[int, ...] = ()
    logps: tuple[float, ...] = ()


def pick(logits: Tensor, uniforms: Tensor, temperature: float | Tensor, top_p: float) -> Tensor:
    """Tokens by inverse transform sampling, from logits (B,V): one for each of the uniforms in fp64, (B,) or
    several a row, (B,N).

    Temperature, one for all or (B,), is greedy below COLDEST; top_p keeps the fewest likeliest tokens of that
    mass (Holtzman 2020, 1904.09751).

    >>> logits = torch.tensor([[0.0, 2.0, 1.0]])  # probabilities 0.09, 0.67, 0.24
    >>> pick(logits, torch.tensor([[0.05, 0.5, 0.95]]).double(), 1.0, 1.0)
    tensor([[0, 1, 2]])
    """
    if uniforms.dim() == 1:
        return pick(logits, uniforms[:, None], temperature, top_p)[:, 0]
    best = logits.argmax(-1, keepdim=True).expand_as(uniforms)
    if isinstance(temperature, Tensor):
        greedy = temperature[:, None] < COLDEST
        warm = temperature[:, None].masked_fill(greedy, 1.0)
        return torch.where(greedy, best, _draw(logits, uniforms, warm, top_p))
    return best if temperature < COLDEST else _draw(logits, uniforms, temperature, top_p)


def _draw(logits: Tensor, uniforms: Tensor, temperature: float | Tensor, top_p: float) -> Tensor:
    """`pick` above COLDEST for uniforms (B,N); a tensor of temperatures is (B,1)."""
    p = (logits / temperature).softmax(-1)
    if top_p < 1:
        ordered, index = p.sort(-1, descending=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p
        beyond[:, 0] = False  # in fp32 a small top_p is 0
        p = torch.zeros_like(p).scatter(-1, index, ordered.masked_fill(beyond, 0))
    cumulative = p.double().cumsum(-1)
    # the largest u below 1 times the total may be rounded to the total, the one before it may not: so never
    # past the end, never a token of probability 0 (in fp32 u may be 1)
    at = uniforms.clamp(max=1 - 2**-52) * cumulative[:, -1:]
    # only nan is past the end: a caller sees it in the token's log-prob
    return torch.searchsorted(cumulative, at, right=True).clamp(max=p.shape[1] - 1)


class Sampler:
    """`rows` places to write in. Every prompt should begin with `prefix`, which is read only once."""

    @torch.inference_mode()
    def __init__(
        self,
        model: Transformer,
        rows: int,
        stop: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        prefix: Sequence[int] = (),
    ):
        self.model, self.stop, self.temperature, self.top_p = model, stop, temperature, top_p
        config, weight = model.config, model.head_weight
        dims = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
        # on a CPU an answer's bits must not depend on what else is read, and little would be gained
        self.together = weight.device.type == "cuda"
        packed = getattr(model.packed_head, "keeps_bits", False)
        shared = not self.together and (rows > 1 or packed)
        places = rows + SPARE if shared else rows
        self.cache = KVCache(places, dims, weight.dtype, weight.device)
        # on a CPU any places take part in a step; on a GPU the first, to which rows that write are moved
        self.texts = Texts(self.cache, rows, shared)
        self.graphs = StepGraphs(model, self.cache) if self.together else None
        self.writing: dict[int, Answer] = {}
        self.unread: dict[int, Request] = {}  # by row: what it was asked
        self.prefix = tuple(prefix)
        # unpacked, the bits show how many tokens are read together: only the row's own text may decide that,
        # so that a killed run of one page repeats itself
        self.guesses = Guesses(others=packed)
        if packed and not rows_are_independent(model, max(rows, WIDTH)):
            print(
                "on this CPU the last digits of log-probs depend on what is written beside an answer: "
                "the same seed may play other episodes (docs/long-runs.md)",
                file=sys.stderr,
            )
        if prefix:
            self._read({0: self.prefix})
            self.texts.rows[0].restart()

    @torch.inference_mode()
    def ask(self, row: int, request: Request) -> None:
        """Begin an answer to this prompt, which the next `step` reads, not what it was writing."""
        assert request.ids and request.uniforms, "a prompt and an answer have at least one token"
        self.drop(row)
        self.unread[row] = request

    @torch.inference_mode()
    def drop(self, row: int) -> None:
        """End what the row was asked without an answer, and forget what it has written."""
        self.unread.pop(row, None)
        if row in self.writing:
            self._stop(row)
            self.texts.rows[row].depth = self.texts.rows[row].kept

    def so_far(self, row: int) -> Answer | None:
        """What the row has written of an answer that it has not finished."""
        return self.writing.get(row)

    @property
    def busy(self) -> set[int]:
        """The rows that were asked and have not answered yet."""
        return {*self.writing, *self.unread}

    @torch.inference_mode()
    def step(self) -> dict[int, Answer]:
        """Write a token in each row that writes, and more where the cache holds them. Returns the answers that
        end."""
        if not self.together or len(self.unread) * WAIT >= len(self.writing):
            self._read_prompts()
        if not self.writing:
            return {}
        self._write()
        ended = [row for row, answer in self.writing.items() if self._ends(answer)]
        answers = {row: self._stop(row) for row in ended}
        for row, answer in answers.items():
            self.guesses.learn(answer.request.ids, answer.ids)
            self.texts.rows[row].keep()  # without the last token: the next prompt brings it
        if self.writing:
            self._advance()
        return answers

    def _ends(self, answer: Answer) -> bool:
        return answer.ids[-1] == self.stop or len(answer.ids) == len(answer.request.uniforms)

    def _stop(self, row: int) -> Answer:
        """The row writes no more. Returns its answer."""
        answer = self.writing.pop(row)
        self._move(row, len(self.writing))
        return answer

    def _move(self, row: int, index: int) -> None:
        """On a GPU, move the row to this place in the cache."""
        if self.together:
            self.texts.exchange(row, index)

    # ---- writing: tokens are drawn from the states that the cache holds ----

    def _write(self) -> None:
        """Add a token to each answer, and more while the text on which its row stands says the same."""
        # of each state (and temperature) from which tokens are drawn: row, and how many tokens come before
        drawers: dict[tuple[Node, float | None], list[tuple[int, int]]] = {}
        for row, answer in self.writing.items():
            left = len(answer.request.uniforms) - len(answer.ids)
            for before, node in enumerate(self.texts.rows[row].ahead(min(left, LONGEST))):
                drawers.setdefault((node, answer.request.temperature), []).append((row, before))
        drawn: dict[tuple[int, int], tuple[int, float]] = {}
        states = list(drawers)
        size = len(states) if self.together else max(1, DRAWN // len(self.model.head_weight))
        for first in range(0, len(states), size):
            drawn |= self._draw({state: drawers[state] for state in states[first : first + size]})
        if not all(math.isfinite(logp) for _, logp in drawn.values()):
            raise ValueError(
                "the log-prob of a sampled token is not finite: the model overflowed; try "
                "--machine.dtype float32, or another adapter"
            )
        for row, answer in self.writing.items():
            at, before = self.texts.rows[row], 0
            while True:
                token, logp = drawn[row, before]
                answer.ids, answer.logps = (*answer.ids, token), (*answer.logps, logp)
                before += 1
                if self._ends(answer) or (row, before) not in drawn or at.next.part != (token,):
                    break
                at.pass_on()

    def _draw(
        self, drawers: Mapping[tuple[Node, float | None], Sequence[tuple[int, int]]]
    ) -> dict[tuple[int, int], tuple[int, float]]:
        """Draw a token for each of the drawers of each state: its id and log π at temperature 1."""
        states, temperatures = zip(*drawers)
        uniforms = torch.zeros(len(states), max(map(len, drawers.values())), dtype=torch.float64)
        for i, those in enumerate(drawers.values()):
            for j, (row, before) in enumerate(those):
                answer = self.writing[row]
                uniforms[i, j] = answer.request.uniforms[len(answer.ids) + before]
        hidden = torch.stack([node.state for node in states])
        temperature = self.temperature
        if None not in temperatures:
            temperature = to_device(torch.tensor(temperatures, dtype=torch.float32), hidden.device)
        logits = self.model.head(hidden).float()
        tokens = pick(logits, to_device(uniforms, hidden.device), temperature, self.top_p)
        logps = logits.log_softmax(-1).gather(-1, tokens)
        both = torch.stack((tokens.double(), logps.double()), -1).tolist()  # one transfer
        return {
            drawer: (int(token), logp)
            for those, drawn in zip(drawers.values(), both)
            for drawer, (token, logp) in zip(those, drawn)
        }

    # ---- reading: the cache gets what was written, and prompts ----

    def _advance(self) -> None:
        """Let the cache hold what each row has written last, and a guess of what it may write next."""
        texts, growing = self.texts, []
        lengths = texts.lengths() if self.graphs is not None else []
        with texts.all_or_nothing():
            for row, answer in self.writing.items():
                at, part = texts.rows[row], answer.ids[-1:]
                if not (texts.shared and texts.find(at, part)):
                    texts.grow(at, part)
                    growing.append(row)
            if self.graphs is not None:
                self._replay(growing, lengths)
            elif growing:
                self._read_tokens(growing)

    def _replay(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Read the last token of each of the rows; `lengths` of the places were those before it."""
        at = sorted((self.texts.rows[row] for row in rows), key=lambda row: row.place.index)
        hidden = self.graphs.step([row.node.part[0] for row in at], lengths)[: len(at)].clone()
        self.cache.lengths[: len(at)] += 1
        for row, state in zip(at, hidden):
            row.node.state = state

    def _read_tokens(self, rows: Sequence[int]) -> None:
        """Read the last token of each of the rows, and the guesses behind it."""
        nodes, places = [], []
        for row in rows:
            answer, at = self.writing[row], self.texts.rows[row]
            left = len(answer.request.uniforms) - len(answer.ids)
            if (most := min(LONGEST, WIDTH // len(rows), left) - 1) > 0:
                self.texts.guess(at, self.guesses.next(answer.request.ids, answer.ids, most))
            new = at.place.path[at.depth :]
            nodes += new
            places += [at.place.index] * len(new)
        self.texts.show(max(node.length for node in nodes))
        columns = torch.tensor([node.length - 1 for node in nodes])
        ids = torch.tensor([node.part for node in nodes])
        hidden = self.model(ids, cache=self.cache.at(torch.tensor(places), columns))[:, 0]
        for node, state in zip(nodes, hidden):
            node.state = state.clone()  # not a view, which would keep all the others

    def _read_prompts(self) -> None:
        """Read the prompts that wait, unless the cache holds them."""
        unread, self.unread = self.unread, {}
        waiting, texts = {}, self.texts
        for row, request in unread.items():
            self._move(row, len(self.writing))
            self.writing[row] = Answer(request)
            waiting[row] = self._begin(row, request.ids)
        while waiting:
            waiting = {row: p for row, p in waiting.items() if not texts.find(texts.rows[row], p)}
            first: dict[tuple[Node, tuple[int, ...]], int] = {}
            for row, part in waiting.items():  # what several rows wait for, one of them reads
                first.setdefault((texts.rows[row].node, part), row)
            for rows in self._neighbours({row: waiting.pop(row) for row in first.values()}):
                self._read(rows)
        for row in unread:
            texts.rows[row].keep()

    def _begin(self, row: int, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Let the row stand where it reads on: behind its own text if the prompt goes on from that, else behind
        the prefix. Returns what it must read."""
        at, prefix = self.texts.rows[row], self.prefix
        text = at.text
        if len(prefix) < len(text) < len(ids) and ids[: len(text)] == text:
            return ids[len(text) :]
        at.restart()
        if not prefix or not ids[: len(prefix)] == prefix != ids:
            return ids
        if not self.texts.find(at, prefix):
            self._read({row: prefix})
        return ids[len(prefix) :]

    def _neighbours(self, parts: Mapping[int, tuple[int, ...]]) -> list[dict[int, tuple[int, ...]]]:
        """What each row reads, in groups that are read together: at neighbouring places, with at most TOGETHER
        tokens."""
        if not self.together:
            return [{row: part} for row, part in parts.items()]
        groups: list[dict[int, tuple[int, ...]]] = []
        longest, before = 0, None
        for row in sorted(parts, key=lambda row: self.texts.rows[row].place.index):
            index, longest = self.texts.rows[row].place.index, max(longest, len(parts[row]))
            if not groups or index != before + 1 or (len(groups[-1]) + 1) * longest > TOGETHER:
                groups.append({})
                longest = len(parts[row])
            groups[-1][row] = parts[row]
            before = index
        return groups

    def _read(self, parts: Mapping[int, tuple[int, ...]]) -> None:
        """Put these parts behind the texts of the rows, which are at neighbouring places."""
        rows, like = [self.texts.rows[row] for row in parts], {"device": self.cache.lengths.device}
        known, T = [row.node.length for row in rows], max(map(len, parts.values()))
        with self.texts.all_or_nothing():
            for row, part in zip(rows, parts.values()):
                self.texts.grow(row, part)
            self.texts.show(max(known) + T)
            first = rows[0].place.index
            cache = self.cache.rows(first, first + len(rows))
            cache.lengths.copy_(torch.tensor(known))
            # no one reads the 0s
            padded = [[*part, *[0] * (T - len(part))] for part in parts.values()]
            hidden = self.model(torch.tensor(padded, **like), cache=cache)
            ends = torch.tensor([len(part) - 1 for part in parts.values()], **like)
            for row, state in zip(rows, hidden[torch.arange(len(rows), **like), ends]):
                row.node.state = state
            cache.lengths += ends + 1


def rows_are_independent(model: Transformer, rows: int) -> bool:
    """Whether this machine computes the same bits for a row of a step alone and beside other rows.

    The libraries are relied on for products, norms, exponentials and sums row by row. This runs the first
    block and the head on random numbers, for one row alone and for the same row beside longer ones.
    """
    config, generator = model.config, torch.Generator().manual_seed(0)
    dims = (1, config.num_key_value_heads, config.head_dim)
    cache = KVCache(rows, dims, model.head_weight.dtype, "cpu")
    cache.show(128)
    # one row's numbers for all: drawing them is what takes time
    for memory in (cache.keys, cache.values):
        memory.copy_(torch.randn(memory[:, :1].shape, generator=generator))
    cache.lengths.random_(64, 128, generator=generator)[0] = 50
    x = torch.randn(rows, 1, config.hidden_size, generator=generator)

    def logits(rows_cache: KVCache) -> Tensor:
        positions = rows_cache.positions(1)
        angles = rotary_angles(positions, config.head_dim, config.rope_theta, x.dtype)
        first = model.model.layers[0]
        return model.head(first(x[: len(positions)], *angles, None, rows_cache, 0))

    return torch.equal(logits(cache)[0], logits(cache.rows(0, 1))[0])
