"""A reset leaves nothing of the last episode: on a used page, each episode is what it is on a fresh one.

And every task can end: what its page says of an episode arrives as the episode's outcome.
"""

import asyncio
import random
import re
from collections import deque
from functools import partial

import pytest

from envs.actions import Action
from envs.miniwob.browser.driver import Browser
from envs.miniwob.experts.elements import look
from envs.miniwob.tasks import BY_THE_CLOCK, SEEDS, SUITES
from envs.protocol import Observation, Outcome

SEED = SEEDS["validation"][0]
STEPS = 4
SOME = (
    "buy-ticket",
    "click-button-sequence",
    "click-checkboxes",
    "click-color",
    "click-scroll-list",
    "email-inbox-nl-turk",
    "focus-text-2",
    "login-user",
    "social-media",
    "use-autocomplete",
)


def anything(seen: Observation, rng: random.Random) -> Action:
    """An action on one of the elements, drawn at random."""
    usable = [thing for thing in look(seen) if thing.ref]
    if not usable:
        return Action("CLICK_AT", x=rng.randrange(160), y=rng.randrange(50, 210))
    thing = rng.choice(usable)
    if thing.role == "select":
        return Action("SELECT", ref=thing.ref, option=rng.choice(thing.options))
    if thing.role in ("input", "textarea"):
        return Action("TYPE", ref=thing.ref, text=rng.choice(("a", "12", "Old text")))
    return Action("CLICK", ref=thing.ref)


async def episode(env, task: str, seed: int) -> list[Observation]:
    """All that is seen of an episode of random actions, the same ones whenever the same is seen."""
    rng, seen = random.Random(seed), [await env.reset(task, seed)]
    while seen[-1].outcome is None and len(seen) <= STEPS:
        seen.append(await env.step(anything(seen[-1], rng)))
    return seen


async def differences(env, task: str, several: int) -> list[str]:
    """Where an episode on the page that others have used differs from the same one in a new tab."""
    seeds, fresh = range(SEED, SEED + several), {}
    for seed in seeds:
        await env.close()
        fresh[seed] = await episode(env, task, seed)
    found = []
    for seed in [*seeds, *reversed(seeds)]:
        for step, (new, used) in enumerate(zip(fresh[seed], await episode(env, task, seed))):
            if new != used:
                found.append(
                    f"{task} seed {seed}, after {step} actions:\nfresh {new}\nused  {used}"
                )
                break
    return found


async def lost_verdicts(env, task: str) -> list[str]:
    """What the page says of the episode and nobody hears."""
    found = []
    for reward, outcome in ((-1.0, Outcome.FAILED), (1.0, Outcome.SOLVED)):
        before = await env.reset(task, SEED)
        await env._page._tab.evaluate("reward => core.endEpisode(reward, false)", reward)
        after = await env.step(Action("CLICK_AT", x=0, y=0))
        if (before.outcome, after.outcome, after.reward) != (None, outcome, reward):
            found.append(
                f"{task}: {reward} became {after.outcome} {after.reward}, after {before.outcome}"
            )
    return found


def all_found(look, tasks) -> list[str]:
    """What `look` finds on each task, on four pages at once."""
    waiting, found = deque(tasks), []

    async def work(env):
        while waiting:
            found.extend(await look(env, waiting.popleft()))

    async def work_together():
        async with Browser(pages=4) as browser:
            await asyncio.gather(*map(work, browser.envs))

    asyncio.run(work_together())
    return found


@pytest.mark.parametrize(
    "tasks, several",
    [(SOME, 2), pytest.param(SUITES["all"], 5, marks=pytest.mark.slow)],
    ids=["some tasks", "all tasks"],
)
def test_an_episode_is_the_same_on_a_used_page_as_on_a_fresh_one(tasks, several):
    found = all_found(partial(differences, several=several), sorted(set(tasks) - set(BY_THE_CLOCK)))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "tasks", [SOME, pytest.param(tuple(set(SUITES["all"]) - set(SOME)), marks=pytest.mark.slow)],
    ids=["some tasks", "all others"],
)  # fmt: skip
def test_what_a_page_says_of_an_episode_is_its_outcome(tasks):
    found = all_found(lost_verdicts, sorted(tasks))
    assert not found, "\n".join(found)


def test_a_new_page_hears_nothing_before_its_first_episode():
    async def heard():
        async with Browser(pages=1) as browser:
            (env,) = browser.envs
            await env.reset("click-test", SEED)
            await env._page.load("click-test")
            count = "() => { window.heard = 0; onmousedown = onclick = () => { heard++; }; }"
            await env._page._tab.evaluate(count)
            counts = []
            for _ in range(2):
                await env._page.reset(SEED)
                counts.append(await env._page._tab.evaluate("heard"))
            return counts

    assert asyncio.run(heard()) == [0, 2]


def test_a_reward_that_is_no_number_is_a_failure():
    """bisect-angle divides 0 by 0 where the dot lies on the corner of the angle."""

    async def play():
        async with Browser(pages=1) as browser:
            (env,) = browser.envs
            page = (await env.reset("bisect-angle", SEED)).text
            x, y = map(int, re.search(r'blue circle" at (\d+),(\d+)', page).groups())
            seen = await env.step(Action("CLICK_AT", x=x - 2, y=y - 2))
            (button,) = look(seen, "button")
            return await env.step(Action("CLICK", ref=button.ref))

    seen = asyncio.run(play())
    assert seen.outcome is Outcome.FAILED and seen.reward == -1
