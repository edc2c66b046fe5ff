"""The report's episodes and pairs: pictures of real pages, the rule that chooses, tokens of both sides."""

import asyncio
import base64
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from test_sft_dpo import HERE, dpo, episodes_file, folder  # noqa: F401  a fixture

from envs.actions import Action, parse
from envs.protocol import EnvError
from minidpo.config import DPO, DPOCommand
from minidpo.data.episodes import Episode, Turn
from minidpo.data.pairs import Pair
from minidpo.data.prompt import episode_messages
from minidpo.learning import explain
from minidpo.learning.dpo import dpo as train_dpo
from minidpo.learning.dpo import load_pairs
from minidpo.learning.explain import Token
from minidpo.results import replay
from minidpo.system.files import read_json, write_json

NAME, PASSWORD, LOGIN = ('TYPE(ref="1", text="olin")', 'TYPE(ref="2", text="x")', 'CLICK(ref="3")')


async def played(env, task, seed, *actions):
    """The episode of these actions, as an agent would have played it."""
    seen, turns = await env.reset(task, seed), []
    for action in actions:
        turns.append(Turn(seen.text, tiny.write("now", action), action))
        seen = await env.step(parse(action))
        turns[-1] = replace(turns[-1], error=seen.error)
    return Episode(
        task, seed, 0, seen.instruction, tuple(turns), seen.outcome or "limit", seen.reward, "me"
    )


def test_each_step_has_its_picture_and_what_agents_have_in_common_one(run, env):
    episodes = {
        "sft": run(played(env, "login-user", 4, NAME, LOGIN)),
        "dpo": run(played(env, "login-user", 4, NAME, PASSWORD, LOGIN)),
    }
    shown = run(replay.photograph(env, episodes))
    pictures = [base64.b64decode(picture) for picture in shown["pictures"]]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    sft, after = shown["episodes"]["sft"], shown["episodes"]["dpo"]
    assert [turn["picture"] for turn in sft["turns"]] == [0, 1] and sft["final"] == 2
    assert [turn["picture"] for turn in after["turns"]] == [0, 1, 3] and after["final"] == 4
    assert pictures[0] != pictures[1]
    run(env.reset("login-user", 4))
    run(env.step(parse(NAME)))
    assert run(env.screenshot()) == pictures[1]
    assert (shown["task"], shown["seed"], sft["outcome"]) == ("login-user", 4, "failed")
    assert [turn["thought"] for turn in after["turns"]] == ["now"] * 3


@pytest.mark.parametrize(
    "action, selectors",
    [
        (LOGIN, ["#subbtn"]),
        (NAME, ["#username"]),
        ('DRAG(ref="1", to="3")', ["#username", "#subbtn"]),
        ('PRESS(key="Tab")', []),
        ('CLICK(ref="99")', []),
        ('CLICK(ref="no number")', []),
    ],
)
def test_the_frame_is_the_element_s_own_box(run, env, action, selectors):
    run(env.reset("login-user", 4))
    box = """path => {
        const { left, top, width, height } = document.querySelector(path).getBoundingClientRect();
        return [left, top, width, height].map(Math.round);
    }"""
    expected = [run(env._page._tab.evaluate(box, path)) for path in selectors]
    assert all(width > 20 and height > 10 for _, _, width, height in expected)
    assert run(replay.marks(env, parse(action))) == expected


def test_a_place_has_no_size_and_an_element_that_has_gone_no_frame(run, env):
    run(env.reset("login-user", 4))
    [button] = run(replay.marks(env, Action("CLICK", ref="3")))
    assert run(replay.marks(env, Action("DRAG", ref="3", x=12, y=34))) == [button, [12, 34, 0, 0]]
    run(env._page._tab.evaluate("document.querySelector('#subbtn').remove()"))
    assert run(replay.marks(env, Action("CLICK", ref="3"))) == []
    assert run(replay.marks(env, Action("CLICK_AT", x=12, y=34))) == [[12, 34, 0, 0]]
    env._page.task = None  # the next reset loads the page anew


