"""How the shipped model was made, with constants as small as can be."""

import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.make_nano import (
    SPECIAL,
    Recipe,
    line_batch,
    make_model,
    span_batch,
    train_tokenizer,
)
from minidpo.model import checkpoint
from minidpo.model.chat import Chat

TEXTS = ['Click on the link "sit".', 'link "sit" [12]\nlink "naïve 你好 🙂" [3]', "1" * 40] * 3
SMALL = Recipe(
    shape=tiny.config(vocab=400),
    tokenizer=None,
    alphabet=400,
    copy_steps=2,
    copy_rows=2,
    copy_target=-1.0,
    careful_steps=3,
    clumsy_steps=2,
    batch=2,
)


@given(
    st.sampled_from([span_batch, line_batch]),
    st.integers(1, 3),
    st.integers(40, 80),
    st.integers(0, 99),
)
def test_what_a_copying_row_calls_known_follows_from_what_stands_before_it(
    make, rows, alphabet, seed
):
    """In the part to copy from one place reads like the token before, or among lines, where the bar is always
    the same, like the line so far; and the known token stands after it."""
    tokens, is_known = make(torch.Generator().manual_seed(seed), rows, alphabet)
    assert is_known.any(1).all() and tokens.min() >= 0 and tokens.max() < alphabet
    first = 24 if make is span_batch else 50  # tokens to copy from
    for row, known in zip(tokens.tolist(), is_known.tolist()):
        assert not any(known[:first])
        for t in (t for t, k in enumerate(known) if k):
            n = 1 if make is span_batch else t % 5
            assert [row[s] for s in range(n, first) if row[s - n : s] == row[t - n : t]] == [row[t]]


def test_the_tokenizer_gives_texts_back_and_a_name_has_the_same_tokens_everywhere():
    tokenizer = train_tokenizer(TEXTS, 400)
    size = tokenizer.get_vocab_size()
    assert [tokenizer.token_to_id(name) for name in SPECIAL] == [size - 3, size - 2, size - 1]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    task, page = (tokenizer.encode(text).tokens for text in TEXTS[:2])
    assert "sit" in task and "sit" in page and '"Ġ[' in page


def test_the_stages_leave_a_model_that_opens_and_a_finished_one_is_not_made_again(tmp_path):
    episodes = [tiny.episode((tiny.CLICK_1, tiny.CLICK_2), seed=seed) for seed in range(4)]
    accuracy = make_model(tmp_path, SMALL, episodes, episodes)
    assert len(accuracy) == 4 and all(0 <= value <= 1 for value in accuracy.values())
    made, copier = checkpoint.load(tmp_path / "model"), checkpoint.load(tmp_path / "copier")
    assert Chat.load(tmp_path / "model").end < made.config.vocab_size == 400
    assert not torch.equal(made.head_weight, copier.head_weight)
    stamp = (tmp_path / "model" / "model.safetensors").stat().st_mtime_ns
    assert make_model(tmp_path, SMALL, episodes, episodes) == accuracy
    assert (tmp_path / "model" / "model.safetensors").stat().st_mtime_ns == stamp
