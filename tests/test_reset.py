"""A reset leaves nothing of the last episode: on a used page, each episode is what it is on a fresh one."""
import asyncio
import random
from collections import deque

import pytest

from envs.actions import Action
from envs.miniwob.browser import Browser
from envs.miniwob.elements import look
from envs.miniwob.tasks import SEEDS, SUITES
from envs.protocol import Observation

SEED = SEEDS["validation"][0]
STEPS, SEVERAL = 4, 5
NOT_THE_SAME = {"stock-market": "its price moves every 100 ms by the wall clock"}
"Tasks of which an episode may differ from itself, and why."
SOME = (
    "ascending-numbers", "buy-ticket", "choose-date-medium", "click-button-sequence", "click-checkboxes",
    "click-collapsible-2", "click-color", "click-scroll-list", "click-shape", "count-sides",
    "email-inbox-nl-turk", "focus-text-2", "login-user", "social-media", "use-autocomplete",
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


async def differences(env, task: str) -> list[str]:
    """Where an episode on the page that others have used differs from the same one in a new tab."""
    seeds, fresh = range(SEED, SEED + SEVERAL), {}
    for seed in seeds:
        await env.close()
        fresh[seed] = await episode(env, task, seed)
    found = []
    for seed in [*seeds, *reversed(seeds)]:
        for step, (new, used) in enumerate(zip(fresh[seed], await episode(env, task, seed))):
            if new != used:
                found.append(f"{task} seed {seed}, after {step} actions:\nfresh {new}\nused  {used}")
                break
    return found


def all_differences(tasks) -> list[str]:
    waiting, found = deque(tasks), []

    async def work(env):
        while waiting:
            found.extend(await differences(env, waiting.popleft()))

    async def work_together():
        async with Browser(pages=4) as browser:
            await asyncio.gather(*map(work, browser.envs))

    asyncio.run(work_together())
    return found


@pytest.mark.parametrize(
    "tasks", [SOME, pytest.param(tuple(set(SUITES["all"]) - set(SOME)), marks=pytest.mark.slow)],
    ids=["some tasks", "all others"],
)
def test_an_episode_is_the_same_on_a_used_page_as_on_a_fresh_one(tasks):
    found = all_differences(sorted(set(tasks) - set(NOT_THE_SAME)))
    assert not found, "\n".join(found)


def test_exceptions_are_tasks():
    assert set(SOME) < set(SUITES["all"]) and set(NOT_THE_SAME) < set(SUITES["all"])
