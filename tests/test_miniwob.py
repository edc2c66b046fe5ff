"""`benchmarks/miniwob.py`: splits without siblings, figures of recorded verdicts, one small part played."""

import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import miniwob
from envs.miniwob.experts.by_task import EXPERTS
from envs.miniwob.tasks import SUITES
from minidpo.data.episodes import read

few = settings(
    max_examples=settings.default.max_examples // 5
)  # they differ in their verdicts alone


def test_shares_are_whole_families_of_about_the_same_size_and_every_task_lies_in_one():
    held_out = [miniwob.split(SUITES["expert"], number)[1] for number in (1, 2, 3, 4)]
    assert sorted(sum(held_out, [])) == sorted(SUITES["expert"])
    assert all(abs(len(share) - len(SUITES["expert"]) / 4) <= 2 for share in held_out)
    for number in (1, 2, 3):
        train, unseen = miniwob.split(SUITES["expert"], number)
        assert sorted(train + unseen) == sorted(SUITES["expert"])
        assert not {EXPERTS[task] for task in train} & {EXPERTS[task] for task in unseen}
        for family in miniwob.families(SUITES["expert"]):
            assert set(family) <= set(train) or set(family) <= set(unseen)


def test_the_recorded_page_is_made_of_the_recorded_lines():
    """So each agent, page that training had, temperature and p-value in it is what was measured."""
    lines = miniwob.recorded()
    figures = miniwob.figures_of(lines)
    assert miniwob.DOCUMENT.read_text() == miniwob.document(lines, figures)
    written = json.loads((miniwob.RESULTS / "miniwob.json").read_text())["figures"]
    assert written == {name: pytest.approx(value, rel=1e-6) for name, value in figures.items()}


def test_an_interval_over_families_is_that_of_their_means_where_families_are_of_one_size():
    """t · s / √n of the families' gains: 10, 0 and -4 have a mean of 2 and s = √52."""
    gains = {
        "click-tab": 10.0,
        "click-tab-2": 10.0,
        "enter-text": 0.0,
        "enter-text-2": 0.0,
        "use-slider": -4.0,
        "use-slider-2": -4.0,
    }
    found = miniwob.over_families(gains)
    assert found["families"] == 3 and found["gain_points"] == pytest.approx(2)
    assert found["gain_high"] - 2 == pytest.approx(4.303 * (52 / 3) ** 0.5)
    assert 2 - found["gain_low"] == pytest.approx(4.303 * (52 / 3) ** 0.5)


def test_a_run_of_a_part_does_not_drop_agents_that_were_trained_elsewhere(tmp_path, monkeypatch):
    """It says so before it trains."""
    monkeypatch.setattr(miniwob, "LINES", tmp_path / "miniwob.jsonl")
    own = line("whole", 1, random.Random(0), SUITES["all"])
    miniwob.add_line(with_agent(own, "eto", own["agents"]["sft"], "rounds"))
    before = miniwob.LINES.read_bytes()
    with pytest.raises(
        SystemExit, match="line of whole, seed 1, holds eto, which this run does not train"
    ):
        next(miniwob.Part("whole", 1, tmp_path).run())
    assert miniwob.LINES.read_bytes() == before and not (tmp_path / "whole-1").exists()


def test_siblings_are_tasks_and_too_few_families_are_refused():
    assert {*miniwob.SIBLINGS, *miniwob.SIBLINGS.values()} <= set(SUITES["all"])
    with pytest.raises(ValueError, match="3 families of tasks make no 4 shares"):
        miniwob.split(["click-tab", "click-tab-2", "click-link", "enter-text"], 1)


def test_a_task_that_the_browser_gave_up_is_played_again():
    with pytest.raises(ValueError, match="gave up an episode of click-tab: run it again"):
        miniwob.verdicts([], {"click-tab": 2})


