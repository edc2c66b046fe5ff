"""The study's document: numbers worked out by hand, what is missing, and the document that is recorded."""

import functools
import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
from minidpo.config import DPO, EvaluateCommand, LoopCommand

from benchmarks.study import document, grid, preface, rates, rows, run
from envs.miniwob.tasks import resolve
from minidpo.learning.preferences import pair_loss_of
from minidpo.system.command_line import parse

ROOT = Path(__file__).parents[1]

DERIVED = {"sft": "dpo", "sft-best": "dpo", **{f"sft-{arm}": arm for arm in grid.ALONE}}


@functools.cache
def settings(arm):
    flags = [part.replace("configs/", f"{ROOT}/configs/") for part in run.flags(arm, 1)]
    config = parse(LoopCommand, flags, "run.py", "")
    return json.loads(json.dumps(asdict(config), default=str))


def played(solved, steps=2):
    episodes = sum(map(len, solved.values()))
    return {"solved": solved, "turns": steps * episodes, "usable": episodes}


def line(arm, seed, button, link, unseen="0000", validation=()):
    """As run.py writes it, of two tasks and one never trained on."""
    home = DERIVED.get(arm, arm)
    command = " ".join(["train.py loop", *run.flags(home, seed)])
    if arm.endswith("-best"):
        command = "evaluate.py --best-of 4"
    found = {
        "arm": arm,
        "seed": seed,
        "date": "2026-11-22",
        "threads": 1,
        "machine": "x86_64, 2 CPU cores",
        "versions": {"torch": "2.13"},
        "command": command,
        "demo": played({"click-button": button, "click-link": link}),
    }
    if not arm.endswith("-best"):
        found["unseen"] = played({"click-tab": unseen})
    if arm in grid.GRID:
        flat = [0.5] * (1 + settings(arm)["rounds"]) if "--rounds" in command else []
        found |= {
            "config": settings(arm),
            "validation": list(validation) or flat,
            "kept_round": 1,
            "seconds": {},
        }
    return found


TWO_SEEDS = [
    line("sft", 1, "1000", "0000"),
    line("dpo", 1, "1111", "1110", "0010"),
    line("dpo", 2, "1111", "1111", "0010"),
    line("sft", 2, "1100", "0000"),
]


def row(text, arm, number=0):
    """The cells of a row's `number`-th appearance in a table."""
    table = [part for part in text.splitlines() if part.startswith(f"| `{arm}`")]
    return [cell.strip() for cell in table[number].strip("|").split("|")]


def sentences(text):
    """The document without line breaks, so that a sentence can be found."""
    return " ".join(text.split())


def test_two_seeds_worked_out_by_hand():
    """DPO solves 7 and 8 of 8: mean 15/16, s = 1/(8√2), so t·s/√2 = 12.706/16 = 79.4 points, cut at 100.

    SFT solves 1 and 2, all of which DPO solves too: 12 of 16 gained, p = 2/2^12. Never trained on: 2 of 8
    gained, p = 2/2^2. Demonstrations: 5 a task; explored: 10 instances x 8 episodes.
    """
    text = document.document(TWO_SEEDS)
    assert row(text, "dpo") == [
        "`dpo`",
        "2",
        "5",
        "64",
        "93.8 (14.3 - 100.0)",
        "100.0 (100.0 - 100.0)",
        "25.0 (25.0 - 25.0)",
        "2.00",
        "50.0",
        "+75.0, p = 0.00049",
        "-",
        "+25.0, p = 0.5",
    ]
    assert row(text, "sft")[:5] == ["`sft`", "2", "5", "0", "18.8 (0.0 - 98.2)"]
    assert row(text, "sft")[9:] == ["-", "-75.0, p = 0.00049", "-"]
    said = sentences(text)
    assert (
        "Better than `sft` on the demo suite: `dpo` (+75.0, p = 0.00049, n = 16, up 2/2, seeds +75.0 to "
        "+75.0)."
    ) in said
    assert (
        "No difference from `sft` is shown on tasks never trained on: `dpo` (+25.0, "
        "p = 0.5, n = 8, up 2/2, seeds +25.0 to +25.0)."
    ) in said
    figures = rates.figures(TWO_SEEDS)
    assert figures == pytest.approx(
        {
            "dpo_demo_mean": 15 / 16,
            "dpo_demo_low": 15 / 16 - 12.706 / 16,
            "dpo_demo_high": 1,
            "dpo_seeds": 2,
            "dpo_unseen_mean": 0.25,
            "dpo_vs_sft_points": 75,
            "dpo_vs_sft_p": 2**-11,
            "sft_demo_mean": 3 / 16,
            "sft_demo_low": 0,
            "sft_demo_high": 3 / 16 + 12.706 / 16,
            "sft_seeds": 2,
            "sft_unseen_mean": 0,
        }
    )


