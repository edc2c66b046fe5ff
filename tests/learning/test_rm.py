"""A reward model: from pairs to a head that orders them, and how far it can be trusted."""

import json
import math
import random
import re
import shutil
from dataclasses import replace

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_sft_dpo import HERE, TIMES, WRONG, episodes_file, folder, killed  # noqa: F401

from minidpo.config import RM, LossParameters, PlanCommand, RMCommand
from minidpo.data.batch import read_states
from minidpo.data.episodes import read
from minidpo.data.pairs import NothingToLearn, Pair
from minidpo.data.prompt import dialogue_of
from minidpo.learning import rm as rm_module
from minidpo.learning.plan_loop import plan_loop
from minidpo.learning.preferences import pair_batches, tokenise
from minidpo.learning.rm import (
    LOSS,
    SETTINGS,
    OrderedPairs,
    ValuedTurns,
    best_of_n,
    episode_rewards,
    held_out_instances,
    load_valued,
    print_held_out,
    read_at_ends,
)
from minidpo.learning.rm import rm as train_rm
from minidpo.learning.rollouts import Rollouts
from minidpo.memory import lora
from minidpo.memory.machine import Machine
from minidpo.memory.plan import dpo_load, setup_of, step_plan
from minidpo.model.checkpoint import NANO
from minidpo.model.scalar_head import FILE, ScalarHead
from minidpo.system.result_file import read_result, write_result
from minidpo.system.run_folder import RunFolder, records

RIGHT = tiny.CLICK_2


def pairs(seeds=range(2)):
    """Of each instance, that its button was clicked ≻ that its link was, and after a detour."""

    def episode(seed, index, *said, outcome="solved"):
        return tiny.episode(
            said, outcome, seed=seed, index=index, instruction=f"Click Submit, {seed}."
        )

    return [
        pair
        for seed in seeds
        for pair in (
            Pair(episode(seed, 0, RIGHT), episode(seed, 1, WRONG, outcome="failed")),
            Pair(
                episode(seed, 2, tiny.CLICK_1, RIGHT),
                episode(seed, 3, tiny.CLICK_1, WRONG, outcome="failed"),
            ),
        )
    ]


def rm(folder, out, machine=HERE, data="rollouts.jsonl", **options):  # noqa: F811
    """Adapter and head, log and what was returned, without what a clock or the memory says."""
    options = {
        "steps": 5,
        "lr": 1e-3,
        "warmup": 2,
        "batch": 3,
        "save_every": 2,
        "held_out": 0.4,
        **options,
    }
    files = (folder / data,) if isinstance(data, str) else data
    result = train_rm(
        RMCommand(
            str(folder / "base"),
            folder / "adapter",
            data=files,
            out=out,
            rm=RM(**options),
            machine=machine,
        )
    )
    weights = load_file(out / "adapter" / FILE) | load_file(out / "adapter" / lora.WEIGHTS)
    return (
        {name: tensor.tolist() for name, tensor in weights.items()},
        *(
            {k: v for k, v in record.items() if k not in TIMES}
            for record in (*records(out), result)
        ),
    )


@pytest.fixture(scope="module")
def undisturbed(folder, tmp_path_factory):  # noqa: F811
    out = tmp_path_factory.mktemp("rm") / "run"
    return out, rm(folder, out)


def test_it_begins_at_log_2_and_learns_to_order_the_pairs_and_those_that_it_never_saw(
    folder, tmp_path, capsys
):
    _, first, *_, last, result = rm(folder, tmp_path / "run", steps=12, lr=1e-2)
    assert first["loss"] == pytest.approx(math.log(2)) and first["margin"] == 0
    assert last["loss"] < 0.3 and last["accuracy"] == 1 and last["margin"] > 1
    assert result["held_out"]["accuracy"] == 1 and result["held_out"]["instances"] == 1
    found = read_result(tmp_path / "run" / "result.json")
    assert found["held_out"] == result["held_out"]
    assert (found["best_of_n"]["attempts"], found["best_of_n"]["instances"]) == (4, 1)
    assert (found["best_of_n"]["picked"], found["best_of_n"]["random"]) == (1, 0.5)
    bins = found["reliability"]
    assert sum(part["pairs"] for part in bins) == 4 and all(part["right"] == 1 for part in bins)
    assert sum(part["pairs"] * (1 - part["confidence"]) for part in bins) / 4 == pytest.approx(
        found["held_out"]["calibration_error"], abs=1e-6
    )
    said = capsys.readouterr().out
    assert "picks the best of 4 attempts at 1 held-out instances: 100.0% solved (" in said
    assert re.search(r"^reliability: sure to [\d.]+%, right in 100.0% of [1-4]", said, re.MULTILINE)


