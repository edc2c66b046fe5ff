"""`evaluate.py`: a real evaluation in the toy world, whose result a folder holds, and what is refused."""

import json
import shutil
from dataclasses import replace

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

import envs
from envs import panel
from minidpo.acting.collect import play_to_file
from minidpo.acting.jobs import make_jobs, split_instances
from minidpo.acting.policies import expert_policy
from minidpo.data.episodes import read
from minidpo.memory.context import Context
from minidpo.memory.lora import WEIGHTS
from minidpo.memory.machine import Machine
from minidpo.model.scalar_head import FILE
from minidpo.results import evaluate
from minidpo.results.evaluate import EvaluateCommand
from minidpo.system.files import read_json, write_json
from minidpo.system.result_file import read_result
from minidpo.system.run_folder import records
from minidpo.system.tensors import write_weights

TOY = envs.world("toy")
TASK = TOY.suites["all"][0]
HERE = Machine(device="cpu", dtype="float32", pages=2)


def test_agents_play_the_same_held_out_instances_and_go_on_where_they_stopped(
    base, adapter, tmp_path
):
    command = EvaluateCommand(
        model=str(base),
        adapters=("base=", f"sft={adapter}"),
        world="toy",
        tasks=TASK,
        episodes=2,
        best_of=2,
        temperature=0.7,
        seed=3,
        max_new_tokens=5,
        out=tmp_path / "out",
        machine=HERE,
    )
    result = evaluate.evaluate(replace(command, episodes=1))
    result = evaluate.evaluate(command)
    assert read_json(command.out / "result.json") == {"version": 2, **result}
    assert (result["world"], result["comparison"]["n"]) == ("toy", 2)
    assert result["panel"] == {"test": panel.sha256((TASK, seed) for seed in TOY.seeds["test"][:2])}
    assert sum(result["agents"]["sft"]["causes"].values()) == 2
    for name in ("base", "sft"):
        played = read(command.out / f"{name}.jsonl")
        keys = [(TASK, seed, n) for seed in TOY.seeds["test"][:2] for n in (0, 1)]
        assert [e.key for e in played] == keys
        assert {(e.sampling["temperature"], e.sampling["seed"]) for e in played} == {(0.7, 3)}
    assert len(records(command.out)) == 1 and (command.out / "report.html").is_file()


def test_examples_are_shown_before_each_episode(base, tmp_path):
    context = Context(str(base), TOY, 1, HERE)
    jobs = make_jobs(TOY, split_instances(TOY, {TASK: 2}, "demos", 0))
    examples = tmp_path / "examples.jsonl"
    play_to_file(expert_policy(context, (TASK,)), jobs, examples, context=context, title="")
    command = EvaluateCommand(
        model=str(base),
        world="toy",
        tasks=TASK,
        episodes=1,
        shots=2,
        examples=examples,
        max_new_tokens=5,
        out=tmp_path / "out",
        machine=HERE,
    )
    assert evaluate.evaluate(command)["shots"] == 2
    (episode,) = read(command.out / "base.jsonl")
    assert len(episode.shots) >= 4  # a page and its answer, of two episodes


# ---- what a folder holds; nothing is played from here on ----


@pytest.fixture
def command(adapter, tmp_path, monkeypatch):
    """An evaluation of three agents; of three instances, two, one and none are not solved."""
    solved = {"base": 0, "sft": 1, "dpo": 2}

    def play(command, context, name, adapter, jobs):
        return [
            tiny.episode(
                outcome="solved" if seed < solved.get(name, 2) else "failed",
                seed=seed,
                index=index,
                task=TASK,
            )
            for seed in range(3)
            for index in range(command.best_of)
        ]

    for name in ("sft", "dpo"):
        shutil.copytree(adapter, tmp_path / name / "adapter")
    monkeypatch.setattr(evaluate, "play", play)
    adapters = ("base=", *(f"{name}={tmp_path / name / 'adapter'}" for name in ("sft", "dpo")))
    return EvaluateCommand(
        world="toy", tasks=TASK, episodes=3, adapters=adapters, out=tmp_path / "out"
    )


def test_an_evaluation_goes_on_with_more_agents_and_episodes_and_replaces_no_other(command):
    *some, _ = command.adapters
    evaluate.evaluate(replace(command, adapters=tuple(some), episodes=2))
    evaluate.evaluate(command)
    before = {path: path.read_bytes() for path in command.out.iterdir()}
    for changes in (
        {"adapters": command.adapters[2:]},
        {"temperature": 1.0},
        {"world": "miniwob", "tasks": "click-link"},
        {"episodes": 2},
    ):
        with pytest.raises(ValueError, match=r"give\s+another --out"):
            evaluate.evaluate(replace(command, **changes))
    assert {path: path.read_bytes() for path in command.out.iterdir()} == before
    moved = shutil.copytree(command.adapters[2].removeprefix("dpo="), command.out.parent / "moved")
    evaluate.evaluate(replace(command, adapters=(*some, f"dpo={moved}")))  # known by its weights