def test_the_interval_of_three_seeds_is_students():
    """0.5, 0.6, 0.7: s = 0.1."""
    assert rates.share([0.7, 0.9, 1.0]).high == 1.0 < rates.spread([0.7, 0.9, 1.0]).high
    assert rates.share([]) is None and rates.share([0.5]).low is None
    found = rates.spread([0.5, 0.6, 0.7])
    assert found == pytest.approx((0.6, 0.6 - 0.4303 / 3**0.5, 0.6 + 0.4303 / 3**0.5, 3))


def test_one_seed_has_no_interval_and_the_document_says_that_it_is_one():
    text = document.document(TWO_SEEDS[:2])
    assert row(text, "dpo")[4] == "87.5" and "dpo_demo_low" not in rates.figures(TWO_SEEDS[:2])
    assert "Fewer than three seeds: `sft` (1), `dpo` (1)." in text


def test_what_was_not_run_is_said_to_be_missing_in_every_place():
    text = document.document(TWO_SEEDS)
    first = sentences(text).split("Not run: ")[1].split(". ")[0]
    absent = set(DERIVED) | set(grid.GRID)
    assert {name.strip("`") for name in first.split(", ")} == absent - {"sft", "dpo"}
    for arm in absent - {"sft", "dpo"}:
        table = [part for part in text.splitlines() if part.startswith(f"| `{arm}`")]
        assert table and all(
            "| not run |" in part and not any(c.isdigit() for c in part.split("not run")[1])
            for part in table
        ), arm
    assert "`rounds` was not run, so nothing is compared with it on the demo suite" in sentences(
        text
    )
    assert "- `rounds-rft` was not run." in text
    assert "`focus` is not compared with `rounds`" in sentences(text)
    assert (
        "Not compared with `dpo` on the demo suite, for want of a seed that both have: `no-nll`."
        in sentences(text)
    )


def test_a_seed_that_only_one_of_two_has_is_not_compared():
    """KTO's seed 3 has no SFT; with DPO it shares none."""
    lines = [*TWO_SEEDS, line("kto", 3, "1111", "1111")]
    assert row(document.document(lines), "kto")[9:] == ["-", "-", "-"]
    lines.append(line("kto", 2, "1111", "1011"))  # of SFT's seed 2 it gains 5, of DPO's it loses 1
    assert row(document.document(lines), "kto")[9:] == [
        "+62.5, p = 0.062",
        "-12.5, p = 1",
        "+0.0, p = 1",
    ]


@pytest.mark.parametrize(
    "before, after, word",
    [
        ("0" * 8, "1" * 7 + "0", "No difference from `sft` is shown on the demo suite: `dpo`"),
        ("0" * 8, "1" * 8, "Better than `sft` on the demo suite: `dpo`"),
        ("1" * 8, "0" * 8, "Worse than `sft` on the demo suite: `dpo`"),
    ],
)
def test_the_words_of_a_verdict_follow_its_p_value(before, after, word):
    """Seven gained and none lost is p = 2/2^7 = 0.016, eight p = 0.0078."""
    text = sentences(document.document([line("sft", 1, before, ""), line("dpo", 1, after, "")]))
    assert word in text
    words = ("Better than `sft`", "Worse than `sft`", "No difference from `sft` is shown")
    assert sum(f"{start} on the demo suite" in text for start in words) == 1


