"""Sampling: one model writes the answers of many conversations side by side.

A sampler has a row for each page. Each step writes one token in every row that was asked. A row that has
finished can be asked again before the next step (continuous batching), and reads only what is new since its
last answer. A prompt that a row began with is copied into rows that begin with the same, and the beginning of
all prompts is read once. Every answer brings its own uniform numbers, one a token. With packed weights
(`memory/packing`) an answer has the same bits whatever is written beside it; without, up to the rounding of a
matrix product. On a GPU, prompts wait for each other and are read together, and a step is one launch
(`model/step_graphs`).

On a CPU, while at most eight rows write, each also reads a guess of what it writes next (`model/guesses`): a
product of 16 rows takes half as long again as that of one. With packed weights a guess changes no bit.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from minidpo.model.decoder import Transformer, rotary_angles
from minidpo.model.guesses import LONGEST, Guesses
from minidpo.model.kvcache import KVCache, exchange
from minidpo.model.step_graphs import StepGraphs
from minidpo.system.tensors import to_device

TOGETHER = 2048  # tokens of prompts, padding included, that a GPU reads at once
WAIT = 4  # a GPU reads prompts once a quarter as many rows wait as write: a pass takes five steps' time
WIDTH = 16  # tokens of a step, guesses included, up to which rows guess: attention is a call for each token
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
    guess: tuple[int, ...] = ()  # of what comes next; the row has read it, while it writes


def pick(logits: Tensor, uniforms: Tensor, temperature: float | Tensor, top_p: float) -> Tensor:
    """One token a row, (B,), from logits (B,V) and uniforms (B,) in fp64, by inverse transform sampling.

    Temperature, one for all or (B,), is greedy below COLDEST; top_p keeps the fewest likeliest tokens of that
    mass (Holtzman 2020, 1904.09751).

    >>> logits = torch.tensor([[0.0, 2.0, 1.0]])  # probabilities 0.09, 0.67, 0.24
    >>> [pick(logits, torch.tensor([u]).double(), 1.0, 1.0).item() for u in (0.05, 0.5, 0.95)]
    [0, 1, 2]
    """
    if isinstance(temperature, Tensor):
        greedy = temperature < COLDEST
        warm = temperature.masked_fill(greedy, 1.0)[:, None]
        return torch.where(greedy, logits.argmax(-1), _draw(logits, uniforms, warm, top_p))
    if temperature < COLDEST:
        return logits.argmax(-1)
    return _draw(logits, uniforms, temperature, top_p)


def _draw(logits: Tensor, uniforms: Tensor, temperature: float | Tensor, top_p: float) -> Tensor:
    """`pick` above COLDEST; a tensor of temperatures is (B,1)."""
    p = (logits / temperature).softmax(-1)
    if top_p < 1:
        ordered, index = p.sort(-1, descending=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p
        beyond[:, 0] = False  # in fp32 a small top_p is 0
        p = torch.zeros_like(p).scatter(-1, index, ordered.masked_fill(beyond, 0))
    cumulative = p.double().cumsum(-1)
    # the largest u below 1 times the total may be rounded to the total, the one before it may not: so never
    # past the end, never a token of probability 0 (in fp32 u may be 1)
    at = uniforms.clamp(max=1 - 2**-52) * cumulative[:, -1]
    # only nan is past the end: a caller sees it in the token's log-prob
    return torch.searchsorted(cumulative, at[:, None], right=True)[:, 0].clamp(max=p.shape[1] - 1)


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
        self.cache = KVCache(rows, dims, weight.dtype, weight.device)
        # at each place of the cache: hidden states of the last token and of guesses, to draw next tokens from
        self.hidden = torch.zeros(
            rows, LONGEST, config.hidden_size, dtype=weight.dtype, device=weight.device
        )
        # the row at each place of the cache. On a CPU row r stays at place r; on a GPU the rows that write
        # come first, so that a step computes only these
        self.order = list(range(rows))
        # ids that each row has read, and its answer to them
        self.texts: list[tuple[int, ...]] = [()] * rows
        # tokens that each row has in the cache, which learns it in `_show`
        self.lengths = [0] * rows
        self.writing: dict[int, Answer] = {}
        self.unread: dict[int, Request] = {}  # by row: what it was asked
        # the prompt that each row read when it began
        self.first: list[tuple[int, ...]] = [()] * rows
        self.first_hidden = self.hidden[:, 0].clone()  # of that prompt's last token
        # on a CPU an answer's bits must not depend on what else is read, and little would be gained
        self.together = weight.device.type == "cuda"
        self.graphs = StepGraphs(model, self.cache) if self.together else None
        self.prefix = tuple(prefix)
        packed = rows > 1 and model.packed_head is not None
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
            self._read([0], [self.prefix])

    @torch.inference_mode()
    def ask(self, row: int, request: Request) -> None:
        """Begin an answer to this prompt, which the next `step` reads, not what it was writing."""
        assert request.ids and request.uniforms, "a prompt and an answer have at least one token"
        if row in self.writing:
            self._stop(row)
        self.unread.pop(row, None)
        self.unread[row] = request

    @property
    def busy(self) -> set[int]:
        """The rows that were asked and have not answered yet."""
        return {*self.writing, *self.unread}

    @torch.inference_mode()
    def step(self) -> dict[int, Answer]:
        """Write a token, and those guessed right, in each row that writes. Returns the answers that end."""
        if not self.together or len(self.unread) * WAIT >= len(self.writing):
            self._read_prompts()
        rows = [row for row in self.order if row in self.writing]
        if not rows:
            return {}
        # of all tokens to come: the row, and how many of its guesses come before
        tokens = [(row, ahead) for row in rows for ahead in range(1 + len(self.writing[row].guess))]
        hidden = self.hidden[: len(rows), 0] if self.together else self.hidden[tuple(zip(*tokens))]
        drawn: dict[int, list] = {row: [] for row in rows}
        for (row, _), token in zip(tokens, self._draw(hidden, tokens)):
            drawn[row].append(token)
        answers = {row: self._stop(row) for row in rows if self._write(row, drawn[row])}
        for row, answer in answers.items():
            self.guesses.learn(answer.request.ids, answer.ids)
            self.texts[row] += answer.ids[:-1]  # the next prompt brings the last
        if self.writing:
            self._advance([row for row in self.order if row in self.writing])
        return answers

    def _draw(self, hidden: Tensor, tokens: Sequence[tuple[int, int]]) -> list[list[float]]:
        """Draw a token from each hidden state (N,C): its id and log π at temperature 1. tokens: each state's
        row, and how many guessed tokens come before the one that is drawn. Raises ValueError where the model's
        numbers overflowed."""
        answers = [(self.writing[row], ahead) for row, ahead in tokens]
        uniforms = [answer.request.uniforms[len(answer.ids) + ahead] for answer, ahead in answers]
        draws = to_device(torch.tensor(uniforms, dtype=torch.float64), hidden.device)
        temperatures = [answer.request.temperature for answer, _ in answers]
        given = None
        if None not in temperatures:
            given = to_device(torch.tensor(temperatures, dtype=torch.float32), hidden.device)
        size = len(hidden) if self.together else max(1, DRAWN // len(self.model.head_weight))
        drawn = []
        for first in range(0, len(hidden), size):
            part = slice(first, first + size)
            logits = self.model.head(hidden[part]).float()
            token = pick(
                logits, draws[part], self.temperature if given is None else given[part], self.top_p
            )
            logp = logits.log_softmax(-1).gather(-1, token[:, None])[:, 0]
            drawn += torch.stack((token.double(), logp.double()), -1).tolist()  # one transfer
        if not all(math.isfinite(logp) for _, logp in drawn):
            raise ValueError(
                "the log-prob of a sampled token is not finite: the model overflowed; try "
                "--machine.dtype float32, or another adapter"
            )
        return drawn

    def _stop(self, row: int) -> Answer:
        """The row writes no more. Returns its answer."""
        answer = self.writing.pop(row)
        self._move(row, len(self.writing))
        return answer

    def _write(self, row: int, tokens: Sequence[tuple[float, float]]) -> bool:
        """Add the tokens, each with its log π, up to the first not guessed. True if the answer ends."""
        answer = self.writing[row]
        guess, answer.guess = answer.guess, ()
        for place, (token, logp) in enumerate(tokens):
            answer.ids, answer.logps = (*answer.ids, int(token)), (*answer.logps, logp)
            ends = answer.ids[-1] == self.stop or len(answer.ids) == len(answer.request.uniforms)
            if ends or place == len(guess) or guess[place] != token:
                break
        self.lengths[row] += place  # guesses that were right: the row has read them
        return ends

    def _advance(self, rows: Sequence[int]) -> None:
        """Read what each of the rows has written last, and may write next. On a GPU they come first."""
        n, longest = len(rows), max(self.lengths[row] for row in rows)
        texts = [[self.writing[row].ids[-1]] for row in rows]
        if self.graphs is not None:
            lengths = [self.lengths[row] for row in self.order]
            self.hidden[:n, 0] = self.graphs.step([text[0] for text in texts], lengths)[:n]
            self.cache.lengths[:n] += 1
        else:
            for row, text in zip(rows, texts):
                answer = self.writing[row]
                most = min(LONGEST, WIDTH // n, len(answer.request.uniforms) - len(answer.ids)) - 1
                if most > 0:
                    answer.guess = self.guesses.next(answer.request.ids, answer.ids, most)
                    text += answer.guess
            self._show(max(map(len, texts)) + longest)
            tokens = [(row, ahead) for row, text in zip(rows, texts) for ahead in range(len(text))]
            places = torch.tensor(tokens, device=self.hidden.device).unbind(1)
            written = [token for text in texts for token in text]
            ids = torch.tensor(written, device=self.hidden.device)
            self.hidden[places] = self.model(ids[:, None], cache=self.cache.at(*places))[:, 0]
        for row in rows:
            self.lengths[row] += 1

    def _show(self, columns: int) -> None:
        """Let each pass see so many columns of the cache."""
        if not self.together:  # what grows copies what rows hold
            self.cache.lengths.copy_(torch.tensor(self.lengths))
        # guesses, of which nobody knows yet which are right
        self.cache.show(columns, behind=LONGEST - 1)

    def _move(self, row: int, place: int) -> None:
        """Move a row to a place in the cache; the row there takes its old place. On a CPU rows stay."""
        old_place, displaced = self.order.index(row), self.order[place]
        if self.together and old_place != place:
            self.cache.swap(old_place, place, max(self.lengths[row], self.lengths[displaced]))
            exchange(self.hidden[old_place], self.hidden[place])
            self.order[old_place], self.order[place] = displaced, row

    def _begin(self, row: int) -> bool:
        """The row forgets what it has read and begins anew with what it was asked, of which it copies what
        another row holds: all, or the prefix. True if it must wait, because that row is about to read it."""
        ids, place = self.writing[row].request.ids, self.order.index
        source = next((other for other, first in enumerate(self.first) if first == ids), None)
        start = ids
        if source is not None:
            if self.texts[source][: len(ids)] != ids:
                return True
            self.hidden[place(row), 0] = self.first_hidden[row] = self.first_hidden[source]
        else:
            start = self.prefix if ids[: len(self.prefix)] == self.prefix != ids else ()
            holders = (r for r, text in enumerate(self.texts) if text[: len(start)] == start)
            source = next(holders, None)
            if source is None:  # no row holds the prefix any more
                source, start = row, ()
        self.cache.copy_row(place(source), place(row), len(start))
        self.first[row], self.texts[row], self.lengths[row] = ids, start, len(start)
        return False

    def _read_prompts(self) -> None:
        """Read the prompts that wait, or copy them from rows that have read them."""
        unread, self.unread = self.unread, {}
        readers, followers = [], []
        for row, request in unread.items():
            self._move(row, len(self.writing))
            self.writing[row] = Answer(request)
            ids, text = request.ids, self.texts[row]
            goes_on = ids[: len(text)] == text and len(self.prefix) < len(text) < len(ids)
            if not goes_on and self._begin(row):
                followers.append(row)
            elif self.texts[row] != ids:
                readers.append(row)
        try:
            for rows in self._neighbours(readers):
                self._read(rows, [self.writing[row].request.ids for row in rows])
        # an interrupt, too: nobody may wait for a prompt that is not read any more
        except BaseException:
            for row in readers:
                self.first[row] = ()
            raise
        for row in followers:
            self._begin(row)

    def _neighbours(self, rows: Sequence[int]) -> list[list[int]]:
        """Rows in parts that are read together: at neighbouring places, with at most TOGETHER tokens."""
        if not self.together:
            return [[row] for row in rows]
        parts: list[list[int]] = []
        longest = 0
        for row in sorted(rows, key=self.order.index):
            new = len(self.writing[row].request.ids) - len(self.texts[row])
            longest = max(longest, new)
            follows = parts and self.order.index(row) == self.order.index(parts[-1][-1]) + 1
            if not follows or (len(parts[-1]) + 1) * longest > TOGETHER:
                parts.append([])
                longest = new
            parts[-1].append(row)
        return parts

    def _read(self, rows: Sequence[int], texts: Sequence[tuple[int, ...]]) -> None:
        """Read those ids of `texts` that the rows, at neighbouring places, have not read yet."""
        # of a row that is asked anew in mid-answer, what it wrote is forgotten
        first, known = self.order.index(rows[0]), [len(self.texts[row]) for row in rows]
        new = [ids[n:] for ids, n in zip(texts, known)]
        T, like = max(map(len, new)), {"device": self.hidden.device}
        self._show(max(known) + T)
        cache = self.cache.rows(first, first + len(rows))
        cache.lengths.copy_(torch.tensor(known))
        # no one reads the 0s
        padded = torch.tensor([[*ids, *[0] * (T - len(ids))] for ids in new], **like)
        hidden = self.model(padded, cache=cache)
        ends = torch.tensor([len(ids) - 1 for ids in new], **like)
        self.hidden[first : first + len(rows), 0] = hidden[torch.arange(len(rows), **like), ends]
        cache.lengths += ends + 1
        for row, ids in zip(rows, texts):
            self.texts[row], self.lengths[row] = ids, len(ids)
            if ids == self.first[row]:
                self.first_hidden[row] = self.hidden[self.order.index(row), 0]

    def so_far(self, row: int) -> Answer | None:
        """What the row has written of an answer that it has not finished."""
        return self.writing.get(row)

    @torch.inference_mode()
    def drop(self, row: int) -> None:
        """The row forgets what it was asked: nobody waits for the answer any more."""
        self.unread.pop(row, None)
        if row in self.writing:
            self._stop(row)


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
