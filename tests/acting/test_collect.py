"""What collect.py writes to its file and what it refuses to go on with; on toy pages, without a browser."""

from contextlib import asynccontextmanager

import pytest
import tiny
from test_rollout import Script, Stairs

from minidpo.acting import collect
from minidpo.acting.policies import Job
from minidpo.data.episodes import Writer, read

STEPS = tuple(f'action: CLICK(ref="{n}")' for n in (1, 2, 3))


@pytest.fixture(autouse=True)
def pages(monkeypatch):
    @asynccontextmanager
    async def browser(count, headless=True):
        yield type("Pages", (), {"envs": [Stairs() for _ in range(count)]})

    monkeypatch.setattr(collect, "RemoteBrowser", browser)
    monkeypatch.setattr(collect, "progress", lambda *_, ended: 0.25 + ended / 2)


def test_a_failure_is_written_with_how_near_it_came(tmp_path):
    wanted = [Job("stairs", seed, n, 8) for seed in range(5) for n in range(2)]
    counts = collect.play_to_file(Script(), wanted, tmp_path / "a.jsonl", 2, "")
    assert counts["episodes"] == 10
    found = {(e.outcome, e.progress) for e in read(tmp_path / "a.jsonl")}
    assert {("solved", None), ("failed", 0.75)} <= found
    assert found <= {("solved", None), ("failed", 0.75), ("limit", 0.25)}


def test_a_file_does_not_go_on_with_other_forced_steps_or_another_way_to_sample(tmp_path):
    wanted = [Job("stairs", 1, 0, 8, STEPS[:1])]
    collect.play_to_file(Script(["next"]), wanted, tmp_path / "a.jsonl", 1, "")
    with pytest.raises(ValueError, match="began with 1 forced steps, not 2"):
        other = [wanted[0]._replace(forced=STEPS[:2])]
        collect.play_to_file(Script(["next"]), other, tmp_path / "a.jsonl", 1, "")
    other = Script(["next"])
    other.sampling = {"seed": 8}
    with pytest.raises(ValueError, match="holds episodes by script"):
        collect.play_to_file(other, wanted, tmp_path / "a.jsonl", 1, "")


def test_a_file_does_not_go_on_with_other_steps_of_the_same_number(tmp_path):
    wanted = [Job("stairs", 1, 0, 8, STEPS[:2])]
    collect.play_to_file(Script(["next"]), wanted, tmp_path / "a.jsonl", 1, "")
    with pytest.raises(ValueError, match="a.jsonl: stairs seed 1 episode 0 began with other steps"):
        other = [wanted[0]._replace(forced=STEPS[:1] * 2)]
        collect.play_to_file(Script(["next"]), other, tmp_path / "a.jsonl", 1, "")


@pytest.fixture
def rollouts(tmp_path):
    """Of two seeds, two episodes each that begin alike: states (), 1 and 12; and (), 9 and 99."""
    said = {1: [STEPS, STEPS[:2]], 2: [("9", "9", "9"), ("9", "1")]}
    with Writer(tmp_path / "rollouts.jsonl") as writer:
        for seed, episodes in said.items():
            for index, answers in enumerate(episodes):
                writer.add(tiny.episode(answers, "failed", seed=seed, index=index, task="stairs"))
    return tmp_path / "rollouts.jsonl"


def test_every_state_that_an_agent_reached_is_played_once_in_a_seeded_order(rollouts):
    jobs = [Job("stairs", seed, n, 5) for seed in (1, 2, 3) for n in range(8)]
    reached = collect.to_agent_states(jobs, [rollouts], 1)
    given = {seed: [job.forced for job in reached if job.seed == seed] for seed in (1, 2, 3)}
    assert sorted(given[1]) == [(), STEPS[:1], STEPS[:2]] and sorted(given[2]) == [(), ("9",), ("9", "9")]
    assert given[3] == [] and len({job.key for job in reached}) == len(reached) == 6
    assert all(job.limit == 5 + len(job.forced) for job in reached)
    orders = {tuple(collect.to_agent_states(jobs, [rollouts], seed)) for seed in (1, 1, 2, 3, 4, 5)}
    assert 1 < len(orders) < 6
    few = [job for job in jobs if job.index < 2]
    assert collect.to_agent_states(few, [rollouts], 1) == [job for job in reached if job.index < 2]
    with pytest.raises(ValueError, match="rollouts.jsonl: no state of any instance that is asked for: giv"):
        collect.to_agent_states([Job("stairs", 3, 0, 5)], [rollouts], 1)


def test_whoever_answers_in_these_states_goes_on_from_there(rollouts, tmp_path):
    jobs = collect.to_agent_states([Job("stairs", 1, n, 5) for n in range(3)], [rollouts], 1)
    collect.play_to_file(Script(["next"]), jobs, tmp_path / "dagger.jsonl", 1, "")
    for episode, job in zip(read(tmp_path / "dagger.jsonl"), jobs, strict=True):
        assert episode.said == STEPS and episode.solved and episode.forced == len(job.forced)
