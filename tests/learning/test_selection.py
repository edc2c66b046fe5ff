"""What is imitated is a part of what was played: less at a higher threshold, the same by the same seed."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import tiny
from hypothesis import example, given
from hypothesis import strategies as st

from minidpo.config import SFT, LoopCommand, SFTCommand
from minidpo.learning.selection import accepted, best, by_expert, capped, selected
from minidpo.learning.sft import imitated
from minidpo.learning.training_run import example_indices, in_steps


@st.composite
def explored(draw):
    """Episodes of some rounds' policies and of the expert, with rewards in between."""
    return [
        replace(
            tiny.episode(
                "ab"[: draw(st.integers(0, 2))],
                draw(st.sampled_from(["solved", "failed"])),
                seed=draw(st.integers(0, 3)),
                index=n,
                policy=draw(st.sampled_from(["expert", "run/1@aa", "run/2@bb"])),
            ),
            reward=draw(st.sampled_from([-1.0, 0.0, 0.3, 0.5, 0.8, 1.0])),
        )
        for n in range(draw(st.integers(0, 12)))
    ]


shares, above_0 = st.floats(0.01, 1), st.sampled_from([0.3, 0.5, 0.8, 1.0])


@given(explored(), above_0, above_0, shares, shares, st.integers(0, 9))
def test_what_is_selected_is_a_subset_that_shrinks_with_the_threshold_and_grows_with_the_ratio(
    played, one, other, part, whole, seed
):
    (low, high), (less, more) = sorted((one, other)), sorted((part, whole))
    keys = {e.key for e in selected(played, low, more, seed=seed)}
    assert {e.key for e in selected(played, high, less, seed=seed)} <= keys
    assert (
        keys
        <= {e.key for e in played if e.reward >= low and e.turns}
        == {e.key for e in selected(played, low, 1.0, seed=seed)}
    )
    assert {e.key for e in played if e.policy == "expert" and e.reward >= low and e.turns} <= keys


@given(explored(), above_0, shares, st.integers(0, 9))
def test_whether_an_episode_is_selected_depends_on_the_seed_and_itself_alone(
    played, low, ratio, seed
):
    among = {e.key for e in selected(played, low, ratio, seed=seed)}
    moved = [replace(e, policy=e.policy.replace("run/", "elsewhere/")) for e in reversed(played)]
    assert {e.key for e in selected(moved, low, ratio, seed=seed)} == among
    assert among == {e.key for e in played if selected([e], low, ratio, seed=seed)}


def test_a_ratio_draws_about_that_share_and_another_seed_draws_another():
    played = [tiny.episode(index=n) for n in range(2_000)]
    drawn = [{e.key for e in selected(played, 1.0, 0.3, seed=seed)} for seed in (1, 2)]
    assert all(540 < len(keys) < 660 for keys in drawn) and drawn[0] != drawn[1]  # 600 ± 3 · 20.5


@given(st.integers(1, 40), st.integers(1, 60), st.floats(0.1, 3))
def test_the_first_step_meets_no_example_twice_however_few_there_are(examples, batch, epochs):
    options = in_steps(SFT(batch=batch, epochs=epochs), examples)
    first = example_indices(0, options.batch, examples, seed=1)
    assert len(set(first)) == len(first) == min(batch, examples)
    assert options.steps * options.batch >= epochs * examples - 1e-6


def test_a_rate_that_still_rises_when_training_ends_is_told(capsys):
    in_steps(SFT(steps=20, warmup=20), 100), in_steps(SFT(steps=0), 100)
    assert not capsys.readouterr().out
    in_steps(SFT(steps=4, warmup=10, lr=1e-3), 100)
    said = capsys.readouterr().out
    assert "10 steps of warm-up in a training of 4: the rate ends at 40% of 0.001; lower" in said


@given(explored())
def test_at_threshold_1_and_ratio_1_agentevol_is_filtered_imitation(played):
    binary = [replace(e, reward=float(e.solved)) for e in played]
    assert imitated(binary, SFT(weighting="reward", threshold=1.0, ratio=1.0)) == imitated(
        binary, SFT()
    )
    assert imitated(binary, SFT(weighting="reward")) == imitated(binary, SFT())


def keys(episodes):
    return {e.key for e in episodes}


@st.composite
def ways(draw):
    """All options of a selection but its threshold."""
    select = draw(st.sampled_from(["threshold", "top", "rejection"]))
    caps = {name: draw(st.none() | st.integers(1, 3)) for name in ("per_instance", "per_task")}
    if select == "rejection":
        return {"select": select, "temperature": draw(st.floats(0.05, 5)), **caps}
    return {"select": select, "ratio": draw(shares), **caps}


SAME = [
    tiny.episode("a", index=n, policy=policy)
    for n, policy in enumerate(["run/1@aa", "expert", "run/1@aa"])
]


