"""Pairs of a group meet in one tree, each counts once, and the step is that of pairs alone."""

import random
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import tiny
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from small import PLAYED, run_dpo
from test_tree import MODEL, alone, gradients, trajectories

from minidpo.data import batch as batches
from minidpo.data.batch import batch_scores
from minidpo.data.pairs import Pair, unpaired
from minidpo.data.tree import grow
from minidpo.learning.dpo import DPO, pair_loss_of
from minidpo.learning.micro_batches import instance_trees, micro_batches
from minidpo.learning.preferences import (
    Preferences,
    mismatched,
    pair_batches,
    pair_loss,
    score_all,
    step_baseline,
    tokenise,
)
from minidpo.memory.machine import Machine
from minidpo.model.chat import Dialogue

CPU = torch.device("cpu")
SYSTEM = tiny.SYSTEM_PROMPT
few = settings(max_examples=20)
budgets = st.builds(Machine, micro_tokens=st.integers(1, 100), tree_tokens=st.integers(1, 60))


@st.composite
def preferences(draw):
    """Pairs of one to three instances, some trajectories in several of them."""
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))
    data = Preferences([], [], [], [], [])
    for instance in range(draw(st.integers(1, 3))):
        rows = trajectories(rng.random(), rng.randint(2, 5))
        first = len(data.dialogues)
        data.dialogues.extend(rows)
        data.instances.extend([("task", instance)] * len(rows))
        sides = [
            (first + a, first + b) for a in range(len(rows)) for b in range(len(rows)) if a != b
        ]
        data.pairs.extend(rng.sample(sides, rng.randint(1, min(6, len(sides)))))
    data.names.extend(f"trajectory {i}" for i in range(len(data.dialogues)))
    rng.shuffle(data.pairs)
    data.solved.extend(rng.random() < 0.7 for _ in data.pairs)
    return data


@given(preferences(), budgets, st.data())
def test_no_step_meets_a_larger_tree_than_the_plan_counts_on(data, budget, draws):
    picked = draws.draw(st.lists(st.sampled_from(data.pairs), min_size=1, max_size=9, unique=True))
    met = max(len(group.tree.ids) for group in instance_trees(data, picked, budget))
    together = max(len(group.tree.ids) for group in instance_trees(data, data.pairs, budget))
    assert met <= data.largest_tree(budget) <= max(together, budget.tree_tokens)
    assert (
        data.largest_tree(replace(budget, tree_tokens=10**6)) < 10**6
    )  # whole trees have no more to fill


@few
@given(
    preferences(),
    budgets,
    st.sampled_from(["dpo", "dmpo", "ipo_mean", "hinge"]),
    st.sampled_from([0.0, 0.7]),
    st.sampled_from([0.5, 0.9]),
)
def test_a_step_in_trees_of_any_budget_is_the_step_of_pairs_one_by_one(
    data, budget, name, nll, gamma
):
    settings = pair_loss_of(DPO(loss=name, nll=nll, gamma=gamma if name == "dmpo" else None))
    kind, picked = settings.loss.score, range(len(data.pairs))
    ref = alone(MODEL, data.dialogues, kind, gamma).detach() - 0.5
    policy, mean = (alone(MODEL, data.dialogues, score, gamma) for score in (kind, "mean"))
    c, r = zip(*data.pairs)
    c, r = list(c), list(r)
    each = settings.loss.of_scores(settings.parameters, None)(policy[c], policy[r], ref[c], ref[r])
    expected = (each - nll * torch.tensor(data.solved).double() * mean[c]).mean()
    steps = [
        pair_loss(settings, batch, batch_scores(MODEL, batch.trees))
        for batch in pair_batches(data, picked, ref, settings, budget, CPU)
    ]
    parts = [loss for loss, _ in steps]
    torch.testing.assert_close(sum(parts), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        sum(numbers["logp_rejected"] for _, numbers in steps), policy[r].mean()
    )
    torch.testing.assert_close(
        sum(gradients(MODEL, part) for part in parts),
        gradients(MODEL, expected),
        rtol=1e-8,
        atol=1e-8,
    )


