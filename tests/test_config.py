"""A TOML file gives defaults, flags win, and what does not fit is said at once."""

import os
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch

import evaluate
from minidpo.acting import browse
from minidpo.config import (
    DPO,
    BaseCommand,
    BrowseCommand,
    CollectCommand,
    DPOCommand,
    EvaluateCommand,
    GRPOCommand,
    LoopCommand,
    PairsCommand,
    PlanCommand,
    PPOCommand,
    PushCommand,
    RMCommand,
    SFTCommand,
)
from minidpo.system.command_line import main, parse, toml_flags

COMMANDS = [SFTCommand, DPOCommand, CollectCommand, EvaluateCommand, LoopCommand, BaseCommand]


def parsed(kind, *arguments):
    return parse(kind, list(arguments), "script.py", "What it does.")


@pytest.fixture
def toml(tmp_path):
    def write(text):
        path = tmp_path / "settings.toml"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize("kind", COMMANDS)
def test_without_arguments_a_command_is_its_defaults_and_every_option_has_help(kind, capsys):
    assert parsed(kind) == kind()
    with pytest.raises(SystemExit) as stop:
        parsed(kind, "--help")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "What it does." in text and "--config FILE" in text


def test_the_files_values_come_first_and_flags_win(toml):
    path = toml(
        'seed = 3\nout = "runs/x"\n[sft]\nsteps = 7\nlr = 0.5\n[lora]\nrank = 4\n'
        'targets = ["q_proj", "v_proj"]\n[machine]\nrecompute = true\n'
    )
    config = parsed(SFTCommand, "--config", path)
    assert (config.seed, config.out, config.sft.steps, config.sft.lr) == (3, Path("runs/x"), 7, 0.5)
    assert config.lora.targets == ("q_proj", "v_proj") and config.machine.recompute is True
    for arguments in (
        ["--config", path, "--sft.steps", "9"],
        ["--sft.steps", "9", f"--config={path}"],
    ):
        config = parsed(
            SFTCommand, *arguments, "--lora.targets", "k_proj", "--machine.no-recompute"
        )
        assert (config.sft.steps, config.sft.lr, config.seed) == (9, 0.5, 3)
        assert config.lora.targets == ("k_proj",) and config.machine.recompute is False


def test_a_file_can_say_no(toml):
    path = toml("[machine]\nrecompute = false\nmicro_tokens = 64\n")
    config = parsed(SFTCommand, "--config", path)
    assert config.machine.recompute is False and config.machine.micro_tokens == 64
    assert parsed(SFTCommand, "--config", path, "--machine.recompute").machine.recompute is True


@pytest.mark.parametrize(
    "kind, text, flags",
    [
        (BrowseCommand, 'adapter = "a"\nsteps = 3\n', ["--url", "u", "--goal", "g"]),
        (BrowseCommand, 'url = "u"\ngoal = "g"\n', ["--steps", "3", "--adapter", "a"]),
        (PushCommand, "private = true\n", ["--to", "o/n"]),
        (LoopCommand, "focus = true\n", ["--rounds", "3"]),
        (SFTCommand, "[machine]\noffload = true\n", ["--machine.recompute"]),
    ],
)
def test_file_and_flags_are_judged_together(toml, kind, text, flags):
    assert parsed(kind, "--config", toml(text), *flags) == parsed(
        kind, *toml_flags(toml(text)), *flags
    )


@pytest.mark.parametrize(
    "text, flags, says",
    [
        ("stepps = 3\n", ["--url", "u", "--goal", "g"], "{}: Unrecognized options: --stepps, 3 .*"),
        ('url = "u"\nsteps = "x"\n', ["--goal", "g"], "{}: Error parsing --steps: .*"),
        ("steps = 3\n", ["--url", "u"], "Missing from script.py: --goal STR .*"),
        (
            "steps = 3\n",
            ["--url", "u", "--goal", "g", "--stepps", "3"],
            "Unrecognized options: --stepps, 3 .*",
        ),
        ('url = "u"\ngoal = "g"\n', ["--stepps", "3"], "Unrecognized options: --stepps, 3 .*"),
    ],
)
def test_a_file_is_named_if_it_is_to_blame(toml, text, flags, says):
    path = toml(text)
    with pytest.raises(ValueError) as error:
        parsed(BrowseCommand, *flags, "--config", path)
    assert re.fullmatch(says.format(re.escape(path)), str(error.value))


