"""Stages: done once, known by what determined them, and never taken for others."""

import fcntl
import shutil
from contextlib import contextmanager
from dataclasses import fields, replace
from unittest.mock import Mock

import pytest
import shelf
import tiny

from minidpo import experiment
from minidpo.algorithms.ef_dpo import EFDPO, ef_dpo
from minidpo.data.episodes import Writer
from minidpo.data.pairs import Pair
from minidpo.experiment import Experiment, content
from minidpo.learning.dpo import DPO
from minidpo.learning.sft import SFT
from minidpo.memory import lora
from minidpo.system.files import read_json
from minidpo.system.run_folder import RunFolder

SHORT = SFT(steps=2, batch=2, lr=1e-3, save_every=1)
SMALL = EFDPO(
    demonstrations=2, instances=3, group=4, sft=SHORT, dpo=DPO(steps=2, batch=2, save_every=1)
)


@pytest.fixture
def begin(shelf_base):
    """begin(folder, **options): an experiment in this folder."""

    def make(folder, **changes):
        return Experiment(shelf.options(shelf_base, folder, **changes), shelf.WORLD, ["open-one"])

    return make


def written(text="done"):
    """What makes a stage of one file, and how often it was asked to."""
    calls = []

    def make(path):
        calls.append(path.name)
        path.write_text(text)

    return make, calls


def never(path):
    raise AssertionError(f"{path} is made again")


# ---- stages ----


def test_stages_are_numbered_in_the_order_of_calls_and_done_once(begin, tmp_path):
    make, calls = written()
    for _ in range(2):
        with begin(tmp_path) as run:
            for name in ("play", "dpo", "held-out/dpo"):
                run.stage(name, {}, {}, make, ".txt")
            run.stage("play", {}, {}, make, ".txt")
    assert calls == ["01-play.txt", "02-dpo.txt", "dpo.txt", "03-play.txt"]
    assert read_json(tmp_path / "02-dpo.json")["done"]


@pytest.mark.parametrize(
    "settings, inputs, named",
    [({"lr": 2}, {"episodes": "a"}, "lr 1, now 2"), ({"lr": 1}, {"episodes": "b"}, "episodes")],
)
def test_a_stage_of_another_key_is_refused_by_its_name_and_kept(
    begin, tmp_path, settings, inputs, named
):
    make, _ = written()
    with begin(tmp_path) as run:
        path = run.stage("sft", {"lr": 1}, {"episodes": "a"}, make, ".txt")
    with begin(tmp_path) as run, pytest.raises(ValueError, match="01-sft") as error:
        run.stage("sft", settings, inputs, never, ".txt")
    assert named in str(error.value) and "--reuse" in str(error.value)
    assert "\n" not in str(error.value) and path.read_text() == "done"


def test_a_stage_that_failed_is_made_again_where_it_was(begin, tmp_path):
    def half(path):
        path.write_text("half")
        raise KeyboardInterrupt

    make, calls = written()
    with begin(tmp_path) as run, pytest.raises(KeyboardInterrupt):
        run.stage("sft", {}, {}, half, ".txt")
    assert not read_json(tmp_path / "01-sft.json")["done"]
    with begin(tmp_path) as run:
        assert run.stage("sft", {}, {}, make, ".txt").read_text() == "done"
    assert calls == ["01-sft.txt"]


def test_two_experiments_do_not_write_to_one_folder(begin, tmp_path, monkeypatch):
    # within a process the kernel refuses nothing
    monkeypatch.setattr(fcntl, "lockf", Mock(side_effect=BlockingIOError))
    with pytest.raises(ValueError, match=str(tmp_path)), begin(tmp_path):
        pass


# ---- taken from another experiment ----


