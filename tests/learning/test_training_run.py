"""The order of examples and the length of a training."""

import itertools
import random

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from minidpo.learning.sft import SFT
from minidpo.learning.training_run import (
    example_indices,
    in_steps,
    optimizer_of,
)
from minidpo.memory.adamw8bit import AdamW8bit

sizes = st.integers(1, 60)


@given(st.integers(1, 40), sizes, st.floats(0.1, 3))
def test_the_first_step_meets_no_example_twice_and_all_are_read_so_often(examples, batch, epochs):
    options = in_steps(SFT(batch=batch, epochs=epochs), examples)
    first = example_indices(0, options.batch, examples, seed=1)
    assert len(set(first)) == len(first) == min(batch, examples)
    read = options.steps * options.batch
    assert epochs * examples - 1e-6 <= read < epochs * examples + options.batch


@given(st.integers(1, 400), st.floats(0, 0.99))
def test_a_warmup_below_1_is_a_share_of_all_steps_and_else_their_number(steps, share):
    assert abs(in_steps(SFT(steps=steps, warmup=share), 10).warmup - share * steps) < 1
    assert in_steps(SFT(steps=steps, warmup=7.0), 10).warmup == 7
    assert in_steps(SFT(steps=100, warmup=0.07), 10).warmup == 7  # 0.07 · 100 is above 7 in binary


def test_a_rate_that_still_rises_when_training_ends_is_told(capsys):
    in_steps(SFT(steps=20, warmup=20), 100)
    assert not capsys.readouterr().out
    in_steps(SFT(steps=4, warmup=10, lr=1e-3), 100)
    said = capsys.readouterr().out
    assert "40%" in said and "0.001" in said and said.count("\n") == 1


def test_an_epoch_draws_each_example_once_and_each_epoch_in_its_own_order():
    n, batch = 7, 3
    drawn = [i for step in range(n) for i in example_indices(step, batch, n, seed=2)]
    epochs = [drawn[e * n : (e + 1) * n] for e in range(batch)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == batch
    assert example_indices(5, batch, n, seed=3) != example_indices(5, batch, n, seed=2)


@pytest.mark.parametrize("seed", range(5))
def test_an_epoch_takes_the_examples_of_a_label_together(seed):
    labels = [random.Random(seed).randrange(5) for _ in range(13)]
    epoch = example_indices(0, 13, 13, seed, labels=labels)
    assert sorted(epoch) == list(range(13))
    together = [label for label, _ in itertools.groupby(labels[i] for i in epoch)]
    assert len(together) == len(set(labels))
    steps = [i for step in range(13) for i in example_indices(step, 3, 13, seed, labels=labels)]
    assert steps[:13] == epoch and sorted(steps[13:26]) == list(range(13)) and steps[13:26] != epoch


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_the_optimizer_moves_the_adapter_alone_at_its_rate(name):
    model = tiny.adapted()
    optimizer = optimizer_of(SFT(optimizer=name, lr=0.3, weight_decay=0.2), model)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.3, 0.2)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {id(p) for p in group["params"]} == {id(p) for p in trained} and trained
    assert isinstance(optimizer, AdamW8bit) == (name == "adamw8bit")
