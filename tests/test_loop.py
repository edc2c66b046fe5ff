"""`train.py loop`: rounds on real pages, each in its folder; stopped anywhere it ends with the same files."""

import json
import shlex
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

from minidpo import loop
from minidpo.acting.collect import collect, play_to_file
from minidpo.acting.policies import Job
from minidpo.config import DPO, GRPO, SFT, LoopCommand, PushCommand, Sampling
from minidpo.data.episodes import read, read_all
from minidpo.learning.schedule import done_marker, outcome_variance, reusable_files
from minidpo.memory import lora
from minidpo.memory.lora import LoRAConfig
from minidpo.memory.machine import Machine
from minidpo.results.publish import card, to_upload
from minidpo.system.command_line import changed_flags, parse
from minidpo.system.files import read_json, write_json
from minidpo.system.run_folder import records

SMALL = LoopCommand(
    tasks="enter-text,click-option",
    demonstrations=2,
    instances=3,
    group=4,
    episodes=2,
    sampled=1,
    validation=1,
    sft=SFT(steps=2),
    dpo=DPO(steps=2, lr=1e-3),
    imitation=SFT(steps=2),
    machine=Machine(pages=6, device="cpu"),
)


def files(folder):
    """What a loop leaves behind, without times."""
    kept = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".jsonl" and "metrics" not in name and "pairs" not in name:
            kept[name] = [replace(episode, policy="") for episode in read(path)]
        elif path.suffix == ".safetensors" and "reference" not in name:
            kept[name] = path.read_bytes()
    return kept


class Stopped(Exception):
    pass


@pytest.fixture(scope="module")
def two_rounds(tmp_path_factory):
    out = tmp_path_factory.mktemp("loop") / "run"
    return out, loop.loop(
        replace(SMALL, rounds=2, out=out, reference="sft", dpo=replace(SMALL.dpo, pairs="mixture"))
    )


def test_each_round_has_a_folder_and_the_best_on_validation_is_evaluated(two_rounds):
    out, result = two_rounds
    assert {"rollouts.jsonl", "stepwise.jsonl", "golden.jsonl", "dpo", "result.json"} <= {
        path.name for path in (out / "round-1").iterdir()
    }
    assert len(result["validation"]) == 3
    best = max(range(1, 3), key=lambda k: (result["validation"][k], -k))
    assert result["kept_round"] == best and {"gain_points", "p_value"} <= result.keys()
    assert list(result["agents"]) == ["sft", "dpo"]
    first, second = (read_json(out / f"round-{k}" / "dpo" / "config.json") for k in (1, 2))
    assert first["reference"] is None and second["reference"] == str(out / "sft" / "adapter")
    assert second["adapter"] == str(out / "round-1" / "dpo" / "adapter")
    seeds = [{e.seed for e in read(out / f"round-{k}" / "rollouts.jsonl")} for k in (1, 2)]
    assert seeds == [{2_000_000, 2_000_001, 2_000_002}, {2_000_003, 2_000_004, 2_000_005}]
    pairs = [
        json.loads(line)
        for line in (out / "round-1" / "dpo" / "pairs.jsonl").read_text().splitlines()
    ]
    assert {pair["source"] for pair in pairs} <= {"outcome", "expert", "stepwise"}
    assert (out / "report.html").is_file()


def test_new_pages_are_those_that_no_file_of_the_loop_has(two_rounds):
    out, result = two_rounds
    had = {
        e.first_prompt
        for e in read_all(
            [
                out / "demos.jsonl",
                *(f for f in out.glob("round-*/*.jsonl") if "metrics" not in f.name),
            ]
        )
    }
    for agent in ("sft", "dpo"):
        new = [e for e in read(out / "evaluation" / f"{agent}.jsonl") if e.first_prompt not in had]
        found = result["agents"][agent]["new"]
        assert (found and (found["n"], found["success"])) == (
            (len(new), sum(e.solved for e in new) / len(new)) if new else None
        )


def test_the_kept_rounds_adapter_lies_where_that_of_a_training_does_and_can_be_pushed(two_rounds):
    out, result = two_rounds
    kept = out / f"round-{result['kept_round']}" / "dpo" / "adapter"
    kind, there = to_upload(out / "adapter")
    assert kind == "adapter" and [path.name for path in there] == sorted(lora.FILES)
    assert all(path.read_bytes() == (kept / path.name).read_bytes() for path in there)
    assert "# agent\n" in card(PushCommand("me/agent", out / "adapter", out / "result.json"), kind)


