"""The report's episodes and pairs: pictures of real pages, the rule that chooses, tokens of both sides."""

import base64
import contextlib
import json
from dataclasses import replace

import tiny

import envs
from envs.actions import parse
from envs.protocol import EnvError
from minidpo.data.episodes import Episode, Turn
from minidpo.data.pairs import Pair
from minidpo.data.prompt import episode_messages, write
from minidpo.memory.context import Context
from minidpo.memory.lora import LoRAConfig
from minidpo.memory.machine import Machine
from minidpo.results import replay

NAME, PASSWORD, LOGIN = ('TYPE(ref="1", text="olin")', 'TYPE(ref="2", text="x")', 'CLICK(ref="3")')
MINIWOB, TOY = envs.world("miniwob"), envs.world("toy")


async def played(env, task, seed, *actions):
    """The episode of these actions, as an agent would have played it."""
    seen, turns = await env.reset(task, seed), []
    for action in actions:
        turns.append(Turn(seen.text, write("now", action), action))
        seen = await env.step(parse(action))
    return Episode(
        task, seed, 0, seen.instruction, tuple(turns), seen.outcome or "limit", seen.reward, "me"
    )


def shown(run, env, **episodes):
    """The instance as the report shows it."""
    shots = {name: run(replay.photograph(MINIWOB, env, e)) for name, e in episodes.items()}
    return replay.shown_instance({name: (episodes[name], shots[name]) for name in episodes})


def test_each_step_has_its_picture_and_what_agents_have_in_common_one(run, env):
    sft = run(played(env, "login-user", 4, NAME, LOGIN))
    dpo = run(played(env, "login-user", 4, NAME, PASSWORD, LOGIN))
    found = shown(run, env, sft=sft, dpo=dpo)
    pictures = [base64.b64decode(picture) for picture in found["pictures"]]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert found["size"] == (160, 210)
    before, after = found["episodes"]["sft"], found["episodes"]["dpo"]
    assert [turn["picture"] for turn in before["turns"]] == [0, 1] and before["final"] == 2
    assert [turn["picture"] for turn in after["turns"]] == [0, 1, 3] and after["final"] == 4
    run(env.reset("login-user", 4))
    run(env.step(parse(NAME)))
    assert run(env.screenshot()) == pictures[1] != pictures[0]
    assert (found["task"], found["seed"], before["outcome"]) == ("login-user", 4, "failed")
    assert [turn["thought"] for turn in after["turns"]] == ["now"] * 3
    assert all(len(turn["marks"]) == 1 for turn in after["turns"])


def test_a_page_that_the_agent_did_not_see_is_not_shown(run, env):
    episode = run(played(env, "login-user", 4, NAME, LOGIN))
    other = replace(episode.turns[1], observation="another page")
    found = shown(run, env, sft=replace(episode, turns=(episode.turns[0], other)))
    first, second = found["episodes"]["sft"]["turns"]
    assert first["picture"] == 0 and first["marks"]
    assert second["picture"] is None and second["marks"] == []
    assert found["episodes"]["sft"]["final"] is None


def test_a_frame_is_the_elements_own_box_and_a_place_has_no_size(run, env):
    run(env.reset("login-user", 4))
    script = """path => {
        const { left, top, width, height } = document.querySelector(path).getBoundingClientRect();
        return [left, top, width, height].map(Math.round);
    }"""
    name, button = (run(env._page._tab.evaluate(script, path)) for path in ("#username", "#subbtn"))
    for action, boxes in (
        ('DRAG(ref="1", to="3")', [name, button]),
        ('DRAG(ref="3", x=12, y=34)', [button, [12, 34, 0, 0]]),
        ('CLICK(ref="99")', []),
    ):
        assert run(env.marks(parse(action))) == boxes


# ---- which instances ----


def outcomes(name, solved, task="a"):
    """Episodes of an agent: "+-+" solved the first and third instance of the task."""
    return [
        tiny.episode(
            outcome="solved" if sign == "+" else "failed", seed=seed, task=task, policy=name
        )
        for seed, sign in enumerate(solved)
    ]


