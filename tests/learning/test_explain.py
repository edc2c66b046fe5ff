"""What `--explain` prints of a pair is what the loss reads and gives back."""

import math
import re
from dataclasses import replace

import pytest
import torch
from small import PAIRS, PLAYED, run_dpo

from minidpo.data.batch import batch_scores, collate
from minidpo.data.pairs import Pair
from minidpo.data.prompt import episode_messages
from minidpo.learning.dpo import DPO
from minidpo.learning.explain import explain, movements, tokens_of, written_logps
from minidpo.memory import loading, lora


def shown(agent, capsys, adapter=None, reference=None, pairs=PAIRS, **options):
    """The numbers that are returned, and the text printed."""
    capsys.readouterr()
    adapter = adapter or agent.adapter
    numbers = explain(agent.context, pairs, DPO(**options), adapter=adapter, reference=reference)
    return numbers, capsys.readouterr().out


def test_where_policy_and_reference_are_one_the_loss_is_log_2_and_the_gradient_half_of_beta(
    agent, capsys
):
    numbers, _ = shown(agent, capsys, beta=0.4)
    assert numbers["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert numbers["gradient_chosen"] == pytest.approx(-0.2, abs=1e-4)
    assert numbers["gradient_rejected"] == pytest.approx(0.2, abs=1e-4)


def test_the_lines_add_up_to_the_scores(agent, capsys):
    numbers, text = shown(agent, capsys, loss="dmpo", gamma=0.5)
    line = re.compile(r"^ +\d+     1 +(\d+) +(\S+) +(\S+) +(\S+)   '", re.MULTILINE)
    sides = text.split("\nrejected\n")
    for side, part in zip(("chosen", "rejected"), sides, strict=True):
        found = [tuple(map(float, cells)) for cells in line.findall(part)]
        total, rounded = (
            sum(w * policy for _, w, _, policy in found),
            4e-3 * len(found),
        )  # W to 3 digits
        assert (
            total == pytest.approx(numbers[f"policy_{side}"], abs=rounded)
            and abs(total) > 10 * rounded
        )
        assert all(reference == policy for _, _, reference, policy in found)


def test_a_trained_adapter_against_where_it_began_shows_what_moved(agent, tmp_path, capsys):
    run_dpo(agent, tmp_path, lr=1e-2)
    trained = tmp_path / "adapter"
    before, _ = shown(agent, capsys, beta=0.5)
    after, _ = shown(agent, capsys, adapter=trained, reference=agent.adapter, beta=0.5)
    assert after["ref_chosen"] == before["policy_chosen"]
    assert after["margin"] > before["margin"] + 0.01 and after["loss"] < before["loss"]
    gap = 0.0
    for pair in movements(agent.context, agent.adapter, trained, PAIRS):
        for side, sign in (("chosen", 1), ("rejected", -1)):
            gap += sign * sum(token.after - token.before for token in pair[side] if token.turn >= 0)
    assert gap > 0.01


@pytest.mark.parametrize("loss", ["kto", "orpo"])
def test_other_losses_are_explained_by_their_own_rules(agent, capsys, loss):
    numbers, text = shown(agent, capsys, loss=loss)
    assert math.isfinite(numbers["loss"]) and numbers["gradient_chosen"] < 0
    assert ("none" in text) == (loss == "orpo")
    if loss == "orpo":  # as in training, whose first log has a margin
        assert numbers["margin"] != 0


def test_tokens_are_the_dialogue_and_their_log_probs_its_score(agent):
    model, chat = loading.open_base(agent.context.model, agent.context.machine)
    lora.load(model, agent.adapter)
    system = agent.context.world.system_prompt
    dialogues = [chat.dialogue(episode_messages(episode, system)) for episode in PLAYED[:4]]
    logps = written_logps(model.eval(), dialogues)
    for dialogue, own in zip(dialogues, logps):
        tokens = tokens_of(chat, dialogue, own, [0.0] * len(own))
        assert [token.turn for token in tokens] == dialogue.turns
        assert all((token.before is None) == (token.turn < 0) for token in tokens)
        with torch.no_grad():
            score = batch_scores(model, collate([[dialogue]]))
        assert sum(own) == pytest.approx(score.item(), abs=1e-3)


@pytest.mark.parametrize("solved", [True, False])
def test_a_chosen_side_that_failed_has_no_nll(agent, capsys, solved):
    chosen, rejected = PAIRS[0].chosen, PAIRS[0].rejected
    if not solved:
        chosen = replace(chosen, outcome="failed", reward=0.5)
    numbers, text = shown(agent, capsys, pairs=[Pair(chosen, rejected)], nll=0.5)
    nll = re.search(r", of it nll (\S+),", text)
    of_pair = numbers["loss"] - (float(nll[1]) if nll else 0)
    assert of_pair == pytest.approx(math.log(2), abs=1e-4) and bool(nll) == solved
