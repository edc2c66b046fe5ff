"""Rollouts: the same jobs are the same episodes, whoever was faster, whatever broke or was killed."""

from collections import Counter
from dataclasses import replace

import pytest
import tiny
import torch
from stairs import JOBS, STEPS, WORLD, Script, Stairs, run

from envs.protocol import EnvError, Observation
from minidpo.acting.jobs import Job
from minidpo.acting.policies import ModelPolicy, RunningEpisode, Sampling
from minidpo.acting.rollout import ENV_TRIES
from minidpo.data import prompt
from minidpo.data.batch import batch_logps, collate
from minidpo.system import processes


def episode_messages(episode):
    return prompt.episode_messages(episode, WORLD.system_prompt)


@pytest.mark.parametrize("small, threads", [(True, 1), (False, 2)])
def test_a_core_is_left_to_the_pages_beside_a_small_model_alone(small, threads, monkeypatch):
    seen = []

    class Counting(Script):
        async def answer(self, page, episode):
            seen.append(torch.get_num_threads())
            return await super().answer(page, episode)

    monkeypatch.setattr(processes, "cores", lambda: 2)
    policy, before = Counting(), torch.get_num_threads()
    policy.spare_core = small
    torch.set_num_threads(2)
    try:
        run([Stairs()], policy=policy)
        assert set(seen) == {threads} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_every_job_is_played_once_and_ends_as_the_page_says():
    episodes, failures = run([Stairs() for _ in range(3)])
    assert Counter(e.key for e in episodes) == Counter(job.key for job in JOBS) and not failures
    assert {e.outcome for e in episodes} >= {"solved", "failed"}
    for e in episodes:
        assert (e.policy, e.sampling, e.instruction) == ("script", {"seed": 7}, f"Climb {e.seed}.")
        assert e.reward == float(e.solved)
        clicked = [turn.action for turn in e.turns if turn.error is None]
        assert e.solved == (len(clicked) >= 3 and clicked[-1] == "CLIMB 3")


def test_the_same_jobs_are_the_same_episodes_whichever_page_is_faster():
    expected = run([Stairs() for _ in range(3)])
    for slowness in [(0, 1, 2), (500, 0, 3), (0,), (0,) * 20]:
        assert run([Stairs(n) for n in slowness]) == expected


@pytest.mark.parametrize("moment", [("reset", 0), ("step", 1), ("step", 3)])
def test_an_environment_that_fails_and_recovers_leaves_no_trace(moment):
    script = Script(["next"])
    expected, _ = run([Stairs() for _ in range(2)], policy=script)
    broken = Counter(
        {(2, *moment): ENV_TRIES - 1}
    )  # two failures fall on the two episodes of seed 2
    episodes, failures = run([Stairs(broken=broken) for _ in range(2)], policy=Script(["next"]))
    assert not failures and not any(broken.values()) and episodes == expected


@pytest.mark.parametrize("moment", [("reset", 0), ("step", 1), ("step", 3)])
def test_an_environment_that_goes_on_failing_is_counted_and_never_an_episode(moment):
    broken = Counter({(2, *moment): 10**6})
    episodes, failures = run([Stairs(broken=broken) for _ in range(2)], policy=Script(["next"]))
    assert sorted(job for job, _ in failures) == [job for job in JOBS if job.seed == 2]
    assert all(str(error) == "the stairs broke" for _, error in failures)
    assert 10**6 - broken[2, *moment] == 2 * ENV_TRIES
    assert [e.key for e in episodes] == [job.key for job in JOBS if job.seed != 2]


class Shared(Stairs):
    """A page in a browser with others: where one of them breaks, what all the others play is lost with it."""

    falls = 0  # of the browser of all pages

    async def reset(self, task: str, seed: int) -> Observation:
        self.seen = Shared.falls
        return await super().reset(task, seed)

    async def _look(self, moment: str, error: str | None = None) -> Observation:
        try:
            observation = await super()._look(moment, error)
        except EnvError:
            Shared.falls += 1
            raise
        if self.seen != Shared.falls:
            raise EnvError("the browser ended, and this episode with it")
        return observation


