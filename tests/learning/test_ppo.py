"""PPO from files to a step's gradient: values, the passes over the rollouts, and what is refused."""

import math
import shutil
from dataclasses import replace

import pytest
import tiny
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_grpo import RIGHT, WRONG, group, rollouts, trees_of
from test_sft_dpo import HERE, TIMES, episodes_file, folder, grpo, killed  # noqa: F401

from minidpo.config import GRPO, PPO, LoopCommand, PPOCommand
from minidpo.data.pairs import NothingToLearn
from minidpo.learning.grpo import RolloutBatch, clipped_objective
from minidpo.learning.plan_loop import plan_loop
from minidpo.learning.ppo import (
    ValuedBatch,
    entry_scores,
    kl_weight,
    load_rollouts,
    make_targets,
    ppo_objective,
    turn_rewards,
    valued_batches,
)
from minidpo.learning.ppo import ppo as train_ppo
from minidpo.learning.rollouts import entry_logps
from minidpo.memory import lora
from minidpo.memory.machine import Machine
from minidpo.model.scalar_head import FILE, ScalarHead
from minidpo.system.run_folder import RunFolder, records

CPU = torch.device("cpu")


def ppo(folder, out, machine=HERE, adapter="adapter", reference=None, **options):  # noqa: F811
    """Adapter and head, and the log without what a clock or the memory says. Eight episodes, three a step."""
    options = {"steps": 5, "lr": 1e-3, "warmup": 2, "batch": 3, "save_every": 2, **options}
    train_ppo(
        PPOCommand(
            str(folder / "base"),
            folder / adapter,
            data=(folder / "rollouts.jsonl",),
            out=out,
            reference=reference,
            ppo=PPO(**options),
            machine=machine,
        )
    )
    weights = load_file(out / "adapter" / FILE) | load_file(out / "adapter" / lora.WEIGHTS)
    return (
        {name: tensor.tolist() for name, tensor in weights.items()},
        [{k: v for k, v in record.items() if k not in TIMES} for record in records(out)],
    )


@pytest.fixture(scope="module")
def undisturbed(folder, tmp_path_factory):  # noqa: F811
    out = tmp_path_factory.mktemp("ppo") / "run"
    return out, *ppo(folder, out)


def first_step(options, machine, weight=0.0, kl=0.0):
    """Model, head, data, loss, gradients and numbers of a step on all episodes, fresh as they are."""
    model = tiny.adapted(torch.float64)
    head = ScalarHead(model)
    with torch.no_grad():
        head.weight.fill_(weight)
    episodes = [*group(1), *group(2)]
    data = rollouts(episodes)
    old, values = [], []
    for d in range(len(episodes)):
        logps, value = entry_scores(model, head, trees_of(data, d), HERE).detach().chunk(2)
        old.append(logps)
        values.append(value)
    rewards = [turn_rewards(e, (), options) for e in episodes]
    targets = make_targets(data, values, rewards, options)
    total, sums = 0.0, {}
    picked = [*range(8), 0, 1]  # two are met twice, at the end of an epoch: they count once
    for batch in valued_batches(
        data, picked, targets, (old, old), replace(options, kl=kl), machine, CPU
    ):
        scores = entry_scores(model, head, batch.rollouts.trees, machine)
        loss, numbers = ppo_objective(batch, scores)
        loss.backward()
        total += loss.item()
        sums = {name: sums.get(name, 0.0) + value.item() for name, value in numbers.items()}
    gradients = {
        name: p.grad
        for name, p in (*model.named_parameters(), ("head", head.weight))
        if p.grad is not None
    }
    return model, (data, episodes, sum(map(len, old))), total, gradients, sums