@given(explored(), ways(), above_0, above_0, st.integers(0, 9), st.booleans())
@example([replace(SAME[0], reward=0.3), SAME[2]], {"select": "threshold"}, 0.3, 1.0, 1, True)
@example(SAME, {"select": "threshold", "per_task": 1}, 1.0, 1.0, 1, True)
def test_whatever_selects_takes_a_subset_that_shrinks_with_the_threshold(
    played, way, one, other, seed, distinct
):
    low, high = (
        imitated(played, SFT(weighting="reward", threshold=floor, distinct=distinct, **way), seed)[
            0
        ]
        for floor in sorted((one, other))
    )
    assert (
        keys(high)
        <= keys(low)
        <= {e.key for e in played if e.turns and e.reward >= min(one, other)}
    )
    assert len(keys(low)) == len(low)
    shown = [e for e in played if e.policy == "expert" and e.turns and e.reward >= max(one, other)]
    assert {(e.instance, e.said) for e in shown} <= {(e.instance, e.said) for e in high}


def test_of_equal_ones_the_experts_is_imitated_else_the_best_paid_in_the_order_of_the_file():
    other = tiny.episode("b", index=3, policy="run/1@aa")
    played = [other, replace(SAME[0], reward=0.3), SAME[2]]
    options = SFT(weighting="reward", threshold=0.1, distinct=True)
    assert imitated(played, options)[0] == [other, SAME[2]]
    assert imitated([*SAME, other], options)[0] == [SAME[1], other]
    assert imitated([SAME[2], SAME[0]], options)[0] == [SAME[2]]  # of equal pay the first


@given(explored(), ways(), st.integers(0, 9))
def test_the_order_of_the_file_and_the_place_of_the_adapter_select_nothing(played, way, seed):
    options = SFT(weighting="reward", threshold=0.3, **way)
    moved = [replace(e, policy=e.policy.replace("run/", "elsewhere/")) for e in reversed(played)]
    assert keys(imitated(moved, options, seed)[0]) == keys(imitated(played, options, seed)[0])


@given(explored(), st.none() | st.integers(1, 3), st.none() | st.integers(1, 5), st.integers(0, 9))
def test_limits_hold_for_the_agents_own_and_no_worse_one_is_taken_before_a_better(
    played, per_instance, per_task, seed
):
    played = [replace(e, task="pq"[e.seed % 2]) for e in played]
    taken = capped(played, per_instance, per_task, seed=seed)
    own = [e for e in taken if e.policy != "expert"]
    assert max(Counter(e.instance for e in own).values(), default=0) <= (per_instance or math.inf)
    assert max(Counter(e.task for e in own).values(), default=0) <= (per_task or math.inf)
    left = [e for e in played if e.key not in keys(taken)]
    assert all(e.policy != "expert" for e in left)
    if per_task is None:
        assert not any(a.instance == b.instance and a.reward > b.reward for a in left for b in own)
    if per_instance is None:
        assert not any(a.task == b.task and a.reward > b.reward for a in left for b in own)
    if per_instance is per_task is None:
        assert taken == played


def test_a_tasks_share_comes_as_evenly_from_its_instances_as_can_be():
    played = [
        tiny.episode(seed=seed, index=n) for seed in range(3) for n in range(1 + 4 * (seed > 0))
    ]
    for seed in range(9):
        assert Counter(e.seed for e in capped(played, None, 7, seed=seed)) == {0: 1, 1: 3, 2: 3}
    drawn = [tuple(sorted(keys(capped(played, 1, None, seed=seed)))) for seed in range(20)]
    assert len(set(drawn)) > 1  # equal rewards: the seed decides


def paid(*rewards, seed=1):
    return [replace(tiny.episode(index=n, seed=seed), reward=r) for n, r in enumerate(rewards)]


def test_of_a_task_the_best_come_first_whichever_their_instance():
    played = [*paid(0.5, 0.4, seed=1), *paid(0.9, 0.8, 0.7, seed=2)]
    for seed in range(9):
        assert sorted(e.reward for e in capped(played, None, 3, seed=seed)) == [0.7, 0.8, 0.9]


def test_a_share_is_one_of_each_instance():
    played = [*paid(0.1, 0.2, 0.3, 0.4, seed=1), *paid(0.5, 0.6, seed=2)]
    assert {e.reward for e in best(played, 0.5, seed=1)} == {0.3, 0.4, 0.6}


def test_top_by_hand():
    """Of 0.2, 0.9, 0.5, 0.9, 0: half are three, two are two, and what paid nothing never counts."""
    played = paid(0.2, 0.9, 0.5, 0.9, 0.0)
    assert keys(best(played, 0.5, seed=1)) == {e.key for e in played if e.index in (1, 2, 3)}
    taken, weights = imitated(played, SFT(select="top", per_instance=2))
    assert {e.index for e in taken} == {1, 3} and weights == [1.0, 1.0]
    assert len(imitated(played, SFT(select="top", ratio=1.0))[0]) == 4
    taken, weights = imitated(
        played, SFT(select="top", per_instance=3, weighting="reward", threshold=0.6)
    )
    assert sorted(weights) == [0.9, 0.9]


