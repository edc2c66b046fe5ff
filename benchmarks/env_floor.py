"""The floor of env_speed.py: the least that an episode costs when a page is driven from outside.

One call of the page resets and looks, one call acts and looks: nothing else passes between Python and page.
The same pages, the same text of them, the same DevTools session of Playwright as in envs/miniwob, but no
input: a script clicks and fills in, which a page need not take for a person's doing. Nothing has a deadline.
"""

import json

from playwright.async_api import BrowserContext, CDPSession
from playwright.async_api import Page as Tab

from envs.actions import Action
from envs.miniwob.tasks import url
from envs.protocol import Observation, Outcome

ACT = """window.act = (ref, text) => {
  const { x, y } = mini.locate(ref), node = document.elementFromPoint(x, y);
  node.focus();
  if (text === null) node.click();
  else { node.value = text; node.dispatchEvent(new Event("input", { bubbles: true })); }
  return mini.look();
}; 0"""


class Floor:
    """An environment that knows CLICK and TYPE."""

    def __init__(self, tab: Tab, devtools: CDPSession):
        self._tab, self._devtools = tab, devtools
        self._task: str | None = None

    @classmethod
    async def open(cls, context: BrowserContext) -> "Floor":
        """A new tab of a context that runs the scripts of envs/miniwob."""
        tab = await context.new_page()
        return cls(tab, await context.new_cdp_session(tab))

    async def reset(self, task: str, seed: int) -> Observation:
        """Start (task, seed), in place if the page is loaded."""
        if task != self._task:
            await self._tab.goto(url(task))
            await self._call(ACT)
            self._task = task
        sight = await self._call(f"mini.reset({seed})")
        self._instruction = sight["instruction"]
        return self._observation(sight)

    async def step(self, action: Action) -> Observation:
        """Act and look."""
        args = dict(action.args)
        given = ", ".join(json.dumps(args.get(name)) for name in ("ref", "text"))
        return self._observation(await self._call(f"act({given})"))

    async def _call(self, expression: str) -> dict:
        options = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        answer = await self._devtools.send("Runtime.evaluate", options)
        assert "exceptionDetails" not in answer, answer
        return answer["result"]["value"]

    def _observation(self, sight: dict) -> Observation:
        reward = sight["verdict"]
        outcome = None if reward is None else Outcome.SOLVED if reward >= 1 else Outcome.FAILED
        return Observation(self._instruction, sight["text"], outcome, float(reward or 0), None)