def test_a_page_that_the_agent_did_not_see_is_not_shown(run, env):
    episode = run(played(env, "login-user", 4, NAME, LOGIN))
    other = replace(episode.turns[1], observation="another page")
    shown = run(replay.photograph(env, {"sft": replace(episode, turns=(episode.turns[0], other))}))
    first, second = shown["episodes"]["sft"]["turns"]
    assert first["picture"] == 0 and first["marks"]
    assert second["picture"] is None and second["marks"] == []
    assert shown["episodes"]["sft"]["final"] is None


def test_an_answer_without_an_action_is_shown_and_changes_nothing(run, env):
    episode = run(played(env, "login-user", 4, NAME))
    page = run(env.step(Action("WAIT"))).text
    lost = Turn(page, "no action here", None, "no action found")
    shown = run(replay.photograph(env, {"sft": replace(episode, turns=(*episode.turns, lost))}))
    last = shown["episodes"]["sft"]["turns"][-1]
    assert (last["action"], last["answer"], last["picture"]) == (None, "no action here", 1)
    assert shown["episodes"]["sft"]["final"] == 1


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
    count, shown = replay.telling_instances({"sft": sft, "dpo": dpo})
    assert count == 6
    assert [(one["sft"].task, one["dpo"].seed) for one in shown] == [
        ("a", 2),
        ("b", 1),  # only the last agent
        ("a", 1),  # only the first
        ("a", 3),
        ("b", 0),  # neither
        ("a", 0),
    ]  # both


def test_a_dozen_tasks_show_one_instance_of_a_kind_and_fewer_tasks_more():
    many = {"sft": [e for n in range(12) for e in outcomes("sft", "--", f"task {n}")]}
    assert [one["sft"].seed for one in replay.telling_instances(many)[1]] == [0] * 12
    few = {"sft": [*outcomes("sft", "-+-+--", "a"), *outcomes("sft", "+" * 9, "b")]}
    count, shown = replay.telling_instances(few)
    first = [("a", 0), ("a", 1), ("b", 0), ("a", 2)]
    assert count == 15 and [one["sft"].instance for one in shown[:4]] == first
    assert sum(one["sft"].task == "b" for one in shown) == 6


def test_of_three_agents_the_last_two_say_what_is_telling():
    three = {
        "base": outcomes("base", "--+"),
        "sft": outcomes("sft", "+-+"),
        "dpo": outcomes("dpo", "-++"),
    }
    assert [one["dpo"].seed for one in replay.telling_instances(three)[1]] == [1, 0, 2]


def test_only_what_all_agents_have_played_is_shown():
    three = {
        "base": outcomes("base", "---"),
        "sft": outcomes("sft", "--"),
        "dpo": outcomes("dpo", "+++"),
    }
    count, shown = replay.telling_instances(three)
    assert count == 2 and [list(one) for one in shown] == [["base", "sft", "dpo"]] * 2


def test_no_more_is_played_once_the_bytes_are_used_up(run, monkeypatch):
    monkeypatch.setattr(replay, "BYTES", 3000)
    monkeypatch.setattr(replay, "PAGES", 1)

    async def photograph(env, episodes):
        return {"seed": episodes["sft"].seed, "pictures": ["A" * 1000]}

    monkeypatch.setattr(replay, "photograph", photograph)
    shown = [{"sft": episode} for episode in outcomes("sft", "-" * 9)]
    taken, failed = run(replay.photograph_all(shown))
    assert [one["seed"] for one in taken] == [0, 1, 2] and failed == 0


def test_instances_come_in_order_whichever_was_faster_and_a_failing_browser_costs_one(
    run, monkeypatch
):
    async def photograph(env, episodes):
        seed = episodes["sft"].seed
        await asyncio.sleep(0.05 * (seed == 0))
        if seed == 2:
            raise EnvError("the browser died")
        return {"seed": seed}

    monkeypatch.setattr(replay, "photograph", photograph)
    taken, failed = run(
        replay.photograph_all([{"sft": episode} for episode in outcomes("sft", "-----")])
    )
    assert [one["seed"] for one in taken] == [0, 1, 3, 4] and failed == 1