def test_the_first_step_is_reinforce_with_the_verdict_where_nothing_stands_between():
    """V = 0, λ = γ = 1, no whitening: every ratio is 1, and A is the verdict for each token."""
    options = PPO(lam=1.0, whiten=False, kl=0.0)
    model, (data, episodes, written), _, found, numbers = first_step(options, HERE)
    assert numbers["ratio"] == pytest.approx(1, abs=1e-9) and numbers["clip_share"] == 0
    assert numbers["kl_to_reference"] == pytest.approx(0, abs=1e-12)
    assert numbers["value_loss"] == pytest.approx(
        0.5 * 3 / 7
    )  # V is off by 1 in three of seven turns
    model.zero_grad()
    reinforce = 0.0
    for d, episode in enumerate(episodes):
        reinforce -= episode.solved * entry_logps(model, trees_of(data, d), HERE).sum() / written
    reinforce.backward()
    for name, p in model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.grad, found[name], rtol=1e-7, atol=1e-10)
    assert found["head"].any()  # while the head, which says 0, learns at once


@pytest.mark.parametrize(
    "machine",
    [
        Machine(device="cpu", dtype="float32", micro_tokens=1, tree_tokens=100),
        Machine(device="cpu", dtype="float32", tree_tokens=100, depth_first=True),
        Machine(device="cpu", dtype="float32", micro_tokens=8192),
    ],
)
def test_a_step_is_the_same_whatever_fits_in_memory(machine):
    options = PPO(value_clip=0.01)
    _, _, loss, gradients, numbers = first_step(options, HERE, weight=0.05, kl=0.3)
    _, _, other, other_gradients, other_numbers = first_step(options, machine, weight=0.05, kl=0.3)
    assert other == pytest.approx(loss, abs=1e-9) and other_numbers == pytest.approx(
        numbers, abs=1e-9
    )
    assert numbers["kl_weight"] == pytest.approx(0.3) and set(other_gradients) == set(gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(other_gradients[name], gradient, rtol=1e-6, atol=1e-10)


def test_values_and_advantages_are_of_turns_and_whitened_over_all_of_a_pass():
    """An episode solved in its second turn and one failed in its first; V as given, γ = 0.5, λ = 0."""
    solved, failed = tiny.episode((tiny.CLICK_1, RIGHT)), tiny.episode((WRONG,), "failed", index=1)
    data = rollouts([solved, failed])
    turns = [[turn for turn in dialogue.turns if turn >= 0] for dialogue in data.dialogues]
    given = [
        torch.arange(float(len(of))) / 100 for of in turns
    ]  # what is within a turn must not matter
    second = turns[0].index(1)
    given[0][0], given[0][second], given[1][0] = 0.2, 0.6, 0.3
    paid = [torch.tensor([0.0, 1.0]), torch.tensor([0.0])]
    targets = make_targets(data, given, paid, PPO(gamma=0.5, lam=0.0, whiten=False))
    expected = [torch.tensor([0.5 * 0.6 - 0.2, 1 - 0.6]), torch.tensor([-0.3])]
    for found, of, wanted in zip(targets.advantages, turns, expected, strict=True):
        torch.testing.assert_close(found, wanted[of])
    assert (
        targets.starts[0].nonzero()[:, 0].tolist() == [0, second] and targets.starts[1].sum() == 1
    )
    for found, of, wanted in zip(targets.returns, turns, ([0.3, 1.0], [0.0])):
        assert found.tolist() == pytest.approx([wanted[turn] for turn in of])
    assert targets.variance == pytest.approx(torch.tensor([0.3, 1.0, 0.0]).var(correction=0).item())
    white = torch.cat(make_targets(data, given, paid, PPO(gamma=0.5, lam=0.0)).advantages)
    together = torch.cat(expected)
    torch.testing.assert_close(
        white[torch.cat(targets.starts) > 0], (together - together.mean()) / together.std()
    )


@given(
    st.booleans(),
    st.lists(st.floats(0, 1), min_size=1, max_size=6),
    st.floats(0, 3),
    st.floats(0, 3),
    st.floats(0, 1),
)
def test_step_rewards_move_no_return_but_by_what_no_turn_can_change(
    solved, pages, alpha, beta, gamma
):
    """Discounted they add up to (α γᵀ⁻¹ + β γᵀ)·[solved] - β·V_0; without them the verdict alone is paid."""
    assume(alpha + beta)
    values, T = [*pages, float(solved)], len(pages)
    episode = tiny.episode(("a",) * T, "solved" if solved else "failed")
    paid = turn_rewards(episode, values, PPO(outcome_weight=alpha, step_weight=beta, gamma=gamma))
    expected = (alpha * gamma ** (T - 1) + beta * gamma**T) * solved - beta * pages[0]
    discounted = sum(gamma**t * r for t, r in enumerate(paid.tolist()))
    assert discounted == pytest.approx(expected, abs=1e-5)
    plain = turn_rewards(episode, (), PPO())
    assert plain.tolist() == [0.0] * (T - 1) + [float(solved)]


def test_a_turn_is_paid_what_its_continuations_say_it_gained(tmp_path):
    """A slip in the first turn, from where half go on to solve; what lacks continuations is left out."""
    slip = tiny.episode((WRONG, WRONG), "failed", index=0)
    right = tiny.episode((tiny.CLICK_1, RIGHT), index=1)
    goes_on = [
        replace(tiny.episode((WRONG, end), outcome, index=n), forced=1)
        for n, (end, outcome) in enumerate([(RIGHT, "solved"), (WRONG, "failed")], start=2)
    ]
    path = episodes_file(
        tmp_path / "alike.jsonl", [slip, *(replace(e, outcome="failed") for e in goes_on)]
    )
    with pytest.raises(NothingToLearn, match="all episodes were solved, or none"):
        load_rollouts([path], PPO(step_weight=1.0))
    path = episodes_file(
        tmp_path / "rollouts.jsonl", [slip, right, *goes_on]
    )  # `right` is left out
    episodes, rewards = load_rollouts(
        [path], PPO(step_weight=1.0)
    )  # it failed, and its last turn lost 1/2
    assert [e.index for e in episodes] == [0] and rewards[0].tolist() == [0.0, -0.5]
    goes_on.append(replace(tiny.episode((tiny.CLICK_1, RIGHT), index=4), forced=1))
    path = episodes_file(tmp_path / "more.jsonl", [slip, right, *goes_on])
    episodes, rewards = load_rollouts([path], PPO(outcome_weight=2.0, step_weight=1.0))
    assert [e.index for e in episodes] == [0, 1]
    assert [paid.tolist() for paid in rewards] == [
        [0.0, -0.5],
        [0.5, 2.0],
    ]  # V_0 is 1/2: of two, one solved
    with pytest.raises(ValueError, match="not all of it was played by the agent"):
        load_rollouts([path], PPO())
    path = episodes_file(tmp_path / "few.jsonl", [slip, right])
    with pytest.raises(
        NothingToLearn, match="no episode with continuations from each of its steps"
    ):
        load_rollouts([path], PPO(step_weight=1.0))
    lone = [
        tiny.episode((RIGHT,), outcome, index=n)
        for n, outcome in enumerate(("solved", "failed"), 5)
    ]
    path = episodes_file(
        tmp_path / "lone.jsonl", [*lone, slip]
    )  # `slip` alone asks for continuations
    with pytest.raises(
        NothingToLearn, match="no episode with continuations .* for ppo.step-weight"
    ):
        load_rollouts([path], PPO(step_weight=1.0))
    path = episodes_file(
        tmp_path / "two.jsonl", [slip, right, *(replace(e, policy="b") for e in goes_on)]
    )
    with pytest.raises(ValueError, match="two.jsonl: played by 2 agents"):
        load_rollouts([path], PPO(step_weight=1.0))
    greedy = [replace(e, sampling={"temperature": 0.0}) for e in goes_on]
    path = episodes_file(
        tmp_path / "greedy.jsonl", [slip, right, *greedy]
    )  # V would be another policy's
    with pytest.raises(ValueError, match="greedy.jsonl: sampled in several ways"):
        load_rollouts([path], PPO(step_weight=1.0))


def test_explained_variance_is_0_for_the_mean_1_for_the_returns_and_counts_no_other_token():
    options, returns = PPO(value_clip=10.0, value_weight=0.3), torch.tensor([1.0, 9.0, 0.0, 1.0])
    start = torch.tensor([1.0, 0.0, 1.0, 1.0])
    zeros = torch.zeros(4)
    rollout = RolloutBatch(None, ["x"] * 4, 4, zeros, zeros, zeros)
    batch = ValuedBatch(rollout, start, zeros, returns, 2 / 9, 3, options, ["x"] * 8, None)

    def numbers(values):
        return ppo_objective(batch, torch.cat([zeros, torch.tensor(values)]))

    _, mean = numbers([2 / 3, 5.0, 2 / 3, 2 / 3])
    _, right = numbers([1.0, 5.0, 0.0, 1.0])
    assert mean["explained_variance"] == pytest.approx(0, abs=1e-6) and right["value_loss"] == 0
    assert right["explained_variance"] == pytest.approx(1)
    loss, wrong = numbers([0.0, 5.0, 0.0, 0.0])
    assert loss == pytest.approx(0.3 * 2 * 0.5 / 3) and wrong["value_loss"] == pytest.approx(
        2 * 0.5 / 3
    )
    batch = batch._replace(returns=torch.ones(4), variance=0.0)  # all alike: nothing to explain
    assert numbers([0.5] * 4)[1]["explained_variance"] == 0


def test_the_kls_weight_follows_the_log_towards_its_target():
    log = [{"kl_to_reference": kl} for kl in (0.0, 0.04, 0.0202)]
    assert kl_weight(PPO(kl=0.05, kl_target=0.02), log) == pytest.approx(0.05 * 0.98 * 1.02 * 1.001)
    assert kl_weight(PPO(kl=0.05, kl_target=None), log) == kl_weight(PPO(kl=0.05), []) == 0.05


@pytest.mark.parametrize(
    "where, at",
    [("log", 2), ("log", 4), ("save_state", 1), ("save_state", 2), ("finish", 1), ("save", 1)],
)
def test_killed_anywhere_and_started_again_it_is_the_same_bit_for_bit(
    folder, undisturbed, tmp_path, monkeypatch, where, at
):
    """A pass ends within step 3, so step 4 begins with new values; the weight of the KL goes on, too."""
    with killed(monkeypatch, ScalarHead if where == "save" else RunFolder, where, at):
        ppo(folder, tmp_path / "run")
    assert ppo(folder, tmp_path / "run") == undisturbed[1:]


def test_a_pass_that_has_lost_the_values_it_began_with_does_not_go_on_with_others(
    folder, tmp_path, monkeypatch
):
    with killed(monkeypatch, RunFolder, "log", 3):
        ppo(folder, tmp_path / "run")
    (tmp_path / "run" / "values-0.safetensors").unlink()
    with pytest.raises(
        ValueError, match="values-0.safetensors is gone.*: delete .*state.safetensors, too"
    ):
        ppo(folder, tmp_path / "run")


def test_the_log_has_what_a_run_needs_and_a_pass_makes_its_values_anew(undisturbed):
    out, weights, log = undisturbed
    assert {
        "kl_to_reference",
        "clip_share",
        "entropy",
        "ratio",
        "value_loss",
        "explained_variance",
        "kl_weight",
        "mixed",
        "answer_information",
    } <= log[0].keys()
    assert log[0]["ratio"] == pytest.approx(1, abs=1e-5) and log[0]["kl_weight"] == pytest.approx(
        0.05
    )
    assert log[1]["kl_weight"] == pytest.approx(0.05 * 0.98)
    first, second = (load_file(out / f"values-{number}.safetensors")["scores"] for number in (0, 1))
    assert not first.any() and second.any()
    assert any(map(any, weights["value"]))


@pytest.mark.parametrize("learn", [grpo, ppo], ids=["grpo", "ppo"])
def test_where_trees_have_the_same_shapes_every_first_ratio_is_1_to_the_last_bit(
    folder, tmp_path, monkeypatch, learn
):
    """A group is a tree, and each tree a pass of its own: then scoring and training compute the same."""
    steps = []

    def recorded(options, batch, logps, **how):
        steps.append(torch.equal(logps, batch.old))
        return clipped_objective(options, batch, logps, **how)

    for module in ("grpo", "ppo"):
        monkeypatch.setattr(f"minidpo.learning.{module}.clipped_objective", recorded)
    _, log = learn(folder, tmp_path / "run", replace(HERE, micro_tokens=1), batch=8, steps=2)
    first, second = log
    assert all(steps[: len(steps) // 2]) and not all(steps)
    assert (first["ratio"], first["clip_share"], first["kl_to_reference"]) == (1.0, 0.0, 0.0)
    assert second["ratio"] != 1.0


@pytest.mark.parametrize("learn", [grpo, ppo], ids=["grpo", "ppo"])
def test_what_solved_becomes_likelier_than_what_failed(folder, tmp_path, monkeypatch, learn):  # noqa: F811
    gaps = []

    def recorded(options, batch, logps, **how):
        solved = torch.tensor([name.endswith(("episode 0", "episode 1")) for name in batch.names])
        gaps.append((logps[solved].mean() - logps[~solved].mean()).item())
        return clipped_objective(options, batch, logps, **how)

    for module in ("grpo", "ppo"):
        monkeypatch.setattr(f"minidpo.learning.{module}.clipped_objective", recorded)
    learn(
        folder,
        tmp_path / "run",
        replace(HERE, micro_tokens=8192),
        batch=8,
        steps=6,
        lr=1e-3,
        warmup=0,
    )
    assert len(gaps) == 6 and gaps[-1] > gaps[0] + 0.01


@given(
    st.lists(st.tuples(st.floats(-2, 2), st.floats(-1, 1)), min_size=2, max_size=5),
    st.floats(0.2, 2),
)
def test_at_rlhfs_optimum_what_ppo_trains_has_no_gradient(arms, beta):
    """A bandit with exact expectations, its arms (log-odds of the reference, reward): the optimum of
    E[r] - β·KL(π || π_ref) is π_ref·exp(r/β)/Z (arXiv:2305.18290, Eq. 4)."""
    odds, reward = torch.tensor(arms, dtype=torch.float64).t()
    ref = odds.log_softmax(0)
    leaf = (ref + reward / beta).requires_grad_()
    logps, old = leaf.log_softmax(0), leaf.detach().log_softmax(0)
    for arm, share in enumerate(old.exp()):
        one = RolloutBatch(
            None,
            [""],
            1,
            reward[arm : arm + 1] - (old.exp() * reward).sum(),
            old[arm : arm + 1],
            ref[arm : arm + 1],
        )
        no_value = torch.zeros(1, dtype=torch.float64)
        batch = ValuedBatch(one, no_value, no_value, no_value, 0.0, 1, PPO(kl=beta), ["", ""], None)
        loss, _ = ppo_objective(batch, torch.cat([logps[arm : arm + 1], no_value]))
        (share * loss).backward(retain_graph=True)
    torch.testing.assert_close(leaf.grad, torch.zeros_like(ref), rtol=0, atol=1e-9)


@pytest.mark.parametrize("learn", [grpo, ppo], ids=["grpo", "ppo"])
def test_a_reference_that_is_named_is_who_the_kl_looks_at_and_not_who_played(
    folder, tmp_path, learn
):
    """The base is another policy than the adapter that played: the KL is to it, the ratio to the adapter."""
    base = tmp_path / "base-adapter"
    shutil.copytree(folder / "adapter", base)
    weights = load_file(base / lora.WEIGHTS)
    weights = {name: tensor * ("lora_B" not in name) for name, tensor in weights.items()}
    save_file(weights, base / lora.WEIGHTS)
    given = {"steps": 1, "batch": 8, "kl": 0.1, **({"kl_target": None} if learn is ppo else {})}
    _, (named,) = learn(folder, tmp_path / "named", reference=base, **given)
    _, (own,) = learn(folder, tmp_path / "own", **given)
    assert named["ratio"] == pytest.approx(1, abs=1e-5) and named["kl_to_reference"] > 1e-4
    assert own["kl_to_reference"] == pytest.approx(0, abs=1e-6)
    assert named["loss"] - own["loss"] == pytest.approx(0.1 * named["kl_to_reference"], rel=1e-3)


def test_the_next_round_begins_with_the_head_of_the_last_and_another_head_is_refused(
    folder, undisturbed, tmp_path
):
    out = undisturbed[0]
    ppo(folder, tmp_path / "two", adapter=out / "adapter")
    assert load_file(tmp_path / "two" / "values-0.safetensors")["scores"].any()
    before = (out / "adapter" / FILE).read_bytes()
    model = tiny.adapted(torch.float32)
    try:
        ScalarHead(model).save(out / "adapter", "value")
        with pytest.raises(
            ValueError, match="holds a run with other settings .head of other content"
        ):
            ppo(folder, tmp_path / "two", adapter=out / "adapter")
        ScalarHead(model).save(out / "adapter", "reward")
        with pytest.raises(
            ValueError, match=f"{FILE}: not a value head for this model: give another"
        ):
            ppo(folder, tmp_path / "three", adapter=out / "adapter")
        assert not (tmp_path / "three").exists()
    finally:
        (out / "adapter" / FILE).write_bytes(before)


def test_a_value_comes_to_the_mean_of_what_its_page_leads_to(folder, tmp_path):  # noqa: F811
    """Half of all turns of these rollouts end well, whichever page they begin at: that is all V can say."""
    _, log = ppo(folder, tmp_path / "run", steps=20, batch=8, lr=1e-2, kl=0.01)
    assert log[0]["explained_variance"] == pytest.approx(-1, abs=0.01)  # a new head says 0
    assert (
        -0.1 < log[-1]["explained_variance"] < 0.1
        and log[-1]["value_loss"] < 0.7 * log[0]["value_loss"]
    )
    assert log[-1]["kl_to_reference"] > 0 and log[-1]["kl_weight"] != 0.01


def test_a_plan_knows_ppo():
    plans = plan_loop(LoopCommand(learn="ppo", machine=HERE))
    assert set(plans) == {"SFT", "PPO", "explore"} and plans["PPO"] > plans["SFT"]


def test_what_has_no_advantage_or_makes_no_sense_is_refused(folder, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(
        "minidpo.memory.loading.open_model", lambda *_: pytest.fail("loaded a model")
    )
    with pytest.raises(
        ValueError, match="a training step would take .* but there are 102: .* saves"
    ):
        ppo(folder, tmp_path / "run", Machine(device="cpu", dtype="float32", memory_gib=0.1))
    path = episodes_file(tmp_path / "solved.jsonl", [tiny.episode(index=n) for n in range(2)])
    with pytest.raises(NothingToLearn, match="solved.jsonl: all episodes were solved, or none"):
        train_ppo(
            PPOCommand(str(folder / "base"), folder / "adapter", data=(path,), out=tmp_path / "run")
        )
    path = episodes_file(tmp_path / "expert.jsonl", group(policy="expert"))
    with pytest.raises(ValueError, match="episode 0: not all of it was played by the agent"):
        train_ppo(
            PPOCommand(str(folder / "base"), folder / "adapter", data=(path,), out=tmp_path / "run")
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: PPO(low=1.0), r"low must be within \[0, 1\)"),
        (lambda: PPO(lam=1.1), "lam must be"),
        (lambda: PPO(kl_target=0.0), "kl_target must be"),
        (lambda: PPO(value_clip=math.nan), "value_clip mus"),
        (
            lambda: PPO(outcome_weight=0.0),
            "outcome_weight and step_weight are 0, so no turn is paid",
        ),
        (
            lambda: PPOCommand(reference="runs/sft/adapter", ppo=PPO(kl=0.0)),
            "ppo.kl is 0, so no reference",
        ),
        (
            lambda: LoopCommand(learn="grpo", ppo=PPO(lam=1.0)),
            "learn grpo is not ppo: leave out ppo",
        ),
        (
            lambda: LoopCommand(learn="ppo", reference="sft", ppo=PPO(kl=0.0)),
            "learn ppo has no reference",
        ),
        (
            lambda: LoopCommand(learn="ppo", grpo=GRPO(kl=0.1)),
            "learn ppo is no policy gradient of groups",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()