def test_of_each_task_the_most_telling_instances_come_first():
    sft = [*outcomes("sft", "++--", "a"), *outcomes("sft", "--", "b")]
    dpo = [*outcomes("dpo", "+-+-", "a"), *outcomes("dpo", "-+", "b")]
    count, telling = replay.telling_instances({"sft": sft, "dpo": dpo})
    assert count == 6
    only_last, only_first = [("a", 2), ("b", 1)], [("a", 1)]
    neither, both = [("a", 3), ("b", 0)], [("a", 0)]
    assert [one["sft"].instance for one in telling] == [*only_last, *only_first, *neither, *both]


# ---- worlds that break, and worlds without pictures ----


class Blurred:
    """A world whose cameras fail on seed 2, or that has no camera at all."""

    def __init__(self, opens=True):
        self.opens, self.parse = opens, MINIWOB.parse

    @contextlib.asynccontextmanager
    async def pictures(self, places):
        if not self.opens:
            raise EnvError("no browser here")
        yield [self] * places

    async def reset(self, task, seed):
        if seed == 2:
            raise EnvError("the browser died")
        return self

    async def step(self, action):
        return self

    async def marks(self, action):
        return []

    async def screenshot(self):
        return b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\2\0\0\0\3"

    text = tiny.PAGE


def test_an_episode_without_pictures_is_told_in_words(tmp_path, request, capsys):
    row = dict.fromkeys(("success", "low", "high", "mean_steps", "valid_action_rate"), 0.5) | {
        "n": 3
    }
    result = {"headline": "sft is kept", "agents": {"sft": {"all": row, "tasks": {"a": row}}}}
    result |= {"date": "2026-11-29", "machine": "a machine"}

    def report(world):
        replay.write_report(
            tmp_path / "report.html",
            result,
            {"sft": outcomes("sft", "---")},
            world=world,
            title="a title",
            about="",
            settings={},
        )
        html = (tmp_path / "report.html").read_text()
        return json.loads(html.split('id="data">')[1].split("</script>")[0])

    one_fails = report(Blurred())
    assert "1 of 3 episodes" in capsys.readouterr().out
    assert [instance["size"] for instance in one_fails["instances"]] == [[2, 3], [2, 3], None]
    no_browser = report(Blurred(opens=False))
    assert "no browser here" in capsys.readouterr().out
    of_words = report(TOY)
    assert capsys.readouterr().out == ""
    assert no_browser == of_words and {one["size"] for one in of_words["instances"]} == {None}
    # only now, because a synchronous browser has an event loop of its own in this thread
    page, problems = request.getfixturevalue("open_report")(of_words)
    assert page.locator("#said").inner_text() == "sft is kept" and problems == []
    assert "Sign in" in page.locator(".said pre").first.inner_text()
    assert page.locator(".shot").count() == 0


# ---- pairs ----


def pair_of(task, seed):
    said = {"solved": (tiny.CLICK_1, tiny.CLICK_2), "failed": (tiny.CLICK_1, tiny.CLICK_1)}
    return Pair(*(tiny.episode(said[o], o, task=task, seed=seed) for o in ("solved", "failed")))


def test_the_tokens_of_a_pair_spell_its_conversations_and_have_two_agents_log_probs(
    base, adapter, make_adapter, tmp_path
):
    context = Context(str(base), MINIWOB, 1, Machine(device="cpu", dtype="float32"))
    other = make_adapter(tmp_path / "other", shape=LoRAConfig(rank=1))
    pairs = [pair_of("a", 1), pair_of("a", 2)]
    found = replay.shown_pairs(context, pairs, adapter, other, agents=("sft", "dpo"), until="token")
    assert [one["seed"] for one in found] == [1, 2] and found[0]["agents"] == ["sft", "dpo"]
    back = replay.shown_pairs(context, pairs, other, adapter, agents=("dpo", "sft"))
    for one, reverse, pair in zip(found, back, pairs, strict=True):
        for side, episode in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            rows = one[side]["tokens"]
            messages = episode_messages(episode, MINIWOB.system_prompt)
            text = "".join(f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in messages)
            assert "".join(row[0] for row in rows) == text
            assert {row[1] for row in rows} == {-1, *range(len(episode.turns))}
            assert any(row[2] != row[3] for row in rows if row[1] >= 0)
            swapped = [[text, turn, b, a] for text, turn, a, b in reverse[side]["tokens"]]
            assert swapped == rows