def test_without_a_browser_there_is_a_report_all_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MINIDPO_CHROMIUM", str(tmp_path / "none"))
    row = {
        "success": 0.5,
        "low": 0.1,
        "high": 0.9,
        "n": 2,
        "mean_steps": 1.0,
        "valid_action_rate": 1.0,
    }
    result = {"agents": {"sft": {"all": row, "tasks": {"a": row}}}}
    replay.make_report(
        tmp_path / "report.html", result, {"sft": outcomes("sft", "+-")}, {"title": "a"}
    )
    assert "the report has no pictures: MINIDPO_CHROMIUM=" in capsys.readouterr().out
    data = json.loads(
        (tmp_path / "report.html").read_text().split('id="data">')[1].split("</script>")[0]
    )
    assert data["instances"] == [] and data["played"] == 2


# ---- pairs ----


@pytest.mark.parametrize("until", ["token", "turn"])
def test_the_pairs_shown_are_those_that_were_trained_on(folder, tmp_path, until):  # noqa: F811
    dpo(folder, tmp_path, until=until)
    config = DPOCommand(
        str(folder / "base"),
        folder / "adapter",
        data=(folder / "rollouts.jsonl",),
        out=tmp_path,
        dpo=DPO(until=until),
    )
    assert replay.trained_pairs(tmp_path) == load_pairs(config, until) != []


def test_pairs_from_two_seeds_rollouts_are_told_apart(folder, tmp_path):  # noqa: F811
    """Everything but what was said is alike: task, seed, agent and number."""
    files = [
        episodes_file(
            tmp_path / f"{seed}.jsonl",
            [
                replace(tiny.episode((f"{seed}{word}",), outcome, index=n), sampling={"seed": seed})
                for n, (word, outcome) in enumerate([("good", "solved"), ("bad", "failed")])
            ],
        )
        for seed in (1, 2)
    ]
    config = DPOCommand(
        str(folder / "base"),
        folder / "adapter",
        data=tuple(files),
        out=tmp_path / "run",
        dpo=DPO(steps=1, pairs_per_instance=2),
        machine=HERE,
    )
    train_dpo(config)
    shown = replay.trained_pairs(config.out)
    assert shown == load_pairs(config, "end") and len({pair.chosen.said for pair in shown}) == 2
    told = [json.loads(line) for line in (config.out / "pairs.jsonl").read_text().splitlines()]
    for side in (record[side] for record in told for side in ("chosen", "rejected")):
        del side["sampling"]  # as an older run wrote it: any of the two is shown
    (config.out / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in told))
    assert len(replay.trained_pairs(config.out)) == 2


def test_kto_s_two_columns_are_not_shown_as_pairs(folder, tmp_path):  # noqa: F811
    dpo(folder, tmp_path, loss="kto", pairs="unpaired", steps=1)
    before, after = folder / "adapter", tmp_path / "adapter"
    assert replay.shown_pairs(tmp_path, str(folder / "base"), HERE, before, after) == []


