"""`evaluate.py`: whose result a folder holds, and which agents stand beside which. Nothing is played here."""

import shutil
from dataclasses import replace

import pytest
import tiny
import torch
from test_nothing_lost import Held, content

from minidpo.config import EvaluateCommand, Sampling
from minidpo.data.episodes import Writer
from minidpo.memory.lora import CONFIG
from minidpo.model.scalar_head import FILE
from minidpo.results import evaluate
from minidpo.results.success import table
from minidpo.system.files import read_json, write_json
from minidpo.system.result_file import read_result
from minidpo.system.run_folder import records
from minidpo.system.tensors import write_weights

SOLVED = {"base": "---", "sft": "+--", "dpo": "++-"}  # of three instances


@pytest.fixture
def command(tmp_path, monkeypatch):
    """An evaluation of three agents whose outcomes are SOLVED."""

    def played(config, name, adapter):
        return [
            tiny.episode(outcome="solved" if sign == "+" else "failed", seed=seed, policy=name)
            for seed, sign in enumerate(SOLVED[name])
        ]

    for name in ("sft", "dpo"):
        write_json(tmp_path / name / "adapter" / CONFIG, {})
    monkeypatch.setattr(evaluate, "play_held_out", played)
    monkeypatch.setattr(evaluate, "make_report", lambda *_: None)
    adapters = ("base=", *(f"{name}={tmp_path / name / 'adapter'}" for name in ("sft", "dpo")))
    return EvaluateCommand(
        tasks="click-button", episodes=3, adapters=adapters, out=tmp_path / "out"
    )


def test_each_of_three_agents_is_held_against_the_one_before_it(command, capsys):
    result = evaluate.evaluate(command)
    assert read_json(command.out / "result.json") == {"version": 2, **result}
    assert (result["comparison"]["only_after"], result["comparison"]["only_before"]) == (2, 0)
    assert [(c["before"], c["after"], c["only_after"]) for c in result["comparisons"]] == [
        ("base", "sft", 1),
        ("sft", "dpo", 1),
    ]
    told = capsys.readouterr().out
    assert all(
        f"{pair}: +{points} points" in told
        for pair, points in (("SFT - BASE", "33.3"), ("DPO - SFT", "33.3"), ("DPO - BASE", "66.7"))
    )
    two = evaluate.evaluate(
        replace(command, adapters=command.adapters[1:], out=command.out / "two")
    )
    assert "comparisons" not in two and two["comparison"]["only_after"] == 1


def test_a_result_says_how_many_examples_stood_before_each_episode(command, monkeypatch):
    shown = []
    monkeypatch.setattr(
        evaluate, "make_report", lambda path, result, episodes, about: shown.append(about)
    )
    result = evaluate.evaluate(replace(command, shots=2, examples="e.jsonl"))
    assert result["shots"] == shown[0]["settings"]["shots"] == 2
    assert "shots" not in evaluate.evaluate(replace(command, out=command.out / "plain"))


def test_an_agent_plays_at_the_temperature_with_the_seed_and_as_often_as_asked(
    tmp_path, monkeypatch
):
    asked = EvaluateCommand(
        tasks="click-button",
        temperature=0.7,
        seed=3,
        best_of=2,
        episodes=1,
        max_new_tokens=5,
        out=tmp_path,
    )
    monkeypatch.setattr(evaluate, "make_policy", lambda play: play)
    monkeypatch.setattr(evaluate, "held_out", lambda *_: [])

    shown = []

    def play_to_file(play, jobs, *_, **__):
        assert (play.sampling, play.seed) == (Sampling(0.7, max_new_tokens=5), 3)
        assert {job.index for job in jobs} == {0, 1}
        shown.append({len(job.shots) for job in jobs})
        return {"episodes": len(jobs)}

    monkeypatch.setattr(evaluate, "play_to_file", play_to_file)
    assert evaluate.play_held_out(asked, "a", None) == []
    with Writer(tmp_path / "examples.jsonl") as examples:
        examples.add(tiny.episode((tiny.CLICK_2,), task="click-button", seed=99, policy="expert"))
    behind = replace(asked, shots=1, examples=tmp_path / "examples.jsonl")
    assert evaluate.play_held_out(behind, "a", None) == [] and shown == [
        {0},
        {2},
    ]  # a page and its answer


def test_a_name_that_is_given_twice_is_refused(command):
    with pytest.raises(
        ValueError, match="--adapters has two agents named sft: give each its own name"
    ):
        evaluate.evaluate(replace(command, adapters=(command.adapters[1], "sft=elsewhere")))


@pytest.mark.parametrize("name", ["comparison", "version", "agents", "date", "best_of"])
def test_an_agent_may_have_the_name_of_a_field(command, name, monkeypatch):
    """Result, metrics and printed table keep the agent and the field apart."""
    monkeypatch.setitem(SOLVED, name, SOLVED["dpo"])
    adapters = (command.adapters[1], command.adapters[2].replace("dpo=", f"{name}="))
    result = evaluate.evaluate(replace(command, adapters=adapters))
    assert list(result["agents"]) == ["sft", name] and result["comparison"]["only_after"] == 1
    assert read_result(command.out / "result.json") == result
    (metrics,) = records(command.out)
    assert metrics[f"{name}/success"] == pytest.approx(2 / 3)
    assert f"  {name.upper()}\n" in table(result)


