"""Policy gradients from files to a step's gradient: what is weighed, by what, and what is left out."""

import math
from dataclasses import replace

import pytest
import tiny
import torch

from minidpo.config import GRPO, GRPOCommand, LoopCommand
from minidpo.data.pairs import NothingToLearn
from minidpo.learning.grpo import RolloutBatch, clipped_objective, mixed_groups, turn_advantages
from minidpo.learning.rollouts import (
    Rollouts,
    check_player,
    entry_batches,
    entry_logps,
    group_numbers,
)
from minidpo.memory.machine import Machine
from minidpo.objective.policy_gradient import group_advantages

HERE = Machine(device="cpu", dtype="float32")
RIGHT, WRONG = tiny.CLICK_2, tiny.write("link [3]", 'CLICK(ref="3")')


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
    return Rollouts.of(episodes, tiny.chat(), 1024)


def batches(data, picked, *columns, machine=HERE):
    """columns: advantages, log-probs of the player and of the reference."""
    return (
        RolloutBatch(*parts)
        for parts in entry_batches(data, picked, columns, machine, torch.device("cpu"))
    )


def trees_of(data, d, machine=HERE):
    """An episode by itself."""
    ((trees, *_),) = entry_batches(data, [d], (), machine, torch.device("cpu"))
    return trees


def logps(model, data, machine=HERE):
    """Of each episode by itself."""
    return [
        entry_logps(model, trees_of(data, d, machine), machine).detach()
        for d in range(len(data.names))
    ]


def first_step(model, data, advantages, options, machine):
    """Loss, gradient and numbers of a step on all episodes, fresh as they are."""
    old = logps(model, data)
    total, sums = 0.0, {}
    for batch in batches(data, range(len(old)), advantages, old, old, machine=machine):
        loss, numbers = clipped_objective(options, batch, entry_logps(model, batch.trees, machine))
        loss.backward()
        total += loss.item()
        sums = {name: sums.get(name, 0.0) + value.item() for name, value in numbers.items()}
    gradient = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return total, gradient, sums


@pytest.mark.parametrize("advantage", ["grpo", "drgrpo", "rloo", "gigpo"])
def test_the_first_step_is_reinforce_whatever_fits_in_memory(advantage):
    """Every ratio is 1, nothing is clipped; and only what the agent wrote moves the policy."""
    model, options = tiny.adapted(dtype=torch.float64), GRPO(advantage=advantage)
    episodes = [*group(1), *group(2)]
    data = rollouts(episodes)
    advantages = data.by_token(turn_advantages(episodes, options))
    loss, gradient, numbers = first_step(model, data, advantages, options, HERE)
    assert numbers["ratio"] == pytest.approx(1, abs=1e-6) and numbers["clip_share"] == 0
    assert numbers["kl_to_reference"] == pytest.approx(0, abs=1e-9) and numbers["entropy"] > 0
    for micro_tokens, tree_tokens in ((1, 2048), (8192, 400)):
        machine = Machine(
            device="cpu", dtype="float32", micro_tokens=micro_tokens, tree_tokens=tree_tokens
        )
        other, other_gradient, _ = first_step(model, data, advantages, options, machine)
        assert other == pytest.approx(loss, abs=1e-9)
        for name, value in other_gradient.items():
            torch.testing.assert_close(value, gradient[name], rtol=1e-6, atol=1e-9)
    written = sum(turn >= 0 for dialogue in data.dialogues for turn in dialogue.turns)
    reinforce = 0.0
    for d, (dialogue, advantage) in enumerate(
        zip(data.dialogues, turn_advantages(episodes, options))
    ):
        turns = [turn for turn in dialogue.turns if turn >= 0]
        reinforce -= (
            advantage[turns] * entry_logps(model, trees_of(data, d), HERE)
        ).sum() / written
    reinforce.backward()
    for name, value in gradient.items():
        torch.testing.assert_close(
            dict(model.named_parameters())[name].grad, value, rtol=1e-5, atol=1e-9
        )