def test_instances_that_show_one_page_are_judged_together(folder, tmp_path):  # noqa: F811
    """Four instances show two prompts; a fifth of the four would be one."""
    group = [(RIGHT, "solved"), (WRONG, "failed")]
    played = [
        tiny.episode(
            (said,), outcome, seed=seed, index=n, instruction=f"Click Submit, {seed // 2}."
        )
        for seed in range(4)
        for n, (said, outcome) in enumerate(group)
    ]
    *_, result = rm(
        folder,
        tmp_path / "run",
        steps=1,
        held_out=0.2,
        data=(episodes_file(tmp_path / "played.jsonl", played),),
    )
    assert result["held_out"]["instances"] == 2


def test_the_rewards_of_a_saved_model_are_those_that_it_was_judged_by(
    folder, tmp_path, monkeypatch
):
    """Of attempts that it never saw; an episode in which nothing was said has none."""
    found, over = [], rm_module.rewards_over
    monkeypatch.setattr(
        rm_module, "rewards_over", lambda *given: found.append(over(*given)) or found[-1]
    )
    rm(folder, tmp_path / "run")
    model, nothing = str(folder / "base"), tiny.episode((), "failed", seed=9)
    played = [
        e for e in read(folder / "rollouts.jsonl") if not e.forced and "expert" not in e.policy
    ]
    unseen = held_out_instances({e.instance: e.first_prompt for e in played}, 0.4, seed=1)
    attempts = [e for e in played if e.instance in unseen]
    *rewards, last = episode_rewards(
        model, HERE, tmp_path / "run" / "adapter", [*attempts, nothing]
    )
    assert (
        rewards == pytest.approx(found[1].tolist(), abs=1e-6)
        and len({*rewards}) > 1
        and last == -math.inf
    )
    assert episode_rewards(model, HERE, tmp_path / "run" / "adapter", [nothing]) == [-math.inf]
    other = shutil.copytree(folder / "adapter", tmp_path / "other")
    with pytest.raises(
        ValueError, match="other: no reward model's head here; train.py rm makes one, in OUT"
    ):
        episode_rewards(model, HERE, other, attempts)
    ScalarHead(tiny.adapted()).save(other, "value")
    with pytest.raises(ValueError, match="other: no reward model's head here"):
        episode_rewards(model, HERE, other, attempts)


@pytest.mark.parametrize(
    "machine",
    [
        Machine(device="cpu", dtype="float32", micro_tokens=1, tree_tokens=64),
        Machine(device="cpu", dtype="float32", tree_tokens=64, depth_first=True),
        Machine(device="cpu", dtype="float32", micro_tokens=8192),
    ],
)
def test_a_reward_is_read_off_the_state_of_the_agents_last_token_whatever_fits_in_memory(machine):
    model = tiny.adapted(torch.float64)
    head = ScalarHead(model)
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(4))
    found, gradient = {}, None
    data = tokenise(pairs(), tiny.chat(), 1024, "end")
    for batch in pair_batches(
        read_at_ends(data),
        range(len(data.pairs)),
        torch.zeros(8),
        SETTINGS,
        machine,
        torch.device("cpu"),
    ):
        rewards = read_states(
            model, batch.trees, lambda hidden, _: head(hidden), machine.walk_above
        )[batch.trees.column]
        rewards.sum().backward()
        found |= dict(zip(batch.names, rewards.tolist(), strict=True))
    gradient, head.weight.grad = head.weight.grad.clone(), None
    total = 0.0
    for dialogue, name in zip(data.dialogues, data.names):
        last = max(t for t, turn in enumerate(dialogue.turns) if turn >= 0)
        reward = head(
            model(torch.tensor([dialogue.ids]))[0, last]
        )  # what stands behind it is not seen
        assert found.pop(name) == pytest.approx(reward.item(), abs=1e-8)
        total = total + reward
    total.backward()
    assert not found
    torch.testing.assert_close(gradient, head.weight.grad, rtol=1e-7, atol=1e-8)


