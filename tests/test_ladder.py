"""Collections whose browser is killed and stopped under them write the episodes of an undisturbed one."""

import os
import random
import signal
import threading
import time
from dataclasses import asdict
from itertools import cycle, islice

import pytest
from process_tree import children, left, processes, wait_for

from benchmarks.make_nano import WORLD, Clumsy
from envs.miniwob.browser import driver, page
from envs.miniwob.browser.chromium import find_chromium
from envs.miniwob.browser.driver import MiniWoB
from minidpo.acting.collect import play_to_file
from minidpo.acting.jobs import Job, make_jobs, split_instances
from minidpo.acting.policies import Reply
from minidpo.data.episodes import read
from minidpo.memory.context import Context
from minidpo.memory.machine import Machine

TASKS = (
    "click-button",
    "login-user",
    "click-checkboxes",
    "enter-password",
    "form-sequence-2",
    "click-tab-2",
    "choose-list",
    "focus-text-2",
)
ACCIDENTS = (
    ("renderer", signal.SIGKILL),
    ("chromium", signal.SIGKILL),
    ("driver", signal.SIGKILL),
    ("chromium", signal.SIGSTOP),
    ("renderer", signal.SIGSTOP),
)


class Trouble(threading.Thread):
    """Signals one process of this Python's browser each time that one more of `moments` steps is reached."""

    def __init__(self, moments: list[int], seed: int):
        super().__init__(daemon=True)
        self.moments, self.rng = moments, random.Random(seed)
        self.steps, self.over, self.made = 0, False, []
        self.seen: dict[int, str] = {}  # processes of all the browsers there were

    def run(self):
        for moment, (kind, number) in zip(self.moments, cycle(ACCIDENTS)):
            while self.steps < moment and not self.over:
                time.sleep(0.005)
            time.sleep(self.rng.uniform(0, 0.05))  # anywhere within a step or a reset
            while not self.over and not self.signal(kind, number):
                time.sleep(0.05)  # the browser is just being replaced

    def signal(self, kind: str, number: int) -> bool:
        self.seen |= children(os.getpid())
        found = sorted(processes(kind))
        try:
            os.kill(self.rng.choice(found), number)
        except (IndexError, ProcessLookupError):
            return False
        self.made.append((kind, number))
        return True


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """The pages in this very process, where their steps can be counted and their deadlines be made short."""
    monkeypatch.setattr("envs.miniwob.browser.remote.RemoteBrowser", driver.Browser)


def play(policy, jobs, out, pages: int) -> dict:
    context = Context("", WORLD, machine=Machine(pages=pages))
    return play_to_file(policy, jobs, out, context=context, title="ladder")


def collect(out, instances: int) -> dict:
    wanted = split_instances(WORLD, dict.fromkeys(TASKS, instances), "validation")
    return play(Clumsy(0.3, 1), make_jobs(WORLD, wanted), out, 4)


def episodes(path) -> list[dict]:
    """What a file tells, but for the seconds that things took: fields whose names end in _s."""

    def told(pairs):
        return {name: value for name, value in pairs if not name.endswith("_s")}

    return [asdict(episode, dict_factory=told) for episode in read(path)]


@pytest.mark.slow  # test_remote disturbs a short one
def test_a_browser_killed_and_stopped_changes_no_episode(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "DEADLINE_S", 2.0)
    monkeypatch.setattr(page, "OPENING_S", 5.0)  # to open and load a page
    monkeypatch.setattr(driver, "OPENING_S", 20.0)  # to start Chromium
    instances, accidents = 50, 20  # of 400 episodes
    trouble = Trouble([], seed=0)
    step = MiniWoB.step

    async def counted(self, action):
        observation = await step(self, action)
        trouble.steps += 1
        return observation

    monkeypatch.setattr(MiniWoB, "step", counted)
    quiet = collect(tmp_path / "quiet.jsonl", instances)
    assert quiet["episodes"] == len(TASKS) * instances
    rng = random.Random(accidents)
    # one in each part of the run, at random within it
    part = 0.95 * trouble.steps / accidents
    trouble = Trouble([int((n + rng.random()) * part) for n in range(accidents)], seed=1)
    trouble.start()
    try:
        disturbed = collect(tmp_path / "disturbed.jsonl", instances)
    finally:
        trouble.over = True
        trouble.join()
    assert trouble.made == list(islice(cycle(ACCIDENTS), accidents))
    assert disturbed == quiet and quiet["env_errors"] == 0
    assert episodes(tmp_path / "disturbed.jsonl") == episodes(tmp_path / "quiet.jsonl")
    wait_for(lambda: not left(trouble.seen | children(os.getpid())))


class Patient:
    """Clicks, but in click-test-2 waits 1.5 s first, and wants the browser dead meanwhile."""

    name, sampling, spare_core = "patient", {}, True

    def __init__(self, wish):
        self.wish = wish

    async def answer(self, page, episode):
        if episode.job.task == "click-test" or len(episode.turns) == 5:
            return Reply('action: CLICK(ref="1")')
        self.wish.touch()
        return Reply("action: WAIT()")


def test_an_episode_that_no_browser_survives_is_told_and_tried_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(driver, "REPLAYS", 0)
    wanted = [
        Job(*job, 0, 9) for job in (("click-test", 1), ("click-test-2", 1), ("click-test", 2))
    ]
    out, wish, program = tmp_path / "episodes.jsonl", tmp_path / "wish", tmp_path / "chromium"
    program.write_text(f"""#!/bin/sh
        (while sleep 0.05; do if rm {wish}; then kill -KILL -$$; fi; done) 2>/dev/null &
        exec {find_chromium()} "$@"
        """)
    program.chmod(0o755)
    monkeypatch.setenv("MINIDPO_CHROMIUM", str(program))
    counts = play(Patient(wish), wanted, out, 1)
    assert counts == {"episodes": 2, "solved": 2, "env_errors": 1}
    assert "click-test-2 seed 1: " in capsys.readouterr().out
    assert [episode.key for episode in read(out)] == [wanted[0][:3], wanted[2][:3]]
    monkeypatch.delenv("MINIDPO_CHROMIUM")
    counts = play(Patient(wish), wanted, out, 1)
    assert counts == {"episodes": 3, "solved": 3, "env_errors": 0}
    assert [episode.key for episode in read(out)] == [wanted[n][:3] for n in (0, 1, 2)]
