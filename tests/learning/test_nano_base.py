"""What the small base is made of can be learned, and the stages make a model folder."""

import json
import random
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from minidpo.acting.make_nano import make_nano
from minidpo.config import BaseCommand
from minidpo.data.prompt import SYSTEM
from minidpo.learning import nano_base
from minidpo.learning.nano_base import (
    SPECIAL,
    learn_to_copy,
    line_batch,
    make_base,
    optimizers,
    span_batch,
    train_tokenizer,
)
from minidpo.memory.machine import Machine
from minidpo.model import checkpoint
from minidpo.model.chat import Chat, Dialogue
from minidpo.model.decoder import ModelConfig, Transformer
from minidpo.system.run_folder import RunFolder, records

TEXTS = [
    SYSTEM,
    'Click on the link "sit".',
    'link "sit" [12]\ncheckbox "h1qgWO" checked [3]',
    "é ß 漢",
]


def model(vocab=40):
    torch.manual_seed(3)
    return Transformer(ModelConfig(vocab, 32, 48, 2, 4, 2, tie_word_embeddings=True))


@given(
    st.sampled_from([span_batch, line_batch]),
    st.integers(1, 3),
    st.integers(40, 80),
    st.integers(0, 99),
)
def test_what_a_copying_row_calls_known_follows_from_what_stands_before_it(
    make, rows, alphabet, seed
):
    """In the part to copy from one place reads like the token before, or among lines, where the bar is always
    the same, like the line so far; and the known token stands behind it."""
    tokens, is_known = make(torch.Generator().manual_seed(seed), rows, alphabet)
    assert tokens.shape == is_known.shape
    assert is_known.any(1).all() and tokens.min() >= 0 and tokens.max() < alphabet
    first = 24 if make is span_batch else 50  # tokens to copy from
    for row, known in zip(tokens.tolist(), is_known.tolist()):
        assert not any(known[:first])
        for t in (t for t, k in enumerate(known) if k):
            n = 1 if make is span_batch else t % 5
            assert [row[s] for s in range(n, first) if row[s - n : s] == row[t - n : t]] == [row[t]]


def test_the_same_generator_gives_the_same_rows():
    for make in (span_batch, line_batch):
        one, two, other = (
            make(torch.Generator().manual_seed(seed), 2, 50)[0] for seed in (1, 1, 2)
        )
        assert torch.equal(one, two) and not torch.equal(one, other)


def copying(out, steps, rows, lr):
    return BaseCommand(out=out, copy_steps=steps, copy_rows=rows, muon_lr=lr, adamw_lr=lr)


def test_the_alphabet_doubles_until_it_is_the_vocabulary_and_then_it_is_enough(tmp_path):
    enough = copying(tmp_path / "enough", 3, 2, 1e-3)
    steps = learn_to_copy(model(100), span_batch, enough, alphabet=100, share=1.0, target=-1.0)
    log = records(enough.out / "copy-span_batch")
    assert steps == 1 == len(log) and log[0]["alphabet"] == 100
    with pytest.raises(
        ValueError, match=r"not learned in 2 steps \(alphabet 50.*give it more steps"
    ):
        learn_to_copy(
            model(100), span_batch, copying(tmp_path / "few", 2, 2, 1e-3), alphabet=50, share=1.0
        )


def test_copying_gets_better_with_training_and_a_stage_that_begins_again_logs_its_steps_once(
    tmp_path,
):
    config = copying(tmp_path, 60, 16, 1e-2)
    assert learn_to_copy(model(), span_batch, config, alphabet=40, share=1.0, target=-1.0) == 1
    with pytest.raises(ValueError):
        learn_to_copy(model(), span_batch, config, alphabet=40, share=1.0, target=1.0)
    log = records(tmp_path / "copy-span_batch")
    assert [record["step"] for record in log] == list(range(1, 61))
    assert sum(record["loss"] for record in log[-5:]) < 0.9 * sum(
        record["loss"] for record in log[:5]
    )


def test_every_weight_belongs_to_one_optimizer_and_only_matrices_to_muon():
    base = model()
    muon, adamw = (
        {id(p) for group in o.param_groups for p in group["params"]}
        for o in optimizers(base, 1e-3, 1e-3)
    )
    assert not muon & adamw and muon | adamw == {id(p) for p in base.parameters()}
    assert all(p.ndim == 2 for p in base.parameters() if id(p) in muon)
    assert id(base.head_weight) in adamw


def test_the_tokenizer_gives_every_text_back_and_has_qwens_special_tokens_last():
    tokenizer = train_tokenizer(TEXTS * 3, 300)
    size = tokenizer.get_vocab_size()
    assert [tokenizer.token_to_id(name) for name in SPECIAL] == [size - 3, size - 2, size - 1]
    rng = random.Random(1)
    for text in [*TEXTS, "".join(chr(rng.randrange(1, 0x2000)) for _ in range(200))]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_name_has_the_same_tokens_in_the_task_and_on_the_page():
    tokenizer = train_tokenizer(TEXTS * 3, 400)
    task, page = (tokenizer.encode(text).tokens for text in ('the link "sit".', 'link "sit" [12]'))
    at = task.index("sit")
    assert page[page.index("sit")] == task[at] and '"Ġ[' in page


