"""A world as a server that speaks OpenEnv's wire protocol (`openenv` has its messages).

    python -m envs.serve --world miniwob --port 8000

Each client gets its own environment. `seed` and `task` are keys in the data of a reset; without them the first instance
is played. The field `action` holds the text of an action. Needs a package: pip install websockets
"""

import argparse
import asyncio
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import envs
from envs.protocol import SPLITS, ActionError, Env, EnvError, Observation, World

OURS = "x-minidpo"  # the key of what other clients can ignore


def pages(world: World) -> dict[str, dict[str, Any]]:
    """The answers to HTTP requests, by path."""
    tasks = {
        task: {
            "step_limit": world.step_limit(task),
            "seeds": {split: told(world.instances(task, split)) for split in SPLITS},
        }
        for task in world.suites["all"]
    }
    own = {"system_prompt": world.system_prompt, "shows_state": world.shows_state, "tasks": tasks}
    action = {"properties": {"action": {"type": "string"}}, "required": ["action"], OURS: own}
    return {
        "/schema": {"action": action, "observation": {}, "state": {}},
        "/metadata": {"name": world.name, "description": f"the world {world.name} of minidpo"},
        "/health": {"status": "healthy"},
    }


def told(seeds: Sequence[int]) -> dict[str, list[int]]:
    """Seeds as JSON.

    >>> told(range(5)), told([3, 1])
    ({'range': [0, 5, 1]}, {'list': [3, 1]})
    """
    if isinstance(seeds, range):
        return {"range": [seeds.start, seeds.stop, seeds.step]}
    return {"list": list(seeds)}


class Game:
    """The episodes of one client."""

    def __init__(self, world: World, env: Env):
        self.world, self.env = world, env
        self.instance, self.steps, self.seen = None, 0, None

    async def answer(self, raw: str | bytes) -> dict[str, Any] | None:
        """The answer to a message; None to `close`."""
        code = "VALIDATION_ERROR"
        try:
            message = json.loads(raw)
            kind, data = message["type"], message.get("data") or {}
            if kind == "close":
                return None
            if kind == "state":
                name = self.instance and " ".join(map(str, self.instance))
                return {"type": "state", "data": {"episode_id": name, "step_count": self.steps}}
            if kind not in ("reset", "step"):
                raise ValueError(f"{kind!r} is none of reset, step, state and close")
            seen = await (self._reset(data) if kind == "reset" else self._step(data["action"]))
            return {"type": "observation", "data": seen}
        except EnvError as problem:
            code, said, self.seen = "EXECUTION_ERROR", problem, None
        except (LookupError, TypeError, AttributeError, ValueError) as problem:
            said = f"{type(problem).__name__}: {problem}"
        return {"type": "error", "data": {"code": code, "message": " ".join(f"{said}".split())}}

    async def _reset(self, data: Mapping[str, Any]) -> dict[str, Any]:
        (task,) = envs.resolve(self.world, data.get("task") or self.world.suites["all"][0])
        seed = data.get("seed")
        seed = self.world.instances(task, "rollouts")[0] if seed is None else int(seed)
        self.instance, self.steps, self.seen = (task, seed), 0, None
        return self._told(await self.env.reset(task, seed))

    async def _step(self, text: str) -> dict[str, Any]:
        if self.seen is None or self.seen.outcome:
            raise ValueError("no episode runs: reset first")
        self.steps += 1
        try:
            return self._told(await self.env.step(self.world.parse(text)))
        except ActionError as problem:
            return self._told(dataclasses.replace(self.seen, error=str(problem)), refused=True)

    def _told(self, seen: Observation, refused: bool = False) -> dict[str, Any]:
        """An observation as OpenEnv has it: the reward is that of the step."""
        reward, self.seen = seen.reward - (self.seen.reward if self.seen else 0.0), seen
        done = seen.outcome is not None or self.steps >= self.world.step_limit(self.instance[0])
        return {
            "observation": {**vars(seen), OURS: {"refused": refused}},
            "reward": reward,
            "done": done,
        }


async def serve(world: World, host: str, port: int, places: int) -> None:
    """Serve a world until the process is stopped."""
    from websockets.asyncio import server
    from websockets.exceptions import ConnectionClosed

    by_path = {path: json.dumps(page) for path, page in pages(world).items()}

    def page(connection: server.ServerConnection, request: Any) -> Any:
        if request.path == "/ws":
            return None
        found = HTTPStatus.OK if request.path in by_path else HTTPStatus.NOT_FOUND
        return connection.respond(found, by_path.get(request.path, "sessions are at /ws\n"))

    async def session(socket: server.ServerConnection) -> None:
        if not free:
            said = {
                "code": "CAPACITY_REACHED",
                "message": "all places are taken: serve more --places",
            }
            return await socket.send(json.dumps({"type": "error", "data": said}))
        env = free.pop()
        game = Game(world, env)
        try:
            while answer := await game.answer(await socket.recv()):
                await socket.send(json.dumps(answer))
        except ConnectionClosed:
            pass
        finally:
            free.append(env)

    async with (
        world.open(places) as opened,
        server.serve(session, host, port, process_request=page) as listening,
    ):
        free = list(opened)
        print(f"ws://{host}:{listening.sockets[0].getsockname()[1]} is {world.name}", flush=True)
        await listening.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a world by OpenEnv's protocol.")
    parser.add_argument("--world", default="miniwob", help="as for collect.py")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0: other machines may call")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    parser.add_argument("--places", type=int, default=16, help="sessions at a time")
    given = parser.parse_args()
    try:
        world = envs.world(given.world)
        world.require()
        asyncio.run(serve(world, given.host, given.port, given.places))
    except (ValueError, EnvError, OSError, ModuleNotFoundError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
