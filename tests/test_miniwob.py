"""`benchmarks/miniwob.py`: splits without siblings, figures of recorded verdicts, one small part played."""
import json
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import miniwob
from envs.miniwob.experts.by_task import EXPERTS
from envs.miniwob.tasks import SUITES
from minidpo.data.episodes import read


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


def test_siblings_are_tasks_and_too_few_families_are_refused():
    assert {*miniwob.SIBLINGS, *miniwob.SIBLINGS.values()} <= set(SUITES["all"])
    with pytest.raises(ValueError, match="3 families of tasks make no 4 shares"):
        miniwob.split(["click-tab", "click-tab-2", "click-link", "enter-text"], 1)


def test_a_task_that_the_browser_gave_up_is_played_again():
    with pytest.raises(ValueError, match="gave up an episode of click-tab: run it again"):
        miniwob.verdicts([], {"click-tab": 2})


def line(part, seed, rng, tasks):
    counts = {task: 25 if task in SUITES["webgum-56"] else 10 for task in tasks}
    agents = {name: {task: "".join(rng.choice("01") for _ in range(count)) for task, count in counts.items()}
              for name in ("sft", "trained")}
    causes = {name: {"wrong text": rng.randrange(1, 9), "too long": rng.randrange(9)} for name in agents}
    return {"part": part, "seed": seed, "agents": agents, "causes": causes,
            "trained_on": list(SUITES["expert"]), "cores": 2,
            "validation": [0.5, 0.75], "kept_round": 1, "seconds": {"sft": 3600.0},
            "recipe": [440, 2, "48 steps of DPO at 0.0001"], "machine": "Linux, a processor, 2 CPU cores",
            "versions": {"torch": "0"}}


