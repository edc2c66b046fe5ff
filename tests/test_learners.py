"""The comparison of learners on the demo's model: numbers by hand, rows as they say, the record."""

import functools
import json
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

import pytest
import tiny
from minidpo.config import LoopCommand

from benchmarks.study import credit, learners, run
from benchmarks.study.rates import compared, studied, success
from minidpo.learning.preferences import pair_loss_of
from minidpo.system.command_line import parse

ROOT = Path(__file__).parents[1]


@functools.cache
def settings(arm):
    flags = [part.replace("configs/", f"{ROOT}/configs/") for part in learners.flags(arm, 1)]
    return parse(LoopCommand, flags, "learners.py", "")


def played(verdicts):
    return {
        "solved": {"click-button": verdicts},
        "turns": 2 * len(verdicts),
        "usable": len(verdicts),
    }


def line(arm, seed, greedy, sampled="10"):
    found = {
        "arm": arm,
        "seed": seed,
        "date": "2026-11-26",
        "threads": 1,
        "machine": "x86_64, 2 CPU cores",
        "versions": {"torch": "2.13"},
        "command": "",
        "greedy": played(greedy),
        "sampled": played(sampled),
    }
    if arm != "sft":
        config = settings(arm)
        found |= {
            "config": json.loads(json.dumps(asdict(config), default=str)),
            "seconds": {"explore": 9.0, config.learn: 50.0 * seed},
        }
    return found


FEW = [
    line("sft", 1, "10000000"),
    line("dpo", 1, "11111111"),
    line("sft", 2, "00000000"),
    line("dpo", 2, "11110000"),
    line("expert", 1, "11111110"),
    line("dagger", 1, "00000000"),
]


def row(text, arm, number=0):
    table = [part for part in text.splitlines() if part.startswith(f"| `{arm}`")]
    return [cell.strip() for cell in table[number].strip("|").split("|")]


def test_two_seeds_worked_out_by_hand():
    """DPO wins 7 of 8 and 4 of 8, together p = 2 / 2^11, ± 12.706 · 26.5 / √2 points; six demonstrations, and
    96 golden episodes more."""
    text = learners.document(FEW)
    assert row(text, "dpo") == [
        "`dpo`",
        "DPO on its own pairs",
        "1, 2",
        "6",
        "75.0 (0.0 - 100.0)",
        "50.0 (50.0 - 50.0)",
        "50.0",
        "+68.8, p = 0.00098",
        "-",
        "75 (1.0)",
    ]
    assert row(text, "expert")[3:5] == ["102", "87.5"] and row(text, "dagger")[3] == "102"
    assert row(text, "expert")[8] == "-12.5, p = 1" and row(text, "expert")[9] == "50 (1.0)"
    assert row(text, "sft")[-3:] == ["-", "-", "-"] and row(text, "rft")[2] == "not run"
    said = " ".join(text.split())
    assert (
        "p < 0.01 against `sft` on held-out instances, greedily, but 0 lies in the seeds' interval: "
        "`dpo` (+68.8, p = 0.00098, n = 16, up 2/2, seeds -169.5 to +307.0)."
    ) in said
    assert "Worse than `dpo` on held-out instances, greedily: `dagger` (-100.0, p = 0.0078" in said
    assert "Fewer than three seeds: `sft` (2), `dpo` (2), `expert` (1), `dagger` (1)." in said
    figures = learners.figures(FEW)
    assert figures["dpo_greedy"] == 0.75 and figures["dpo_vs_sft_points"] == 68.75
    assert figures["expert_vs_dpo_p"] == 1 and "sft_vs_sft_p" not in figures


@pytest.mark.parametrize("arm", learners.ROWS)
def test_every_row_is_a_command_that_parses_and_is_in_a_table(arm):
    config = settings(arm)
    assert str(config.out) == f"runs/learners/seed-1/{arm}"
    assert config.start == (None if arm == "dpo" else Path("runs/learners/seed-1/dpo"))
    pair_loss_of(config.dpo)
    assert arm in {name for _, _, rows, _ in learners.SECTIONS for name in rows}


def test_all_rows_take_as_many_steps_as_dpo_but_those_that_are_written_in_papers():
    papers = {"ef-dpo", "eto", "dmpo", "agentevol"}
    for arm in learners.ROWS.keys() - papers:
        config = settings(arm)
        trained = {
            "dpo": config.dpo,
            "ppo": config.ppo,
            "grpo": config.grpo,
            "rloo": config.grpo,
            "gigpo": config.grpo,
        }.get(config.learn, config.imitation)
        assert (trained.steps, trained.epochs) == (24, None), arm


