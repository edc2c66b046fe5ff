"""ScienceWorld and TextWorldExpress: their splits, their experts, and the JVM in which they run."""

import asyncio
import os
import signal

import pytest

import envs
from envs import jvm
from envs.golden import follow
from envs.jvm import Java
from envs.protocol import SPLITS, ActionError, EnvError, Outcome
from envs.scienceworld import think
from minidpo.acting.jobs import make_jobs, split_instances
from minidpo.acting.policies import ExpertPolicy
from minidpo.acting.rollout import play

SCIENCE, EXPRESS = envs.world("scienceworld"), envs.world("textworld_express")
TASK = "lifespan-shortest-lived"


def needed(world):
    """Skip where it cannot be played."""
    try:
        world.require()
    except ValueError as missing:
        pytest.skip(str(missing))


def watched(world, places, script):
    """What `script(places)` returns, in places of the world."""
    needed(world)

    async def in_the_world():
        async with world.open(places) as opened:
            return await script(opened)

    return asyncio.run(in_the_world())


def test_scienceworld_has_etos_test_set_and_a_part_of_each_split_for_every_task():
    assert len(SCIENCE.suites["all"]) == 24
    counts = dict.fromkeys(SPLITS, 0)
    for task in SCIENCE.suites["all"]:
        variations = {split: [*SCIENCE.instances(task, split)] for split in SPLITS}
        counts = {split: count + len(variations[split]) for split, count in counts.items()}
        assert all(len(of_split) >= 2 for of_split in variations.values())
        assert 1 + max(variations["demos"] + variations["rollouts"]) == min(
            variations["validation"]
        )
        assert 1 + max(variations["validation"]) == min(variations["test"])
    assert counts["test"] == 211


def test_the_splits_of_scienceworld_are_the_official_ones():
    needed(SCIENCE)

    def official(game):
        lists = {}
        for task in SCIENCE.suites["all"]:
            game("load", task, 0, "easy", False)
            lists[task] = [
                list(game(f"getVariations{split}")) for split in ("Train", "Dev", "Test")
            ]
        return lists

    for task, (train, dev, test) in jvm_of(SCIENCE).ask(official).items():
        ours = {split: [*SCIENCE.instances(task, split)] for split in SPLITS}
        assert sorted(ours["demos"] + ours["rollouts"]) == train
        assert ours["validation"] == dev and ours["test"] == test[:10]


def jvm_of(world):
    return envs.scienceworld.JAVA if world is SCIENCE else envs.textworld_express.JAVA


def kill(world):
    if process := jvm_of(world).process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("world, task", [(SCIENCE, TASK), (EXPRESS, "peckingorder")])
def test_an_episode_goes_on_after_the_jvm_was_killed(world, task):
    seed = world.instances(task, "validation")[0]

    async def episode(place, kill_before):
        seen, done = [await place.reset(task, seed)], []
        while seen[-1].outcome is None:
            if len(done) == kill_before:
                kill(world)
            done.append(world.expert(task, seed)(seen[-1], done).action)
            seen.append(await place.step(done[-1]))
        return seen

    async def both(places):
        return await episode(places[0], None), await episode(places[0], 2)

    whole, killed = watched(world, 1, both)
    assert killed == whole and whole[-1].outcome == Outcome.SOLVED and len(whole) > 3


@pytest.mark.parametrize("task", ["coin", "twc"])
def test_a_game_that_is_solved_by_walking_is_solved_alike_at_each_start_of_java(task):
    needed(EXPRESS)
    envs.textworld_express.golden_path.cache_clear()
    path = envs.textworld_express.golden_path(task, 0)
    kill(EXPRESS)
    envs.textworld_express.golden_path.cache_clear()
    assert envs.textworld_express.golden_path(task, 0) == path

    async def follow_it(places):
        seen = [await places[0].reset(task, 0)]
        return seen + [await places[0].step(action) for action in path]

    assert max(page.reward for page in watched(EXPRESS, 1, follow_it)) == 1.0


def test_what_goes_by_chance_is_the_same_whatever_is_played_beside_it():
    """Bees fly by chance."""

    async def afternoon(place):
        seen = [await place.reset("grow-fruit", 62), await place.step("teleport to greenhouse")]
        seen.append(await place.step("open bee hive"))
        for _ in range(12):
            seen += [await place.step("wait1"), await place.step("look around")]
        return [observation.text for observation in seen]

    async def together(places):
        return [await afternoon(places[0]), *await asyncio.gather(*map(afternoon, places))]

    alone, *beside = watched(SCIENCE, 2, together)
    assert beside == [alone, alone]
    assert len({text for text in alone if "adult bee" in text}) > 2  # they do fly


