"""Pictures of episodes. An episode is played again, because the same actions give the same pages."""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from tqdm import tqdm

from envs.actions import Action, parse
from envs.miniwob.browser.driver import Browser, MiniWoB
from envs.protocol import EnvError

PAGES = 4  # on two cores a picture takes 40 ms on one page, 12 on four and as much on six


class Shot(NamedTuple):
    """A page as it was before a turn, or at the end."""

    text: str  # the observation
    png: bytes
    marks: list[list[int]]  # left, top, width, height of all that the turn's action uses


def photograph(plays: Sequence[tuple[str, int, Sequence[str | None]]]) -> list[list[Shot] | None]:
    """The pages of each play, one before each of its turns and one at the end; None if the browser failed.

    A play is a task, a seed, and the action of each turn, None where an answer held none. Raises EnvError if
    no browser can be started.
    """
    return asyncio.run(_photograph_all(plays)) if plays else []


async def _photograph_all(plays: Sequence[tuple]) -> list[list[Shot] | None]:
    shots: list[list[Shot] | None] = [None] * len(plays)
    waiting = deque(enumerate(plays))
    bar = tqdm(total=len(plays), desc="pictures for the report", unit="episode")

    async def one_after_another(env: MiniWoB) -> None:
        while waiting:
            place, play = waiting.popleft()
            try:
                shots[place] = await shots_of(env, *play)
            except EnvError:
                pass  # this play has no pictures, the others may
            bar.update()

    with bar:
        async with Browser(pages=min(PAGES, len(plays))) as browser:
            await asyncio.gather(*map(one_after_another, browser.envs))
    return shots


async def shots_of(
    env: MiniWoB, task: str, seed: int, actions: Sequence[str | None]
) -> list[Shot]:
    """The pages of one play."""
    seen, shots = await env.reset(task, seed), []
    for text in actions:
        action = parse(text) if text else None
        boxes = await marks(env, action) if action else []
        shots.append(Shot(seen.text, await env.screenshot(), boxes))
        if action:
            seen = await env.step(action)
    return [*shots, Shot(seen.text, await env.screenshot(), [])]


async def marks(env: MiniWoB, action: Action) -> list[list[int]]:
    """Left, top, width and height of what the action is about to use; a place of its own has no size."""
    boxes = [await env.where(action[name]) for name in ("ref", "to") if name in action]
    place = [[action["x"], action["y"], 0, 0]] if "x" in action else []
    return [box for box in boxes if box is not None] + place
