"""A tree is its trajectories one by one, in values and gradients, whatever shape it has."""

import copy
import random
from itertools import pairwise

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minidpo.data.batch import batch_scores, collate
from minidpo.data.prompt import check_trajectories
from minidpo.data.tree import grow, grow_groups
from minidpo.memory import lora
from minidpo.model.chat import Dialogue
from minidpo.objective.scores import turn_weights

V = 23
few = settings(max_examples=25)
seeds = st.integers(0, 2**32 - 1)
budgets = st.integers(0, 60)


MODEL = tiny.adapted(vocab=V)
CALM = copy.deepcopy(
    MODEL
)  # weights as small as trained ones, or rounding itself would be louder than 1e-5
for weight in CALM.parameters():
    weight.data.mul_(0.3 if weight.ndim > 1 else 1.0)


def trajectories(seed, n, alphabet=3, longest=12):
    """n trajectories over so few tokens that many begin alike, some are equal, some begin another; turns of
    the agent, with pages between them, are each trajectory's own."""
    rng = random.Random(seed)
    rows = []
    for _ in range(n):
        if rows and rng.random() < 0.6:
            shared = rng.choice(rows)
            keep = rng.randint(2, len(shared.ids))
            ids, turns = shared.ids[:keep], shared.turns[:keep]
        else:
            ids, turns = [rng.randrange(alphabet)], [-1]
        while len(ids) < 2 or (len(ids) < longest and rng.random() < 0.85):
            ids, turns = (
                [*ids, rng.randrange(alphabet)],
                [*turns, rng.choice([-1, *turns, max(turns) + 1])],
            )
        if max(turns) < 0:
            turns = [*turns[:-1], 0]
        numbers = {
            turn: i for i, turn in enumerate(dict.fromkeys(turn for turn in turns if turn >= 0))
        }
        rows.append(Dialogue(ids, [numbers.get(turn, -1) for turn in turns]))
    return rows


forests = st.builds(trajectories, seeds, st.integers(1, 6))


def gradients(model, loss):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, lora.parameters(model))])


def alone(model, rows, score="sum", gamma=None):
    """The scores as a textbook has them: each trajectory by itself, full logits, a loop over its tokens."""
    result = []
    for row in rows:
        logp = model.head(model(torch.tensor([row.ids])))[0].log_softmax(-1)
        own = [t for t, turn in enumerate(row.turns) if turn >= 0]
        if score == "dmpo":
            phi = turn_weights(max(row.turns) + 1, gamma).to(logp.dtype)
            weights = [phi[row.turns[t]] for t in own]
        else:
            weights = [1 / len(own) if score == "mean" else 1.0] * len(own)
        result.append(sum(w * logp[t - 1, row.ids[t]] for w, t in zip(weights, own)))
    return torch.stack(result)


# the layout


@given(forests)
def test_each_path_of_a_tree_spells_its_trajectory_from_depth_0_on(rows):
    tree = grow([row.ids for row in rows])
    for row, path in zip(rows, tree.paths, strict=True):
        assert [tree.ids[node] for node in path] == row.ids
        assert [tree.depths[node] for node in path] == list(range(len(row.ids)))


@given(forests)
def test_a_common_beginning_stands_in_the_tree_once(rows):
    beginnings = {tuple(row.ids[: t + 1]) for row in rows for t in range(len(row.ids))}
    assert len(grow([row.ids for row in rows]).ids) == len(beginnings)


@given(forests, seeds)
def test_the_order_of_insertion_does_not_show(rows, seed):
    order = random.Random(seed).sample(range(len(rows)), len(rows))
    one, other = grow([row.ids for row in rows]), grow([rows[i].ids for i in order])
    assert one[:3] == other[:3] and [one.paths[i] for i in order] == other.paths


# a tree = one by one


