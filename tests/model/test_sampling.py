"""What an agent says depends on its prompt and its own uniform numbers, and on nothing else."""

import math
import random
from unittest import mock

import pytest
import tiny
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.answers import generate
from minidpo.data.batch import batch_logps, collate
from minidpo.memory.machine import multiplies_bfloat16
from minidpo.memory.packing import can_pack, pack
from minidpo.model import checkpoint, sampling, step_graphs
from minidpo.model.chat import Dialogue
from minidpo.model.guesses import LONGEST, Guesses
from minidpo.model.kvcache import KVCache
from minidpo.model.sampling import Request, Sampler, pick
from minidpo.model.shared_texts import Texts
from minidpo.model.step_graphs import StepGraphs

V, STOP = 23, 4
MODEL = tiny.model(vocab=V)
# for laws of which rounding must not be an exception
EXACT = tiny.model(vocab=V, dtype=torch.float64)
PACKED = pack(tiny.model(vocab=V, intermediate_size=64))  # widths of whole vectors, as Qwen2's are
seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=settings.default.max_examples // 6)
without_guesses = mock.patch.object(Guesses, "next", lambda *_: ())


def requests_of(seed, sizes, budget=8):
    g = torch.Generator().manual_seed(seed)
    return [
        Request(
            tuple(torch.randint(V, (size,), generator=g).tolist()),
            tuple(torch.rand(budget, generator=g, dtype=torch.float64).tolist()),
        )
        for size in sizes
    ]


def plain(model, request, temperature=1.0, top_p=1.0):
    """One row, no cache: the whole text through the model for each token."""
    ids, logps = list(request.ids), []
    for u in request.uniforms:
        logits = model.head(model(torch.tensor([ids]))[:, -1]).float()
        ids.append(pick(logits, torch.tensor([u]).double(), temperature, top_p).item())
        logps.append(logits.log_softmax(-1)[0, ids[-1]].item())
        if ids[-1] == STOP:
            break
    return tuple(ids[len(request.ids) :]), logps


def ids_of(answers):
    return [answer.ids for answer in answers]


@pytest.mark.parametrize("temperature, top_p", [(0.0, 1.0), (1.0, 1.0), (1.3, 0.8)])
def test_a_batch_one_by_one_and_a_plain_pass_without_a_cache_say_the_same(temperature, top_p):
    requests = requests_of(1, [1, 7, 3, 3, 12, 5])
    expected = [plain(MODEL, request, temperature, top_p) for request in requests]
    together = generate(MODEL, requests, STOP, temperature, top_p)
    alone = [generate(MODEL, [request], STOP, temperature, top_p)[0] for request in requests]
    assert ids_of(together) == ids_of(alone) == [ids for ids, _ in expected]
    for answer, (_, logps) in zip(together, expected):
        assert answer.logps == pytest.approx(logps, abs=1e-5)
    # rows end at different times
    assert temperature == 0 or len({len(ids) for ids in ids_of(together)}) > 1


@few
@given(seeds, st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=4))
def test_going_on_from_what_a_row_has_read_and_written_is_reading_everything_anew(seed, sizes):
    first = requests_of(seed, [prompt for prompt, _ in sizes])
    news = requests_of(seed + 1, [new for _, new in sizes])
    sampler = Sampler(EXACT, len(first), STOP)
    answers = all_of(sampler, first)
    longer = [
        Request((*r.ids, *answer.ids, *new.ids), new.uniforms)
        for r, answer, new in zip(first, answers, news)
    ]
    on = []
    reads = read_sizes(lambda: on.extend(all_of(sampler, longer)))
    anew = generate(EXACT, longer, STOP)
    assert ids_of(on) == ids_of(anew)
    for a, b in zip(on, anew):
        assert a.logps == pytest.approx(b.logps, abs=1e-6)
    # a row reads its own last token, which it never read before, and what is new
    assert reads[: len(sizes)] == [(1, 1 + new) for _, new in sizes]


def all_of(sampler, requests, **options):
    """The answers to one request a row, asked at once."""
    for row, request in enumerate(requests):
        sampler.ask(row, request, **options)
    answers = {}
    while sampler.busy:
        answers |= sampler.step()
    return [answers[row] for row in range(len(requests))]


def read_sizes(call):
    """The shapes of the ids that go through the model meanwhile."""
    shapes = []
    hooks = [
        model.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
        for model in (MODEL, EXACT)
    ]
    try:
        call()
    finally:
        for hook in hooks:
            hook.remove()
    return shapes


