"""Reward models: from pairs or step values to a head, and how far it can be trusted."""

import math

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_grpo import CPU, MACHINES, RIGHT, WORLD, WRONG, rollouts

from minidpo.data.batch import read_states
from minidpo.data.pairs import NothingToLearn, Pair
from minidpo.data.prompt import dialogue_of
from minidpo.data.values import values_of
from minidpo.learning.preferences import pair_batches, tokenise
from minidpo.learning.rm import (
    SETTINGS,
    RewardModel,
    ValuedTurns,
    best_of_n,
    divided,
    episode_rewards,
    read_at_ends,
    reward_model,
    step_model,
    step_rewards,
)
from minidpo.learning.rollouts import Rollouts
from minidpo.model.scalar_head import ScalarHead
from minidpo.system.result_file import read_result
from minidpo.system.run_folder import RunFolder, records


def played(seed, index, *said, outcome="solved", **changes):
    return tiny.episode(
        said, outcome, seed=seed, index=index, instruction=f"Click Submit, {seed}.", **changes
    )


def pairs(seeds):
    """In each instance: its button was clicked ≻ its link was, at once and after a detour."""
    return [
        Pair(played(seed, n, *before, RIGHT), played(seed, n + 1, *before, WRONG, outcome="failed"))
        for seed in seeds
        for n, before in ((0, ()), (2, (tiny.CLICK_1,)))
    ]


def valued(seeds):
    """Rollouts, and continuations: three of four solve after the right first step, one after the wrong one."""
    rollouts, continuations = [], []
    for seed in seeds:
        rollouts += [
            played(seed, 0, tiny.CLICK_1, RIGHT),
            played(seed, 1, WRONG, WRONG, outcome="failed"),
            played(seed, 2, RIGHT),
        ]
        for step, solved in ((tiny.CLICK_1, 3), (WRONG, 1)):
            right = [played(seed, 9, step, RIGHT, forced=1)] * solved
            wrong = [played(seed, 9, step, WRONG, forced=1, outcome="failed")] * (4 - solved)
            continuations += [*right, *wrong]
    return rollouts, values_of(rollouts, [*rollouts, *continuations])


def options(**changes):
    return RewardModel(
        **{"steps": 12, "lr": 1e-2, "warmup": 2, "batch": 3, "held_out": 0.4, **changes}
    )


def random_head(model):
    head = ScalarHead(model)
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(4))
    return head


def at_ends(model, head, trees, machine):
    values = read_states(model, trees, lambda hidden, _: head(hidden), machine.walk_above)
    return values[trees.column]


def test_it_begins_at_log_2_and_orders_pairs_that_it_never_saw(agent, tmp_path):
    examples = pairs(range(3))
    attempts = [side for pair in examples for side in (pair.chosen, pair.rejected)]
    run = RunFolder(tmp_path, {})
    folder = reward_model(
        run, agent.context, examples, options(), start=agent.adapter, attempts=attempts
    )
    first, *_, last = records(tmp_path)
    assert first["loss"] == pytest.approx(math.log(2)) and first["margin"] == 0
    assert last["loss"] < 0.3 and last["accuracy"] == 1
    found = read_result(tmp_path / "result.json")
    assert found["held_out"]["accuracy"] == 1 and found["held_out"]["instances"] == 1
    assert sum(part["pairs"] for part in found["reliability"]) == 2
    best = found["best_of_n"]
    assert (best["attempts"], best["picked"], best["random"]) == (4, 1, 0.5)
    nothing = played(9, 0, outcome="failed")
    *rewards, of_nothing = episode_rewards(agent.context, folder, [*attempts, nothing])
    ordered = [chosen > rejected for chosen, rejected in zip(rewards[::2], rewards[1::2])]
    assert all(ordered) and of_nothing == -math.inf
    for other in (agent.adapter, folder):  # no head, or one of episodes
        with pytest.raises(ValueError, match="no step head"):
            step_rewards(agent.context, other, attempts)


def test_the_step_head_fits_values_and_those_that_it_never_saw(agent, tmp_path):
    rollouts, values = valued(range(5))
    assert values == 5 * [[2 / 3, 0.75, 1.0], [2 / 3, 0.25, 0.0], [2 / 3, 1.0]]
    run = RunFolder(tmp_path, {})
    given = options(steps=40, batch=9)
    folder = step_model(run, agent.context, rollouts, values, given, start=agent.adapter)
    found = read_result(tmp_path / "result.json")["held_out"]
    assert (found["instances"], found["turns"], found["pairs"]) == (2, 10, 2 * 9)
    assert found["squared_error"] < 0.02 and found["accuracy"] == 1
    variance = torch.tensor([0.75, 1, 0.25, 0, 1]).var(correction=0).item()
    assert found["squared_error_of_a_constant"] == pytest.approx(variance)
    for rewards, of_episode in zip(step_rewards(agent.context, folder, rollouts), values):
        assert rewards.tolist() == pytest.approx(of_episode[1:], abs=0.3)


def test_values_that_are_all_alike_and_no_pairs_teach_nothing(agent, tmp_path):
    run, (rollouts, _) = RunFolder(tmp_path, {}), valued(range(2))
    alike = [[0.5] + [1.0] * len(e.turns) for e in rollouts]
    with pytest.raises(NothingToLearn):
        step_model(run, agent.context, rollouts, alike, options(), start=agent.adapter)
    for few in ([], pairs(range(1))):
        with pytest.raises(NothingToLearn):
            reward_model(run, agent.context, few, options(), start=agent.adapter)