def test_the_result_of_a_loop_has_the_shape_of_a_benchmarks_and_its_command_gives_the_settings(
    two_rounds,
):
    out, _ = two_rounds
    written = read_json(out / "result.json")
    assert {"figures", "machine", "versions", "date", "command"} <= written.keys()
    assert written["figures"]["dpo_success"] == written["agents"]["dpo"]["all"]["success"]
    program, script, command, *flags = shlex.split(written["command"])
    assert (program, script, command) == ("python", "train.py", "loop")
    given = json.loads(json.dumps(asdict(parse(LoopCommand, flags, "loop", "")), default=str))
    assert given == {
        name: value
        for name, value in read_json(out / "config.json").items()
        if name not in ("version", "adapter_sha256")
    }


def test_the_flags_of_a_loop_are_read_back_as_its_settings():
    for config in (
        LoopCommand(),
        replace(
            SMALL,
            focus=True,
            rounds=2,
            out=Path("a b"),
            start=Path("c"),
            demonstrations=0,
            curriculum=0.5,
            dpo=DPO(loss="kto", pairs="unpaired", beta=0.5, lr=2e-5),
            lora=LoRAConfig(targets=("k", "q")),
        ),
    ):
        assert (
            parse(LoopCommand, shlex.split(shlex.join(changed_flags(config))), "loop", "") == config
        )
    assert changed_flags(LoopCommand()) == []


@pytest.mark.parametrize("file", ["demo", "ef-dpo", "study", "qwen2-7b-8gb"])
@pytest.mark.parametrize(
    "learn", ["rft", "bc", "rwr", "vwr", "evolve", "dagger", "grpo", "rloo", "gigpo", "ppo"]
)
def test_a_file_of_settings_for_dpo_serves_the_other_learners_too(file, learn):
    path = Path(loop.__file__).parents[1] / "configs" / f"{file}.toml"
    assert parse(LoopCommand, ["--config", str(path), "--learn", learn], "", "").learn == learn


def test_a_renamed_loop_that_is_told_of_fewer_rounds_keeps_another_and_plays_that_one_only(
    two_rounds, tmp_path, monkeypatch
):
    """In the copy round 2 was kept, whichever it was in truth; of its one round the first is."""
    out, result = two_rounds
    copy, folders = shutil.copytree(out, tmp_path / "renamed"), ("evaluation", "evaluation/sampled")
    old, played = {folder: read(copy / folder / "dpo.jsonl") for folder in folders}, []
    for folder in folders:
        (copy / folder / "dpo.jsonl").write_text(
            "".join(
                replace(episode, policy=f"{out}/round-2/dpo/adapter@0").to_json() + "\n"
                for episode in old[folder]
            )
        )

    def play(command, name, adapter):
        folder = str(command.out.relative_to(copy))
        assert not (command.out / "dpo.jsonl").exists() and not (command.out / "dpo.done").exists()
        played.append((folder, name, adapter))
        (command.out / "dpo.jsonl").write_text(
            "".join(episode.to_json() + "\n" for episode in old[folder])
        )

    shown = {}
    monkeypatch.setattr(loop, "play_held_out", play)
    monkeypatch.setattr(loop, "collect", lambda *_: pytest.fail("it was explored again"))
    monkeypatch.setattr(loop, "make_report", lambda *given: shown.update(given[-1]))
    fewer = loop.loop(
        replace(
            SMALL,
            rounds=1,
            out=copy,
            reference="sft",
            dpo=replace(SMALL.dpo, pairs="mixture", save_every=7),
        )
    )
    kept = copy / "round-1" / "dpo" / "adapter"
    assert played == [(folder, "dpo", kept) for folder in folders]
    assert (fewer["kept_round"], fewer["validation"]) == (1, [])
    assert fewer["agents"]["sft"] | {"new": 0} == result["agents"]["sft"] | {
        "new": 0
    }  # it explored less
    assert read_json(copy / "config.json")["rounds"] == 1
    assert all(
        (copy / "adapter" / name).read_bytes() == (kept / name).read_bytes() for name in lora.FILES
    )
    assert (shown["settings"]["rounds"], list(shown["curves"])) == (
        1,
        ["rounds", "sft", "round-1/dpo"],
    )
    assert shown["pairs"]  # whose episodes are found where they lie now
    assert [line["step"] for line in records(copy)] == [1, 1]  # explored, and the result
    assert (copy / "round-2" / "dpo" / "done").is_file()


