"""The printed table: every number in its place, and what an agent has not is left blank."""

import re
from pathlib import Path

from test_success import AFTER, BEFORE

from minidpo.results.circumstances import circumstances, machine_name
from minidpo.results.success import compare, comparisons, summary
from minidpo.results.table import table


def test_the_table():
    result = {
        "headline": "dpo is kept",
        "agents": {
            "sft": summary(BEFORE, BEFORE[:4], cause=lambda e: f"it {e.outcome}"),
            "dpo": summary(AFTER, AFTER[:4], cause=lambda e: f"it {e.outcome}"),
        },
        "comparison": compare(BEFORE, AFTER),
    }
    assert (
        table(result)
        == """\
dpo is kept

                                      sft                       dpo
                 success %   95 % interval  success %   95 % interval
click-a               25.0     4.6 -  69.9       75.0    30.1 -  95.4
click-b              100.0    34.2 - 100.0       50.0     9.5 -  90.5
---------------------------------------------------------------------
all tasks             50.0    18.8 -  81.2       66.7    30.0 -  90.3
all at T = 1          25.0     4.6 -  69.9       75.0    30.1 -  95.4
mean reward          0.500                      0.667
mean steps             1.0                        1.0
valid actions %      100.0                      100.0
failed episodes, by cause:
  it failed              2                          2
  it limit               1                          0
6 held-out instances, different pages: 1
dpo - sft: +16.7 points on the same 6 instances (2 won, 1 lost), exact McNemar p = 1"""
    )


def test_one_agent_has_a_table_without_a_comparison():
    lines = table({"agents": {"sft": summary(BEFORE[:4])}, "split": "validation"}).splitlines()
    assert lines[-1].startswith("4 validation instances a task") and "dpo" not in "".join(lines)


def test_three_agents_have_three_comparisons():
    episodes = {"base": BEFORE, "sft": AFTER, "dpo": AFTER}
    result = {"agents": {name: summary(e) for name, e in episodes.items()}, **comparisons(episodes)}
    gains = [line.partition(" points")[0] for line in table(result).splitlines()[-3:]]
    assert gains == ["sft - base: +16.7", "dpo - sft: +0.0", "dpo - base: +16.7"]


def test_what_an_agent_has_not_is_a_gap():
    """A task that the browser gave up for one agent; rates that results of before lack."""
    agents = {"sft": summary(BEFORE[:4]), "dpo": summary(AFTER)}
    row = table({"agents": agents}).splitlines()[3]
    assert row == "click-b                  -                       50.0     9.5 -  90.5"
    del agents["sft"]["all"]["mean_reward"], agents["sft"]["reward_by_step"]
    text = table({"agents": agents})
    assert "mean steps" in text and "mean reward" not in text


def test_new_pages_and_an_oracles_choice_are_told():
    trained_on = {("another instruction", "another page")}
    result = {
        "agents": {"sft": summary(BEFORE, trained_on=trained_on)},
        "best_of": 8,
        "temperature": 1.0,
    }
    text = table(result)
    assert "all new pages" in text and "not in training: 6" in text and "oracle" in text
    judged = table({**result, "judge": "runs/rm/adapter"})
    assert "runs/rm/adapter" in judged and "oracle" not in judged


def test_a_result_names_the_processor_because_the_last_digits_are_its_own():
    found = circumstances("torch", "no-such-package")
    processor = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    assert processor is None or processor[1] in found["machine"]
    assert found["versions"].keys() == {"torch"} and machine_name("a GPU").endswith(", a GPU")
