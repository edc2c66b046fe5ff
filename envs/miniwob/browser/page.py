"""One browser tab: what it shows, as text, and trusted input into it.

The scripts beside this file read the page: tab.js (keeps everything in the tab), episode.js (which listeners there
are, when the page is quiet, how the episode ended), sight.js (what is visible), page.js (the text). This file acts.
Every action arrives as real mouse and keyboard input, so an agent can do nothing that a person could not. If an action
cannot be carried out, a sentence says why; if something breaks, EnvError is raised. On two cores a look takes 1 ms, a
click 3 ms, a text field 5 ms, a reset 5 ms.
"""

import asyncio
import json
import re
from calendar import month_name
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

from playwright.async_api import BrowserContext, CDPSession, Error
from playwright.async_api import Page as Tab

from envs.actions import Action
from envs.miniwob.browser.chromium import refuse
from envs.miniwob.tasks import HTML, url
from envs.protocol import EnvError

NAMES = "tab.js", "episode.js", "sight.js", "page.js"
SCRIPTS = [Path(__file__).with_name(name) for name in NAMES]
SCRIPT = "\n".join(path.read_text(encoding="utf-8") for path in SCRIPTS)
VIEWPORT = {"width": 500, "height": 500}
MODIFIERS = {"Shift", "Control", "Alt", "Meta"}
DEADLINE_S = 10.0
# starting Chromium took 23 s and opening a page 14 s while other work kept two cores busy
OPENING_S = 60.0
WRITTEN = "2024-05-31, 13:05, 2024-05, 2024-W22 or 2024-05-31T13:05"  # forms of dates and times
GONE = re.compile(r"has been closed|crashed|Session closed|Connection closed")  # Playwright's words
T = TypeVar("T")


def in_parts(text: str) -> list[str]:
    """The parts in which Chromium shows a date or time, which is given as a value or as it is shown.

    >>> in_parts("2024-05-31T09:05"), in_parts("2024-05"), in_parts("2024-W22")
    (['05', '31', '2024', '09', '05', 'AM'], ['May', '2024'], ['22', '2024'])
    """
    text = re.sub(r"^(\d{4})-(\d\d)-(\d\d)[T ]?", r"\2/\3/\1 ", text)
    text = re.sub(r"^(\d{4})-W(\d\d)$", r"\2/\1", text)
    text = re.sub(r"^(\d{4})-(0[1-9]|1[0-2])$", lambda m: f"{month_name[int(m[2])]} {m[1]}", text)
    text = re.sub(
        r"\b(\d\d):\d\d[\d:.]*$", lambda m: f"{m[0]} {'PM' if m[1] > '11' else 'AM'}", text
    )
    return [part.zfill(2) for part in re.split(r"\W+", text) if part] or [""]


async def bounded(call: Awaitable[T], what: str, seconds: float | None = None) -> T:
    """The result of a call. Raises EnvError after the deadline, and if browser or driver fails."""
    seconds = seconds or DEADLINE_S
    try:
        return await asyncio.wait_for(call, seconds)
    except TimeoutError as error:
        raise EnvError(f"{what}: no answer within {seconds:g} s") from error
    except Error as error:
        said = error.message.splitlines()[0]
        if GONE.search(said):
            said = "the tab is gone: the page closed it, or it or the browser crashed"
            raise EnvError(said) from error
        raise EnvError(f"{what}: {said}") from error


@dataclass(frozen=True)
class Sight:
    """One look at the page: its text, the verdict (raw reward; None while the episode runs) and, after a reset, the
    instruction."""

    text: str
    verdict: float | None
    given: int  # the next reference that an element gets
    instruction: str | None = None


