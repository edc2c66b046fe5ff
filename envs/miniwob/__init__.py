"""MiniWoB++ in a real Chromium: the world `miniwob`.

Read in this order: `tasks` (tasks, seeds, step limits, thresholds), `browser` (a page as text, and input into it),
`experts` (scripted demonstrators), `mistakes` (how an action differs from the expert's). `install` installs a Chromium,
and `table` fills docs/tasks.md.
"""

import contextlib
from collections.abc import AsyncIterator, Sequence

from envs import actions
from envs.actions import Action
from envs.miniwob.experts.by_task import EXPERTS
from envs.miniwob.mistakes import mistake
from envs.miniwob.tasks import SEEDS, STEP_LIMIT, SUITES
from envs.protocol import Camera, Env, EnvError, Observation, World


class MiniWoBWorld(World):
    """The 125 tasks of MiniWoB++. The browser's modules need Playwright, so they are imported where they are used."""

    name = "miniwob"
    suites = SUITES
    seeds = SEEDS
    system_prompt = actions.SYSTEM_PROMPT
    experts = EXPERTS
    parse, render = staticmethod(actions.parse), staticmethod(actions.render)
    step_limit = staticmethod(STEP_LIMIT)

    @contextlib.asynccontextmanager
    async def open(self, places: int, watch: bool = False) -> AsyncIterator[Sequence[Env]]:
        """Pages in another process, so that pages and model can work at the same time."""
        from envs.miniwob.browser.remote import RemoteBrowser

        async with RemoteBrowser(places, headless=not watch) as browser:
            yield browser.envs

    @contextlib.asynccontextmanager
    async def pictures(self, places: int) -> AsyncIterator[Sequence[Camera]]:
        """Pages in this process, which can be photographed."""
        from envs.miniwob.browser.driver import Browser

        async with Browser(places) as browser:
            yield browser.envs

    def mistake(self, seen: Observation, done: Action, wanted: Action, ended: bool) -> str:
        """Compares the elements that the two actions use."""
        return mistake(seen.text, done, wanted, ended)

    def require(self, watch: bool = False) -> None:
        """Needs a Chromium and, to watch, a display."""
        from envs.miniwob.browser.chromium import find_chromium
        from envs.miniwob.browser.remote import check_display

        if watch:
            check_display()
        try:
            find_chromium(shell=not watch)
        except EnvError as error:
            raise ValueError(" ".join(str(error).split())) from None


WORLD = MiniWoBWorld()