@pytest.mark.parametrize("tree_tokens", [2048, 100])
def test_an_episode_that_a_step_meets_twice_counts_once(tree_tokens):
    model, options = tiny.adapted(dtype=torch.float64), GRPO()
    data = rollouts(group())
    old, advantages = logps(model, data), data.by_token(turn_advantages(group(), options))
    machine = Machine(device="cpu", dtype="float32", tree_tokens=tree_tokens)
    losses = [
        sum(
            clipped_objective(options, batch, entry_logps(model, batch.trees, machine))[0].item()
            for batch in batches(data, picked, advantages, old, old, machine=machine)
        )
        for picked in ([0, 1, 2, 3], [0, 1, 2, 3, 0, 1])
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)


@pytest.mark.parametrize("kl", [0.0, 0.5])
def test_a_page_carries_no_gradient(kl):
    """The last hidden states, which the head alone reads: those behind which the agent wrote have a gradient,
    those behind which a page goes on have none."""
    model, options = tiny.adapted(dtype=torch.float64), GRPO(advantage="drgrpo", kl=kl)
    data = rollouts(group())
    old, seen, advantages = logps(model, data), [], data.by_token(turn_advantages(group(), options))

    def keep(module, inputs, hidden):
        hidden.retain_grad()
        seen.append(hidden)

    model.model.norm.register_forward_hook(keep)
    for d, dialogue in enumerate(data.dialogues):
        (batch,) = batches(data, [d], advantages, old, [part - 1 for part in old])
        clipped_objective(options, batch, entry_logps(model, batch.trees, HERE))[0].backward()
        moved = seen.pop().grad.flatten(end_dim=-2).any(-1).tolist()
        assert moved[: len(dialogue.ids)] == [turn >= 0 for turn in dialogue.turns[1:]] + [False]
        assert sum(moved) == len(old[d]) and not any(moved[len(dialogue.ids) :])


def test_the_kl_that_is_logged_is_the_policys_own_however_far_it_has_moved():
    """A bandit whose four tokens were written equally often: the expectation is the KL of today's policy."""
    old, policy = torch.full((4,), 0.25).log(), torch.tensor([0.7, 0.1, 0.1, 0.1]).log()
    batch = RolloutBatch(None, [], 4, torch.zeros(4), old, old)
    logged = clipped_objective(GRPO(), batch, policy)[1]["kl_to_reference"]
    assert logged == pytest.approx((policy.exp() * (policy - old)).sum().item(), rel=1e-5)


@pytest.mark.parametrize(
    "weigh_kl, gradient", [(False, 0.5 * (1 - 4)), (True, 2 * 0.5 * (1 - 4 + 4 - math.log(4) - 1))]
)
def test_grpos_kl_stands_alone_and_ppos_is_weighed_by_the_ratio(weigh_kl, gradient):
    """A token with the ratio 2, four times as likely under the reference: k3 = 4 - ln 4 - 1."""
    logps = torch.tensor([-3.0], dtype=torch.float64, requires_grad=True)
    batch = RolloutBatch(
        None, [], 1, torch.zeros(1), logps.detach() - math.log(2), logps.detach() + math.log(4)
    )
    clipped_objective(GRPO(kl=0.5), batch, logps, weigh_kl=weigh_kl)[0].backward()
    assert logps.grad.item() == pytest.approx(gradient)


