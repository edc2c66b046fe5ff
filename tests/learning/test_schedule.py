"""The choices of a loop: which round is kept, when to stop, which tasks are in, where to look next."""

from pathlib import Path

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from minidpo.learning.schedule import (
    best_round,
    focused_instances,
    remove_if_of_another_round,
    should_stop,
    unlocked_tasks,
)
from minidpo.loop import flat_figures

rates = st.floats(0, 1)
successes = st.dictionaries(st.sampled_from("abcdefgh"), rates, min_size=1)


@given(st.lists(rates, min_size=1))
def test_the_round_that_is_kept_is_the_first_of_the_best(success):
    best = best_round(success)
    assert success[best] == max(success) and success.index(max(success)) == best


@given(st.lists(rates, min_size=1), st.integers(1, 4))
def test_it_stops_when_the_last_rounds_are_no_better_than_what_was_before_them(success, patience):
    before, last = success[:-patience], success[-patience:]
    assert should_stop(success, patience) == bool(before and max(before) >= max(last))


@given(successes, rates)
def test_a_curriculum_holds_the_easiest_tasks_in_the_order_given(success, threshold):
    inside = unlocked_tasks(success, threshold)
    assert inside == [task for task in success if task in inside] and inside
    outside = success.keys() - set(inside)
    assert all(success[a] >= success[b] for a in inside for b in outside)
    if outside:
        assert sum(success[task] for task in inside) / len(inside) < threshold + 1e-9


@given(successes, rates, rates)
def test_a_lower_threshold_lets_more_tasks_in(success, one, other):
    low, high = sorted((one, other))
    assert set(unlocked_tasks(success, high)) <= set(unlocked_tasks(success, low))
    assert unlocked_tasks(success, 0.0) == list(success)


@given(successes, st.integers(1, 50))
def test_exploring_with_focus_takes_as_many_instances_and_most_where_outcomes_are_mixed(
    success, instances
):
    counts = focused_instances(success, instances)
    assert sum(counts.values()) == instances * len(success) and counts.keys() == success.keys()
    assert min(counts.values()) >= max(1, instances // 4) or instances == 1
    for a in success:
        for b in success:
            if success[a] > success[b]:
                assert counts[a] >= counts[b] - 1  # rounding gives one away


def test_where_no_group_was_mixed_every_task_gets_its_share():
    assert focused_instances({"a": 0.0, "b": 0.0}, 7) == {"a": 7, "b": 7}


def test_three_times_a_threshold_is_the_threshold():
    """0.7 + 0.7 + 0.7 is a little less than 2.1 in binary."""
    assert (0.7 + 0.7 + 0.7) / 3 < 0.7
    assert unlocked_tasks(dict.fromkeys("abcd", 0.7), 0.7) == list("abcd")


class Killed(Exception):
    pass


@pytest.mark.parametrize("kill_at", [0, 1, 2, 3])
def test_what_another_rounds_agent_played_is_removed_and_a_kill_leaves_nothing_that_counts(
    tmp_path, monkeypatch, kill_at
):
    path, note = tmp_path / "dpo.jsonl", tmp_path / "dpo.done"
    episode = tiny.episode(policy="runs/old/round-1/dpo/adapter@0123456789ab")
    path.write_text(f"\n{episode.to_json()}\n" + '{"ver')
    note.touch()
    (tmp_path / "dpo.metrics.jsonl").touch()
    remove_if_of_another_round(path, Path("/renamed/round-1/dpo/adapter"))
    assert path.is_file() and note.is_file()
    real, calls = Path.unlink, []

    def deadly(self, **options):
        calls.append(self)
        if len(calls) == kill_at:
            raise Killed
        real(self, **options)

    monkeypatch.setattr(Path, "unlink", deadly)
    try:
        remove_if_of_another_round(path, Path("runs/old/round-2/dpo/adapter"))
    except Killed:
        assert path.is_file()  # so that the next start sees whose these are
        assert kill_at == 1 or not note.is_file()
        remove_if_of_another_round(path, Path("runs/old/round-2/dpo/adapter"))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("main", ["", '{"ver', None])
def test_what_other_ranks_of_another_round_left_is_removed_and_this_rounds_stays(tmp_path, main):
    path, rank = tmp_path / "dpo.jsonl", tmp_path / "dpo.jsonl.rank1"
    if main is not None:
        path.write_text(main)
    for number in (1, 2):
        rank.write_text(
            tiny.episode(policy=f"runs/old/round-{number}/dpo/adapter@0").to_json() + "\n"
        )
        remove_if_of_another_round(path, Path("runs/new/round-2/dpo/adapter"))
        assert rank.is_file() == (number == 2) and path.is_file() == (main is not None)


def test_a_file_without_a_whole_episode_is_left_to_who_goes_on_with_it_and_a_damaged_one_is_named(
    tmp_path,
):
    path = tmp_path / "dpo.jsonl"
    remove_if_of_another_round(path, Path("round-1/dpo/adapter"))
    path.write_text('{"version": 1')
    remove_if_of_another_round(path, Path("round-1/dpo/adapter"))
    assert path.is_file()
    path.write_text("{}\n")
    with pytest.raises(ValueError, match="dpo.jsonl, line 1: "):
        remove_if_of_another_round(path, Path("round-1/dpo/adapter"))


def test_the_figures_of_a_loop_are_those_of_its_result():
    agent = [
        {"all": {"success": rate, "n": 4}, "sampled": {"success": rate / 2}} for rate in (0.5, 1.0)
    ]
    both = {"gain_points": 50.0, "p_value": 0.5, "n": 4, "only_before": 0, "only_after": 2}
    result = {
        "agents": {"sft": agent[0], "rft": agent[1]},
        "comparison": both,
        "seconds": {"sft": 1.25, "rft": 2.0},
    }
    assert flat_figures(result) == {
        "sft_success": 0.5,
        "sft_sampled_success": 0.25,
        "rft_success": 1.0,
        "rft_sampled_success": 0.5,
        "gain_points": 50.0,
        "won": 2,
        "lost": 0,
        "p_value": 0.5,
        "seconds": 3.2,
    }
