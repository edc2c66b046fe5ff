"""What collect.py writes to its file and what it refuses to go on with; on toy pages, without a browser."""

from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from test_rollout import Script, Stairs, run

from envs.actions import Action
from envs.miniwob.experts.decisions import Decision
from minidpo.acting import collect, policies
from minidpo.acting.policies import Job
from minidpo.config import CollectCommand
from minidpo.data.episodes import Writer, read
from minidpo.data.values import step_values

STEPS = tuple(f'action: CLICK(ref="{n}")' for n in (1, 2, 3))


@pytest.fixture(autouse=True)
def pages(monkeypatch):
    @asynccontextmanager
    async def browser(count, headless=True):
        yield type("Pages", (), {"envs": [Stairs() for _ in range(count)]})

    monkeypatch.setattr(collect, "RemoteBrowser", browser)
    monkeypatch.setattr(collect, "progress", lambda *_, ended: 0.25 + ended / 2)


def test_a_failure_is_written_with_how_near_it_came(tmp_path):
    wanted = [Job("stairs", seed, n, 8) for seed in range(5) for n in range(2)]
    counts = collect.play_to_file(Script(), wanted, tmp_path / "a.jsonl", 2, "")
    assert counts["episodes"] == 10
    found = {(e.outcome, e.progress) for e in read(tmp_path / "a.jsonl")}
    assert {("solved", None), ("failed", 0.75)} <= found
    assert found <= {("solved", None), ("failed", 0.75), ("limit", 0.25)}


def test_an_expert_that_knows_no_way_on_ends_its_episode_and_is_told_and_no_other_suffers(
    tmp_path, monkeypatch, capsys
):
    def expert(seen, done):
        if len(done) == 1:
            raise LookupError("no such stair")
        return Decision("up", Action("CLICK", ref="1"))

    monkeypatch.setitem(policies.EXPERTS, "stairs", expert)
    wanted = [Job("stairs", seed, 0, 8) for seed in (3, 4)]
    collect.play_to_file(policies.ExpertPolicy(0.0, 1), wanted, tmp_path / "a.jsonl", 1, "")
    assert [(e.outcome, len(e.turns)) for e in read(tmp_path / "a.jsonl")] == 2 * [("limit", 1)]
    told = capsys.readouterr().err
    assert "stairs seed 3: the expert knows no way on: LookupError('no such stair')\n" in told


def test_what_is_told_of_the_groups_is_of_those_that_were_asked_for(tmp_path, monkeypatch, capsys):
    policy = Script(["next"])
    with Writer(tmp_path / "a.jsonl") as writer:
        writer.extend(
            replace(
                tiny.episode(answer, outcome, seed=seed, index=index, policy=policy.name),
                task="other",
                sampling=policy.sampling,
            )
            for seed in range(6)
            for index, (answer, outcome) in enumerate([("a", "solved"), ("b", "failed")])
        )
    for name, stand_in in (
        ("make_policy", lambda *_: policy),
        ("resolve", lambda tasks: (tasks,)),
        ("STEP_LIMIT", lambda task: 8),
    ):
        monkeypatch.setattr(collect, name, stand_in)
    collect.collect(CollectCommand(tasks="stairs", instances=2, group=2, out=tmp_path / "a.jsonl"))
    said = capsys.readouterr().out
    assert "\nof what was tried several times, 0% was both solved and failed; two att" in said


