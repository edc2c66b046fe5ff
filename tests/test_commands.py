"""The commands: a page from the table or a file, each learner by hand, and what they refuse in one line."""

import json
import shutil

import pytest

from minidpo.commands import collect, evaluate, train
from minidpo.commands.algorithms import load_page, parse_page
from minidpo.memory import lora
from minidpo.system.files import read_json
from minidpo.system.result_file import read_result

PAGE = "docs/own_page.py:helped"
HERE = ["--world", "toy", "--machine.device", "cpu", "--machine.dtype", "float32"]
SHORT = ["--steps", "2", "--batch", "2", "--lr", "1e-3"]


def of(group, flags=SHORT):
    """These flags of a group of options."""
    return [flag.replace("--", f"--{group}.") for flag in flags]


def experiment(base, out):
    """The flags of the smallest experiment."""
    small = {"tasks": "open-one", "validation": 2, "episodes": 2, "sampled": 1, "patience": 9}
    small |= {"demonstrations": 2, "instances": 3, "group": 4, "least-instances": 1}
    flags = [word for name, value in small.items() for word in (f"--{name}", str(value))]
    flags += ["--model", str(base), "--out", str(out), "--sampling.max-new-tokens", "40"]
    return [*HERE, *flags, *of("sft"), *of("dpo")]


def refused(*arguments):
    """The one line in which `train` refuses them."""
    with pytest.raises(ValueError) as error:
        train(list(arguments))
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- pages ----


def test_a_page_of_ones_own_runs_from_its_file_and_its_command_runs_it_again(
    shelf_base, tmp_path, monkeypatch
):
    result = train(["run", PAGE, *experiment(shelf_base, tmp_path)])
    assert result["algorithm"] == "helped" and list(result["validation"]) == ["sft", "dpo"]
    assert (tmp_path / "adapter" / lora.CONFIG).is_file()
    settings = read_json(tmp_path / "config.json")
    assert settings["instances"] == 3 and settings["dpo"]["steps"] == 2
    words = read_result(tmp_path / "result.json")["command"].split()
    assert words[:4] == ["python", "train.py", "run", PAGE]
    page = load_page(PAGE)
    monkeypatch.setattr("minidpo.experiment.model_policy", lambda *_, **__: pytest.fail("played"))
    assert train(words[2:])["figures"] == result["figures"]
    options, setup = parse_page(page, words[4:], "train.py run")
    assert (options.sft.steps, options.dpo.lr, setup.machine.dtype) == (2, 1e-3, "float32")


def test_a_page_from_the_table_runs_with_a_files_defaults_and_flags_win(shelf_base, tmp_path):
    config = tmp_path / "mine.toml"
    config.write_text("rounds = 2\ngroup = 9\n[dpo]\nbeta = 0.5\n")
    flags = experiment(shelf_base, tmp_path / "run")
    result = train(["ef-dpo", "--config", str(config), *flags])
    settings = read_json(tmp_path / "run" / "config.json")
    assert (settings["rounds"], settings["group"], settings["dpo"]["beta"]) == (2, 4, 0.5)
    assert result["kept"] in result["agents"]


def test_a_plan_has_a_line_for_each_learner_of_a_page(capsys):
    train(["plan", "rlhf", *HERE, "--model", "minidpo/nano"])
    said = capsys.readouterr().out
    assert all(name in said for name in ("sft", "reward_model", "ppo"))


@pytest.mark.parametrize("arguments", [["ef-dop"], ["plan", "ef-dop"], ["plan"]])
def test_an_unknown_algorithm_is_refused_with_the_nearest_name(arguments):
    said = refused(*arguments)
    assert "ef-dpo" in said and ("'ef-dop'" in said or arguments == ["plan"])


def test_an_option_of_another_page_is_refused_by_the_name_of_that_page():
    said = refused("ef-dpo", "--continuations", "3")
    assert "--continuations" in said and "r3" in said


@pytest.mark.parametrize("text, named", [("[dpo]\nrate = 1\n", "rate"), ("rounds =", "mine.toml")])
def test_a_file_with_an_unknown_key_or_none_that_can_be_read_is_named(tmp_path, text, named):
    (tmp_path / "mine.toml").write_text(text)
    said = refused("ef-dpo", "--config", str(tmp_path / "mine.toml"))
    assert "mine.toml" in said and named in said


def test_reuse_of_a_folder_that_is_no_experiment_is_refused(shelf_base, tmp_path):
    flags = experiment(shelf_base, tmp_path / "run")
    assert str(tmp_path) in refused("ef-dpo", *flags, "--reuse", str(tmp_path))


