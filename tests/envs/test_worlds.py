"""What every world promises. Put your own in WORLDS: these tests are all that minidpo asks of it."""

import asyncio
import random
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import envs
from envs.panel import panel
from envs.protocol import MISTAKES, SPLITS, ActionError, EnvError, Observation
from minidpo.acting.jobs import Job, split_instances
from minidpo.acting.policies import ExpertPolicy, Reply
from minidpo.acting.rollout import ENV_TRIES, play
from minidpo.data.prompt import understand
from minidpo.experiment import ExperimentOptions

WALK = f"{Path(__file__).parent / 'walking.py'}:Walk"
WORLDS = {  # with the tasks that are played here
    "toy": envs.resolve(envs.world("toy"), "all"),
    WALK: ("Walk",),
    "miniwob": ("click-button", "login-user", "click-checkboxes"),
    "babyai": ("GoToRedBall", "OpenRedDoor", "UnlockPickup"),
    "textcraft": ("depth-1", "depth-2", "depth-4"),
    # the first pages of other tasks may be those of another variation, or paid already
    "scienceworld": ("power-component", "identify-life-stages-2"),
    "textworld_express": ("arithmetic", "simonsays", "peckingorder"),
}
EXTRAS = (
    "babyai",
    "textcraft",
    "scienceworld",
    "textworld_express",
)  # skipped where they are not set up


@pytest.fixture(scope="module", params=WORLDS)
def world(request):
    try:
        world = envs.world(request.param)
        if request.param in EXTRAS:
            world.require()
    except ValueError as missing:
        if request.param not in EXTRAS:
            raise
        pytest.skip(str(missing))
    return world


@pytest.fixture(scope="module")
def instances(world):
    return split_instances(world, dict.fromkeys(WORLDS[world.name], 3), "validation")


def played(world, instances, policy, places=2):
    """(episodes, failures) of one episode each, in the order of the instances."""
    jobs = [Job(task, seed, 0, world.step_limit(task)) for task, seed in instances]
    episodes = []

    async def in_the_world():
        async with world.open(places) as places_to_play:
            return await play(places_to_play, jobs, policy, episodes.append, world)

    failures = asyncio.run(in_the_world())
    return sorted(episodes, key=lambda e: instances.index(e.instance)), failures


class Sloppy(ExpertPolicy):
    """Half of the time it says what the expert said in another turn or nothing usable."""

    name = "sloppy"

    async def answer(self, page, episode):
        reply = await super().answer(page, episode)
        rng = random.Random(f"{episode.job.key} {len(episode.turns)}")
        choices = [turn.answer for turn in episode.turns] + ["hm"]
        return Reply(rng.choice(choices)) if rng.random() < 0.5 or reply is None else reply


def test_every_task_and_seed_has_its_place(world):
    assert {task for suite in world.suites.values() for task in suite} == {*world.suites["all"]}
    assert {*world.experts} <= {*world.suites["all"]}
    assert all(world.step_limit(task) > 0 for task in world.suites["all"])
    for task in world.suites["all"]:
        splits = [world.instances(task, split) for split in SPLITS]
        assert all(splits)
        for one, other in combinations(splits, 2):
            apart = one[-1] < other[0] or other[-1] < one[0]  # a set of a million seeds takes long
            assert apart or {*one}.isdisjoint(other)


def test_the_prompt_shows_an_answer_that_can_be_used(world):
    understand(world.system_prompt, world)


def test_the_expert_solves_and_all_that_it_does_can_be_written_and_read_back(world, instances):
    episodes, failures = played(world, instances, ExpertPolicy(world, 1))
    assert not failures and [e.outcome for e in episodes] == ["solved"] * len(instances)
    for turn in (turn for episode in episodes for turn in episode.turns):
        action = understand(turn.answer, world)
        assert world.render(action) == turn.action and "\n" not in turn.action
        assert world.parse(turn.action) == action


@given(text=st.text())
def test_any_text_is_an_action_or_an_action_error(world, text):
    try:
        action = world.parse(text)
    except ActionError as error:
        assert "\n" not in str(error)
    else:
        assert world.parse(world.render(action)) == action


