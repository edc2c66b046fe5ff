"""Chapter 16: rows side by side are rows one by one, and padding is nothing."""

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minidpo.chat import Dialogue
from minidpo.rows import batch_logps, check_context, collate, pack, row_weights
from minidpo.scores import scores

V = 23
MODEL = tiny.model(vocab=V, dtype=torch.float64)
token = st.integers(0, V - 1)


@st.composite
def dialogues(draw):
    """A header, then tokens of the page (-1) and of the agent's turns 0, 1, ..., at least one of them."""
    turns = [-1]
    for turn in range(draw(st.integers(1, 3))):
        turns += [-1] * draw(st.integers(0, 3)) + [turn] * draw(st.integers(1, 3))
    turns += [-1] * draw(st.integers(0, 2))
    return Dialogue(draw(st.lists(token, min_size=len(turns), max_size=len(turns))), turns)


several = st.lists(dialogues(), min_size=1, max_size=4)
few = settings(max_examples=40)


@given(several)
def test_a_batch_names_the_agents_tokens_their_rows_their_turns_and_the_position_before_each(rows):
    batch = collate(rows, "cpu")
    T = batch.ids.shape[1]
    lengths = [len(r.ids) for r in rows]
    assert (batch.rows, batch.tokens, T) == (len(rows), sum(lengths), max(lengths))
    own = [(b, t, i, n) for b, r in enumerate(rows) for t, (i, n) in enumerate(zip(*r)) if n >= 0]
    predicted_at = [divmod(i, T) for i in batch.predict.tolist()]
    assert [(b, t - 1) for b, t, _, _ in own] == predicted_at
    assert [i for _, _, i, _ in own] == batch.targets.tolist()
    assert [b for b, *_ in own] == batch.row.tolist() and [n for *_, n in own] == batch.turn.tolist()
    for b, r in enumerate(rows):
        assert batch.ids[b, :len(r.ids)].tolist() == r.ids


@few
@given(several)
def test_log_probs_of_rows_together_are_those_of_each_alone_and_of_plain_log_softmax(rows):
    together = batch_logps(MODEL, collate(rows, "cpu"))
    alone = [batch_logps(MODEL, collate([row], "cpu")) for row in rows]
    torch.testing.assert_close(together, torch.cat(alone))
    plain = []
    for row in rows:
        logp = MODEL.head(MODEL(torch.tensor([row.ids])))[0].log_softmax(-1)
        plain += [logp[t - 1, row.ids[t]] for t, turn in enumerate(row.turns) if turn >= 0]
    torch.testing.assert_close(together, torch.stack(plain))


@few
@given(several, token)
def test_padding_of_any_junk_changes_nothing(rows, junk):
    batch = collate(rows, "cpu")
    padded = batch.ids.clone()
    for b, row in enumerate(rows):
        padded[b, len(row.ids):] = junk
    torch.testing.assert_close(batch_logps(MODEL, batch._replace(ids=padded)), batch_logps(MODEL, batch))


@given(several)
def test_the_order_of_the_rows_is_the_order_of_the_scores(rows):
    def score(rows):
        batch = collate(rows, "cpu")
        return scores(batch.targets.double(), batch.row, row_weights(batch, "sum"), batch.rows)

    assert score(rows[::-1]).tolist() == score(rows).tolist()[::-1]


@given(several, st.floats(0, 1))
def test_weights_are_1_or_1_by_length_or_dmpos_phi_of_the_turn(rows, gamma):
    batch = collate(rows, "cpu")
    assert row_weights(batch, "sum").tolist() == [1.0] * len(batch.targets)
    n = batch.rows
    mean, dmpo = (scores(torch.ones(len(batch.row)).double(), batch.row, weight, n)
                  for weight in (row_weights(batch, "mean"), row_weights(batch, "dmpo", gamma)))
    torch.testing.assert_close(mean, torch.ones(n).double())
    for b, row in enumerate(rows):  # φ(0,N) is 1, later turns weigh less
        N = max(row.turns) + 1
        phi = [(gamma**t - gamma**N) / (1 - gamma**N) if 0.01 < gamma < 0.99 else None for t in range(N)]
        if phi[0] is not None:
            assert dmpo[b].item() == pytest.approx(sum(phi[t] for t in row.turns if t >= 0))


@given(st.lists(st.integers(1, 30), max_size=12), st.integers(0, 60))
def test_packing_takes_each_row_once_and_keeps_to_the_budget_unless_a_row_alone_breaks_it(lengths, budget):
    packed = pack(lengths, budget)
    assert sorted(i for batch in packed for i in batch) == list(range(len(lengths)))
    for batch in packed:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget
    padding = sum(max(lengths[i] for i in b) - lengths[j] for b in packed for j in b)
    assert budget or not padding


def test_a_budget_for_everything_makes_one_batch_and_none_makes_one_each():
    assert pack([5, 1, 3], 15) == [[1, 2, 0]]
    assert pack([5, 1, 3], 1) == [[1], [2], [0]]
    assert pack([], 9) == []


def test_what_cannot_be_learned_from_or_read_is_refused_by_name():
    silent, long = Dialogue([1, 2], [-1, -1]), Dialogue([1, 2, 3], [-1, 0, 0])
    check_context([long], ["click-a seed 1"], limit=3)
    with pytest.raises(ValueError, match="click-a seed 1: 3 tokens, but the model reads at most 2"):
        check_context([long], ["click-a seed 1"], limit=2)
    with pytest.raises(ValueError, match="click-b seed 2: the agent wrote nothing"):
        check_context([long, silent], ["click-a seed 1", "click-b seed 2"], limit=9)
