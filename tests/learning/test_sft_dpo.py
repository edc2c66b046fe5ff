"""From files to an adapter, whatever fits in memory and however often it is killed."""

import importlib
import itertools
import math
import random
import re
import shutil
from contextlib import contextmanager
from dataclasses import replace

import pytest
import tiny
import torch
from minidpo.config import (
    DPO,
    GRPO,
    PPO,
    RM,
    SFT,
    DPOCommand,
    GRPOCommand,
    PPOCommand,
    RMCommand,
    SFTCommand,
)
from minidpo.learning.grpo import grpo as train_grpo
from safetensors.torch import load_file, save_file

from minidpo.data.episodes import Writer, read
from minidpo.data.pairs import NothingToLearn
from minidpo.data.prompt import episode_messages
from minidpo.learning.dpo import dpo as train_dpo
from minidpo.learning.dpo import load_pairs
from minidpo.learning.loss_table import LOSSES
from minidpo.learning.preferences import pair_loss_of
from minidpo.learning.rollouts import Rollouts
from minidpo.learning.sft import load_demonstrations
from minidpo.learning.sft import sft as train_sft
from minidpo.learning.training_run import example_indices
from minidpo.memory import loading, lora
from minidpo.memory.lora import LoRAConfig
from minidpo.memory.machine import Machine
from minidpo.system.files import read_json
from minidpo.system.run_folder import RunFolder, records

HERE = Machine(device="cpu", dtype="float32")
TIMES = ("tokens_per_s", "peak_memory_mib")
WRONG = tiny.write("link [3]", 'CLICK(ref="3")')


def episodes_file(path, played):
    with Writer(path) as writer:
        for episode in played:
            writer.add(episode)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base, an adapter of it to start DPO from, demonstrations and rollouts."""
    folder = tmp_path_factory.mktemp("stages")
    tiny.checkpoint(folder / "base")
    right, both = (tiny.CLICK_2,), (tiny.CLICK_1, tiny.CLICK_2)
    demos = [tiny.episode(both if seed % 2 else right, seed=seed) for seed in range(3)]
    episodes_file(folder / "demos.jsonl", [*demos, tiny.episode((WRONG,), "failed", seed=9)])
    group = [
        (right, "solved"),
        (both, "solved"),
        ((WRONG,), "failed"),
        ((tiny.CLICK_1, WRONG), "limit"),
    ]
    rollouts = [
        tiny.episode(said, outcome, seed=seed, index=index, instruction=f"Click on Submit, {seed}.")
        for seed in range(2)
        for index, (said, outcome) in enumerate(group)
    ]
    episodes_file(folder / "rollouts.jsonl", rollouts)
    model, _ = loading.open_base(str(folder / "base"), HERE)
    lora.attach(model, LoRAConfig(rank=4), torch.Generator().manual_seed(8))
    with torch.no_grad():  # an adapter that does something
        for layer in lora.layers(model).values():
            layer.lora_B.normal_(0, 0.02, generator=torch.Generator().manual_seed(9))
    lora.save(model, folder / "adapter", "base")
    return folder


def sft(folder, out, machine=HERE, data="demos.jsonl", dropout=0.1, rank=4, **options):
    """The adapter's weights and the log, without what a clock or the memory says."""
    options = SFT(**{"steps": 5, "lr": 1e-4, "warmup": 2, "batch": 4, "save_every": 2, **options})
    shape = LoRAConfig(rank=rank, dropout=dropout)
    train_sft(
        SFTCommand(
            str(folder / "base"),
            (folder / data,),
            out=out,
            sft=options,
            lora=shape,
            machine=machine,
        )
    )
    return finished(out)


def dpo(folder, out, machine=HERE, adapter="adapter", reference=None, **options):
    options = DPO(**{"steps": 5, "lr": 1e-4, "warmup": 2, "batch": 4, "save_every": 2, **options})
    train_dpo(
        DPOCommand(
            str(folder / "base"),
            folder / adapter,
            data=(folder / "rollouts.jsonl",),
            out=out,
            reference=reference,
            dpo=options,
            machine=machine,
        )
    )
    return finished(out)


def grpo(folder, out, machine=HERE, adapter="adapter", reference=None, **options):
    options = GRPO(**{"steps": 5, "lr": 1e-4, "warmup": 2, "batch": 5, "save_every": 2, **options})
    train_grpo(
        GRPOCommand(
            str(folder / "base"),
            folder / adapter,
            data=(folder / "rollouts.jsonl",),
            out=out,
            reference=reference,
            grpo=options,
            machine=machine,
        )
    )
    return finished(out)


def finished(out):
    assert (out / "done").is_file()
    log = [{k: v for k, v in record.items() if k not in TIMES} for record in records(out)]
    return {name: tensor.tolist() for name, tensor in adapter(out).items()}, log