@pytest.mark.parametrize(
    "text, flags", [('url = "u"\n', []), ("steps = 3\n", ["--url", "u"]), ("", ["--url=u"])]
)
def test_a_url_makes_an_evaluation_a_visit_in_the_file_too(toml, text, flags, monkeypatch):
    monkeypatch.setattr(browse, "browse", lambda config: config)
    assert evaluate.run(["--config", toml(text), "--goal", "g", *flags]).url == "u"


@pytest.mark.parametrize(
    "flags, attempts",
    [
        ("", 8),
        ("--policy expert", 1),
        ("--policy expert --noise 0.3", 8),
        ("--policy expert --group 3", 3),
        ("--policy dagger --states runs/a.jsonl", 8),
        ("--group 1", 1),
    ],
)
def test_an_expert_plays_an_instance_once_unless_it_is_clumsy(flags, attempts):
    assert parsed(CollectCommand, *flags.split()).attempts() == attempts


def test_one_page_is_watched_unless_more_are_asked_for():
    machine = parsed(EvaluateCommand).machine
    assert (machine.page_count(), machine.page_count(watched=True)) == (16, 1)
    assert parsed(EvaluateCommand, "--machine.pages", "16").machine.page_count(watched=True) == 16


def test_nested_names_become_flags(toml):
    path = toml('adapters = ["a=x", "b=y"]\n[machine]\nmicro_tokens = 64\nrecompute = false\n')
    assert toml_flags(path) == [
        "--adapters",
        "a=x",
        "b=y",
        "--machine.micro-tokens",
        "64",
        "--machine.no-recompute",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "seeed = 3\n",
        "[sft]\nstep = 3\n",
        "[machine]\nrecompute = 'maybe'\n",
        "[sft]\nsteps = 'many'\n",
        "[sft]\nsteps = -3\n",
    ],
)
def test_a_file_with_an_unknown_option_or_a_wrong_value_is_named(toml, text, capsys):
    path = toml(text)
    with pytest.raises(ValueError, match=f"^{path}: .*(seeed|maybe|steps?).*; script.py --help"):
        parsed(SFTCommand, "--config", path)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "flags, says",
    [
        (
            ["--sft.hydra", "1"],
            "Unrecognized options: --sft.hydra, 1; script.py --help lists all options",
        ),
        (
            ["--sft.steps", "abc"],
            "Error parsing --sft.steps: invalid literal .*; script.py --help lists .*",
        ),
        (
            ["--machine.dtype", "fp8"],
            "invalid choice 'fp8' for argument '--machine.dtype'. Expected one of .*",
        ),
        (
            ["--sft.stepss", "3"],
            r"Unrecognized options: --sft.stepss, 3 \(is it --sft.steps\?\); .*",
        ),
        (["--stepps", "3"], r"Unrecognized options: --stepps, 3 \(is it --sft.steps\?\); .*"),
        (["--max-steps", "3"], r"Unrecognized options: --max-steps, 3 \(is it --sft.steps\?\); .*"),
        (
            ["--learning-rate", "3"],
            r"Unrecognized options: --learning-rate, 3 \(is it --sft.lr\?\); .*",
        ),
        (["--seed", "-1"], "seed must be finite and from 0 to 2.32 - 1, got -1;.*"),
        (["--seed", "4294967296"], "seed must be .* 0 to 2.32 - 1, got 4294967296;.*"),
        (
            ["--data", "a", "--data=b"],
            "--data is given twice, and the last alone would count: name all .*",
        ),
        (
            ["--sft.distinct", "--sft.no-distinct"],
            "--sft.distinct is given twice, and the last alone .*",
        ),
        (
            ["--dpo.loss", "ipo_sum", "--loss", "dpo"],
            "--dpo.loss is given twice, and the last alone .*",
        ),
        (["--out"], "Missing value for argument '--out'. Expected 1 values; .*"),
    ],
)
def test_a_wrong_flag_is_told_in_one_line(flags, says, capsys):
    with pytest.raises(ValueError) as error:
        parsed(SFTCommand, *flags)
    assert re.fullmatch(says, str(error.value)) and capsys.readouterr() == ("", "")