@given(preferences(), budgets)
def test_a_tree_holds_pairs_of_one_instance_and_an_instance_has_one_tree_if_it_fits(data, budget):
    for limit in (budget.tree_tokens, 10**6):
        groups = instance_trees(data, data.pairs, replace(budget, tree_tokens=limit))
        instances = [{data.instances[t] for t in group.trajectories} for group in groups]
        assert all(len(names) == 1 for names in instances)
        assert sorted(i for group in groups for i in group.units) == list(range(len(data.pairs)))
        for group in groups:
            assert group.trajectories == list(
                dict.fromkeys(t for i in group.units for t in data.pairs[i])
            )
            assert group.tree == grow([data.dialogues[t].ids for t in group.trajectories])
            assert len(group.tree.ids) <= limit or len(group.units) == 1
    assert len(groups) == len(set().union(*instances))


@few
@given(preferences(), budgets)
def test_the_reference_scores_every_trajectory_as_if_it_were_alone(data, budget):
    for name in ("dpo", "dmpo", "ipo_mean"):
        settings = pair_loss_of(DPO(loss=name))
        expected = alone(
            MODEL, data.dialogues, settings.loss.score, settings.parameters.gamma
        ).detach()
        torch.testing.assert_close(
            score_all(MODEL, data, settings, budget), expected.float(), rtol=1e-5, atol=1e-5
        )


# from episodes


RIGHT = tiny.episode((tiny.CLICK_2,), index=0)
WRONG = tiny.episode((tiny.CLICK_1,), "failed", index=1)
BOTH = tiny.episode((tiny.CLICK_1, tiny.CLICK_2), index=2)


def test_an_episode_in_several_pairs_is_read_once_and_one_of_another_instance_again():
    data = tokenise([Pair(RIGHT, WRONG), Pair(BOTH, WRONG)], tiny.chat(), 1024, SYSTEM, "end")
    assert len(data.dialogues) == 3 and len(data.pairs) == 2
    assert data.pairs[0][1] == data.pairs[1][1] and data.pairs[0][0] != data.pairs[1][0]
    elsewhere = Pair(*(replace(episode, seed=2) for episode in (RIGHT, WRONG)))
    both = tokenise([Pair(RIGHT, WRONG), elsewhere], tiny.chat(), 1024, SYSTEM, "end")
    assert len(both.dialogues) == 4 and len(set(both.instances)) == 2
    assert both.names[2] == "click-button seed 2 episode 0"


def test_two_trajectories_of_the_same_tokens_are_no_pair_and_are_named():
    same = replace(RIGHT, outcome="failed", index=5)
    with pytest.raises(ValueError, match="seed 1 episode 0 and click-button seed 1 episode 5"):
        tokenise([Pair(RIGHT, same)], tiny.chat(), 1024, SYSTEM, "end")


# KTO's baseline


def test_ktos_baseline_reads_each_trajectory_behind_the_prompt_of_another():
    data = Preferences(
        [
            Dialogue([1, 2, 5, 6], [-1, -1, 0, -1]),
            Dialogue([1, 2, 7], [-1, -1, 0]),
            Dialogue([1, 3, 4, 8], [-1, -1, -1, 0]),
        ],
        ["a", "b", "c"],
        [("t", 1), ("t", 1), ("t", 2)],
        [(0, 1)],
        [True],
    )
    others = mismatched(data, 9)
    assert others.dialogues == [
        Dialogue([1, 3, 4, 5, 6], [-1, -1, -1, 0, -1]),
        Dialogue([1, 3, 4, 7], [-1, -1, -1, 0]),
        Dialogue([1, 2, 8], [-1, -1, 0]),
    ]
    assert mismatched(data, 4).dialogues[0] == Dialogue([1, 3, 4, 5], [-1, -1, -1, 0])
    alike = data._replace(
        dialogues=[Dialogue([1, 2, 5], [-1, -1, 0]), Dialogue([1, 2, 6], [-1, -1, 0])]
    )
    with pytest.raises(ValueError, match="same"):
        mismatched(alike, 9)