@pytest.mark.slow
def test_stopped_after_any_stage_and_told_of_one_round_and_then_of_two_it_ends_with_the_same_files(
    two_rounds, tmp_path, monkeypatch
):
    out, _ = two_rounds
    whole, timed = files(out), loop.Clock.time
    config = replace(
        SMALL,
        rounds=1,
        out=tmp_path / "run",
        reference="sft",
        dpo=replace(SMALL.dpo, pairs="mixture"),
    )
    stops = iter(range(1, 30, 3))
    while config.rounds < 3:
        left = [next(stops)]

        def time(self, *what):
            result = timed(self, *what)
            left[0] -= 1
            if not left[0]:
                raise Stopped
            return result

        monkeypatch.setattr(loop.Clock, "time", time)
        try:
            loop.loop(config)
        except Stopped:
            continue
        config = replace(config, rounds=config.rounds + 1)
    monkeypatch.setattr(loop.Clock, "time", timed)
    loop.loop(replace(config, rounds=2))
    assert files(tmp_path / "run") == whole
    logs = [
        [
            {name: value for name, value in line.items() if "seconds" not in name}
            for line in records(folder)
        ]
        for folder in (out, tmp_path / "run")
    ]
    assert logs[0] == logs[1]


def test_what_two_loops_have_in_common_is_not_made_again(two_rounds, tmp_path, monkeypatch):
    """The other's rollouts are a mixture's, so the exploration is this loop's own; SFT is the other's."""
    out, result = two_rounds
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    explored = []
    monkeypatch.setattr(
        loop,
        "collect",
        lambda command, counts: explored.append(command.out) or collect(command, counts),
    )
    monkeypatch.setattr(loop, "make_report", lambda *_: None)
    config = replace(SMALL, out=tmp_path / "run", start=out, learn="bc")
    imitated = loop.loop(config)
    assert imitated["agents"]["sft"] == result["agents"]["sft"] and "bc" in imitated["agents"]
    assert explored == [tmp_path / "run" / "round-1" / "rollouts.jsonl"]
    assert not (tmp_path / "run" / "sft").exists()
    again = replace(config, out=tmp_path / "again", start=tmp_path / "run")
    with pytest.raises(
        ValueError, match="no finished SFT of its own: .* the loop that it started from"
    ):
        loop.loop(again)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == before


def test_an_averaged_round_is_played_and_kept_as_the_mean_and_its_report_shows_what_it_trained(
    two_rounds, tmp_path, monkeypatch
):
    shown, out, run = {}, two_rounds[0], tmp_path / "run"
    monkeypatch.setattr(loop, "make_report", lambda *given: shown.update(given[-1]))
    loop.loop(replace(SMALL, start=out, out=run, average=True))
    sft, trained, kept = (
        load_file(folder / "adapter" / lora.WEIGHTS)
        for folder in (out / "sft", run / "round-1" / "dpo", run)
    )
    assert any(not torch.equal(sft[name], trained[name]) for name in sft)
    assert all(
        torch.allclose((sft[name] + trained[name]) / 2, kept[name], atol=1e-7) for name in sft
    )
    players = {e.policy.rpartition("@")[0] for e in read(run / "evaluation" / "dpo.jsonl")}
    assert players == {str(run / "round-1" / "average" / "adapter")}
    assert (
        shown["settings"]["average"] and shown["pairs"] and len(shown["curves"]["round-1/dpo"]) == 2
    )
    before = {
        path: path.stat().st_mtime_ns for path in (run / "round-1").rglob("*") if path.is_file()
    }
    loop.loop(replace(SMALL, start=out, out=run, average=True))  # nothing is made again
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_finished_loop_is_read_and_not_played_again(two_rounds, monkeypatch):
    """Not even the episodes that a browser gave up, or what was learned from them would be of other data."""
    out, result = two_rounds
    for name in ("collect", "play_held_out"):
        monkeypatch.setattr(loop, name, lambda *_: pytest.fail("it was played again"))
    reports = []
    monkeypatch.setattr(loop, "make_report", lambda path, *_: reports.append(path))
    again = loop.loop(
        replace(SMALL, rounds=2, out=out, reference="sft", dpo=replace(SMALL.dpo, pairs="mixture"))
    )
    same = ("agents", "comparison", "validation", "kept_round")
    assert all(again[name] == result[name] for name in same) and reports == [out / "report.html"]