def test_a_path_wider_than_the_terminal_stays_in_one_piece():
    path = f"/home/somebody{'/a-folder' * 20}/rollouts.jsonl"
    with pytest.raises(
        ValueError, match=f"^{path} is named twice, and what is in it would count twice: na"
    ):
        parsed(DPOCommand, "--data", path, path, "--adapter", "x")


@pytest.mark.parametrize(
    "content, says",
    [("seed = ", "not TOML"), (None, "the configuration file cannot be read .No such file")],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, content, says):
    path = tmp_path / "settings.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=f"{path}: {says}"):
        parsed(SFTCommand, "--config", str(path))
    with pytest.raises(ValueError, match="needs the name of a TOML file"):
        parsed(SFTCommand, "--config")


@pytest.mark.parametrize(
    "kind, arguments",
    [
        (SFTCommand, ["--sft.steps", "-1"]),
        (DPOCommand, ["--dpo.steps", "0"]),
        (SFTCommand, ["--sft.lr", "-1"]),
        (SFTCommand, ["--sft.warmup", "-1"]),
        (SFTCommand, ["--sft.clip", "0"]),
        (SFTCommand, ["--lora.rank", "0"]),
        (SFTCommand, ["--machine.pages", "0"]),
        (SFTCommand, ["--nothing", "1"]),
        (SFTCommand, ["--seed", "one"]),
        (DPOCommand, ["--dpo.batch", "0"]),
        (DPOCommand, ["--dpo.nll", "-1"]),
        (DPOCommand, ["--dpo.margin", "-1"]),
        (DPOCommand, ["--dpo.clean", "--dpo.noisy"]),
        (DPOCommand, ["--dpo.margin", "0", "--dpo.dense"]),
        (DPOCommand, ["--dpo.margin", "0", "--dpo.pairs", "efficient"]),
        (DPOCommand, ["--dpo.clean", "--dpo.pairs", "efficient"]),
        (PPOCommand, ["--ppo.kl", "0", "--ppo.kl-target", "0.5"]),
        (DPOCommand, ["--dpo.margin", "0", "--loss", "orpo"]),
        (DPOCommand, ["--dpo.until", "noon"]),
        (CollectCommand, ["--sampling.top-p", "0"]),
        (CollectCommand, ["--sampling.temperature", "-1"]),
        (CollectCommand, ["--sampling.temperatures", "0.5", "-1"]),
        (CollectCommand, ["--policy", "dagger"]),
        (CollectCommand, ["--sampling.temperature", "0.5", "--sampling.temperatures", "1"]),
        (CollectCommand, ["--sampling.temperature", "0", "--sampling.top-p", "0.9"]),
        (CollectCommand, ["--sampling.temperatures", "0", "0", "--sampling.top-p", "0.9"]),
        (CollectCommand, ["--states", "runs/rollouts.jsonl"]),
        (CollectCommand, ["--policy", "dagger", "--states", "x", "--noise", "0.5"]),
        (CollectCommand, ["--policy", "dagger", "--states", "x", "--adapter", "runs/x"]),
        (CollectCommand, ["--noise", "0.5"]),
        (CollectCommand, ["--golden-steps", "every"]),
        (CollectCommand, ["--policy", "expert", "--noise", "2"]),
        (CollectCommand, ["--policy", "expert", "--adapter", "runs/x"]),
        (CollectCommand, ["--first", "-1"]),
        (EvaluateCommand, ["--split", "demos"]),
        (EvaluateCommand, ["--temperature", "-1"]),
        (CollectCommand, ["--policy", "expert", "--sampling.temperature", "0"]),
        (LoopCommand, ["--group", "0"]),
        (LoopCommand, ["--group", "1", "--dpo.pairs", "mixture"]),
        (LoopCommand, ["--group", "1"]),
        (LoopCommand, ["--group", "1", "--learn", "gigpo"]),
        (BaseCommand, ["--vocab", "258"]),
        (BaseCommand, ["--careful", "1"]),
        (PlanCommand, ["--learn", "dpo", "--rm.targets", "values"]),
        (BaseCommand, ["--vocab", "0"]),
    ],
)
def test_a_value_out_of_its_range_is_refused_in_one_line_that_names_an_option(
    kind, arguments, capsys
):
    with pytest.raises(ValueError) as error:
        parsed(kind, *arguments)
    said, capsys_said = str(error.value), capsys.readouterr()
    options = " ".join(word for word in arguments if word.startswith("--"))
    names = re.findall(r"\w+", options.replace("--", "").replace("-", "_"))
    assert any(name in said.replace("-", "_") for name in names), said
    assert ("Unrecognized" in said) == ("--nothing" in arguments)
    assert "\n" not in said and capsys_said == ("", "")


