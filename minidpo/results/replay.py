"""What the report shows besides numbers: episodes once more on the real page, and what became of pairs.

An episode is the same each time it is played, so its actions are enough to take its pictures afterwards.
Used by `evaluate.py` and `minidpo/loop.py`.
"""

import asyncio
import base64
import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from envs.actions import Action
from envs.actions import parse as parse_action
from envs.miniwob.browser.driver import Browser, MiniWoB
from envs.protocol import EnvError
from minidpo.config import DPO
from minidpo.data.episodes import Episode, read
from minidpo.data.pairs import Pair
from minidpo.data.prompt import thought
from minidpo.learning.explain import Token, movements
from minidpo.learning.preferences import where_cut
from minidpo.learning.sft import adapter_sha256
from minidpo.memory.machine import Machine
from minidpo.results.report import write_report
from minidpo.results.success import newest, read_result
from minidpo.system.run_folder import read_settings, records

PAGES = 4  # on two cores a picture takes 40 ms on one page, 12 on four and as much on six
BYTES = 14_000_000  # of pictures and texts, of the report's 20 MB
PAIRS = 12


def report(path: Path, title: str, result: dict, episodes: dict[str, list[Episode]], settings: dict,
           seconds: dict[str, float], curves: dict[str, list[dict]], pairs: Sequence[dict] = ()) -> None:
    """report.html, with the pictures of some instances that all agents have played."""
    played, shown = telling(episodes)
    instances = []
    try:
        instances, failed = asyncio.run(replay(shown)) if shown else ([], 0)
        if failed:
            print(f"the report lacks {failed} of {len(shown)} instances: the browser failed")
    except EnvError as error:
        print(f"the report has no pictures: {error}")
    comparison = newest(result)
    write_report(path, {
        "title": title, "results": {name: result[name] for name in episodes},
        "gain_points": comparison.get("gain_points"), "p_value": comparison.get("p_value"),
        "comparisons": result.get("comparisons", []),
        "seconds": seconds, "settings": settings, "curves": curves, "instances": instances,
        "played": played, "pairs": list(pairs)})


