"""TRL's environment classes as worlds: `--world FILE.py:CLASS` or `--world FILE.py:CLASS:ROWS.jsonl`.

    class Guess:
        '''Find the number.'''

        rows = [{"prompt": "From 0 to 9.", "secret": n % 10} for n in range(40)]

        def reset(self, secret: int, **row) -> str | None:
            self.secret, self.done, self.reward = secret, False, 0.0

        def guess(self, number: int) -> str:
            '''Say a number.'''
            ...

        def get_reward(self) -> float:
            return self.reward

TRL's GRPOTrainer takes such a class as `environment_factory`. Its public methods are tools, which their docstrings
explain to the agent, and a row of the data set is an instance. A class may also have:

    rows         a list of rows, or the name of a JSONL file in the same folder; not needed with ROWS.jsonl
    done         True when the episode has ended; it also ends when the agent calls `finish`
    solved_at    the reward at which an episode counts as solved; by default 1.0
    step_limit   the most actions in an episode; by default 20

A row's `solution`, a list of calls as text, is its demonstration. If a tool raises an exception, the agent reads its
message, as in TRL. An OSError, an EnvError, or any exception of `reset` or `get_reward` means that the world is broken.
"""

import asyncio
import contextlib
import inspect
import json
import types
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import envs
from envs.calls import KINDS, Call, Tool, Tools, render
from envs.golden import follow
from envs.protocol import Env, EnvError, Expert, Observation, Outcome, World

FINISH = Tool("finish", "End the episode: the task is done, or cannot be done.", {}, frozenset())
NAMES = {kind: name for name, (kind, _) in KINDS.items()}
SHARES = {"demos": (0,), "validation": (1, 4), "test": (2, 5), "rollouts": (3, 6, 7, 8, 9)}
"The rows of each split, by the last digit of their number."


class ClassWorld(World):
    """A world made of an environment class and its rows. Raises ValueError in one line if the class does not fit."""

    shows_state = False  # a tool's answer tells what happened

    def __init__(self, place: str):
        path, _, names = place.rpartition(".py:")
        path, (name, _, rows) = Path(f"{path}.py").expanduser(), names.partition(":")
        self.name, self.maker = place, getattr(envs.load(path), name, None)
        if not inspect.isclass(self.maker):
            raise ValueError(f"{place}: {path} has no class {name!r}")
        bare = object.__new__(self.maker)
        methods = dict(inspect.getmembers(bare, inspect.ismethod))
        named = [name for name in methods if is_tool(name)]
        if not named or not {"reset", "get_reward"} <= methods.keys():
            raise ValueError(
                f"{place} needs reset(**row), get_reward() and at least one public method to call"
            )
        tools = [tool_of(methods[name], place) for name in named]
        calls = Tools(tools if FINISH.name in methods else [*tools, FINISH])
        self.about = inspect.cleandoc(self.maker.__doc__ or "")
        self.system_prompt = calls.prompt(self.about)
        self.parse, self.render = calls.parse, render
        self.rows = rows_of(self.maker, path.parent, rows)
        for number, row in enumerate(self.rows, 1):
            try:
                inspect.signature(methods["reset"]).bind(**row)
                instruction(row)
            except (TypeError, ValueError, LookupError) as error:
                raise ValueError(f"{place}: row {number}: {error}") from None
        self.suites = {"all": (name,)}
        numbers = range(len(self.rows))
        self.seeds = {
            split: [n for n in numbers if n % 10 in digits] for split, digits in SHARES.items()
        }
        self.experts = (name,) if all("solution" in row for row in self.rows) else ()

    def step_limit(self, task: str) -> int:
        """The limit that the class sets, or 20."""
        return getattr(self.maker, "step_limit", 20)

    def expert(self, task: str, seed: int) -> Expert:
        """Follows the solution of the row."""
        path = [self.parse(text) for text in self.rows[seed]["solution"]]
        return follow(lambda: path, lambda text, call: f"{call.name} is the next step")

    @contextlib.asynccontextmanager
    async def open(self, places: int, watch: bool = False) -> AsyncIterator[Sequence[Env]]:
        """An object of the class for each place, with its own thread."""
        threads = [ThreadPoolExecutor(1) for _ in range(places)]
        try:
            yield [Instance(self, thread) for thread in threads]
        finally:
            for thread in threads:
                thread.shutdown(wait=False, cancel_futures=True)