def test_a_wrong_focus_fails_and_keeps_the_highest_score_before_it():
    task, seed = "find-animal", SCIENCE.instances("find-animal", "validation")[0]

    async def spoilt(places):
        first = await places[0].reset(task, seed)
        return first, await places[0].step("fly to the moon"), await places[0].step("focus on air")

    first, unknown, last = watched(SCIENCE, 1, spoilt)
    assert 0 < first.reward < 1 and first.outcome is None
    assert unknown.outcome is None and unknown.error is None and unknown.text != first.text
    assert last.outcome == Outcome.FAILED and last.reward == first.reward


def test_a_limit_leaves_the_reward_that_was_reached():
    job = make_jobs(EXPRESS, split_instances(EXPRESS, {"simonsays": 1}, "validation"))[0]
    episodes = []

    async def cut(places):
        cut_job = job._replace(limit=3)
        return await play(places, [cut_job], ExpertPolicy(EXPRESS, 1), episodes.append, EXPRESS)

    assert watched(EXPRESS, 1, cut) == []
    assert (episodes[0].outcome, episodes[0].reward) == ("limit", pytest.approx(3 / 5))


def test_an_episode_goes_on_after_the_jvm_gave_no_answer(monkeypatch):
    monkeypatch.setattr(jvm, "ANSWER_S", 5)
    kill(EXPRESS)  # its connections wait longer

    async def stopped(places):
        first = await places[0].reset("simonsays", 1)
        action = EXPRESS.expert("simonsays", 1)(first, []).action
        os.kill(jvm_of(EXPRESS).process.pid, signal.SIGSTOP)
        return await places[0].step(action)

    assert watched(EXPRESS, 1, stopped).reward == pytest.approx(1 / 5)


def test_a_game_that_does_not_start_is_an_error_of_the_world_and_the_next_episode_plays(
    monkeypatch,
):
    async def broken(places):
        kill(EXPRESS)
        with monkeypatch.context() as patch, pytest.raises(EnvError, match="java") as error:
            patch.setattr(jvm_of(EXPRESS), "jar", "gone.jar")
            await places[0].reset("simonsays", 1)
        assert "\n" not in str(error.value)
        return await places[0].reset("simonsays", 1)

    assert "Simon says" in watched(EXPRESS, 1, broken).text


@pytest.mark.parametrize("says", ['java version "1.7.0_80"', "not java", None])
def test_without_a_java_that_will_do_one_line_says_what_to_do(monkeypatch, tmp_path, says):
    needed(SCIENCE)
    (tmp_path / "bin").mkdir()
    if says:
        (tmp_path / "bin" / "java").write_text(f"#!/bin/sh\necho '{says}' >&2\n")
        (tmp_path / "bin" / "java").chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="setup-worlds") as error:
        SCIENCE.require()
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_a_package_that_is_missing_is_named_as_pip_knows_it():
    with pytest.raises(ValueError, match="pip install no-such-game==1.0") as error:
        Java("no_such_game", "1.0", "x.jar", "x").require()
    assert "\n" not in str(error.value)


def test_an_action_is_one_line_of_some_length():
    assert SCIENCE.parse("  open door ") == "open door"
    for wrong in ("", " ", "a\nb", "look\taround", "a" * 201):
        with pytest.raises(ActionError):
            SCIENCE.parse(wrong)


def test_an_expert_is_lost_where_something_else_was_done():
    seen = envs.protocol.Observation("task", "text")
    expert = follow(lambda: ("a", "b"), lambda text, action: f"{text} {action}")
    assert expert(seen, ["a"]) == ("text b", "b")
    for done in (["b"], ["a", "a"], ["a", "b"]):
        with pytest.raises(LookupError):
            expert(seen, done)


def test_a_thought_says_what_was_read():
    choice = "Which?\n0:\tfocus on apple (in pot 1)\n1:\tfocus on apple (in pot 2)"
    assert "pot 2" in think(choice, "1")
    warm = "the thermometer measures a temperature of -5 degrees celsius"
    assert "-5" in think(warm, "wait1") and "-5" not in think("a door", "wait1")


@pytest.mark.slow
@pytest.mark.parametrize("world", [SCIENCE, EXPRESS], ids=lambda world: world.name)
def test_the_experts_solve_what_fits_the_limit(world):
    """The first test instance of each task. All 211 of ScienceWorld's test set are solved without a limit (measured
    on 2026-11-29), and 13 of boil, melt, freeze and change-the-state-of-matter-of take more steps than theirs."""
    instances = split_instances(world, dict.fromkeys(world.suites["all"], 1), "test")
    module = envs.scienceworld if world is SCIENCE else envs.textworld_express
    episodes = []

    async def all_of_them(places):
        jobs = make_jobs(world, instances)
        return await play(places, jobs, ExpertPolicy(world, 1), episodes.append, world)

    assert watched(world, 2, all_of_them) == []
    assert len(episodes) == len(instances)
    for episode in episodes:
        path = module.golden_path(*episode.instance)
        assert episode.solved or len(path) > world.step_limit(episode.task), episode.name
