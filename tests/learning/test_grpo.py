"""Policy gradients from episodes to a step's gradient: what is weighed, by what, and what is left out."""

import math
from dataclasses import replace

import pytest
import tiny
import torch

import envs
from minidpo.data.pairs import NothingToLearn
from minidpo.learning.policy_gradient import (
    PolicyGradient,
    RolloutBatch,
    clipped_objective,
    dr_grpo_advantages,
    gigpo_advantages,
    grpo_advantages,
    mixed_groups,
    rloo_advantages,
)
from minidpo.learning.rollouts import (
    Rollouts,
    check_player,
    entry_batches,
    entry_logps,
    own_rollouts,
)
from minidpo.memory.machine import Machine
from minidpo.objective.policy_gradient import group_advantages

HERE = Machine(device="cpu", dtype="float32")
CPU = torch.device("cpu")
WORLD = envs.world("toy")
RIGHT, WRONG = tiny.CLICK_2, tiny.write("link [3]", 'CLICK(ref="3")')
MACHINES = pytest.mark.parametrize(
    "machine",
    [
        Machine(device="cpu", dtype="float32", micro_tokens=1, tree_tokens=64),
        Machine(device="cpu", dtype="float32", tree_tokens=100, depth_first=True),
        Machine(device="cpu", dtype="float32", micro_tokens=8192),
    ],
    ids=["split", "depth first", "together"],
)


def group(seed=1, **changes):
    """Four episodes of an instance: solved at once, after a detour, failed, and never ended."""
    played = [
        ((RIGHT,), "solved"),
        ((tiny.CLICK_1, RIGHT), "solved"),
        ((WRONG,), "failed"),
        ((tiny.CLICK_1, WRONG, WRONG), "limit"),
    ]
    return [
        tiny.episode(
            said, outcome, seed=seed, index=n, instruction=f"Click Submit, {seed}.", **changes
        )
        for n, (said, outcome) in enumerate(played)
    ]


def rollouts(episodes):
    return Rollouts.of(episodes, tiny.chat(), 1024, WORLD.system_prompt)


def batches(data, picked, *columns, machine=HERE):
    """columns: advantages, log-probs of the player and of the reference."""
    return (RolloutBatch(*parts) for parts in entry_batches(data, picked, columns, machine, CPU))


def trees_of(data, d, machine=HERE):
    """An episode by itself."""
    ((trees, *_),) = entry_batches(data, [d], (), machine, CPU)
    return trees


def logps(model, data, machine=HERE):
    """Of each episode by itself."""
    return [
        entry_logps(model, machine, trees_of(data, d, machine)).detach()
        for d in range(len(data.names))
    ]


def step(model, data, picked, advantages, machine=HERE, options=PolicyGradient()):
    """Loss, gradient and numbers of a first step on these episodes."""
    old = logps(model, data)
    total, sums = 0.0, {}
    for batch in batches(data, picked, advantages, old, old, machine=machine):
        loss, numbers = clipped_objective(options, batch, entry_logps(model, machine, batch.trees))
        loss.backward()
        total += loss.item()
        sums = {name: sums.get(name, 0.0) + value.item() for name, value in numbers.items()}
    gradient = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return total, gradient, sums


def test_the_first_step_is_reinforce():
    """Every ratio is 1 and nothing is clipped. An episode that a step meets twice counts once."""
    model, episodes = tiny.adapted(dtype=torch.float64), [*group(1), *group(2)]
    data, advantages = rollouts(episodes), gigpo_advantages(episodes)
    _, gradient, numbers = step(model, data, [*range(8), 0, 1], data.by_token(advantages))
    assert numbers["ratio"] == pytest.approx(1, abs=1e-6) and numbers["clip_share"] == 0
    assert numbers["kl_to_reference"] == pytest.approx(0, abs=1e-9) and numbers["entropy"] > 0
    written = sum(len(dialogue.written) for dialogue in data.dialogues)
    reinforce = 0.0
    for d, (dialogue, advantage) in enumerate(zip(data.dialogues, advantages)):
        of_tokens = entry_logps(model, HERE, trees_of(data, d))
        reinforce -= (advantage[list(dialogue.written)] * of_tokens).sum() / written
    reinforce.backward()
    for name, value in gradient.items():
        torch.testing.assert_close(model.get_parameter(name).grad, value, rtol=1e-5, atol=1e-9)