@pytest.mark.skipif(not can_pack(torch.zeros(1)), reason="this PyTorch has no oneDNN")
@settings(max_examples=settings.default.max_examples // 3)
@given(seeds, st.lists(st.integers(1, 40), min_size=2, max_size=6), st.data())
def test_what_a_row_says_is_the_same_to_the_last_bit_whatever_happens_beside_it(seed, sizes, data):
    """Answers, log-probs and all: in one run all rows are asked at once, in the other one at a time."""
    requests = requests_of(seed, sizes, budget=5)
    expected = all_of(Sampler(PACKED, len(sizes), STOP), requests)
    sampler, answers = Sampler(PACKED, len(sizes), STOP), {}
    for row in data.draw(st.permutations(range(len(sizes)))):
        # dropped in mid-answer
        (other,) = requests_of(seed + 1 + row, [data.draw(st.integers(1, 50))])
        sampler.ask(row, other)
        for _ in range(data.draw(st.integers(0, 3))):
            answers |= sampler.step()
        sampler.ask(row, requests[row])
    while sampler.busy:
        answers |= sampler.step()
    assert [answers[row] for row in range(len(sizes))] == expected


def attempts(seed, rows, turns, budget=6):
    """For each of the rows, the pages of an episode and uniform numbers for each answer: of few kinds, so that
    rows often agree for a while."""
    rng = random.Random(seed)
    pages = [tuple(rng.randrange(V) for _ in range(rng.randint(1, 5))) for _ in range(2)]
    draws = [tuple(rng.random() for _ in range(budget)) for _ in range(2)]
    return [
        [
            (
                rng.choice(pages),
                (*rng.choice(draws)[: (cut := rng.randrange(budget))], *rng.choice(draws)[cut:]),
            )
            for _ in range(turns)
        ]
        for _ in range(rows)
    ]


def played(sampler, episodes, rng):
    """The answers of each episode. They begin, are dropped and begin anew as chance has it."""
    waiting, running = list(range(len(episodes))), {}
    answers = [[] for _ in episodes]

    def ask(row):
        number = running[row]
        said, (page, uniforms) = answers[number], episodes[number][len(answers[number])]
        text = (*said[-1].request.ids, *said[-1].ids) if said else ()
        sampler.ask(row, Request((*text, *page), uniforms))

    while waiting or running:
        for row in {*range(len(sampler.texts.rows))} - {*running}:
            if waiting and rng.random() < 0.5:
                running[row] = waiting.pop(0)
                ask(row)
        for row, answer in sampler.step().items():
            answers[running[row]].append(answer)
            if len(answers[running[row]]) == len(episodes[running[row]]):
                del running[row]
            else:
                ask(row)
        for row in [row for row in running if rng.random() < 0.05]:  # its page failed
            sampler.drop(row)
            answers[running[row]].clear()
            waiting.append(running.pop(row))
    return answers


@pytest.mark.skipif(not can_pack(torch.zeros(1)), reason="this PyTorch has no oneDNN")
@few
@given(seeds, st.integers(2, 4), st.integers(1, 9), st.integers(1, 3))
def test_rows_that_agree_share_their_text_and_say_to_the_last_bit_what_each_says_alone(
    seed, rows, episodes, turns
):
    asked = attempts(seed, episodes, turns)
    together = played(Sampler(PACKED, rows, STOP), asked, random.Random(seed))
    alone = [played(Sampler(PACKED, 2, STOP), [each], random.Random(1))[0] for each in asked]
    assert together == alone


@without_guesses
@few
@given(seeds, st.integers(2, 6))
def test_what_several_rows_say_at_once_is_computed_once(seed, rows):
    asked = [turns[0] for turns in attempts(seed, rows, 1)]
    sampler, answers = Sampler(EXACT, rows, -1), []
    reads = read_sizes(
        lambda: answers.extend(all_of(sampler, [Request(page, u) for page, u in asked]))
    )
    texts = {(a.request.ids, a.ids[:n]) for a in answers for n in range(1, len(a.ids))}
    assert sum(batch for batch, tokens in reads[len({page for page, _ in asked}) :]) == len(texts)
    later = read_sizes(lambda: answers.extend(all_of(sampler, [answers[0].request])))
    assert later == []  # all of it is there
    assert answers[-1] == answers[0]


@pytest.mark.parametrize("gpu", [False, True])
@few
@given(seeds, st.integers(2, 4), st.integers(0, 12))
def test_after_an_interrupt_nothing_half_read_is_taken_for_read(gpu, seed, rows, when):
    asked = [Request(*turns[0]) for turns in attempts(seed, rows, 1)]
    sampler = as_on_a_gpu(EXACT, rows) if gpu else Sampler(EXACT, rows, STOP)
    passes = iter(range(100))

    def interrupt(module, arguments):
        if next(passes) == when:
            raise KeyboardInterrupt

    hook = EXACT.model.layers[1].register_forward_pre_hook(interrupt)
    try:
        all_of(sampler, asked)
    except KeyboardInterrupt:
        for row in range(rows):
            sampler.drop(row)
    finally:
        hook.remove()
    assert ids_of(all_of(sampler, asked)) == ids_of(generate(EXACT, asked, STOP))


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def nano(request):
    """The shipped model as it acts: packed."""
    if request.param == torch.bfloat16 and not multiplies_bfloat16():
        pytest.skip("this processor has no instructions for bfloat16")
    model = checkpoint.load(checkpoint.NANO, request.param, torch.device("cpu"))
    return pack(model.requires_grad_(False).eval())


def step_of(model, cache, ids, rows):
    """Hidden states and logits of one new token in each of the first `rows` rows; the cache is as before."""
    part = cache.rows(0, rows)
    part.show(1 + int(part.lengths.max()))
    hidden = model(ids[:rows, None], cache=part)[:, 0]
    return hidden, model.head(hidden)


@pytest.mark.skipif(not can_pack(torch.zeros(1)), reason="this PyTorch has no oneDNN")
@settings(max_examples=settings.default.max_examples // 12)
@given(seeds, st.integers(1, 64), st.sampled_from([60, 500, 4000]), st.sampled_from([1, 2, 3, 5]))
@torch.inference_mode()
def test_a_step_of_the_shipped_model_gives_a_row_the_same_bits_alone_and_among_up_to_64(
    nano, seed, rows, longest, cores
):
    rows = min(rows, 8) if longest == 4000 else rows  # half a GiB otherwise
    config, g = nano.config, torch.Generator().manual_seed(seed)
    like = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    cache = KVCache(rows, like, torch.float32, "cpu")
    cache.lengths.random_(1, longest, generator=g)
    cache.lengths[0] = torch.randint(1, longest, (), generator=g)
    cache.show(1 + int(cache.lengths.max()))
    cache.keys.normal_(generator=g)
    cache.values.normal_(generator=g)
    ids = torch.randint(config.vocab_size, (rows,), generator=g)
    before = torch.get_num_threads()
    torch.set_num_threads(cores)
    try:
        alone, together = step_of(nano, cache, ids, 1), step_of(nano, cache, ids, rows)
    finally:
        torch.set_num_threads(before)
    for mine, ours in zip(alone, together):
        assert torch.equal(mine[0], ours[0])


@without_guesses
@few
@given(seeds, st.integers(1, 8), st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_a_prefix_and_a_prompt_that_is_shared_change_nothing_but_are_read_once(seed, start, sizes):
    prefix, *rest = (r.ids for r in requests_of(seed, [start, *sizes]))
    uniforms = [r.uniforms for r in requests_of(seed + 1, [1] * (2 * len(sizes)))]
    asked = [Request((*prefix, *ids), u) for ids, u in zip(rest * 2, uniforms)]  # each prompt twice
    sampler, answers = Sampler(EXACT, len(asked), STOP, prefix=prefix), []
    reads = read_sizes(lambda: answers.extend(all_of(sampler, asked)))
    assert ids_of(answers) == [generate(EXACT, [request], STOP)[0].ids for request in asked]
    unlike = list(dict.fromkeys(r.ids for r in asked))
    assert reads[: len(unlike)] == [(1, len(ids) - start) for ids in unlike]
    assert all(shape[1] == 1 for shape in reads[len(unlike) :])


@pytest.mark.skipif(not can_pack(torch.zeros(1)), reason="this PyTorch has no oneDNN")
@few
@given(
    seeds, st.lists(st.integers(1, 40), min_size=1, max_size=5), st.sampled_from([0.0, 0.3, 1.0])
)
def test_whatever_is_guessed_an_answer_has_the_same_bits_and_right_guesses_save_steps(
    seed, sizes, share_of_lies
):
    """The answers are known here, so a guess is right or a lie as the test wants it."""
    requests, rng = requests_of(seed, sizes, budget=12), random.Random(seed)
    with without_guesses:
        expected = all_of(Sampler(PACKED, len(sizes), STOP), requests)
    texts = [(*request.ids, *answer.ids) for request, answer in zip(requests, expected)]

    def guess(_, prompt, ids, most):
        known = prompt + ids
        text = next(text for text in texts if text[: len(known)] == known)
        return tuple(
            (token + (rng.random() < share_of_lies)) % V for token in text[len(known) :][:most]
        )

    with mock.patch.object(Guesses, "next", guess), mock.patch.object(sampling, "DRAWN", 3 * V):
        sampler, steps, answers = Sampler(PACKED, len(sizes), STOP), 0, {}
        for row, request in enumerate(requests):
            sampler.ask(row, request)
        while sampler.busy:
            answers |= sampler.step()
            steps += 1
    assert [answers[row] for row in range(len(sizes))] == expected
    longest = max(len(answer.ids) for answer in expected)
    if len(sizes) == 1 and share_of_lies == 0:  # the first token has no guess behind it
        assert steps == 1 + math.ceil((longest - 1) / LONGEST)
    if share_of_lies == 1:
        assert steps == longest


class Replayed(StepGraphs):
    """A recording as a CPU can make one: it runs the step again, and leaves the result in the same tensor."""

    records = 0

    def _record(self, tokens, cache):
        self.records += 1
        hidden = self.model(tokens, cache=cache)[:, -1].clone()
        return lambda: hidden.copy_(self.model(tokens, cache=cache)[:, -1]), hidden


def as_on_a_gpu(model, rows, **changes):
    """A sampler that reads prompts together and replays its steps."""
    sampler = Sampler(model, rows, STOP, **changes)
    config = model.config
    dims = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    sampler.cache = KVCache(rows, dims, model.head_weight.dtype, "cpu")
    sampler.cache.row_by_row, sampler.together = False, True
    sampler.texts = Texts(sampler.cache, rows, shared=False)
    sampler.graphs = Replayed(model, sampler.cache)
    return sampler


@few
@given(
    seeds,
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5)), min_size=1, max_size=5),
    st.integers(1, 60),
)
def test_prompts_read_together_and_replayed_steps_say_the_same(seed, sizes, budget):
    first = requests_of(seed, [prompt for prompt, _ in sizes])
    first += first[:2]  # a prompt that is asked twice at once
    news = requests_of(seed + 1, [new for _, new in (sizes + sizes[:2])])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "TOGETHER", budget)
        patch.setattr(step_graphs, "COLUMNS", 16)
        sampler = as_on_a_gpu(EXACT, len(first))
        answers = all_of(sampler, first)
        longer = [
            Request((*r.ids, *answer.ids, *new.ids), new.uniforms)
            for r, answer, new in zip(first, answers, news)
        ]
        again = all_of(sampler, longer)
    for requests, said in ((first, answers), (longer, again)):
        alone = [generate(EXACT, [request], STOP)[0] for request in requests]
        assert ids_of(said) == ids_of(alone)
        for answer, other in zip(said, alone):
            assert answer.logps == pytest.approx(other.logps, abs=1e-9)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("more", [3, 10])