def telling(episodes: dict[str, list[Episode]]) -> tuple[int, list[dict[str, Episode]]]:
    """How many instances all agents have played, and those that the report shows, the most telling first.

    Of each task the first that the last agent solved and the one before it did not, then the other way
    round, that neither solved, that both solved; of less than a dozen tasks more than the first.
    """
    by_key = {name: {e.key: e for e in played} for name, played in episodes.items()}
    newest_two = list(by_key.values())[-2:]
    before, last = newest_two[0], newest_two[-1]  # one agent alone is both
    keys = [key for key in before if all(key in played for played in by_key.values())]
    kinds: dict[tuple, list] = {}
    for key in keys:
        kinds.setdefault(((before[key].solved, last[key].solved), key[0]), []).append(key)
    each = max(1, 12 // len({key[0] for key in keys})) if keys else 1
    order = [(False, True), (True, False), (False, False), (True, True)]
    ranked = sorted(kinds, key=lambda kind: order.index(kind[0]))  # stable: tasks stay in their order
    return len(keys), [{name: played[key] for name, played in by_key.items()}
                       for n in range(each) for kind in ranked for key in kinds[kind][n:n + 1]]


async def replay(shown: Sequence[dict[str, Episode]]) -> tuple[list[dict], int]:
    """Each instance as `photograph` gives it, as far as BYTES go, and how many a browser failed to show."""
    waiting, taken, used, failed = deque(enumerate(shown)), {}, 0, 0
    bar = tqdm(total=len(shown), desc="pictures for the report", unit="instance")

    async def one_after_another(env: MiniWoB) -> None:
        nonlocal used, failed
        while waiting and used < BYTES:
            place, episodes = waiting.popleft()
            try:
                taken[place] = await photograph(env, episodes)
                used += len(json.dumps(taken[place]))
            except EnvError:
                failed += 1
            bar.update()

    with bar:
        async with Browser(pages=min(PAGES, len(shown))) as browser:
            await asyncio.gather(*map(one_after_another, browser.envs))
    return [taken[place] for place in sorted(taken)], failed


async def photograph(env: MiniWoB, episodes: dict[str, Episode]) -> dict:
    """One instance: of each agent the turns, with the page before each and at the end, all pictures once.

    `task`, `seed`, `instruction`, `pictures` (PNG in base64) and `episodes`: {policy: `outcome`, `reward`,
    `turns` and `final`, the number of its last picture}; a turn is `observation`, `answer`, `thought`,
    `action`, `error`, `picture` (its number) and `marks`: boxes around what the action uses. A page that is
    not the one that the agent saw is not shown: its picture is None.
    """
    pictures: list[str] = []
    after: dict[tuple[str, ...], int] = {}  # these actions
    played = {}

    async def picture(done: tuple[str, ...]) -> int:
        if done not in after:
            pictures.append(base64.b64encode(await env.screenshot()).decode())
            after[done] = len(pictures) - 1
        return after[done]

    for name, episode in episodes.items():
        seen, done, turns, same = await env.reset(episode.task, episode.seed), (), [], True
        for turn in episode.turns:
            same = same and seen.text == turn.observation
            action = parse_action(turn.action) if turn.action else None
            turns.append({"observation": turn.observation, "answer": turn.answer, "action": turn.action,
                          "thought": thought(turn.answer), "error": turn.error,
                          "picture": await picture(done) if same else None,
                          "marks": await marks(env, action) if same and action else []})
            if action:
                seen, done = await env.step(action), (*done, turn.action)
        played[name] = {"outcome": episode.outcome, "reward": episode.reward, "turns": turns,
                        "final": await picture(done) if same else None}
    any_of = episodes[name]
    return {"task": any_of.task, "seed": any_of.seed, "instruction": any_of.instruction,
            "pictures": pictures, "episodes": played}


async def marks(env: MiniWoB, action: Action) -> list[list[int]]:
    """Left, top, width and height of what the action is about to use; a place on a canvas has no size."""
    if action.command == "CLICK_AT":
        return [[action["x"], action["y"], 0, 0]]
    boxes = [await env.where(action[name]) for name in ("ref", "to") if name in action]
    return [box for box in boxes if box is not None]


# ---- how agents were trained ----


def training_of(adapter: Path | None) -> Path | None:
    """The run folder that an adapter was trained in, if it lies there; of a loop, of the round it kept."""
    if adapter is None or not adapter.is_dir() or not (adapter.parent / "config.json").is_file():
        return None
    folder = adapter.parent
    begun = read_settings(folder)
    if "rounds" in begun and (folder / "result.json").is_file():
        return folder / f"round-{read_result(folder / 'result.json')['kept_round']}" / begun["learn"]
    return folder if "data" in begun else None  # a model's folder has a config.json, too


def trainings(adapters: dict[str, Path | None], model: str,
              machine: Machine) -> tuple[dict, dict[str, list[dict]], list[dict]]:
    """What lies beside adapters of how they were trained, for the report; what is gone is told and left out.

    The `loss` of the agent `dpo`, if it is known; the curves of each; and, of the last that was trained on
    pairs, some of these with `agents`, the names of what it began from and of itself.
    """
    about, curves, pairs, last = {}, {}, [], None
    for name, adapter in adapters.items():
        try:
            if (folder := training_of(adapter)) is None:
                continue
            begun, curves[name] = read_settings(folder), records(folder)
        except ValueError as error:
            print(f"the report lacks the training of {name}: {error}")
            continue
        if "dpo" in begun and begun["dpo"]["pairs"] != "unpaired":
            last = name, folder, begun
        if "dpo" in begun and name == "dpo":
            about["loss"] = begun["dpo"]["loss"]
    if last is None:
        return about, curves, []
    name, folder, begun = last
    before = Path(begun["adapter"])
    try:
        if (now := adapter_sha256(before)) != begun.get("adapter_sha256", now):
            raise ValueError(f"{before} is no longer the adapter that {folder} began from")
        pairs = moved(folder, model, machine, before, adapters[name])
    except (OSError, ValueError) as error:
        print(f"the report has no pairs: {error}")
    known = (other for other, path in adapters.items() if path and path.resolve() == before.resolve())
    agents = [next(known, str(before)), name]
    return about, curves, [{**pair, "agents": agents} for pair in pairs]


# ---- pairs ----


def trained_pairs(folder: Path) -> list[Pair]:
    """The pairs that a DPO run was trained on, from what it recorded; KTO's two columns are no pairs.

    Raises ValueError if its data no longer hold them.
    """
    config = read_settings(folder)  # its version stands for all that lies in the folder, pairs.jsonl too
    files = [*config["data"], *([config["golden"]] if config["golden"] else [])]

    def key(of: dict) -> tuple:
        return tuple(of[name] for name in ("task", "seed", "policy", "index", "forced"))

    episodes = {key(vars(e)): e for path in files for e in read(path)}
    pairs = []
    for record in map(json.loads, (folder / "pairs.jsonl").read_text(encoding="utf-8").splitlines()):
        if record["source"] != "unpaired":
            sides = [record["chosen"], record["rejected"]]
            if not all(key(side) in episodes for side in sides):
                raise ValueError(f"{files[0]} no longer holds the episodes that {folder} was trained on")
            pairs.append(Pair(*(replace(episodes[key(side)], turns=episodes[key(side)].turns[:side["turns"]])
                                for side in sides), record["source"]))
    return pairs


def spread(pairs: Iterable[Pair], count: int) -> list[Pair]:
    """The first of each task, then the second of each, until there are so many."""
    of: dict[str, list[Pair]] = {}
    for pair in pairs:
        of.setdefault(pair.chosen.task, []).append(pair)
    ranked = [(n, pair) for own in of.values() for n, pair in enumerate(own)]
    return [pair for _, pair in sorted(ranked, key=lambda both: both[0])][:count]


def moved(folder: Path, model: str, machine: Machine, before: Path, after: Path) -> list[dict]:
    """Some of a run's pairs as the report shows them: each token's log-prob under two adapters."""
    pairs = spread(trained_pairs(folder), PAIRS)
    if not pairs:
        return []
    until = where_cut(DPO(**read_settings(folder)["dpo"]))
    return [{"task": pair.chosen.task, "seed": pair.chosen.seed, "source": pair.source, "until": until,
             **{name: {"outcome": episode.outcome, "index": episode.index, "tokens": folded(tokens[name])}
                for name, episode in (("chosen", pair.chosen), ("rejected", pair.rejected))}}
            for pair, tokens in zip(pairs, movements(model, machine, before, after, pairs))]


def folded(tokens: Sequence[Token]) -> list[list]:
    """Rows of text, turn, before, after; neighbours that the agent did not write are one row."""
    rows: list[list] = []
    for text, turn, before, after in tokens:
        if turn >= 0:
            rows.append([text, turn, round(before, 4), round(after, 4)])
        elif rows and rows[-1][1] < 0:
            rows[-1][0] += text
        else:
            rows.append([text, -1, None, None])
    return rows