@MACHINES
def test_a_step_is_the_same_whatever_fits_in_memory(machine):
    model, episodes = tiny.adapted(dtype=torch.float64), [*group(1), *group(2)]
    data = rollouts(episodes)
    advantages = data.by_token(grpo_advantages(episodes))
    loss, gradient, _ = step(model, data, range(8), advantages)
    other, other_gradient, _ = step(model, data, range(8), advantages, machine)
    assert other == pytest.approx(loss, abs=1e-9)
    for name, value in other_gradient.items():
        torch.testing.assert_close(value, gradient[name], rtol=1e-6, atol=1e-9)


def test_a_page_carries_no_gradient():
    """Of the last hidden states, those before the agent's tokens have a gradient, those before a page none."""
    model, options = tiny.adapted(dtype=torch.float64), PolicyGradient(kl=0.5)
    data, seen = rollouts(group()), []
    old, advantages = logps(model, data), data.by_token(dr_grpo_advantages(group()))

    def keep(module, inputs, hidden):
        hidden.retain_grad()
        seen.append(hidden)

    model.model.norm.register_forward_hook(keep)
    for d, dialogue in enumerate(data.dialogues):
        (batch,) = batches(data, [d], advantages, old, [part - 1 for part in old])
        clipped_objective(options, batch, entry_logps(model, HERE, batch.trees))[0].backward()
        moved = seen.pop().grad.flatten(end_dim=-2).any(-1).tolist()
        assert moved[: len(dialogue.ids)] == [turn >= 0 for turn in dialogue.turns[1:]] + [False]


def test_the_logged_kl_is_the_policys_own_however_far_it_has_moved():
    """A bandit whose four tokens were written equally often: the expectation is the KL of today's policy."""
    old, policy = torch.full((4,), 0.25).log(), torch.tensor([0.7, 0.1, 0.1, 0.1]).log()
    batch = RolloutBatch(None, [], 4, torch.zeros(4), old, old)
    logged = clipped_objective(PolicyGradient(), batch, policy)[1]["kl_to_reference"]
    assert logged == pytest.approx((policy.exp() * (policy - old)).sum().item(), rel=1e-5)


@pytest.mark.parametrize(
    "weigh_kl, gradient", [(False, 0.5 * (1 - 4)), (True, 2 * 0.5 * (1 - 4 + 4 - math.log(4) - 1))]
)
def test_grpos_kl_stands_alone_and_ppos_is_weighed_by_the_ratio(weigh_kl, gradient):
    """A token with the ratio 2, four times as likely under the reference: k3 = 4 - ln 4 - 1."""
    logp = torch.tensor([-3.0], dtype=torch.float64, requires_grad=True)
    old, ref = logp.detach() - math.log(2), logp.detach() + math.log(4)
    batch = RolloutBatch(None, [], 1, torch.zeros(1), old, ref)
    clipped_objective(PolicyGradient(kl=0.5), batch, logp, weigh_kl=weigh_kl)[0].backward()
    assert logp.grad.item() == pytest.approx(gradient)


def test_the_share_of_clipped_tokens_counts_those_that_left_the_band_where_a_pushes():
    """Ratios e and 1/e, each with A = 1 and A = -1: pushed up and too high, pushed down and too low."""
    policy, old = torch.zeros(4, requires_grad=True), torch.tensor([-1.0, -1.0, 1.0, 1.0])
    batch = RolloutBatch(None, [], 4, torch.tensor([1.0, -1.0, 1.0, -1.0]), old, policy.detach())
    loss, numbers = clipped_objective(PolicyGradient(), batch, policy)
    loss.backward()
    assert numbers["clip_share"] == 0.5
    assert (policy.grad != 0).tolist() == [False, True, True, False]