def test_a_row_that_is_asked_anew_in_mid_answer_forgets_what_it_wrote(gpu, more):
    (first,) = requests_of(5, [6], budget=30)
    longer = Request(first.ids + requests_of(6, [more])[0].ids, first.uniforms[:5])
    sampler = as_on_a_gpu(EXACT, 2) if gpu else Sampler(EXACT, 2, STOP)
    sampler.stop = -1
    sampler.ask(0, first)
    for _ in range(5):
        sampler.step()
    assert all_of(sampler, [longer])[0].ids == generate(EXACT, [longer], -1)[0].ids


@few
@given(seeds, st.integers(0, 6), st.booleans())
def test_a_row_that_is_dropped_says_no_more_and_answers_anew_as_if_nothing_had_been(
    seed, steps, gpu
):
    dropped, beside, later = requests_of(seed, [6, 4, 9], budget=9)
    sampler = as_on_a_gpu(EXACT, 2) if gpu else Sampler(EXACT, 2, STOP)
    sampler.ask(0, dropped)
    sampler.ask(1, beside)
    answers = {}
    for _ in range(steps):
        answers |= sampler.step()
        for row in sampler.busy:
            assert (
                sampler.so_far(row).ids
                == generate(EXACT, [(dropped, beside)[row]], STOP)[0].ids[
                    : len(sampler.so_far(row).ids)
                ]
            )
    sampler.drop(0)
    assert 0 not in sampler.busy and sampler.so_far(0) is None
    while sampler.busy:
        answers |= sampler.step()
    assert answers[1].ids == generate(EXACT, [beside], STOP)[0].ids
    assert all_of(sampler, [later])[0].ids == generate(EXACT, [later], STOP)[0].ids


