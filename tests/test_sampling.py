"""Chapter 8: what an agent says depends on its prompt and its own uniform numbers, and on nothing else."""

import math
from dataclasses import replace

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minidpo.chat import Dialogue
from minidpo.tree import batch_logps, collate
from minidpo.sampling import Request, generate, pick

V, STOP = 23, 4
MODEL = tiny.model(vocab=V)
EXACT = tiny.model(vocab=V, dtype=torch.float64)  # for laws of which rounding must not be an exception
seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=25)


def requests_of(seed, sizes, budget=8):
    g = torch.Generator().manual_seed(seed)
    return [Request(tuple(torch.randint(V, (size,), generator=g).tolist()),
                    tuple(torch.rand(budget, generator=g, dtype=torch.float64).tolist())) for size in sizes]


def plain(model, request, temperature=1.0, top_p=1.0):
    """One row, no cache: the whole text through the model for each token."""
    ids, logps = list(request.ids), []
    for u in request.uniforms:
        logits = model.head(model(torch.tensor([ids]))[:, -1]).float()
        ids.append(pick(logits, torch.tensor([u]).double(), temperature, top_p).item())
        logps.append(logits.log_softmax(-1)[0, ids[-1]].item())
        if ids[-1] == STOP:
            break
    return tuple(ids[len(request.ids):]), logps


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
    assert temperature == 0 or len({len(ids) for ids in ids_of(together)}) > 1  # rows end at different times


@few
@given(seeds, st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 5), st.data())
def test_neighbours_and_their_order_change_nothing(seed, sizes, max_rows, data):
    requests = requests_of(seed, sizes)
    order = data.draw(st.permutations(range(len(requests))))
    alone = [generate(EXACT, [request], STOP)[0].ids for request in requests]
    mixed = generate(EXACT, [requests[i] for i in order], STOP, max_rows=max_rows)
    assert ids_of(mixed) == [alone[i] for i in order]


@few
@given(seeds, st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=4))
def test_going_on_from_a_past_is_reading_everything_anew(seed, sizes):
    first = requests_of(seed, [prompt for prompt, _ in sizes])
    news = requests_of(seed + 1, [new for _, new in sizes])
    answers = generate(EXACT, first, STOP)
    longer = [(*r.ids, *answer.ids, *new.ids) for r, answer, new in zip(first, answers, news)]
    for answer, r in zip(answers, first):  # all but the last token, which was said and never read
        assert answer.past.length == len(r.ids) + len(answer.ids) - 1
    anew = [Request(ids, new.uniforms) for ids, new in zip(longer, news)]
    on = [replace(request, past=answer.past) for request, answer in zip(anew, answers)]
    on, anew = generate(EXACT, on, STOP), generate(EXACT, anew, STOP)
    assert ids_of(on) == ids_of(anew)
    for a, b in zip(on, anew):
        assert a.logps == pytest.approx(b.logps, abs=1e-6)
        torch.testing.assert_close(a.past.keys, b.past.keys)
        torch.testing.assert_close(a.past.values, b.past.values)


def test_log_probs_while_sampling_are_those_the_trainer_will_see():
    requests = requests_of(2, [3, 9, 1, 6], budget=10)
    answers = generate(MODEL, requests, STOP, temperature=0.7)  # they are of temperature 1 all the same
    rows = [Dialogue([*r.ids, *a.ids], [-1] * len(r.ids) + [0] * len(a.ids))
            for r, a in zip(requests, answers)]
    trained = batch_logps(MODEL, collate([row] for row in rows))
    assert [lp for a in answers for lp in a.logps] == pytest.approx(trained.tolist(), abs=1e-4)


def test_a_prompt_that_several_share_is_read_once_and_finished_rows_stop_costing():
    one, other = requests_of(3, [5, 2])
    requests = [Request(one.ids, r.uniforms[:n]) for n, r in enumerate(requests_of(4, [1] * 8), 1)] + [other]
    rows = []
    hook = MODEL.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[0]))
    try:
        answers = generate(MODEL, requests, STOP)
    finally:
        hook.remove()
    assert ids_of(answers) == [plain(MODEL, request)[0] for request in requests]
    assert rows[0] == 2 and rows[1] <= 9 and rows[1:] == sorted(rows[1:], reverse=True) and rows[-1] <= 2


def test_a_shared_past_is_not_written_to():
    first = generate(MODEL, requests_of(5, [4]), STOP)[0]
    before = first.past.keys.clone(), first.past.values.clone()
    ids = (*requests_of(5, [4])[0].ids, *first.ids)
    longer = [Request((*ids, *r.ids), r.uniforms, first.past) for r in requests_of(6, [1, 3, 2])]
    assert ids_of(generate(MODEL, longer, STOP)) == [plain(MODEL, request)[0] for request in longer]
    assert torch.equal(first.past.keys, before[0]) and torch.equal(first.past.values, before[1])


@few
@given(seeds, st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_an_answer_ends_with_the_stop_token_or_with_its_budget(seed, budgets):
    requests = [requests_of(seed + i, [2], budget)[0] for i, budget in enumerate(budgets)]
    for answer, request in zip(generate(MODEL, requests, STOP), requests):
        assert 1 <= len(answer.ids) == len(answer.logps) <= len(request.uniforms)
        assert STOP not in answer.ids[:-1]
        assert answer.ids[-1] == STOP or len(answer.ids) == len(request.uniforms)
        assert answer.ids == plain(MODEL, request)[0]


def test_no_requests_have_no_answers_and_a_past_may_not_hold_the_whole_prompt():
    assert generate(MODEL, [], STOP) == []
    first = generate(MODEL, requests_of(7, [4], budget=1), STOP)[0]
    with pytest.raises(AssertionError, match="behind its past"):
        generate(MODEL, [Request(requests_of(7, [4])[0].ids, (0.5,), first.past)], STOP)


# pick


def draws(logits, n=400, temperature=1.0, top_p=1.0):
    """How often each token comes for uniforms in the middle of n equal parts of [0, 1)."""
    u = (torch.arange(n).double() + 0.5) / n
    return torch.bincount(pick(logits.expand(n, -1), u, temperature, top_p), minlength=len(logits)) / n


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


@given(seeds, st.integers(1, 9), st.floats(0.0, 1.0, exclude_max=True), st.floats(0.1, 1.0))
def test_temperature_0_takes_the_most_probable_token_and_so_does_the_least_top_p(seed, size, u, temperature):
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


def test_uniform_numbers_reach_the_choice_in_full_precision():
    """A head that gives every token the same probability, and the last uniform below 1: the last token."""
    flat = tiny.model(vocab=V)
    flat.model.embed_tokens.weight.zero_()
    answer, = generate(flat, [Request((1,), (1 - 2**-53, 0.0))], STOP)
    assert answer.ids == (V - 1, 0)