def test_each_advantage_is_that_of_its_paper():
    episodes = [*group(1), *group(2)]
    reward, instance = torch.tensor([1.0, 1, 0, 0] * 2), torch.tensor([0] * 4 + [1] * 4)
    for advantages_of, expected in (
        (grpo_advantages, group_advantages(reward, instance)),
        (dr_grpo_advantages, torch.tensor([0.5, 0.5, -0.5, -0.5] * 2)),
        (rloo_advantages, torch.tensor([2 / 3, 2 / 3, -2 / 3, -2 / 3] * 2)),
    ):
        for episode, found, value in zip(episodes, advantages_of(episodes), expected, strict=True):
            torch.testing.assert_close(found, value.expand(len(episode.turns)))


def test_gigpo_adds_what_a_turn_gained_among_those_on_its_page():
    """One page throughout: the seven turns of an instance are in one state, with these returns.

    The same page in another instance is another state, and a page that one episode alone saw adds nothing.
    """
    episodes = group()
    lucky = [tiny.episode((RIGHT,), "solved", seed=2, index=n) for n in range(3)]
    plain = torch.cat(dr_grpo_advantages(episodes))
    returns = torch.tensor([1.0, 0.5, 1.0, 0.0, 0.0, 0.0, 0.0])
    found = gigpo_advantages([*episodes, *lucky], gamma=0.5, state_weight=2.0)
    torch.testing.assert_close(torch.cat(found[:4]) - plain, 2 * (returns - returns.mean()))
    last = replace(episodes[1].turns[1], observation='text "elsewhere"')
    episodes[1] = replace(episodes[1], turns=(episodes[1].turns[0], last))
    alone = gigpo_advantages(episodes)[1] - dr_grpo_advantages(episodes)[1]
    assert alone[1] == 0 and alone[0] != 0


def test_groups_without_both_outcomes_are_left_out():
    same = [tiny.episode(seed=5, index=n) for n in range(3)]
    silent = tiny.episode((), "limit", seed=5, index=3)
    assert mixed_groups([*group(), *same, silent]) == group()
    with pytest.raises(NothingToLearn):
        mixed_groups(same)


def test_who_did_not_play_the_rollouts_cannot_learn_from_them():
    model, other, data = tiny.model(), tiny.model(seed=2), rollouts(group())
    old, played = logps(model, data), []
    for episode, dialogue, values in zip(group(), data.dialogues, old, strict=True):
        counts = torch.bincount(torch.tensor(dialogue.written)).tolist()
        turns = zip(episode.turns, (values + 0.05).split(counts), strict=True)
        turns = tuple(replace(turn, logps=tuple(part.tolist())) for turn, part in turns)
        played.append(replace(episode, turns=turns))
    check_player(played, old, "mine")
    check_player(group(), logps(other, data), "unrecorded")
    with pytest.raises(ValueError, match="another agent than theirs"):
        check_player(played, logps(other, data), "theirs")


@pytest.mark.parametrize(
    "changes",
    [
        {"policy": "expert"},
        {"forced": 1},
        {"sampling": {"temperatures": [0.5, 1.0]}},
        {"sampling": {"temperature": 1.0, "top_p": 0.9}},
    ],
)
def test_only_what_the_agent_sampled_itself_at_temperature_1_is_learned_from(changes):
    """Else the ratio's denominator is another's, and a token without influence has a gradient."""
    own = group(sampling={"temperature": 1.0, "top_p": 1.0})
    assert own_rollouts([*own, tiny.episode((), "limit", seed=2)]) == own
    with pytest.raises(ValueError, match="seed 1 episode 0: "):
        own_rollouts(group(**changes))


def test_rollouts_of_two_agents_are_not_compared():
    moved = [*group(1, policy="a/adapter@1"), *group(2, policy="b/adapter@1")]
    assert own_rollouts(moved) == moved
    with pytest.raises(ValueError, match="2 agents"):
        own_rollouts([*group(1, policy="a@1"), *group(2, policy="a@2")])