def test_rejection_keeps_the_best_always_and_others_by_how_far_they_are_behind():
    """Half a point behind, at temperature 0.5: exp(-1) = 0.368 of 2,000, ± 3 · 21.6."""
    played = [e for seed in range(2_000) for e in paid(1.0, 0.5, seed=seed)]
    drawn = [Counter(e.index for e in accepted(played, 0.5, seed=seed)) for seed in (1, 2)]
    assert all(counts[0] == 2_000 and abs(counts[1] - 735.8) < 65 for counts in drawn)
    assert keys(accepted(played, 0.5, seed=1)) != keys(accepted(played, 0.5, seed=2))
    alone = [e for e in played if e.index == 1]
    assert accepted(alone, 0.5, seed=1) == alone and len(accepted(played, 1e-9, seed=1)) == 2_000


@given(explored())
def test_where_rewards_are_0_and_1_each_way_is_filtered_imitation_unless_it_is_told_how_many(
    played,
):
    binary = [replace(e, reward=float(e.solved)) for e in played]
    solved = keys(imitated(binary, SFT())[0])
    for way in ({"select": "top", "ratio": 1.0}, {"select": "rejection"}):
        assert keys(imitated(binary, SFT(**way))[0]) == solved


def test_limits_serve_plain_imitation_too_and_count_what_was_said_twice_once():
    played = [tiny.episode((said,), index=n) for n, said in enumerate("aaab")]
    assert len(imitated(played, SFT(per_instance=2))[0]) == 2
    twice = imitated(played, SFT(per_instance=2, distinct=True))[0]
    assert {e.said for e in twice} == {("a",), ("b",)}


def test_of_equal_episodes_the_demonstration_stays_and_a_relabelled_answer_is_another():
    demo, own = tiny.episode(("a", "b"), policy="expert"), tiny.episode(("a", "b"), index=1)
    relabelled = replace(tiny.episode(("a", "b"), policy="dagger", index=2), forced=1)
    chosen, _ = imitated([demo, own, relabelled], SFT(distinct=True, per_instance=1))
    assert [(e.policy, e.forced) for e in chosen] == [("expert", 0), ("dagger", 1)]


def test_clumsy_demonstrations_are_no_attempts_of_the_agent():
    played = [tiny.episode((said,), index=n, policy="clumsy 0.3") for n, said in enumerate("abc")]
    assert imitated([*played, tiny.episode(("d",), index=3)], SFT(per_instance=1))[0][:3] == played
    assert not by_expert(
        tiny.episode(("a",), policy="expert runs/adapter@1b2c")
    )  # an adapter's path


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: SFT(select="top"), "say how many with per_instance, or which share with ratio"),
        (
            lambda: SFT(select="rejection", ratio=0.5),
            "select rejection draws by the reward: leave out ratio",
        ),
        (lambda: SFT(per_task=0), "per_task must be finite and greater than 0"),
        (
            lambda: SFTCommand(sft=SFT(weighting="advantage", per_task=3)),
            "advantage needs all: leave out sft",
        ),
        (
            lambda: SFTCommand(sft=SFT(threshold=0.5)),
            "sft.threshold and ratio are of weighting reward, and of",
        ),
        (
            lambda: SFTCommand(sft=SFT(select="top", ratio=0.5, temperature=0.1)),
            "sft.temperature is of",
        ),
        (
            lambda: LoopCommand(learn="dpo", imitation=SFT(per_task=3)),
            "learn dpo selects no episodes to imitate",
        ),
        (
            lambda: LoopCommand(learn="rwr", imitation=SFT(per_task=3)),
            "advantage needs all: leave out imit",
        ),
        (
            lambda: LoopCommand(sft=SFT(per_task=3)),
            "demonstrations are all imitated: leave out sft.select",
        ),
    ],
)
def test_a_selection_that_makes_no_sense_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_what_selects_is_taken_where_it_makes_sense():
    SFTCommand(sft=SFT(select="rejection", temperature=0.1, threshold=0.5))
    LoopCommand(learn="rft", imitation=SFT(steps=1, select="top", ratio=0.5))
    LoopCommand(demonstrations=0, sft=SFT(per_instance=1))


def test_labels_come_in_a_random_order_however_many_examples_they_have():
    """One label of 16 examples beside 16 of one: it is the first of 17 in a 17th of the epochs. Were a label
    where one of its examples is drawn, it would be so far more often."""
    labels = ["many"] * 16 + list(range(16))
    orders = [
        [labels[i] for i in example_indices(0, 32, 32, seed, labels=labels)] for seed in range(1500)
    ]
    assert (
        1500 / 17 - 30 < sum(order[0] == "many" for order in orders) < 1500 / 17 + 30
    )  # 3 deviations
    assert 1500 / 17 - 30 < sum(order[-1] == "many" for order in orders) < 1500 / 17 + 30
