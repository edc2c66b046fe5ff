"""The runner: what a run leaves is the best on validation, and never worse than what it began with."""

import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import shelf
import torch
from hypothesis import given
from hypothesis import strategies as st

from envs import panel
from minidpo.algorithms.ef_dpo import EFDPO, ef_dpo
from minidpo.data.pairs import NothingToLearn
from minidpo.experiment import Policy
from minidpo.learning.dpo import DPO
from minidpo.learning.sft import SFT
from minidpo.memory import loading, lora
from minidpo.memory.lora import LoRAConfig
from minidpo.runner import index_of_best, run_algorithm, should_stop, validated
from minidpo.system.result_file import read_result

rates = st.lists(st.integers(0, 5).map(lambda n: n / 5), min_size=1)


@given(rates)
def test_the_policy_that_is_kept_is_the_first_of_the_best(success):
    best = index_of_best(success)
    assert success[best] == max(success) and max(success[:best], default=-1) < success[best]


@given(rates, st.integers(1, 4))
def test_it_stops_when_the_last_policies_are_no_better_than_what_was_before_them(success, patience):
    before, last = success[:-patience], success[-patience:]
    assert should_stop(success, patience) == bool(before and max(before) >= max(last))


# ---- what a page yields ----


def policies(*success, ends=None):
    """What a page yields, and a run that finds these rates."""

    def page():
        for n, _ in enumerate(success):
            yield Policy(None, f"{n}", f"{n}")
        if ends:
            raise ends

    run = SimpleNamespace(
        options=SimpleNamespace(patience=2), validate=lambda policy: success[int(policy.name)]
    )
    return validated(run, "mine", page())


def test_patience_ends_the_page_and_without_it_the_page_ends_itself():
    assert len(policies(0.5, 0.6, 0.6, 0.5, 0.9)) == 4
    assert len(policies(0.5, 0.4, 0.6, 0.6, 0.9)) == 5


def test_nothing_to_learn_after_the_first_policy_ends_the_run_with_what_there_is(capsys):
    found = policies(0.5, 0.6, ends=NothingToLearn("all were solved"))
    assert [rate for _, rate in found] == [
        0.5,
        0.6,
    ] and "all were solved" in capsys.readouterr().out
    with pytest.raises(NothingToLearn):
        policies(ends=NothingToLearn("none was solved"))


@dataclass(frozen=True)
class NoOptions:
    """Of a page that has none."""


@pytest.mark.parametrize("yielded", [[], [None], ["runs/sft/adapter"]])
def test_a_page_that_yields_no_policy_is_refused_by_its_name(shelf_base, tmp_path, yielded):
    with pytest.raises(ValueError, match="^mine ") as error:
        run_algorithm(
            "mine", lambda run, o: iter(yielded), NoOptions(), shelf.options(shelf_base, tmp_path)
        )
    assert "\n" not in str(error.value) and not (tmp_path / "result.json").exists()


# ---- what it leaves ----


@pytest.fixture(scope="module")
def adapters(shelf_base, tmp_path_factory):
    """good: the base as it is, with an adapter that does nothing yet. bad: one that babbles."""
    folder = tmp_path_factory.mktemp("adapters")
    model, _ = loading.open_base(str(shelf_base), shelf.HERE)
    lora.attach(model, LoRAConfig(rank=4), torch.Generator().manual_seed(8))
    for name, size in (("good", 0.0), ("bad", 3.0)):
        with torch.no_grad():
            for layer in lora.layers(model).values():
                layer.lora_B.normal_(0, size, generator=torch.Generator().manual_seed(9))
        lora.save(model, folder / name, str(shelf_base))
    return folder


@pytest.mark.parametrize("order", [("good", "bad"), ("bad", "good", "bad")])
def test_the_best_on_validation_is_left_the_first_included(shelf_base, adapters, tmp_path, order):
    def page(run, o):
        for n, name in enumerate(order):
            yield run.policy(adapters / name, f"{name}-{n}")

    setup = shelf.options(shelf_base, tmp_path, validation=12, patience=9)
    result = run_algorithm("mine", page, NoOptions(), setup)
    first, kept = f"{order[0]}-0", f"good-{order.index('good')}"
    assert result["validation"][kept] > 0 == min(result["validation"].values())
    assert result["kept"] == kept and set(result["agents"]) == {first, kept}
    assert result["headline"].count(kept) == 2 - (first != kept) and kept in result["headline"]
    assert ("comparison" in result) == (first != kept)
    told = panel.panel(shelf.WORLD, ["open-one"], {"validation": 12, "test": setup.episodes})
    assert result["panel"] == {split: told[split]["sha256"] for split in told}
    assert read_result(tmp_path / "result.json")["headline"] == result["headline"]
    assert result["headline"] in (tmp_path / "report.html").read_text()
    for name in lora.FILES:
        left = tmp_path / "adapter" / name
        assert left.read_bytes() == (adapters / "good" / name).read_bytes()


# ---- a whole run, killed ----


PAGE = EFDPO(
    demonstrations=2,
    instances=4,
    group=4,
    sft=SFT(steps=6, batch=2, lr=1e-3, save_every=1),
    dpo=DPO(steps=6, batch=2, save_every=2),
)


def whole_run(base, out):
    run_algorithm("ef-dpo", ef_dpo, PAGE, shelf.options(base, out))


def figures(out):
    result = read_result(out / "result.json")
    figures = {name: value for name, value in result["figures"].items() if name != "seconds"}
    return figures, result["validation"], (out / "adapter" / lora.WEIGHTS).read_bytes()


@pytest.mark.slow
def test_killed_in_a_training_and_in_play_a_run_leaves_the_same(shelf_base, tmp_path):
    programs = multiprocessing.get_context("forkserver")
    programs.set_forkserver_preload(["minidpo.runner", "shelf"])

    def start(out):
        program = programs.Process(target=whole_run, args=(shelf_base, out))
        program.start()
        return program

    for moment in ("02-sft/state.safetensors", "04-play.jsonl", "05-dpo/state.safetensors"):
        program = start(tmp_path / "killed")
        while not (tmp_path / "killed" / moment).exists():
            time.sleep(0.002)
        os.kill(program.pid, signal.SIGKILL)
        program.join()
        assert program.exitcode == -signal.SIGKILL, moment
    for out in ("killed", "whole"):
        program = start(tmp_path / out)
        program.join()
        assert program.exitcode == 0
    assert figures(tmp_path / "killed") == figures(tmp_path / "whole")
