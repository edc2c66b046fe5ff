"""What the report shows besides numbers: episodes with pictures, and pairs token by token.

An episode is the same each time it is played, so pictures of it can be taken afterwards by repeating its
actions. If the world has no pictures, or its browser is missing, the report shows episodes as text.
"""

import asyncio
import base64
import contextlib
import struct
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from envs.protocol import Camera, EnvError, World
from minidpo.data.episodes import Episode, grouped
from minidpo.data.pairs import Pair
from minidpo.data.prompt import thought
from minidpo.learning.explain import Token, movements
from minidpo.memory.context import Context
from minidpo.results.circumstances import made_by
from minidpo.results.report import render
from minidpo.results.success import newest_comparison
from minidpo.system.files import write_text

INSTANCES = 60  # with pictures of two agents on MiniWoB++ these take about 5 MB
PAGES = 4  # on two cores a picture takes 40 ms on one page, 12 on four and as much on six
PAIRS = 12


def write_report(
    path: Path,
    result: dict,
    episodes: Mapping[str, Sequence[Episode]],
    *,
    world: World,
    title: str,
    about: str,
    settings: Mapping[str, object],
    curves: Mapping[str, Sequence[dict]] = {},
    pairs: Sequence[dict] = (),
) -> None:
    """Write report.html: a result, some of the agents' episodes, and the rest that `report.render` describes.

    episodes: {agent: episodes} in the order of the result. pairs: from `shown_pairs`.
    """
    played, telling = telling_instances(episodes)
    comparison = newest_comparison(result)
    data = {
        "title": title,
        "headline": result.get("headline", ""),
        "about": f"{about}. {made_by(result)}",
        "results": result["agents"],
        "gain_points": comparison.get("gain_points"),
        "p_value": comparison.get("p_value"),
        "comparisons": result.get("comparisons", []),
        "instances": with_pictures(world, telling[:INSTANCES]),
        "played": played,
        "curves": curves,
        "pairs": pairs,
        "settings": settings,
        "seconds": result.get("seconds", {}),
    }
    write_text(path, render(data))