def test_a_full_disk_is_told_with_the_name_of_the_log(tmp_path):
    (tmp_path / "a.metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="a.metrics.jsonl"):
        collect.play_to_file(Script(), [Job("stairs", 0, 0, 8)], tmp_path / "a.jsonl", 1, "")


def test_a_file_does_not_go_on_with_other_forced_steps_or_another_way_to_sample(tmp_path):
    wanted = [Job("stairs", 1, 0, 8, STEPS[:1])]
    collect.play_to_file(Script(["next"]), wanted, tmp_path / "a.jsonl", 1, "")
    with pytest.raises(ValueError, match="began with 1 forced steps, not with these 2"):
        other = [wanted[0]._replace(forced=STEPS[:2])]
        collect.play_to_file(Script(["next"]), other, tmp_path / "a.jsonl", 1, "")
    with pytest.raises(ValueError, match="began with 1 forced steps, not with these 1"):
        other = [wanted[0]._replace(forced=STEPS[1:2])]
        collect.play_to_file(Script(["next"]), other, tmp_path / "a.jsonl", 1, "")
    other = Script(["next"])
    other.sampling = {"seed": 8}
    with pytest.raises(ValueError, match="holds episodes by script"):
        collect.play_to_file(other, wanted, tmp_path / "a.jsonl", 1, "")


def test_a_command_says_from_which_golden_steps_episodes_begin(tmp_path, monkeypatch):
    """Three steps: from each of them in turn, or from where a third begins. The last is the agent's."""
    first = collect.SEEDS["rollouts"][0]
    recorded_in(
        tmp_path / "golden.jsonl",
        tiny.episode(
            (tiny.CLICK_1, tiny.CLICK_1, tiny.CLICK_2),
            task="click-button",
            seed=first,
            policy="expert",
        ),
    )
    played = []
    monkeypatch.setattr(collect, "make_policy", lambda *_: Script(["next"]))
    monkeypatch.setattr(
        collect, "play_to_file", lambda policy, jobs, *_, **__: played.append(jobs) or {}
    )
    command = CollectCommand(
        tasks="click-button",
        instances=1,
        group=4,
        golden=tmp_path / "golden.jsonl",
        out=tmp_path / "out.jsonl",
    )
    command.out.touch()  # as whoever plays does
    found = {}
    for steps in ("drawn", "every", "thirds"):
        collect.collect(replace(command, golden_steps=steps))
        found[steps] = [len(job.forced) for job in played.pop()]
    assert len({*found["drawn"]}) == 1 and found["every"] == found["thirds"] == [0, 1, 2, 0]


def test_examples_are_written_into_the_episodes_and_a_file_does_not_go_on_with_others(
    tmp_path, monkeypatch
):
    wanted = [Job("stairs", 1, 0, 8, shots=("shown", "said"))]
    collect.play_to_file(Script(["next"]), wanted, tmp_path / "a.jsonl", 1, "")
    assert read(tmp_path / "a.jsonl")[0].shots == ("shown", "said")
    monkeypatch.setattr(collect, "resolve", lambda task: (task,))
    assert {job.shots for job in collect.continuations(tmp_path / "a.jsonl", 2)} == {
        ("shown", "said")
    }
    with pytest.raises(
        ValueError, match="episode 0 was played behind other examples: give its --shots"
    ):
        collect.play_to_file(
            Script(["next"]), [wanted[0]._replace(shots=())], tmp_path / "a.jsonl", 1, ""
        )


# ---- continuations, for step values ----


def recorded_in(path, *episodes):
    with Writer(path) as writer:
        writer.extend(episodes)
    return path


@pytest.fixture
def stairs(monkeypatch, tmp_path):
    """A file with two episodes of one instance that differ in their last answer, and one of another."""
    monkeypatch.setattr(collect, "resolve", lambda task: (task,))
    wanted = [
        Job("stairs", 1, 3, 8, STEPS),
        Job("stairs", 1, 5, 8, (*STEPS[:2], STEPS[0], STEPS[2])),
        Job("stairs", 2, 0, 8, STEPS),
    ]
    return recorded_in(
        tmp_path / "recorded.jsonl",
        *(replace(episode, forced=0) for episode in run([Stairs()], wanted, Script(["next"]))[0]),
    )


def test_each_state_of_an_instance_is_continued_so_often_by_samples_of_its_own(stairs):
    jobs = collect.continuations(stairs, 3)
    assert len({job.key for job in jobs}) == len(jobs) == 3 * (3 + 3)
    assert [job.index for job in jobs if job.seed == 1] == list(range(6, 6 + 9))  # behind 3 and 5
    assert [job.index for job in jobs if job.seed == 2] == list(range(1, 1 + 9))
    # two episodes go on from the first page already, a lone one says nothing of what else could be
    states = {1: [STEPS[:1], STEPS[:2], (*STEPS[:2], STEPS[0])], 2: [(), STEPS[:1], STEPS[:2]]}
    for seed in states:
        assert [job.forced for job in jobs if job.seed == seed] == [
            said for said in states[seed] for _ in range(3)
        ]


def test_played_on_pages_the_values_of_a_chain_are_the_known_ones(stairs):
    """At each step three of four answers are right and the fourth ends it: V is 0.75 to the power of the
    steps that are left. 400 continuations each; within four standard deviations of the binomial."""
    walked = read(stairs)[-1]
    jobs = [job for job in collect.continuations(stairs, 400) if job.seed == 2]
    values = step_values(walked, run([Stairs()], jobs, Script(["next", "next", "next", "4"]))[0])
    for t, value in enumerate(values[:3]):
        known = 0.75 ** (3 - t)
        assert abs(value - known) < 4 * (known * (1 - known) / 400) ** 0.5
    assert values[3] == 1.0


def test_values_that_were_killed_go_on_and_are_refused_for_other_episodes(
    stairs, tmp_path, monkeypatch
):
    def command(recorded, out):
        return CollectCommand(values=2, recorded=recorded, out=tmp_path / out)

    monkeypatch.setattr(collect, "make_policy", lambda *_: Script())
    whole = collect.collect(command(stairs, "whole.jsonl"))
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    assert whole["episodes"] == len(lines) == 2 * (3 + 3)
    (tmp_path / "killed.jsonl").write_bytes(b"".join(lines[3:9]) + lines[0][:40])
    assert collect.collect(command(stairs, "killed.jsonl")) == whole
    assert read(tmp_path / "killed.jsonl") == read(tmp_path / "whole.jsonl")
    others = recorded_in(
        tmp_path / "others.jsonl", *(replace(e, turns=e.turns[1:]) for e in read(stairs))
    )
    with pytest.raises(ValueError, match="forced steps, not with these .*: give another --out"):
        collect.collect(command(others, "whole.jsonl"))
    nothing = recorded_in(tmp_path / "nothing.jsonl", replace(read(stairs)[0], turns=()))
    with pytest.raises(ValueError, match="nothing.jsonl: no episode has a step to go on from"):
        collect.collect(command(nothing, "n.jsonl"))


def test_what_stands_in_files_is_read_before_the_weights_are(tmp_path, monkeypatch):
    monkeypatch.setattr(collect, "make_policy", lambda *_: pytest.fail("loaded a model"))
    nowhere = tmp_path / "nowhere.jsonl"
    for changes in ({"golden": nowhere}, {"shots": 1, "examples": nowhere}):
        with pytest.raises(ValueError, match="nowhere.jsonl: no such file"):
            collect.collect(CollectCommand(tasks="click-test", out=tmp_path / "a.jsonl", **changes))


def test_a_task_without_an_expert_or_unknown_is_refused_also_where_it_was_recorded(tmp_path):
    asked = CollectCommand(policy="expert", tasks="count-sides", out=tmp_path / "a.jsonl")
    recorded = recorded_in(
        tmp_path / "of.jsonl", tiny.episode(task="count-sides", outcome="failed")
    )
    for command in (asked, replace(asked, tasks=CollectCommand.tasks, values=1, recorded=recorded)):
        with pytest.raises(
            ValueError, match="no scripted expert for count-sides: take .* --tasks expert "
        ):
            collect.collect(command)
    visit = recorded_in(tmp_path / "visit.jsonl", tiny.episode(task="file:///page.html"))
    with pytest.raises(ValueError, match="unknown task 'file:///page.html'"):
        collect.collect(CollectCommand(values=1, recorded=visit, out=tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"recorded": None}, "give both, or leave both out"),
        ({"values": None}, "give both, or leave both out"),
        ({"tasks": "report"}, "values goes on where recorded episodes say: leave out tasks"),
        ({"golden": "g.jsonl", "group": 4}, "leave out group, golden$"),
        ({"out": "runs/../runs/of.jsonl"}, "would be written among the episodes in"),
        ({"values": 0}, "values must be finite and greater than 0"),
    ],
)
def test_options_of_values_that_make_no_sense_are_refused(changes, says):
    paths = {name: Path(value) for name, value in changes.items() if name in ("golden", "out")}
    with pytest.raises(ValueError, match=says):
        CollectCommand(**{"values": 2, "recorded": Path("runs/of.jsonl"), **changes, **paths})


