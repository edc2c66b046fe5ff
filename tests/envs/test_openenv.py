"""Worlds behind OpenEnv's protocol: ours on both sides, and the openenv package where it is installed."""

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from test_worlds import Sloppy, played

import envs
from envs.protocol import EnvError, Outcome
from minidpo.acting.jobs import split_instances
from minidpo.acting.policies import Reply

server = pytest.importorskip("websockets.sync.server")
ROOT = Path(__file__).parents[2]
TOY = envs.world("toy")
# served by the openenv package
COUNT = """
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

class Say(Action):
    number: int
    loud: bool = False

class Heard(Observation):
    hint: str

class Count(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.wanted = seed % 10
        return Heard(hint="from 0 to 9")

    def step(self, action, timeout_s=None, **kwargs):
        if action.number == self.wanted:
            return Heard(hint="yes", done=True, reward=1.0)
        return Heard(hint="less" if action.number > self.wanted else "more")

    @property
    def state(self):
        return State(step_count=self.steps)  # there is none: before a reset many servers know no state

uvicorn.run(create_app(Count, Say, Heard, max_concurrent_envs=1), port=0)
"""


@contextlib.contextmanager
def running(*command):
    """The address of a server that tells its port."""
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        lines = iter(process.stdout.readline, "")
        found = (re.search(r"(?:ws|http)://127.0.0.1:(\d+)", line) for line in lines)
        yield f"ws://127.0.0.1:{next(filter(None, found))[1]}"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def toy():
    with running("-m", "envs.serve", "--world", "toy", "--port", "0", "--places", "3") as url:
        yield url


def test_a_world_of_ours_is_the_same_on_both_sides(toy):
    served = envs.world(toy)
    assert (served.suites, served.system_prompt) == (TOY.suites, TOY.system_prompt)
    assert [served.step_limit(task) for task in TOY.suites["all"]] == [3, 4, 5]
    instances = split_instances(TOY, dict.fromkeys(TOY.suites["all"], 4), "test")
    assert split_instances(served, dict.fromkeys(served.suites["all"], 4), "test") == instances

    class Careless(Sloppy):
        """Now and then it says what has the form of an action and is none."""

        async def answer(self, page, episode):
            if len(episode.turns) == 1:
                return Reply("action: CLICK(ref=")
            return await super().answer(page, episode)

    here, _ = played(TOY, instances, Careless(TOY, 1))
    there, failures = played(served, instances, Careless(TOY, 1), places=8)  # of which it has 3
    assert not failures and there == here
    assert {episode.outcome for episode in here} >= {"solved", "limit"}


def test_a_session_that_ends_gives_its_place_back(toy):
    async def all_places():
        async with envs.world(toy).open(8) as places:
            return len(places)

    assert [asyncio.run(all_places()) for _ in range(2)] == [3, 3]


def test_a_message_that_is_none_gets_an_answer_and_the_session_goes_on(toy):
    from websockets.sync.client import connect

    with connect(f"{toy}/ws") as socket:

        def ask(raw):
            socket.send(raw if isinstance(raw, str) else json.dumps(raw))
            answer = json.loads(socket.recv())
            return answer["type"], answer["data"]

        step = {"type": "step", "data": {"action": "?"}}
        wrong = ["hm", "[]", {"type": "fly"}, {"type": "step", "data": {}}, step]
        wrong += [{"type": "reset", "data": {"task": "open-non"}}, {"type": "reset", "data": 5}]
        for message in wrong:
            kind, data = ask(message)
            assert (
                kind == "error"
                and data["code"] == "VALIDATION_ERROR"
                and "\n" not in data["message"]
            )
        assert "open-one" in ask(wrong[-2])[1]["message"]
        assert ask({"type": "reset"})[0] == "observation"
        kind, data = ask(step)
        assert kind == "observation" and data["observation"]["error"] and not data["done"]
        assert ask({"type": "state"}) == (
            "state",
            {"episode_id": "open-one 100000", "step_count": 1},
        )


@contextlib.contextmanager
def saying(answers):
    """The address of a server of the toy's pages whose sessions say these answers and close."""
    from envs.serve import pages

    def page(connection, request):
        if request.path != "/ws":
            return connection.respond(200, json.dumps(pages(TOY)[request.path]))

    def session(socket):
        for answer in answers:
            socket.recv()
            socket.send(answer)

    with server.serve(session, "127.0.0.1", 0, process_request=page) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        try:
            yield f"ws://127.0.0.1:{listening.socket.getsockname()[1]}"
        finally:
            listening.shutdown()


@pytest.mark.parametrize(
    "answers",
    [
        [],
        ["no JSON"],
        ["[]"],
        ["{}"],
        ['{"type": "observation", "data": {"observation": {}}}'],
        ['{"type": "observation", "data": {"observation": {}, "done": false, "reward": NaN}}'],
        ['{"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "out\\nof order"}}'],
    ],
)
def test_a_server_that_fails_is_no_episode_and_the_run_goes_on(answers):
    with saying(answers) as url:
        world = envs.world(url)

        async def reset():
            async with world.open(1) as (env,):
                for _ in range(2):
                    with pytest.raises(EnvError) as error:
                        await env.reset("open-one", 7)
                    assert url in str(error.value) and "\n" not in str(error.value)

        asyncio.run(reset())
        instances = [("open-one", 7), ("open-two", 7)]
        episodes, failures = played(world, instances, Sloppy(TOY, 1))
    assert not episodes and {job.instance for job, _ in failures} == {*instances}


@pytest.mark.parametrize("url", ["ws://127.0.0.1:9", "ws://nowhere.invalid:80", "wss://", "ws://["])
def test_where_no_server_is_one_line_says_so(url):
    with pytest.raises(ValueError, match=re.escape(url)) as error:
        envs.world(url)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_an_environment_of_the_openenv_package_is_a_world(tmp_path):
    pytest.importorskip("openenv")
    (tmp_path / "count.py").write_text(COUNT)
    with running(tmp_path / "count.py") as url:
        world = envs.world(url)
        assert "act(number: integer, loud: boolean" in world.system_prompt

        async def play():
            async with world.open(4) as places:
                assert len(places) == 1
                (env,) = places
                first = await env.reset("served", 17)
                actions = map(world.parse, ("act(3)", "act(number=7, loud=true)"))
                return [first] + [await env.step(action) for action in actions]

        seen = asyncio.run(play())
    assert [one.text for one in seen] == ["hint: from 0 to 9", "hint: more", "hint: yes"]
    assert [one.outcome for one in seen] == [None, None, Outcome.SOLVED]


@pytest.mark.slow
def test_openenv_s_client_plays_a_world_of_ours(toy, capsys):
    pytest.importorskip("openenv")
    text = (ROOT / "docs" / "other-programs.md").read_text()
    code = re.search(r"```python\n(from openenv.*?)```", text, re.S)[1]
    exec(code.replace("ws://127.0.0.1:8000", toy).replace("click-button", "open-one"))
    assert capsys.readouterr().out.count("button") == 5
