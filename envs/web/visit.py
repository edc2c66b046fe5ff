"""Any page of the web as an environment without a verdict, confined to its origin.

The page is read and acted on like MiniWoB's pages, one window at a time. Three fences confine it. The gate is
Chromium's only way to the network. A request for anything outside the origin is aborted, and the page stays where it
is. If a tab shows something outside all the same, it is led back. Actions are never replayed, because on the web they
cannot be undone.
"""

import asyncio
import base64
import contextlib
import json
import secrets
import time
from pathlib import Path
from typing import ClassVar

from envs.actions import Action
from envs.miniwob.browser.chromium import ARGS, refuse
from envs.miniwob.browser.driver import Browser
from envs.miniwob.browser.page import OPENING_S, SCRIPTS, Page, Sight, bounded
from envs.protocol import EnvError, Observation
from envs.web.gate import Bounds, gate

TAB, _, *SEEING = SCRIPTS  # visit.js stands in for episode.js
SCRIPT = "\n".join(
    path.read_text(encoding="utf-8") for path in [Path(__file__).with_name("visit.js"), *SEEING]
)
QUIET_S = 0.25  # a page is quiet after this time without a request
PATIENCE_S = 5.0  # the longest wait for a quiet page
# what the browser's own keys do, because DevTools sends keys to the page alone
KEYS = {
    "Alt+ArrowLeft": "history.back()",
    "Alt+ArrowRight": "history.forward()",
    "F5": "location.reload()",
}
MOST_NOTES = 3  # to the agent at a time, because a page can cause any number
ENDLESS = {"eventsource", "websocket", "media", "ping"}  # requests that may stay open forever


