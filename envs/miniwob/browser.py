"""5. Browser: Chromium's life, and episodes that outlive it.

One Chromium, one context, N pages. A reset that fails climbs from in place to a reload, a new page, a new browser.
If a page dies in the middle of an episode, the episode is replayed on a new one: the same (task, seed, actions)
give the same observations, and that is checked. When nothing helps, EnvError. Read `experts` next.
"""
import asyncio
import contextlib
import os
import re
import shutil
from pathlib import Path

from playwright.async_api import BrowserContext, Error, Playwright, async_playwright

from envs.actions import Action
from envs.miniwob.page import SCRIPT, VIEWPORT, Page, Sight, bounded
from envs.miniwob.tasks import HTML, RELOAD, THRESHOLD
from envs.protocol import EnvError, Observation, Outcome

ARGS = [
    "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip
TRIES = 2


def find_chromium() -> str:
    """The Chromium to run: $MINIDPO_CHROMIUM, Playwright's own, or one on PATH; raises EnvError if there is none."""
    named = os.environ.get("MINIDPO_CHROMIUM")
    if named:
        if not os.access(named, os.X_OK):
            raise EnvError(f"MINIDPO_CHROMIUM={named} is not a program")
        return named
    store = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache/ms-playwright")
    own = sorted(store.glob("chromium-*/chrome-linux*/chrome"))
    names = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
    path = own[-1] if own else next(filter(None, map(shutil.which, names)), None)
    if path is None:
        raise EnvError("no Chromium found: install one (playwright install chromium) or set MINIDPO_CHROMIUM")
    return str(path)


class Browser:
    """`async with Browser(pages=8) as browser:` gives `browser.envs`, one environment for each page."""

    def __init__(self, pages: int = 8, headless: bool = True):
        self.envs = [MiniWoB(self) for _ in range(pages)]
        self._headless = headless
        self._driver: Playwright | None = None
        self._context: BrowserContext | None = None
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> "Browser":
        await self._start()
        return self

    async def __aexit__(self, *_) -> None:
        await self._stop()

    async def new_page(self) -> Page:
        """A new tab; a browser that cannot give one is replaced, and with it every page of its other episodes."""
        async with self._lock:
            if self._context is not None:
                with contextlib.suppress(EnvError):
                    return await Page.open(self._context)
            await self._stop()
            await self._start()
            return await Page.open(self._context)

    async def _start(self) -> None:
        self._driver = await async_playwright().start()
        program = find_chromium()
        try:
            chromium = await self._driver.chromium.launch(
                executable_path=program, headless=self._headless, args=ARGS, chromium_sandbox=os.geteuid() != 0
            )
        except Error as error:
            await self._stop()
            raise EnvError(f"{program} does not start: {error.message}") from error
        self._context = await bounded(
            chromium.new_context(viewport=VIEWPORT, locale="en-US", timezone_id="UTC", accept_downloads=False),
            "opening a context",
        )
        await bounded(self._context.add_init_script(SCRIPT), "opening a context")
        # No request leaves the package's folder: neither to the network nor to other files.
        outside = re.compile(f"^(?!{re.escape(HTML.as_uri())}/)")
        await bounded(self._context.route(outside, lambda route: route.abort()), "opening a context")

    async def _stop(self) -> None:
        driver, self._driver, self._context = self._driver, None, None
        if driver is not None:
            await driver.stop()


class MiniWoB:
    """The environment of one page: an `Env` whose episodes survive the death of page and browser."""

    def __init__(self, browser: Browser):
        self._browser = browser
        self._page: Page | None = None
        self._instance: tuple[str, int] | None = None
        self._instruction = ""
        self._past: list[tuple[Action, Observation]] = []
        self._first: Observation | None = None

    async def reset(self, task: str, seed: int) -> Observation:
        """Start (task, seed): in place where that is exact, else with the page loaded anew."""
        self._instance, self._past = (task, seed), []
        self._first = await self._begin()
        return self._first

    async def step(self, action: Action) -> Observation:
        """Carry out one action; after the end of the episode nothing happens any more."""
        last = self._past[-1][1] if self._past else self._first
        if last is None:
            raise ValueError("step() before reset()")
        if last.outcome is not None:
            return last
        for attempt in range(TRIES + 1):
            try:
                observation = await self._step(action)
                break
            except EnvError:
                if attempt == TRIES:
                    raise
                await self._drop_page()
                await self._replay()
        self._past.append((action, observation))
        return observation

    async def screenshot(self) -> bytes:
        """PNG of the 160 x 210 task area."""
        return await self._page.screenshot()

    async def _begin(self) -> Observation:
        task, seed = self._instance
        for attempt in range(TRIES + 2):
            try:
                if self._page is None:
                    self._page = await self._browser.new_page()
                if self._page.task != task or task in RELOAD or attempt:
                    await self._page.load(task)
                sight = await self._page.reset(seed)
                self._instruction = sight.instruction
                return self._observation(sight, None)
            except EnvError:
                if attempt == TRIES + 1:
                    raise
                if attempt:
                    await self._drop_page()

    async def _step(self, action: Action) -> Observation:
        error = await self._page.act(action)
        return self._observation(await self._page.look(), error)

    async def _replay(self) -> None:
        """Bring a new page to where the old one died; raises EnvError if it shows anything else."""
        if await self._begin() != self._first:
            raise EnvError(f"{self._instance} began differently when it was replayed")
        for action, before in self._past:
            if await self._step(action) != before:
                raise EnvError(f"{self._instance} went differently when it was replayed, at {action}")

    async def _drop_page(self) -> None:
        page, self._page = self._page, None
        if page is not None:
            with contextlib.suppress(EnvError):
                await page.close()

    def _observation(self, sight: Sight, error: str | None) -> Observation:
        done = sight.verdict is not None
        solved = done and sight.verdict >= THRESHOLD(self._instance[0])
        outcome = (Outcome.SOLVED if solved else Outcome.FAILED) if done else None
        return Observation(self._instruction, sight.text, outcome, float(sight.verdict or 0), error)
