"""The studies: statistics worked out by hand, rows that their pages take, and tables that do not change."""

import json

import pytest

from benchmarks import miniwob, rates, study, tables
from envs.miniwob.tasks import SUITES


def line(row, seed, solved, suite="demo", **more):
    return {"arm": row, "seed": seed, suite: {"solved": solved}, **more}


TWO_SEEDS = rates.studied(
    [
        line("sft", 1, {"a": "1000", "b": "0000"}),
        line("dpo", 1, {"a": "1111", "b": "1110"}),
        line("dpo", 2, {"a": "1111", "b": "1111"}),
        line("sft", 2, {"a": "1100", "b": "0000"}),
    ]
)


def test_two_seeds_worked_out_by_hand():
    """DPO solves 7 and 8 of 8: mean 15/16, s = 1/(8√2), so t·s/√2 = 12.706/16, cut at 1. SFT solves 1 and 2, all
    of which DPO solves too: 12 of 16 gained, p = 2/2^12, and 75 points with each seed."""
    found = rates.success(TWO_SEEDS, "dpo", "demo")
    assert found == pytest.approx((15 / 16, 15 / 16 - 12.706 / 16, 1.0))
    gain = rates.compared(TWO_SEEDS, "sft", "dpo", "demo")
    assert gain == (12, 0, 16, (75.0, 75.0))
    assert (gain.points, gain.p, rates.verdict(gain)) == (75.0, 2**-11, "better")


def test_the_interval_of_three_seeds_is_students():
    """0.5, 0.6, 0.7: s = 0.1. One seed has no interval, and none has no mean."""
    found = rates.spread([0.5, 0.6, 0.7])
    assert found == pytest.approx((0.6, 0.6 - 0.4303 / 3**0.5, 0.6 + 0.4303 / 3**0.5))
    assert rates.spread([0.5]) == (0.5, None, None) and rates.share([]) is None


@pytest.mark.parametrize(
    "won, lost, gains, word",
    [
        (20, 2, (10.0, 8.0, 9.0), "better"),
        (2, 20, (-10.0, -8.0, -9.0), "worse"),
        (20, 2, (30.0, -3.0, 0.0), "open"),  # another training may turn it round
        (5, 2, (3.0, 2.0, 3.0), "no difference"),
        (20, 2, (9.0,), "better"),  # of one training
    ],
)
def test_a_verdict_needs_a_small_p_and_seeds_that_agree(won, lost, gains, word):
    assert rates.verdict(rates.Comparison(won, lost, 200, gains)) == word


def test_rows_are_compared_on_the_seeds_and_instances_of_both():
    other = TWO_SEEDS | {"ipo": {2: line("ipo", 2, {"a": "1100", "b": "1000"})}}
    assert rates.compared(other, "sft", "ipo", "demo") == (1, 0, 8, (12.5,))
    assert rates.compared(other, "sft", "ipo", "unseen") is None
    longer = TWO_SEEDS | {"ipo": {1: line("ipo", 1, {"a": "11111", "b": "0000"})}}
    with pytest.raises(ValueError, match="different instances"):
        rates.compared(longer, "sft", "ipo", "demo")
    with pytest.raises(ValueError, match="recorded twice"):
        rates.studied([line("dpo", 1, {}), line("dpo", 1, {})])


def test_the_interval_of_a_gain_is_over_families_of_tasks():
    """Two families: three siblings that gain 10 points each and one task that gains none. Mean 7.5; they are
    3·2.5 = 7.5 and -7.5 apart, so the half width is t(1)·√(2·2·7.5²)/4 = 12.706·3.75."""
    gains = {"click-tab": 10.0, "click-tab-2": 10.0, "click-tab-2-hard": 10.0, "enter-text": 0.0}
    found = rates.over_families(gains)
    assert found == pytest.approx((7.5, 7.5 - 12.706 * 3.75, 7.5 + 12.706 * 3.75))
    assert rates.over_families({"click-tab": 5.0}) == (5.0, -95.0, 105.0)


def test_gains_count_the_first_instances_and_the_couples_that_played_the_task():
    couples = [({"a": "0011"}, {"a": "1111"}), ({"a": "0000", "b": "00"}, {"a": "0000", "b": "01"})]
    assert rates.task_gains(couples, ["a", "b"], 2) == {"a": 50.0, "b": 50.0}


def test_held_out_tasks_are_whole_families_and_each_part_holds_out_others():
    tasks = SUITES["expert"]
    shares = [rates.split(tasks, number)[1] for number in (1, 2, 3, 4)]
    assert sorted(task for share in shares for task in share) == sorted(tasks)
    for family in rates.families(sorted(tasks)):
        assert sum(bool(set(family) & set(share)) for share in shares) == 1