def test_swapped_pairs_turn_the_gradient_and_the_accuracy_round_and_a_constant_does_nothing():
    data = tokenise(pairs(), tiny.chat(), 1024, "end")
    swapped = data._replace(pairs=[(rejected, chosen) for chosen, rejected in data.pairs])
    rewards = torch.randn(len(data.dialogues), generator=torch.Generator().manual_seed(1)).double()
    rewards[data.pairs[0][0]] = rewards[data.pairs[0][1]]  # a tie
    found, other, shifted = (
        OrderedPairs(part).judge(reward)["held_out"]
        for part, reward in ((data, rewards), (swapped, rewards), (data, rewards + 7))
    )
    assert found["accuracy"] == pytest.approx(1 - other["accuracy"])
    assert shifted["calibration_error"] == pytest.approx(found["calibration_error"])
    zeros = torch.zeros(len(rewards))
    for shift in (0.0, 7.0):
        both = torch.zeros(2, len(rewards), dtype=torch.float64)
        for part, gradient in zip((data, swapped), both):
            policy = (rewards * 0 + shift).requires_grad_()
            for batch in pair_batches(part, range(4), zeros, SETTINGS, HERE, torch.device("cpu")):
                rows = torch.tensor([data.names.index(name) for name in batch.names])
                four = policy[rows][batch.chosen], policy[rows][batch.rejected], None, None
                loss = LOSS.of_scores(LossParameters(), None)(*four)
                loss.sum().backward()
            gradient += policy.grad
        torch.testing.assert_close(both[0], -both[1])
        assert both[0].abs().max() == pytest.approx(0.5)


@pytest.mark.parametrize(
    "where, at", [("log", 1), ("log", 4), ("save_state", 2), ("finish", 1), ("save", 1)]
)
def test_killed_anywhere_and_started_again_it_is_the_same_bit_for_bit(
    folder, undisturbed, tmp_path, monkeypatch, where, at
):
    owner = ScalarHead if where == "save" else RunFolder
    with killed(monkeypatch, owner, where, at):
        rm(folder, tmp_path / "run")
    assert rm(folder, tmp_path / "run") == undisturbed[1]


def test_a_finished_run_is_not_run_again_but_says_what_it_is_worth(
    folder, undisturbed, monkeypatch, capsys
):
    monkeypatch.setattr(
        "minidpo.memory.loading.open_model", lambda *_: pytest.fail("loaded a model")
    )
    out, expected = undisturbed
    assert rm(folder, out) == expected
    assert re.search(
        r"held out: pairs 4, instances 1, accuracy [\d.]+, calibration error [\d.]+\n$",
        capsys.readouterr().out,
    )


def test_other_failures_are_another_run(folder, tmp_path):  # noqa: F811
    kept, out = tmp_path / "earlier.jsonl", tmp_path / "run"
    command = RMCommand(
        str(folder / "base"),
        adapter=folder / "adapter",
        data=(folder / "rollouts.jsonl",),
        failures=(kept,),
        out=out,
        machine=HERE,
        rm=RM(steps=1),
    )
    earlier = [e for e in read(folder / "rollouts.jsonl") if not e.solved]
    kept.write_text("".join(replace(e, index=e.index + 100).to_json() + "\n" for e in earlier))
    train_rm(command)
    kept.write_text("".join(replace(e, index=e.index + 200).to_json() + "\n" for e in earlier))
    with pytest.raises(ValueError, match="failures of other content"):
        train_rm(command)


