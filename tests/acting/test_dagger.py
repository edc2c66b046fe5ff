"""DAgger on real pages: what it relabels was reached by the agent, and solves from there."""

import asyncio

import pytest

import envs
from benchmarks.make_nano import Clumsy
from minidpo.acting.collect import play_to_file
from minidpo.acting.jobs import make_jobs, split_instances, to_agent_states
from minidpo.acting.policies import expert_policy
from minidpo.data.episodes import read
from minidpo.memory.context import Context
from minidpo.memory.machine import Machine

WORLD = envs.world("miniwob")
TASKS = ("click-checkboxes", "login-user")


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """An agent with bad habits, and the expert in its states."""
    folder = tmp_path_factory.mktemp("dagger")
    context = Context("", WORLD, machine=Machine(pages=4))
    instances = split_instances(WORLD, dict.fromkeys(TASKS, 3), "rollouts")

    def play(policy, jobs, name):
        play_to_file(policy, jobs, folder / name, context=context, title=name)
        return read(folder / name)

    agent = play(Clumsy(0.7, 1), make_jobs(WORLD, instances, 3), "agent.jsonl")
    jobs = to_agent_states(make_jobs(WORLD, instances, 6), agent, seed=1)
    return agent, play(expert_policy(context, TASKS, relabels=True), jobs, "dagger.jsonl")


def test_each_state_is_one_that_the_agent_saw_and_is_there_once(played):
    agent, relabelled = played
    saw = {
        (e.instance, e.said[:t]): e.turns[t].observation for e in agent for t in range(len(e.turns))
    }
    for episode in relabelled:
        state = episode.instance, episode.said[: episode.forced]
        assert episode.relabelled and state in saw
        if len(episode.turns) > episode.forced:
            assert episode.turns[episode.forced].observation == saw[state]
    assert len({(e.instance, e.said[: e.forced]) for e in relabelled}) == len(relabelled)


def test_what_dagger_relabels_solves_from_that_state(played):
    """The agent's steps again, the answer that is imitated, then the expert to the end: on fresh pages."""
    solved = [e for e in played[1] if e.solved]
    after_a_step = [e for e in solved if e.forced]
    assert {e.task for e in after_a_step} == set(TASKS) and len(solved) > 0.8 * len(played[1])

    async def outcomes():
        async with WORLD.open(1) as (env,):
            for episode in after_a_step:
                await env.reset(episode.task, episode.seed)
                actions = [turn.action for turn in episode.turns if turn.action]
                *_, last = [await env.step(WORLD.parse(action)) for action in actions]
                yield last.outcome

    async def collected():
        return {outcome async for outcome in outcomes()}

    assert asyncio.run(collected()) == {"solved"}