def test_a_temperature_for_each_episode_of_a_group_is_read_from_flags_and_from_a_file(toml):
    flags = parsed(CollectCommand, "--sampling.temperatures", "0.5", "1", "--group", "4")
    assert flags.sampling.temperatures == (0.5, 1.0)
    path = toml("group = 4\n[sampling]\ntemperatures = [0.5, 1]\n")
    assert parsed(CollectCommand, "--config", path) == flags


@pytest.mark.parametrize("kind", [SFTCommand, DPOCommand, GRPOCommand, PPOCommand, RMCommand])
def test_data_without_a_file_is_refused(kind):
    with pytest.raises(ValueError, match="data names no file: give one or more"):
        kind(data=())


@pytest.mark.parametrize("kind", [DPOCommand, GRPOCommand, PPOCommand, RMCommand])
def test_a_file_of_episodes_that_are_compared_is_named_once(kind, tmp_path):
    """What is imitated may be repeated: there a file that is named twice has twice the weight."""
    with pytest.raises(ValueError, match="a.jsonl is named twice"):
        kind(data=(tmp_path / "a.jsonl", tmp_path / "b" / ".." / "a.jsonl"))
    if issubclass(kind, PairsCommand):
        with pytest.raises(ValueError, match="a.jsonl is named twice"):
            kind(data=(tmp_path / "a.jsonl",), failures=(tmp_path / "a.jsonl",))


def test_a_folder_is_no_configuration_file(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path}: the configuration file cannot be read"):
        toml_flags(tmp_path)


def test_options_that_nobody_reads_are_named_alone():
    with pytest.raises(ValueError, match="export trains nothing: leave out track, rehearse$"):
        DPOCommand(export="trl", track="tensorboard", dpo=DPO(nll=1.0, rehearse=3))
    with pytest.raises(ValueError, match="export plays nothing: leave out split, episodes$"):
        EvaluateCommand(export="merged", split="validation", episodes=3)


def test_settings_can_be_written_down_and_compared():
    config = parsed(DPOCommand, "--dpo.beta", "0.2")
    assert asdict(config)["dpo"]["beta"] == 0.2 and asdict(config)["dpo"]["gamma"] is None
    assert config == parsed(DPOCommand, "--dpo.beta", "0.2") != parsed(DPOCommand)


@pytest.mark.parametrize(
    "error, code, says",
    [
        (ValueError("what and why"), 2, "error: what and why\n"),
        (
            torch.OutOfMemoryError("CUDA out of memory."),
            2,
            "error: CUDA out of memory. (train.py plan tells",
        ),
        (KeyboardInterrupt("truly"), 130, "stopped; truly\n"),
        (KeyboardInterrupt(), 130, "stopped; the same command goes on"),
    ],
)
def test_an_expected_error_is_one_line_and_an_exit_code(error, code, says, capsys):
    def run(arguments):
        raise error

    with pytest.raises(SystemExit) as stop:
        main(run)
    text = capsys.readouterr().err
    assert stop.value.code == code and text.startswith(says) and text.count("\n") == 1


@dataclass
class CommandOfOne:
    """Whose help is shorter than what Python holds back before it writes."""

    steps: int = 1
    "how many"


@pytest.mark.parametrize("flags", [["--help"], []])
def test_who_reads_the_first_lines_alone_is_told_no_more(flags, monkeypatch, capsys):
    reads, writes = os.pipe()
    monkeypatch.setattr(sys, "argv", ["train.py", *flags])
    with os.fdopen(writes, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        os.close(reads)
        with pytest.raises(SystemExit) as stop:
            main(lambda arguments: parse(CommandOfOne, arguments, "", "") and print("short"))
    assert stop.value.code == 141 and capsys.readouterr().err == ""


def test_a_file_in_another_encoding_is_named(tmp_path):
    (tmp_path / "latin.toml").write_bytes('model = "café"'.encode("latin-1"))
    with pytest.raises(ValueError, match="latin.toml: not TOML: .*utf-8"):
        toml_flags(tmp_path / "latin.toml")
