"""Runs the pages in their own process, so that pages and model can work at the same time.

In one Python process they would wait for each other's lock: on two cores the pages became three times slower while a
small model wrote. `RemoteBrowser` is used like `Browser`. The other process reads a call per line as JSON and answers
when a page is ready. It ends, with its browser, when its input ends. If it is killed, waiting calls raise EnvError, and
the next reset starts another process.
"""

import asyncio
import contextlib
import itertools
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from envs.actions import Action
from envs.miniwob.browser.driver import Browser, MiniWoB
from envs.protocol import EnvError, Observation, Outcome

ROOT = Path(__file__).parents[3]
PATIENCE_S = 600.0  # for one call, which may have to try the whole LADDER
LEAVING_S = 30.0
LINE = 2**24  # bytes in the longest answer
PAUSE_S = 1.0  # before each action and after each episode, if somebody watches


def check_display() -> None:
    """Raises ValueError if there is no display for a window."""
    if sys.platform == "linux" and not (
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    ):
        raise ValueError(
            "--watch opens a window, but this machine has no display (neither DISPLAY nor "
            "WAYLAND_DISPLAY is set): leave it out, or use it on a desktop"
        )


class RemoteBrowser:
    """`async with RemoteBrowser(16) as browser:` gives `browser.envs`, one environment for each page."""

    def __init__(self, pages: int = 16, headless: bool = True):
        self.headless = headless  # otherwise in a window, and slowly enough to watch
        self.envs = [RemoteMiniWoB(self, page) for page in range(pages)]
        self.life = 0  # how many processes there have been
        self._process: asyncio.subprocess.Process | None = None
        self._answers: dict[int, asyncio.Future] = {}
        self._numbers = itertools.count()
        self._reader: asyncio.Task | None = None
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> "RemoteBrowser":
        await self.start()
        return self

    async def __aexit__(self, *_) -> None:
        self._process.stdin.close()  # tells it to end
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), LEAVING_S)
        await self._bury()

    async def start(self) -> None:
        """Start the process unless it runs. Raises EnvError if no browser can be started."""
        async with self._lock:
            if self._reader is not None and not self._reader.done():
                return
            if self._process is not None:
                await self._bury()
            paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "envs.miniwob.browser.remote", str(len(self.envs)),
                *([] if self.headless else ["watch"]), limit=LINE, env={**os.environ, "PYTHONPATH": paths},
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # keeps Control-C from the pages, which must end in order
            )  # fmt: skip
            try:
                first = await asyncio.wait_for(self._process.stdout.readline(), PATIENCE_S)
                said = json.loads(first or '{"failure": "the process of the pages did not start"}')
            except (TimeoutError, ValueError) as error:
                said = {"failure": f"the process of the pages did not start in order: {error!r}"}
            if "failure" in said:
                await self._bury()
                raise EnvError(said["failure"])
            self.life += 1
            self._reader = asyncio.create_task(self._read(self._process.stdout))

    async def _bury(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        if self._reader is not None:
            await self._reader

    async def call(self, page: int, name: str, *args) -> dict:
        """The answer to a call of one page's environment."""
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            # checked before the write, because `_process` may already be the next process, which still starts
            if self._reader.done():
                raise EnvError("the process of the pages has ended")
            request = {"number": number, "page": page, "call": name, "args": args}
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            answer = await asyncio.wait_for(self._answers[number], PATIENCE_S)
        except TimeoutError as error:
            await self._bury()
            raise EnvError(
                f"the process of the pages: no answer within {PATIENCE_S:g} s"
            ) from error
        finally:
            del self._answers[number]
        if "failure" in answer:
            raise EnvError(answer["failure"])
        return answer

    async def _read(self, lines: asyncio.StreamReader) -> None:
        try:
            while (line := await lines.readline()).endswith(b"\n"):  # otherwise it was killed
                answer = json.loads(line)
                waiting = self._answers.get(answer.pop("number"))
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except ValueError:  # no output of ours; the next reset starts another process
            pass
        finally:
            for waiting in self._answers.values():
                if not waiting.done():
                    waiting.set_result({"failure": "the process of the pages has ended"})


class RemoteMiniWoB:
    """An `Env` whose page is in the other process."""

    def __init__(self, browser: RemoteBrowser, page: int):
        self._browser, self._page, self._life = browser, page, 0

    async def reset(self, task: str, seed: int) -> Observation:
        """Start (task, seed), in a new process if the last one was killed."""
        await self._browser.start()
        self._life = self._browser.life
        return observation(await self._browser.call(self._page, "reset", task, seed))

    async def step(self, action: Action) -> Observation:
        """Carry out one action."""
        if self._life != self._browser.life:
            raise EnvError("the process of the pages has ended, and this episode with it")
        return observation(
            await self._browser.call(self._page, "step", action.command, dict(action.args))
        )


def observation(answer: dict) -> Observation:
    """The observation in an answer of the other process."""
    return Observation(**{**answer, "outcome": answer["outcome"] and Outcome(answer["outcome"])})


# What follows runs in the process of the pages.


async def slowly(env: MiniWoB, action: Action) -> Observation:
    """A step for people who watch: the spot of the action is framed first, and the end of an episode stays visible."""
    with contextlib.suppress(EnvError):  # if the page is dead, the step itself will say so
        await env.point(action)
        await asyncio.sleep(PAUSE_S)
        await env.point(None)
    observation = await env.step(action)
    await asyncio.sleep(PAUSE_S if observation.outcome else 0)
    return observation


async def answer(browser: Browser, request: dict, watch: bool) -> None:
    """Carry out one request and print the result."""
    env, args = browser.envs[request["page"]], request["args"]
    try:
        if request["call"] == "reset":
            said = asdict(await env.reset(*args))
        else:
            action = Action(args[0], **args[1])
            said = asdict(await (slowly(env, action) if watch else env.step(action)))
    except EnvError as error:
        said = {"failure": str(error)}
    print(json.dumps({"number": request["number"], **said}), flush=True)


async def serve(pages: int, watch: bool) -> None:
    """Answer requests until the input ends."""
    lines = asyncio.StreamReader(limit=LINE)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    try:
        # A TaskGroup, so that a bug in one answer ends the process at once with its traceback.
        async with Browser(pages, headless=not watch) as browser, asyncio.TaskGroup() as busy:
            print(json.dumps({}), flush=True)
            asked = set()
            while line := await lines.readline():
                task = busy.create_task(answer(browser, json.loads(line), watch))
                asked.add(task)
                task.add_done_callback(asked.discard)
            if asked:  # the asking process was killed; do not wait for a browser that may hang
                os._exit(1)  # the guard ends browser and driver
    except EnvError as error:
        said = str(error)
        if watch and "XServer" in said:  # Playwright's own message is a page long
            said = f"--watch: no window can be opened on the display {os.environ.get('DISPLAY')}"
        print(json.dumps({"failure": said}), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # the asking process is gone
        asyncio.run(serve(int(sys.argv[1]), "watch" in sys.argv))