def test_the_best_recipe_has_at_most_five_golden_episodes_and_no_oracle():
    """Expert pairs show eight more golden episodes a task, demos-20 has twenty; eight gained: p = 0.0078."""
    lines = [
        line("sft", 1, "0000", "0000", "0" * 8),
        line("dpo", 1, "1111", "1110", "1" * 8),
        *(line(arm, 1, "1111", "1111", "1" * 8) for arm in ("expert", "demos-20", "sft-best")),
    ]
    text = sentences(document.document(lines))
    assert (
        "is `dpo`: 87.5 % on the demo suite, 1 seed. Its mean is below 90 %, of one seed, which has no "
        "interval. It beats `sft`"
    ) in text
    assert row(document.document(lines), "expert")[2] == "13"
    assert "from 2 such rows" in text
    text = sentences(document.document([*lines, line("demos-1", 1, "1111", "1111", "0" * 8)]))
    assert "is `demos-1`: 100.0 % on the demo suite" in text and "Its mean is at least 90 %" in text
    assert "cannot be compared with `sft-demos-1` on tasks never trained on" in text
    worse = [line("sft", 1, "0000", "0000"), line("dpo", 1, "1111", "1110", "0110")]
    text = sentences(document.document(worse))
    assert "does not beat `sft` on tasks never trained on (+50.0, p = 0.5, n = 4, up 1/1)" in text


@pytest.mark.parametrize(
    "shares, verdict",
    [
        ((0.95, 0.95, 0.95), "at least 90 %, and so is its whole interval"),
        ((0.85, 0.95, 0.96), "at least 90 %, but its 95 % interval includes values below that"),
        ((0.8, 0.9, 0.95), "below 90 %, but its 95 % interval includes values above that"),
        ((0.5, 0.5, 0.5), "below 90 %, and so is its whole interval"),
    ],
)
def test_a_mean_above_ninety_is_not_an_interval_above_it(shares, verdict):
    assert preface.against(0.9, rates.spread(list(shares))) == f"Its mean is {verdict}"


def test_seeds_that_point_both_ways_are_no_verdict_whatever_the_p():
    """SFT solves nothing. Step-wise pairs win 8 of 8 with two seeds and none with the third: p = 2/2^16.

    Gains 100, 100, 0: mean 66.7, s = 57.7, so ± 4.303 · 57.7 / √3 = 143.4. RFT wins 4 of 8 with each seed.
    """
    lines = [line("sft", seed, "0000", "0000") for seed in (1, 2, 3)]
    lines += [
        line("stepwise", seed, won, won) for seed, won in ((1, "1111"), (2, "1111"), (3, "0000"))
    ]
    lines += [line("rft", seed, "1100", "1100") for seed in (1, 2, 3)]
    text = sentences(document.document(lines))
    assert (
        "p < 0.01 against `sft` on the demo suite, but 0 lies in the seeds' interval: `stepwise` (+66.7, "
        "p = 3.1e-05, n = 24, up 2/3, seeds -76.8 to +210.1)."
    ) in text
    assert (
        "Better than `sft` on the demo suite: `rft` (+50.0, p = 0.00049, n = 24, up 3/3, seeds +50.0 to "
        "+50.0)."
    ) in text
    assert "This document holds 4 verdicts by p (0 against `dpo`)" in text
    assert (
        "0.0 points apart in the median, 100.0 at most (`stepwise`). So expect false verdicts well above "
        "1 in 100."
    ) in text


def test_with_one_seed_nothing_is_said_of_rounds():
    lines = [
        line("rounds", 1, "1", "1", validation=(0.4, 0.7, 0.8, 0.7, 0.6, 0.5)),
        line("focus", 1, "1", "1", validation=(0.4, 0.7, 0.75, 0.8)),
    ]
    text = sentences(document.document(lines))
    assert (
        "`rounds`: one seed, so nothing can be said of rounds 1 and 5 (-20.0 points on 1 seed)."
        in text
    )
    assert "`focus`: one seed, so nothing can be said (+10.0 points on 1 seed)." in text
    assert (
        "each explores 768 episodes more (8 instances of each of 12 tasks, 8 episodes each)" in text
    )