@pytest.mark.parametrize(
    "name, row", [(name, row) for name, rows in study.ROWS.items() for row in rows]
)
def test_a_row_is_what_its_page_takes_and_shares_the_first_rows_stages(name, row):
    options, setup = study.options_of(name, row, 2)
    base, _ = study.options_of(name, study.BASE, 2)
    assert setup.seed == 2 and setup.out.name == row
    assert setup.reuse == (None if row == study.BASE else setup.out.with_name(study.BASE))
    if row not in study.FIRST:
        assert options.sft == base.sft and options.demonstrations == base.demonstrations


def test_a_row_changes_what_it_says_and_nothing_else():
    changed, _ = study.options_of("study", "beta-0.1", 1)
    base, _ = study.options_of("study", study.BASE, 1)
    assert changed.dpo.beta == 0.1 and base.dpo.beta == 1.0
    assert changed.dpo == type(base.dpo)(**{**vars(base.dpo), "beta": 0.1})
    # as published: whole episodes, no NLL
    plain, _ = study.options_of("study", "plain", 1)
    assert (plain.dpo.beta, plain.dpo.nll, plain.dpo.until) == (0.1, 0.0, "end")


def test_the_recorded_lines_of_miniwob_are_of_the_instances_that_its_parts_play():
    for recorded in rates.recorded("miniwob"):
        played = {task: len(text) for task, text in recorded["agents"]["sft"].items()}
        assert played == miniwob.counts_of(recorded["part"])
        _, setup = miniwob.options_of(recorded["part"], recorded["seed"], [])
        assert len(setup.tasks.split(",")) in (1, len(recorded["trained_on"]))


def test_a_part_takes_the_place_of_its_older_line(tmp_path, monkeypatch):
    monkeypatch.setattr(rates, "RESULTS", tmp_path)
    monkeypatch.setattr(miniwob, "RESULTS", tmp_path)
    for kept in (1, 2):
        miniwob.add_line({"part": "whole", "seed": 1, "kept_round": kept})
    miniwob.add_line({"part": "whole", "seed": 2})
    lines = [json.loads(text) for text in (tmp_path / "miniwob.jsonl").read_text().splitlines()]
    assert [(each["seed"], each.get("kept_round")) for each in lines] == [(1, 2), (2, None)]


# ---- tables ----


@pytest.mark.parametrize("path", tables.documents(), ids=lambda path: path.name)
def test_filling_the_tables_anew_changes_nothing(path):
    text = path.read_text()
    assert tables.filled(text) == text, "python benchmarks/tables.py"


def test_a_table_holds_the_rows_that_its_mark_names():
    text = "before\n<!-- table rows study sft dpo -->\n<!-- end -->\nbehind\n"
    found = tables.filled(text)
    assert [part.split(" | ")[0] for part in found.splitlines()[2:6]] == [
        "| row",
        "| ---",
        "| `sft`",
        "| `dpo`",
    ]
    assert tables.filled(found) == found and found.endswith("<!-- end -->\nbehind\n")
    with pytest.raises(ValueError, match="'nothing'"):
        tables.filled("<!-- table nothing -->\n<!-- end -->")


def test_a_template_is_filled_from_any_result():
    text = "<!-- table figures\n| head | {head_memory[ours_4096_mib]:.0f} MiB |\n-->\n<!-- end -->"
    assert "\n| head | 83 MiB |\n<!-- end -->" in tables.filled(text)


WORDS = {"rows": ["learners"], "miniwob-causes": ["sft"], "miniwob-tasks": ["sft", "sixth"]}


@pytest.mark.parametrize("name", tables.TABLES)
def test_every_row_of_a_table_has_a_cell_under_each_head(name):
    head, rows = tables.TABLES[name](*WORDS.get(name, []))
    assert rows and {len(row) for row in rows} == {len(head)}


def test_rows_of_v1_are_told_from_those_that_a_page_repeats():
    pages = {row: tables.page_of("learners", row) for row in ("dpo", "sft", "segments")}
    assert pages == {"dpo": "ef-dpo", "sft": "ef-dpo", "segments": tables.V1}
    assert tables.needs(rates.studied(rates.recorded("study")), "expert") == ("13", "64")


def test_a_gain_is_bold_where_its_verdict_is():
    """Won 20 and lost 2 of 200: p < 0.001. Seeds of 10, 8 and 9 points agree, 30, -3 and 0 do not."""
    cells = [tables.gain(rates.Comparison(20, 2, 200, g)) for g in ((10, 8, 9), (30, -3, 0))]
    assert cells == ["**+9.0 (+6.5 to +11.5)**", "+9.0 (-36.3 to +54.3)"]
    assert tables.gain(rates.Comparison(20, 2, 200, (9.0,))) == "**+9.0**"
