"""Preferences from pairs to an adapter: where it begins, what it reads, how it ends."""

import json
import math
import shutil
from dataclasses import replace
from unittest import mock

import pytest
from safetensors.torch import load_file
from small import DEMOS, PAIRS, PLAYED, run_dpo, run_sft

from minidpo.data.pairs import Pair, choose, outcome_pairs, unpaired
from minidpo.learning import dpo as dpo_module
from minidpo.learning.dpo import DPO, pair_loss_of
from minidpo.learning.loss_table import LOSSES
from minidpo.memory import lora

ln2 = pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_trains_and_the_first_of_the_dpo_family_is_log_2(agent, tmp_path, loss):
    pairs = unpaired(PLAYED, 1) if loss == "kto" else PAIRS
    weights, log = run_dpo(agent, tmp_path, pairs, steps=2, loss=loss)
    if loss in ("dpo", "dmpo", "cdpo", "robust"):
        assert log[0]["loss"] == ln2 and log[0]["margin"] == pytest.approx(0, abs=1e-6)
    numbers = [value for record in log for value in record.values()]
    assert len(log) == 2 and all(map(math.isfinite, numbers)) and log[0]["grad_norm"] > 0
    reads_one = LOSSES[loss].needs_reference
    assert (tmp_path / "reference.safetensors").is_file() == reads_one
    assert all(("mean_drop" in record) == reads_one for record in log)
    start = load_file(agent.adapter / lora.WEIGHTS)
    assert weights != {name: tensor.tolist() for name, tensor in start.items()}


