"""Worlds: tasks with text as the observation, actions as text, and a verdict.

Nothing here knows of models: no torch, no minidpo. All other code gets a world from `world("miniwob")`.
Read in this order: `protocol` (what a world promises), `toy` (a small one), `actions` (what an agent may do on
a page), `miniwob` (the benchmark's pages in a real Chromium), `gym` (all tasks as Gymnasium environments),
`web` (any page, confined to its origin, without a verdict).
In `textcraft` an agent crafts a Minecraft item; part of the way is rewarded in part.
In `babyai` it walks through minigrid's rooms, which are described in words.
`scienceworld` and `textworld_express` are text games in Java: `jvm` (where they run), `golden` (their experts),
`free_text` (their actions).
`classes` turns an environment class of TRL's kind into a world, `trl` a world into such a class; `calls` is the
grammar of function calls. `openenv` speaks OpenEnv's protocol as a client, `serve` as a server.
`packages` says what is missing; `panel` lists the instances on which agents are measured.
"""

import difflib
import importlib
import importlib.util
import pkgutil
import sys
from pathlib import Path
from types import ModuleType

from envs.protocol import World


def names() -> list[str]:
    """The names of the worlds in this package."""
    found = [module.name for module in pkgutil.iter_modules(__path__) if module.ispkg]
    found.remove("web")  # pages without tasks and verdicts
    return found


def world(name: str) -> World:
    """The world of that name in envs/NAME. Also a module of your own, PACKAGE.MODULE; an environment class of TRL's
    kind, FILE.py:CLASS; or a server that speaks OpenEnv's protocol, ws://HOST:PORT.

    Raises ValueError if there is no such world or a package that it needs is missing.
    """
    if ".py:" in name:
        return importlib.import_module("envs.classes").ClassWorld(name)
    served = name.startswith(("ws://", "wss://"))
    known = names()
    if name not in known and "." not in name and not served:
        near = difflib.get_close_matches(name, known) or known
        raise ValueError(f"unknown world {name!r}: did you mean {', '.join(near)}?")
    path = name if "." in name else f"envs.{name}"
    if served:
        path = "envs.openenv"
    try:
        module = importlib.import_module(path)
        return module.ServedWorld(name) if served else module.WORLD
    except ModuleNotFoundError as error:
        if error.name and path.startswith(error.name):
            raise ValueError(f"unknown world {name!r}: there is no module {error.name}") from None
        raise ValueError(
            f"the world {name} needs {error.name}, which is not installed: pip install {error.name}"
        ) from None
    except AttributeError:
        raise ValueError(f"{path} is no world: it does not define WORLD") from None


def load(path: Path) -> ModuleType:
    """The module in a file of the user's. Raises ValueError in one line if it cannot be loaded."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location(f"page_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # so that tyro finds the help texts in the source
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's code may raise anything while it is loaded
        raise ValueError(
            f"{path}: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from None
    return module


def resolve(world: World, names: str) -> tuple[str, ...]:
    """The tasks in a comma-separated list of suites and tasks, each once, in the order given.

    Raises ValueError for an unknown name, with the nearest known names.
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
