"""DAgger on real pages: what it relabels was reached by the agent, and solves from there."""

import asyncio

import pytest

from envs.actions import parse
from envs.miniwob.browser.driver import Browser
from minidpo.acting.collect import collect
from minidpo.config import SFT, CollectCommand
from minidpo.data.episodes import read
from minidpo.data.pairs import PairRules, make_pairs
from minidpo.learning.sft import imitated
from minidpo.memory.machine import Machine

TASKS = "click-checkboxes,enter-text,login-user,click-option"


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """An agent with bad habits, and the expert in its states."""
    folder = tmp_path_factory.mktemp("dagger")
    asked = {"tasks": TASKS, "machine": Machine(pages=4), "instances": 3}
    collect(
        CollectCommand(**asked, policy="expert", noise=0.7, group=3, out=folder / "agent.jsonl")
    )
    states = CollectCommand(
        **asked,
        policy="dagger",
        states=(folder / "agent.jsonl",),
        group=6,
        out=folder / "dagger.jsonl",
    )
    collect(states)
    before = (folder / "dagger.jsonl").read_bytes()
    collect(states)  # it holds all, so nothing is played
    assert (folder / "dagger.jsonl").read_bytes() == before
    return read(folder / "agent.jsonl"), read(folder / "dagger.jsonl")


def test_each_state_is_one_that_the_agent_saw_and_is_there_once(played):
    agent, relabelled = played
    saw = {
        (e.instance, e.said[:t]): e.turns[t].observation for e in agent for t in range(len(e.turns))
    }
    for episode in relabelled:
        state = episode.instance, episode.said[: episode.forced]
        assert episode.policy == "dagger" and state in saw
        if len(episode.turns) > episode.forced:
            assert episode.turns[episode.forced].observation == saw[state]
    assert len({(e.instance, e.said[: e.forced]) for e in relabelled}) == len(relabelled)
    for instance in {e.instance for e in agent}:
        there = sum(state == instance for state, _ in saw)
        assert sum(e.instance == instance for e in relabelled) == min(6, there)


def test_both_sides_of_a_dagger_pair_answer_the_page_that_the_agent_saw(played):
    agent, relabelled = played
    pairs = make_pairs(agent, PairRules(9, source="dagger"), 1, golden=relabelled)
    assert any(pair.chosen.forced for pair in pairs) and {pair.source for pair in pairs} == {
        "dagger"
    }
    for pair in pairs:
        pages = [[turn.observation for turn in side.turns] for side in (pair.chosen, pair.rejected)]
        assert pages[0] == pages[1] and len(pages[0]) == pair.chosen.forced + 1
        assert pair.chosen.turns[-1].action != pair.rejected.turns[-1].action


def test_what_dagger_relabels_solves_from_that_state(played):
    """The agent's steps again, the answer that is imitated, then the expert to the end: on fresh pages."""
    _, relabelled = played
    chosen, _ = imitated(relabelled, SFT())
    after_a_step = [e for e in chosen if e.forced]
    assert {e.task for e in after_a_step} == set(TASKS.split(",")) and len(chosen) > 0.8 * len(
        relabelled
    )
    whole = {e.key: e for e in relabelled}
    assert all(
        len(e.turns) == e.forced + 1 and e.said == whole[e.key].said[: e.forced + 1] for e in chosen
    )

    async def outcomes():
        found = []
        async with Browser(pages=1) as browser:
            (env,) = browser.envs
            for episode in after_a_step:
                await env.reset(episode.task, episode.seed)
                for turn in whole[episode.key].turns:
                    if turn.action:
                        observation = await env.step(parse(turn.action))
                found.append((episode.name, str(observation.outcome)))
        return found

    assert {outcome for _, outcome in asyncio.run(outcomes())} == {"solved"}