@pytest.mark.parametrize(
    "arm, table", [("ef-dpo", "dpo"), ("eto", "dpo"), ("dmpo", "dpo"), ("agentevol", "imitation")]
)
def test_what_papers_write_is_in_their_rows(arm, table):
    """But for what belongs to all rows: the episodes, and so the temperature and a single round."""
    flags = ["--config", str(ROOT / "configs" / "papers" / f"{arm}.toml")]
    paper, ours = (
        asdict(getattr(config, table))
        for config in (parse(LoopCommand, flags, "learners.py", ""), settings(arm))
    )
    unread = {"warmup"} | ({"steps"} if paper["epochs"] else set())  # the report has no warm-up
    assert {name for name in paper if paper[name] != ours[name]} <= unread


def test_a_row_is_recorded_as_its_loop_evaluated_it(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(learners, "loop", lambda config: {"seconds": {"grpo": 3.0}})
    asked, checked = [], []
    monkeypatch.setattr(
        learners, "Loop", checked.append
    )  # refuses a folder of other settings, ended or not

    def held_out(command, name):
        asked.append((str(command.out), name, command.temperature))
        return [
            tiny.episode(task=task, seed=seed)
            for task in command.tasks.split(",")
            for seed in range(command.episodes)
        ]

    monkeypatch.setattr(learners, "held_out", held_out)
    (found,) = learners.run("grpo", 2)
    assert [(config.learn, str(config.out)) for config in checked] == [
        ("grpo", "runs/learners/seed-2/grpo")
    ]
    folder = "runs/learners/seed-2/grpo/evaluation"
    assert asked == [(folder, "grpo", 0.0), (f"{folder}/sampled", "grpo", 1.0)]
    assert {len(text) for text in found["greedy"]["solved"].values()} == {30}
    assert {len(text) for text in found["sampled"]["solved"].values()} == {10}
    assert found["command"].endswith(
        "--learn grpo --seed 2 --out runs/learners/seed-2/grpo --start runs/learners/seed-2/dpo"
    )
    both = learners.run("dpo", 2)
    assert [found["arm"] for found in both] == ["dpo", "sft"] and "config" not in both[1]
    monkeypatch.setitem(learners.ROWS, "grpo", ("--learn grpo --grpo.lr 1e-4", "GRPO"))
    with pytest.raises(
        ValueError, match=r"other settings \(grpo.lr 0.0002, now 0.0001\): restore these"
    ):
        learners.run("grpo", 7)


def test_what_the_guide_says_of_learners_is_what_their_lines_say():
    guide, study = (
        (ROOT / "docs" / "guide.md").read_text(),
        studied(run.recorded_lines(learners.LINES)),
    )
    told = guide.split("`docs/learners.md` asks the same")[1].split("## Tasks")[0]
    names = {
        "sft": "SFT on six",
        "ppo": "PPO",
        "rft": "RFT:",
        "gigpo": "GiGPO",
        "grpo": "GRPO",
        "rloo": "RLOO",
        "dagger": "DAgger:",
        "evolve": "AgentEvol's",
        "dpo": "DPO on",
        "dpo-muon": "DPO by Muon",
        "dagger-pairs": "DAgger's answers",
        "stepwise-slow": "step-wise pairs at",
        "stepwise": "step-wise pairs from",
        "segments": "golden thirds",
        "expert": "a golden episode",
    }
    for arm, name in names.items():
        line = next((row for row in told.splitlines() if row.startswith(f"| {name}")), None)
        assert (line is not None) == (len(study.get(arm, ())) >= 3), arm
        if line:
            rates = [f"{100 * success(study, arm, where).mean:.1f} %" for where in learners.WHERE]
            assert [cell.strip() for cell in line.split("|")[2:4]] == rates, arm
    without_expert = [arm for arm in study if arm != "sft" and learners.golden(study, arm) == 6]
    words = {
        arm: compared(study, "dpo", arm, "greedy").word() for arm in {*without_expert} - {"dpo"}
    }
    policy_gradients = {"ppo", "grpo", "rloo", "gigpo"}
    assert {arm for arm, word in words.items() if word == "worse"} == {
        *policy_gradients,
        "agentevol",
    }
    assert words["rft"] == words["evolve"] == "0 in the interval"
    assert "Greedily three seeds show the gain over policy gradients; over RFT and" in " ".join(
        told.split()
    )
    assert compared(study, "rft", "evolve", "greedy").points > 0
    seconds = {
        arm: fmean(line["seconds"][line["config"]["learn"]] for line in seeds.values())
        for arm, seeds in study.items()
        if arm in names and arm != "sft"
    }
    assert min(seconds, key=seconds.get) == "dpo"
    written = [compared(study, "sft", arm, "greedy") for arm in ("ef-dpo", "eto", "dmpo")]
    assert all(abs(found.points) < 2 and len(found.gains) == 3 for found in written)
    assert compared(study, "dpo", "dpo-muon", "greedy").word() == "no difference"
    assert compared(study, "stepwise", "stepwise-slow", "greedy").word() == "worse"
    assert compared(study, "expert", "segments", "greedy").word() == "no difference"


def test_the_recorded_document_is_made_of_the_recorded_lines():
    lines = run.recorded_lines(learners.LINES)
    assert {found["arm"] for found in lines} <= {"sft", *learners.ROWS}
    assert learners.DOCUMENT.read_text() == learners.document(lines)
    recorded = json.loads((learners.RESULTS / "learners.json").read_text())["figures"]
    assert recorded == pytest.approx(learners.figures(lines), abs=1e-6)


def test_whole_episodes_thirds_and_steps_learn_from_one_file_and_differ_in_their_pairs_alone(
    tmp_path, monkeypatch
):
    played, trained = [], []

    def collect(command):
        played.append(command)
        command.out.parent.mkdir(parents=True, exist_ok=True)

    def train(command):
        trained.append(command)
        command.out.mkdir(parents=True)
        (command.out / "pairs.jsonl").write_text("{}\n" * 3)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(credit, "LINES", tmp_path / "credit.jsonl")
    monkeypatch.setattr(credit, "collect", collect)
    monkeypatch.setattr(credit, "dpo", train)
    monkeypatch.setattr(
        credit,
        "play_held_out",
        lambda command, name, adapter: [
            tiny.episode(task=task, seed=seed)
            for task in credit.TASKS
            for seed in range(credit.EPISODES)
        ],
    )
    lines = [line for arm in (credit.START, *credit.ROWS) for line in credit.run(arm, seed=2)]
    expert, agent = played  # once: what a browser gave up is not played for a later row
    assert (agent.golden_steps, agent.group, agent.first) == ("every", 6, 10_600)
    assert (expert.policy, expert.group, expert.first) == ("expert", 1, 10_600)
    assert {expert.out} == {agent.golden} == {c.golden for c in trained}
    assert {c.data for c in trained} == {(agent.out,)}
    assert [(c.dpo.pairs, c.dpo.until) for c in trained] == [
        ("expert", "end"),
        ("segments", "end"),
        ("stepwise", "end"),
        ("expert", "token"),
    ]
    assert len({replace(c.dpo, pairs="outcome", until=None) for c in trained}) == 1
    assert [line.get("pairs") for line in lines] == [None, 3, 3, 3, 3]
    credit.LINES.write_text(json.dumps(lines[0] | {"start": ["of", "another"]}) + "\n")
    with pytest.raises(
        ValueError,
        match="is not the agent that the rows of .* began with: bring that one "
        r"back \(weights another;",
    ):
        credit.run("whole", seed=3)
    assert len(trained) == 4


def test_a_row_of_whole_episodes_or_steps_worked_out_by_hand(tmp_path, monkeypatch):
    lines = [
        {**line("sft", 1, greedy), "arm": arm, "pairs": 7, "start": ["a"], "processes": 2}
        for arm, greedy in (("start", "1000"), ("whole", "1100"), ("steps", "0011"))
    ]
    monkeypatch.setattr(credit, "LINES", tmp_path / "credit.jsonl")
    assert credit.document(8) == []
    credit.LINES.write_text("".join(json.dumps(each) + "\n" for each in lines))
    text = "\n".join(credit.document(8))
    assert row(text, "start") == ["`start`", "that agent", "-", "1", "25.0", "-", "-"]
    assert row(text, "whole")[2:] == ["7", "1", "50.0", "+25.0, p = 1", "-"]
    assert row(text, "steps")[2:] == ["7", "1", "50.0", "+25.0, p = 1", "+0.0, p = 1"]
    assert "| `thirds`" not in text and "## 8." in text
    said = " ".join(text.split())
    assert "- Not run: `thirds` (" in said and "Not compared" not in said
    credit.LINES.write_text(
        "".join(json.dumps(each | {"start": [each["arm"]]}) + "\n" for each in lines)
    )
    with pytest.raises(ValueError, match="its rows began with different agents"):
        credit.document(8)