class WebPage(Page):
    """A tab with any page."""

    AREA: ClassVar = {"x": 0, "y": 0, "width": 800, "height": 600}
    SELECT_ALL: ClassVar = (
        "Control+a"  # as a keyboard sends it: editors written in JavaScript look for the small a
    )

    @staticmethod
    async def prepare(context) -> None:
        """Does nothing; `confine` prepares the tab, because it knows the bounds."""

    async def confine(self, bounds: Bounds) -> None:
        """Put up the fences."""
        self._bounds, self._last, self._given, self._again = bounds, bounds.url, 1, False
        self._mini = f"mini_{secrets.token_hex(8)}"  # a name that no page has
        self._notes: list[str] = []  # for the agent: what the page tried to do and could not
        self._under_way: set = set()  # requests
        self._active_s = time.monotonic()
        tab, size = self._tab, {name: self.AREA[name] for name in ("width", "height")}
        await bounded(tab.set_viewport_size(size), "sizing")
        tree = await bounded(self._devtools.send("Page.getFrameTree"), "finding the frame")
        self._frame = tree["frameTree"]["frame"]["id"]
        await bounded(self._devtools.send("Page.enable"), "fencing")
        # this script runs in frames, too
        everywhere = {"source": TAB.read_text(encoding="utf-8"), "worldName": "minidpo-tab"}
        await bounded(
            self._devtools.send("Page.addScriptToEvaluateOnNewDocument", everywhere), "fencing"
        )
        tab.on("dialog", self._dismiss)
        tab.on("popup", self._close_popup)
        tab.on("download", lambda _: self._note("the page began a download, which was stopped"))
        tab.on("filechooser", lambda _: self._note("the page asked for a file, and was given none"))
        tab.on("request", lambda request: self._count(request, self._under_way.add))
        for end in ("requestfinished", "requestfailed"):
            tab.on(end, lambda request: self._count(request, self._under_way.discard))
        await self.context.route(bounds.outside, refuse)
        # Playwright's routes do not see redirects. This sees those of the tab's documents.
        self._devtools.on("Fetch.requestPaused", self._let_pass)
        patterns = {"patterns": [{"urlPattern": "*", "resourceType": "Document"}]}
        await bounded(self._devtools.send("Fetch.enable", patterns), "fencing")

    async def begin(self) -> None:
        """Load the URL of the bounds. Raises EnvError if that fails."""
        self._notes.clear()
        try:
            # otherwise the old page would stay, with what was typed into it
            if "#" in self._bounds.url:
                await self._go("about:blank")
            await self._go(self._bounds.url)
            await bounded(self._devtools.send("Page.resetNavigationHistory"), "forgetting")
        except EnvError as error:
            raise EnvError("; ".join(self._notes) or str(error)) from None

    async def do(self, action: Action) -> None:
        """Carry out the action. What went wrong is told by `look_when_quiet`."""
        self._active_s, self._again = time.monotonic(), False
        try:
            error = await self.act(action)
        except EnvError as broken:  # perhaps the page was only left; the next look will tell
            error = str(broken)
            with contextlib.suppress(EnvError):
                await bounded(self.release(), "letting go")
                await bounded(self._tab.mouse.up(), "letting go")
        if error:
            self._note(error, first=True)

    async def look_when_quiet(self) -> tuple[Sight, str | None]:
        """What the page shows when it is quiet, and the notes for the agent."""
        for attempt in range(3):
            try:
                await self._settle()
                if not self._bounds.page.match(self._tab.url):
                    self._note(
                        "the page could not be loaded, and the one before is shown again"
                        if self._tab.url.startswith("chrome-error:")
                        else "the page went where it may not go, and was led back"
                    )
                    await self._go(self._last)
                await self._call("rested")  # a key that scrolls returns before the page has moved
                sight, url = await self.look(), self._tab.url
                if not self._bounds.page.match(url):  # meanwhile
                    raise EnvError("looking: the page goes where it may not go")
                self._last = url
                break
            except EnvError as error:  # a new document was loaded meanwhile
                if attempt == 2:
                    raise
                if attempt == 1 and "no answer" in str(error):
                    # while Chromium waits for a document, it runs no script in the one before it
                    await bounded(self._devtools.send("Page.stopLoading"), "stopping")
                    self._note("the page gave no answer: what was loading was stopped")
        self._given = sight.given
        notes, self._notes = self._notes, []
        if len(notes) > MOST_NOTES:
            notes[MOST_NOTES:] = [f"and {len(notes) - MOST_NOTES} more"]
        return sight, "; ".join(notes) or None

    async def screenshot(self) -> bytes:
        """PNG of the window. Playwright's own screenshot waits for fonts, which may never come."""
        shot = await bounded(self._devtools.send("Page.captureScreenshot"), "taking a screenshot")
        return base64.b64decode(shot["data"])

    async def mark(self, action: Action | None) -> None:
        """Draw a frame around the element that the action uses, until the next mark."""
        args = {} if action is None else dict(action.args)
        place = () if "ref" in args or "x" not in args else self._within(args["x"], args["y"])[:2]
        await self._call("mark", args.get("ref", ""), *place)

    async def _press(self, key: str) -> str | None:
        if script := KEYS.get(key):
            self._again = True
            await self._call("where", "0")  # makes a new world if the document is another one now
            await self._evaluate(script, key)
            return None
        return await super()._press(key)

    async def _call(self, function: str, *args: str | int) -> dict:
        """Call a script in an isolated world of the tab's document.

        References in a new document begin after the last one that was given.
        """
        if self._world:
            try:
                return await super()._call(function, *args)
            except EnvError as error:
                # The document is gone, and its context with it. Another process may have a context with the same
                # number, perhaps the page's own, in which the scripts are not defined. Nor are they defined if the
                # deadline passed while they were loaded.
                if "context" not in str(error) and f"{self._mini} is not" not in str(error):
                    raise
        wanted = {"frameId": self._frame, "worldName": "minidpo"}
        world = await bounded(self._devtools.send("Page.createIsolatedWorld", wanted), function)
        self._world = {"contextId": world["executionContextId"]}
        begin = f"globalThis.{self._mini} = mini;\nmini.from({self._given});"
        await self._evaluate(f"{SCRIPT}\n{begin}", function)
        return await super()._call(function, *args)

    async def _go(self, url: str) -> None:
        loading = self._tab.goto(url, timeout=0, wait_until="domcontentloaded")
        await bounded(loading, f"loading {url}", OPENING_S)

    async def _settle(self) -> None:
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if not self._under_way and time.monotonic() > self._active_s + QUIET_S:
                return
            await asyncio.sleep(0.02)
        self._under_way.clear()

    def _count(self, request, change) -> None:
        if request.resource_type not in ENDLESS:
            self._active_s = time.monotonic()
            change(request)

    def _note(self, note: str, *, first: bool = False) -> None:
        if note not in self._notes:
            self._notes.insert(0 if first else len(self._notes), note)

    async def _dismiss(self, dialog) -> None:
        if dialog.type == "beforeunload":  # an agent that follows a link wants to leave
            await dialog.accept()
            return
        said = json.dumps(" ".join(dialog.message.split())[:200], ensure_ascii=False)
        self._note(f"the page said {said} in a dialog, which was dismissed")
        await dialog.dismiss()

    async def _close_popup(self, popup) -> None:
        self._note("the page opened another window, which was closed")
        await popup.close()

    async def _let_pass(self, event: dict) -> None:
        """Let a document through or abort it, at its first address and at each redirect."""
        url, command = event["request"]["url"], "Fetch.continueRequest"
        answer = {"requestId": event["requestId"]}
        again = self._again and event["request"]["method"] == "POST"
        outside = self._bounds.outside.match(url)
        if again or outside:
            command, answer["errorReason"] = "Fetch.failRequest", "Aborted"
        if again:
            self._note("what was sent would be sent again, so the page stays", first=True)
        elif outside and event["frameId"] == self._frame:
            shown, origin = json.dumps(url[:200]), self._bounds.origin
            self._note(f"{shown} lies outside {origin}, where this page has to stay", first=True)
        with contextlib.suppress(EnvError):  # the document that asked is gone
            await bounded(self._devtools.send(command, answer), "letting pass")


class Web:
    """`async with Web(Bounds(url), goal) as env:` gives an `Env` of one page with the user's goal."""

    def __init__(self, bounds: Bounds, goal: str, headless: bool = True):
        self.bounds, self.goal, self._headless = bounds, goal, headless

    async def __aenter__(self) -> "Web":
        async with contextlib.AsyncExitStack() as stack:
            port = await stack.enter_async_context(gate(self.bounds))
            args = [*ARGS, "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
                    f"--proxy-server=socks5://127.0.0.1:{port}", "--proxy-bypass-list=<-loopback>",
                    "--deny-permission-prompts"]  # fmt: skip
            browser = await stack.enter_async_context(Browser(0, self._headless, args, WebPage))
            self.page = await browser.new_page()
            await self.page.confine(self.bounds)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_) -> None:
        await self._stack.aclose()

    async def reset(self, task: str = "", seed: int = 0) -> Observation:
        """Load the bounds' URL."""
        await self.page.begin()
        return await self._look()

    async def step(self, action: Action) -> Observation:
        """Carry out one action; it is never repeated."""
        await self.page.do(action)
        return await self._look()

    async def _look(self) -> Observation:
        sight, error = await self.page.look_when_quiet()
        return Observation(self.goal, sight.text, error=error)
