"""TRL's DPO on a tiny model, step for step: our objective from the same start draws the same curve."""

import json

import pytest
import tiny  # noqa: F401  one thread
import torch
from safetensors.torch import load_file

from minidpo.data.batch import batch_scores, collate
from minidpo.memory import lora
from minidpo.model import checkpoint
from minidpo.model.chat import Dialogue
from minidpo.objective.losses import dpo_loss, preference_metrics

PAIRS_A_STEP, BETA = 4, 0.1


@pytest.fixture(scope="module")
def folder(oracles):
    return oracles / "trl_dpo_run"


@pytest.fixture(scope="module")
def rows(folder):
    """Chosen and rejected of each pair in turn; the agent wrote the completion, its end token with it."""
    return [
        Dialogue(
            pair["prompt_ids"] + pair[side], [-1] * len(pair["prompt_ids"]) + [0] * len(pair[side])
        )
        for pair in json.loads((folder / "pairs.json").read_text())
        for side in ("chosen_ids", "rejected_ids")
    ]


@pytest.fixture
def model(folder):
    model = checkpoint.load(folder / "base", torch.float32)
    lora.load(model, folder / "adapter_init")
    return model


def score(model, rows):
    """(chosen (P,), rejected (P,)) of P pairs, each a tree of two branches."""
    both = batch_scores(model, collate(zip(rows[0::2], rows[1::2])))
    return both[0::2], both[1::2]


def test_reference_log_probs_are_trls(folder, rows, model):
    expected = json.loads((folder / "ref_logps.json").read_text())
    with torch.no_grad():
        chosen, rejected = score(model, rows)
    assert chosen.tolist() == pytest.approx(
        [pair["ref_chosen_logps"] for pair in expected], rel=1e-6
    )
    assert rejected.tolist() == pytest.approx(
        [pair["ref_rejected_logps"] for pair in expected], rel=1e-6
    )


def test_loss_rewards_gradient_norm_and_the_final_adapter_are_trls(folder, rows, model):
    with torch.no_grad():
        reference = torch.stack(score(model, rows), dim=1)  # (P,2)
    optimizer = torch.optim.AdamW(lora.parameters(model), lr=2e-3, weight_decay=0.0)
    log = json.loads((folder / "log.json").read_text())
    assert len(log) == 20
    for step, expected in enumerate(log):
        picked = [(PAIRS_A_STEP * step + i) % len(reference) for i in range(PAIRS_A_STEP)]
        policy = score(model, [rows[2 * p + side] for p in picked for side in (0, 1)])
        four = (*policy, *reference[picked].unbind(1))
        loss = dpo_loss(*four, BETA).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(lora.parameters(model), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        metrics = {
            name: value.mean().item() for name, value in preference_metrics(*four, BETA).items()
        }
        got = {
            "loss": loss.item(),
            "grad_norm": norm.item(),
            "rewards/chosen": metrics["reward_chosen"],
            "rewards/rejected": metrics["reward_rejected"],
            "rewards/margins": metrics["margin"],
            "rewards/accuracies": metrics["accuracy"],
            "logps/chosen": metrics["logp_chosen"],
            "logps/rejected": metrics["logp_rejected"],
        }
        assert got == pytest.approx({name: expected[name] for name in got}, rel=1e-4, abs=1e-5), (
            step
        )
    final = load_file(folder / "adapter_final" / "adapter_model.safetensors")
    for name, tensor in lora.adapter_tensors(model).items():
        torch.testing.assert_close(tensor.detach(), final[name], rtol=0, atol=2e-4)