def test_a_page_that_ends_its_browser_each_time_costs_no_other_episode():
    jobs = [Job("stairs", seed, 0, 8) for seed in range(16)]
    Shared.falls, broken = 0, Counter({(7, "step", 1): 10**6})
    episodes, failures = run(
        [Shared(slowness, broken) for slowness in range(16)], jobs, Script(("next",))
    )
    assert Shared.falls == ENV_TRIES
    assert [job.seed for job, _ in failures] == [7]
    assert [episode.seed for episode in episodes] == [seed for seed in range(16) if seed != 7]


def test_the_same_on_the_same_page_for_the_third_time_ends_the_episode():
    (episode,), _ = run([Stairs()], [Job("stairs", 1, 0, 8)], Script(["9"]))
    assert (len(episode.turns), episode.outcome, episode.reward) == (3, "limit", 0.0)
    given = ("action: CLIMB 9",) * 4  # what was said before is no fault of this policy
    (episode,), _ = run([Stairs()], [Job("stairs", 1, 0, 9, given)], Script(["next"]))
    assert (len(episode.turns), episode.outcome) == (7, "solved")


# a model as the policy


def sampler(sampling=Sampling(max_new_tokens=7), **changes):
    model = tiny.model(intermediate_size=64)
    options = {"seed": 3, "pages": 3, **changes}
    return ModelPolicy(model, tiny.chat(), "tiny", WORLD.system_prompt, sampling, **options)


SHORT = [Job("stairs", seed, index, 3) for seed in range(2) for index in range(2)]


@pytest.fixture(scope="module")
def sampled():
    return run([Stairs() for _ in range(3)], SHORT, sampler())[0]


def test_each_task_seed_index_and_turn_has_its_own_random_numbers():
    policy, seen = sampler(), Observation("instruction", "page")

    def numbers(task="a", seed=1, index=0, turns=0, forgotten=0):
        return policy._uniforms(
            RunningEpisode(Job(task, seed, index, 9), seen, [None] * turns, forgotten)
        )

    changes = [{}, {"task": "b"}, {"seed": 2}, {"index": 1}, {"turns": 1}, {"turns": 2}]
    several = [numbers(**change) for change in changes]
    assert len(set(several)) == 6 and numbers() == several[0]
    assert numbers(turns=1, forgotten=1) == numbers(
        turns=2
    )  # a turn that was forgotten was one, too


def test_a_models_episodes_do_not_depend_on_the_number_of_pages_but_on_seed_and_index(sampled):
    alone, _ = run([Stairs()], SHORT, sampler(pages=1))
    assert [[t.ids for t in e.turns] for e in alone] == [[t.ids for t in e.turns] for e in sampled]
    for slowness in [(0, 1, 2), (50, 0, 3)]:  # to the last bit, whichever page is faster
        assert run([Stairs(n) for n in slowness], SHORT, sampler())[0] == sampled
    assert len({tuple(t.ids for t in e.turns) for e in sampled}) == len(SHORT)
    other, _ = run([Stairs()], SHORT[:1], sampler(seed=4))
    assert [t.ids for t in other[0].turns] != [t.ids for t in sampled[0].turns]
    assert sampled[0].sampling == {"temperature": 1.0, "top_p": 1.0, "seed": 3, "max_new_tokens": 7}


