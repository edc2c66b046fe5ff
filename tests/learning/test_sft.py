"""Imitation from episodes to an adapter, whatever fits in memory."""

import shutil
from dataclasses import replace

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from small import DEMOS, run_sft
from toy import WRONG

from minidpo.data.prompt import episode_messages
from minidpo.memory import loading, lora
from minidpo.system.run_folder import RunFolder


class Killed(Exception):
    pass


def kill_at(monkeypatch, step):
    """The log of this step is the last thing that a run does."""
    real = RunFolder.log

    def deadly(run, record):
        if record["step"] == step:
            raise Killed
        real(run, record)

    monkeypatch.setattr(RunFolder, "log", deadly)


def test_the_first_loss_is_the_bases_mean_over_all_tokens_that_the_agent_wrote(agent, tmp_path):
    """Each multiplied by its episode's weight, the mean by none: so a weight of 0 leaves the others' part."""
    base, chat = loading.open_base(agent.context.model, agent.context.machine)
    nll = []
    for episode in DEMOS:
        messages = episode_messages(episode, agent.context.world.system_prompt)
        dialogue = chat.dialogue(messages)
        logp = base.head(base(torch.tensor([dialogue.ids])))[0].log_softmax(-1)
        own = [t for t, turn in enumerate(dialogue.turns) if turn >= 0]
        nll.append([-logp[t - 1, dialogue.ids[t]].item() for t in own])
    tokens = sum(map(len, nll))
    for n, weights in enumerate([None, [2.0, 0.0, 1.0]]):
        _, log = run_sft(agent, tmp_path / str(n), weights=weights, steps=1)
        each = weights or [1.0] * 3
        expected = sum(w * sum(part) for w, part in zip(each, nll)) / tokens
        assert log[0]["loss"] == pytest.approx(expected, rel=1e-5)


def test_any_size_of_micro_batch_is_the_same_step(agent, tmp_path):
    logs = []
    for micro_tokens in (8192, 1):
        machine = replace(agent.context.machine, micro_tokens=micro_tokens, recompute=True)
        logs.append(run_sft(agent, tmp_path / str(micro_tokens), machine=machine)[1])
    for record, expected in zip(*logs, strict=True):
        assert record == pytest.approx(expected, rel=1e-4)


def test_it_learns_and_goes_on_from_an_adapter_whose_shape_it_keeps(agent, tmp_path):
    _, log = run_sft(agent, tmp_path / "one", steps=12, lr=2e-2, warmup=0)
    assert log[-1]["loss"] < 0.5 * log[0]["loss"]
    start = tmp_path / "one" / "adapter"
    _, more = run_sft(agent, tmp_path / "two", start=start, dropout=0.5, steps=2)
    assert more[0]["loss"] < log[-1]["loss"] * 1.05
    assert lora.read_config(tmp_path / "two" / "adapter") == lora.read_config(start)


def test_under_dropout_a_run_goes_on_with_its_own_micro_batches_alone(agent, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, 4)
        run_sft(agent, tmp_path / "run", dropout=0.1)
    other = replace(agent.context.machine, micro_tokens=64)
    with pytest.raises(ValueError, match="dropout"):
        run_sft(agent, tmp_path / "run", dropout=0.1, machine=other)


def test_a_run_does_not_go_on_over_another_base(agent, tmp_path, monkeypatch):
    base = shutil.copytree(agent.context.model, tmp_path / "base")
    moved = replace(agent.context, model=str(base))
    agent = type(agent)(context=moved, adapter=agent.adapter)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, 4)
        run_sft(agent, tmp_path / "run")
    (weights,) = base.glob("*.safetensors")
    changed = {name: 1.1 * tensor for name, tensor in load_file(weights).items()}
    save_file(changed, weights, {"format": "pt"})
    with pytest.raises(ValueError, match="base"):
        run_sft(agent, tmp_path / "run")


def test_a_finished_run_is_not_run_again_nor_without_its_adapter(agent, tmp_path, monkeypatch):
    done = run_sft(agent, tmp_path / "run", steps=1)
    loaded = "minidpo.memory.loading.open_model"
    monkeypatch.setattr(loaded, lambda *_: pytest.fail("loaded a model"))
    assert run_sft(agent, tmp_path / "run", steps=1) == done
    weights = tmp_path / "run" / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        run_sft(agent, tmp_path / "run", steps=1)
    weights.unlink()
    with pytest.raises(ValueError, match="adapter is gone"):
        run_sft(agent, tmp_path / "run", steps=1)
    shutil.rmtree(tmp_path / "run" / "adapter")
    with pytest.raises(ValueError, match="adapter is gone"):
        run_sft(agent, tmp_path / "run", steps=1)


def test_what_cannot_be_trained_is_said_before_the_model_is_loaded(agent, tmp_path, monkeypatch):
    loaded = "minidpo.memory.loading.open_model"
    monkeypatch.setattr(loaded, lambda *_: pytest.fail("loaded a model"))
    with pytest.raises(ValueError, match="would take"):
        machine = replace(agent.context.machine, memory_gib=0.1)
        run_sft(agent, tmp_path / "run", machine=machine)
    with pytest.raises(ValueError, match="click-button seed 1 episode 0"):
        run_sft(agent, tmp_path / "run", [tiny.episode((WRONG,) * 20)])
    assert not (tmp_path / "run").exists()


def test_every_option_of_the_optimizer_reaches_it(agent, tmp_path):
    found = []
    options = [{}, {"weight_decay": 0.5}, {"clip": 1e-12}, {"warmup": 2}, {"constant": True}]
    for n, changes in enumerate(options):
        changes = {"steps": 3, "lr": 1e-2, "warmup": 0, **changes}
        found.append(run_sft(agent, tmp_path / str(n), **changes)[0])
    assert all(a != b for n, a in enumerate(found) for b in found[:n])
