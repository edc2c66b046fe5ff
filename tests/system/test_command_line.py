"""A TOML file gives defaults, flags win, and what does not fit is said at once, in a line."""

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from minidpo.algorithms import ALGORITHMS
from minidpo.commands import BY_HAND, BrowseCommand, collect, evaluate, train
from minidpo.commands.algorithms import combined
from minidpo.commands.by_hand import SFTCommand
from minidpo.commands.play import CollectCommand
from minidpo.results.evaluate import EvaluateCommand, parse_adapters
from minidpo.system.command_line import changed_flags, main, parse, toml_flags

PAGES = {name: combined(page.options) for name, page in ALGORITHMS.items()}
KINDS = {name: kind for name, (kind, _) in BY_HAND.items() if name not in ("average", "push")}
KINDS |= {"collect": CollectCommand, "evaluate": EvaluateCommand, **PAGES}


def parsed(kind, *arguments):
    return parse(kind, list(arguments), "script.py", "What it does.")


@pytest.fixture
def toml(tmp_path):
    def write(text):
        path = tmp_path / "settings.toml"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize("name", KINDS)
def test_without_arguments_a_command_is_its_defaults_and_every_option_has_help(
    name, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "60")  # one column
    assert parsed(KINDS[name]) == KINDS[name]()
    with pytest.raises(SystemExit) as stop:
        parsed(KINDS[name], "--help-all")
    assert stop.value.code == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "What it does." in text and "--config FILE" in text
    _, *options = re.split(r"^\W? (?=--[a-z])", text, flags=re.MULTILINE)
    assert len(options) > 5
    for option in options:
        words = re.sub(r"\(default:.*", "", option, flags=re.DOTALL).split()
        assert sum(word.strip(".,;:").isalpha() and word.islower() for word in words) > 1, option


def told(command, arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        command(arguments)
    assert stop.value.code == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)