def test_a_ratio_outside_the_band_is_counted_and_moves_nothing():
    model, options = tiny.adapted(dtype=torch.float64), GRPO(advantage="drgrpo", low=0.1, high=0.1)
    data = rollouts(group())
    advantages = data.by_token(turn_advantages(group(), options))
    old = [values - advantage.sign() for values, advantage in zip(logps(model, data), advantages)]
    together = Machine(device="cpu", dtype="float32", micro_tokens=8192)
    (batch,) = batches(data, range(4), advantages, old, old, machine=together)
    loss, numbers = clipped_objective(options, batch, entry_logps(model, batch.trees, HERE))
    loss.backward()
    assert numbers["clip_share"].item() == pytest.approx(1)
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)
    loss, numbers = clipped_objective(
        GRPO(advantage="drgrpo", kl=1.0), batch, entry_logps(model, batch.trees, HERE)
    )
    loss.backward()  # what is held to the reference moves back to it
    assert numbers["kl_to_reference"] > 0.1
    policy = torch.zeros(len(batch.ref), requires_grad=True)
    clipped_objective(
        GRPO(advantage="drgrpo", low=0.1, high=0.1, kl=1.0),
        batch._replace(advantage=torch.zeros_like(batch.advantage), ref=policy.detach() - 1),
        policy,
    )[0].backward()
    assert (policy.grad > 0).all()  # where it says a word too readily, descent takes it back
    above = batch._replace(old=policy.detach() - 1, advantage=-torch.ones_like(batch.advantage))
    assert (
        clipped_objective(options, above, policy)[1]["clip_share"] == 0
    )  # pushed down from above: no harm


def test_each_advantage_is_that_of_its_paper_and_a_whole_episodes_but_for_gigpos():
    episodes = [*group(1), *group(2)]
    reward, instance = torch.tensor([1.0, 1, 0, 0] * 2), torch.tensor([0] * 4 + [1] * 4)
    for name, expected in (
        ("grpo", group_advantages(reward, instance)),
        ("drgrpo", torch.tensor([0.5, 0.5, -0.5, -0.5] * 2)),
        ("rloo", torch.tensor([2 / 3, 2 / 3, -2 / 3, -2 / 3] * 2)),
    ):
        found = turn_advantages(episodes, GRPO(advantage=name))
        for episode, advantage, value in zip(episodes, found, expected, strict=True):
            torch.testing.assert_close(advantage, value.expand(len(episode.turns)))
    plain, gigpo = (
        turn_advantages(episodes, GRPO(advantage=name, **weight))
        for name, weight in (("drgrpo", {}), ("gigpo", {"gamma": 0.5, "state_weight": 2.0}))
    )
    # one page throughout: seven turns of an instance are in one state, with these returns
    returns = torch.tensor([1.0, 0.5, 1.0, 0.0, 0.0, 0.0, 0.0])
    more = torch.cat(gigpo[:4]) - torch.cat(plain[:4])
    torch.testing.assert_close(more, 2 * (returns - returns.mean()))


def test_the_same_page_in_another_instance_is_another_state():
    lucky = [tiny.episode((RIGHT,), "solved", seed=2, index=n) for n in range(3)]
    alone, beside = (
        turn_advantages(episodes, GRPO(advantage="gigpo"))[:4]
        for episodes in (group(1), [*group(1), *lucky])
    )
    torch.testing.assert_close(beside, alone)


def test_a_page_that_one_episode_saw_alone_adds_nothing_of_its_own():
    episodes = group()
    turn = episodes[1].turns[1]
    alone = type(turn)('text "elsewhere"', turn.answer, turn.action)
    episodes[1] = type(episodes[1])(**{**vars(episodes[1]), "turns": (episodes[1].turns[0], alone)})
    plain, gigpo = (turn_advantages(episodes, GRPO(advantage=name)) for name in ("drgrpo", "gigpo"))
    assert gigpo[1][1] == plain[1][1] and gigpo[1][0] != plain[1][0]


def test_groups_without_variance_are_left_out_and_counted(capsys):
    same = [tiny.episode(seed=5, index=n) for n in range(3)]
    assert mixed_groups([*group(), *same], ["x.jsonl"]) == group()
    assert "1 of 2 groups have both outcomes" in capsys.readouterr().out
    with pytest.raises(NothingToLearn, match="x.jsonl: no instance was both solved and failed"):
        mixed_groups(same, ["x.jsonl"])