def line(part, seed, rng, tasks):
    counts = {task: 25 if task in SUITES["webgum-56"] else 10 for task in tasks}
    agents = {
        name: {
            task: "".join(rng.choice("01") for _ in range(count)) for task, count in counts.items()
        }
        for name in ("sft", "rounds")
    }
    causes = {
        name: {"wrong text": rng.randrange(1, 9), "too long": rng.randrange(9)} for name in agents
    }
    return {
        "part": part,
        "seed": seed,
        "agents": agents,
        "made": {},
        "causes": causes,
        "trained_on": list(SUITES["expert"]),
        "cores": 2,
        "validation": [0.5, 0.75],
        "kept_round": 1,
        "seconds": {"sft": 3600.0},
        "recipe": [440, 2, "48 steps of DPO at 0.0001"],
        "machine": "Linux, a processor, 2 CPU cores",
        "versions": {"torch": "0"},
    }


@few
@given(st.integers(0, 2**32 - 1))
def test_figures_count_what_the_verdicts_say(seed):
    rng = random.Random(seed)
    whole = line("whole", 1, rng, SUITES["all"])
    unseen = [line(f"unseen-{k}", 1, rng, miniwob.split(SUITES["expert"], k)[1]) for k in (1, 2)]
    figures = miniwob.figures_of([whole, *unseen])
    sft, rounds = whole["agents"].values()
    ones = sum(text[:10].count("1") for text in sft.values())
    assert figures["all125_sft"] == pytest.approx(100 * ones / 1250)
    assert figures["webgum56_trained"] == pytest.approx(
        100 * sum(rounds[task].count("1") for task in SUITES["webgum-56"]) / 1400
    )
    assert (
        figures["all125_trained"] == figures["all125_rounds"]
    )  # of one part the agent that stands last
    assert figures["gain_points"] == figures["rounds_to_sft_gain_points"]
    assert figures["gain_points"] == pytest.approx(
        figures["all125_trained"] - figures["all125_sft"]
    )
    gain = figures["webgum56_trained"] - figures["webgum56_sft"]
    assert figures["webgum56_gain_points"] == pytest.approx(gain)
    assert (
        0 < figures["webgum56_p_value"] <= 1
        and figures["seeds"] == 1
        and figures["unseen_parts"] == 2
    )
    assert figures["unseen_tasks"] == sum(len(each["agents"]["sft"]) for each in unseen)
    held_out = [task for each in unseen for task in each["agents"]["sft"]]
    assert figures["unseen_families"] == len(miniwob.families(sorted(held_out)))
    half = whole | {"agents": {"sft": sft}}  # SFT has played, the rounds have not
    assert miniwob.figures_of([half])["all125_sft"] == figures["all125_sft"]
    assert not {"gain_points", "all125_trained"} & miniwob.figures_of([half]).keys()
    text = miniwob.document([half], miniwob.figures_of([half]))
    assert (
        "minidpo, rounds" not in text and "No rounds have been played" in text and "| sft |" in text
    )
    text = miniwob.document([whole, *unseen], figures)
    assert (
        "| wrong text | {sft} | {rounds} | it typed".format(
            **{name: counts["wrong text"] for name, counts in whole["causes"].items()}
        )
        in text
    )
    assert f"{figures['webgum56_trained']:.1f} (" in text and "| drag-cube |  |" in text
    assert max(map(len, text.splitlines())) < 250
    assert "played by earlier agents: whole, seed 1; unseen-1, seed 1; unseen-2, seed 1." in text
    assert "earlier agents" not in miniwob.document([whole | {"first": 25}], figures)
    assert (
        "| `rounds` | `sft` | 2 round(s) of 48 steps of DPO at 0.0001 | 5 demonstrations a task, "
        "verdicts |"
    ) in text
    assert "verdicts, 1,800 golden episodes |" in miniwob.document(
        [whole | {"golden": 1800}], figures
    )
    gains = [
        "{:+.1f} ({:+.1f} to {:+.1f}), p = {:.1g}".format(
            *(figures[f"{of}{key}"] for key in ("gain_points", "gain_low", "gain_high", "p_value"))
        )
        for of in ("", "webgum56_")
    ]
    of_all, of_56 = (len(miniwob.families(SUITES[suite])) for suite in ("all", "webgum-56"))
    assert of_56 < of_all and f"({of_all} of all, {of_56} of `webgum-56`)" in text
    for of in ("", "webgum56_", "unseen_"):
        assert figures[f"{of}gain_low"] < figures[f"{of}gain_points"] < figures[f"{of}gain_high"]
    for number, each in enumerate(unseen, 1):
        assert f"| unseen-{number}, 1 | 440 steps, then 2 round(s) of 48 steps" in text
        assert f"| {miniwob.unseen_gain([each])['gain_points']:+.1f} (" in text
    assert f"| `rounds` | `sft` | {' | '.join(gains)} |" in text and "Made by hand" not in text