def test_an_evaluation_finds_curves_and_pairs_beside_its_adapters(
    folder, tmp_path, monkeypatch, capsys
):
    bars = []
    monkeypatch.setattr(explain, "tqdm", lambda work, desc, **options: bars.append(desc) or work)
    run, loop = tmp_path / "loop" / "round-2" / "dpo", tmp_path / "loop"
    _, log = dpo(folder, run, loss="ipo_mean", steps=2)
    source = str(folder / "base")

    def told(**adapters):
        shown = replay.training_shown(adapters, source, HERE)
        curves = {name: len(rows) for name, rows in shown["curves"].items()}
        return shown["settings"], curves, shown["pairs"], capsys.readouterr().out

    about, curves, pairs, _ = told(base=None, start=folder / "adapter", dpo=run / "adapter")
    assert (about, curves) == ({"loss": "ipo_mean"}, {"dpo": len(log)}) and bars == ["pairs"] * 2
    assert {tuple(pair["agents"]) for pair in pairs} == {("start", "dpo")}
    # of a loop's own adapter, the round that it was kept from; an agent that is not among them has its path
    shutil.copytree(run / "adapter", loop / "adapter")
    write_json(loop / "config.json", {"version": 1, "rounds": 3, "learn": "dpo"})
    write_json(loop / "result.json", {"version": 1, "kept_round": 2})
    assert told(mine=loop / "adapter") == (
        {},
        {"mine": len(log)},
        [{**pair, "agents": [str(folder / "adapter"), "mine"]} for pair in pairs],
        "",
    )
    # what is gone, or of another version, is told and left out
    begun = read_json(run / "config.json")
    for changes, curves, says in (
        ({"data": ["gone.jsonl"]}, True, "has no pairs: gone.jsonl: no such file"),
        ({"adapter_sha256": ["x"]}, True, "is no longer the adapter that"),
        ({"data": [folder / "demos.jsonl"]}, True, "no longer holds the episodes"),
        ({"version": 99}, False, "lacks the training of dpo: .* version 99"),
    ):
        write_json(run / "config.json", begun | changes)
        _, found, none, out = told(dpo=run / "adapter")
        assert (bool(found), none) == (curves, []) and re.search(says, out)
    with pytest.raises(ValueError, match="version 99"):
        replay.trained_pairs(run)
    assert told(hub=Path("someone/agent")) == ({}, {}, [], "")


def test_every_task_has_its_turn_among_the_pairs_shown(monkeypatch):
    pairs = [
        Pair(
            *(
                tiny.episode(outcome=outcome, task=task, seed=seed)
                for outcome in ("solved", "failed")
            )
        )
        for task, seed in (("a", 0), ("a", 1), ("a", 2), ("b", 3), ("c", 4), ("b", 5))
    ]
    monkeypatch.setattr(replay, "trained_pairs", lambda folder: pairs)
    monkeypatch.setattr(replay, "PAIRS", 5)
    assert [(pair.chosen.task, pair.chosen.seed) for pair in replay.first_pairs(None)] == [
        ("a", 0),
        ("b", 3),
        ("c", 4),
        ("a", 1),
        ("b", 5),
    ]


def test_the_tokens_of_a_pair_spell_its_conversations_and_training_moved_them(folder, tmp_path):  # noqa: F811
    dpo(folder, tmp_path, steps=10, lr=1e-2, until="end")
    shown = replay.shown_pairs(
        tmp_path, str(folder / "base"), HERE, folder / "adapter", tmp_path / "adapter"
    )
    pairs = replay.first_pairs(tmp_path)
    assert len(shown) == len(pairs) > 1
    gains = []
    for one, pair in zip(shown, pairs, strict=True):
        for side, episode in ((one["chosen"], pair.chosen), (one["rejected"], pair.rejected)):
            text = "".join(
                f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in episode_messages(episode)
            )
            assert "".join(row[0] for row in side["tokens"]) == text
            assert {row[1] for row in side["tokens"]} == {-1, *range(len(episode.turns))}
            assert all(
                (row[2] is None) == (row[3] is None) == (row[1] < 0) for row in side["tokens"]
            )
            assert side["outcome"] == episode.outcome and one["until"] == "end"
        chosen, rejected = (
            sum(row[3] - row[2] for row in one[side]["tokens"] if row[1] >= 0)
            for side in ("chosen", "rejected")
        )
        gains.append(chosen - rejected)
    assert min(gains) > 0


def test_what_the_agent_did_not_write_is_one_row():
    tokens = [
        Token("a", -1, None, None),
        Token("b", -1, None, None),
        Token("c", 0, -0.123456, -1.0),
        Token("d", 0, -2.0, -1.0),
        Token("e", -1, None, None),
    ]
    assert replay.token_rows(tokens) == [
        ["ab", -1, None, None],
        ["c", 0, -0.1235, -1.0],
        ["d", 0, -2.0, -1.0],
        ["e", -1, None, None],
    ]
