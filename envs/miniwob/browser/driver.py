"""Starts and ends Chromium, and keeps episodes going when a page or Chromium dies.

There is one Chromium with one context and N pages. If a reset fails, it is tried again after a reload, then on a new
page, then in a new browser. If a page dies in the middle of an episode, the episode is replayed on a new page: the
same (task, seed, actions) must give the same observations, which is checked. If nothing helps, EnvError is raised. A
browser that is given up is killed; if Python itself is killed, a guard process kills the browser.
"""

import asyncio
import contextlib
import os
import sys
import tempfile

from playwright.async_api import BrowserContext, CDPSession, Error, Playwright, async_playwright

from envs.actions import Action
from envs.miniwob.browser.chromium import ARGS, Processes, find_chromium
from envs.miniwob.browser.page import OPENING_S, VIEWPORT, Page, Sight, bounded
from envs.miniwob.tasks import RELOAD, THRESHOLD
from envs.protocol import EnvError, Observation, Outcome

LADDER = ("in place", "reload", "new page", "new browser")
REPLAYS = 2


class Browser:
    """`async with Browser(pages=8) as browser:` gives `browser.envs`, one environment for each page."""

    def __init__(self, pages: int = 8, headless: bool = True, args: list[str] = ARGS, kind=Page):
        self.envs = [MiniWoB(self) for _ in range(pages)]
        self._headless, self._args, self._kind = headless, args, kind
        self._driver: Playwright | None = None
        self._transport = None  # gives access to the process of Playwright's driver
        self._chromium: Processes | None = None
        self._scratch: tempfile.TemporaryDirectory | None = None  # holds the files of a visit
        self._devtools: CDPSession | None = None  # of the browser itself, not of a page
        self._context: BrowserContext | None = None
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> "Browser":
        await self._start()
        return self

    async def __aexit__(self, *_) -> None:
        await self._stop()

    async def new_page(self, broken: BrowserContext | None = None) -> Page:
        """A new tab. If the browser cannot open one, or is `broken`, it is replaced together with all its tabs."""
        async with self._lock:
            if self._context is not None and self._context is not broken:
                with contextlib.suppress(EnvError):
                    # notices a browser that hangs within the short deadline, not the one for opening
                    await bounded(
                        self._devtools.send("Browser.getVersion"), "asking for the browser"
                    )
                    return await self._kind.open(self._context)
            await self._stop()
            await self._start()
            return await self._kind.open(self._context)

    async def _start(self) -> None:
        # pages of the web are opened in the full browser, so that they look as they do to people
        program = find_chromium(shell=self._headless and self._kind is Page)
        manager = async_playwright()
        try:
            self._driver = await bounded(manager.start(), "starting", OPENING_S)
        except Exception as error:  # a driver that dies at once raises a bare Exception
            raise EnvError(
                f"Playwright's driver does not start: {' '.join(str(error).split())}"
            ) from error
        self._transport = manager._client._transport
        # Every call reports a killed driver, so asyncio need not print it as well.
        self._transport.on_error_future.add_done_callback(
            lambda lost: lost.cancelled() or lost.exception()
        )
        try:
            # twice Chromium's own time, because the driver kills a Chromium that does not start
            await bounded(self._launch(program), f"starting {program}", 2 * OPENING_S)
        except BaseException:
            await self._stop()
            raise

    async def _launch(self, program: str) -> None:
        try:
            chromium = await self._started(program)
            self._devtools = await chromium.new_browser_cdp_session()
            processes = (await self._devtools.send("SystemInfo.getProcessInfo"))["processInfo"]
            main = next(process["id"] for process in processes if process["type"] == "browser")
            self._chromium = Processes(os.getpgid(main), self._transport._proc.pid)
            # if Chromium or the driver dies, the rest of Chromium is killed
            chromium.on("disconnected", self._chromium.kill)
            self._transport.on_error_future.add_done_callback(self._chromium.kill)
            self._context = await chromium.new_context(
                viewport=VIEWPORT,
                locale="en-US",
                timezone_id="UTC",
                accept_downloads=False,
                service_workers="block",
            )
            # A crashed tab would give no answer until the deadline; a closed one fails at once.
            self._context.on("page", lambda tab: tab.on("crash", lambda tab: tab.close()))
            await self._kind.prepare(self._context)
        except (Error, OSError) as error:
            words = " ".join(getattr(error, "message", str(error)).split())  # on one line
            raise EnvError(f"{program} does not start: {words}") from error

    async def _started(self, program: str):
        """Start Chromium, in its sandbox if there is one.

        Root has none; since Ubuntu 23.10 neither has a program that AppArmor does not know. Without a sandbox only
        MiniWoB's pages are opened, which can reach nothing.
        """
        how = {
            "executable_path": program,
            "headless": self._headless,
            "args": self._args,
            "timeout": 1000 * OPENING_S,
        }
        # the full browser leaves a folder with a socket at each start, and a socket's path must be short
        if self._kind is not Page and len(tempfile.gettempdir()) <= 40:
            self._scratch = tempfile.TemporaryDirectory(
                prefix="minidpo_", ignore_cleanup_errors=True
            )
            how["env"] = {**os.environ, "TMPDIR": self._scratch.name}
        try:
            return await self._driver.chromium.launch(**how, chromium_sandbox=os.geteuid() != 0)
        except Error as error:
            if "No usable sandbox" not in error.message:
                raise
            if self._kind is not Page:
                raise EnvError(
                    f"{program} finds no sandbox on this system, and no page of the web is "
                    "visited without one: name in MINIDPO_CHROMIUM a browser that may use it, such as "
                    "the one in Google Chrome's package"
                ) from None
            print(
                f"{program} finds no sandbox on this system: MiniWoB's pages are opened without one",
                file=sys.stderr,
            )
            return await self._driver.chromium.launch(**how, chromium_sandbox=False)

    async def _stop(self) -> None:
        """Kill Chromium, then let the driver clean up and end; kill the driver if it does not. Where the web
        was visited, Chromium is asked first: only then its profile, with what was seen, is surely deleted."""
        context, self._context = self._context, None
        try:
            if context is not None and self._kind is not Page:
                with contextlib.suppress(EnvError):
                    await bounded(context.browser.close(), "closing the browser")
        finally:
            if self._chromium is not None:
                self._chromium.kill()
            if self._scratch is not None:
                self._scratch.cleanup()
        if self._driver is not None:
            driver, self._driver = self._driver, None
            with contextlib.suppress(EnvError):
                await bounded(driver.stop(), "stopping the driver")
            with contextlib.suppress(EnvError, ProcessLookupError):
                self._transport._proc.kill()
                await bounded(self._transport._proc.wait(), "burying the driver")