@few
@given(forests, st.sampled_from(["sum", "mean", "dmpo"]), st.floats(0, 1))
def test_scores_and_gradients_of_a_tree_are_those_of_its_trajectories_one_by_one(
    rows, score, gamma
):
    together, apart = (
        batch_scores(MODEL, collate([rows], score, gamma)),
        alone(MODEL, rows, score, gamma),
    )
    torch.testing.assert_close(together, apart, rtol=1e-10, atol=1e-10)
    pull = torch.linspace(-1, 2, len(rows), dtype=torch.float64)
    torch.testing.assert_close(
        gradients(MODEL, together @ pull), gradients(MODEL, apart @ pull), rtol=1e-10, atol=1e-10
    )


@few
@given(forests, seeds)
def test_trees_side_by_side_are_the_trees_alone_and_padding_of_any_junk_changes_nothing(rows, seed):
    groups = [rows[:1], rows[1:3], rows[3:]]
    groups = [group for group in groups if group]
    batch = collate(groups)
    assert batch.tokens == sum(len(grow([row.ids for row in group]).ids) for group in groups)
    apart = torch.cat([batch_scores(MODEL, collate([group])) for group in groups])
    torch.testing.assert_close(batch_scores(MODEL, batch), apart, rtol=1e-10, atol=1e-10)
    padded = batch.ids.clone()
    for b, group in enumerate(groups):
        size = len(grow([row.ids for row in group]).ids)
        padded[b, size:] = seed % V
    torch.testing.assert_close(
        batch_scores(MODEL, batch._replace(ids=padded)), apart, rtol=1e-10, atol=1e-10
    )


@few
@given(forests, budgets)
def test_trees_of_any_budget_add_up_to_the_one_tree_in_value_and_gradient(rows, budget):
    whole = batch_scores(MODEL, collate([rows])).sum()
    instances = [("task", 1)] * len(rows)
    groups = grow_groups(
        [(i,) for i in range(len(rows))], [row.ids for row in rows], instances, budget
    )
    parts = [[rows[i] for i in group.units] for group in groups]
    scored = [batch_scores(MODEL, collate([part])).sum() for part in parts]
    torch.testing.assert_close(sum(scored), whole, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        sum(gradients(MODEL, part) for part in scored),
        gradients(MODEL, whole),
        rtol=1e-9,
        atol=1e-9,
    )


# what the agent wrote


@few
@given(forests, seeds)
def test_second_rows_are_the_means_of_the_trajectories_asked_for(rows, seed):
    means = random.Random(seed).choices(range(len(rows)), k=3)
    batch = collate([rows], means=means)
    result = batch_scores(MODEL, batch)
    assert batch.rows == len(result) == len(rows) + 3
    torch.testing.assert_close(result[: len(rows)], alone(MODEL, rows))
    torch.testing.assert_close(result[len(rows) :], alone(MODEL, rows, "mean")[means])


# budgets


@given(forests, budgets)
def test_a_split_takes_each_unit_once_in_order_and_keeps_to_the_budget_unless_a_unit_alone_breaks_it(
    rows, budget
):
    units, ids = [(i, (i + 1) % len(rows)) for i in range(len(rows))], [row.ids for row in rows]
    groups = grow_groups(units, ids, [("task", 1)] * len(rows), budget)
    parts = [group.units for group in groups]
    assert [i for part in parts for i in part] == list(range(len(units)))
    assert all(group.tree == grow([ids[t] for t in group.trajectories]) for group in groups)

    def size(part):
        return len(grow([ids[t] for i in part for t in units[i]]).ids)

    assert all(len(part) == 1 or size(part) <= budget for part in parts)
    for part, following in pairwise(parts):  # and no tree is closed too early
        assert size([*part, following[0]]) > budget


def test_what_cannot_be_learned_from_or_read_is_refused_by_name():
    silent, long, bare = (
        Dialogue([1, 2, 3], turns) for turns in ([-1] * 3, [-1, 0, 0], [0, 0, -1])
    )
    check_trajectories([long], ["click-a seed 1"], limit=3)
    for row, limit in ((long, 2), (silent, 9), (bare, 9)):
        with pytest.raises(ValueError, match="click-b seed 2: ") as refused:
            check_trajectories([row], ["click-b seed 2"], limit)
        assert "\n" not in str(refused.value)
