"""4. Page: one browser tab as text, and trusted input into it.

`page.js` looks: it walks the DOM once and returns the text, the verdict and, at a reset, the instruction, all in
one call. This file acts: every action arrives as real mouse and keyboard input, so nothing can be solved that a
person could not do. What cannot be carried out is returned as a sentence; what breaks is raised as EnvError.
Measured with two pages busy on 2 cores: a look 2 ms, a click 2 ms, a field of text 4 ms. Read `browser` next.
"""
import asyncio
import json
import re
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from playwright.async_api import BrowserContext, CDPSession, Error
from playwright.async_api import Page as Tab

from envs.actions import Action
from envs.miniwob.tasks import url
from envs.protocol import EnvError

SCRIPT = "\n".join(Path(__file__).with_name(name).read_text("utf-8") for name in ("episode.js", "page.js"))
VIEWPORT = {"width": 500, "height": 500}
AREA = {"x": 0, "y": 0, "width": 160, "height": 210}
DEADLINE_S = 10.0
T = TypeVar("T")


async def bounded(call: Awaitable[T], what: str) -> T:
    """The call's result within the deadline; a failure of browser or driver becomes an EnvError."""
    try:
        return await asyncio.wait_for(call, DEADLINE_S)
    except TimeoutError as error:
        raise EnvError(f"{what}: no answer within {DEADLINE_S:g} s") from error
    except Error as error:
        raise EnvError(f"{what}: {error.message.splitlines()[0]}") from error


@dataclass(frozen=True)
class Sight:
    """One look at the page: its text, its verdict (raw reward, None while it runs), at a reset its instruction."""

    text: str
    verdict: float | None
    instruction: str | None = None


class Page:
    """A tab with the MiniWoB page of one task."""

    def __init__(self, tab: Tab, devtools: CDPSession):
        self._tab, self._devtools = tab, devtools
        self.task: str | None = None

    @classmethod
    async def open(cls, context: BrowserContext) -> "Page":
        """A new empty tab of the context, which must run SCRIPT at the start of each page."""
        tab = await bounded(context.new_page(), "opening a page")
        return cls(tab, await bounded(context.new_cdp_session(tab), "opening a page"))

    async def close(self) -> None:
        await bounded(self._tab.close(), "closing a page")

    async def load(self, task: str) -> None:
        """Load the task's page from disk."""
        self.task = None
        await bounded(self._tab.goto(url(task), wait_until="load"), f"loading {task}")
        self.task = task

    async def reset(self, seed: int) -> Sight:
        """Begin the episode of this seed on the loaded page, with the mouse and the focus off the task."""
        # A click beside the task, not a move there: a move waits for the next frame (17 ms), a click does not (1.4).
        await bounded(self._tab.mouse.click(VIEWPORT["width"] - 1, VIEWPORT["height"] - 1), "leaving the task")
        return Sight(**await self._call("reset", seed))

    async def look(self) -> Sight:
        """What the page shows once it is quiet: no timer under a second, no animation frame left to wait for."""
        return Sight(**await self._call("look"))

    async def screenshot(self) -> bytes:
        """PNG of the task area."""
        return await bounded(self._tab.screenshot(clip=AREA), "taking a screenshot")

    async def act(self, action: Action) -> str | None:
        """Carry the action out; the reason if that cannot be done, and then nothing was done."""
        return await bounded(getattr(self, f"_{action.command.lower()}")(**dict(action.args)), action.command)

    async def _call(self, function: str, *args: str | int) -> dict:
        # The DevTools call costs 0.4 ms, Playwright's own evaluate() 0.9 ms.
        expression = f"mini.{function}({', '.join(map(json.dumps, args))})"
        options = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        answer = await bounded(self._devtools.send("Runtime.evaluate", options), function)
        if "exceptionDetails" in answer:
            raise EnvError(f"{function}: {answer['exceptionDetails']['exception'].get('description', '?')[:300]}")
        return answer["result"].get("value") or {}

    # ---- one method for each command; the argument names are the grammar's ----

    async def _click(self, ref: str, clicks: int = 1) -> str | None:
        spot = await self._call("locate", ref)
        if "error" in spot:
            return spot["error"]
        if spot["list"]:
            return f"[{ref}] is a list, use SELECT"  # its popup is a window of its own that no page shows
        await self._tab.mouse.click(spot["x"], spot["y"], click_count=clicks)
        return None

    async def _double_click(self, ref: str) -> str | None:
        return await self._click(ref, clicks=2)

    async def _hover(self, ref: str) -> str | None:
        spot = await self._call("locate", ref)
        if "error" in spot:
            return spot["error"]
        await self._tab.mouse.move(spot["x"], spot["y"])
        return None

    async def _type(self, ref: str, text: str) -> str | None:
        spot = await self._call("locate", ref)
        if "error" in spot:
            return spot["error"]
        if not spot["typed"]:
            return f"[{ref}] is not a field one can type in"
        keyboard = self._tab.keyboard
        await self._tab.mouse.click(spot["x"], spot["y"])
        if spot["parts"]:  # a date or a time: typed part by part over what stands there
            await keyboard.type(text)
            return None
        await keyboard.press("Control+A")
        if not text:
            await keyboard.press("Delete")
        elif spot["keys"]:
            await keyboard.type(text)  # the page listens to keys: 1.5 ms a character
        else:
            await keyboard.insert_text(text)
        return None

    async def _select(self, ref: str, option: str) -> str | None:
        """Choose by keyboard in a list, by mouse in a list that shows several: both trusted."""
        spot = await self._call("option", ref, option)
        if "error" in spot:
            return spot["error"]
        if "x" in spot:
            await self._tab.keyboard.down("Control")
            await self._tab.mouse.click(spot["x"], spot["y"])
            await self._tab.keyboard.up("Control")
        for _ in range(abs(spot.get("steps", 0))):
            await self._tab.keyboard.press("ArrowDown" if spot["steps"] > 0 else "ArrowUp")
        return None

    async def _press(self, key: str) -> str | None:
        try:
            await self._tab.keyboard.press(key)
        except Error as error:
            if "Unknown key" not in error.message:
                raise
            for modifier in ("Shift", "Control", "Alt", "Meta"):  # the first half of a combination is down by now
                await self._tab.keyboard.up(modifier)
            return f"there is no key {key[:40]!r}"
        return None

    async def _scroll(self, ref: str, dx: int, dy: int) -> str | None:
        error = await self._hover(ref)
        if error is None:
            await self._tab.mouse.wheel(dx, dy)
            await self._call("painted")
        return error

    async def _drag(self, ref: str, to: str | None = None, dx: int = 0, dy: int = 0) -> str | None:
        start = await self._call("locate", ref)
        if "error" in start:
            return start["error"]
        end = await self._call("locate", to) if to is not None else {"x": start["x"] + dx, "y": start["y"] + dy}
        if "error" in end:
            return end["error"]
        mouse = self._tab.mouse
        await mouse.move(start["x"], start["y"])
        await mouse.down()
        await mouse.move(end["x"], end["y"], steps=5)
        await mouse.up()
        return None

    async def _click_at(self, x: int, y: int) -> str | None:
        inside_x, inside_y = min(max(x, 0), AREA["width"] - 1), min(max(y, 0), AREA["height"] - 1)
        await self._tab.mouse.click(inside_x, inside_y)
        if (x, y) != (inside_x, inside_y):
            return f"{x},{y} lies outside the page, clicked at {inside_x},{inside_y}"
        return None

    async def _wait(self) -> str | None:
        await asyncio.sleep(0.3)
        return None