class Page:
    """A tab with the MiniWoB page of one task."""

    AREA: ClassVar = {"x": 0, "y": 0, "width": 160, "height": 210}
    SELECT_ALL: ClassVar = "Control+A"

    def __init__(self, tab: Tab, devtools: CDPSession):
        self._tab, self._devtools = tab, devtools
        self._world: dict = {}  # the world in which the scripts run: the page's own
        self._mini = "mini"  # their name there
        self.task: str | None = None

    @classmethod
    async def open(cls, context: BrowserContext) -> "Page":
        """A new empty tab in a context that `prepare` has prepared."""
        tab = await bounded(context.new_page(), "opening a page", OPENING_S)
        return cls(tab, await bounded(context.new_cdp_session(tab), "opening a page", OPENING_S))

    @staticmethod
    async def prepare(context: BrowserContext) -> None:
        """Run SCRIPT at the start of each page, and let no page leave the package's folder."""
        context.on("page", lambda tab: tab.on("popup", lambda popup: popup.close()))
        await context.add_init_script(SCRIPT)
        await context.route(re.compile(f"^(?!{re.escape(HTML.as_uri())}/)"), refuse)

    @property
    def context(self) -> BrowserContext:
        """The browser context that the tab belongs to."""
        return self._tab.context

    async def close(self) -> None:
        """Close the tab."""
        await bounded(self._tab.close(), "closing a page")

    async def load(self, task: str) -> None:
        """Load the task's page from disk."""
        self.task = None
        await bounded(self._tab.goto(url(task), timeout=0), f"loading {task}", OPENING_S)
        # Frees the memory of the previous page (11 ms): 16 pages took 540 MiB after 400 episodes instead of 800.
        await bounded(
            self._devtools.send("HeapProfiler.collectGarbage"), f"loading {task}", OPENING_S
        )
        self.task = task

    async def reset(self, seed: int) -> Sight:
        """Begin the episode of this seed on the loaded page, with mouse and focus outside the task area."""
        # A click beside the task takes 1.4 ms; a mouse move would wait for the next frame, 17 ms.
        aside = VIEWPORT["width"] - 1, VIEWPORT["height"] - 1
        await bounded(self._tab.mouse.click(*aside), "leaving the last episode")
        return Sight(**await self._call("reset", seed))

    async def look(self) -> Sight:
        """What the page shows when no animation frame and no timer of up to a second is pending."""
        return Sight(**await self._call("look"))

    async def screenshot(self) -> bytes:
        """PNG of the area."""
        return await bounded(self._tab.screenshot(clip=self.AREA), "taking a screenshot")

    async def where(self, ref: str) -> list[int] | None:
        """Left, top, width and height of an element in pixels; None if it is not on the page."""
        return (await self._call("where", ref))["box"]

    async def point(self, action: Action | None) -> None:
        """Frame the spot of the action, or remove the frame. DevTools draws it, so the page is not changed."""
        args = {} if action is None else dict(action.args)
        spot = await self._call("locate", args["ref"]) if "ref" in args else args
        calls = [("DOM.enable", {}), ("Overlay.enable", {}), ("Overlay.hideHighlight", {})]
        if "x" in spot:
            frame = {"x": int(spot["x"]) - 9, "y": int(spot["y"]) - 9, "width": 18, "height": 18}
            calls.append(
                ("Overlay.highlightRect", {**frame, "outlineColor": {"r": 255, "g": 90, "b": 0}})
            )
        for call in calls:
            await bounded(self._devtools.send(*call), "pointing")

    async def act(self, action: Action) -> str | None:
        """Carry out the action. Returns a sentence if that was not possible as given."""
        command = getattr(self, f"_{action.command.lower()}")
        return await bounded(command(**dict(action.args)), action.command)

    async def _call(self, function: str, *args: str | int) -> dict:
        arguments = ", ".join(map(json.dumps, args))
        return await self._evaluate(f"{self._mini}.{function}({arguments})", function)

    async def _evaluate(self, expression: str, function: str) -> dict:
        # The DevTools call costs 0.4 ms, Playwright's own evaluate() 0.9 ms.
        options = {
            "expression": expression,
            "returnByValue": True,
            "awaitPromise": True,
            **self._world,
        }
        answer = await bounded(self._devtools.send("Runtime.evaluate", options), function)
        if "exceptionDetails" in answer:
            thrown = answer["exceptionDetails"].get("exception", {})
            raise EnvError(
                f"{function}: {thrown.get('description', 'the page threw').partition(chr(10))[0]}"
            )
        return answer["result"].get("value") or {}

    # One method for each command of the grammar, with the same arguments.

    async def _click(self, ref: str, clicks: int = 1) -> str | None:
        spot = await self._call("locate", ref)
        if spot.get("list"):
            # its popup is a separate window, which is not part of the page
            return f"[{ref}] is a list, use SELECT"
        if spot.get("disabled"):
            return f"[{ref}] is disabled"
        if spot.get("icons"):
            await self._tab.mouse.move(spot["x"], spot["y"])
            spot = await self._call("met", ref)
        if "error" not in spot:
            await self._tab.mouse.click(spot["x"], spot["y"], click_count=clicks)
        return spot.get("error")

    async def _double_click(self, ref: str) -> str | None:
        return await self._click(ref, clicks=2)

    async def _hover(self, ref: str) -> str | None:
        spot = await self._call("locate", ref)
        if "error" not in spot:
            await self._tab.mouse.move(spot["x"], spot["y"])
        return spot.get("error")

    async def _type(self, ref: str, text: str) -> str | None:
        spot = await self._call("locate", ref)
        if spot.get("slider") and re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", text):
            steps = (await self._call("slide", ref, text))["steps"]
            for _ in range(abs(steps)):
                await self._tab.keyboard.press("ArrowUp" if steps > 0 else "ArrowDown")
            value = (await self._call("slide", ref, text))["value"]
            return None if float(value) == float(text) else f"[{ref}] cannot be set to {text[:40]}"
        if not spot.get("typed"):
            return spot.get("error") or f"[{ref}] is not a field one can type in"
        keyboard = self._tab.keyboard
        await self._tab.mouse.click(spot["x"], spot["y"])
        # in a date or time two digits fill a part and move to the next; separators do not
        if spot["parts"]:
            if text and not re.search(r"\d", text):
                return f"[{ref}] takes digits, and no {text[:40]!r}"
            iso = None  # the text is written as it is shown
            if re.match(r"\d{4}-|\d\d:\d\d$|$", text):
                iso = text.replace(" ", "T")
            # a click beside the parts leaves the focus where it was, so go to the first of at most eight parts
            # (month to minute, second, its fractions, AM)
            for _ in range(8):
                await keyboard.press("ArrowLeft")
            for _ in range(0 if text else 8):
                await keyboard.press("Backspace")
                await keyboard.press("ArrowRight")
            *parts, last = in_parts(text)
            # a complete number moves to the next part by itself, a year only with six digits or a maximum
            for part in parts:
                await keyboard.type(part.zfill(spot["parts"] if len(part) == 4 else 2))
                if part.isalpha():
                    await keyboard.press("ArrowRight")
            await keyboard.type(last)
            held = (await self._call("locate", ref)).get("held")
            if held is None or iso in (held, f"{held}:00"):
                return None
            if iso is None and (held or not spot["line"]):
                return None
            return f"[{ref}] holds {held!r} now, and not {text!r}: write it as {WRITTEN}"
        if spot["line"]:  # a field of one line has no line breaks, and a typed one would be Enter
            text = re.sub(r"[\r\n]+", "", text)
        await self._select_all(spot["keys"])
        if spot["draws"]:
            for key, times in (await self._call("unselected", ref)).items():
                for _ in range(times):
                    await keyboard.press(key)
        if not text:
            await keyboard.press("Delete")
        elif spot["keys"]:
            await keyboard.type(text)  # the page listens to keys: 1.5 ms a character
        else:
            await keyboard.insert_text(text)
        if text and spot["held"] not in (None, text):
            after = (await self._call("locate", ref)).get("held")
            return f"[{ref}] took nothing of what was typed" if after == spot["held"] else None
        return None

    async def _select_all(self, keys: bool) -> None:
        if keys:
            await self._tab.keyboard.press(self.SELECT_ALL)
            return
        # No script listens to keys, so one key event with the command of Control+A is enough: 0.7 ms, not 1.5.
        key = {"key": "a", "code": "KeyA", "windowsVirtualKeyCode": 65, "modifiers": 2}
        press = [{"type": "rawKeyDown", "commands": ["selectAll"], **key}, {"type": "keyUp", **key}]
        await asyncio.gather(
            *[self._devtools.send("Input.dispatchKeyEvent", event) for event in press]
        )

    async def _select(self, ref: str, option: str) -> str | None:
        """Choose with arrow keys or by a click; with Control if the list allows several choices."""
        tab = self._tab
        way = await self._call("option", ref, option)
        opens = way.get("opens")
        if opens:
            await tab.mouse.click(opens["x"], opens["y"])
            await self._call("rested")
            way = await self._call("option", ref, option)
            if "opens" in way:
                return f"[{ref}] did not open"
        if "x" in way:
            # until it is painted, a click would hit a scrolled list at its old place
            await self._call("painted")
            way = await self._call("option", ref, option)
        several = way.get("several")
        if "x" in way:
            if several:
                await tab.keyboard.down("Control")
            await tab.mouse.click(way["x"], way["y"])
            if several:
                await tab.keyboard.up("Control")
        steps = way.get("steps", 0)
        for _ in range(abs(steps)):
            await tab.keyboard.press("ArrowDown" if steps > 0 else "ArrowUp")
        if way.get("enter"):
            await tab.keyboard.press("Enter")
        elif opens and (several or "error" in way):  # the list stays open
            await tab.keyboard.press("Escape")
        chosen = steps or several is False
        if chosen and (await self._call("option", ref, option, True)).get("steps"):
            return f"[{ref}] did not stay at {option!r}"
        return way.get("error")

    async def _press(self, key: str) -> str | None:
        unknown = f"there is no key {key[:40]!r}"
        held = set(filter(None, key.split("+")[:-1]))
        if not held <= MODIFIERS:  # other keys would act and stay down
            return unknown
        try:
            await self._tab.keyboard.press(key)
        except Error as error:
            if "Unknown key" not in error.message:
                raise
            await self.release()  # modifiers before the unknown key are still down
            return unknown
        return None

    async def release(self) -> None:
        """Release all modifier keys."""
        for modifier in MODIFIERS:
            await self._tab.keyboard.up(modifier)

    async def _scroll(self, ref: str, dx: int, dy: int) -> str | None:
        error = await self._hover(ref)
        if error is None:
            await self._tab.mouse.wheel(dx, dy)
            await self._call("painted")  # the wheel event returns before the page has moved
        return error

    async def _drag(
        self,
        ref: str,
        to: str | None = None,
        dx: int = 0,
        dy: int = 0,
        x: int | None = None,
        y: int | None = None,
    ) -> str | None:
        start = await self._call("locate", ref)
        end = await self._call("locate", to) if to is not None else {}
        error = None
        if x is not None:
            end["x"], end["y"], error = self._within(x, y)
        if "error" in start or "error" in end:
            return start.get("error") or end["error"]
        if to is not None:  # scrolling `to` into view may have moved the start
            there, start = await self._call("where", to), await self._call("locate", ref)
            if "error" in start:  # another element covers it now
                return start["error"]
            if await self._call("where", to) != there:
                return f"[{ref}] and [{to}] are too far apart to be seen at once"
        mouse = self._tab.mouse
        await mouse.move(start["x"], start["y"])
        await mouse.down()
        # in steps, so that the page sees the mouse move, and over what
        await mouse.move(end.get("x", start["x"] + dx), end.get("y", start["y"] + dy), steps=5)
        await mouse.up()
        return error

    def _within(self, x: int, y: int) -> tuple[int, int, str | None]:
        """The point of the task area that is nearest to this one, and a sentence if it is a different one."""
        x_in = min(max(x, 0), self.AREA["width"] - 1)
        y_in = min(max(y, 0), self.AREA["height"] - 1)
        if (x_in, y_in) == (x, y):
            return x, y, None
        return x_in, y_in, f"{x},{y} lies outside, {x_in},{y_in} was taken"

    async def _click_at(self, x: int, y: int) -> str | None:
        *place, error = self._within(x, y)
        await self._tab.mouse.click(*place)
        return error

    async def _wait(self) -> None:
        await asyncio.sleep(0.3)
