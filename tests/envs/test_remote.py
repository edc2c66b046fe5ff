"""Pages in a process of their own: they are the same pages, and whatever happens to it, nothing is left."""

import asyncio
import os
import signal

import pytest
from process_tree import children, left, processes, wait_for

from benchmarks.make_nano import WORLD, Clumsy
from envs.actions import Action
from envs.miniwob.browser import remote
from envs.miniwob.browser.remote import RemoteBrowser
from envs.protocol import EnvError
from minidpo.acting.collect import play_to_file
from minidpo.acting.jobs import make_jobs, split_instances
from minidpo.data.episodes import read
from minidpo.memory.context import Context
from minidpo.memory.machine import Machine


def there() -> int:
    """The process of the pages."""
    name = "envs.miniwob.browser.remote"
    return next(pid for pid, command in children(os.getpid()).items() if name in command)


def test_when_the_process_is_silent_the_episode_ends_and_a_reset_starts_another(monkeypatch):
    monkeypatch.setattr(remote, "PATIENCE_S", 10.0)

    async def accident():
        async with RemoteBrowser(2) as browser:
            one, other = browser.envs
            first = await one.reset("login-user", 3)
            await other.reset("login-user", 4)
            seen = children(os.getpid())
            os.kill(there(), signal.SIGSTOP)
            with pytest.raises(EnvError, match="the process of the pages"):
                await one.step(Action("CLICK", ref="1"))
            assert await one.reset("login-user", 3) == first
            with pytest.raises(EnvError, match="this episode with it"):
                await other.step(Action("CLICK", ref="1"))
            await other.reset("login-user", 4)
            wait_for(lambda: not left(seen))

    asyncio.run(accident())
    wait_for(lambda: not children(os.getpid()))


def test_a_step_that_comes_while_another_process_starts_does_not_reach_it():
    async def late():
        async with RemoteBrowser(2) as browser:
            one, other = browser.envs
            await one.reset("click-test", 1)
            await other.reset("click-test", 2)
            first = browser._process
            first.kill()
            await first.wait()
            again = asyncio.create_task(one.reset("click-test", 1))
            while browser._process is first:
                await asyncio.sleep(0.001)
            with pytest.raises(EnvError, match="has ended"):
                await other.step(Action("CLICK", ref="1"))  # its answer was long in coming
            assert (await again).text and browser.life == 2

    asyncio.run(late())


def test_a_mistake_over_there_ends_that_process_at_once():
    async def mistake():
        async with RemoteBrowser(1) as browser:
            with pytest.raises(EnvError, match="has ended"):
                await browser.call(0, "reset")
            assert (await browser.envs[0].reset("click-test", 1)).text

    asyncio.run(asyncio.wait_for(mistake(), 60))


def test_a_collection_notices_nothing_but_time_when_its_pages_are_killed(tmp_path, monkeypatch):
    tasks = {"click-button": 4, "login-user": 6}
    wanted = make_jobs(WORLD, split_instances(WORLD, tasks, "validation"))
    played = {"context": Context("", WORLD, machine=Machine(pages=2)), "title": ""}
    play_to_file(Clumsy(0.3, 1), wanted, tmp_path / "quiet.jsonl", **played)
    policy = Clumsy(0.3, 1)
    answer, answers = policy.answer, []

    async def with_accidents(page, episode):
        answers.append(episode.job)
        if len(answers) in (3, 11):
            os.kill(there(), signal.SIGKILL)
        elif len(answers) == 7:  # its browser alone: that is mended over there
            os.kill(next(iter(processes("chromium"))), signal.SIGKILL)
        return await answer(page, episode)

    policy.answer = with_accidents
    counts = play_to_file(policy, wanted, tmp_path / "disturbed.jsonl", **played)
    assert counts["env_errors"] == 0 and counts["episodes"] == len(wanted) and len(answers) > 11
    assert read(tmp_path / "disturbed.jsonl") == read(tmp_path / "quiet.jsonl")
    cost = read(tmp_path / "quiet.jsonl")[0].cost
    assert cost.browser_s > 0 and cost.tokens_written == 0
    wait_for(lambda: not children(os.getpid()))
