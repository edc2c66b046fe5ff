"""Worlds: tasks with text as the observation, actions as text, and a verdict.

Nothing here knows of models: no torch, no minidpo. `world("miniwob")` is the door for all that is not here.
Read in this order: `protocol` (what a world promises), `toy` (a small one), `actions` (what an agent may do on
a page), `miniwob` (the benchmark's pages in a real Chromium), `gym` (all tasks as Gymnasium environments),
`web` (any page, confined to its origin, without a verdict).
`textcraft` crafts a Minecraft item from what can be found, with a reward for a part of the way.
`babyai` walks through minigrid's rooms, told in words, beside its bot.
`scienceworld` and `textworld_express` are text games in Java: `jvm` (where they run), `golden` (their experts),
`free_text` (their actions).
`packages` says what is missing, and `panel` on which instances agents are measured.
"""

import difflib
import importlib
import pkgutil

from envs.protocol import World


def names() -> list[str]:
    """The worlds that are here."""
    found = [module.name for module in pkgutil.iter_modules(__path__) if module.ispkg]
    found.remove("web")  # pages without tasks and verdicts
    return found


def world(name: str) -> World:
    """The world of that name, from envs/NAME, or from a module of yours, PACKAGE.MODULE.

    Raises ValueError if there is none or if a package that it needs is missing.
    """
    known = names()
    if name not in known and "." not in name:
        near = difflib.get_close_matches(name, known) or known
        raise ValueError(f"unknown world {name!r}: did you mean {', '.join(near)}?")
    path = name if "." in name else f"envs.{name}"
    try:
        return importlib.import_module(path).WORLD
    except ModuleNotFoundError as error:
        if error.name and path.startswith(error.name):
            raise ValueError(f"unknown world {name!r}: there is no module {error.name}") from None
        raise ValueError(
            f"the world {name} needs {error.name}, which is not installed: pip install {error.name}"
        ) from None
    except AttributeError:
        raise ValueError(f"{path} is no world: it has no WORLD") from None


def resolve(world: World, names: str) -> tuple[str, ...]:
    """The tasks that a comma-separated list of suites and tasks names, each once, in the order given.

    Raises ValueError for an unknown name; the message holds the nearest known names.
    """
    tasks: dict[str, None] = {}
    for name in filter(None, (name.strip() for name in names.split(","))):
        if name not in world.suites and name not in world.suites["all"]:
            near = difflib.get_close_matches(name, [*world.suites, *world.suites["all"]])
            hint = f"did you mean {', '.join(near)}"
            if not near:
                hint = f"suites are {', '.join(world.suites)}"
            raise ValueError(f"unknown task {name!r}: {hint}")
        tasks |= dict.fromkeys(world.suites.get(name, (name,)))
    if not tasks:
        suites = ", ".join(world.suites)
        raise ValueError(f"no task in {names!r}: give suites ({suites}) or task names")
    return tuple(tasks)


def web_page(url: str, goal: str, watch: bool = False):
    """A page of the web as an environment without a verdict (`envs/web/visit.py`). Raises ValueError for a bad URL."""
    from envs.web.gate import Bounds
    from envs.web.visit import Web

    return Web(Bounds(url), goal, headless=not watch)
