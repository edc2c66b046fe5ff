"""What `--explain` prints of a pair is what the loss reads and gives back."""

import json
import math
import re

import pytest
import tiny
import torch
from minidpo.config import DPO, DPOCommand
from test_sft_dpo import HERE, folder  # noqa: F401  a fixture
from test_sft_dpo import dpo as train_dpo

from minidpo.data.batch import batch_scores, collate
from minidpo.data.episodes import read
from minidpo.data.pairs import PairRules, make_pairs
from minidpo.data.prompt import episode_messages
from minidpo.learning.explain import direction, explain, movements, tokens_of, written_logps
from minidpo.memory import loading, lora
from minidpo.system import processes


def shown(folder, capsys, adapter="adapter", reference=None, **options):
    """The numbers that are returned, and the text printed."""
    capsys.readouterr()
    numbers = explain(
        DPOCommand(
            str(folder / "base"),
            folder / adapter,
            reference=reference,
            data=(folder / "rollouts.jsonl",),
            out=folder / "nothing",
            explain=True,
            dpo=DPO(**options),
            machine=HERE,
        )
    )
    return numbers, capsys.readouterr().out


def test_where_policy_and_reference_are_one_the_loss_is_log_2_and_the_gradient_half_of_beta(
    folder, capsys
):
    numbers, text = shown(folder, capsys, beta=0.4)
    assert numbers["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert numbers["gradient_chosen"] == pytest.approx(-0.2, abs=1e-4)
    assert numbers["gradient_rejected"] == pytest.approx(0.2, abs=1e-4)
    assert "raises the chosen and lowers the rejected" in text


def test_the_lines_add_up_to_the_scores(folder, capsys):
    numbers, text = shown(folder, capsys, loss="dmpo", gamma=0.5)
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


def test_every_token_is_there_or_folded_once(folder, capsys):
    _, text = shown(folder, capsys)
    for part in text.split("\nrejected\n"):
        own = [int(n) for n in re.findall(r"^ +(\d+)     1 ", part, re.MULTILINE)]
        folds = re.findall(r"^ +(\d+)     0 +(\d+) tokens", part, re.MULTILINE)
        folded = [t for start, n in folds for t in range(int(start), int(start) + int(n))]
        assert sorted(own + folded) == list(range(len(own) + len(folded)))


def test_a_trained_adapter_against_where_it_began_shows_what_moved(folder, tmp_path, capsys):
    train_dpo(folder, tmp_path / "run", lr=1e-2)
    before, _ = shown(folder, capsys, beta=0.5)
    after, _ = shown(
        folder, capsys, adapter=tmp_path / "run" / "adapter", reference=folder / "adapter", beta=0.5
    )
    assert (
        after["ref_chosen"] == before["policy_chosen"] and after["margin"] > before["margin"] + 0.01
    )
    assert after["loss"] < before["loss"]


@pytest.mark.parametrize("loss", ["kto", "simpo", "orpo", "ipo_mean"])
def test_other_losses_are_explained_by_their_own_rules(folder, capsys, loss):
    numbers, text = shown(folder, capsys, loss=loss)
    assert math.isfinite(numbers["loss"]) and numbers["gradient_chosen"] < 0
    assert ("none" in text) == (loss in ("simpo", "orpo"))
    if loss in ("simpo", "orpo"):  # as in training, whose first log has a margin
        assert numbers["margin"] != 0


def test_ktos_baseline_is_made_of_all_pairs_also_where_a_step_has_one(folder, capsys):
    assert math.isfinite(shown(folder, capsys, loss="kto", batch=1)[0]["loss"])


def test_explaining_leaves_nothing_behind(folder, capsys):
    shown(folder, capsys)
    assert not (folder / "nothing").exists()


def test_where_the_gradient_is_zero_a_score_is_left_and_neither_raised_nor_lowered():
    for gradient, said in ((-0.1, "raises"), (0.0, "leaves"), (-0.0, "leaves"), (0.1, "lowers")):
        assert direction(gradient) == said


def test_several_processes_are_refused(folder, monkeypatch):
    monkeypatch.setattr(processes, "world_size", lambda: 2)
    with pytest.raises(
        ValueError, match="a pair is not explained in 2 processes; start it without torchrun"
    ):
        explain(
            DPOCommand(str(folder / "base"), folder / "adapter", data=(folder / "rollouts.jsonl",))
        )


def test_tokens_are_the_dialogue_and_their_log_probs_its_score(folder):
    episodes = read(folder / "rollouts.jsonl")[:4]
    model, chat = loading.open_base(str(folder / "base"), HERE)
    lora.load(model, folder / "adapter")
    dialogues = [chat.dialogue(episode_messages(episode)) for episode in episodes]
    logps = written_logps(model.eval(), dialogues)
    for dialogue, own in zip(dialogues, logps):
        tokens = tokens_of(chat, dialogue, own, [0.0] * len(own))
        assert [token.turn for token in tokens] == dialogue.turns
        assert all(
            (token.before is None) == (token.turn < 0) == (token.after is None) for token in tokens
        )
        with torch.no_grad():
            score = batch_scores(model, collate([[dialogue]]))
        assert sum(own) == pytest.approx(score.item(), abs=1e-3)
        assert "".join(t.text for t in tokens if "\ufffd" not in t.text).startswith(
            "<|im_start|>system\n"
        )


def test_movements_are_the_log_probs_of_two_adapters(folder, tmp_path):
    train_dpo(folder, tmp_path / "run", lr=1e-2)
    pairs = make_pairs(read(folder / "rollouts.jsonl"), PairRules(1), seed=1)
    moved = movements(
        str(folder / "base"), HERE, folder / "adapter", tmp_path / "run" / "adapter", pairs
    )
    gap = 0.0
    for pair in moved:
        for side, sign in (("chosen", 1), ("rejected", -1)):
            gap += sign * sum(token.after - token.before for token in pair[side] if token.turn >= 0)
    assert len(moved) == len(pairs) and gap > 0.01  # training raised the chosen over the rejected


@pytest.mark.parametrize("solved", [True, False])
def test_a_row_of_somebody_elses_file_is_explained_too(folder, tmp_path, capsys, solved):
    """With NLL, which a chosen that failed has not: its loss is that of the pair alone."""
    said = (
        [{"role": "assistant", "content": tiny.CLICK_1}],
        [{"role": "assistant", "content": tiny.CLICK_2}],
    )
    row = {
        "prompt": [{"role": "user", "content": "page"}],
        "chosen": said[0],
        "rejected": said[1],
        "minidpo": {"version": 1, "solved": solved},
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    numbers = explain(
        DPOCommand(
            str(folder / "base"),
            folder / "adapter",
            data=(tmp_path / "rows.jsonl",),
            dpo=DPO(nll=0.5),
            machine=HERE,
        )
    )
    text = capsys.readouterr().out
    nll = re.search(r", of it nll (\S+), which raises the chosen\. ", text)
    assert numbers["loss"] - (float(nll[1]) if nll else 0) == pytest.approx(math.log(2), abs=1e-4)
    assert bool(nll) == ("(nll)" in text) == solved and "1 pairs, dataset: " in text