@few
@given(preferences(), budgets, st.data(), st.floats(-1, 1))
def test_ktos_baseline_is_the_mean_over_the_different_trajectories_of_the_step(
    data, budget, draws, moved
):
    assume(len({tuple(d.ids[: d.turns.index(0)]) for d in data.dialogues}) > 1)
    picked = draws.draw(st.lists(st.integers(0, len(data.pairs) - 1), min_size=1, max_size=5))
    others = mismatched(data, 99)
    policy = alone(MODEL, others.dialogues).detach()
    ref = policy - moved - torch.linspace(-0.5, 0.5, len(policy))
    both = sorted({d for p in picked for d in data.pairs[p]})
    measured = step_baseline(MODEL, others, ref, picked, pair_loss_of(DPO(loss="kto")), budget)
    expected = (policy - ref)[both].mean().clamp(min=0)
    torch.testing.assert_close(measured.double(), expected, rtol=1e-4, atol=1e-4)


def test_kto_starts_at_half_the_mean_weight_with_a_baseline_of_0_and_measures_it_each_step(
    agent, tmp_path
):
    options = {"loss": "kto", "undesirable_weight": 0.0, "lr": 5e-2, "warmup": 0}
    _, log = run_dpo(agent, tmp_path, unpaired(PLAYED, 1), steps=6, **options)
    assert log[0]["loss"] == pytest.approx((1 + 0) / 4, abs=1e-6) and log[0]["kto_baseline"] <= 1e-4
    assert (tmp_path / "reference-baseline.safetensors").is_file()
    baselines = {record["kto_baseline"] for record in log}
    assert len(baselines) > 1 and min(baselines) >= 0


def test_a_small_budget_of_tokens_is_the_same_training(agent, tmp_path):
    """KTO's baseline is the whole step's, however the step is cut. And depth first."""
    large = replace(agent.context.machine, micro_tokens=8192, tree_tokens=8192)
    small = replace(large, micro_tokens=64, tree_tokens=64)
    pairs = unpaired(PLAYED, 1)
    walked = mock.Mock(wraps=batches.read_depth_first)
    with mock.patch.object(batches, "read_depth_first", walked):
        logs = [
            run_dpo(agent, tmp_path / str(n), pairs, machine=machine, loss="kto", nll=0.1, steps=3)[
                1
            ]
            for n, machine in enumerate((large, small, replace(small, depth_first=True)))
        ]
    assert walked.called
    for record, *others in zip(*logs, strict=True):
        for other in others:
            assert record["loss"] == pytest.approx(other["loss"], rel=1e-4)
            assert record["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)


def test_a_tree_that_goes_depth_first_is_alone_in_its_batch_whatever_the_batch_may_hold():
    def dialogue(last, tokens):
        return Dialogue([1, *[2] * tokens, last], [-1] * (tokens + 1) + [0])

    data = SimpleNamespace(
        instances=[(task, 1) for task in "aabbccdd"],
        dialogues=[dialogue(last, tokens) for tokens in (9, 9, 2, 2) for last in (3, 4)],
    )
    pairs = [(n, n + 1) for n in (0, 2, 4, 6)]
    machine = Machine(depth_first=True, tree_tokens=6, micro_tokens=1_000)
    sizes = [
        [len(group.tree.ids) for group in batch] for batch in micro_batches(data, pairs, machine)
    ]
    assert sorted(sizes) == [[5, 5], [12], [12]]
    sizes = micro_batches(data, pairs, replace(machine, depth_first=False, tree_tokens=99))
    assert [len(batch) for batch in sizes] == [4]