def test_it_opens_a_margin_and_each_pair_is_on_record(agent, tmp_path):
    pairs = choose(PAIRS, 4, 1)
    _, log = run_dpo(agent, tmp_path, pairs, steps=10, lr=5e-3)
    assert log[-1]["loss"] < 0.5 * log[0]["loss"] and log[-1]["accuracy"] == 1
    assert log[-1]["reward_chosen"] > log[-1]["reward_rejected"]
    lines = (tmp_path / "pairs.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [pair.provenance() for pair in pairs]


def test_where_nothing_is_left_to_learn_for_a_whole_pass_it_ends(agent, tmp_path):
    """Eight pairs, four a step: two steps are a pass."""
    _, log = run_dpo(agent, tmp_path, steps=60, lr=2e-2, beta=5.0)
    losses = [record["loss"] for record in log]
    assert len(losses) < 60 and max(losses[-2:]) < 1e-3 <= max(losses[-3:-1])


# ---- the reference ----


def test_dropout_is_off_and_the_policy_itself_is_the_reference_unless_one_is_named(agent, tmp_path):
    noisy = shutil.copytree(agent.adapter, tmp_path / "adapter")
    settings = json.loads((noisy / lora.CONFIG).read_text()) | {"lora_dropout": 0.5}
    (noisy / lora.CONFIG).write_text(json.dumps(settings))
    runs = [
        run_dpo(agent, tmp_path / str(n), start=noisy, reference=reference, steps=2)
        for n, reference in enumerate((None, noisy))
    ]
    assert runs[0] == runs[1] and runs[0][1][0]["loss"] == ln2


def test_policy_and_reference_exchanged_the_first_margin_changes_its_sign(agent, tmp_path):
    run_sft(agent, tmp_path / "sft", start=agent.adapter, lr=1e-2)
    both = (agent.adapter, tmp_path / "sft" / "adapter")
    margins = []
    for start, reference in (both, both[::-1]):
        out = tmp_path / start.parent.name
        _, log = run_dpo(agent, out / "dpo", start=start, reference=reference, steps=1, batch=8)
        margins.append(log[0]["margin"])
    assert margins[0] == pytest.approx(-margins[1], rel=1e-3) and abs(margins[0]) > 1e-3


def test_kept_scores_of_another_reference_are_refused(agent, tmp_path, monkeypatch):
    """lora_alpha stands in the adapter's config and in none of its weights."""
    run_dpo(agent, tmp_path / "first", steps=1)
    louder = shutil.copytree(agent.adapter, tmp_path / "louder")
    settings = json.loads((louder / lora.CONFIG).read_text()) | {"lora_alpha": 3.0}
    (louder / lora.CONFIG).write_text(json.dumps(settings))
    for n, changes in enumerate([{"start": louder}, {"pairs": PAIRS[:4]}, {"loss": "ipo_mean"}]):
        out = tmp_path / str(n)
        out.mkdir()
        shutil.copy(tmp_path / "first" / "reference.safetensors", out)
        with pytest.raises(ValueError, match="reference.safetensors"):
            run_dpo(agent, out, steps=1, **changes)


# ---- what the loss reads beside the pairs ----


def test_the_nll_term_adds_the_mean_of_the_chosens_tokens_and_imitates_no_failure(agent, tmp_path):
    """ORPO without its odds is this mean alone."""
    failed = [
        replace(e, outcome="failed", reward=0.5 * e.solved) for e in PLAYED if e.outcome != "limit"
    ]
    paid = [
        Pair(a, b)
        for a in failed
        for b in failed
        if a.instance == b.instance and a.reward > b.reward
    ]

    def loss(name, pairs=PAIRS, **options):
        return run_dpo(agent, tmp_path / name, pairs, steps=1, batch=8, **options)[1][0]["loss"]

    mean = loss("orpo", loss="orpo", odds_weight=0.0)
    assert loss("added", nll=0.5) - loss("plain") == pytest.approx(0.5 * mean, rel=1e-4)
    assert loss("failed", paid, nll=0.5) == ln2


def test_rehearsal_adds_nll_times_the_loss_of_sft(agent, tmp_path):
    rehearsed = DEMOS[:2]
    _, sft = run_sft(agent, tmp_path / "sft", rehearsed, start=agent.adapter, steps=1)
    _, plain = run_dpo(agent, tmp_path / "plain", steps=1, nll=0.5)
    _, added = run_dpo(agent, tmp_path / "added", steps=1, nll=0.5, rehearsed=rehearsed)
    assert added[0]["rehearsal"] == pytest.approx(0.5 * sft[0]["loss"], rel=1e-4)
    assert added[0]["loss"] - plain[0]["loss"] == pytest.approx(added[0]["rehearsal"], rel=1e-3)


def test_the_shorter_a_pair_is_compared_the_fewer_tokens_count(agent, tmp_path):
    found = []
    for until in ("end", "turn", "token"):
        pairs = choose(outcome_pairs(PLAYED), 4, 1, until=until)
        _, log = run_dpo(agent, tmp_path / until, pairs, steps=1, batch=8, until=until)
        assert log[0]["loss"] == ln2
        found.append(log[0]["logp_rejected"])
    assert found[0] < found[1] < found[2] < 0


def test_a_step_asks_for_examples_by_the_runs_seed_and_takes_an_instances_together(
    agent, tmp_path, monkeypatch
):
    asked = mock.Mock(wraps=dpo_module.example_indices)
    monkeypatch.setattr(dpo_module, "example_indices", asked)
    run_dpo(agent, tmp_path, steps=1, batch=2, seed=7)
    asked.assert_called_once_with(0, 2, 8, 7, labels=[pair.chosen.instance for pair in PAIRS])


# ---- options ----


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_takes_its_own_parameters_and_refuses_the_others(name):
    values = {"beta": 0.3, "gamma": 0.5, "label_smoothing": 0.2, "target_margin": 0.7}
    values |= {"odds_weight": 0.4, "penalty_weight": 3.0}
    values |= {"desirable_weight": 1.5, "undesirable_weight": 2.5}
    own = LOSSES[name].defaults.given()
    assert pair_loss_of(DPO(loss=name)).parameters == LOSSES[name].defaults
    for option, value in values.items():
        if option in own:
            found = pair_loss_of(DPO(loss=name, **{option: value}))
            assert found.parameters.given() == {**own, option: value}
        else:
            with pytest.raises(ValueError, match=option):
                DPO(loss=name, **{option: value})


@pytest.mark.parametrize(
    "options, named",
    [
        ({"beta": -1.0}, "beta"),
        ({"loss": "cdpo", "label_smoothing": 0.5}, "label_smoothing"),
        ({"loss": "dmpo", "until": "token"}, "dmpo"),
        ({"loss": "kto", "until": "token"}, "kto"),
        ({"nll": math.nan}, "nll"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        DPO(**options)