def test_rows_that_differ_in_more_than_their_name_says_are_named():
    text = sentences(document.document(full()))
    assert (
        "behind the first token that differs, the rejected alone in `dpo` and all other rows"
        in text
    )
    assert (
        "behind the first turn that differs, both sides: `simpo`, `orpo`, `kto`. So these rows"
        in text
    )
    assert (
        "- Pairs of `dmpo-0.5`, `dmpo-0.9` are cut nowhere, those of `beta-0.3` behind the first token "
        "that differs, the rejected alone: so they differ in that, too."
    ) in text
    assert (
        "SFT has a learning rate of 0.0002 in `selfplay` and `sft-selfplay`, of 2e-05 in `dpo` and `sft`"
        in text
    )
    assert "At a learning rate of 2e-05 SFT moves the base little" in text
    assert "the base was made from 680 scripted ones of each demo task" in text
    assert preface.siblings(grid.UNSEEN.split(",")) == [
        "click-dialog",
        "click-tab",
        "click-tab-2-easy",
        "click-collapsible",
        "unicode-test",
    ]


def test_the_command_of_the_unseen_column_is_the_evaluation_that_the_study_plays(monkeypatch):
    found = line("dpo", 1, "1111", "1111")
    found["unseen"] = played(dict.fromkeys(grid.UNSEEN.split(","), "0" * 10))
    text = document.document([found])
    command = text.split("```\n")[1].replace("\\\n", " ").split()
    assert command[:2] == ["python", "evaluate.py"]
    by_hand = parse(EvaluateCommand, command[2:], "evaluate.py", "")
    name, _, adapter = by_hand.adapters[0].partition("=")
    calls = []

    def play(*call):
        calls.append(call)
        return [
            SimpleNamespace(task=task, solved=False, turns=[])
            for task in resolve(call[0].tasks)
            for _ in range(call[0].episodes)
        ]

    monkeypatch.setattr(run, "play_held_out", play)
    monkeypatch.chdir(ROOT)
    run.evaluate_policy(parse(LoopCommand, run.flags("dpo", 1), "run.py", ""), Path(adapter), name)
    assert calls[1] == (replace(by_hand, adapters=()), name, Path(adapter))
    assert row(text.split("## 12. Commands")[1], "dpo")[2] == f"`{adapter}`"


def test_a_task_of_which_the_browser_gave_up_all_or_one_is_named():
    played = [tiny.episode(seed=seed) for seed in (1, 2)]
    assert run.outcome(played, ["click-button"], 2)["solved"] == {"click-button": "11"}
    for tasks, instances in ((["click-button", "click-link"], 2), (["click-button"], 3)):
        with pytest.raises(ValueError, match=f"gave up an episode of {tasks[-1]}: run it again"):
            run.outcome(played, tasks, instances)


def test_a_row_made_anew_has_a_folder_of_its_own_and_goes_on_only_when_asked(tmp_path):
    first, second = run.folder_of_call(False, tmp_path), run.folder_of_call(False, tmp_path)
    assert (first, second) == (tmp_path / "1", tmp_path / "2") and second.is_dir()
    assert run.folder_of_call(True, tmp_path) == second
    (second / "done").touch()
    with pytest.raises(ValueError, match="waits to go on: leave out --resume"):
        run.folder_of_call(True, tmp_path)
    assert run.folder_of_call(False, tmp_path) == tmp_path / "3"


def test_a_row_in_an_empty_folder_begins_with_a_dpo_made_for_its_seed(tmp_path, monkeypatch):
    """A fresh clone holds results/study.jsonl, but no run that the missing rows could begin with."""
    made = []

    def loop(config):
        made.append(str(config.out.relative_to(tmp_path)))
        config.out.mkdir(parents=True)
        (config.out / "result.json").write_text("{}")
        return {"kept_round": 1, "validation": [], "seconds": {}}

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(run, "loop", loop)
    monkeypatch.setattr(run, "evaluate_policy", lambda *call, **changes: {})
    for arm, seed in (("kto", 1), ("rft", 1), ("demos-1", 1), ("rft", 2)):
        assert run.run(arm, seed, tmp_path)[0]["arm"] == arm
    assert made == [
        "seed-1/dpo",
        "seed-1/kto",
        "seed-1/rft",
        "seed-1/demos-1",
        "seed-2/dpo",
        "seed-2/rft",
    ]