class Instance(Env):
    """An object of the class. Its methods run in a thread, so that other places need not wait."""

    def __init__(self, world: ClassWorld, thread: ThreadPoolExecutor):
        self.world, self.thread, self.object = world, thread, None

    async def reset(self, task: str, seed: int) -> Observation:
        """Reset the object with a row; if it broke, make a new one."""
        row = self.world.rows[seed]
        try:
            if self.object is None:
                self.object = await self._call(self.world.maker)
            said = await self._call(self.object.reset, **row)
        except Exception as error:  # a user's code may raise anything
            raise self._broken(error) from error
        told = instruction(row) or self.world.about.partition("\n")[0] or task
        self.seen = Observation(told, "" if said is None else str(said))
        return self.seen

    async def step(self, action: Call) -> Observation:
        """Call a method, and ask for the reward so far."""
        text, problem = "done", None
        try:
            if hasattr(self.object, action.name):  # false if `finish` is ours
                method = getattr(self.object, action.name)
                said = await self._call(method, **json.loads(action.arguments))
                text = text if said is None else str(said)
        except (EnvError, OSError, MemoryError) as error:
            raise self._broken(error) from error
        except Exception as error:  # the agent reads it, as in TRL
            text, problem = self.seen.text, " ".join(f"{error}".split()) or type(error).__name__
        outcome = None
        ended = action.name == FINISH.name or getattr(self.object, "done", False) is True
        try:
            reward = float(await self._call(self.object.get_reward) or 0.0)
        except Exception as error:
            raise self._broken(error) from error
        if ended:
            solved = reward >= getattr(self.world.maker, "solved_at", 1.0)
            outcome = Outcome.SOLVED if solved else Outcome.FAILED
        self.seen = Observation(self.seen.instruction, text, outcome, reward, problem)
        return self.seen

    async def _call(self, method: Callable, **arguments: Any) -> Any:
        def call():
            try:
                return method(**arguments)
            # a future cannot hold one, so the caller would wait forever
            except StopIteration as error:
                raise RuntimeError(f"StopIteration: {error}") from error

        result = await asyncio.get_running_loop().run_in_executor(self.thread, call)
        return await result if inspect.isawaitable(result) else result

    def _broken(self, error: Exception) -> EnvError:
        self.object = None
        said = " ".join(f"{type(error).__name__}: {error}".split())
        return EnvError(f"{self.world.name}: {said}")


def is_tool(name: str) -> bool:
    """Whether TRL gives the method of this name to the agent."""
    return name not in ("reset", "get_reward") and not name.startswith("_")


def tool_of(method: Callable, place: str) -> Tool:
    """A method as a tool. Raises ValueError if a type or the docstring is missing."""
    place = f"{place}.{method.__name__}"
    if not method.__doc__:
        raise ValueError(f"{place} has no docstring: write one, which tells the agent what it does")
    try:
        hints = get_type_hints(method)
    except NameError as error:
        raise ValueError(f"{place}: {error}") from None
    parameters = inspect.signature(method).parameters
    for name, parameter in parameters.items():
        if name not in hints or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(f"{place}: the parameter {parameter} needs a name and a type")
    return Tool(
        method.__name__,
        inspect.getdoc(method),
        {name: schema_of(hints[name], f"{place}: {name}") for name in parameters},
        frozenset(name for name, one in parameters.items() if one.default is one.empty),
    )


def schema_of(kind: Any, place: str) -> dict[str, Any]:
    """The JSON Schema of a type.

    >>> schema_of(list[int] | None, "")
    {'anyOf': [{'type': 'array', 'items': {'type': 'integer'}}, {'type': 'null'}]}
    """
    origin, args = get_origin(kind) or kind, get_args(kind)
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema_of(one, place) for one in args]}
    if origin not in NAMES:
        raise ValueError(
            f"{place} must be str, int, float, bool, list, dict, a Literal or one of several, got {kind}"
        )
    schema: dict[str, Any] = {"type": NAMES[origin]}
    if origin is list and args:
        schema["items"] = schema_of(args[0], place)
    return schema


def rows_of(maker: type, folder: Path, given: str) -> list[dict[str, Any]]:
    """The rows of a class. Raises ValueError if there are none, or too few for four splits."""
    rows = getattr(maker, "rows", ())
    if given or isinstance(rows, str):
        file = Path(given).expanduser() if given else folder / rows
        try:
            lines = file.read_text("utf-8").splitlines()
            rows = [json.loads(line) for line in lines if line.strip()]
        except (OSError, ValueError) as error:
            raise ValueError(f"{file}: not a file of JSON lines: {error}") from None
    if len(rows) < len(SHARES) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(
            f"{maker.__name__} needs {len(SHARES)} rows or more, each an object: "
            "in its `rows`, or in a file, FILE.py:CLASS:ROWS.jsonl"
        )
    return rows


def instruction(row: dict[str, Any]) -> str:
    """The task in a row: its prompt, which is a text or messages, otherwise ValueError."""
    prompt = row.get("prompt", "")
    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("its prompt is neither text nor messages of text")
    return "\n".join(filter(None, texts))
