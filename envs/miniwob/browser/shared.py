"""One Chromium for the whole process, used without `await` from any thread.

The environments are asynchronous, but Gymnasium is not, and a notebook's event loop must not be touched. So the
browser runs in a thread with its own event loop: `open` returns an environment, `run` awaits one of its calls there
and returns the result, `close` closes it. The browser starts with the first environment that is opened and stops with
the last that is closed, or with the process.
"""

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from envs.miniwob.browser.driver import Browser, MiniWoB
from envs.protocol import EnvError

T = TypeVar("T")


class SharedBrowser:
    """A browser that runs while an environment is open; safe to use from several threads."""

    def __init__(self):
        self._lock = threading.Lock()
        self._open: dict[MiniWoB, asyncio.Task | None] = {}  # {environment: its newest call}
        self._browser: Browser | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def open(self) -> MiniWoB:
        """A new environment with its own tab. Raises EnvError if no browser can be started."""
        with self._lock:
            if not self._open:
                self._start()
            env = MiniWoB(self._browser)
            self._open[env] = None
            return env

    def run(self, env: MiniWoB, call: Coroutine[Any, Any, T]) -> T:
        """The result of the environment's call. Interrupting the wait cancels the call."""
        with self._lock:  # so that no call begins while the browser stops
            if env not in self._open:
                call.close()
                raise EnvError(
                    "this environment's browser has stopped, or belongs to the parent process; make a "
                    "new environment after a fork"
                )
            future = asyncio.run_coroutine_threadsafe(self._call(env, call), self._loop)
        return _result(future)

    def close(self, env: MiniWoB) -> None:
        """Close the environment's tab, and the browser with the last one. If another thread is in a call of the
        environment, that call raises EnvError. Closing twice does nothing."""
        with self._lock:
            if env in self._open:
                self._wait(self._close(env))
                del self._open[env]
                if not self._open:
                    self._stop()

    async def _call(self, env: MiniWoB, call: Coroutine[Any, Any, T]) -> T:
        self._open[env] = asyncio.current_task()
        return await call

    async def _close(self, env: MiniWoB) -> None:
        if task := self._open[env]:
            task.cancel()
            # otherwise it would open a new tab in place of the closed one
            await asyncio.wait([task])
        await env.close()

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        return _result(asyncio.run_coroutine_threadsafe(call, self._loop))

    def _start(self) -> None:
        self._browser, self._loop = Browser(pages=0), asyncio.new_event_loop()
        # a daemon thread, because Python joins all others before it calls the `atexit` functions
        self._thread = threading.Thread(target=self._loop.run_forever, name="browser", daemon=True)
        self._thread.start()
        atexit.register(self._stop)
        try:
            self._wait(self._browser.__aenter__())
        except BaseException:
            self._end()
            raise

    def _stop(self) -> None:
        self._open.clear()
        try:
            self._wait(self._browser.__aexit__())
        finally:
            self._end()

    def _end(self) -> None:
        atexit.unregister(self._stop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _result(future: "Future[T]") -> T:
    try:
        return future.result()
    except CancelledError:
        raise EnvError("this environment was closed during the call") from None
    finally:
        future.cancel()  # no effect on a finished call


SHARED = SharedBrowser()


def _after_fork() -> None:
    """A forked child has no such thread and must not use its parent's browser, so it will start its own."""
    atexit.unregister(SHARED._stop)
    SHARED.__init__()


os.register_at_fork(after_in_child=_after_fork)
