"""Another program's environment as a world, through OpenEnv's wire protocol: `--world ws://HOST:PORT`.

A session is a WebSocket at /ws, where each message gets an answer:

    {"type": "reset", "data": {"task": "click-link", "seed": 7}}    {"type": "observation", "data": {"observation": ...}}
    {"type": "step", "data": {"action": "CLICK(ref=\"1\")"}}          with "reward" of the step and "done" beside it
                                                                    {"type": "error", "data": {"message", "code"}}

GET /schema describes the fields of an action, /metadata the environment. If an action has a single text field, the agent
writes that text; otherwise it writes a call, `act(x=1)`, or in an MCP environment a call of one of its tools. An episode
is solved if its rewards add up to 1. `serve` serves our worlds. They also send their tasks, seeds, limits and prompt in
/schema, so they are the same worlds on both sides.
"""

import asyncio
import contextlib
import dataclasses
import json
import math
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from envs.calls import Call, Tool, Tools, render
from envs.protocol import SPLITS, Action, ActionError, Env, EnvError, Observation, Outcome, World
from envs.serve import OURS

SECONDS = 60.0  # the time that a server has for an answer
# for servers that do not say
SEEDS = {split: {"range": [100_000 * n, 100_000 * (n + 1)]} for n, split in enumerate(SPLITS)}
SERVED = {"tasks": {"served": {"step_limit": 20, "seeds": SEEDS}}}
WRONG = (WebSocketException, OSError, LookupError, TypeError, AttributeError, ValueError)


class ServedWorld(World):
    """The world of a server. Raises ValueError in one line if no server answers."""

    experts = ()

    def __init__(self, url: str):
        self.name, self.url, self.field = url, url.rstrip("/").removesuffix("/ws"), None
        with failing(url, ValueError):
            about, schema = self._http("metadata"), self._http("schema")["action"]
            self.about = str(about.get("description") or about["name"])
            self.is_mcp = "tool_name" in schema["properties"]
            calls = Tools(self._tools() if self.is_mcp else [tool_of("act", "Do it.", schema)])
            self.parse, self.render = calls.parse, render
            (fields, *_) = [tool.parameters for tool in calls.named.values()]
            if not self.is_mcp and [one.get("type") for one in fields.values()] == ["string"]:
                (self.field,) = fields  # the only one
                self.parse, self.render, calls.example = line, str, "..."
            world = schema.get(OURS, SERVED)
            self.system_prompt = world.get("system_prompt", calls.prompt(self.about))
            self.shows_state = world.get("shows_state", False)
            self.limits = {task: one["step_limit"] for task, one in world["tasks"].items()}
            self.by_task = {
                task: {split: seeds_in(told) for split, told in one["seeds"].items()}
                for task, one in world["tasks"].items()
            }
            self.suites = {"all": tuple(self.limits)}
            self.seeds = self.by_task[self.suites["all"][0]]

    def _http(self, what: str, body: bytes | None = None) -> Any:
        address = f"http{self.url.removeprefix('ws')}/{what}"
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=SECONDS) as found:
            return json.load(found)

    def _tools(self) -> list[Tool]:
        asked = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        tools = self._http("mcp", json.dumps(asked).encode())["result"]["tools"]
        # the package mcp renamed this key in its version 2
        schemas = [tool.get("inputSchema") or tool["input_schema"] for tool in tools]
        return [tool_of(t["name"], t["description"], schema) for t, schema in zip(tools, schemas)]

    def instances(self, task: str, split: str) -> Sequence[int]:
        """The seeds that the server names, or a hundred thousand for each split."""
        return self.by_task[task][split]

    def step_limit(self, task: str) -> int:
        """The limit that the server names, or 20."""
        return self.limits[task]

    @contextlib.asynccontextmanager
    async def open(self, places: int, watch: bool = False) -> AsyncIterator[Sequence[Env]]:
        """A session for each place, or as many as the server has."""
        sessions = [Session(self) for _ in range(places)]
        try:
            yield [session for session in sessions if await session.is_had()] or sessions[:1]
        finally:
            await asyncio.gather(*(session.close() for session in sessions))