BODY = "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass O:\n    {}\n"


@pytest.mark.parametrize(
    "place, text, named",
    [
        ("nowhere.py:mine", "", "nowhere.py"),
        ("mine.py:min", "def mine(run, o):\n    yield", "mine"),
        ("mine.py:mine", "import nothing_of_this_name", "nothing_of_this_name"),
        ("mine.py:mine", "def mine(run, o):\n    yield x +", "SyntaxError"),
        ("mine.py:mine", "raise SystemExit('no')", "mine.py"),
        ("mine.py:mine", "def mine(run, o: int):\n    yield", "dataclass"),
        ("mine.py:mine", "def mine(run, o: Unknown):\n    yield", "Unknown"),
        ("mine.py:mine", BODY.format("n: int = 1") + "def mine(o: O):\n    yield", "dataclass"),
        ("mine.py:mine", BODY.format("seed: int = 1") + "def mine(run, o: O):\n    yield", "seed"),
        ("mine.py:mine", BODY.format("n: int") + "def mine(run, o: O):\n    yield", "n"),
    ],
)
def test_a_page_that_cannot_be_used_is_refused_in_one_line(
    tmp_path, monkeypatch, place, text, named
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(text)
    assert named in refused("run", place)


def test_a_run_without_a_page_is_refused():
    assert "FILE.py:FUNCTION" in refused("run") == refused("run", "--seed", "2")


# ---- by hand ----


@pytest.fixture(scope="module")
def made(shelf_base, tmp_path_factory):
    """Demonstrations, an adapter of them, and its rollouts."""
    out = tmp_path_factory.mktemp("by-hand")
    common = [*HERE, "--tasks", "open-one", "--sampling.max-new-tokens", "40"]
    shown = ["--policy", "expert", "--split", "demos", "--instances", "3"]
    collect([*HERE, "--tasks", "open-one", *shown, "--out", str(out / "demos.jsonl")])
    hand(shelf_base, out, "sft", "--data", str(out / "demos.jsonl"), "--lora.rank", "4", *of("sft"))
    played = ["--model", str(shelf_base), "--adapter", str(out / "sft" / "adapter")]
    size = ["--instances", "4", "--group", "4", "--out", str(out / "rollouts.jsonl")]
    assert collect([*common, *played, *size])["episodes"] == 16
    return out


def hand(base, out, name, *flags):
    return train([name, "--model", str(base), "--out", str(out / name), *HERE, *flags])


def learn(base, made, name, *flags):
    given = ["--adapter", str(made / "sft" / "adapter"), "--data", str(made / "rollouts.jsonl")]
    return hand(base, made, name, *given, *flags)


def test_the_circle_by_hand(shelf_base, made):
    adapter = learn(shelf_base, made, "dpo", *of("dpo"))
    assert adapter == made / "dpo" / "adapter"
    assert (made / "dpo" / "pairs.jsonl").is_file()
    weights = (adapter / lora.WEIGHTS).read_bytes()
    assert learn(shelf_base, made, "dpo", *of("dpo")) == adapter  # it is finished
    assert (adapter / lora.WEIGHTS).read_bytes() == weights
    adapters = [f"{name}={made / name / 'adapter'}" for name in ("sft", "dpo")]
    flags = ["--model", str(shelf_base), "--tasks", "open-one", "--max-new-tokens", "40"]
    flags += ["--episodes", "3", "--out", str(made / "evaluation"), "--adapters", *adapters]
    result = evaluate([*HERE, *flags])
    assert set(result["agents"]) == {"sft", "dpo"}


@pytest.mark.parametrize("name, group", [("grpo", "gradient"), ("ppo", "ppo"), ("rm", "rm")])
def test_the_other_learners_by_hand(shelf_base, made, name, group):
    adapter = learn(shelf_base, made, name, *of(group))
    assert lora.read_config(adapter) == lora.read_config(made / "sft" / "adapter")


@pytest.mark.parametrize(
    "name, part", [("model.safetensors", "weights"), ("tokenizer.json", "tokenizer")]
)
def test_a_run_is_not_done_where_its_model_is_another_now(shelf_base, made, tmp_path, name, part):
    """A moved model is the same; in place of a file of other content, nothing is done already."""
    base = tmp_path / "base"
    shutil.copytree(shelf_base, base)
    shutil.copytree(made / "sft", tmp_path / "sft")
    flags = ["--data", str(made / "demos.jsonl"), "--lora.rank", "4", *of("sft")]
    before = (tmp_path / "sft" / "config.json").read_bytes()
    for _ in range(2):  # the second time its hashes are kept
        assert hand(base, tmp_path, "sft", *flags) == tmp_path / "sft" / "adapter"
    content = bytearray((base / name).read_bytes())
    content[-1] ^= 1
    (base / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"sft.* {part}.*--out"):
        hand(base, tmp_path, "sft", *flags)
    assert (tmp_path / "sft" / "config.json").read_bytes() == before


def test_a_mean_by_hand_is_kept_and_overwrites_nothing(made):
    adapters = [str(made / name / "adapter") for name in ("sft", "sft")]
    flags = ["--adapters", *adapters, "--out"]
    mean = train(["average", *flags, str(made / "mean")])
    assert (mean / lora.CONFIG).is_file()
    assert "adapter" in refused("average", *flags, str(made / "sft"))
    assert "weights" in refused("average", "--weights", "1", *flags, str(made / "other"))


@pytest.mark.parametrize("read", ["adapter", "data", "golden"])
def test_nothing_that_is_read_is_overwritten(shelf_base, made, tmp_path, read):
    out = tmp_path / "dpo"
    shutil.copytree(made / "sft" / "adapter", out / "adapter")
    shutil.copy(made / "rollouts.jsonl", out / "metrics.jsonl")
    given = {"adapter": made / "sft" / "adapter", "data": made / "rollouts.jsonl"}
    given[read] = out / ("adapter" if read == "adapter" else "metrics.jsonl")
    flags = [word for name, path in given.items() for word in (f"--{name}", str(path))]
    pairs = ["--pairs", "contrast"] if read == "golden" else []
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=str(given[read])):
        hand(shelf_base, tmp_path, "dpo", *flags, *pairs)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_what_makes_no_sense_together_is_refused(shelf_base, made):
    data = ["--data", str(made / "rollouts.jsonl")]
    for flags, named in [
        (["dpo", *data, *data[1:]], "twice"),
        (["dpo", *data, "--pairs", "contrast"], "golden"),
        (["dpo", *data, "--pairs", "unpaired"], "kto"),
        (["dpo", *data, "--dpo.loss", "dmpo", "--dpo.until", "token"], "dmpo"),
        (["dpo", *data, "--explain", "--export"], "explain"),
        (["average", "--adapters", str(made / "sft" / "adapter")], "two"),
    ]:
        assert named in refused(*flags), flags
    with pytest.raises(ValueError, match="examples"):
        collect(["--shots", "1"])
    with pytest.raises(ValueError, match="expert"):
        collect(["--policy", "expert", "--adapter", str(made)])