def test_it_learns_from_other_trainers_conversations_whose_prompts_are_the_instances(
    folder, tmp_path
):
    rows = [
        {
            "prompt": [{"role": "user", "content": f"Click Submit, {n}."}],
            "chosen": [{"role": "assistant", "content": RIGHT}],
            "rejected": [{"role": "assistant", "content": WRONG}],
        }
        for n in range(5)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    *_, result = rm(folder, tmp_path / "run", data="rows.jsonl", lr=1e-2)
    assert result["held_out"]["pairs"] == result["held_out"]["instances"] == 2
    assert result["held_out"]["accuracy"] == result["accuracy"] == 1
    assert "best_of_n" not in read_result(
        tmp_path / "run" / "result.json"
    )  # conversations have no groups
    with pytest.raises(ValueError, match="--rm.clean needs episodes, as collect.py writes them"):
        rm(folder, tmp_path / "clean", data="rows.jsonl", clean=True)


@st.composite
def tried(draw):
    """Attempts at some instances, mixed up, and rewards of which some are equal."""
    attempts = draw(
        st.lists(
            st.tuples(st.integers(0, 3), st.booleans(), st.integers(-3, 3)), min_size=1, max_size=12
        )
    )
    return (
        [
            tiny.episode("a", "solved" if solved else "failed", seed=seed, index=n)
            for n, (seed, solved, _) in enumerate(attempts)
        ],
        [float(reward) for *_, reward in attempts],
    )


@given(tried(), st.randoms())
def test_a_pick_is_the_oracles_by_the_verdict_random_without_rewards_and_blind_to_their_scale(
    case, order
):
    attempts, rewards = case
    found = best_of_n(attempts, rewards)
    assert best_of_n(attempts, [float(e.solved) for e in attempts])["picked"] == found["oracle"]
    assert best_of_n(attempts, [0.5] * len(attempts))["picked"] == pytest.approx(found["random"])
    assert best_of_n(attempts, [3 * r**3 + 7 for r in rewards]) == found
    assert (
        best_of_n(attempts, [-float(e.solved) for e in attempts])["picked"]
        <= found["random"] + 1e-9
    )
    assert (
        0 <= found["low"] <= found["picked"] <= found["oracle"] <= 1
        and found["picked"] <= found["high"]
    )
    moved = list(zip(attempts, rewards))
    order.shuffle(moved)
    assert best_of_n(*zip(*moved)) == pytest.approx(found)


def test_the_best_of_two_instances_by_hand():
    """The first picks the solved of two; the second has a tie of one solved and one not, and a failure."""
    attempts = [
        tiny.episode("a", outcome, seed=seed, index=n)
        for n, (seed, outcome) in enumerate(
            [(0, "failed"), (0, "solved"), (1, "solved"), (1, "failed"), (1, "failed")]
        )
    ]
    found = best_of_n(attempts, [0.1, 0.2, 5.0, 5.0, -1.0])
    assert (found["picked"], found["oracle"], found["instances"]) == (0.75, 1.0, 2)
    assert found["random"] == pytest.approx((1 / 2 + 1 / 3) / 2)


@pytest.mark.parametrize("seed", range(4))
def test_the_seed_and_their_prompts_say_which_instances_are_held_out(seed):
    """Instances that begin with one prompt are all held out, or none."""
    prompts = {("t", n): ("do it", f"page {n // 2}") for n in range(20)}
    shuffled = dict(random.Random(seed).sample([*prompts.items()], len(prompts)))
    held_out = held_out_instances(shuffled, 0.3, seed)
    assert len(held_out) == 6 and held_out < prompts.keys()
    assert held_out_instances(prompts, 0.3, seed) == held_out
    assert {prompts[one] for one in held_out}.isdisjoint(
        prompts[one] for one in prompts.keys() - held_out
    )
    assert len(held_out_instances(prompts, 0.001, seed)) == 2  # one prompt at least
    assert any(held_out_instances(prompts, 0.3, n) != held_out for n in range(9))


def test_what_cannot_be_learned_or_judged_is_refused(folder, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(
        "minidpo.memory.loading.open_model", lambda *_: pytest.fail("loaded a model")
    )
    episodes_file(
        folder / "lone.jsonl", [tiny.episode(), tiny.episode((WRONG,), "failed", index=1)]
    )
    with pytest.raises(
        NothingToLearn, match="all 1 instances to learn from would be held out: explore"
    ):
        rm(folder, tmp_path / "run", data="lone.jsonl")
    with pytest.raises(ValueError, match="--rm.pairs expert needs --golden FILE"):
        rm(folder, tmp_path / "run", pairs="expert")
    earlier = RMCommand(
        str(folder / "base"),
        adapter=folder / "adapter",
        data=(folder / "rollouts.jsonl",),
        failures=(folder / "lone.jsonl",),
        out=tmp_path / "run",
    )
    for source in ("value", "stepwise", "mixture", "segments", "dagger", "efficient"):
        with pytest.raises(
            ValueError, match=f"--rm.pairs {source} asks what solved, and of --failures"
        ):
            train_rm(replace(earlier, rm=RM(pairs=source)))
    with pytest.raises(
        ValueError, match="a training step would take .* but there are 102: .* saves"
    ):
        rm(folder, tmp_path / "run", Machine(device="cpu", dtype="float32", memory_gib=0.1))
    assert not (tmp_path / "run").exists()
    for options, says in (
        ({"pairs": "unpaired"}, "pairs unpaired compares no two episodes"),
        ({"until": "token"}, "until token shortens the rejected alone"),
        ({"held_out": 0.0}, "held_out must be"),
        ({"clean": True, "noisy": True}, "drop"),
        ({"margin": 0.1, "dense": True}, "margin prefers by reward"),
    ):
        with pytest.raises(ValueError, match=says):
            RM(**options)


# step values


def valued_group(seed):
    """Rollouts of an instance, and continuations. After the right first step three of four solve, after the
    wrong one one of four. From the last state of the fourth nobody went on; the expert's do not count."""

    def played(index, *said, outcome="solved", **changes):
        return tiny.episode(
            said, outcome, seed=seed, index=index, instruction=f"Click Submit, {seed}.", **changes
        )

    rollouts = [
        played(0, tiny.CLICK_1, RIGHT),
        played(1, WRONG, WRONG, outcome="failed"),
        played(2, RIGHT),
        played(3, tiny.CLICK_1, tiny.CLICK_1, WRONG, outcome="failed"),
        played(4, RIGHT, policy="expert"),
    ]
    steps = [(tiny.CLICK_1, 3), (WRONG, 1)]
    continuations = [
        played(
            10 * s + n,
            step,
            RIGHT if n < solved else WRONG,
            forced=1,
            outcome="solved" if n < solved else "failed",
        )
        for s, (step, solved) in enumerate(steps, 1)
        for n in range(4)
    ]
    return rollouts, [*continuations, played(30, WRONG, RIGHT, forced=1, policy="dagger")]


@pytest.fixture(scope="module")
def values(folder):  # noqa: F811
    groups = [valued_group(seed) for seed in range(5)]
    for n, name in enumerate(("played", "values")):
        episodes_file(
            folder / f"{name}.jsonl", [episode for group in groups for episode in group[n]]
        )
    return folder / "played.jsonl", folder / "values.jsonl"


def test_a_turns_target_is_the_value_behind_it_and_that_of_the_last_the_verdict(values, capsys):
    """Three of each instance's own four have continuations from each of their steps."""
    valued = load_valued(values)
    assert "15 of 20 episodes have continuations" in capsys.readouterr().out
    targets = ValuedTurns.of(valued, tiny.chat(), 1024).values
    assert [behind.tolist() for behind in targets] == 5 * [[0.75, 1.0], [0.25, 0.0], [1.0]]
    assert [(e.seed, e.index) for e, _ in valued] == [
        (seed, n) for seed in range(5) for n in range(3)
    ]


@pytest.mark.parametrize(
    "machine",
    [
        Machine(device="cpu", dtype="float32", micro_tokens=1, tree_tokens=64),
        Machine(device="cpu", dtype="float32", tree_tokens=64, depth_first=True),
        Machine(device="cpu", dtype="float32", micro_tokens=8192),
    ],
)
def test_a_turn_is_read_at_its_last_token_and_no_page_ever_is_whatever_fits_in_memory(
    values, machine
):
    """The loss is the mean over turns of the square by which the reward there is off."""
    model, chat = tiny.adapted(torch.float64), tiny.chat()
    head = ScalarHead(model)
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(4))
    valued = load_valued(values)
    turns, loss, found = ValuedTurns.of(valued, chat, 1024), 0.0, {}
    for batch in turns.batches(range(len(valued)), machine, torch.device("cpu")):
        rewards = read_states(
            model, batch.trees, lambda hidden, _: head(hidden), machine.walk_above
        )[batch.trees.column]
        loss = loss + turns.objective(batch, rewards)[0]
        for name, reward in zip(batch.names, rewards.tolist(), strict=True):
            found.setdefault(name, []).append(reward)
    loss.backward()
    gradient, head.weight.grad = head.weight.grad.clone(), None
    squares = []
    for episode, behind in valued:
        dialogue, expected = dialogue_of(episode, chat), []
        for n in range(len(episode.turns)):
            end = max(t for t, turn in enumerate(dialogue.turns) if turn == n)
            expected.append(
                head(model(torch.tensor([dialogue.ids[: end + 1]]))[0, -1])
            )  # nothing behind it
        assert found.pop(episode.name) == pytest.approx(
            [reward.item() for reward in expected], abs=1e-8
        )
        squares += [
            (reward - value) ** 2 for reward, value in zip(expected, behind[1:], strict=True)
        ]
    assert not found
    mean = torch.stack(squares).mean()
    assert loss.item() == pytest.approx(mean.item())
    mean.backward()
    torch.testing.assert_close(gradient, head.weight.grad, rtol=1e-7, atol=1e-8)


def test_the_head_fits_values_that_it_can_and_those_that_it_never_saw(
    folder,
    values,
    tmp_path,
    capsys,
):
    options = {"data": values, "targets": "values", "steps": 40, "lr": 1e-2, "batch": 9}
    weights, *log, result = rm(folder, tmp_path / "run", **options)
    found = result["held_out"]
    assert (found["instances"], found["turns"]) == (2, 10) and log[-1]["loss"] < 0.01 < log[0][
        "loss"
    ]
    assert found["squared_error"] < 0.02 and found["accuracy"] == 1 and found["pairs"] == 2 * 9
    variance = torch.tensor([0.75, 1, 0.25, 0, 1]).var(correction=0).item()
    assert found["squared_error_of_a_constant"] == pytest.approx(variance)
    written = read_result(tmp_path / "run" / "result.json")
    assert written["held_out"] == found and "reliability" not in written
    assert (written["best_of_n"]["attempts"], written["best_of_n"]["picked"]) == (8, 1)
    assert not (tmp_path / "run" / "pairs.jsonl").exists()
    capsys.readouterr()
    assert rm(folder, tmp_path / "run", **options) == (weights, *log, result)
    assert re.search(
        r"held out: turns 10, instances 2, squared error [\d.e-]+, squared error of a constant "
        r"0.165, pairs 18, accuracy 1\n$",
        capsys.readouterr().out,
    )


def test_epochs_of_step_values_are_passes_however_large_the_batch(folder, values, tmp_path):  # noqa: F811
    """Three of five instances are learned from, three episodes each."""
    for batch, steps in ((50, 2), (9, 2), (6, 3)):
        log = rm(
            folder, tmp_path / str(batch), data=values, targets="values", epochs=2, batch=batch
        )[1:-1]
        assert len(log) == steps


def test_a_run_on_step_values_that_was_killed_ends_in_the_same_bits(
    folder, values, tmp_path, monkeypatch
):
    expected = rm(folder, tmp_path / "whole", data=values, targets="values")
    for where, at in (("log", 4), ("save_state", 2), ("finish", 1)):
        with monkeypatch.context() as patch, killed(patch, RunFolder, where, at):
            rm(folder, tmp_path / where, data=values, targets="values")
        assert rm(folder, tmp_path / where, data=values, targets="values") == expected


def test_what_held_out_turns_say_by_hand():
    """Off by 0.25, 0.5, 0.5 and 0. One instance has three turns with the values 1, 0 and 1: two pairs, of
    which the rewards 0.75, 0.5 and 0.5 have one and tie in one. The lone turn of the other makes none."""

    def judged(rewards, *behind):
        data = Rollouts([], [], [("t", n) for n in (1, 1, 2)][: len(behind)])
        return ValuedTurns(data, list(map(torch.tensor, behind))).judge(torch.tensor(rewards))[
            "held_out"
        ]

    found = judged([0.75, 0.5, 0.5, 0.5], [1.0, 0.0], [1.0], [0.5])
    assert found["squared_error"] == pytest.approx((0.25**2 + 2 * 0.5**2) / 4)
    assert found["squared_error_of_a_constant"] == pytest.approx(
        (2 * 0.375**2 + 0.625**2 + 0.125**2) / 4
    )
    assert (found["turns"], found["instances"], found["pairs"], found["accuracy"]) == (
        4,
        2,
        2,
        0.75,
    )
    lone = judged(
        [0.2, 0.1, 0.3], [1.0], [1.0], [0.0]
    )  # no two turns of an instance differ in value
    assert lone["pairs"] == 0 and "accuracy" not in lone


def test_large_counts_are_printed_in_full(tmp_path, capsys):
    found = {"turns": 12_345, "pairs": 555_555, "accuracy": 0.123456}
    write_result(tmp_path / "result.json", {"held_out": found})
    assert print_held_out(RunFolder(tmp_path, {})) == {"held_out": found}
    assert "held out: turns 12,345, pairs 555,555, accuracy 0.1235\n" in capsys.readouterr().out


def test_values_that_teach_nothing_and_options_that_nobody_reads_are_refused(
    folder, values, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "minidpo.memory.loading.open_model", lambda *_: pytest.fail("loaded a model")
    )
    played, continued = map(read, values)
    episodes_file(
        folder / "solved.jsonl", [replace(e, outcome="solved") for e in (*played, *continued)]
    )
    episodes_file(folder / "one.jsonl", [*played[:3], *(e for e in continued if e.seed == 0)])
    episodes_file(
        folder / "experts.jsonl", [replace(e, policy="expert") for e in (*played, *continued)]
    )
    row = {
        "prompt": [{"role": "user", "content": "Click."}],
        "chosen": [{"role": "assistant", "content": RIGHT}],
        "rejected": [{"role": "assistant", "content": WRONG}],
    }
    (folder / "talk.jsonl").write_text(json.dumps(row) + "\n")
    for data, says in (
        ("played.jsonl", "no episode with continuations .*collect.py --values, too"),
        ("values.jsonl", "no episode with continuations"),
        ("experts.jsonl", "no episode with continuations"),
        ("solved.jsonl", "the value behind each turn is 1, so none was better"),
        ("one.jsonl", "all 1 instances to learn from would be held out"),
    ):
        with pytest.raises(NothingToLearn, match=says):
            rm(folder, tmp_path / "run", data=data, targets="values")
    with pytest.raises(ValueError, match="--rm.targets needs episodes, as collect.py writes them"):
        rm(folder, tmp_path / "run", data="talk.jsonl", targets="values")
    assert not (tmp_path / "run").exists()
    for unread in (
        {"pairs": "eto"},
        {"margin": 0.0},
        {"until": "end"},
        {"pairs_per_instance": 9},
        {"pairs_per_task": 1},
        {"clean": True},
        {"noisy": True},
        {"dense": True},
    ):
        with pytest.raises(
            ValueError, match=f"targets values makes no pairs: leave out .*{[*unread][0]}"
        ):
            RM(targets="values", **unread)
    for unread in ({"golden": values[0]}, {"failures": values}):
        with pytest.raises(
            ValueError, match="rm.targets values makes no pairs: leave golden and failures"
        ):
            RMCommand(rm=RM(targets="values"), **unread)


def test_a_plan_counts_the_heads_that_a_step_has():
    """A vocabulary's logits take more than a reward; PPO has both. A scalar head's own numbers are few."""
    assert set(plan_loop(PlanCommand(learn="rm", machine=HERE))) == {"SFT", "RM", "explore"}
    plans = {
        heads: step_plan(setup_of(NANO, HERE), dpo_load(HERE, heads=heads))
        for heads in ("scalar", "vocabulary", "both")
    }
    peaks = [plan.phases["head and its logits"] for plan in plans.values()]
    assert peaks == sorted(peaks) and len(set(peaks)) == 3
    own = [plan.held.get("scalar head", 0) for plan in plans.values()]
    assert own == [4 * 4 * 256, 0, 4 * 4 * 256]  # weights, gradients and two moments of C numbers