@given(st.integers(0, 2**32 - 1))
def test_figures_count_what_the_verdicts_say(seed):
    rng = random.Random(seed)
    whole = line("whole", 1, rng, SUITES["all"])
    unseen = [line(f"unseen-{k}", 1, rng, miniwob.split(SUITES["expert"], k)[1]) for k in (1, 2)]
    figures = miniwob.figures_of([whole, *unseen])
    sft, trained = whole["agents"].values()
    ones = sum(text[:10].count("1") for text in sft.values())
    assert figures["all125_sft"] == pytest.approx(100 * ones / 1250)
    assert figures["webgum56_trained"] == pytest.approx(
        100 * sum(trained[task].count("1") for task in SUITES["webgum-56"]) / 1400)
    assert figures["gain_points"] == pytest.approx(figures["all125_trained"] - figures["all125_sft"])
    gain = figures["webgum56_trained"] - figures["webgum56_sft"]
    assert figures["webgum56_gain_points"] == pytest.approx(gain)
    assert 0 < figures["webgum56_p_value"] <= 1 and figures["seeds"] == 1 and figures["unseen_parts"] == 2
    assert figures["unseen_tasks"] == sum(len(each["agents"]["sft"]) for each in unseen)
    held_out = [task for each in unseen for task in each["agents"]["sft"]]
    assert figures["unseen_families"] == len(miniwob.families(sorted(held_out)))
    assert figures["unseen_gain_low"] < figures["unseen_gain_points"] < figures["unseen_gain_high"]
    half = whole | {"agents": {"sft": sft}}  # SFT has played, the rounds have not
    assert miniwob.figures_of([half])["all125_sft"] == figures["all125_sft"]
    assert not {"gain_points", "all125_trained"} & miniwob.figures_of([half]).keys()
    assert "**minidpo, trained**" not in miniwob.document([half], miniwob.figures_of([half]))
    text = miniwob.document([whole, *unseen], figures)
    assert "| wrong text | {sft} | {trained} | it typed".format(
        **{name: counts["wrong text"] for name, counts in whole["causes"].items()}) in text
    assert f"{figures['webgum56_trained']:.1f} (" in text and "| drag-cube |  |" in text
    assert max(map(len, text.splitlines())) < 250
    assert "played by earlier agents: whole, seed 1; unseen-1, seed 1; unseen-2, seed 1." in text
    assert "earlier agents" not in miniwob.document([whole | {"first": 25}], figures)
    assert "eto" not in text.lower()
    eto = {task: "".join(rng.choice("011") for _ in text) for task, text in sft.items()}
    shown = whole | {"agents": whole["agents"] | {"eto": eto}, "causes": whole["causes"] | {"eto": {}},
                     "eto": {"golden": 476, "adapter": "a", "sha256": 64 * "b"}}
    more = miniwob.figures_of([shown, *unseen])
    assert figures.items() <= more.items()
    assert more["all125_eto"] == pytest.approx(sum(text[:10].count("1") for text in eto.values()) / 12.5)
    assert more["eto_gain_points"] == pytest.approx(more["all125_eto"] - more["all125_sft"])
    assert more["webgum56_eto_alone_gain_points"] == pytest.approx(
        more["webgum56_eto"] - more["webgum56_trained"])
    text = miniwob.document([shown], more)
    assert "a task, verdicts | all |" in text and "verdicts, 476 golden episodes" in text
    assert "| sft | trained | eto |" in text
    assert "verdicts, 1,800 golden episodes" in miniwob.document([shown | {"golden": 1800}], more)
    assert f"Both add {more['eto_gain_points']:+.1f} points to SFT" in text and "`a` (bbbbbbbb)" in text
    assert "| eto |" not in miniwob.document([shown, whole | {"seed": 2}], more)
    third = shown | {"agents": shown["agents"] | {"averaged": sft},
                     "causes": shown["causes"] | {"averaged": {}},
                     "averaged": {"adapter": "c", "sha256": 64 * "d"}}
    also = miniwob.figures_of([third])
    assert also["all125_averaged"] == also["all125_sft"] and also["averaged_gain_points"] == 0
    assert also["averaged_to_trained_gain_points"] == pytest.approx(-also["gain_points"])
    assert also["webgum56_averaged_to_eto_gain_points"] == pytest.approx(-also["webgum56_eto_gain_points"])
    text = miniwob.document([third], also)
    assert "| eto | averaged |" in text and "It adds +0.0 points to SFT" in text
    assert "At temperature 1" not in text
    fourth = third | {"agents": third["agents"] | {"second": eto}, "causes": third["causes"] | {"second": {}},
                      "second": {"golden": 700, "adapter": "e", "sha256": 64 * "f"}}
    last = miniwob.figures_of([fourth])
    assert last["second_gain_points"] == last["second_to_averaged_gain_points"] == more["eto_gain_points"]
    text = miniwob.document([fourth], last)
    assert "verdicts, 476 golden episodes over failures; mean" in text and "verdicts, 700 golden" in text
    fifth = fourth | {"agents": fourth["agents"] | {"third": trained}, "third": {
        "golden": 900, "adapter": "g", "sha256": 64 * "0"}, "causes": fourth["causes"] | {"third": {}}}
    last = miniwob.figures_of([fifth])
    assert last["third_gain_points"] == figures["gain_points"]
    assert last["third_to_second_gain_points"] == pytest.approx(-more["eto_alone_gain_points"])
    text = miniwob.document([fifth], last)
    assert "verdicts, 900 golden episodes over failures in three rounds, each" in text
    hot = {task: "".join(rng.choice("01") for _ in text[:4]) for task, text in sft.items()}
    also = miniwob.figures_of([third | {"sampled": {"averaged": {"solved": hot}}}, whole | {"seed": 2}])
    assert also["all125_sampled_averaged"] == pytest.approx(sum(text.count("1") for text in hot.values()) / 5)
    assert also["all125_sampled_averaged_greedy"] == pytest.approx(
        sum(text[:4].count("1") for text in sft.values()) / 5)
    assert also["webgum56_sampled_averaged_n"] == 224 and "all125_sampled_sft" not in also
    most = {task: text[:15] for task, text in sft.items()}  # the others have ten instances
    many = miniwob.figures_of([third | {"sampled": {"averaged": {"solved": most}}}])
    assert many["webgum56_sampled_averaged_n"] == 840 and many["all125_sampled_averaged_n"] == 1250
    row = f"| averaged | all | {also['all125_sampled_averaged']:.1f} ("
    assert row in miniwob.document([third, whole | {"seed": 2}], also)