def test_the_two_halves_of_a_mixture_are_different_samples(two_rounds):
    out, _ = two_rounds
    free, stepwise = (read(out / "round-1" / f"{name}.jsonl") for name in ("rollouts", "stepwise"))
    assert {e.index for e in free} == {0, 1} and {e.index for e in stepwise} == {2, 3}
    assert any(e.forced for e in stepwise) and not any(e.forced for e in free)


def test_a_start_with_another_first_policy_is_refused_and_says_what_differs(tmp_path):
    def settings(config):
        write_json(
            tmp_path / "start" / "config.json", json.loads(json.dumps(asdict(config), default=str))
        )

    (tmp_path / "start" / "sft").mkdir(parents=True)
    settings(SMALL)
    alike = replace(SMALL, start=tmp_path / "start")
    says = r"start began with other settings \(seed 1, now 2; sft.steps 2, now 3\): give the same"
    with pytest.raises(ValueError, match=says):
        reusable_files(replace(alike, seed=2, sft=SFT(steps=3)))
    with pytest.raises(ValueError, match="has no finished SFT"):
        reusable_files(alike)
    (tmp_path / "start" / "sft" / "done").touch()
    policy = {"sft", "examples.jsonl", "demos.jsonl", "selfplay.jsonl"}
    assert reusable_files(alike) == policy  # nothing else is complete
    played = {
        "round-1/rollouts.jsonl",
        "validation/round-0.jsonl",
        "evaluation/sft.jsonl",
        "evaluation/sampled/sft.jsonl",
    }
    for path in played:
        file = done_marker(tmp_path / "start" / path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert reusable_files(alike) == policy | played
    own = done_marker(
        tmp_path / "own" / "round-1/rollouts.jsonl"
    )  # from before the other loop had got there
    own.parent.mkdir(parents=True)
    own.touch()
    mine = replace(alike, out=tmp_path / "own")
    assert reusable_files(mine) == policy | played - {"round-1/rollouts.jsonl"}
    other_pages, other_group = (
        replace(alike, machine=Machine(pages=9, device="cpu")),
        replace(alike, group=5),
    )
    assert reusable_files(other_pages) == policy | played
    assert reusable_files(other_group) == policy | played - {"round-1/rollouts.jsonl"}
    for name, path in (
        ("episodes", "evaluation/sft.jsonl"),
        ("validation", "validation/round-0.jsonl"),
        ("sampled", "evaluation/sampled/sft.jsonl"),
    ):
        assert reusable_files(replace(alike, **{name: 9})) == policy | played - {path}
    longer = replace(alike, sampling=replace(SMALL.sampling, max_new_tokens=50))
    assert reusable_files(longer) == policy
    for other in (
        replace(SMALL, curriculum=0.5),
        replace(SMALL, dpo=replace(SMALL.dpo, pairs="stepwise")),
        replace(SMALL, focus=True),
    ):
        settings(other)
        assert reusable_files(alike) == policy | played - {"round-1/rollouts.jsonl"}
    settings(SMALL)
    mixed = replace(alike, dpo=replace(SMALL.dpo, pairs="mixture"))  # half of each group is free
    assert reusable_files(mixed) == policy | played - {"round-1/rollouts.jsonl"}
    settings(other := replace(SMALL, instances=LoopCommand.instances))
    there = replace(
        other, start=alike.start, explore="demonstrations"
    )  # other instances than a loop's own
    assert reusable_files(there) == policy | played - {"round-1/rollouts.jsonl"}
    assert reusable_files(replace(there, explore=None)) == policy | played
    settings(replace(SMALL, explore="same"))  # the first round's instances are the same
    assert reusable_files(alike) == policy | played
    write_json(
        tmp_path / "start" / "config.json",
        {  # of before these options existed
            name: value
            for name, value in read_json(tmp_path / "start" / "config.json").items()
            if name not in ("explore", "focus", "curriculum", "learn")
        },
    )
    assert reusable_files(alike) == policy | played
    assert reusable_files(SMALL) == set()
    settings(replace(SMALL, adapter=Path("given")))
    with pytest.raises(
        ValueError, match="start began from given: give --adapter in place of start"
    ):
        reusable_files(alike)


@pytest.mark.parametrize(
    "name, value",
    [
        ("model", "other/model"),
        ("tasks", "click-test"),
        ("demonstrations", 7),
        ("lora", LoRAConfig(rank=3)),
        ("demonstrations_in_total", 5),
        ("machine", Machine(device="cpu", dtype="bfloat16")),
        ("machine", Machine(device="cpu", quantize="nf4")),
    ],
)
def test_a_start_is_refused_for_anything_that_its_first_policy_hangs_on(tmp_path, name, value):
    start = tmp_path / "start"
    (start / "sft").mkdir(parents=True)
    (start / "sft" / "done").touch()
    write_json(start / "config.json", json.loads(json.dumps(asdict(SMALL), default=str)))
    assert reusable_files(replace(SMALL, start=start))
    with pytest.raises(ValueError, match=rf"began with other settings \({name}"):
        reusable_files(replace(SMALL, start=start, **{name: value}))


def test_a_start_without_demonstrations_explored_alike(tmp_path):
    start, alone = tmp_path / "start", replace(SMALL, demonstrations=0)
    (start / "sft").mkdir(parents=True)
    (start / "sft" / "done").touch()
    write_json(start / "config.json", json.loads(json.dumps(asdict(alone), default=str)))
    assert reusable_files(replace(alone, start=start))
    with pytest.raises(ValueError, match=r"began with other settings \(group "):
        reusable_files(replace(alone, start=start, group=9))


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"tasks": "click-buton"}, "unknown task"),
        ({"dpo": DPO(loss="orpo", beta=1.0)}, "--dpo.beta is not a parameter of the loss orpo"),
        ({"dpo": DPO(loss="dmpo", until="token")}, "--dpo.until token cuts one side only"),
        (
            {"dpo": DPO(loss="simpo"), "reference": "sft"},
            "the loss simpo reads no reference: leave refer",
        ),
    ],
)
def test_a_refused_loop_does_not_take_its_folder(tmp_path, changes, says):
    with pytest.raises(ValueError, match=says):
        loop.loop(replace(SMALL, out=tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


def test_how_mixed_a_task_was_is_counted_in_its_groups():
    """Half of the instances solved each time and half never: no group was mixed. One episode is no group."""
    never = [
        tiny.episode(outcome="solved" if seed else "failed", seed=seed, index=i)
        for seed in range(2)
        for i in range(4)
    ]
    mixed = [
        tiny.episode(outcome="solved" if i % 2 else "failed", task="b", index=i) for i in range(4)
    ]
    alone = [
        tiny.episode(outcome="solved" if seed else "failed", task="c", seed=seed)
        for seed in range(2)
    ]
    assert outcome_variance([*never, *mixed, *alone]) == {"click-button": 0.0, "b": 0.25}


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"learn": "rft", "reference": "sft"}, "learn rft has no reference"),
        (
            {"learn": "rft", "dpo": DPO(loss="nonsense")},
            "learn rft has no pairs: leave out dpo.loss",
        ),
        ({"learn": "bc", "dpo": DPO(pairs="expert")}, "learn bc has no pairs: leave out dpo.pairs"),
        ({"learn": "rwr", "dpo": DPO(clean=True)}, "learn rwr has no pairs: leave out dpo.clean"),
        ({"learn": "rft", "dpo": DPO(dense=True)}, "leave out dpo.dense"),
        (
            {"learn": "grpo", "dpo": DPO(pairs="expert")},
            "learn grpo has no pairs: leave out dpo.pairs",
        ),
        ({"learn": "grpo", "reference": "sft"}, "learn grpo has no reference"),
        ({"values": 2}, "learn dpo with dpo.pairs outcome reads no values: leave values out"),
        (
            {"sft": SFT(weighting="value")},
            "nobody plays on from a loop's demonstrations: leave out sft.weight",
        ),
        (
            {"learn": "vwr", "imitation": SFT(per_task=3)},
            "weighting value needs all: leave out imitation.sel",
        ),
        (
            {"learn": "bc", "grpo": GRPO(kl=0.1)},
            "learn bc is no policy gradient of groups: of grpo, leave",
        ),
        (
            {"learn": "rloo", "grpo": GRPO(advantage="gigpo")},
            "learn rloo names the advantage: leave out",
        ),
        ({"curriculum": 1.5}, "curriculum must be .* from 0 to 1"),
        ({"demonstrations": -1}, "demonstrations must be finite and at least 0"),
        ({"imitation": SFT(distinct=True)}, "learn says what is imitated"),
        ({"sft": SFT(temperature=0.1)}, "sft.temperature is of weighting advantage and select"),
        (
            {"learn": "bc", "imitation": SFT(temperature=0.1)},
            "imitation.temperature is of weighting advantage",
        ),
        ({"learn": "rft", "imitation": SFT(threshold=0.5)}, "imitation.threshold and ratio are of"),
        ({"imitation": SFT(steps=0)}, "a round of no steps learns nothing"),
        ({"sft": SFT(ratio=0.3)}, "sft.threshold and ratio are of weighting reward, and"),
        ({"demonstrations": 0, "demonstrations_in_total": 5}, "self-play has no demonstrations"),
        (
            {"explore": "same", "focus": True, "rounds": 2},
            "focus and curriculum choose new instances",
        ),
        ({"explore": "same", "curriculum": 0.5}, "focus and curriculum choose new instances"),
        (
            {"explore": "demonstrations", "instances": 3},
            "explore demonstrations plays the demonstrations' inst",
        ),
        (
            {"explore": "demonstrations", "instances": 24, "demonstrations": 0},
            "set demonstrations above 0",
        ),
        (
            {"adapter": Path("a"), "start": Path("b")},
            "adapter replaces SFT and has its own shape: leave out",
        ),
        ({"adapter": Path("a"), "lora": LoRAConfig(rank=4)}, "adapter replaces SFT"),
        (
            {"adapter": Path("a"), "learn": "rft"},
            "learn rft trains a new adapter on the base: leave adapter out",
        ),
        ({"average": True, "learn": "rft"}, "learn rft has no mean with what a round began"),
        (
            {"group": 1},
            "one episode of an instance has nothing to be compared with: set group above 1",
        ),
        (
            {"group": 1, "learn": "rwr"},
            "one episode of an instance has nothing to be compared with",
        ),
        (
            {"group": 1, "learn": "grpo"},
            "one episode of an instance has nothing to be compared with",
        ),
        (
            {"group": 1, "dpo": DPO(pairs="mixture")},
            "one episode of an instance has nothing to be compared with",
        ),
        (
            {"sampling": Sampling(temperature=0.0)},
            "alike, and outcome compares them: set sampling.temperature",
        ),
        ({"sampling": Sampling(temperatures=(0.0, 0.0))}, "are alike, and outcome compares them"),
        (
            {"sampling": Sampling(temperature=0.0), "learn": "rwr"},
            "are alike, and rwr compares them",
        ),
        ({"average": True, "learn": "ppo"}, "learn ppo has no mean"),
        ({"keep_demonstrations": True}, "keep_demonstrations is of learn bc"),
        ({"keep_demonstrations": True, "learn": "bc", "demonstrations": 0}, "that the loop made"),
        (
            {"keep_failures": True, "rounds": 2},
            "keep_failures needs pairs of earlier rounds' instances",
        ),
        (
            {"keep_failures": True, "explore": "same", "rounds": 2, "dpo": DPO(pairs="value")},
            "dpo.pairs value asks what solved, and keep_failures keeps what failed alone",
        ),
        (
            {"keep_failures": True, "explore": "same", "rounds": 2, "dpo": DPO(pairs="efficient")},
            "dpo.pairs efficient asks what solved, and keep_failures keeps what failed alone",
        ),
        (
            {"keep_failures": True, "explore": "same"},
            "set explore, rounds and learn dpo, or drop it",
        ),
        (
            {"keep_failures": True, "explore": "same", "rounds": 2, "learn": "bc"},
            "keep_failures needs pairs",
        ),
        (
            {"learn": "gigpo", "sampling": Sampling(temperatures=(0.5, 1.0))},
            "gigpo takes samples of the policy",
        ),
        (
            {"learn": "grpo", "sampling": Sampling(temperature=0.7)},
            "leave out sampling.temperature, sampling.",
        ),
        (
            {"learn": "ppo", "sampling": Sampling(top_p=0.9)},
            "sampling.temperatures and sampling.top_p",
        ),
        (
            {"learn": "dagger", "imitation": SFT(steps=2, per_task=3)},
            "learn dagger selects no episodes",
        ),
        (
            {"golden_steps": "every", "dpo": DPO(pairs="segments")},
            "says where dpo.pairs stepwise and mixture",
        ),
        (
            {"learn": "rft", "states": 1},
            "learn rft with dpo.pairs outcome asks no expert: leave states out",
        ),
        (
            {"keep_failures": True, "explore": "same", "rounds": 2, "dpo": DPO(pairs="dagger")},
            "dpo.pairs dagger asks what solved, and keep_failures keeps what failed alone",
        ),
        ({"learn": "bc", "dpo": DPO(margin=0.0)}, "learn bc has no pairs: leave out dpo.margin"),
        (
            {"demonstrations": 0, "sft": SFT(weighting="advantage")},
            "self-play imitates what the base solved",
        ),
    ],
)
def test_settings_of_a_loop_that_make_no_sense_are_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        replace(SMALL, **changes)