def test_the_log_has_the_share_of_mixed_groups_and_what_first_answers_know_of_the_task():
    """Of the eight answers to two prompts each comes once or twice: 2 of 12 couples agree, across 6 of 16."""
    same = [tiny.episode(seed=5, index=n, instruction="Click.") for n in range(4)]
    numbers = group_numbers([*group(1), *group(2)])
    assert numbers == {
        "diversity": 1.0,
        "mixed": 1.0,
        "answer_information": pytest.approx(math.log((2 / 12) / (2 / 12 / 2 + 6 / 16 / 2))),
    }
    assert group_numbers([*group(), *same])["mixed"] == 0.5
    assert group_numbers(group()) == {"diversity": 1.0, "mixed": 1.0}  # one prompt: nothing to know


def test_who_did_not_play_the_rollouts_cannot_learn_from_them():
    model, other, data = tiny.model(), tiny.model(seed=2), rollouts(group())
    old = logps(model, data)
    played = []
    for episode, values in zip(group(), old, strict=True):
        turns = data.dialogues[episode.index].turns
        counts = torch.bincount(torch.tensor([turn for turn in turns if turn >= 0]))
        turns = zip(episode.turns, values.split(counts.tolist()), strict=True)
        played.append(
            replace(
                episode,
                turns=tuple(
                    replace(turn, logps=tuple((part + 0.05).tolist())) for turn, part in turns
                ),
            )
        )
    check_player(played, old, "mine")
    check_player(group(), logps(other, data), "unrecorded")
    with pytest.raises(
        ValueError, match="played by another agent than --adapter theirs: its log-probs are "
    ):
        check_player(played, logps(other, data), "theirs")


def test_rollouts_of_two_agents_are_not_compared():
    moved = [*group(1, policy="a/adapter@1"), *group(2, policy="b/adapter@1")]
    assert len(mixed_groups(moved, ["x.jsonl"])) == 8
    with pytest.raises(ValueError, match="x.jsonl: played by 2 agents, but an episode is compared"):
        mixed_groups([*group(1, policy="a@1"), *group(1, policy="a@2")], ["x.jsonl"])


@pytest.mark.parametrize(
    "changes", [{"policy": "expert"}, {"policy": "clumsy 0.3"}, {"policy": "dagger"}, {"forced": 1}]
)
def test_what_the_agent_did_not_play_is_refused_by_name(changes):
    with pytest.raises(ValueError, match="seed 1 episode 0: not all of it was played by the agent"):
        mixed_groups(group(**changes), ["x.jsonl"])


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperatures": [0.5, 1.0]},
        {"temperature": 0.5},
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.9},
    ],
)
def test_what_was_sampled_from_another_distribution_is_refused_by_name(sampling):
    """The ratio's denominator would be another's, and a token without influence would have a gradient."""
    with pytest.raises(ValueError, match="seed 1 episode 0: sampled with .*, but policy gradients"):
        mixed_groups(group(sampling=sampling), ["x.jsonl"])
    assert len(mixed_groups(group(sampling={"temperature": 1.0, "top_p": 1.0}), ["x.jsonl"])) == 4


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: GRPO(low=1.0), r"low must be within \[0, 1\)"),
        (lambda: GRPO(high=-0.1), "high must be"),
        (lambda: GRPO(kl=math.inf), "kl must be"),
        (lambda: GRPOCommand(grpo=GRPO(gamma=0.9)), "are of the advantage gigpo, not of grpo"),
        (
            lambda: LoopCommand(learn="rloo", grpo=GRPO(gamma=0.9)),
            "are of the advantage gigpo, not of rloo",
        ),
        (
            lambda: GRPOCommand(reference="runs/sft/adapter"),
            "grpo.kl is 0, so no reference is read",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()
