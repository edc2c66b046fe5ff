"""Jobs: what is played, in which order, and what is given before the agent's own first answer."""

from dataclasses import replace

import pytest
import tiny
from stairs import STEPS, WORLD, Stairs, run

from minidpo.acting.jobs import (
    Job,
    continuations,
    make_jobs,
    split_instances,
    to_agent_states,
    with_golden_steps,
    with_shots,
)


def golden(seed, turns=3):
    return tiny.episode(STEPS[:turns], task="stairs", seed=seed, policy="expert")


def test_instances_come_task_by_task_and_the_episodes_of_a_group_are_neighbours():
    instances = split_instances(WORLD, {"a": 1, "b": 2}, "test", 5)
    assert instances == [("a", 105), ("b", 105), ("b", 106)]
    keys = [job.key for job in make_jobs(WORLD, instances[:2], group=2, index=3)]
    assert keys == [("a", 105, 3), ("a", 105, 4), ("b", 105, 3), ("b", 105, 4)]


def test_of_a_task_with_fewer_instances_all_are_played_and_a_line_says_so(capsys):
    class Few(type(WORLD)):
        def instances(self, task, split):
            return super().instances(task, split)[: {"a": 2}.get(task)]

    assert split_instances(Few(), {"a": 9, "b": 3}, "test") == [
        *(("a", seed) for seed in (100, 101)),
        *(("b", seed) for seed in (100, 101, 102)),
    ]
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "a has 2" in said and "b" not in said.split("a has 2")[1]


@pytest.mark.parametrize(
    "refused, names",
    [
        (lambda: split_instances(WORLD, {"a": 2, "b": 3}, "test", 100), "test"),
        (lambda: split_instances(WORLD, {"a": 1}, "train"), "'train'"),
        (lambda: with_shots([Job("a", 1, 0, 8)], [golden(2)], 1), "a: 1 solved"),
        (lambda: with_golden_steps([Job("stairs", 9, 0, 8)], [golden(1)]), "golden"),
        (lambda: continuations(WORLD, [replace(golden(1), turns=())], 2), "step"),
    ],
)
def test_what_cannot_be_played_is_refused_in_one_line(refused, names):
    with pytest.raises(ValueError, match=names) as error:
        refused()
    assert "\n" not in str(error.value)


def test_each_episode_has_the_first_solved_examples_of_its_task_that_are_of_other_instances():
    examples = [
        tiny.episode((f"by {seed}",), seed=seed, outcome="failed" if seed == 3 else "solved")
        for seed in (1, 2, 3, 4)
    ]
    jobs = [Job("click-button", seed, n, 5) for seed in (1, 7) for n in range(2)]
    shown = with_shots(jobs, examples, 2)
    assert [job._replace(shots=()) for job in shown] == jobs
    said = [[text for text in job.shots if text.startswith("by")] for job in shown]
    assert said == [["by 2", "by 4"]] * 2 + [["by 1", "by 2"]] * 2


def test_a_group_explores_from_every_step_of_the_golden_episode_in_turn(capsys):
    """Golden episodes of three steps and of one: the first is explored from its steps 2, 0, 1, 2 (episodes 5
    to 8), the other from the only step that it has."""
    jobs = [Job("stairs", seed, index, 8) for seed in (1, 2) for index in range(5, 9)]
    demos = [golden(1), golden(2, turns=1), replace(golden(99), outcome="failed")]
    found = with_golden_steps([*jobs, Job("stairs", 99, 0, 8)], demos)
    assert [len(job.forced) for job in found] == [2, 0, 1, 2, 0, 0, 0, 0]
    assert [job._replace(forced=()) for job in found] == jobs  # 99 has no golden episode
    assert "stairs seed 99" in capsys.readouterr().out
    assert all(job.forced == STEPS[: len(job.forced)] for job in found)


@pytest.fixture
def recorded():
    """Two episodes of one instance that differ in their last answers, and one of another."""
    other = (*STEPS[:2], STEPS[0], STEPS[2])
    jobs = [
        Job("stairs", 1, 3, 8, STEPS),
        Job("stairs", 1, 5, 8, other),
        Job("stairs", 2, 0, 8, STEPS),
    ]
    return [replace(episode, forced=0) for episode in run([Stairs()], jobs)[0]]


def test_each_state_of_an_instance_is_continued_by_samples_of_its_own(recorded):
    jobs = continuations(WORLD, recorded, 3)
    assert [job.index for job in jobs if job.seed == 1] == list(range(6, 15))  # after 3 and 5
    assert [job.index for job in jobs if job.seed == 2] == list(range(1, 10))
    # two episodes went on from the first page already, a lone one says nothing of what else could be
    states = {1: [STEPS[:1], STEPS[:2], (*STEPS[:2], STEPS[0])], 2: [(), STEPS[:1], STEPS[:2]]}
    for seed, said in states.items():
        assert [job.forced for job in jobs if job.seed == seed] == [s for s in said for _ in "123"]
    shown = [replace(episode, shots=("page", "answer")) for episode in recorded]
    assert {job.shots for job in continuations(WORLD, shown, 1)} == {("page", "answer")}


def test_every_state_that_an_agent_reached_is_played_once_in_a_seeded_order():
    said = {1: [STEPS, STEPS[:2]], 2: [("9", "9", "9"), ("9", "1")]}
    rollouts = [
        tiny.episode(answers, "failed", seed=seed, index=index, task="stairs")
        for seed, episodes in said.items()
        for index, answers in enumerate(episodes)
    ]
    jobs = [Job("stairs", seed, n, 5) for seed in (1, 2, 3) for n in range(8)]
    reached = to_agent_states(jobs, rollouts, 1)
    states = {1: [(), STEPS[:1], STEPS[:2]], 2: [(), ("9",), ("9", "9")], 3: []}
    for seed, wanted in states.items():
        assert sorted(job.forced for job in reached if job.seed == seed) == wanted
    assert all(job.limit == 5 + len(job.forced) for job in reached)
    orders = {tuple(to_agent_states(jobs, rollouts, seed)) for seed in (1, 1, 2, 3, 4, 5)}
    assert 1 < len(orders) < 6
    few = [job for job in jobs if job.index < 2]
    assert to_agent_states(few, rollouts, 1) == [job for job in reached if job.index < 2]