def test_a_stage_of_which_the_browser_gave_up_all_is_not_done(tmp_path, monkeypatch):
    monkeypatch.setattr(
        loop, "collect", lambda command, instances: {"episodes": 0, "env_errors": 6}
    )
    with pytest.raises(
        ValueError, match="demos.jsonl: not one episode could be played, because the browser"
    ):
        loop.Loop(replace(SMALL, out=tmp_path)).first_policy()
    assert not list(tmp_path.rglob("*.done"))


def test_a_first_round_without_a_pair_is_an_error_and_a_later_one_the_end(
    two_rounds, tmp_path, monkeypatch, capsys
):
    out, _ = two_rounds
    learn = loop.Loop.learn

    def nothing(self, number, *rest):
        if number == self.config.rounds:
            raise loop.NothingToLearn("no pair in 6 groups")
        return learn(self, number, *rest)

    monkeypatch.setattr(loop.Loop, "learn", nothing)
    monkeypatch.setattr(loop, "finish", lambda *given: given)
    monkeypatch.setattr(loop.Loop, "validate", lambda *_: {"enter-text": 0.5, "click-option": 0.5})
    monkeypatch.setattr(
        loop.Loop,
        "explore",
        lambda *_: loop.Explored([out / "round-1" / "rollouts.jsonl"], [], None),
    )
    with pytest.raises(loop.NothingToLearn):
        loop.loop(replace(SMALL, start=out, out=tmp_path / "one"))
    _, _, trained, best, validation = loop.loop(
        replace(SMALL, start=out, out=tmp_path / "two", rounds=2)
    )
    assert (len(trained), best, validation) == (1, 0, [0.5, 0.5])
    assert "round 2: no pair in 6 groups; so the loop ends here" in capsys.readouterr().out


