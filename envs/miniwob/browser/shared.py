"""23. Shared: one Chromium for the whole process, used without `await`, from any thread.

The environments here are asynchronous; much of the world is not, and a notebook's own event loop must not be
touched. So the browser lives in a thread with an event loop of its own: `open` gives an environment, `run`
makes a call of it there and waits for the result, `close` gives it back. The browser starts with the first
that is opened and stops with the last that is closed, at the latest with the process. Read `envs/gym` next.
"""
import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from envs.miniwob.browser.driver import Browser, MiniWoB
from envs.protocol import EnvError

T = TypeVar("T")


class SharedBrowser:
    """A browser that is there while somebody needs it; safe to use from several threads."""

    def __init__(self):
        self._lock = threading.Lock()
        self._open: set[MiniWoB] = set()
        self._browser: Browser | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def open(self) -> MiniWoB:
        """A new environment, which gets a tab to itself. Raises EnvError if no browser can be had."""
        with self._lock:
            if not self._open:
                self._start()
            env = MiniWoB(self._browser)
            self._open.add(env)
            return env

    def run(self, env: MiniWoB, call: Coroutine[Any, Any, T]) -> T:
        """The result of the environment's call; whoever interrupts the waiting ends the call."""
        if env not in self._open:
            call.close()
            raise EnvError("this environment's browser has stopped, or is that of the process before a fork")
        return self._wait(call)

    def close(self, env: MiniWoB) -> None:
        """Close the environment's tab, and with the last one the browser; without effect on a closed one."""
        with self._lock:
            if env in self._open:
                self._wait(env.close())
                self._open.remove(env)
                if not self._open:
                    self._stop()

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # without effect on a call that is done

    def _start(self) -> None:
        self._browser, self._loop = Browser(pages=0), asyncio.new_event_loop()
        # a daemon: Python waits for all other threads before it calls what `atexit` holds
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


SHARED = SharedBrowser()


def _after_fork() -> None:
    """A child has neither the thread nor a right to its parent's browser: it starts its own."""
    atexit.unregister(SHARED._stop)
    SHARED.__init__()


os.register_at_fork(after_in_child=_after_fork)
