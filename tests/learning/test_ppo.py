"""PPO from episodes to a step's gradient: values, the passes over the rollouts, whole runs."""

from dataclasses import replace

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_grpo import CPU, HERE, MACHINES, RIGHT, WRONG, group, rollouts, trees_of

from minidpo.learning.policy_gradient import (
    PolicyGradient,
    RolloutBatch,
    grpo_advantages,
    policy_gradient,
)
from minidpo.learning.ppo import (
    PPO,
    ValuedBatch,
    adapted_weight,
    after_last_turn,
    entry_scores,
    make_targets,
    ppo,
    ppo_objective,
    valued_batches,
)
from minidpo.learning.rollouts import entry_logps
from minidpo.memory import lora
from minidpo.model.scalar_head import FILE, ScalarHead
from minidpo.system.run_folder import RunFolder, records

EPISODES = [*group(1), *group(2)]
VERDICTS = after_last_turn([float(e.solved) for e in EPISODES], EPISODES)
CLOCK = ("tokens_per_s", "peak_memory_mib")


def train(learner, agent, out, *, machine=HERE, start=None, reference=None, **options):
    """The weights that a learner leaves and its log, without what a clock or the memory says."""
    options = {"steps": 5, "lr": 1e-3, "warmup": 2, "batch": 3, "save_every": 2, **options}
    context = replace(agent.context, machine=machine)
    learn, kind, given = {
        "ppo": (ppo, PPO, {"rewards": VERDICTS}),
        "grpo": (policy_gradient, PolicyGradient, {"advantages": grpo_advantages(EPISODES)}),
    }[learner]
    folder = learn(
        RunFolder(out, {}),
        context,
        EPISODES,
        kind(**options),
        start=start or agent.adapter,
        reference=reference,
        **given,
    )
    weights = {}
    for path in folder.glob("*.safetensors"):
        weights |= {name: tensor.tolist() for name, tensor in load_file(path).items()}
    log = [{k: v for k, v in record.items() if k not in CLOCK} for record in records(out)]
    return weights, log


@pytest.fixture(scope="module")
def undisturbed(agent, tmp_path_factory):
    out = tmp_path_factory.mktemp("ppo") / "run"
    return out, *train("ppo", agent, out)


def first_step(options, machine, weight=0.0, whiten=True):
    """Model, data, loss, gradients and numbers of a step on all episodes, fresh as they are."""
    model = tiny.adapted(torch.float64)
    head = ScalarHead(model)
    with torch.no_grad():
        head.weight.fill_(weight)
    data = rollouts(EPISODES)
    columns = [
        entry_scores(model, head, HERE, trees_of(data, d)).detach().chunk(2)
        for d in range(len(EPISODES))
    ]
    old, values = ([column[side] for column in columns] for side in (0, 1))
    targets = make_targets(data, values, VERDICTS, options, whiten=whiten)
    total, sums = 0.0, {}
    picked = [*range(8), 0, 1]  # two are met twice, at the end of an epoch: they count once
    for batch in valued_batches(data, picked, targets, (old, old), options, machine, CPU):
        scores = entry_scores(model, head, machine, batch.rollouts.trees)
        loss, numbers = ppo_objective(batch, scores)
        loss.backward()
        total += loss.item()
        sums = {name: sums.get(name, 0.0) + value.item() for name, value in numbers.items()}
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return model, data, total, {**gradients, "head": head.weight.grad}, sums


def test_the_first_step_is_reinforce_with_the_verdict_where_nothing_stands_between():
    """V = 0, λ = γ = 1, no whitening: every ratio is 1, and A is the verdict for each token."""
    options = PPO(lam=1.0, kl=0.0)
    model, data, _, found, numbers = first_step(options, HERE, whiten=False)
    assert numbers["ratio"] == pytest.approx(1, abs=1e-9) and numbers["clip_share"] == 0
    # V is off by 1 in three of seven turns
    assert numbers["value_loss"] == pytest.approx(0.5 * 3 / 7)
    model.zero_grad()
    written = sum(len(dialogue.written) for dialogue in data.dialogues)
    reinforce = 0.0
    for d, episode in enumerate(EPISODES):
        reinforce -= episode.solved * entry_logps(model, HERE, trees_of(data, d)).sum() / written
    reinforce.backward()
    for name, p in model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.grad, found[name], rtol=1e-7, atol=1e-10)
    assert found["head"].any()  # the head, which says 0, learns at once