def with_agent(line, agent, verdicts, *after):
    """A line in which an agent that was trained elsewhere has played, too."""
    made = {
        "after": after,
        "how": f"how {agent} was made",
        "learned": f"what {agent} saw",
        "adapter": f"of/{agent}",
    }
    return line | {
        "agents": line["agents"] | {agent: verdicts},
        "made": line["made"] | {agent: made},
        "causes": line["causes"] | {agent: {}},
        "weights": line.get("weights", {}) | {agent: 8 * agent[0] + 56 * "0"},
    }


@few
@given(st.integers(0, 2**32 - 1))
def test_an_agent_trained_elsewhere_stands_beside_those_that_it_began_with(seed):
    rng = random.Random(seed)
    whole = line("whole", 1, rng, SUITES["all"])
    sft, rounds = whole["agents"].values()
    eto = {task: "".join(rng.choice("011") for _ in text) for task, text in sft.items()}
    mean = with_agent(with_agent(whole, "eto", eto, "rounds"), "mean", sft, "rounds", "eto")
    before, figures = miniwob.figures_of([whole]), miniwob.figures_of([mean])
    last = {
        name
        for name in before
        if "trained" in name
        or name.removeprefix("webgum56_") in ("gain_points", "gain_low", "gain_high", "p_value")
    }
    assert {name: figures[name] for name in before.keys() - last} == {
        name: before[name] for name in before.keys() - last
    }
    assert figures["all125_trained"] == figures["all125_mean"] == figures["all125_sft"]
    assert (
        figures["gain_points"] == figures["mean_to_sft_gain_points"] == 0
        and figures["p_value"] == 1
    )
    assert figures["all125_eto"] == pytest.approx(
        sum(text[:10].count("1") for text in eto.values()) / 12.5
    )
    assert figures["eto_to_sft_gain_points"] == pytest.approx(
        figures["all125_eto"] - figures["all125_sft"]
    )
    assert figures["webgum56_mean_to_eto_gain_points"] == pytest.approx(
        figures["webgum56_sft"] - figures["webgum56_eto"]
    )
    assert figures["mean_to_rounds_gain_points"] == pytest.approx(-before["gain_points"])
    text = miniwob.document([mean], figures)
    assert (
        "| `mean` | `rounds`, `eto` | how mean was made | 5 demonstrations a task, what mean saw |"
        in text
    )
    assert "tells: `eto`, `mean`." in text and "| sft | rounds | eto | mean |" in text
    assert "`of/eto` (eeeeeeee), training not counted" in text and "At temperature 1" not in text
    both = [mean, line("whole", 2, rng, SUITES["all"])]  # a seed without the first one's last agent
    more = miniwob.figures_of(both)
    assert {name: more[name] for name in last} == {name: figures[name] for name in last}
    assert more["seeds"] == 1
    text = miniwob.document(both, more)
    assert "| sft | rounds | eto | mean | meaning |" in text
    assert (
        miniwob.by_task(both) == miniwob.by_task([mean]) and miniwob.alike(both[::-1]) == both[::-1]
    )
    unseen = line("unseen-1", 1, rng, miniwob.split(SUITES["expert"], 1)[1])
    also = with_agent(
        unseen, "eto", unseen["agents"]["sft"], "rounds"
    )  # a round of verdicts is told there
    assert miniwob.figures_of([also]) == miniwob.figures_of([unseen])