def test_a_newer_sft_stands_beside_the_agents_before_it_until_its_rounds_are_played(tmp_path, monkeypatch):
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
    tasks = ["click-button", "click-widget", "enter-text", "login-user", "focus-text", "click-test",
             "click-option", "choose-list"]
    more = ["--model", "minidpo/nano", "--tasks", ",".join(tasks), "--rounds", "1", "--demonstrations", "1",
            "--instances", "2", "--episodes", "1", "--no-focus", "--sft.steps", "2", "--dpo.epochs", "0.1",
            "--machine.pages", "4", "--machine.dtype", "float32"]
    part = miniwob.Part("unseen-2", 1, tmp_path, more)
    first, found = part.run()
    assert first["agents"] == {"sft": found["agents"]["sft"]} and "validation" not in first
    train, unseen = miniwob.split(tasks, 2)
    played = read(tmp_path / "unseen-2-1" / "held-out" / "sft.jsonl")
    assert min(e.seed for e in played) == 4_000_000 + first["first"] == 4_000_025
    assert list(found["trained_on"]) == train and set(found["agents"]["sft"]) == set(unseen)
    assert {len(text) for agent in found["agents"].values() for text in agent.values()} == {2}
    assert first["causes"]["sft"] == found["causes"]["sft"] and {*found["causes"]} == {"sft", "trained"}
    for name, verdicts in found["agents"].items():
        assert sum(found["causes"][name].values()) == "".join(verdicts.values()).count("0")
    assert miniwob.figures_of([json.loads(json.dumps(found))])["unseen_tasks"] == len(unseen)
    monkeypatch.setattr(miniwob, "LINES", tmp_path / "miniwob.jsonl")
    with pytest.raises(SystemExit, match="no line of unseen-2, seed 1"):
        part.judge({"trained": part.config.out / "adapter"})
    miniwob.add_line(first)
    assert not part.done()
    with pytest.raises(SystemExit, match="--eto is made of one .* name it with --trained"):
        part.judge({"eto": part.config.out / "adapter"}, golden=3)
    miniwob.add_line(found)
    judged = part.judge({"trained": part.config.out / "adapter"})  # the same adapter, on the same instances
    assert {*judged["seconds"]} == {"demonstrations", "sft", "held-out sft", "held-out trained"}
    miniwob.add_line(first)
    assert judged["agents"] == found["agents"] and judged["causes"] == found["causes"]
    both = part.judge({"sft": part.config.out / "sft" / "adapter", "trained": part.config.out / "adapter"})
    assert both["agents"] == found["agents"] and {*both["seconds"]} == {"held-out sft", "held-out trained"}
    assert re.search(r"sft/adapter` \([0-9a-f]{8}\), training not counted, then `",
                     miniwob.cost([both]))
    miniwob.add_line(judged)
    assert not part.done()  # its loop has not run
    miniwob.add_line(found)
    assert part.done() and len(miniwob.recorded()) == 1
    assert not miniwob.Part("unseen-2", 1, tmp_path, [*more, "--dpo.beta", "0.5"]).done()  # another recipe
    shown = part.judge({"eto": part.config.out / "adapter"}, golden=3)  # it stands beside those of its part
    assert shown["agents"] == found["agents"] | {"eto": found["agents"]["trained"]}
    assert shown["validation"] == found["validation"] and shown["eto"]["golden"] == 3
    with pytest.raises(SystemExit, match="--averaged is made of one .* name it with --eto"):
        part.judge({"averaged": part.config.out / "adapter"})
    miniwob.add_line(shown)
    miniwob.add_line(part.judge({"averaged": part.config.out / "adapter"}))
    assert {*miniwob.recorded()[-1]["agents"]} == {"sft", "trained", "eto", "averaged"}
    with pytest.raises(SystemExit, match="--averaged is made of one .* name it with --eto"):
        part.judge({agent: part.config.out / "adapter" for agent in ("trained", "averaged")})
    miniwob.add_line(part.sample({"trained": part.config.out / "adapter"}, 1))
    sampled = miniwob.recorded()[-1]["sampled"]
    assert {len(text) for text in sampled["trained"]["solved"].values()} == {1} == {len(sampled)}
    hot = [e for path in (tmp_path / "unseen-2-1" / "held-out").glob("trained-*-sampled.jsonl")
           for e in read(path)]
    assert {e.sampling["temperature"] for e in hot} == {1.0} and {e.task for e in hot} == set(unseen)
    for agent in ("trained", "averaged"):
        with pytest.raises(SystemExit, match=f"is not known to be the agent `{agent}` of unseen-2, seed 1"):
            part.sample({agent: part.config.out / "sft" / "adapter"}, 1)
    again = part.judge({"eto": part.config.out / "adapter"}, golden=3)  # `averaged` was of the one before
    assert again["sampled"] == sampled
    assert again.keys() == {*shown, "sampled"} and all(again[key].keys() == shown[key].keys()
                                                for key in ("agents", "causes", "seconds"))
    again = part.judge({"trained": part.config.out / "adapter"})  # `eto` did not begin with this one
    assert not again.pop("sampled") and again.keys() == judged.keys()
    assert all(again[key] == judged[key] for key in ("agents", "causes"))