def test_pairs_are_exported_as_rows_of_conversations_and_trained_on(shelf_base, made, tmp_path):
    given = ["--adapter", str(made / "sft" / "adapter"), "--data"]
    hand(shelf_base, tmp_path, "dpo", *given, str(made / "rollouts.jsonl"), "--export")
    path = tmp_path / "dpo" / "pairs-trl.jsonl"
    row = json.loads(path.read_text().splitlines()[0])
    assert row["prompt"][0]["role"] == "system" and row["chosen"] != row["rejected"]
    trained = hand(shelf_base, tmp_path / "again", "dpo", *given, str(path), *of("dpo"))
    assert (trained / lora.CONFIG).is_file()


def test_rows_with_a_label_are_learned_from_one_by_one(shelf_base, made, tmp_path):
    """KTO's rows. With the same file pairs cannot be trained, and nothing of episodes applies."""
    said = {True: "yes", False: "no"}
    path = tmp_path / "judged.jsonl"
    with open(path, "w") as file:
        for n, label in enumerate((True, False, True)):
            prompt = [{"role": "user", "content": f"page {n}"}]
            completion = [{"role": "assistant", "content": said[label]}]
            row = {"prompt": prompt, "completion": completion, "label": label}
            file.write(json.dumps(row) + "\n")
    given = ["--adapter", str(made / "sft" / "adapter"), "--data", str(path)]
    one_by_one = [*given, "--pairs", "unpaired", "--dpo.loss", "kto", *of("dpo")]
    trained = hand(shelf_base, tmp_path, "dpo", *one_by_one)
    assert (trained / lora.CONFIG).is_file()
    records = (tmp_path / "dpo" / "pairs.jsonl").read_text().splitlines()
    assert all(f"{path}, line 2" in record for record in records) and len(records) == 2
    for flags in (given, [*one_by_one, "--export"]):
        with pytest.raises(ValueError, match="label|export"):
            hand(shelf_base, tmp_path / "other", "dpo", *flags)
