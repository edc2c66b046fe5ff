"""What the report shows besides numbers: pictures of episodes, and pairs token by token.

An episode is the same each time it is played, so its actions are enough to take pictures of it afterwards.
What is missing, such as a browser or the data of a training, is printed and left out.
"""

import asyncio
import base64
import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from operator import itemgetter
from pathlib import Path

from tqdm import tqdm

from envs.actions import Action, parse
from envs.miniwob.browser.driver import Browser, MiniWoB
from envs.protocol import EnvError
from minidpo.config import DPO
from minidpo.data.episodes import Episode, grouped, read
from minidpo.data.pairs import Pair, on_from
from minidpo.data.prompt import thought
from minidpo.learning.explain import Token, movements
from minidpo.learning.preferences import pair_loss_of
from minidpo.learning.training_run import adapter_sha256
from minidpo.memory.machine import Machine
from minidpo.results.report import render
from minidpo.results.success import newest_comparison
from minidpo.system.files import write_text
from minidpo.system.result_file import read_result
from minidpo.system.run_folder import read_settings, records

PAGES = 4  # on two cores a picture takes 40 ms on one page, 12 on four and as much on six
BYTES = 14_000_000  # of pictures and texts, of the report's 20 MB
PAIRS = 12


def make_report(path: Path, result: dict, episodes: dict[str, list[Episode]], shown: dict) -> None:
    """Write report.html: a result, pictures of some of the agents' episodes, and what else is `shown`:
    `title`, `settings`, `curves`, `pairs` and `seconds`, as `report.render` explains them."""
    played, telling = telling_instances(episodes)
    instances = []
    try:
        instances, failed = asyncio.run(photograph_all(telling)) if telling else ([], 0)
        if failed:
            print(f"the report lacks {failed} of {len(telling)} instances: the browser failed")
    except EnvError as error:
        print(f"the report has no pictures: {error}")
    comparison = newest_comparison(result)
    write_text(
        path,
        render(
            {
                **shown,
                "results": {name: result["agents"][name] for name in episodes},
                "gain_points": comparison.get("gain_points"),
                "p_value": comparison.get("p_value"),
                "comparisons": result.get("comparisons", []),
                "instances": instances,
                "played": played,
            }
        ),
    )