def telling_instances(
    episodes: Mapping[str, Sequence[Episode]],
) -> tuple[int, list[dict[str, Episode]]]:
    """The number of instances that all agents played, and those to show as {agent: episode}, most telling first.

    For each task: the first that the last agent solved and the one before it did not; then the other way round; then
    one that neither solved; then one that both solved. With few tasks, there are more of each kind.
    """
    by_key = {name: {e.key: e for e in played} for name, played in episodes.items()}
    last = [*by_key.values()][-1]
    before = [*by_key.values()][-2:][0]  # the same agent if there is only one
    keys = [key for key in before if all(key in played for played in by_key.values())]
    order = [(False, True), (True, False), (False, False), (True, True)]
    kinds = grouped(keys, lambda key: (order.index((before[key].solved, last[key].solved)), key[0]))
    each = max(1, 12 // max(1, len({task for _, task in kinds})))
    ranked = sorted(kinds, key=lambda kind: kind[0])  # stable: tasks stay in their order
    shown = by_turns(kinds[kind][:each] for kind in ranked)
    return len(keys), [{name: played[key] for name, played in by_key.items()} for key in shown]


def by_turns(groups: Iterable[Sequence]) -> list:
    """The first of each group, then the second of each, and so on.

    >>> by_turns(["ad", "b", "ce"])
    ['a', 'b', 'c', 'd', 'e']
    """
    return [item for row in zip_longest(*groups) for item in row if item is not None]


class Shot(NamedTuple):
    """A page as it was before a turn, or at the end."""

    text: str  # the observation
    png: bytes
    marks: list[list[int]]  # left, top, width, height of each element that the turn's action uses


def with_pictures(world: World, telling: Sequence[Mapping[str, Episode]]) -> list[dict]:
    """Instances for `report.render`, with pictures if the world has any."""
    episodes = [episode for instance in telling for episode in instance.values()]
    shots: list[list[Shot] | None] = [None] * len(episodes)
    cameras = world.pictures(min(PAGES, len(episodes))) if episodes else None
    if cameras is not None:
        try:
            shots = asyncio.run(photograph_all(world, cameras, episodes))
        except EnvError as error:
            print(f"the report has no pictures: {error}")
        else:
            if lost := shots.count(None):
                print(f"the report lacks the pictures of {lost} of {len(shots)} episodes")
    taken = iter(shots)
    return [
        shown_instance({name: (episode, next(taken)) for name, episode in instance.items()})
        for instance in telling
    ]


async def photograph_all(
    world: World, cameras: AbstractAsyncContextManager, episodes: Sequence[Episode]
) -> list[list[Shot] | None]:
    """The pages of each episode, or None if the world failed."""
    shots: list[list[Shot] | None] = [None] * len(episodes)
    waiting = deque(enumerate(episodes))
    bar = tqdm(total=len(episodes), desc="pictures for the report", unit="episode")

    async def one_after_another(camera: Camera) -> None:
        while waiting:
            place, episode = waiting.popleft()
            with contextlib.suppress(EnvError):
                shots[place] = await photograph(world, camera, episode)
            bar.update()

    with bar:
        async with cameras as opened:
            await asyncio.gather(*map(one_after_another, opened))
    return shots


async def photograph(world: World, camera: Camera, episode: Episode) -> list[Shot]:
    """Replay an episode and photograph the page before each of its turns and at the end."""
    seen, shots = await camera.reset(episode.task, episode.seed), []
    for turn in episode.turns:
        action = world.parse(turn.action) if turn.action else None
        marks = await camera.marks(action) if action else []
        shots.append(Shot(seen.text, await camera.screenshot(), marks))
        if action:
            seen = await camera.step(action)
    return [*shots, Shot(seen.text, await camera.screenshot(), [])]


def shown_instance(played: Mapping[str, tuple[Episode, Sequence[Shot] | None]]) -> dict:
    """One instance: each agent's turns, with the page before each turn and at the end.

    `pictures` are PNGs in base64 without repetition; `size` is their width and height. Each agent's `turns` and `final`
    hold the number of a picture, or None if the page was not the one that the agent saw. `marks` are boxes around the
    elements that a turn's action uses.
    """
    pictures: dict[bytes, int] = {}
    shown = {}
    for name, (episode, shots) in played.items():
        seen = list(shots or ())
        same = [shot.text == turn.observation for shot, turn in zip(seen, episode.turns)]
        if False in same:
            seen = seen[: same.index(False)]  # the shots until a page differs
        numbers = [pictures.setdefault(shot.png, len(pictures)) for shot in seen]
        numbers += [None] * (len(episode.turns) + 1 - len(seen))
        turns = [
            {
                "observation": turn.observation,
                "answer": turn.answer,
                "action": turn.action,
                "thought": thought(turn.answer),
                "error": turn.error,
                "picture": numbers[n],
                "marks": seen[n].marks if n < len(seen) else [],
            }
            for n, turn in enumerate(episode.turns)
        ]
        shown[name] = {
            "outcome": episode.outcome,
            "reward": episode.reward,
            "turns": turns,
            "final": numbers[-1],
        }
    first, _ = next(iter(played.values()))
    return {
        "task": first.task,
        "seed": first.seed,
        "instruction": first.instruction,
        "pictures": [base64.b64encode(png).decode() for png in pictures],
        "size": png_size(next(iter(pictures))) if pictures else None,
        "episodes": shown,
    }


def png_size(png: bytes) -> tuple[int, int]:
    """Width and height in pixels, which follow the signature and the header's length and name."""
    return struct.unpack(">II", png[16:24])


def shown_pairs(
    context: Context,
    pairs: Sequence[Pair],
    before: Path,
    after: Path,
    *,
    agents: tuple[str, str],
    until: str = "end",
) -> list[dict]:
    """Some of a training's pairs for `report.render`, with each token's log-prob under two adapters.

    The first pair of each task comes first, then the second of each, PAIRS in all. agents: the names of the
    adapters `before` and `after`. until: where training cut the pairs.
    """
    some = by_turns(grouped(pairs, lambda pair: pair.chosen.task).values())[:PAIRS]
    if not some:
        return []
    shown = []
    for pair, tokens in zip(some, movements(context, before, after, some), strict=True):
        row = {
            "task": pair.chosen.task,
            "seed": pair.chosen.seed,
            "source": pair.source,
            "until": until,
            "agents": list(agents),
        }
        for side, episode in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            row[side] = {"outcome": episode.outcome, "tokens": token_rows(tokens[side])}
        shown.append(row)
    return shown


def token_rows(tokens: Sequence[Token]) -> list[list]:
    """Rows of text, turn, log-prob before, log-prob after. Neighbouring tokens of others than the agent are joined."""
    rows: list[list] = []
    for text, turn, before, after in tokens:
        if turn >= 0:
            rows.append([text, turn, round(before, 4), round(after, 4)])
        elif rows and rows[-1][1] < 0:
            rows[-1][0] += text
        else:
            rows.append([text, -1, None, None])
    return rows