@pytest.mark.parametrize("suffix", ["", ".words.json"])
def test_a_finished_stage_of_the_same_key_is_taken_whatever_its_number(begin, tmp_path, suffix):
    def make(path):
        if suffix:
            path.write_text("{}")
        else:
            path.mkdir()
            (path / "weights").write_text("{}")

    with begin(tmp_path / "old") as run:
        run.stage("other", {}, {}, written()[0])
        old = run.stage("mine", {"lr": 1}, {"data": "x"}, make, suffix)
    with begin(tmp_path / "new", reuse=tmp_path / "old") as run:
        new = run.stage("mine", {"lr": 1}, {"data": "x"}, never, suffix)
    assert new.name == f"01-mine{suffix}"
    made = [path if suffix else path / "weights" for path in (old, new)]
    assert made[0].read_bytes() == made[1].read_bytes()


def test_no_stage_of_another_key_or_unfinished_is_taken(begin, tmp_path):
    with begin(tmp_path / "old") as run:
        run.stage("mine", {"lr": 1}, {"data": "x"}, written("old")[0])
        with pytest.raises(AssertionError):
            run.stage("mine", {"lr": 3}, {"data": "x"}, never)
    keys = [({"lr": 2}, {"data": "x"}), ({"lr": 1}, {"data": "y"}), ({"lr": 3}, {"data": "x"})]
    for n, key in enumerate(keys):
        with begin(tmp_path / str(n), reuse=tmp_path / "old") as run:
            assert run.stage("mine", *key, written("new")[0]).read_text() == "new"
    with begin(tmp_path / "seed", reuse=tmp_path / "old", seed=2) as run:
        assert run.stage("mine", {"lr": 1}, {"data": "x"}, written("new")[0]).read_text() == "new"


def test_stages_of_another_model_are_not_taken_though_it_has_the_same_name(
    begin, shelf_base, tmp_path
):
    moved = shutil.copytree(shelf_base, tmp_path / "base")
    with begin(tmp_path / "old", model=str(moved)) as run:
        run.stage("mine", {}, {}, written("old")[0])
    tokenizer = moved / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    with begin(tmp_path / "new", model=str(moved), reuse=tmp_path / "old") as run:
        assert run.stage("mine", {}, {}, written("new")[0]).read_text() == "new"
    with begin(tmp_path / "old", model=str(moved)) as run, pytest.raises(ValueError, match="base"):
        run.stage("mine", {}, {}, never)