def test_log_probs_while_sampling_are_those_the_trainer_will_see():
    requests = requests_of(2, [3, 9, 1, 6], budget=10)
    # they are of temperature 1 all the same
    answers = generate(MODEL, requests, STOP, temperature=0.7)
    rows = [
        Dialogue([*r.ids, *a.ids], [-1] * len(r.ids) + [0] * len(a.ids))
        for r, a in zip(requests, answers)
    ]
    trained = batch_logps(MODEL, collate([row] for row in rows))
    assert [lp for a in answers for lp in a.logps] == pytest.approx(trained.tolist(), abs=1e-4)


# pick


def draws(logits, n=400, temperature=1.0, top_p=1.0):
    """How often each token comes for uniforms in the middle of n equal parts of [0, 1)."""
    u = (torch.arange(n).double() + 0.5) / n
    return (
        torch.bincount(pick(logits.expand(n, -1), u, temperature, top_p), minlength=len(logits)) / n
    )


@given(seeds, st.integers(1, 9), st.floats(0.2, 5.0))
def test_tokens_come_as_often_as_their_probability_says(seed, size, temperature):
    logits = 2 * torch.randn(size, generator=torch.Generator().manual_seed(seed))
    expected = (logits / temperature).softmax(0)
    assert (draws(logits, temperature=temperature) - expected).abs().max() <= 1.001 / 400