def test_each_episode_of_a_group_has_its_temperature_and_the_file_says_so(sampled):
    dealt, greedy = (
        run([Stairs() for _ in range(3)], SHORT, sampler(Sampling(max_new_tokens=7, **sampling)))[0]
        for sampling in ({"temperatures": (0.0, 1.0)}, {"temperature": 0.0})
    )
    said = [
        [tuple(t.ids for t in e.turns) for e in episodes] for episodes in (dealt, greedy, sampled)
    ]
    assert said[0] == [said[1 + e.index][n] for n, e in enumerate(dealt)] and said[1] != said[2]
    assert dealt[0].sampling["temperatures"] == [0.0, 1.0] and {e.index for e in dealt} == {0, 1}


def test_a_model_reads_the_examples_and_is_not_asked_where_they_leave_no_room(sampled):
    shots = ("task: an example\npage:\nover there", tiny.CLICK_1)
    behind, _ = run([Stairs()], [SHORT[0]._replace(shots=shots)], sampler())
    assert behind[0].shots == shots and behind[0].said != sampled[0].said
    first = tiny.chat().prompt(episode_messages(behind[0])[: -2 * len(behind[0].turns) + 1])
    assert (
        behind[0].cost.tokens_read
        > len(first)
        > len(tiny.chat().prompt(episode_messages(sampled[0])[:2]))
    )
    with pytest.raises(
        ValueError, match="stairs: examples and first page take .* ask for fewer --shots"
    ):
        run([Stairs()], [SHORT[0]._replace(shots=shots * 30)], sampler())


def test_an_episode_knows_what_it_cost(sampled):
    for episode in sampled:
        *before, last = (len(turn.ids) for turn in episode.turns)
        shown = len(tiny.chat().prompt(episode_messages(episode)[:-1]))
        assert episode.cost.tokens_read == shown - sum(before)
        assert episode.cost.tokens_written == sum(before) + last
        assert episode.cost.model_s > 0


def test_what_goes_wrong_in_the_model_ends_the_rollout_and_the_policy_can_be_used_again(sampled):
    policy = sampler()
    step, policy.sampler.step = policy.sampler.step, lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run([Stairs() for _ in range(3)], SHORT, policy)
    policy.sampler.step = step
    assert run([Stairs(n) for n in (0, 50, 50)], SHORT, policy)[0] == sampled


def test_training_reads_the_very_tokens_and_log_probs_that_were_sampled(sampled):
    """Across turns, with caches and pasts on one side and one plain pass on the other."""
    for episode in sampled:
        assert len(episode.turns) == 3 and all(turn.error for turn in episode.turns)
        batch = collate([[tiny.chat().dialogue(episode_messages(episode))]])
        assert batch.targets.tolist() == [i for turn in episode.turns for i in turn.ids]
        logps = [lp for turn in episode.turns for lp in turn.logps]
        assert batch_logps(tiny.model(intermediate_size=64), batch).tolist() == pytest.approx(
            logps, abs=1e-4
        )


def test_an_episode_that_outgrows_the_context_ends_at_its_limit(sampled):
    turn_ends = [
        len(tiny.chat().dialogue(episode_messages(sampled[0])[: 2 + 2 * n]).ids) for n in range(3)
    ]
    policy = sampler()
    policy.max_context = turn_ends[1] + 40
    (episode,), _ = run([Stairs()], SHORT[:1], policy)
    assert (len(episode.turns), episode.outcome) == (2, "limit")
    assert [turn.ids for turn in episode.turns] == [turn.ids for turn in sampled[0].turns[:2]]


@pytest.mark.parametrize("given", range(4))
def test_forced_answers_come_first_and_the_policy_goes_on_behind_them(given):
    jobs = [Job("stairs", seed, 0, 8, STEPS[:given]) for seed in range(3)]
    policy = Script(["next"])
    episodes, _ = run([Stairs() for _ in range(2)], jobs, policy)
    free, _ = run([Stairs()], [job._replace(forced=()) for job in jobs], Script(["next"]))
    for episode, same in zip(episodes, free):
        assert (
            episode.forced == given and replace(episode, forced=0) == same
        )  # it is the agent's own way
    assert len(policy.shown) == 3 * (3 - given)