def adapter(out):
    return load_file(out / "adapter" / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def undisturbed(folder, tmp_path_factory):
    """A whole run of each stage to compare others with."""
    out = tmp_path_factory.mktemp("undisturbed")
    return {
        stage: (out / stage.__name__, *stage(folder, out / stage.__name__))
        for stage in (sft, dpo, grpo)
    }


each_stage = pytest.mark.parametrize("stage", [sft, dpo, grpo], ids=["sft", "dpo", "grpo"])


def test_each_step_of_grpo_logs_what_its_rollouts_are_like(undisturbed):
    _, _, log = undisturbed[grpo]
    assert len(log) == 5 and {record["mixed"] for record in log} == {1.0}
    assert len({record["answer_information"] for record in log}) == 1


# what must not matter


@each_stage
def test_any_size_of_micro_batch_is_the_same_step(folder, tmp_path, stage):
    options = {"dropout": 0.0} if stage is sft else {}  # dropout is drawn a micro-batch at a time
    runs = []
    for micro_tokens in (8192, 900, 1):
        out = tmp_path / str(micro_tokens)
        _, log = stage(folder, out, replace(HERE, micro_tokens=micro_tokens), **options)
        runs.append((log, adapter(out)))
    for log, tensors in runs[1:]:
        for record, expected in zip(log, runs[0][0], strict=True):
            if record["step"] == 1:  # all margins are 0 up to rounding: their signs mean nothing
                record.pop("accuracy", None), expected.pop("accuracy", None)
            assert record == pytest.approx(expected, rel=1e-5, abs=1e-4)  # scores: 400 nats in fp32
            assert record["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, runs[0][1][name], rtol=0, atol=1e-6)


@each_stage
def test_recomputing_the_blocks_changes_no_bit(folder, undisturbed, tmp_path, stage):
    assert stage(folder, tmp_path / "run", replace(HERE, recompute=True)) == undisturbed[stage][1:]


class Killed(Exception):
    pass


@contextmanager
def killed(monkeypatch, owner, name, at):
    """Inside, the `at`-th call of this function ends everything."""
    real, calls = getattr(owner, name), []

    def deadly(*arguments):
        calls.append(1)
        if len(calls) == at:
            raise Killed
        return real(*arguments)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(owner, name, deadly)
        yield


@each_stage
@pytest.mark.parametrize(
    "where, at",
    [
        ("log", 1),
        ("log", 3),
        ("log", 5),
        ("save_state", 1),
        ("save_state", 3),
        ("finish", 1),
        ("lora.save", 1),
    ],
)
def test_killed_anywhere_and_started_again_adapter_and_log_are_the_same_bit_for_bit(
    folder, undisturbed, tmp_path, monkeypatch, stage, where, at
):
    owner, name = (lora, "save") if where == "lora.save" else (RunFolder, where)
    with killed(monkeypatch, owner, name, at):
        stage(folder, tmp_path / "run")
    assert stage(folder, tmp_path / "run") == undisturbed[stage][1:]
    assert not (tmp_path / "run" / "state.safetensors").exists()


def test_under_dropout_a_run_goes_on_with_its_own_micro_batches_alone(
    folder, tmp_path, monkeypatch
):
    with killed(monkeypatch, RunFolder, "log", 3):
        sft(folder, tmp_path / "run")
    with pytest.raises(
        ValueError, match="dropout was drawn for 768 tokens at a time: go on with that --m"
    ):
        sft(folder, tmp_path / "run", replace(HERE, micro_tokens=64))


@each_stage
def test_a_run_does_not_go_on_over_another_base(folder, tmp_path, monkeypatch, stage):
    for name in ("base", "demos.jsonl", "rollouts.jsonl", "adapter"):
        (shutil.copytree if (folder / name).is_dir() else shutil.copy)(
            folder / name, tmp_path / name
        )
    with killed(monkeypatch, RunFolder, "log", 4):
        stage(tmp_path, tmp_path / "run")
    (weights,) = (tmp_path / "base").glob("*.safetensors")
    save_file(
        {name: 1.1 * tensor for name, tensor in load_file(weights).items()},
        weights,
        {"format": "pt"},
    )
    with pytest.raises(ValueError, match="its base had other weights|of other weights"):
        stage(tmp_path, tmp_path / "run")


@each_stage
def test_with_muon_a_killed_run_ends_the_same_bit_for_bit_and_it_learns(
    folder, tmp_path, monkeypatch, stage
):
    def run(name):
        return stage(folder, tmp_path / name, optimizer="muon", save_every=1, lr=1e-3)

    whole = run("whole")
    with killed(monkeypatch, RunFolder, "log", 3):
        run("run")
    assert run("run") == whole
    losses = [record["loss"] for record in whole[1]]  # of policy gradients none need fall
    assert stage is grpo or losses[-1] < losses[0]


# four bits


def in_four_bits(stage, folder, out, cache=None, **options):
    """SFT with an adapter large enough for 8-bit moments, then `stage` from it; what it ended with."""
    machine = replace(HERE, quantize="nf4", recompute=True, cache=cache)
    options = {"optimizer": "adamw8bit", **options}
    if stage is sft:
        return sft(folder, out, machine, rank=128, **options)
    if not (folder / "sft-nf4" / "done").is_file():
        sft(folder, folder / "sft-nf4", machine, rank=128, steps=2)
    return stage(folder, out, machine, adapter="sft-nf4/adapter", **options)


@pytest.fixture(scope="module")
def whole_in_four_bits(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("four-bits")
    return {
        stage: in_four_bits(stage, folder, out / stage.__name__, save_every=1)
        for stage in (sft, dpo, grpo)
    }


@each_stage
@pytest.mark.parametrize("at", [1, 2, 4])
def test_with_four_bit_weights_and_8_bit_moments_a_killed_run_ends_the_same_bit_for_bit(
    folder, whole_in_four_bits, tmp_path, monkeypatch, stage, at
):
    with killed(monkeypatch, RunFolder, "log", at):
        in_four_bits(stage, folder, tmp_path / "run", save_every=1)
    cache = tmp_path / "cache"  # where it is kept, and whether, is no other setting
    run = in_four_bits(stage, folder, tmp_path / "run", cache=cache, save_every=1)
    assert run == whole_in_four_bits[stage]
    assert (cache / "index.json").is_file()


def test_the_first_dpo_loss_on_four_bit_weights_is_log_2_and_training_moves_it(folder, tmp_path):
    _, log = in_four_bits(dpo, folder, tmp_path / "run", steps=6)
    assert log[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert log[-1]["loss"] < log[0]["loss"] - 0.01


def test_an_adapter_of_four_bit_weights_is_refused_by_the_weights_in_full(folder, tmp_path):
    in_four_bits(sft, folder, tmp_path / "run")
    shutil.copytree(tmp_path / "run" / "adapter", folder / "of-nf4", dirs_exist_ok=True)
    with pytest.raises(ValueError, match="made for another base"):
        dpo(folder, tmp_path / "dpo", adapter="of-nf4")


@each_stage
def test_too_little_memory_is_said_before_the_model_is_loaded(folder, tmp_path, monkeypatch, stage):
    monkeypatch.setattr(
        "minidpo.memory.loading.open_model", lambda *_: pytest.fail("loaded a model")
    )
    with pytest.raises(
        ValueError, match="a training step would take .* but there are 102: .* saves"
    ):
        stage(folder, tmp_path / "run", replace(HERE, memory_gib=0.1))
    assert not (tmp_path / "run").exists()


@each_stage
def test_a_finished_run_is_not_run_again_but_says_where_its_adapter_is(
    folder, undisturbed, tmp_path, monkeypatch, capsys, stage
):
    """Nor in a folder that was renamed: its config.json, where a report looks for files, follows."""
    out, *expected = undisturbed[stage]
    monkeypatch.setattr(
        "minidpo.memory.loading.open_model", lambda *_: pytest.fail("loaded a model")
    )
    out = shutil.copytree(out, tmp_path / "run")
    assert list(stage(folder, out, save_every=7)) == expected
    assert read_json(out / "config.json")["out"] == str(out)
    says = rf"{out}/adapter: 5 steps, loss -?\d+\.\d+, done already \(another --out trains again\)"
    assert re.fullmatch(says, capsys.readouterr().out.strip().splitlines()[-1])
    shutil.rmtree(out / "adapter")
    with pytest.raises(
        ValueError, match="run is done, but its adapter is gone: delete .*done, and the same"
    ):
        stage(folder, out, save_every=7)


def test_rollouts_that_all_began_with_given_steps_say_which_pairs_read_them(tmp_path):
    said = (tiny.CLICK_1, tiny.CLICK_2)
    episodes_file(
        tmp_path / "a.jsonl",
        [
            tiny.episode(said, outcome, index=n, forced=1)
            for n, outcome in enumerate(("solved", "failed"))
        ],
    )
    with pytest.raises(
        NothingToLearn, match="all episodes began with given steps, which --dpo.pairs outcom"
    ):
        train_dpo(DPOCommand(data=(tmp_path / "a.jsonl",), out=tmp_path / "run"))


# what must matter


@each_stage
def test_a_folder_with_a_run_of_other_settings_is_refused(folder, undisturbed, stage):
    says = rf"holds a run with other settings \({stage.__name__}.lr .*, now 0.0002\)"
    with pytest.raises(ValueError, match=says):
        stage(folder, undisturbed[stage][0], lr=2e-4)
    with pytest.raises(ValueError, match=r"other settings \(machine.dtype float32, now bfloat16\)"):
        stage(folder, undisturbed[stage][0], replace(HERE, dtype="bfloat16"))


@pytest.mark.parametrize("start", [None, "adapter", "dpo"])
def test_another_seed_is_another_run(folder, tmp_path, start):
    """In SFT another start of LoRA and another order, from an adapter another order alone; in DPO too."""

    def trained(seed, name=""):
        base, out, options = (
            str(folder / "base"),
            tmp_path / f"{seed}{name}",
            {"steps": 1, "batch": 2, "lr": 1e-2},
        )
        if start == "dpo":
            train_dpo(
                DPOCommand(
                    base,
                    folder / "adapter",
                    data=(folder / "rollouts.jsonl",),
                    out=out,
                    seed=seed,
                    dpo=DPO(**options, warmup=0),
                    machine=HERE,
                )
            )
        else:
            train_sft(
                SFTCommand(
                    base,
                    (folder / "demos.jsonl",),
                    start and folder / start,
                    out,
                    seed=seed,
                    sft=SFT(**options, warmup=0),
                    machine=HERE,
                )
            )
        return records(out)[0]["loss"], finished(out)[0]

    assert len({str(trained(seed)) for seed in (1, 2, 3, 4)}) > 1 and trained(1) == trained(
        1, "again"
    )


def test_another_seed_is_another_start_of_lora(folder, tmp_path):
    starts = []
    for seed in (1, 2):
        train_sft(
            SFTCommand(
                str(folder / "base"),
                (folder / "demos.jsonl",),
                out=tmp_path / str(seed),
                seed=seed,
                sft=SFT(steps=0),
                lora=LoRAConfig(rank=4),
                machine=HERE,
            )
        )
        starts.append(adapter(tmp_path / str(seed)))
    assert all(
        torch.equal(starts[0][name], starts[1][name]) == ("lora_B" in name) for name in starts[0]
    )


@pytest.mark.parametrize(
    "module, make",
    [
        ("sft", lambda: SFTCommand(sft=SFT(steps=1, batch=2))),
        ("dpo", lambda: DPOCommand(dpo=DPO(steps=1, batch=2))),
        ("grpo", lambda: GRPOCommand(grpo=GRPO(steps=1, batch=2))),
        ("ppo", lambda: PPOCommand(ppo=PPO(steps=1, batch=2))),
        ("rm", lambda: RMCommand(rm=RM(steps=1, batch=2))),
    ],
)
def test_a_step_asks_for_examples_by_the_runs_seed_and_takes_an_instances_together(
    folder, tmp_path, monkeypatch, module, make
):
    asked, learner = [], importlib.import_module(f"minidpo.learning.{module}")
    monkeypatch.setattr(
        learner,
        "example_indices",
        lambda *call, **labels: (
            asked.append((*call, *labels.values())) or example_indices(*call, **labels)
        ),
    )
    given = {} if module == "sft" else {"adapter": folder / "adapter"}
    data = (folder / ("demos.jsonl" if module == "sft" else "rollouts.jsonl"),)
    getattr(learner, module)(
        replace(
            make(),
            model=str(folder / "base"),
            data=data,
            out=tmp_path / "run",
            seed=7,
            machine=HERE,
            **given,
        )
    )
    ((step, batch, n, seed, *labels),) = asked
    assert (step, batch, seed) == (0, 2, 7)
    if module == "sft":  # whose demonstrations share no beginning
        assert not labels
    else:  # each an instance, with several examples
        assert len(labels[0]) == n > len({*labels[0]})


def test_policy_gradients_refuse_rollouts_that_another_agent_played(folder, tmp_path):
    """Its log-probs stand in them, one for each token."""
    chat, limit = loading.open_chat(str(folder / "base"))
    played = read(folder / "rollouts.jsonl")
    dialogues = Rollouts.of(played, chat, limit).dialogues
    said = [
        replace(
            e,
            turns=tuple(
                replace(turn, logps=(-60.0,) * dialogue.turns.count(t))
                for t, turn in enumerate(e.turns)
            ),
        )
        for e, dialogue in zip(played, dialogues, strict=True)
    ]
    episodes_file(tmp_path / "theirs.jsonl", said)
    with pytest.raises(ValueError, match="played by another agent than --adapter"):
        train_grpo(
            GRPOCommand(
                str(folder / "base"),
                folder / "adapter",
                data=(tmp_path / "theirs.jsonl",),
                out=tmp_path / "run",
                grpo=GRPO(steps=1),
                machine=HERE,
            )
        )


@pytest.mark.parametrize("option, repeats", [("clean", 2), ("noisy", 1)])
def test_kto_whose_failures_are_all_left_out_says_by_which_option(tmp_path, option, repeats):
    """An action that is repeated on an unchanged page is noisy, one that is not is clean."""
    failed = tiny.episode((tiny.CLICK_2,) * repeats, "failed", index=1)
    episodes_file(tmp_path / "played.jsonl", [tiny.episode(), failed])
    command = DPOCommand(data=(tmp_path / "played.jsonl",), dpo=DPO(loss="kto", pairs="unpaired"))
    assert len(load_pairs(command, "end")) == 1
    with pytest.raises(NothingToLearn, match=f"--dpo.{option} leaves out all failures: drop it"):
        load_pairs(replace(command, dpo=replace(command.dpo, **{option: True})), "end")


def test_the_seed_decides_which_pairs_and_which_demonstrations_are_left(folder):
    """One pair of the four of an instance; one demonstration of two that solved it."""

    def chosen(seed):
        pairs = load_pairs(
            DPOCommand(data=(folder / "rollouts.jsonl",), seed=seed, dpo=DPO(pairs_per_instance=1)),
            "token",
        )
        return tuple((pair.chosen.name, pair.rejected.name) for pair in pairs)

    def shown(seed):
        command = SFTCommand(data=(folder / "rollouts.jsonl",), seed=seed, sft=SFT(per_instance=1))
        return tuple(e.name for e in load_demonstrations(command)[0])

    for drawn in (chosen, shown):
        assert len({drawn(seed) for seed in range(8)}) > 1 and drawn(3) == drawn(3)


@each_stage
def test_every_option_of_the_optimizer_reaches_it(folder, tmp_path, stage):
    plain, _ = stage(folder, tmp_path / "plain", steps=2, lr=1e-2)
    for changes in ({"weight_decay": 0.5}, {"clip": 1e-12}, {"warmup": 0}):
        other, _ = stage(folder, tmp_path / str(changes), **{"steps": 2, "lr": 1e-2, **changes})
        assert other != plain, changes


@each_stage
def test_epochs_and_a_warm_up_ratio_are_so_many_steps_and_a_constant_rate_does_not_fall(
    folder, tmp_path, stage
):
    """Two passes over three demonstrations, or eight pairs, two at a time: 3 or 8 steps, a third of them
    warm-up."""
    steps = {3: 1, 8: 3}
    tensors, by_epochs = stage(folder, tmp_path / "epochs", batch=2, epochs=2, warmup_ratio=0.3)
    n = by_epochs[-1]["step"]
    assert n in steps and len(by_epochs) == n
    same, by_steps = stage(folder, tmp_path / "steps", batch=2, steps=n, warmup=steps[n])
    assert by_steps == by_epochs and tensors == same
    _, flat = stage(folder, tmp_path / "flat", batch=2, steps=n, warmup=1, constant=True)
    _, falling = stage(folder, tmp_path / "falling", batch=2, steps=n, warmup=1)
    assert len({record["lr"] for record in flat}) == 1 and flat[0] == falling[0]
    assert falling[-1]["lr"] < falling[1]["lr"] == flat[1]["lr"]


@pytest.mark.parametrize("loss", ["dpo", "orpo"])
def test_an_adapter_of_no_steps_is_the_base_and_a_preference_loss_can_start_there(
    folder, tmp_path, loss, capsys
):
    weights, log = sft(folder, tmp_path / "base", steps=0)
    assert log == [] and all(
        not any(map(any, w)) for name, w in weights.items() if "lora_B" in name
    )
    assert "base/adapter: 0 steps, nothing was changed" in capsys.readouterr().out
    shutil.copytree(tmp_path / "base" / "adapter", folder / f"untrained-{loss}")
    trained, log = dpo(folder, tmp_path / loss, adapter=f"untrained-{loss}", loss=loss, lr=1e-2)
    assert len(log) == 5 and log[-1]["loss"] < log[0]["loss"] and trained != weights
    if loss == "dpo":
        assert log[0]["loss"] == pytest.approx(math.log(2))
    assert sft(folder, tmp_path / "base", steps=0) == (weights, [])


@each_stage
def test_a_run_goes_on_with_less_memory(folder, undisturbed, stage):
    out, *expected = undisturbed[stage]
    assert list(stage(folder, out, replace(HERE, micro_tokens=64, recompute=True))) == expected


def test_a_cut_of_one_side_is_refused_where_shared_tokens_would_not_cancel(folder, tmp_path):
    with pytest.raises(ValueError, match="until token cuts one side only.*dmpo: use turn or end"):
        dpo(folder, tmp_path / "run", loss="dmpo", until="token")


@each_stage
def test_a_run_with_other_data_of_the_same_name_is_refused(folder, undisturbed, tmp_path, stage):
    changed = shutil.copytree(folder, tmp_path / "changed")
    for name in ("demos.jsonl", "rollouts.jsonl"):
        episodes_file(changed / name, [tiny.episode((tiny.CLICK_2,), seed=99)])
    out = shutil.copytree(undisturbed[stage][0], tmp_path / "run")
    with pytest.raises(ValueError, match=r"other settings \(data of other content"):
        stage(changed, out)


@each_stage
def test_a_model_that_is_not_there_leaves_no_folder_behind(folder, tmp_path, stage):
    lacking = shutil.copytree(folder, tmp_path / "lacking", ignore=lambda *_: ["base"])
    with pytest.raises(ValueError, match="base: no such folder"):
        stage(lacking, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_killed_run_that_finds_another_adapter_does_not_go_on(
    folder, undisturbed, tmp_path, monkeypatch
):
    """Same path, other weights: the reference would be another."""

    def deadly(*_):
        raise Killed

    moving = tmp_path / "adapter"
    shutil.copytree(folder / "adapter", moving)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(RunFolder, "log", deadly)
        dpo(folder, tmp_path / "run", adapter=moving)
    shutil.rmtree(moving)
    shutil.copytree(undisturbed[dpo][0] / "adapter", moving)
    with pytest.raises(ValueError, match=r"other settings \(adapter of other content\)"):
        dpo(folder, tmp_path / "run", adapter=moving)


def test_a_finished_run_of_another_adapter_is_not_taken_for_this_ones(
    folder, undisturbed, tmp_path
):
    moving = shutil.copytree(folder / "adapter", tmp_path / "adapter")
    dpo(folder, tmp_path / "run", adapter=moving, loss="simpo")
    shutil.copy(undisturbed[dpo][0] / "adapter" / lora.WEIGHTS, moving)
    with pytest.raises(ValueError, match=r"other settings \(adapter of other content\)"):
        dpo(folder, tmp_path / "run", adapter=moving, loss="simpo")


def test_an_adapter_is_not_overwritten_by_what_is_trained_from_it(folder, tmp_path):
    own = shutil.copytree(folder / "adapter", tmp_path / "run" / "adapter")
    with pytest.raises(ValueError, match="would overwrite .*adapter, which it reads"):
        dpo(folder, tmp_path / "run", adapter=own)
    with pytest.raises(ValueError, match="would overwrite .*adapter, which it reads"):
        train_sft(SFTCommand(adapter=own, data=(folder / "demos.jsonl",), out=tmp_path / "run"))
    with pytest.raises(ValueError, match="would overwrite .*adapter, which it reads"):
        train_dpo(
            DPOCommand(
                str(folder / "base"),
                folder / "adapter",
                data=(folder / "rollouts.jsonl",),
                reference=own,
                out=tmp_path / "run",
            )
        )
    assert adapter(tmp_path / "run").keys() == adapter(folder).keys()


@pytest.mark.parametrize("name", ["pairs.jsonl", "metrics.jsonl"])
def test_a_file_of_data_is_not_overwritten_by_what_is_trained_on_it(folder, tmp_path, name):
    own = shutil.copy(folder / "rollouts.jsonl", tmp_path / name)
    with pytest.raises(ValueError, match=f"would overwrite .*{name}, which it reads: give another"):
        train_dpo(DPOCommand(str(folder / "base"), folder / "adapter", data=(own,), out=tmp_path))
    assert own.read_bytes() == (folder / "rollouts.jsonl").read_bytes()


def test_a_given_adapter_has_its_own_shape_and_another_is_refused(folder, tmp_path):
    command = SFTCommand(
        str(folder / "base"),
        adapter=folder / "adapter",
        data=(folder / "demos.jsonl",),
        out=tmp_path / "run",
        sft=SFT(steps=1),
        machine=HERE,
        lora=LoRAConfig(rank=64),
    )
    with pytest.raises(ValueError, match="has a shape of its own: leave out lora's options"):
        train_sft(command)
    train_sft(replace(command, lora=LoRAConfig(rank=4)))


def test_a_reference_of_another_scale_of_the_adapter_is_another_reference(folder, tmp_path):
    """lora_alpha stands in the adapter's config and in none of its weights."""
    first = tmp_path / "first"
    dpo(folder, first, steps=1)
    louder = shutil.copytree(folder / "adapter", tmp_path / "louder")
    text = (louder / lora.CONFIG).read_text().replace('"lora_alpha": 32.0', '"lora_alpha": 3.0')
    (louder / lora.CONFIG).write_text(text)
    (tmp_path / "second").mkdir()
    shutil.copy(first / "reference.safetensors", tmp_path / "second")
    with pytest.raises(ValueError, match="reference.safetensors: scores of other weights"):
        dpo(folder, tmp_path / "second", steps=1, adapter=louder)


@pytest.mark.parametrize("learn", [dpo, grpo])
def test_of_two_adapters_the_one_that_knows_its_base_says_the_dtype(
    folder, tmp_path, capsys, learn, monkeypatch
):
    """What PEFT wrote has no metadata; ours was trained beside bfloat16, and float32 is a CPU's default."""
    monkeypatch.setattr("minidpo.memory.machine.multiplies_bfloat16", lambda: True)
    theirs = shutil.copytree(folder / "adapter", tmp_path / "theirs")
    tensors, _ = lora.read_weights(theirs)
    save_file(tensors, theirs / lora.WEIGHTS)
    half, options = tmp_path / "half", {"kl": 0.1} if learn is grpo else {}
    lora.write(half, tensors, {lora.BASE_DTYPE: "bfloat16"}, read_json(theirs / lora.CONFIG))
    for n, (adapter, reference) in enumerate([(half, theirs), (theirs, half)]):
        learn(
            folder,
            tmp_path / f"{n}",
            replace(HERE, dtype="auto"),
            adapter=adapter,
            reference=reference,
            steps=1,
            **options,
        )
        assert re.search(r"blocks .* bfloat16 ", capsys.readouterr().out)


@pytest.mark.parametrize(
    "options", [{"lr": math.inf}, {"clip": math.nan}, {"nll": math.inf}, {"weight_decay": math.nan}]
)
def test_an_option_that_is_not_finite_is_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}.* must be finite"):
        DPO(**options)


# what is learned


def test_fine_tuning_learns_the_demonstrations_and_reads_the_solved_ones_only(folder, tmp_path):
    _, log = sft(folder, tmp_path / "run", steps=12, lr=2e-2, warmup=0)
    assert log[-1]["loss"] < 0.5 * log[0]["loss"]
    base, chat = loading.open_base(str(folder / "base"), HERE)
    nll = []
    for seed in range(3):  # the first loss is the base's own, a mean over the agent's tokens
        dialogue = chat.dialogue(
            episode_messages(
                tiny.episode(
                    (tiny.CLICK_1, tiny.CLICK_2) if seed % 2 else (tiny.CLICK_2,), seed=seed
                )
            )
        )
        logp = base.head(base(torch.tensor([dialogue.ids])))[0].log_softmax(-1)
        own = [t for t, turn in enumerate(dialogue.turns) if turn >= 0]
        nll.append([-logp[t - 1, dialogue.ids[t]].item() for t in own])
    picked = [nll[i] for i in example_indices(0, 3, 3, 1)]  # of a batch of 4
    assert log[0]["loss"] == pytest.approx(sum(map(sum, picked)) / sum(map(len, picked)), rel=1e-5)


def test_dpo_opens_a_margin_and_prefers_the_chosen(folder, tmp_path):
    _, log = dpo(folder, tmp_path / "run", steps=10, lr=5e-3, until="end")
    assert log[-1]["loss"] < 0.5 * log[0]["loss"] and log[-1]["accuracy"] == 1
    assert log[-1]["reward_chosen"] > log[-1]["reward_rejected"]


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_trains_and_the_first_of_the_dpo_family_is_log_2(folder, tmp_path, loss):
    _, log = dpo(folder, tmp_path / "run", steps=2, loss=loss)
    if loss in ("dpo", "dmpo", "cdpo", "robust"):
        assert log[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert log[0]["margin"] == pytest.approx(0, abs=1e-6)
        assert log[0]["mean_drop"] == pytest.approx(0, abs=1e-5)
    start = torch.cat([tensor.flatten() for tensor in adapter(folder).values()])
    end = torch.cat([tensor.flatten() for tensor in adapter(tmp_path / "run").values()])
    assert (tmp_path / "run" / "reference.safetensors").is_file() == LOSSES[loss].needs_reference
    assert all(("mean_drop" in record) == LOSSES[loss].needs_reference for record in log)
    assert len(log) == 2 and all(
        math.isfinite(value) for record in log for value in record.values()
    )
    assert log[0]["grad_norm"] > 0 and not torch.equal(start, end)


def test_the_nll_term_adds_the_mean_of_the_chosens_tokens(folder, tmp_path):
    _, plain = dpo(folder, tmp_path / "plain", steps=1, until="end")
    _, added = dpo(folder, tmp_path / "added", steps=1, nll=0.5, until="end")
    _, orpo = dpo(folder, tmp_path / "orpo", steps=1, loss="orpo", odds_weight=0.0, until="end")
    assert added[0]["loss"] - plain[0]["loss"] == pytest.approx(0.5 * orpo[0]["loss"], rel=1e-4)


def test_the_shorter_a_pair_is_compared_the_fewer_tokens_count(folder, tmp_path):
    logs = [
        dpo(folder, tmp_path / until, steps=1, until=until)[1][0]
        for until in ("end", "turn", "token")
    ]
    assert logs[0]["logp_rejected"] <= logs[1]["logp_rejected"] <= logs[2]["logp_rejected"] < 0
    assert logs[0]["logp_rejected"] < logs[2]["logp_rejected"]
    assert all(log["loss"] == pytest.approx(math.log(2), abs=1e-6) for log in logs)


# what is refused before anything is loaded


OPTIONS = {
    "beta": 0.3,
    "gamma": 0.5,
    "label_smoothing": 0.2,
    "target_margin": 0.7,
    "odds_weight": 0.4,
    "penalty_weight": 3.0,
    "desirable_weight": 1.5,
    "undesirable_weight": 2.5,
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_reference_is_refused_by_a_loss_that_reads_none(name, tmp_path):
    if LOSSES[name].needs_reference:
        assert pair_loss_of(DPO(loss=name), tmp_path).until == LOSSES[name].until
    else:
        with pytest.raises(
            ValueError, match=f"the loss {name} reads no reference: leave reference out"
        ):
            train_dpo(DPOCommand(reference=tmp_path, dpo=DPO(loss=name)))


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_takes_its_own_parameters_and_refuses_the_others(name):
    loss = LOSSES[name]
    own = set(loss.defaults.given())
    for option, value in OPTIONS.items():
        options = DPO(loss=name, **{option: value})
        if option in own:
            chosen = pair_loss_of(options)
            assert chosen.parameters.given()[option] == value
        else:
            says = (
                f"--dpo.{option.replace('_', '-')} is not a parameter of the loss {name}, which has"
            )
            with pytest.raises(ValueError, match=says):
                pair_loss_of(options)
    plain = pair_loss_of(DPO(loss=name))
    assert plain.parameters == loss.defaults


@pytest.mark.parametrize(
    "options, says",
    [
        ({"loss": "ppo"}, "no loss is called 'ppo'; there are dpo, dmpo"),
        ({"beta": -1.0}, "beta must be"),
        ({"loss": "cdpo", "label_smoothing": 0.5}, "label_smoothing must be"),
    ],
)
def test_an_unknown_loss_and_a_parameter_out_of_range_are_refused_before_the_model_is_loaded(
    folder, tmp_path, monkeypatch, options, says
):
    monkeypatch.setattr(
        "minidpo.memory.loading.open_model", lambda *_: pytest.fail("loaded a model")
    )
    with pytest.raises(ValueError, match=says):
        dpo(folder, tmp_path / "run", **options)


def test_no_training_and_epochs_of_it_is_refused():
    with pytest.raises(
        ValueError, match="steps 0 asks for no training, and epochs for some: leave one out"
    ):
        SFT(steps=0, epochs=3)


def test_data_without_a_success_and_episodes_too_long_are_refused(folder, tmp_path):
    episodes_file(folder / "failed.jsonl", [tiny.episode((WRONG,), "failed")])
    with pytest.raises(
        ValueError, match="failed.jsonl: none of 1 episodes .* reward is 0: explore more$"
    ):
        sft(folder, tmp_path / "run", data="failed.jsonl")
    episodes_file(folder / "long.jsonl", [tiny.episode((tiny.CLICK_2,) * 20)])
    with pytest.raises(
        ValueError, match=r"click-button seed 1 episode 0: \d+ tokens, .* at most 1024"
    ):
        sft(folder, tmp_path / "run", data="long.jsonl")


def test_an_epoch_draws_each_example_once_and_each_epoch_in_its_own_order():
    n, batch = 7, 3
    drawn = [i for step in range(n) for i in example_indices(step, batch, n, seed=2)]
    epochs = [drawn[e * n : (e + 1) * n] for e in range(batch)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == batch
    assert (
        example_indices(0, 20, n, seed=2)[:n] == epochs[0]
    )  # a batch larger than the data goes round
    assert example_indices(5, batch, n, seed=3) != example_indices(5, batch, n, seed=2)


@pytest.mark.parametrize("seed", range(5))
def test_drawn_by_groups_an_epoch_still_draws_each_example_once_and_a_group_as_a_whole(seed):
    labels = [random.Random(seed).randrange(5) for _ in range(13)]
    epoch = example_indices(0, 13, 13, seed, labels=labels)
    assert sorted(epoch) == list(range(13))
    runs = [label for label, _ in itertools.groupby(labels[i] for i in epoch)]
    assert len(runs) == len(set(labels))
    steps = [i for step in range(13) for i in example_indices(step, 3, 13, seed, labels=labels)]
    assert steps[:13] == epoch and sorted(steps[13:26]) == list(range(13)) and steps[13:26] != epoch