def test_a_row_made_anew_is_told_beside_its_interval_and_instance_by_instance():
    """DPO's two seeds: mean 15/16 ± 12.706/16, cut at 100 (above); again 3 of 8, of 7: four lost."""
    recorded = rates.studied([*TWO_SEEDS, line("kto", 1, "0000", "0000")])
    assert rows.made_anew(recorded, line("dpo", 1, "1110", "0000", "0010")) == [
        "dpo, seed 1, the demo suite: 37.5 % again, 87.5 % recorded; of 8 instances 0 won and 4 lost, "
        "p = 0.12; inside the row's 95 % interval over 2 seeds, 14.3 - 100.0",
        "dpo, seed 1, tasks never trained on: 25.0 % again, 25.0 % recorded; of 4 instances 0 won and 0 "
        "lost, p = 1; inside the row's 95 % interval over 2 seeds, 25.0 - 25.0",
    ]
    said = rows.made_anew(recorded, line("kto", 1, "1000", "0000"))[0]
    assert said.endswith("1 won and 0 lost, p = 1; recorded with one seed, so there is no interval")
    assert "outside" in rows.made_anew(recorded, line("dpo", 2, "1000", "0000"))[0]
    assert (
        rows.made_anew(recorded, line("dpo", 3, "1111", "1111"))[0].split(";")[0]
        == "dpo, seed 3, the demo suite: 100.0 % again, nothing recorded with this seed"
    )


def test_the_rounds_are_told_by_validation():
    """From round 1 to 5 down by 20 points in both seeds, so surely; focus is up by 10 and 12 at round 3.

    10 and 12: mean 11, s/√2 = 1, so ± 12.7: nothing that two seeds can show.
    """
    lines = [
        line("rounds", seed, "1", "1", validation=(0.4, 0.7, 0.8, 0.7, 0.6, 0.5)) for seed in (1, 2)
    ]
    lines += [
        line("focus", seed, "1", "1", validation=(0.4, 0.7, 0.75, rate))
        for seed, rate in ((1, 0.8), (2, 0.82))
    ]
    text = document.document(lines)
    assert row(text, "rounds", number=1)[2:5] == [
        "40.0 (40.0 - 40.0)",
        "70.0 (70.0 - 70.0)",
        "80.0 (80.0 - 80.0)",
    ]
    told = (
        "`rounds`: round 5 is worse than round 1 (-20.0 points on 2 seeds, 95 % interval -20.0 to -20.0)."
        " Validation fell in 6 of 8 steps from a round to the next; its mean is highest after round 2."
    )
    assert told in sentences(text)
    told = (
        "`focus`: no difference from `rounds` that these seeds can show (+11.0 points on 2 seeds, 95 % "
        "interval -1.7 to +23.7)."
    )
    assert told in sentences(text)


def full():
    kinds = [(arm, seed) for arm in (*DERIVED, *grid.GRID) for seed in (1, 2, 3)]
    return [
        line(arm, seed, f"{n % 16:04b}", f"{n * 7 % 16:04b}", f"{n * 5 % 16:04b}")
        for n, (arm, seed) in enumerate(kinds)
    ]


def test_a_full_study_names_every_row_in_a_table_and_in_the_commands():
    text = document.document(full())
    assert "not run" not in text.lower() and "Fewer than three seeds" not in text
    assert "None" not in text.replace("--dpo.beta None", "")
    tables, commands = text.split("## 12. Commands")
    for arm in (*DERIVED, *grid.GRID):
        assert row(tables, arm)[1] == "3" and "nan" not in row(tables, arm), arm
        script = (
            "evaluate.py" if arm.endswith("-best") else "train.py loop --config configs/study.toml"
        )
        assert row(commands, arm)[1].startswith(f"`python {script} "), arm
    explored = {
        "sft": "0",
        "dpo": "64",
        "rounds": "320",
        "group-16": "128",
        "selfplay": "128",
        "sft-selfplay": "64",
    }
    assert {arm: row(tables, arm)[3] for arm in explored} == explored
    assert [
        part for part in text.splitlines() if len(part) > 120 and not part.startswith("|")
    ] == []


def test_every_part_of_the_study_leaves_a_document_when_it_is_cut_short():
    lines = full()
    for n in range(0, len(lines), 7):
        assert document.document(lines[n:]) != document.document(lines[:n])


def test_a_run_that_is_there_twice_and_other_instances_are_refused():
    with pytest.raises(ValueError, match="dpo, seed 1, was recorded twice"):
        document.document([*TWO_SEEDS, TWO_SEEDS[1]])
    with pytest.raises(
        ValueError, match="sft and kto, seed 1, were evaluated on different instances"
    ):
        document.document([*TWO_SEEDS, line("kto", 1, "111", "11111")])


