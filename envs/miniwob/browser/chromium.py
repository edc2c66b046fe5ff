"""Which Chromium runs, with which arguments, and how it is killed when this process ends."""

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
    # At most four renderers and none in reserve: 16 pages take 590 MiB instead of 680. OverscrollHistoryNavigation
    # is off because scrolling far to the left went back to the previous page. Chromium obeys only the last such
    # list, so it also has the entries of Playwright's list that leave addresses and requests unchanged.
    "--renderer-process-limit=4", "--disable-shared-workers",
    "--disable-features=SpareRendererForSitePerProcess,OverscrollHistoryNavigation,HttpsUpgrades,"
    "HttpsFirstBalancedModeAutoEnable,AvoidUnnecessaryBeforeUnloadCheckSync,"
    "AvoidCorsURLLoaderRestartOnRedirect",
    # No host can be reached by name or address. Playwright's routes do not see WebSockets, preconnecting links and
    # shared workers, and WebRTC sends datagrams. tests/envs/test_untrusted.py tries all of them.
    "--host-resolver-rules=MAP * ~NOTFOUND", "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",  # the same for the shell
    "--hide-scrollbars",  # so that a watched page has the same layout as one without a window
]  # fmt: skip


# Where Playwright keeps Chromium, and its names on PATH. The headless shell has no window and none of a browser's own
# pages. It renders the same, in less than two thirds of the memory, and starts in a third of the processor time.
SHELL = ("chromium_headless_shell-*/chrome-*linux*/*headless*shell", ("chromium-headless-shell",))
FULL = ("chromium-*/chrome-linux*/chrome", ("chromium", "chromium-browser", "google-chrome"))


def find_chromium(*, shell: bool = True) -> str:
    """The Chromium to run: $MINIDPO_CHROMIUM, or Playwright's, or one on PATH. shell: prefer a headless shell.
    Raises EnvError if there is none."""
    if named := os.environ.get("MINIDPO_CHROMIUM"):
        if not os.access(named, os.X_OK):
            raise EnvError(f"MINIDPO_CHROMIUM={named} is not a program")
        return named
    store = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache/ms-playwright")
    for builds, names in (SHELL, FULL) if shell else (FULL,):
        newest_first = sorted(
            store.glob(builds), key=lambda path: (len(str(path)), path), reverse=True
        )
        for path in (*newest_first, *map(shutil.which, names)):
            if path is not None:
                return str(path)
    raise EnvError(
        "no Chromium found: run `playwright install --with-deps chromium`, or install "
        "the package chromium or google-chrome, or name a browser in MINIDPO_CHROMIUM"
    )


class Processes:
    """Chromium's process group, which is killed as a whole, at the latest when this process ends."""

    # The guard's input closes when this process ends, for whatever reason. Then the guard kills Chromium, and 3 s
    # later the driver, which needs the time to remove its files.
    GUARD = 'read -r _; kill -KILL "-$1"; sleep 3; kill -KILL "$2"'

    def __init__(self, group: int, driver: int):
        assert group != os.getpgrp(), "the driver starts Chromium in a process group of its own"
        self._group = group
        # in its own session, so that a signal to this process's group does not kill the guard
        command = ["/bin/sh", "-c", self.GUARD, "guard", str(group), str(driver)]
        self._guard = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def kill(self, *_) -> None:
        """Kill the group, but only once, because its number may later belong to another group."""
        if self._guard.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._group, signal.SIGKILL)
            self._guard.kill()
            self._guard.communicate()


async def refuse(route: Route) -> None:
    """Refuse a request."""
    # "aborted" leaves the page unchanged, "failed" replaces it by an error page.
    reason = "aborted"
    try:
        _ = route.request.frame
    except Error:
        # a new window has no frame yet; its popup event, which closes it, comes only if it fails
        reason = "failed"
    with contextlib.suppress(Error):  # the page is gone
        await route.abort(reason)
