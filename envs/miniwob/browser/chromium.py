"""4. Chromium: which program it is, how it is started, and that none outlives us. Read `page` next."""
import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

from playwright.async_api import Error, Route

from envs.protocol import EnvError

ARGS = [
    "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    # More than four pages share renderers, and none is kept in reserve: 16 pages take 590 MiB and not 680.
    # And the wheel leads to no other page: turned far to the left it went back to the one before.
    "--renderer-process-limit=4", "--disable-shared-workers",
    "--disable-features=SpareRendererForSitePerProcess,OverscrollHistoryNavigation",
    # No host is reached, by name or address: WebSockets, preconnecting links and shared workers ask no route,
    # and WebRTC sends datagrams. tests/test_untrusted.py tries all that.
    "--host-resolver-rules=MAP * ~NOTFOUND", "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--hide-scrollbars",  # as without a window: a page is laid out the same when somebody watches
]  # fmt: skip


def find_chromium() -> str:
    """The Chromium to run: $MINIDPO_CHROMIUM, else Playwright's own, else one on PATH; EnvError if none."""
    if named := os.environ.get("MINIDPO_CHROMIUM"):
        if not os.access(named, os.X_OK):
            raise EnvError(f"MINIDPO_CHROMIUM={named} is not a program")
        return named
    store = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache/ms-playwright")
    own = sorted(store.glob("chromium-*/chrome-linux*/chrome"), key=lambda path: (len(str(path)), path))
    names = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
    path = own[-1] if own else next(filter(None, map(shutil.which, names)), None)
    if path is None:
        raise EnvError("no Chromium found: run `playwright install --with-deps chromium`, or install "
                       "the package chromium or google-chrome, or name a browser in MINIDPO_CHROMIUM")
    return str(path)


class Processes:
    """Chromium's process group: killed as one, at the latest when this process has ended, however it did."""

    # Its input ends with this process; it kills Chromium, then the driver, which needs time to remove files.
    GUARD = 'read -r _; kill -KILL "-$1"; sleep 3; kill -KILL "$2"'

    def __init__(self, group: int, driver: int):
        assert group != os.getpgrp(), "the driver starts Chromium in a process group of its own"
        self._group = group
        # in a session of its own: what kills this process's group must not kill the guard
        command = ["/bin/sh", "-c", self.GUARD, "guard", str(group), str(driver)]
        self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                                       stderr=subprocess.DEVNULL, start_new_session=True)

    def kill(self, *_) -> None:
        """Kill it; only once, for later the number may be another group's."""
        if self._guard.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._group, signal.SIGKILL)
            self._guard.kill()
            self._guard.communicate()


async def refuse(route: Route) -> None:
    """Let a request go nowhere."""
    # What is "aborted" leaves the page where it is, what has "failed" puts an error page in its place.
    reason = "aborted"
    try:
        _ = route.request.frame
    except Error:  # a new window's, which has none yet: the window is heard of, and closed, only if it fails
        reason = "failed"
    with contextlib.suppress(Error):  # the page has gone meanwhile
        await route.abort(reason)