class Session(Env):
    """A session with a server. After a failure the next reset begins a new one."""

    def __init__(self, world: ServedWorld):
        self.world, self.socket = world, None

    async def is_had(self) -> bool:
        """Whether the server has room for this session. Some servers allow only one."""
        with contextlib.suppress(EnvError):
            # before a reset many servers have no state, but that is another error
            return (await self._ask({"type": "state"})).get("code") != "CAPACITY_REACHED"
        return False

    async def reset(self, task: str, seed: int) -> Observation:
        """Begin the instance. A server without tasks ignores the name."""
        self.seen = Observation(self.world.about, "")
        return await self._look({"type": "reset", "data": {"task": task, "seed": seed}})

    async def step(self, action: Action) -> Observation:
        """Take one action. If the server refuses its form, the agent reads why."""
        if not isinstance(action, Call):
            data = {self.world.field: action}
        elif self.world.is_mcp:
            arguments = json.loads(action.arguments)
            data = {"type": "call_tool", "tool_name": action.name, "arguments": arguments}
        else:
            data = json.loads(action.arguments)
        return await self._look({"type": "step", "data": data})

    async def close(self) -> None:
        """End the session."""
        socket, self.socket = self.socket, None
        if socket is not None:
            await socket.close()

    async def _ask(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The data of the answer. Raises EnvError for an error that the agent did not cause."""
        try:
            with failing(self.world.url, EnvError):
                async with asyncio.timeout(SECONDS):
                    self.socket = self.socket or await connect(f"{self.world.url}/ws")
                    await self.socket.send(json.dumps(message))
                    answer = json.loads(await self.socket.recv())
                data = answer["data"]
                read = message["type"] == "step" and data.get("code") == "VALIDATION_ERROR"
                if answer["type"] == "error" and not read and message["type"] != "state":
                    raise ValueError(f"{data['code']}: {data['message']}")
                return data
        except EnvError:
            await self.close()
            raise

    async def _look(self, message: Mapping[str, Any]) -> Observation:
        """Send a message. Returns what the agent sees of the answer."""
        data = await self._ask(message)
        with failing(self.world.url, EnvError):
            self.seen = self._seen(data)
        return self.seen

    def _seen(self, data: Mapping[str, Any]) -> Observation:
        if "code" in data:
            return dataclasses.replace(self.seen, error=str(data["message"]))
        fields, result = data["observation"], data["observation"].get("result")
        reward, outcome = self.seen.reward + (data.get("reward") or 0.0), None
        if not math.isfinite(reward):
            raise ValueError(f"the reward is {reward}")
        if OURS in fields:
            outcome, problem = fields["outcome"], fields["error"]
            if fields[OURS]["refused"]:
                raise ActionError(str(problem))
            said = str(fields["instruction"]), str(fields["text"])
            return Observation(
                *said, outcome and Outcome(outcome), float(fields["reward"]), problem
            )
        if self.world.is_mcp and isinstance(result, dict):
            fields = {"result": result.get("data") or result.get("content")}
        if data["done"]:
            outcome = Outcome.SOLVED if reward >= 1 else Outcome.FAILED
        text = "\n".join(f"{name}: {in_words(value)}" for name, value in fields.items())
        return Observation(self.world.about, text, outcome, reward)


@contextlib.contextmanager
def failing(url: str, wanted: type[Exception]) -> Iterator[None]:
    """Turn whatever a server does wrong into an exception of this type with one line."""
    try:
        yield
    except ActionError:
        raise
    except WRONG as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise wanted(f"{url} does not speak OpenEnv's protocol: {said[:300]}") from None


def line(text: str) -> str:
    """An action that is a line of text. Raises ActionError."""
    if not text.strip() or "\n" in text.strip():
        raise ActionError("an action is one line of text")
    return text.strip()


def tool_of(name: str, about: str, schema: Mapping[str, Any]) -> Tool:
    """The JSON Schema of an object as a tool, without OpenEnv's field `metadata`."""
    fields = {key: one for key, one in schema["properties"].items() if key != "metadata"}
    return Tool(name, about, fields, frozenset(schema.get("required", ())) & fields.keys())


def seeds_in(told: Mapping[str, list[int]]) -> Sequence[int]:
    """The seeds that a server sends, as a range or as a list."""
    return range(*told["range"]) if "range" in told else told["list"]


def in_words(value: Any) -> str:
    """A field of an observation: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