def test_what_is_written_is_the_document_and_its_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(document, "DOCUMENT", tmp_path / "results.md")
    monkeypatch.setattr(document, "RESULTS", tmp_path)
    document.write_document(TWO_SEEDS)
    assert (tmp_path / "results.md").read_text() == document.document(TWO_SEEDS)
    written = json.loads((tmp_path / "study.json").read_text())
    assert written["figures"]["dpo_demo_mean"] == 0.9375 and written["versions"] == {
        "torch": "2.13"
    }
    with pytest.raises(ValueError, match="nothing was run yet"):
        document.write_document([])


@pytest.mark.parametrize("arm", grid.GRID)
def test_every_row_of_the_grid_is_a_command_that_parses(arm):
    config = settings(arm)
    assert config["out"] == f"runs/study/seed-1/{arm}" and config["tasks"] == "demo"
    start = None if arm in ("dpo", *grid.ALONE) else "runs/study/seed-1/dpo"
    assert config["start"] == start
    pair_loss_of(DPO(**config["dpo"]))  # the loss takes the parameters that it is given


def test_every_row_of_the_grid_is_in_some_table():
    shown = {
        *document.METHODS,
        *document.LAST_QUESTION[1],
        *(arm for _, rows, _ in document.QUESTIONS for arm in rows),
    }
    assert shown == {*grid.GRID, *DERIVED}


def test_the_recorded_document_is_made_of_the_recorded_lines():
    if not run.LINES.is_file():
        pytest.skip("benchmarks/results/study.jsonl does not exist: the study was not run")
    lines = run.recorded_lines()
    assert {found["arm"] for found in lines} <= {*grid.GRID, *DERIVED}
    assert document.DOCUMENT.read_text() == document.document(lines)
    recorded = json.loads((document.RESULTS / "study.json").read_text())["figures"]
    assert recorded == pytest.approx(rates.figures(lines), abs=1e-6)


def test_what_the_guide_says_of_the_study_is_what_its_lines_say():
    found = rates.studied(run.recorded_lines())
    guide = sentences((ROOT / "docs" / "guide.md").read_text())

    def gain(after, word):
        against = rates.compared(found, "dpo", after)
        assert (against.word(), len(against.gains)) == (word, 3), after
        return against

    gain("rft", "no difference")
    assert "In one round no difference shows between imitating the successes (RFT) and DPO" in guide
    explored = rates.needs(found, "rounds")[1] / rates.needs(found, "dpo")[1]
    assert explored == found["rounds"][1]["config"]["rounds"] == 5
    assert (
        f"Five rounds of DPO bring {gain('rounds', 'better').points:.1f} points more than one"
        in guide
    )
    assert f"brings {gain('expert', 'better').points:.1f} points more in one round" in guide
    large = gain("group-16", "0 in the interval")
    assert (
        f"Groups of 16 in place of 8: {large.points:.1f} points more ({min(large.gains):.1f} to "
        f"{max(large.gains):.1f} by seed), with 0 in the interval of the three seeds"
    ) in guide
    assert sum(points < -20 for points in gain("stepwise", "0 in the interval").gains) == 2
    assert "Step-wise pairs collapse in two seeds of three" in guide
    unseen = [
        rates.compared(found, rates.sft_of(arm), arm, "unseen").word()
        for arm in found
        if rates.cut(found, arm)
    ]
    assert "better" not in unseen and len(preface.siblings(grid.UNSEEN.split(","))) == 5
    imitating = rates.compared(found, "sft", "bc", "unseen")
    assert imitating.word() == "better" and len(imitating.gains) == 3
    assert (
        "no row of DPO is shown to be better than SFT (`--learn bc` is, by "
        f"{imitating.points:.1f} points), and five of the eight are siblings"
    ) in guide
    plain, ours = (rates.compared(found, "sft", arm) for arm in ("plain", "dpo"))
    assert (
        f"gains {plain.points:.1f} points on the small model where ours gains {ours.points:.1f} "
        "(three seeds)"
    ) in guide and len(plain.gains) == len(ours.gains) == 3
    readme = sentences((ROOT / "README.md").read_text())
    assert f"gains {plain.points:.1f} points where ours gains {ours.points:.1f}" in readme