@given(seeds, st.integers(1, 9), st.floats(0.01, 0.99))
def test_top_p_keeps_the_fewest_most_probable_tokens_with_that_mass(seed, size, top_p):
    logits = 2 * torch.randn(size, generator=torch.Generator().manual_seed(seed))
    p = logits.softmax(0)
    ordered = p.sort(descending=True).values
    kept = next(n for n in range(1, size + 1) if n == size or ordered[:n].sum() >= top_p)
    expected = torch.where(p >= ordered[kept - 1], p, 0.0)
    assert (draws(logits, top_p=top_p) - expected / expected.sum()).abs().max() <= 1.001 / 400


@example(0, 1, 1 - 2**-53, 1.0)
@given(seeds, st.integers(1, 9), st.floats(0.0, 1.0, exclude_max=True), st.floats(0.1, 1.0))
def test_temperature_0_takes_the_most_probable_token_and_so_does_the_least_top_p(
    seed, size, u, temperature
):
    logits = torch.randn(1, size, generator=torch.Generator().manual_seed(seed))
    best, u = logits.argmax(-1), torch.tensor([u]).double()
    assert torch.equal(pick(logits, u, 0.0, 1.0), best)
    assert torch.equal(pick(logits, u, temperature, 1e-6), best)


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53, 0.99999999])
def test_a_token_without_probability_never_comes_however_close_to_1_the_number_is(u):
    """0.99999999 is 1 in float32: taken as such it would point behind the last token that may come."""
    logits = torch.tensor([[-math.inf, 1.0, 0.5, -math.inf, -math.inf]])
    assert pick(logits, torch.tensor([u], dtype=torch.float64), 1.0, 1.0).item() in (1, 2)
    assert pick(logits, torch.tensor([u], dtype=torch.float64), 1.0, 0.3).item() == 1


@given(
    seeds,
    st.integers(2, 9),
    st.one_of(st.floats(0, 1e-5), st.sampled_from([5e-324, 1e-46, 1e-40, 1.2e-38])),
    st.sampled_from([1e-30, 1.0, 1e6]),
    st.floats(0, 1, exclude_min=True),
    st.floats(0, 1, exclude_max=True),
)
def test_towards_temperature_0_and_top_p_0_any_logits_give_the_most_probable_token(
    seed, size, temperature, scale, top_p, u
):
    logits = scale * torch.rand(3, size, generator=torch.Generator().manual_seed(seed))
    gaps = logits.topk(2).values
    # below 1 in e^104, the smallest number of fp32, nothing else is drawn
    clear = (gaps[:, 0] - gaps[:, 1]) > 110 * temperature
    uniforms = torch.full((3,), u, dtype=torch.float64)
    for given_ in (temperature, torch.full((3,), temperature)):
        drawn = pick(logits, uniforms, given_, top_p)
        assert ((drawn >= 0) & (drawn < size)).all()
        assert torch.equal(drawn[clear], logits.argmax(-1)[clear])
    least, p = pick(logits, uniforms, 1.0, 5e-324), logits.softmax(-1)
    assert torch.equal(p.gather(1, least[:, None])[:, 0], p.amax(-1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_overflows_is_refused_and_answers_nothing(temperature):
    model = tiny.model(vocab=V)
    model.model.norm.weight.data.fill_(3e38)
    with pytest.raises(ValueError, match="overflowed"):
        generate(model, requests_of(1, [4, 2]), STOP, temperature)
