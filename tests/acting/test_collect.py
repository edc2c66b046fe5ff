"""Collecting: what is written, and what a file does not go on with."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from stairs import CONTEXT, JOBS, STEPS, WORLD, Script

from minidpo.acting import policies
from minidpo.acting.collect import play_to_file
from minidpo.acting.jobs import Job
from minidpo.acting.policies import ExpertPolicy, Sampling, expert_policy, model_policy
from minidpo.data.episodes import read
from minidpo.memory.machine import Machine


def collect(policy, jobs, out):
    return play_to_file(policy, jobs, out, context=CONTEXT, title="test")


def test_killed_in_a_line_and_started_again_the_file_is_the_same(tmp_path):
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    counts = collect(Script(), JOBS, whole)
    lines = whole.read_bytes().splitlines(keepends=True)
    killed.write_bytes(b"".join(lines[3:8]) + lines[0][:40])
    assert collect(Script(), JOBS, killed) == counts
    episodes = read(killed)
    assert episodes == read(whole) and [e.key for e in episodes] == [job.key for job in JOBS]
    outcomes = Counter(e.outcome for e in episodes)
    assert counts == {"episodes": 10, **outcomes, "env_errors": 0} and len(outcomes) > 1


def changed(**changes):
    return [JOBS[0]._replace(**changes)]


@pytest.mark.parametrize(
    "jobs, policy, names",
    [
        (changed(forced=STEPS[:1], shots=("a", "b")), {}, "examples"),
        (changed(forced=STEPS[:1]), {"sampling": {"seed": 8}}, "script"),
        (changed(forced=STEPS[:1]), {"name": "other@1"}, "other@1.*weights"),
    ],
)
def test_a_file_does_not_go_on_with_what_would_not_have_played_it(tmp_path, jobs, policy, names):
    collect(Script(["next"]), changed(forced=STEPS[:1]), tmp_path / "a.jsonl")
    other = Script(["next"])
    vars(other).update(policy)
    with pytest.raises(ValueError, match=names):
        collect(other, jobs, tmp_path / "a.jsonl")


def test_a_chat_that_changed_is_told_and_older_episodes_name_none(tmp_path):
    jobs, out = changed(forced=STEPS[:1]), tmp_path / "a.jsonl"

    def script(name):
        policy = Script(["next"])
        policy.name = name
        return policy

    collect(script("here@1"), jobs, out)
    collect(script("moved@1-a"), jobs, out)  # before the chat was in the name
    out.unlink()
    collect(script("here@1-a"), jobs, out)
    with pytest.raises(ValueError, match="chat template"):
        collect(script("here@1-b"), jobs, out)


def test_an_expert_that_knows_no_way_on_ends_its_episode_and_no_other(
    tmp_path, monkeypatch, capsys
):
    def lost(seen, done):
        if done:
            raise LookupError("no such stair")
        return WORLD.experts["stairs"](seen, done)

    world = type("Lost", (type(WORLD),), {"experts": {"a": lost, **WORLD.experts}})()
    jobs = [Job("a", 3, 0, 8), Job("stairs", 4, 0, 8)]
    collect(ExpertPolicy(world, 1), jobs, tmp_path / "a.jsonl")
    outcomes = [(e.outcome, len(e.turns)) for e in read(tmp_path / "a.jsonl")]
    assert outcomes == [("limit", 1), ("solved", 3)]
    assert "a seed 3" in capsys.readouterr().err


def test_a_task_without_an_expert_is_refused():
    with pytest.raises(ValueError, match="for a, b:"):
        expert_policy(CONTEXT, ["stairs", "a", "b"])


def test_the_models_policy_has_the_seed_the_sampling_and_the_prompt_of_its_run():
    context = replace(CONTEXT, model="minidpo/nano", seed=5, machine=Machine(device="cpu"))
    policy = model_policy(context, None, Sampling(0.5, max_new_tokens=7), pages=2)
    assert policy.sampling == {"temperature": 0.5, "top_p": 1.0, "seed": 5, "max_new_tokens": 7}
    assert policy.system_prompt == WORLD.system_prompt and policy.seed == 5
    assert policy.name.startswith("minidpo/nano@")


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperatures": (0.5, float("inf"))},
        {"temperature": 0.0, "top_p": 0.9},
    ],
)
def test_sampling_that_makes_no_sense_is_refused(options):
    with pytest.raises(ValueError):
        Sampling(**options)


def test_a_log_tells_each_fifty_episodes_and_the_end_and_goes_on_after_a_kill(tmp_path):
    jobs = [Job("stairs", seed, 0, 8) for seed in range(60)]
    for some, steps in ((jobs[:20], [20]), (jobs, [20, 50, 60])):
        collect(Script(), some, tmp_path / "a.jsonl")
        log = (tmp_path / "a.metrics.jsonl").read_text().splitlines()
        lines = [json.loads(line) for line in log]
        assert [line["step"] for line in lines] == steps
    solved = sum(episode.solved for episode in read(tmp_path / "a.jsonl"))
    assert lines[-1]["solved"] == solved and lines[-1]["success"] == solved / 60


def test_who_watches_reads_what_the_agent_thinks_and_does(tmp_path, capsys):
    policy = policies.PrintingPolicy(Script(["hm"]))
    play_to_file(policy, JOBS[:1], tmp_path / "a.jsonl", context=CONTEXT, title="", watch=True)
    told = capsys.readouterr().out
    assert "stairs seed 0: Climb 0.\n  hm" in told and "turn 2\n  error:" in told
    assert "stairs seed 0: limit" in told