@MACHINES
def test_a_step_is_the_same_whatever_fits_in_memory(machine):
    options = PPO(kl=0.3)
    _, _, loss, gradients, numbers = first_step(options, HERE, weight=0.05)
    _, _, other, other_gradients, other_numbers = first_step(options, machine, weight=0.05)
    assert other == pytest.approx(loss, abs=1e-9)
    assert other_numbers == pytest.approx(numbers, abs=1e-9)
    assert numbers["kl_weight"] == pytest.approx(0.3) and set(other_gradients) == set(gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(other_gradients[name], gradient, rtol=1e-6, atol=1e-10)


def test_values_and_advantages_are_of_turns_and_whitened_over_all_of_a_pass():
    """An episode solved in its second turn and one failed in its first; V as given, γ = 0.5, λ = 0."""
    solved, failed = tiny.episode((tiny.CLICK_1, RIGHT)), tiny.episode((WRONG,), "failed", index=1)
    data = rollouts([solved, failed])
    turns = [list(dialogue.written) for dialogue in data.dialogues]
    # V within a turn must not matter
    given = [torch.arange(float(len(of))) / 100 for of in turns]
    second = turns[0].index(1)
    given[0][0], given[0][second], given[1][0] = 0.2, 0.6, 0.3
    paid, options = after_last_turn([1.0, 0.0], [solved, failed]), PPO(gamma=0.5, lam=0.0)
    targets = make_targets(data, given, paid, options, whiten=False)
    expected = [torch.tensor([0.5 * 0.6 - 0.2, 1 - 0.6]), torch.tensor([-0.3])]
    for found, of, wanted in zip(targets.advantages, turns, expected, strict=True):
        torch.testing.assert_close(found, wanted[of])
    starts = [start.nonzero()[:, 0].tolist() for start in targets.starts]
    assert starts == [[0, second], [0]]
    for found, of, wanted in zip(targets.returns, turns, ([0.3, 1.0], [0.0])):
        assert found.tolist() == pytest.approx([wanted[turn] for turn in of])
    assert targets.variance == pytest.approx(torch.tensor([0.3, 1.0, 0.0]).var(correction=0).item())
    white = torch.cat(make_targets(data, given, paid, options).advantages)
    together = torch.cat(expected)
    torch.testing.assert_close(
        white[torch.cat(targets.starts) > 0], (together - together.mean()) / together.std()
    )


def test_explained_variance_is_0_for_the_mean_1_for_the_returns_and_counts_no_other_token():
    options, returns = PPO(value_weight=0.3), torch.tensor([1.0, 9.0, 0.0, 1.0])
    start, zeros = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.zeros(4)
    rollout = RolloutBatch(None, ["x"] * 4, 4, zeros, zeros, zeros)

    def numbers(values):
        values = torch.tensor(values)
        batch = ValuedBatch(rollout, start, values, returns, 2 / 9, 3, options, ["x"] * 8, None)
        return ppo_objective(batch, torch.cat([zeros, values]))

    assert numbers([2 / 3, 5.0, 2 / 3, 2 / 3])[1]["explained_variance"] == pytest.approx(
        0, abs=1e-6
    )
    _, right = numbers([1.0, 5.0, 0.0, 1.0])
    assert right["explained_variance"] == pytest.approx(1) and right["value_loss"] == 0
    loss, wrong = numbers([0.0, 5.0, 0.0, 0.0])
    assert wrong["value_loss"] == pytest.approx(2 * 0.5 / 3)
    assert loss == pytest.approx(0.3 * 2 * 0.5 / 3)


def test_the_kls_weight_follows_the_log_towards_its_target():
    log = [{"kl_to_reference": kl} for kl in (0.0, 0.04, 0.0202)]
    assert adapted_weight(PPO(), log) == pytest.approx(0.05 * 0.98 * 1.02 * 1.001)
    assert adapted_weight(PPO(kl_target=None), log) == adapted_weight(PPO(), []) == 0.05


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
    advantage = reward - (old.exp() * reward).sum()
    zero = torch.zeros(1, dtype=torch.float64)
    for arm, share in enumerate(old.exp()):
        one = slice(arm, arm + 1)
        rollout = RolloutBatch(None, [""], 1, advantage[one], old[one], ref[one])
        batch = ValuedBatch(rollout, zero, zero, zero, 0.0, 1, PPO(kl=beta), ["", ""], None)
        loss, _ = ppo_objective(batch, torch.cat([logps[one], zero]))
        (share * loss).backward(retain_graph=True)
    torch.testing.assert_close(leaf.grad, torch.zeros_like(ref), rtol=0, atol=1e-9)


# whole runs

BOTH = pytest.mark.parametrize("learner", ["grpo", "ppo"])


def killed_at(monkeypatch, number):
    """The process ends when the run logs step `number`."""
    write = RunFolder.log

    def log(run, record):
        if record["step"] == number:
            raise KeyboardInterrupt
        write(run, record)

    monkeypatch.setattr(RunFolder, "log", log)


def test_killed_within_a_pass_and_started_again_it_is_the_same_bit_for_bit(
    agent, undisturbed, tmp_path
):
    """A pass ends within step 3, so step 4 begins with new values; the weight of the KL goes on, too."""
    for number in (3, 5):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            killed_at(patch, number)
            train("ppo", agent, tmp_path / "run")
    assert train("ppo", agent, tmp_path / "run") == undisturbed[1:]
    assert train("ppo", agent, tmp_path / "run") == undisturbed[1:]  # finished: at once


def test_each_pass_makes_its_values_anew(undisturbed):
    out, weights, log = undisturbed
    first, second = (load_file(out / f"values-{number}.safetensors")["scores"] for number in (0, 1))
    assert not first.any() and second.any() and any(map(any, weights["value"]))
    assert log[0]["kl_weight"] == pytest.approx(0.05)
    assert log[1]["kl_weight"] == pytest.approx(0.05 * 0.98)


@BOTH
def test_the_kl_is_to_the_reference_that_is_named_and_the_ratio_to_who_played(
    agent, tmp_path, learner
):
    base = tmp_path / "base-adapter"
    base.mkdir()
    (base / lora.CONFIG).write_bytes((agent.adapter / lora.CONFIG).read_bytes())
    weights = load_file(agent.adapter / lora.WEIGHTS)
    weights = {name: tensor * ("lora_B" not in name) for name, tensor in weights.items()}
    save_file(weights, base / lora.WEIGHTS)
    given = {"steps": 1, "batch": 8, "kl": 0.1}
    if learner == "ppo":
        given["kl_target"] = None
    _, (named,) = train(learner, agent, tmp_path / "named", reference=base, **given)
    _, (own,) = train(learner, agent, tmp_path / "own", **given)
    assert named["ratio"] == pytest.approx(1, abs=1e-5) and named["kl_to_reference"] > 1e-4
    assert own["kl_to_reference"] == pytest.approx(0, abs=1e-6)
    assert named["loss"] - own["loss"] == pytest.approx(0.1 * named["kl_to_reference"], rel=1e-3)


def test_the_next_round_begins_with_the_head_of_the_last(agent, undisturbed, tmp_path):
    start = undisturbed[0] / "adapter"
    train("ppo", agent, tmp_path / "two", start=start, steps=1)
    assert load_file(tmp_path / "two" / "values-0.safetensors")["scores"].any()
    head = (start / FILE).read_bytes()
    ScalarHead(tiny.adapted(torch.float32)).save(start, "reward")
    with pytest.raises(ValueError, match="not a value head"):
        train("ppo", agent, tmp_path / "three", start=start)
    (start / FILE).write_bytes(head)