@few
@given(st.integers(0, 2**32 - 1))
def test_success_at_temperature_1_is_told_beside_the_greedy_one_on_the_same_instances(seed):
    rng = random.Random(seed)
    whole = line("whole", 1, rng, SUITES["all"])
    sft = whole["agents"]["sft"]
    hot = {task: "".join(rng.choice("01") for _ in text[:4]) for task, text in sft.items()}
    sampled, other = whole | {"sampled": {"sft": {"solved": hot}}}, whole | {"seed": 2}
    figures = miniwob.figures_of([sampled, other])
    assert figures["all125_sampled_sft"] == pytest.approx(
        sum(text.count("1") for text in hot.values()) / 5
    )
    assert figures["all125_sampled_sft_greedy"] == pytest.approx(
        sum(text[:4].count("1") for text in sft.values()) / 5
    )
    assert figures["webgum56_sampled_sft_n"] == 224 and "all125_sampled_rounds" not in figures
    row = f"| sft | all | {figures['all125_sampled_sft']:.1f} ("
    assert row in miniwob.document([sampled, other], figures)
    most = {task: text[:15] for task, text in sft.items()}  # the others have ten instances
    many = miniwob.figures_of([whole | {"sampled": {"sft": {"solved": most}}}])
    assert many["webgum56_sampled_sft_n"] == 840 and many["all125_sampled_sft_n"] == 1250


def test_without_an_agent_those_that_began_with_it_are_gone_too():
    whole = line("whole", 1, random.Random(0), SUITES["all"])
    verdicts = whole["agents"]["sft"]
    played = with_agent(whole, "eto", verdicts, "rounds")
    played = with_agent(
        with_agent(played, "mean", verdicts, "rounds", "eto"), "other", verdicts, "sft"
    )
    played["sampled"] = {agent: {"solved": {}} for agent in played["agents"]}
    for gone, left in (
        ("other", ["sft", "rounds", "eto", "mean"]),
        ("eto", ["sft", "rounds", "other"]),
        ("mean", ["sft", "rounds", "eto", "other"]),
        ("rounds", ["sft", "other"]),
    ):
        less = miniwob.without(played, gone)
        assert [*less["agents"]] == left and less.keys() == played.keys()
        assert {*less["causes"]} == {*left} == {*less["sampled"]}
        assert {*less["made"]} == {*left} - {"sft", "rounds"} == {*less["weights"]}