def telling_instances(episodes: dict[str, list[Episode]]) -> tuple[int, list[dict[str, Episode]]]:
    """How many instances all agents have played, and those to show as {agent: episode}, most telling first.

    For each task: the first that the last agent solved and the one before it did not; then the other way
    round; then one that neither solved; then one that both solved. With few tasks, more of each kind.
    """
    by_key = {name: {e.key: e for e in played} for name, played in episodes.items()}
    newest_two = list(by_key.values())[-2:]
    before, last = newest_two[0], newest_two[-1]  # the same agent if there is only one
    keys = [key for key in before if all(key in played for played in by_key.values())]
    kinds = grouped(
        keys, lambda key: ((before[key].solved, last[key].solved), key[0])
    )  # key[0]: the task
    each = max(1, 12 // max(1, len({key[0] for key in keys})))
    order = [(False, True), (True, False), (False, False), (True, True)]
    ranked = sorted(
        kinds, key=lambda kind: order.index(kind[0])
    )  # stable: tasks stay in their order
    return len(keys), [
        {name: played[key] for name, played in by_key.items()}
        for key in by_turns(kinds[kind][:each] for kind in ranked)
    ]


def by_turns(groups: Iterable[Sequence]) -> list:
    """The first of each group, then the second of each, and so on.

    >>> by_turns(["ad", "b", "ce"])
    ['a', 'b', 'c', 'd', 'e']
    """
    return [item for row in zip_longest(*groups) for item in row if item is not None]


async def photograph_all(shown: Sequence[dict[str, Episode]]) -> tuple[list[dict], int]:
    """Instances as `photograph` returns them, until BYTES are used up; and how many the browser failed on."""
    waiting, photographed, used, failed = deque(enumerate(shown)), {}, 0, 0
    bar = tqdm(total=len(shown), desc="pictures for the report", unit="instance")

    async def one_after_another(env: MiniWoB) -> None:
        nonlocal used, failed
        while waiting and used < BYTES:
            place, episodes = waiting.popleft()
            try:
                photographed[place] = await photograph(env, episodes)
                used += len(json.dumps(photographed[place]))
            except EnvError:
                failed += 1
            bar.update()

    with bar:
        async with Browser(pages=min(PAGES, len(shown))) as browser:
            await asyncio.gather(*map(one_after_another, browser.envs))
    return [photographed[place] for place in sorted(photographed)], failed


async def photograph(env: MiniWoB, episodes: dict[str, Episode]) -> dict:
    """One instance: each agent's turns with the page before each turn and at the end; each picture once.

    `pictures` are PNGs in base64. Each agent's `turns` and `final` name the number of a picture; a page that
    differs from the one the agent saw is None. `marks` are boxes around what a turn's action uses.
    """
    pictures: dict[tuple[str, ...], str] = {}  # by the actions that led to the page
    played = {}

    async def picture(actions: tuple[str, ...]) -> int:
        if actions not in pictures:
            pictures[actions] = base64.b64encode(await env.screenshot()).decode()
        return list(pictures).index(actions)

    for name, episode in episodes.items():
        seen, actions, turns, same = await env.reset(episode.task, episode.seed), (), [], True
        for turn in episode.turns:
            same = same and seen.text == turn.observation
            action = parse(turn.action) if turn.action else None
            turns.append(
                {
                    "observation": turn.observation,
                    "answer": turn.answer,
                    "action": turn.action,
                    "thought": thought(turn.answer),
                    "error": turn.error,
                    "picture": await picture(actions) if same else None,
                    "marks": await marks(env, action) if same and action else [],
                }
            )
            if action:
                seen, actions = await env.step(action), (*actions, turn.action)
        played[name] = {
            "outcome": episode.outcome,
            "reward": episode.reward,
            "turns": turns,
            "final": await picture(actions) if same else None,
        }
    return {
        "task": episode.task,
        "seed": episode.seed,
        "instruction": episode.instruction,
        "pictures": list(pictures.values()),
        "episodes": played,
    }


async def marks(env: MiniWoB, action: Action) -> list[list[int]]:
    """Left, top, width and height of what the action is about to use; a place of its own has no size."""
    boxes = [await env.where(action[name]) for name in ("ref", "to") if name in action]
    place = [[action["x"], action["y"], 0, 0]] if "x" in action else []
    return [box for box in boxes if box is not None] + place


def training_shown(adapters: Mapping[str, Path | None], model: str, machine: Machine) -> dict:
    """What the run folders beside the adapters tell of their training: `settings`, `curves` and `pairs`.

    The settings have the `loss` of the agent `dpo`. The pairs are those of the last agent that was trained on
    pairs; `agents` names its start and itself. What is missing is printed.
    """
    shown, trained_on_pairs = {"settings": {}, "curves": {}, "pairs": []}, None
    for name, adapter in adapters.items():
        try:
            if (folder := training_folder(adapter)) is None:
                continue
            run, shown["curves"][name] = read_settings(folder), records(folder)
        except ValueError as error:
            print(f"the report lacks the training of {name}: {error}")
            continue
        if "dpo" in run and run["dpo"]["pairs"] != "unpaired":
            trained_on_pairs = name, folder, run
        if "dpo" in run and name == "dpo":
            shown["settings"]["loss"] = run["dpo"]["loss"]
    if trained_on_pairs is None:
        return shown
    name, folder, run = trained_on_pairs
    start = Path(run["adapter"])
    known = (
        other for other, path in adapters.items() if path and path.resolve() == start.resolve()
    )
    agents = [next(known, str(start)), name]
    try:
        if (hashes := adapter_sha256(start)) != run.get("adapter_sha256", hashes):
            raise ValueError(f"{start} is no longer the adapter that {folder} began from")
        pairs = shown_pairs(folder, model, machine, start, adapters[name])
        shown["pairs"] = [{**pair, "agents": agents} for pair in pairs]
    except (OSError, ValueError) as error:
        print(f"the report has no pairs: {error}")
    return shown


def training_folder(adapter: Path | None) -> Path | None:
    """The run folder that an adapter lies in, or None; for a loop's adapter, that of the round it kept."""
    if adapter is None or not adapter.is_dir() or not (adapter.parent / "config.json").is_file():
        return None
    folder = adapter.parent
    settings = read_settings(folder)
    if "rounds" in settings and (folder / "result.json").is_file():
        kept_round = read_result(folder / "result.json")["kept_round"]
        return folder / f"round-{kept_round}" / settings["learn"]
    return folder if "data" in settings else None  # a model's folder has a config.json, too


def shown_pairs(
    folder: Path, model: str, machine: Machine, before: Path, after: Path
) -> list[dict]:
    """Some of a run's pairs as `report.render` takes them: each token's log-prob under two adapters."""
    if not (pairs := first_pairs(folder)):
        return []
    until = pair_loss_of(DPO(**read_settings(folder)["dpo"])).until
    shown = []
    for pair, tokens in zip(pairs, movements(model, machine, before, after, pairs)):
        row = {
            "task": pair.chosen.task,
            "seed": pair.chosen.seed,
            "source": pair.source,
            "until": until,
        }
        for side, episode in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            row[side] = {
                "outcome": episode.outcome,
                "index": episode.index,
                "tokens": token_rows(tokens[side]),
            }
        shown.append(row)
    return shown


def first_pairs(folder: Path) -> list[Pair]:
    """PAIRS of a run's pairs: the first of each task, then the second of each, and so on."""
    return by_turns(grouped(trained_pairs(folder), lambda pair: pair.chosen.task).values())[:PAIRS]


def trained_pairs(folder: Path) -> list[Pair]:
    """The pairs that a DPO run was trained on, from its pairs.jsonl; KTO's two columns are no pairs."""
    config = read_settings(folder)  # its version covers all files of the folder, pairs.jsonl too
    files = [*config["data"], *filter(None, [config["golden"]]), *config.get("failures", [])]
    identity = itemgetter("task", "seed", "policy", "index", "forced")
    # two files' episodes may be alike but for how they were sampled, which older runs did not write down
    episodes = {
        place: e
        for path in files
        for e in read(path)
        for place in (identity(vars(e)), (*identity(vars(e)), repr(e.sampling)))
    }

    def episode_of(side: dict) -> Episode:
        place = identity(side) + ((repr(side["sampling"]),) if "sampling" in side else ())
        if place not in episodes:
            raise ValueError(
                f"{files[0]} no longer holds the episodes that {folder} was trained on"
            )
        return episodes[place].up_to(side["turns"])

    def pair_of(record: dict) -> Pair:
        chosen, rejected = (episode_of(record[side]) for side in ("chosen", "rejected"))
        if record["source"] in ("value", "dagger"):
            chosen = on_from(rejected, chosen)
        return Pair(chosen, rejected, record["source"])

    lines = (folder / "pairs.jsonl").read_text(encoding="utf-8").splitlines()
    try:
        return [
            pair_of(record) for record in map(json.loads, lines) if record["source"] != "unpaired"
        ]
    except (KeyError, TypeError):
        raise ValueError(
            f"{folder / 'pairs.jsonl'}: damaged, so its pairs can't be shown"
        ) from None


def token_rows(tokens: Sequence[Token]) -> list[list]:
    """Rows of text, turn, log-prob before, after. Tokens in a row that the agent did not write are joined."""
    rows: list[list] = []
    for text, turn, before, after in tokens:
        if turn >= 0:
            rows.append([text, turn, round(before, 4), round(after, 4)])
        elif rows and rows[-1][1] < 0:
            rows[-1][0] += text
        else:
            rows.append([text, -1, None, None])
    return rows