@MACHINES
def test_a_reward_is_read_off_the_state_of_the_agents_last_token(machine):
    model = tiny.adapted(torch.float64)
    head, found = random_head(model), {}
    data = tokenise(pairs(range(2)), tiny.chat(), 1024, WORLD.system_prompt, "end")
    ends, zeros = read_at_ends(data), torch.zeros(len(data.dialogues))
    for batch in pair_batches(ends, range(len(data.pairs)), zeros, SETTINGS, machine, CPU):
        rewards = at_ends(model, head, batch.trees, machine)
        rewards.sum().backward()
        found |= dict(zip(batch.names, rewards.tolist(), strict=True))
    gradient, head.weight.grad = head.weight.grad.clone(), None
    total = 0.0
    for dialogue, name in zip(data.dialogues, data.names):
        last = max(t for t, turn in enumerate(dialogue.turns) if turn >= 0)
        reward = head(model(torch.tensor([dialogue.ids]))[0, last])
        assert found.pop(name) == pytest.approx(reward.item(), abs=1e-8)
        total = total + reward
    total.backward()
    assert not found
    torch.testing.assert_close(gradient, head.weight.grad, rtol=1e-7, atol=1e-8)


@MACHINES
def test_a_step_reward_is_read_at_the_turns_last_token_and_the_loss_is_a_mean_over_turns(machine):
    model, (episodes, values) = tiny.adapted(torch.float64), valued(range(2))
    head, found, loss = random_head(model), {}, 0.0
    after = [torch.tensor(of_episode[1:]) for of_episode in values]
    turns = ValuedTurns(read_at_ends(rollouts(episodes), every_turn=True), after)
    for batch in turns.batches(range(len(episodes)), machine, CPU):
        rewards = at_ends(model, head, batch.trees, machine)
        loss = loss + turns.objective(batch, rewards)[0]
        for name, reward in zip(batch.names, rewards.tolist(), strict=True):
            found.setdefault(name, []).append(reward)
    loss.backward()
    gradient, head.weight.grad = head.weight.grad.clone(), None
    squares = []
    for episode, wanted in zip(episodes, after):
        dialogue = dialogue_of(episode, tiny.chat(), WORLD.system_prompt)
        for n, value in enumerate(wanted):
            end = max(t for t, turn in enumerate(dialogue.turns) if turn == n)
            # nothing after the turn is seen
            reward = head(model(torch.tensor([dialogue.ids[: end + 1]]))[0, -1])
            assert found[episode.name][n] == pytest.approx(reward.item(), abs=1e-8)
            squares.append((reward - value) ** 2)
    mean = torch.stack(squares).mean()
    assert loss.item() == pytest.approx(mean.item())
    mean.backward()
    torch.testing.assert_close(gradient, head.weight.grad, rtol=1e-7, atol=1e-8)


def test_what_held_out_turns_say_by_hand():
    """Off by 0.25, 0.5, 0.5 and 0. One instance has three turns with the values 1, 0 and 1: two pairs, of
    which the rewards 0.75, 0.5 and 0.5 have one and tie in one. The lone turn of the other makes none."""
    data = Rollouts([], [], [("t", 1), ("t", 1), ("t", 2)])
    values = [torch.tensor(after) for after in ([1.0, 0.0], [1.0], [0.5])]
    judge = ValuedTurns(data, values).judge
    found = judge(torch.tensor([0.75, 0.5, 0.5, 0.5]))["held_out"]
    assert found["squared_error"] == pytest.approx((0.25**2 + 2 * 0.5**2) / 4)
    assert found["squared_error_of_a_constant"] == pytest.approx(
        (2 * 0.375**2 + 0.625**2 + 0.125**2) / 4
    )
    assert (found["turns"], found["instances"], found["pairs"]) == (4, 2, 2)
    assert found["accuracy"] == 0.75


@given(st.integers(0, 9), st.floats(0.01, 0.9), st.randoms())
def test_the_seed_and_the_prompts_say_which_instances_are_held_out(seed, share, order):
    """Two instances show each page: both are held out, or none."""
    sides = [tiny.episode(seed=n, instruction=f"page {n // 2}") for n in range(20)]
    learned, unseen = divided(sides, sides, share, seed)
    assert len(unseen) == 2 * max(1, round(share * 10)) and len(learned) == 20 - len(unseen)
    assert {e.seed // 2 for e in learned}.isdisjoint(e.seed // 2 for e in unseen)
    order.shuffle(sides)
    assert {e.seed for e in divided(sides, sides, share, seed)[1]} == {e.seed for e in unseen}


@st.composite
def tried(draw):
    """Attempts at some instances, mixed up, and rewards, some of them equal."""
    attempt = st.tuples(st.integers(0, 3), st.booleans(), st.integers(-3, 3))
    attempts = draw(st.lists(attempt, min_size=1, max_size=12))
    episodes = [
        tiny.episode("a", "solved" if solved else "failed", seed=seed, index=n)
        for n, (seed, solved, _) in enumerate(attempts)
    ]
    return episodes, [float(reward) for *_, reward in attempts]


@given(tried(), st.randoms())
def test_a_pick_is_the_oracles_by_the_verdict_random_without_rewards_and_blind_to_their_scale(
    case, order
):
    attempts, rewards = case
    found = best_of_n(attempts, rewards)
    assert best_of_n(attempts, [float(e.solved) for e in attempts])["picked"] == found["oracle"]
    assert best_of_n(attempts, [0.5] * len(attempts))["picked"] == pytest.approx(found["random"])
    assert best_of_n(attempts, [3 * r**3 + 7 for r in rewards]) == found
    assert 0 <= found["low"] <= found["picked"] <= found["oracle"] <= 1
    assert found["picked"] <= found["high"]
    moved = list(zip(attempts, rewards))
    order.shuffle(moved)
    assert best_of_n(*zip(*moved)) == pytest.approx(found)