def test_the_same_task_seed_and_answers_are_the_same_episode(world, instances):
    """Also in places that others have used, and whatever was played there before."""
    episodes, _ = played(world, instances, Sloppy(world, 1))
    again, _ = played(world, instances[::-1], Sloppy(world, 1), places=1)
    assert sorted(again, key=lambda e: instances.index(e.instance)) == episodes
    assert any(turn.action is None for e in episodes for turn in e.turns)
    first_pages = {(e.instruction, e.turns[0].observation) for e in episodes}
    assert len(first_pages) == len(instances)  # another seed is another instance


def test_an_unusable_answer_is_a_step_that_changes_nothing_and_says_why(world, instances):
    class Silent(Sloppy):
        async def answer(self, page, episode):
            return Reply(f"hm {len(episode.turns)}")

    for episode in played(world, instances, Silent(world, 1))[0]:
        assert episode.outcome == "limit" and episode.reward == 0.0
        assert len(episode.turns) == world.step_limit(episode.task)
        assert len({turn.observation for turn in episode.turns}) == 1
        assert all(turn.error for turn in episode.turns)


def test_a_mistake_has_a_name(world, instances):
    episodes, _ = played(world, instances, Sloppy(world, 1))
    failed = [episode for episode in episodes if not episode.solved]
    assert failed
    for episode in failed:
        assert episode.outcome in ("failed", "limit")
        for turn in (turn for turn in episode.turns if turn.action):
            seen = Observation(episode.instruction, turn.observation)
            done = world.parse(turn.action)
            assert world.mistake(seen, done, done, ended=True) in MISTAKES


def test_a_world_that_breaks_is_no_episode_and_no_reward(world, instances):
    class Broken:
        tries = 0

        async def reset(self, task, seed):
            Broken.tries += 1
            raise EnvError("gone")

    job = Job(*instances[0], 0, 3)
    episodes = []
    policy = ExpertPolicy(world, 1)
    failures = asyncio.run(play([Broken()], [job], policy, episodes.append, world))
    assert not episodes and Broken.tries == ENV_TRIES
    assert [(job, str(error)) for job, error in failures] == [(job, "gone")]


def test_pictures_are_of_the_same_episodes(world, instances):
    if world.pictures(1) is None:
        pytest.skip(f"{world.name} shows nothing")
    task, seed = instances[0]

    async def pictured():
        async with world.open(1) as (plain,), world.pictures(1) as (camera,):
            seen = await camera.reset(task, seed)
            assert seen == await plain.reset(task, seed)
            action = world.expert(task, seed)(seen, []).action
            marks = await camera.marks(action)
            before = await camera.screenshot()
            assert await camera.step(action) == await plain.step(action)
            return marks, before, await camera.screenshot()

    marks, before, after = asyncio.run(pictured())
    assert before.startswith(b"\x89PNG") and before != after
    assert marks and all(len(mark) == 4 for mark in marks)


@pytest.mark.parametrize("name", EXTRAS)
def test_the_panel_of_the_experiments_defaults_is_the_one_in_the_docs(name):
    world = envs.world(name)
    defaults = {"validation": ExperimentOptions.validation, "test": ExperimentOptions.episodes}
    found = panel(world, world.suites["all"], defaults)
    told = [of_split["sha256"][:16] for of_split in found.values()]
    text = (Path(__file__).parents[2] / "docs" / "worlds.md").read_text()
    assert f"| `{name}` | `{told[0]}` | `{told[1]}` |" in text


@pytest.mark.parametrize(
    "name, near", [("miniwub", "miniwob"), ("web", "toy"), ("no.module", "no")]
)
def test_an_unknown_world_is_refused_with_the_nearest_names(name, near):
    with pytest.raises(ValueError, match=near) as error:
        envs.world(name)
    assert "\n" not in str(error.value)


def test_a_world_whose_packages_are_missing_says_which(monkeypatch, tmp_path):
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "world.py").write_text("import a_package_that_nobody_has")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="a_package_that_nobody_has"):
        envs.world("my.world")


def test_resolve_takes_suites_and_tasks_once_each_in_order():
    miniwob = envs.world("miniwob")
    names = ("click-button", "login-user", "click-link")
    assert envs.resolve(miniwob, "report, click-link,click-button") == names
    assert envs.resolve(miniwob, "all") == miniwob.suites["all"]
    for wrong, near in (("click-lnk", "click-link"), ("zzz", "suites are"), (" ,", "no task")):
        with pytest.raises(ValueError, match=near):
            envs.resolve(miniwob, wrong)