def test_loops_of_different_seeds_never_play_the_same_pages(tmp_path):
    for changes in (
        {"seed": 101},
        {"rounds": 5, "instances": 2001},
        {"demonstrations": 10_001},
        {"demonstrations": 9_996, "shots": 1},
        {"rounds": 5, "instances": 1001, "focus": True},
        {"demonstrations_in_total": 30_003},
    ):
        with pytest.raises(ValueError, match="would play the same pages"):
            loop.loop(replace(SMALL, **changes))
    one, two = (
        loop.Loop(replace(SMALL, seed=seed, rounds=2, focus=True, out=tmp_path)) for seed in (1, 2)
    )
    last = one.first_instance(2) + one.block
    assert last <= two.first_instance() and one.block == 3 * 2


def test_a_file_of_episodes_goes_on_under_another_path_of_its_player_and_not_with_other_weights(
    tmp_path,
):
    class Player:
        name, sampling, spare_core = "/b/adapter@01", tiny.episode().sampling, True

    kept = tiny.episode(policy="runs/a/adapter@01")
    (tmp_path / "a.jsonl").write_text(kept.to_json() + "\n")
    wanted = [Job(*kept.key, 5)]
    assert play_to_file(Player(), wanted, tmp_path / "a.jsonl", 1, "")["episodes"] == 1
    Player.name = "runs/a/adapter@02"
    with pytest.raises(
        ValueError, match="holds episodes by runs/a/adapter@01 .*, not by runs/a/adapter@02"
    ):
        play_to_file(Player(), wanted, tmp_path / "a.jsonl", 1, "")
