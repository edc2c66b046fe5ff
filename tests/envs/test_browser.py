"""The browser: it is found, it starts, it goes, and an episode does not notice when it dies."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from process_tree import children, left, processes, wait_for

from envs.actions import Action
from envs.miniwob.browser import driver, page
from envs.miniwob.browser.chromium import find_chromium
from envs.miniwob.browser.driver import Browser
from envs.protocol import EnvError, Outcome
from envs.web.visit import WebPage

NAME, PASSWORD, LOGIN = (
    Action("TYPE", ref="1", text="karrie"), Action("TYPE", ref="2", text="AU"), Action("CLICK", ref="3")
)  # fmt: skip


async def crash(env):
    with pytest.raises(page.Error):
        await asyncio.wait_for(env._page._tab.goto("chrome://crash"), 3)


async def close(env):
    await env._page._tab.close()


def signals(kind, number):
    """The accident that all processes of a kind get a signal."""

    async def accident(env):
        for pid in processes(kind):
            os.kill(pid, number)

    return accident


async def hang(env):
    await env._page._tab.evaluate("setTimeout(() => { for (;;); }, 5)")
    await asyncio.sleep(0.1)


async def nothing(env):
    pass


async def play(accident):
    """All that is seen of two episodes, in the middle of which something happens; no process is left."""
    async with Browser(pages=2) as chromium:
        one, other = chromium.envs
        seen = [await one.reset("login-user", 0), await other.reset("click-checkboxes", 0)]
        seen += [await one.step(NAME), await other.step(Action("CLICK", ref="2"))]
        before = children(os.getpid())
        await accident(one)
        seen += await asyncio.gather(one.step(PASSWORD), other.step(Action("CLICK", ref="3")))
        seen.append(await one.step(LOGIN))
    wait_for(lambda: not left(before | children(os.getpid())))
    return seen


@pytest.fixture(scope="module")
def peaceful():
    seen = asyncio.run(play(nothing))
    assert seen[-1].outcome is seen[-2].outcome is Outcome.SOLVED
    return seen


ACCIDENTS = {"close": close, "crash": crash, "hang": hang} | {
    f"kill {kind}": signals(kind, signal.SIGKILL) for kind in ("renderer", "chromium", "driver", "guard")
} | {f"stop {kind}": signals(kind, signal.SIGSTOP) for kind in ("chromium", "driver")}  # fmt: skip


# of these test_a_broken_page_leaves_the_others_alone has the first two, and test_remote "kill chromium"
ELSEWHERE = ("crash", "hang", "close", "kill renderer", "kill chromium")


@pytest.mark.parametrize(
    "accident",
    [
        pytest.param(accident, id=name, marks=[pytest.mark.slow] * (name in ELSEWHERE))
        for name, accident in ACCIDENTS.items()
    ],
)
def test_an_episode_does_not_notice_an_accident(accident, peaceful, monkeypatch, caplog):
    monkeypatch.setattr(page, "DEADLINE_S", 2.0)  # seconds that a call may take
    assert asyncio.run(play(accident)) == peaceful
    gc.collect()  # asyncio tells of an error that nobody looked at when its owner goes
    assert caplog.messages == []


@pytest.mark.parametrize("accident", [crash, hang])
def test_a_broken_page_leaves_the_others_alone(accident, monkeypatch):
    monkeypatch.setattr(page, "DEADLINE_S", 2.0)

    async def play():
        async with Browser(pages=3) as chromium:
            envs = chromium.envs
            await asyncio.gather(*[env.reset("login-user", 0) for env in envs])
            before = [env._page for env in envs]
            await accident(envs[0])
            for action in (NAME, PASSWORD, LOGIN):
                seen = await asyncio.gather(*[env.step(action) for env in envs])
            assert {each.outcome for each in seen} == {Outcome.SOLVED}
            assert [env._page is page for env, page in zip(envs, before)] == [False, True, True]

    asyncio.run(play())


def test_a_replay_that_shows_something_else_is_an_error_not_data():
    async def play():
        async with Browser(pages=1) as chromium:
            (env,) = chromium.envs
            await env.reset("login-user", 0)
            await env.step(NAME)
            env._seen[1] = env._seen[0]
            await close(env)
            with pytest.raises(EnvError, match="went differently when it was replayed"):
                await env.step(PASSWORD)
            assert (
                await env.reset("click-test", 0)
            ).outcome is None  # and the next episode is a good one

    asyncio.run(play())


def test_a_reset_climbs_until_it_succeeds_and_no_further(monkeypatch):
    climbed = []
    reset, load, new_page = page.Page.reset, page.Page.load, Browser.new_page

    async def failing_reset(self, seed):
        climbed.append("reset")
        if fails.pop():
            raise EnvError("no")
        return await reset(self, seed)

    async def noted_load(self, task):
        climbed.append("load")
        await load(self, task)

    async def noted_page(self, broken=None):
        climbed.append("browser" if broken else "page")
        return await new_page(self, broken)

    monkeypatch.setattr(page.Page, "reset", failing_reset)
    monkeypatch.setattr(page.Page, "load", noted_load)
    monkeypatch.setattr(Browser, "new_page", noted_page)

    async def play():
        async with Browser(pages=1) as chromium:
            (env,) = chromium.envs
            await env.reset("click-test", 0)
            climbed.clear()
            fails.extend([False, True, True, True])
            await env.reset("click-test", 1)
            fails.extend([True] * 4)
            with pytest.raises(EnvError, match="no"):
                await env.reset("click-test", 2)

    fails = [False]
    asyncio.run(play())
    ladder = ["reset", "load", "reset", "page", "load", "reset", "browser", "load", "reset"]
    assert climbed == ladder * 2


@pytest.mark.parametrize("stopped", ["nothing", "chromium"])
def test_a_killed_python_leaves_no_chromium(stopped):
    code = """if True:
        import asyncio
        from envs.miniwob.browser.driver import Browser
        async def main():
            async with Browser(pages=1) as chromium:
                await chromium.envs[0].reset("click-test", 0)
                print("up", flush=True)
                await asyncio.sleep(60)
        asyncio.run(main())"""
    root = Path(driver.__file__).parents[3]
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as python:
        assert python.stdout.readline() == "up\n"
        below = children(python.pid)
        assert any("--type=renderer" in command for command in below.values())
        for pid in processes(stopped, python.pid):
            os.kill(pid, signal.SIGSTOP)
        python.kill()
    wait_for(lambda: not left(below))


def test_chromium_is_looked_for_in_order(monkeypatch, tmp_path):
    monkeypatch.delenv("MINIDPO_CHROMIUM", raising=False)
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(EnvError, match="no Chromium found: run `playwright install"):
        find_chromium()
    shells = (
        "bin/chromium-headless-shell",
        "chromium_headless_shell-1200/chrome-linux/headless_shell",
        "chromium_headless_shell-1201/chrome-headless-shell-linux64/chrome-headless-shell",
    )
    full = ("bin/google-chrome", "bin/chromium", "chromium-1200/chrome-linux/chrome")
    for path in (*full, *shells, "mine"):
        program = tmp_path / path
        program.parent.mkdir(parents=True, exist_ok=True)
        program.touch(mode=0o755)
        if path == "mine":
            monkeypatch.setenv("MINIDPO_CHROMIUM", str(program))
        assert find_chromium() == str(program)
        assert find_chromium(shell=False) == str(tmp_path / full[-1] if path in shells else program)
    monkeypatch.setenv("MINIDPO_CHROMIUM", str(tmp_path / "nothing"))
    with pytest.raises(EnvError, match="is not a program"):
        find_chromium()


def test_without_a_sandbox_on_the_system_miniwob_is_opened_and_the_web_is_not(
    monkeypatch, tmp_path, capsys
):
    """As on Ubuntu since 23.10, where AppArmor has to know the program."""
    program = tmp_path / "chromium"
    program.write_text(f"""#!/bin/sh
        case "$*" in *--no-sandbox*) exec {find_chromium()} "$@" ;; esac
        echo "FATAL:zygote_host_impl_linux.cc(127)] No usable sandbox! If you ..." >&2
        exit 1
        """)
    program.chmod(0o755)
    monkeypatch.setenv("MINIDPO_CHROMIUM", str(program))
    monkeypatch.setattr(driver.os, "geteuid", lambda: 1000)

    async def start(kind):
        async with Browser(pages=1, kind=kind) as chromium:
            if kind is page.Page:
                assert (await chromium.envs[0].reset("click-test", 1)).text

    asyncio.run(start(page.Page))
    assert (
        "finds no sandbox on this system: MiniWoB's pages are opened without"
        in capsys.readouterr().err
    )
    with pytest.raises(
        EnvError, match="finds no sandbox on this system, and no page of the web is visited"
    ):
        asyncio.run(start(WebPage))