def test_a_folder_without_stages_is_no_experiment(begin, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    for folder in ("other", "nowhere"):
        with pytest.raises(ValueError, match=folder), begin(tmp_path, reuse=tmp_path / folder):
            pass


# ---- what determines a stage ----


def test_an_episodes_content_is_all_of_it_but_its_cost_and_its_players_place():
    episode = tiny.episode(policy="runs/old/adapter@12ab", shots=("a",))
    moved = replace(episode, policy="runs/new/adapter@12ab", cost=object.__new__(object))
    assert content([moved]) == content([episode])
    others = {
        "policy": "runs/old/adapter@12ac",
        "turns": (replace(episode.turns[0], logps=(-1.0,)),),
        "sampling": {"temperature": 0.5},
        "shots": ("b",),
        "reward": 0.5,
    }
    for f in fields(episode):
        if f.name != "cost":
            value = others.get(f.name, f"{getattr(episode, f.name)}1")
            assert content([replace(episode, **{f.name: value})]) != content([episode]), f.name
    assert content([episode, moved]) != content([episode])


def test_a_pairs_content_is_both_sides_and_their_source():
    chosen, rejected = tiny.episode(), tiny.episode("b", "failed", index=1)
    pairs = [
        Pair(chosen, rejected),
        Pair(chosen, rejected, "expert"),
        Pair(replace(chosen, index=9), rejected),
        Pair(chosen, replace(rejected, index=9)),
    ]
    assert len({content([pair]) for pair in pairs}) == 4
    assert content(pairs) != content(pairs[::-1])


# ---- instances ----


def test_rounds_seeds_and_splits_share_no_instance(begin, tmp_path):
    met = []
    for seed in (1, 2, 100):
        with begin(tmp_path / str(seed), seed=seed) as run:
            met += run.instances(700) + run.instances({"open-one": 300})
            with pytest.raises(ValueError, match="open-one"):
                run.instances(1)  # it would be the first of the next seed
            met += [e.instance for e in run.demonstrations(1) + run.demonstrations(1)]
    assert len(met) == 3 * 1002 == len(set(met))
    kept = {
        ("open-one", seed) for split in ("validation", "test") for seed in run.world.seeds[split]
    }
    assert not kept & set(met)
    with pytest.raises(ValueError, match="101"), begin(tmp_path / "x", seed=101):
        pass


def test_where_there_are_few_instances_each_seed_goes_round_all_of_them(
    begin, tmp_path, monkeypatch
):
    few = type("Few", (type(shelf.WORLD),), {"instances": lambda self, task, split: range(7)})()
    first = {}
    for seed in (1, 50):
        with begin(tmp_path / str(seed), seed=seed) as run:
            monkeypatch.setattr(run, "world", few)
            first[seed], second, third = (run.instances({"open-one": 3}) for _ in range(3))
            assert len({*first[seed], *second}) == 6
            assert len({*first[seed], *second, *third}) == 7
            assert len({*run.instances({"open-one": 99})}) == 7  # once each
    assert first[1] != first[50]


def test_examples_are_shown_before_each_episode_and_are_no_demonstrations(begin, tmp_path):
    with begin(tmp_path, shots=2) as run:
        shown = {turn for e in run.examples for turn in e.said}
        demonstrations = run.demonstrations(3)
    for episode in demonstrations:
        assert len(episode.shots) == 4 and set(episode.shots[1::2]) <= shown
        assert episode.instance not in {e.instance for e in run.examples}


# ---- learning ----


def test_few_instances_are_told_and_the_policy_stays_as_it_is(begin, tmp_path, capsys):
    pairs = [
        Pair(tiny.episode(seed=n), tiny.episode("b", "failed", seed=n, index=1)) for n in range(3)
    ]
    with begin(tmp_path, least_instances=4) as run:
        for few in (pairs, []):
            assert run.dpo(run.base, few, DPO()) is run.base
            assert f"{len(few)} pairs of {len(few)} instances" in capsys.readouterr().out
    assert not list(tmp_path.glob("*dpo*"))


def test_policy_gradients_read_samples_of_the_policy_itself(begin, tmp_path):
    sampling = replace(shelf.options("", tmp_path).sampling, temperature=0.5)
    with begin(tmp_path, sampling=sampling) as run, pytest.raises(ValueError, match="temperature"):
        run.play(run.base, run.instances(1), on_policy=True)


class Killed(BaseException):
    pass


@contextmanager
def killed(monkeypatch, owner, name, at):
    """Inside, the `at`-th call of this function ends everything."""
    real, calls = getattr(owner, name), []

    def deadly(*arguments, **options):
        calls.append(1)
        if len(calls) == at:
            raise Killed
        return real(*arguments, **options)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(owner, name, deadly)
        yield


def left(begin, folder):
    """What EF-DPO leaves: episodes, adapters and logs without what a clock or the memory says."""
    with begin(folder) as run:
        for policy in ef_dpo(run, SMALL):
            run.validate(policy)
    stages = ("02-sft", "05-dpo")
    adapters = [(folder / name / "adapter" / lora.WEIGHTS).read_bytes() for name in stages]
    stages = ("01-demonstrations", "03-validate", "04-play", "06-validate")
    episodes = [experiment.read(folder / f"{name}.jsonl") for name in stages]
    return adapters, content(episodes)


def test_killed_anywhere_and_started_again_the_stages_are_the_same(begin, tmp_path, monkeypatch):
    whole = left(begin, tmp_path / "whole")
    moments = [
        (Writer, "add", 1),  # of the experts' episodes
        (RunFolder, "save_state", 1),
        (RunFolder, "finish", 1),
        (Writer, "add", 6),  # of the agent's
        (experiment, "content", 4),  # between stages
        (RunFolder, "log", 2),
        (experiment, "write_json", 2),  # a stage is done, and its note does not say so
    ]
    for moment in moments:
        with killed(monkeypatch, *moment):
            left(begin, tmp_path / "killed")
    assert left(begin, tmp_path / "killed") == whole