def test_a_folder_of_something_else_or_of_a_later_version_is_refused(command):
    for content, says in (
        ({"version": 1, "adapters": ["a"]}, "no evaluation"),  # a mean has adapters, too
        ({"version": 99, "adapters": []}, "version 99"),
    ):
        write_json(command.out / "config.json", content)
        with pytest.raises(ValueError, match=says):
            evaluate.evaluate(command)


@pytest.mark.parametrize("name", ["comparison", "agents"])
def test_an_agent_may_have_the_name_of_a_field(command, name):
    adapters = (command.adapters[1], command.adapters[2].replace("dpo=", f"{name}="))
    result = evaluate.evaluate(replace(command, adapters=adapters))
    assert list(result["agents"]) == ["sft", name] and result["comparison"]["only_after"] == 1
    assert read_result(command.out / "result.json") == result
    (metrics,) = records(command.out)
    assert metrics[f"{name}/success"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    "texts",
    [
        ["sft=here", "sft=there"],
        ["metrics=there"],
        ["dpo=here", "dpo.metrics=there"],
        ["../b=there"],
        ["sft="],
        ["sft"],
    ],
    ids=str,
)
def test_an_agents_name_is_its_own_and_names_files_of_the_folder(texts):
    with pytest.raises(ValueError, match="--adapters"):
        evaluate.parse_adapters(texts)


def test_what_training_logged_is_drawn(command):
    """The run folder beside an adapter has its curves."""
    log = command.out.parent / "sft" / "metrics.jsonl"
    log.write_text(json.dumps({"step": 1, "loss": 0.5}) + "\n")
    evaluate.evaluate(command)
    html = (command.out / "report.html").read_text()
    data = json.loads(html.split('id="data">')[1].split("</script>")[0])
    assert data["curves"] == {"sft": [{"step": 1, "loss": 0.5}]}


def test_a_reward_model_chooses_in_the_oracles_place_and_is_named(command, monkeypatch):
    """Of two tries at each instance it takes the one that the verdict would not."""
    asked = []

    def rewards(context, folder, episodes):
        asked.append((context.model, folder, len(episodes)))
        return [float(e.index) for e in episodes]

    def play(command, context, name, adapter, jobs):
        outcomes = ("solved", "failed")
        return [
            tiny.episode(outcome=outcomes[n], seed=seed, index=n, task=TASK)
            for seed in range(3)
            for n in range(2)
        ]

    monkeypatch.setattr(evaluate, "episode_rewards", rewards)
    monkeypatch.setattr(evaluate, "play", play)
    judge = command.out.parent / "sft" / "adapter"
    given = replace(command, best_of=2, temperature=1.0, judge=judge)
    with pytest.raises(ValueError, match="reward model"):
        evaluate.evaluate(given)
    assert not command.out.exists()  # it was refused before anything was played
    write_weights(judge / FILE, {"reward": torch.zeros(1)}, {})
    result = evaluate.evaluate(given)
    assert asked == [(given.model, judge, 18)]  # the judge is opened once
    assert [agent["all"]["success"] for agent in result["agents"].values()] == [0, 0, 0]
    assert result["judge"] == str(judge)
    with pytest.raises(ValueError, match="judge"):
        evaluate.evaluate(replace(given, judge=None))


@pytest.mark.parametrize(
    "changes",
    [
        {"shots": 1},
        {"examples": "e.jsonl"},
        {"best_of": 4},
        {"judge": "a"},
        {"export": "merged", "split": "validation"},
        {"export": "gguf", "world": "toy"},
        {"seed": -1},
    ],
    ids=str,
)
def test_options_that_contradict_each_other_are_refused(changes):
    with pytest.raises(ValueError):
        EvaluateCommand(**changes)


def test_an_odd_number_in_the_last_adapter_or_in_the_judge_is_found_before_the_first_plays(
    base, adapter, tmp_path, monkeypatch
):
    spoiled = shutil.copytree(adapter, tmp_path / "spoiled")
    tensors = load_file(spoiled / WEIGHTS)
    tensors[max(tensors)][0, 0] = float("inf")
    save_file(tensors, spoiled / WEIGHTS)
    judge = shutil.copytree(adapter, tmp_path / "judge")
    save_file({"reward": torch.full((1, 32), float("nan"))}, judge / FILE)
    monkeypatch.setattr(evaluate, "play", lambda *_: pytest.fail("played"))
    command = EvaluateCommand(
        model=str(base), adapters=("base=", f"b={spoiled}"), world="toy", tasks=TASK, machine=HERE
    )
    with pytest.raises(ValueError, match=f"{spoiled / WEIGHTS}: tensor {max(tensors)} "):
        evaluate.evaluate(command)
    judged = replace(command, adapters=("base=",), best_of=2, temperature=1.0, judge=judge)
    with pytest.raises(ValueError, match=f"{judge / FILE}: tensor reward "):
        evaluate.evaluate(judged)