class MiniWoB:
    """An `Env` with one page. Its episodes continue if page or browser dies."""

    def __init__(self, browser: Browser):
        self._browser = browser
        self._page: Page | None = None
        self._instance: tuple[str, int] | None = None
        self._instruction = ""
        self._done: list[Action] = []
        self._seen: list[Observation] = []  # one more than _done

    async def reset(self, task: str, seed: int) -> Observation:
        """Start (task, seed): in place if that leaves no trace of the last episode, otherwise after a reload."""
        self._instance, self._done, self._seen = (task, seed), [], []
        self._seen = [await self._begin()]
        return self._seen[0]

    async def step(self, action: Action) -> Observation:
        """Carry out one action. After the end of the episode it does nothing."""
        if not self._seen:
            raise ValueError("step() before reset()")
        if self._seen[-1].outcome is not None:
            return self._seen[-1]
        for replay in range(REPLAYS + 1):
            try:
                if replay:
                    await self._replay()
                observation = await self._act(action)
                break
            except EnvError:
                if replay == REPLAYS:
                    raise
        self._done.append(action)
        self._seen.append(observation)
        return observation

    async def screenshot(self) -> bytes:
        """PNG of the 160 x 210 task area."""
        if self._page is None:
            raise EnvError("there is no page to take a screenshot of")
        return await self._page.screenshot()

    async def where(self, ref: str) -> list[int] | None:
        """Left, top, width and height of an element on the screenshot; None if there is no such element."""
        return await self._page.where(ref)

    async def marks(self, action: Action) -> list[list[int]]:
        """Boxes, as from `where`, of the elements that the action is about to use. A point has width and height 0."""
        boxes = [await self.where(action[name]) for name in ("ref", "to") if name in action]
        place = [[action["x"], action["y"], 0, 0]] if "x" in action else []
        return [box for box in boxes if box is not None] + place

    async def point(self, action: Action | None) -> None:
        """Frame the spot of the action for people who watch; None removes the frame."""
        await self._page.point(action)

    async def close(self) -> None:
        """Close the tab; the next reset opens a new one."""
        page, self._page = self._page, None
        if page is not None:
            with contextlib.suppress(EnvError):  # a tab that does not answer counts as closed
                await page.close()

    async def _begin(self) -> Observation:
        task, seed = self._instance
        for rung in LADDER:
            try:
                if self._page is None:
                    self._page = await self._browser.new_page()
                elif rung in LADDER[2:]:
                    await self._renew(broken=self._page.context if rung == "new browser" else None)
                if self._page.task != task or task in RELOAD or rung != "in place":
                    await self._page.load(task)
                sight = await self._page.reset(seed)
                self._instruction = sight.instruction
                return self._observation(sight, None)
            except EnvError:
                if rung == LADDER[-1]:
                    raise
        raise AssertionError("the ladder ends with a return or a raise")

    async def _renew(self, broken: BrowserContext | None) -> None:
        # before close(), because a new browser closes the old page
        new = await self._browser.new_page(broken)
        await self.close()
        self._page = new

    async def _act(self, action: Action) -> Observation:
        error = await self._page.act(action)
        return self._observation(await self._page.look(), error)

    async def _replay(self) -> None:
        """Replay the episode on a new page. Raises EnvError if the page does not show the same as before."""
        await self._renew(broken=None)
        seen = [await self._begin(), *[await self._act(action) for action in self._done]]
        if seen != self._seen:
            raise EnvError(f"{self._instance} went differently when it was replayed")

    def _observation(self, sight: Sight, error: str | None) -> Observation:
        over = sight.verdict is not None
        solved = over and sight.verdict >= THRESHOLD(self._instance[0])
        outcome = (Outcome.SOLVED if solved else Outcome.FAILED) if over else None
        return Observation(self._instruction, sight.text, outcome, float(sight.verdict or 0), error)