def test_an_agent_named_like_the_log_is_refused_because_its_episodes_would_be_in_that_file(command):
    result = evaluate.evaluate(replace(command, adapters=command.adapters[:2]))
    assert {path.stem for path in command.out.glob("*.jsonl")} - result["agents"].keys() == {
        "metrics"
    }
    for taken in ("metrics", "dpo.metrics"):
        with pytest.raises(
            ValueError, match=f"--adapters {taken}=there: {taken}.jsonl is a log; take"
        ):
            evaluate.parse_adapters(["dpo=here", f"{taken}=there"])


@pytest.mark.parametrize("name", ["../b", "a/b", "/tmp/a"])
def test_an_agents_name_leads_to_no_other_folder(name):
    with pytest.raises(ValueError, match="names files in --out: leave out the slash"):
        evaluate.parse_adapters([f"{name}=there"])


def test_an_evaluation_goes_on_with_more_agents_and_episodes_and_replaces_no_other(command):
    *some, _ = command.adapters
    evaluate.evaluate(replace(command, adapters=tuple(some), episodes=2))
    evaluate.evaluate(command)
    before = content(command.out)
    refused = {
        r"holds the result of base, sft, which would be lost: name these too \(base= sft=": {
            "adapters": command.adapters[2:]
        },
        r"an evaluation with other settings \(best_of 1, now 4; temperature 0.0, now 1.0\): give": {
            "temperature": 1.0,
            "best_of": 4,
        },
        r"other settings \(shots 0, now 1\)": {"shots": 1, "examples": "e.jsonl"},
        r"other settings \(seed 1, now 2; split test, now validation\)": {
            "split": "validation",
            "seed": 2,
        },
        r"\(episodes 3, now 2; tasks .*, now click-link\)": {"tasks": "click-link", "episodes": 2},
    }
    for says, changes in refused.items():
        with pytest.raises(ValueError, match=says):
            evaluate.evaluate(replace(command, **changes))
    assert content(command.out) == before
    moved = shutil.copytree(command.adapters[2].removeprefix("dpo="), command.out.parent / "moved")
    evaluate.evaluate(replace(command, adapters=(*some, f"dpo={moved}")))  # known by its weights


def test_an_evaluation_has_its_folder_for_itself_and_knows_its_version(command):
    command.out.mkdir()
    with (
        Held(command.out / ".lock", "lockf"),
        pytest.raises(ValueError, match="another process is writing"),
    ):
        evaluate.evaluate(command)
    assert content(command.out) == {}
    write_json(
        command.out / "config.json", {"version": 1, "adapters": ["a"]}
    )  # a mean has adapters, too
    with pytest.raises(ValueError, match="holds a run that is no evaluation: give another --out"):
        evaluate.evaluate(command)
    write_json(command.out / "config.json", {"version": 99, "adapters": []})
    with pytest.raises(
        ValueError, match="holds a run of format version 99, but this minidpo knows 1"
    ):
        evaluate.evaluate(command)


def test_the_best_of_several_tries_is_called_an_oracles(command, capsys):
    evaluate.evaluate(replace(command, best_of=8, temperature=1.0))
    told = capsys.readouterr().out
    assert (
        "best of 8 tries at temperature 1, chosen by the page's verdict: an oracle's success"
        in told
    )


def test_a_reward_model_picks_in_the_oracles_place_and_is_named(command, monkeypatch, capsys):
    """Of two tries at each instance, one solved, it takes the other."""
    asked, shown = [], []

    def rewards(model, machine, folder, episodes):
        asked.append((model, machine, folder, len(episodes)))
        return [-e.reward for e in episodes]

    monkeypatch.setattr(
        evaluate,
        "tried",
        lambda config, name: [
            tiny.episode(outcome=outcome, seed=seed, index=index, policy=name)
            for seed in range(3)
            for index, outcome in enumerate(("solved", "failed"))
        ],
    )
    monkeypatch.setattr(evaluate, "episode_rewards", rewards)
    monkeypatch.setattr(
        evaluate, "make_report", lambda path, result, episodes, about: shown.append(about)
    )
    given = replace(
        command, best_of=2, temperature=1.0, judge=command.out.parent / "sft" / "adapter"
    )
    with pytest.raises(
        ValueError, match="adapter: no reward model's head here; train.py rm makes one"
    ):
        evaluate.evaluate(given)  # before anything is played
    assert not command.out.exists()
    write_weights(given.judge / FILE, {"reward": torch.zeros(1)}, {})
    result = evaluate.evaluate(given)
    assert asked == [(given.model, given.machine, given.judge, 18)]  # the judge is opened once
    assert [agent["all"]["success"] for agent in result["agents"].values()] == [0, 0, 0]
    assert result["judge"] == shown[0]["settings"]["judge"] == str(given.judge)
    told = capsys.readouterr().out
    assert f"chosen by the reward model {given.judge}, without the page's verdict; steps" in told
    assert evaluate.evaluate(given)["judge"] == result["judge"]
    with pytest.raises(
        ValueError, match=r"evaluation with other settings \(judge .*/sft/adapter, now None"
    ):
        evaluate.evaluate(replace(given, judge=None))
    with pytest.raises(
        ValueError, match="judge picks one of several episodes: set best_of above 1"
    ):
        replace(command, judge=given.judge)
    with pytest.raises(
        ValueError, match="export plays nothing: leave out temperature, best_of, judge$"
    ):
        replace(
            given, tasks=EvaluateCommand.tasks, episodes=EvaluateCommand.episodes, export="merged"
        )
