"""configs/papers: every number is its source's, every source stands beside it, the stages are the paper's."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from minidpo.config import LoopCommand, PlanCommand
from minidpo.loop import Loop
from test_loop_asks import asked  # noqa: F401 (a fixture)

from benchmarks.study import learners
from benchmarks.study.rates import success
from benchmarks.study.run import recorded_lines
from minidpo.learning.preferences import pair_loss_of
from minidpo.model.checkpoint import NANO
from minidpo.system.command_line import parse
from minidpo.system.files import read_json

PAPERS = Path(__file__).parents[1] / "configs" / "papers"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
REPORT = "the EF-DPO report, as the brief of this project quotes it"
ETO = "Yifan-Song793/ETO 9cd8087, run_eto.sh"
FASTCHAT = "Yifan-Song793/ETO 9cd8087, eval_agent/configs/model/fastchat.json"
DMPO = "swt-user/DMPO 64f4845, run_dmpo.sh"
ALGORITHM, NOISY = "arXiv:2403.02502, Algorithm 1", "arXiv:2406.14868, the noisy setting"
BRIEF = "the brief of this project"
GYM = "WooooDyy/AgentGym 84da852, agentenv/examples/agentevol/train_agentevol_multi_task.sh"
GYM_CODE = "WooooDyy/AgentGym 2bcf8ff, agentenv/agentenv/trainer/agentevol_trainer.py"
IMITATED = {
    "epochs": (1, GYM),
    "batch": (2 * 2 * 8, GYM),
    "lr": (1e-5, GYM),
    "warmup_ratio": (0.1, GYM_CODE),
    "weight_decay": (0.0, GYM),
    "clip": (1.0, GYM),
}

# What the sources say: {file: {option: (value, source)}}. A value that is not here is "ours" in the file.
SAID = {
    "ef-dpo": {
        "demonstrations_in_total": (5, REPORT),
        "rounds": (1, REPORT),
        "sft.steps": (100, REPORT),
        "sft.lr": (2e-4, REPORT),
        "sft.batch": (4, REPORT),
        "dpo.steps": (50, REPORT),
        "dpo.lr": (5e-6, REPORT),
        "dpo.batch": (4, REPORT),
        "dpo.beta": (0.1, REPORT),
        "dpo.nll": (0.0, REPORT),
        "model": ("Qwen/Qwen2-7B-Instruct", REPORT),
        "tasks": ("report", REPORT),
        "machine.dtype": ("bfloat16", REPORT),
        "dpo.until": ("end", REPORT),
    },
    "eto": {
        "rounds": (3, ETO),
        "patience": (3, ETO),
        "group": (1, ETO),
        "sampling.temperature": (0.0, FASTCHAT),
        "sampling.max_new_tokens": (512, FASTCHAT),
        "sft.epochs": (3, ETO),
        "sft.batch": (64, ETO),
        "sft.lr": (2e-5, ETO),
        "sft.warmup_ratio": (0.03, ETO),
        "sft.weight_decay": (0.0, ETO),
        "dpo.margin": (0.0, "Yifan-Song793/ETO 1a4c84c, construct_preference.py"),
        "dpo.epochs": (3, ETO),
        "dpo.batch": (32, ETO),
        "dpo.lr": (1e-6, ETO),
        "dpo.beta": (0.1, ETO),
        "dpo.warmup_ratio": (0.1, ETO),
        "dpo.weight_decay": (0.0, ETO),
        "dpo.constant": (True, ETO),
        "explore": ("demonstrations", ALGORITHM),
        "reference": ("previous", ETO),
        "shots": (1, "Yifan-Song793/ETO 9cd8087, eval_agent/envs/webshop_env.py"),
        "machine.dtype": ("bfloat16", ETO),
        "dpo.pairs": ("eto", ALGORITHM),
        "dpo.until": ("end", ALGORITHM),
    },
    "dmpo": {
        "rounds": (1, DMPO),
        "group": (1, DMPO),
        "sft.epochs": (3, DMPO),
        "sft.batch": (64, DMPO),
        "sft.lr": (2e-5, DMPO),
        "sft.warmup_ratio": (0.03, DMPO),
        "sft.weight_decay": (0.0, DMPO),
        "dpo.gamma": (0.7, "swt-user/DMPO 64f4845, fastchat/train/train_dmpo_efficient.py"),
        "dpo.epochs": (3, DMPO),
        "dpo.batch": (32, DMPO),
        "dpo.lr": (1e-6, DMPO),
        "dpo.beta": (0.1, DMPO),
        "dpo.warmup_ratio": (0.1, DMPO),
        "dpo.weight_decay": (0.0, DMPO),
        "dpo.constant": (True, DMPO),
        "explore": ("demonstrations", DMPO),
        "shots": (1, BRIEF),
        "machine.dtype": ("bfloat16", DMPO),
        "dpo.loss": ("dmpo", "arXiv:2406.14868, Eq. 17"),
        "dpo.pairs": ("expert", NOISY),
        "dpo.noisy": (True, NOISY),
        "dpo.until": ("end", "swt-user/DMPO 64f4845, construct_preference_nocut.py"),
    },
    "agentevol": {
        "explore": ("same", GYM),
        "rounds": (5, BRIEF),
        "patience": (5, BRIEF),
        "sampling.temperature": (0.8, BRIEF),
        "imitation.threshold": (0.5, BRIEF),
        "imitation.ratio": (0.3, BRIEF),
        **{f"sft.{name}": said for name, said in IMITATED.items()},
        **{f"imitation.{name}": said for name, said in IMITATED.items()},
    },
}
# As ETO, but for how often an instance is played, which pairs are made, and these two numbers.
SAID["eto-stepwise"] = {
    **{
        option: said
        for option, said in SAID["eto"].items()
        if option not in ("group", "dpo.margin", "dpo.until")
    },
    "dpo.lr": (1e-7, BRIEF),
    "dpo.beta": (0.3, BRIEF),
    "golden_steps": ("every", BRIEF),
    "dpo.pairs": ("stepwise", "arXiv:2403.02502, appendix C"),
}
MEASURED = ("eto", "dmpo")  # which have a second file, for SmolLM2
papers = pytest.mark.parametrize("paper", SAID)


def text_of(paper):
    return (PAPERS / f"{paper}.toml").read_text()


def values_of(paper):
    """{option: value} of the file, but for where it writes and which learner that is."""
    flat = {
        f"{table}.{name}": value
        for table, content in tomllib.loads(text_of(paper)).items()
        for name, value in (content.items() if isinstance(content, dict) else [("", content)])
    }
    return {
        option: value
        for name, value in flat.items()
        if (option := name.rstrip(".")) not in ("out", "learn")
    }


def config_of(paper):
    return parse(LoopCommand, ["--config", str(PAPERS / f"{paper}.toml")], "train.py loop", "")


def test_each_paper_has_a_file():
    second = (f"{paper}-smollm2" for paper in (*MEASURED, "agentevol"))
    assert {path.stem for path in PAPERS.iterdir()} == {*SAID, *second}


@pytest.mark.parametrize("paper", MEASURED)
def test_a_second_file_is_what_the_recorded_run_was_given_and_quotes_what_it_found(paper):
    recorded = read_json(RESULTS / f"smollm2_{paper}-1.json")
    command, flags = recorded["command"].split("loop ")
    ran = parse(LoopCommand, flags.split(), command, "")
    config = config_of(f"{paper}-smollm2")
    demo = parse(LoopCommand, ["--config", str(PAPERS.parent / "demo.toml")], "", "")
    assert config.machine == demo.machine  # "fast", which was bfloat16 there
    assert config == replace(
        ran, out=config.out, start=None, rates_of="smollm2", machine=demo.machine
    )
    found = recorded["figures"]
    before, after = (100 * found[f"{agent}_success"] for agent in ("sft", "dpo"))
    assert f"{before:.1f} -> {after:.1f} %" in text_of(f"{paper}-smollm2")


def test_agentevols_second_file_is_a_row_of_the_study_of_learners_and_quotes_what_it_found():
    flags = [part.replace("configs/", f"{PAPERS.parent}/") for part in learners.flags("evolve", 1)]
    ran, ours = parse(LoopCommand, flags, "learners.py", ""), config_of("agentevol-smollm2")
    unread = {
        "out": ours.out,
        "start": None,
        "dpo": ours.dpo,
        "grpo": ours.grpo,
        "rates_of": "smollm2",
        "machine": replace(ran.machine, dtype="fast"),
    }  # the study's rows are all of one dtype
    assert ours == replace(ran, **unread)
    study = {line["arm"]: line for line in recorded_lines(learners.LINES) if line["seed"] == 1}
    sft, evolve, dpo = (
        100 * success({arm: {1: study[arm]}}, arm, "greedy").mean
        for arm in ("sft", "evolve", "dpo")
    )
    text = " ".join(text_of("agentevol-smollm2").replace("# ", "").split())
    assert f"{sft:.1f} -> {evolve:.1f} % on 180 held-out instances with seed 1" in text
    assert f"where DPO has {dpo:.1f} from the same episodes" in text
    nothing = success({"agentevol": {1: study["agentevol"]}}, "agentevol", "greedy").mean
    assert nothing == 0 and "the agent solves nothing (row `agentevol`" in text


@pytest.mark.parametrize("paper", [*MEASURED, "agentevol"])
def test_what_a_second_file_says_of_the_paper_is_what_the_first_one_has(paper):
    first, table, compared = tomllib.loads(text_of(paper)), "", []
    for line in text_of(f"{paper}-smollm2").splitlines():
        table = match[1] if (match := re.match(r"\[(\w+)\]", line)) else table
        if match := re.match(r"(\w+) = \S+ +# the paper's(?: code)?: ([-\de.]+)( epochs)?$", line):
            name, number, epochs = match.groups()
            compared.append(name)
            assert (
                float(number) == (first[table] if table else first)["epochs" if epochs else name]
            ), line
    assert len(compared) >= 6


@papers
def test_every_value_is_that_of_its_source_or_is_said_to_be_ours(paper):
    said = {option: value for option, (value, _) in SAID[paper].items()}
    values, table, ours = values_of(paper), "", set()
    for line in text_of(paper).splitlines():
        table = match[1] + "." if (match := re.match(r"\[(\w+)\]", line)) else table
        if match := re.match(r"(\w+) = \S+ +# ours", line):
            ours.add(table + match[1])
    assert {option: value for option, value in values.items() if option not in ours} == said
    assert ours.isdisjoint(said)


@papers
def test_every_setting_has_its_source_or_ours_beside_it(paper):
    settings = [
        line for line in text_of(paper).splitlines() if " = " in line and not line.startswith("#")
    ]
    assert [
        line for line in settings if "#" not in line and not line.startswith(("out", "learn"))
    ] == []


@papers
def test_a_papers_file_is_a_loop_whose_loss_reads_all_that_it_gives(paper):
    config = config_of(paper)
    settings = pair_loss_of(config.dpo)
    assert config.learn == ("evolve" if paper == "agentevol" else "dpo")
    if config.learn == "dpo":
        beta = 0.3 if paper == "eto-stepwise" else 0.1
        assert (settings.until, settings.nll, settings.parameters.beta) == ("end", 0.0, beta)


def asks(asked, paper):  # noqa: F811
    """The commands of the paper's loop, on two tasks and the small model: what is played, behind examples,
    and what is trained."""
    wanted = {
        **vars(config_of(paper)),
        "model": NANO,
        "rates_of": NANO,
        "tasks": "enter-text,click-option",
        "episodes": 3,
        "sampled": 1,
        "validation": 2,
        "out": asked.path / "run",
    }
    out, log = asked(**wanted)
    played = [e[1] for e in log if e[0] == "collect" and e[1].out.name != "examples.jsonl"]
    assert {(c.shots, c.examples) for c in played} == {
        (1, out / "examples.jsonl") if "shots" in SAID[paper] else (0, None)
    }
    return out, played, [e[1] for e in log if e[0] == "train"]


def test_ef_dpo_shows_five_demonstrations_and_learns_from_other_instances(asked):  # noqa: F811
    _, played, (first, dpo) = asks(asked, "ef-dpo")
    assert [(c.policy, c.split) for c in played] == [("expert", "demos"), ("model", "rollouts")]
    assert (first.sft.steps, first.sft.batch, dpo.dpo.steps, dpo.golden) == (100, 4, 50, None)


def test_eto_plays_the_experts_instances_once_a_round_which_starts_at_its_reference(asked):  # noqa: F811
    out, (expert, *played), (first, *rounds) = asks(asked, "eto")
    assert [(c.split, c.first, c.group, c.index) for c in played] == [
        ("demos", 0, 1, n) for n in range(3)
    ]
    assert (expert.split, expert.first, expert.group) == ("demos", 0, 1)
    starts = [out / "sft" / "adapter", *(out / f"round-{n}" / "dpo" / "adapter" for n in (1, 2))]
    assert [(c.adapter, c.reference) for c in rounds] == [(start, None) for start in starts]
    assert {c.golden for c in rounds} == {out / "demos.jsonl"}


def test_step_wise_eto_explores_from_every_step_of_the_experts_and_is_else_as_eto(asked):  # noqa: F811
    out, (expert, *played), (first, *rounds) = asks(asked, "eto-stepwise")
    assert [(c.golden, c.golden_steps, c.index) for c in played] == [
        (out / "demos.jsonl", "every", 6 * n) for n in range(3)
    ]
    assert {(c.split, c.group) for c in played} == {("demos", 6)}
    assert {c.golden for c in rounds} == {out / "demos.jsonl"}
    whole, steps = config_of("eto"), config_of("eto-stepwise")
    assert steps.dpo.lr == pytest.approx(whole.dpo.lr / 10)
    assert steps.dpo.beta == pytest.approx(3 * whole.dpo.beta)
    changed = replace(
        whole.dpo, pairs="stepwise", margin=None, pairs_per_instance=6, lr=1e-7, beta=0.3
    )
    assert steps == replace(whole, out=steps.out, group=6, golden_steps="every", dpo=changed)


def test_dmpo_has_golden_winners_and_noisy_losers_of_the_same_instances(asked):  # noqa: F811
    out, (expert, played), (first, dpo) = asks(asked, "dmpo")
    assert (played.split, played.group, dpo.golden) == ("demos", 1, out / "demos.jsonl")
    assert (dpo.dpo.loss, dpo.dpo.pairs, dpo.dpo.noisy, dpo.dpo.gamma) == (
        "dmpo",
        "expert",
        True,
        0.7,
    )


def test_agentevol_starts_each_round_at_the_base_with_all_that_was_selected_so_far(asked):  # noqa: F811
    out, (expert, *played), (first, *rounds) = asks(asked, "agentevol")
    assert {(c.split, c.first, c.instances) for c in played} == {("rollouts", 0, 100)}
    assert [c.index for c in played] == list(range(5)) and {
        c.sampling.temperature for c in played
    } == {0.8}
    assert [c.adapter for c in rounds] == [None] * 5 and rounds[0].data[0] == out / "demos.jsonl"
    assert [len(c.data) for c in rounds] == [2, 3, 4, 5, 6]
    assert {(c.sft.weighting, c.sft.threshold, c.sft.ratio) for c in rounds} == {
        ("reward", 0.5, 0.3)
    }


@papers
def test_a_papers_file_takes_another_model_and_other_tasks_by_flags(paper):
    flags = [
        "--model",
        NANO,
        "--tasks",
        "click-button",
        "--machine.dtype",
        "float32",
        "--rates-of",
        NANO,
    ]
    config = parse(
        LoopCommand, ["--config", str(PAPERS / f"{paper}.toml"), *flags], "train.py loop", ""
    )
    changed = {
        "model": NANO,
        "rates_of": NANO,
        "tasks": "click-button",
        "machine": replace(config_of(paper).machine, dtype="float32"),
    }
    assert config == replace(config_of(paper), **changed)


@pytest.mark.parametrize("paper", sorted(path.stem for path in PAPERS.iterdir()))
def test_a_papers_rates_are_not_taken_for_another_model(paper):
    says = (
        f"the learning rates here are for {config_of(paper).model}: give minidpo/nano its own .sft.lr, "
        "dpo.lr, imitation.lr. and say so: --rates-of minidpo/nano"
    )
    flags = ["--config", str(PAPERS / f"{paper}.toml"), "--model", NANO]
    with pytest.raises(ValueError, match=says):
        Loop(parse(LoopCommand, flags, "train.py loop", ""))
    parse(PlanCommand, flags, "train.py plan", "")  # a plan reads no rate