def test_a_file_does_not_go_on_with_other_steps_of_the_same_number(tmp_path):
    wanted = [Job("stairs", 1, 0, 8, STEPS[:2])]
    collect.play_to_file(Script(["next"]), wanted, tmp_path / "a.jsonl", 1, "")
    with pytest.raises(ValueError, match="episode 0 began with 2 forced steps, not with these 2"):
        other = [wanted[0]._replace(forced=STEPS[:1] * 2)]
        collect.play_to_file(Script(["next"]), other, tmp_path / "a.jsonl", 1, "")


@pytest.fixture
def rollouts(tmp_path):
    """Of two seeds, two episodes each that begin alike: states (), 1 and 12; and (), 9 and 99."""
    said = {1: [STEPS, STEPS[:2]], 2: [("9", "9", "9"), ("9", "1")]}
    with Writer(tmp_path / "rollouts.jsonl") as writer:
        for seed, episodes in said.items():
            for index, answers in enumerate(episodes):
                writer.add(tiny.episode(answers, "failed", seed=seed, index=index, task="stairs"))
    return tmp_path / "rollouts.jsonl"


def test_every_state_that_an_agent_reached_is_played_once_in_a_seeded_order(rollouts):
    jobs = [Job("stairs", seed, n, 5) for seed in (1, 2, 3) for n in range(8)]
    reached = collect.to_agent_states(jobs, [rollouts], 1)
    given = {seed: [job.forced for job in reached if job.seed == seed] for seed in (1, 2, 3)}
    assert sorted(given[1]) == [(), STEPS[:1], STEPS[:2]] and sorted(given[2]) == [
        (),
        ("9",),
        ("9", "9"),
    ]
    assert given[3] == [] and len({job.key for job in reached}) == len(reached) == 6
    assert all(job.limit == 5 + len(job.forced) and not job.shots for job in reached)
    with pytest.raises(
        ValueError, match="rollouts.jsonl: played behind other examples than --shots"
    ):
        collect.to_agent_states([jobs[0]._replace(shots=("page", "answer"))], [rollouts], 1)
    orders = {tuple(collect.to_agent_states(jobs, [rollouts], seed)) for seed in (1, 1, 2, 3, 4, 5)}
    assert 1 < len(orders) < 6
    few = [job for job in jobs if job.index < 2]
    assert collect.to_agent_states(few, [rollouts], 1) == [job for job in reached if job.index < 2]
    with pytest.raises(
        ValueError, match="rollouts.jsonl: no state of any instance that is asked for: giv"
    ):
        collect.to_agent_states([Job("stairs", 3, 0, 5)], [rollouts], 1)


def test_whoever_answers_in_these_states_goes_on_from_there(rollouts, tmp_path):
    jobs = collect.to_agent_states([Job("stairs", 1, n, 5) for n in range(3)], [rollouts], 1)
    collect.play_to_file(Script(["next"]), jobs, tmp_path / "dagger.jsonl", 1, "")
    for episode, job in zip(read(tmp_path / "dagger.jsonl"), jobs, strict=True):
        assert episode.said == STEPS and episode.solved and episode.forced == len(job.forced)