def test_a_newer_sft_stands_beside_the_agents_before_it_until_its_rounds_are_played(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(miniwob, "LINES", tmp_path / "miniwob.jsonl")
    rng = random.Random(0)
    old, new, other = (line("whole", seed, rng, SUITES["all"]) for seed in (1, 1, 2))
    half = new | {"first": 25, "agents": {"sft": new["agents"]["sft"]}}
    for each in (old, other, half, half):  # written again, it stands there once
        miniwob.add_line(each)
    lines = miniwob.recorded()
    assert lines == [old, other, half] and miniwob.Part("whole", 1, tmp_path).recorded() == half
    figures, before = miniwob.figures_of(lines), miniwob.figures_of([old, other])
    assert before.items() <= figures.items() and before["seeds"] == 2
    ones = sum(new["agents"]["sft"][task].count("1") for task in SUITES["webgum-56"])
    assert figures["webgum56_sft_alone"] == pytest.approx(100 * ones / 1400)
    assert "**minidpo, sft alone**" in miniwob.document(lines, figures)
    miniwob.add_line(new)
    assert miniwob.recorded() == [other, new]
    assert "all125_sft_alone" not in miniwob.figures_of([other, new])


@pytest.mark.slow
def test_a_part_is_trained_played_and_written_down(tmp_path, monkeypatch):
    monkeypatch.setattr(miniwob, "INSTANCES", {"all": 2, "webgum-56": 2})
    tasks = [
        "click-button",
        "click-widget",
        "enter-text",
        "login-user",
        "focus-text",
        "click-test",
        "click-option",
        "choose-list",
    ]
    more = [
        "--model",
        "minidpo/nano",
        "--tasks",
        ",".join(tasks),
        "--rounds",
        "1",
        "--demonstrations",
        "1",
        "--instances",
        "2",
        "--episodes",
        "1",
        "--no-focus",
        "--sft.steps",
        "2",
        "--dpo.epochs",
        "0.1",
        "--machine.pages",
        "4",
        "--machine.dtype",
        "float32",
    ]
    part = miniwob.Part("unseen-2", 1, tmp_path, more)
    first, found = part.run()
    assert first["agents"] == {"sft": found["agents"]["sft"]} and "validation" not in first
    train, unseen = miniwob.split(tasks, 2)
    played = read(tmp_path / "unseen-2-1" / "held-out" / "sft.jsonl")
    assert min(e.seed for e in played) == 4_000_000 + first["first"] == 4_000_025
    assert list(found["trained_on"]) == train and set(found["agents"]["sft"]) == set(unseen)
    assert {len(text) for agent in found["agents"].values() for text in agent.values()} == {2}
    assert first["causes"]["sft"] == found["causes"]["sft"] and {*found["causes"]} == {
        "sft",
        "rounds",
    }
    for name, verdicts in found["agents"].items():
        assert sum(found["causes"][name].values()) == "".join(verdicts.values()).count("0")
    assert miniwob.figures_of([json.loads(json.dumps(found))])["unseen_tasks"] == len(unseen)
    monkeypatch.setattr(miniwob, "LINES", tmp_path / "miniwob.jsonl")
    adapter, how = part.config.out / "adapter", {"how": "ETO", "learned": "verdicts"}
    with pytest.raises(
        SystemExit, match="`sft` has not played in unseen-2, seed 1: .* of: none yet"
    ):
        part.judge("eto", adapter, {"after": ["sft"], **how})
    miniwob.add_line(first)
    assert not part.done()
    with pytest.raises(SystemExit, match="`rounds` has not played .* --after takes some of: sft"):
        part.judge("eto", adapter, {"after": ["rounds"], **how})
    miniwob.add_line(found)
    assert part.done() and len(miniwob.recorded()) == 1
    assert not miniwob.Part(
        "unseen-2", 1, tmp_path, [*more, "--dpo.beta", "0.5"]
    ).done()  # another recipe
    shown = part.judge(
        "eto", adapter, {"after": ["rounds"], **how}
    )  # the same adapter and instances
    assert shown["agents"] == found["agents"] | {"eto": found["agents"]["rounds"]}
    assert (
        shown["validation"] == found["validation"]
        and shown["causes"]["eto"] == found["causes"]["rounds"]
    )
    assert shown["weights"]["eto"] == shown["weights"]["rounds"] != shown["weights"]["sft"]
    miniwob.add_line(shown)
    assert part.done()  # its own agents are what they were
    mean = part.judge("mean", adapter, {"after": ["rounds", "eto"], **how})
    miniwob.add_line(mean)
    assert [*miniwob.recorded()[-1]["agents"]] == ["sft", "rounds", "eto", "mean"]
    miniwob.add_line(part.sample("rounds", adapter, 1))
    sampled = miniwob.recorded()[-1]["sampled"]
    assert {len(text) for text in sampled["rounds"]["solved"].values()} == {1} == {len(sampled)}
    hot = [
        e
        for path in (tmp_path / "unseen-2-1" / "held-out").glob("rounds-*-sampled.jsonl")
        for e in read(path)
    ]
    assert {e.sampling["temperature"] for e in hot} == {1.0} and {e.task for e in hot} == set(
        unseen
    )
    for agent in ("rounds", "mean", "nobody"):
        with pytest.raises(
            SystemExit, match=f"is not known to be the agent `{agent}` of unseen-2, seed 1"
        ):
            part.sample(agent, part.config.out / "sft" / "adapter", 1)
    again = part.judge("eto", adapter, {"after": ["rounds"], **how})  # `mean` was of the one before
    assert again["sampled"] == sampled and again.keys() == {*shown, "sampled"}
    assert all(
        again[key].keys() == shown[key].keys() for key in ("agents", "made", "causes", "seconds")
    )
    alone = part.judge("sft", part.config.out / "sft" / "adapter", {"after": []})
    assert alone["agents"] == first["agents"] and {*alone["seconds"]} == {"held-out sft"}
    assert re.search(
        r"sft/adapter` \([0-9a-f]{8}\), training not counted \|", miniwob.cost([alone])
    )