@pytest.fixture
def config(tmp_path):
    """Settings of a run whose copying is done already: a random model stands in its place."""
    config = BaseCommand(
        out=tmp_path / "run",
        vocab=400,
        width=32,
        layers=2,
        heads=4,
        mlp=48,
        steps=3,
        habit_steps=2,
        batch=2,
        warmup=1,
        machine=Machine(device="cpu"),
    )
    (tmp_path / "trained.json").write_text(train_tokenizer(TEXTS * 3, 400).to_str())
    base = Transformer(ModelConfig(400, 32, 48, 2, 4, 2, tie_word_embeddings=True))
    checkpoint.save(base, config.out / "copier", tmp_path / "trained.json")
    checkpoint.save(base, config.out / "copier-spans", tmp_path / "trained.json")
    return config


EPISODES = [tiny.episode((tiny.CLICK_1, tiny.CLICK_2), seed=seed) for seed in range(4)]


class Parrot(torch.nn.Module):
    """Says after each token the one that `after` names for it."""

    def __init__(self, after):
        super().__init__()
        self.after, self.head_weight = after, torch.zeros(9, 9)

    def forward(self, ids):
        said = torch.tensor([[self.after[i] for i in row] for row in ids.tolist()])
        return torch.nn.functional.one_hot(said, 9).float()

    def head(self, hidden):
        return hidden


def test_the_accuracy_of_a_parrot_worked_out_by_hand():
    """Of 5 6 7 | 5 6 8 the agent wrote 5 6 8. 5 is said after 7, 6 after 5, and 8 is not, after 6. Only 5 6
    stood there before, so of what can be copied all is right."""
    dialogue = Dialogue([5, 6, 7, 5, 6, 8], [-1, -1, -1, 0, 0, 0])
    parrot = Parrot({5: 6, 6: 7, 7: 5, 8: 8, **dict.fromkeys(range(5), 0)})
    found = nano_base.token_accuracy(parrot, [dialogue])
    assert found == {"accuracy_all": pytest.approx(2 / 3), "accuracy_copied": 1.0}


def test_careful_play_is_of_other_instances_than_clumsy_play(config, monkeypatch):
    played, module = [], sys.modules["minidpo.acting.make_nano"]
    for name, fake in (
        ("collect", played.append),
        ("read", lambda path: []),
        ("make_base", lambda *_: {}),
    ):
        monkeypatch.setattr(module, name, fake)
    make_nano(replace(config, out=config.out / "nano", clumsy=3, careful=5, noise=0.25))
    assert [(c.first, c.instances, c.noise, c.policy, c.split) for c in played] == [
        (0, 3, 0.25, "expert", "base"),
        (3, 5, 0.0, "expert", "base"),
    ]


def test_the_stages_leave_a_model_that_opens_and_a_finished_one_is_not_made_again(
    config, monkeypatch
):
    imitated, judged = [], []
    monkeypatch.setattr(
        nano_base,
        "imitate",
        lambda *call, real=nano_base.imitate, **options: (
            imitated.append(call[2]),
            real(*call, **options),
        ),
    )
    monkeypatch.setattr(
        nano_base,
        "dialogues_of",
        lambda episodes, *more, real=nano_base.dialogues_of: (
            judged.append(list(episodes)),
            real(episodes, *more),
        )[1],
    )
    first = make_base(config, EPISODES, EPISODES)
    assert (
        imitated == [EPISODES[1:], EPISODES] and judged[-1] == EPISODES[:1]
    )  # the first of 25 is held out
    assert all(0 <= value <= 1 for value in first.values())
    made, before = checkpoint.load(config.out / "model"), checkpoint.load(config.out / "copier")
    assert made.config.vocab_size == 400 and Chat.load(config.out / "model").end < 400
    assert not torch.equal(made.head_weight, before.head_weight)
    stamp = (config.out / "model" / "model.safetensors").stat().st_mtime_ns
    assert make_base(config, EPISODES, EPISODES) == first
    assert (config.out / "model" / "model.safetensors").stat().st_mtime_ns == stamp


def test_a_base_of_other_settings_is_not_passed_off_as_this_one(config):
    RunFolder(config.out, asdict(config)).begin()
    (config.out / "careful.jsonl").touch()
    with pytest.raises(
        ValueError, match=r"holds a run with other settings \(width 32, now 48\): give anoth"
    ):
        make_nano(replace(config, width=48))
    assert not (config.out / "clumsy.jsonl").exists()


@pytest.mark.parametrize(
    "change, says",
    [
        ({"width": 50, "heads": 7}, "not a multiple"),
        ({"tokenizer": Path("nowhere.json")}, "--tokenizer nowhere.json: no such file"),
    ],
)
def test_what_no_base_can_be_made_of_is_refused_before_anything_is_played(config, change, says):
    out = config.out / "new"
    with pytest.raises(ValueError, match=says):
        make_nano(replace(config, out=out, **change))
    assert not out.exists()


def test_a_given_tokenizer_is_used_and_one_too_large_is_refused(config, tmp_path):
    given_one = BaseCommand(**{**vars(config), "tokenizer": tmp_path / "trained.json"})
    make_base(given_one, EPISODES, EPISODES)
    read = json.loads((config.out / "model" / "tokenizer.json").read_text())
    assert read == json.loads((tmp_path / "trained.json").read_text())
    small = BaseCommand(**{**vars(given_one), "vocab": 300, "out": tmp_path / "other"})
    with pytest.raises(
        ValueError, match=r"tokenizer.json has \d+ tokens, more than the 300 of --vocab"
    ):
        make_base(small, EPISODES, EPISODES)