@pytest.mark.parametrize(
    "command, arguments",
    [
        *((train, [name]) for name in [*ALGORITHMS, *BY_HAND]),
        (collect, []),
        (evaluate, []),
        (evaluate, ["--url", "u"]),
        (evaluate, ["--serve", "1"]),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else part.__name__,
)
def test_help_is_one_screen_of_options_that_help_all_explains_too(
    command, arguments, capsys, monkeypatch
):
    """A title and at most 24 lines, each no wider than the terminal, and each option with its help."""
    monkeypatch.setenv("COLUMNS", "100")
    lines = told(command, [*arguments, "--help"], capsys).splitlines()
    assert len(lines) <= 25 and "--help-all" in lines[-1] and "--config" in lines[-1]
    options = [line.strip() for line in lines if line.startswith("  --")]
    everything = told(command, [*arguments, "--help-all"], capsys)
    for option in options:
        flag, text = re.fullmatch(r"(--\S+).*?  +(\S.*)", option).groups()
        assert len(option) < 99 and len(text.split()) > 1
        assert re.search(rf"{re.escape(flag)}(?![\w.-])", everything), flag


def test_what_help_leaves_out_is_an_option_all_the_same(capsys):
    kind = PAGES["ef-dpo"]
    common = told(lambda flags: parsed(kind, *flags), ["--help"], capsys)
    everything = told(lambda flags: parsed(kind, *flags), ["--help-all"], capsys)
    for option in ("--patience", "--sft.clip", "--machine.recompute"):
        assert option not in common and option in everything
    options = parsed(kind, "--patience", "3", "--sft.clip", "0.5", "--machine.recompute")
    assert (options.patience, options.sft.clip, options.machine.recompute) == (3, 0.5, True)


def test_a_path_that_begins_with_a_tilde_begins_at_home_wherever_it_is_given(
    tmp_path, toml, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    text = 'out = "~/x"\ndata = ["~/a", "b~"]\nmodel = "~/m"'
    in_file = parsed(SFTCommand, "--config", toml(text))
    flags = ["--out=~/x", "--data", "~/a", "b~", "--model", "~/m"]
    assert in_file == parsed(SFTCommand, *flags, "--adapter", "None")
    assert (in_file.out, in_file.data) == (tmp_path / "x", (tmp_path / "a", Path("b~")))
    assert in_file.model == str(tmp_path / "m")
    assert parsed(SFTCommand, "--model", "owner/na~me").model == "owner/na~me"
    (tmp_path / "more.toml").write_text('machine.quantize = "nf4"\nmachine.cache = "~/c"')
    nested = parsed(EvaluateCommand, "--config=~/more.toml", "--adapters", "a=~/r")
    assert nested.machine.cache == tmp_path / "c"
    assert parse_adapters(nested.adapters) == {"a": tmp_path / "r"}
    with pytest.raises(ValueError, match="twice"):
        parsed(SFTCommand, "--data", "~/a", str(tmp_path / "a"))


@pytest.mark.parametrize("name", PAGES)
def test_so_it_does_for_each_algorithm(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    given = parsed(PAGES[name], "--out=~/x", "--reuse=~/y", "--model=~/m")
    assert (given.out, given.reuse, given.model) == (
        tmp_path / "x",
        tmp_path / "y",
        str(tmp_path / "m"),
    )


@pytest.mark.parametrize("name", ["ef-dpo", "r3", "averaged-eto"])
def test_the_flags_of_settings_are_read_back_as_these(name):
    given = ["--seed", "3", "--sft.lr", "0.5", "--machine.recompute", "--out", "runs/x y"]
    given += ["--sampling.temperatures", "0.5", "1", "--lora.targets", "q_proj"]
    options = parsed(PAGES[name], *given)
    flags = changed_flags(PAGES[name], options)
    assert parsed(PAGES[name], *flags) == options != parsed(PAGES[name])
    assert len([flag for flag in flags if flag.startswith("--")]) == 6


def test_the_files_values_come_first_and_flags_win(toml):
    path = toml(
        'seed = 3\nout = "runs/x"\n[sft]\nsteps = 7\nlr = 0.5\n[lora]\nrank = 4\n'
        'targets = ["q_proj", "v_proj"]\n[machine]\nrecompute = true\n'
    )
    config = parsed(SFTCommand, "--config", path)
    assert (config.seed, config.out, config.sft.steps, config.sft.lr) == (3, Path("runs/x"), 7, 0.5)
    assert config.lora.targets == ("q_proj", "v_proj") and config.machine.recompute is True
    for arguments in (["--config", path, "--seed", "9"], ["--seed", "9", f"--config={path}"]):
        changes = ["--lora.targets", "k_proj", "--machine.no-recompute"]
        config = parsed(SFTCommand, *arguments, *changes)
        assert (config.seed, config.sft.lr, config.lora.targets) == (9, 0.5, ("k_proj",))
        assert config.machine.recompute is False


def test_file_and_flags_are_judged_together(toml):
    """What one of the two asks for may need what the other says."""
    path = toml("[machine]\noffload = true\n")
    assert parsed(SFTCommand, "--config", path, "--machine.recompute").machine.offload
    path = toml('url = "u"\ngoal = "g"\n')
    assert parsed(BrowseCommand, "--config", path, "--steps", "3").goal == "g"


@pytest.mark.parametrize("text", ["stepps = 3\n", 'steps = "x"\n', "steps = 3\n"])
def test_a_file_is_named_in_the_error(toml, text):
    path = toml(text)
    with pytest.raises(ValueError) as error:
        parsed(BrowseCommand, "--url", "u", "--config", path)
    assert str(error.value).startswith(path) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "flags, named",
    [
        (["--sft.steps", "abc"], "--sft.steps"),
        (["--machine.dtype", "fp8"], "'fp8'"),
        (["--sft.stepss", "3"], "is it --sft.steps?"),
        (["--max-steps", "3"], "is it --sft.steps?"),
        (["--seed", "-1"], "seed"),
        (["--data", "a", "--data=b"], "--data is given twice"),
        (["--machine.recompute", "--machine.no-recompute"], "given twice"),
        (["--config"], "TOML"),
        (["--data", f"/home{'/a-folder' * 20}/x", f"/home{'/a-folder' * 20}/x"], "--data"),
    ],
)
def test_a_wrong_flag_is_told_in_one_line(flags, named, capsys):
    with pytest.raises(ValueError) as error:
        parsed(SFTCommand, *flags)
    assert named in str(error.value) and "\n" not in str(error.value)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("content", [b"seed = ", "model = 'café'".encode("latin-1")])
def test_a_file_that_cannot_be_read_is_named(tmp_path, content):
    path = tmp_path / "settings.toml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=str(path)):
        toml_flags(path)


@pytest.mark.parametrize(
    "error, code, named",
    [
        (ValueError("what and why"), 2, "what and why"),
        (torch.OutOfMemoryError("CUDA out of memory."), 2, "plan"),
        (KeyboardInterrupt("truly"), 130, "truly"),
        (KeyboardInterrupt(), 130, "same command"),
    ],
)
def test_an_expected_error_is_one_line_and_an_exit_code(error, code, named, capsys):
    def run(arguments):
        raise error

    with pytest.raises(SystemExit) as stop:
        main(run)
    text = capsys.readouterr().err
    assert stop.value.code == code and named in text and text.count("\n") == 1


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
