"""A pair is one instance with two verdicts, and where it is cut only the last turn differs."""

from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from minidpo.data.pairs import (
    NothingToLearn,
    Pair,
    PairRules,
    common,
    cut_at_token,
    cut_at_turn,
    make_pairs,
    noisy,
    segment_starts,
    unpaired,
    unpaired_successes,
)
from minidpo.model.chat import Dialogue

OUTCOMES = ["solved", "solved", "failed", "limit"]


@st.composite
def groups(draw):
    """Episodes of a few instances; answers from few words, so that beginnings and whole episodes coincide."""
    played = []
    instances = st.tuples(st.sampled_from("pq"), st.integers(0, 1))
    for task, seed in draw(st.lists(instances, min_size=1, max_size=3, unique=True)):
        for index in range(draw(st.integers(1, 6))):
            said = draw(st.text("ab", max_size=3))
            outcome = draw(st.sampled_from(OUTCOMES))
            played.append(tiny.episode(said, outcome, seed=seed, index=index, task=task))
    return played


def made(played, per_instance, seed, until="end", *, golden=(), failures=(), **rules):
    return make_pairs(played, PairRules(per_instance, until=until, **rules), seed, golden, failures)


def pairs_of(played, per_instance=4, seed=1, until="end", **how):
    try:
        return made(played, per_instance, seed, until, **how)
    except NothingToLearn:
        return []


ends = st.sampled_from(["end", "turn"])


@given(groups(), st.integers(1, 5), st.integers(0, 9), ends)
def test_a_pair_is_a_success_and_a_failure_of_one_instance_that_differ(played, cap, seed, until):
    for pair in pairs_of(played, cap, seed, until):
        assert pair.chosen.instance == pair.rejected.instance
        assert pair.chosen.solved and not pair.rejected.solved
        assert pair.chosen.said != pair.rejected.said


@given(groups(), st.integers(1, 5), ends)
def test_an_instance_gives_so_many_different_pairs_as_asked_for_or_as_there_are(played, cap, until):
    pairs = pairs_of(played, cap, until=until)
    everything = pairs_of(played, 10**6, until=until)
    said = [(pair.chosen.instance, pair.chosen.index, pair.rejected.index) for pair in everything]
    assert len(said) == len(set(said))
    there = Counter(pair.chosen.instance for pair in everything)
    assert Counter(pair.chosen.instance for pair in pairs) == {
        i: min(n, cap) for i, n in there.items()
    }


@given(groups(), st.integers(0, 9))
def test_one_success_of_each_solved_unpaired_instance_is_rehearsed(played, seed):
    pairs = pairs_of(played)
    kept = unpaired_successes(played, pairs, seed)
    assert kept == unpaired_successes(played, pairs, seed)
    solved = {e.instance for e in played if e.solved and e.turns}
    assert sorted(e.instance for e in kept) == sorted(
        solved - {pair.chosen.instance for pair in pairs}
    )
    assert all(e.solved and e.turns and e in played for e in kept)
    given = [replace(e, forced=1) for e in played]  # the first turn was not the agent's own
    assert unpaired_successes(given, pairs, seed) == []


@given(groups())
def test_whole_episodes_are_paired_in_every_combination(played):
    solved = [e for e in played if e.solved and e.turns]
    unsolved = [e for e in played if not e.solved and e.turns]
    combinations = {
        (c.instance, c.said, r.said)
        for c in solved
        for r in unsolved
        if c.instance == r.instance and c.said != r.said
    }
    pairs = pairs_of(played, 10**6)
    assert {(p.chosen.instance, p.chosen.said, p.rejected.said) for p in pairs} == combinations


@pytest.mark.parametrize("source", ["outcome", "eto"])
@pytest.mark.parametrize("successes, failures", [(1, 5), (2, 2), (2, 3), (3, 2), (4, 4)])
def test_no_success_of_a_source_comes_twice_before_all_came_once_and_no_failure(
    source, successes, failures
):
    played = [tiny.episode(str(i), "solved", index=i) for i in range(successes)]
    played += [
        tiny.episode(str(i), "failed", index=i) for i in range(successes, successes + failures)
    ]
    golden = [tiny.episode("g", policy="expert")] * (source == "eto")
    for cap in range(1, (successes + len(golden)) * failures + 1):
        pairs = make_pairs(played, PairRules(cap, source=source), 3, golden)
        for side, there in (("chosen", {"outcome": successes, "expert": 1}), ("rejected", {})):
            for one in {pair.source for pair in pairs}:
                counts = Counter(getattr(pair, side).said for pair in pairs if pair.source == one)
                assert max(counts.values()) - min(counts.values()) <= 1
                assert max(counts.values()) == 1 or len(counts) == there.get(one, failures)


@given(groups())
def test_until_divergence_all_turns_but_the_last_are_shared(played):
    for pair in pairs_of(played, 10**6, until="turn"):
        last = common(pair.chosen.said, pair.rejected.said)
        assert pair.chosen.said[:last] == pair.rejected.said[:last]
        assert max(len(pair.chosen.turns), len(pair.rejected.turns)) == last + 1
        assert cut_at_turn(pair.chosen, pair.rejected) == (pair.chosen, pair.rejected)


def test_until_divergence_by_hand():
    pair = Pair(tiny.episode("abc", "solved"), tiny.episode("axcd", "failed", index=1))
    chosen, rejected = cut_at_turn(pair.chosen, pair.rejected)
    assert (chosen.said, rejected.said) == (("a", "b"), ("a", "x"))
    assert chosen.solved and not rejected.solved


@given(groups(), st.integers(0, 9), ends)
def test_the_seed_decides_and_the_pairs_of_an_instance_do_not_depend_on_the_others(
    played, seed, until
):
    pairs = pairs_of(played, 2, seed, until)
    assert pairs_of(list(played), 2, seed, until) == pairs
    for instance in {episode.instance for episode in played}:
        alone = pairs_of([e for e in played if e.instance == instance], 2, seed, until)
        among = [pair for pair in pairs if pair.chosen.instance == instance]
        assert Counter(map(repr, alone)) == Counter(map(repr, among))


ids = st.lists(st.integers(0, 2), min_size=1, max_size=8)


@given(ids, ids)
def test_until_the_difference_all_tokens_but_the_last_are_shared(left, right):
    chosen, rejected = (Dialogue(ids, list(range(len(ids)))) for ids in (left, right))
    short = cut_at_token(chosen, rejected)
    n = len(short.ids)
    assert short == Dialogue(right[:n], rejected.turns[:n])
    if common(left, right) == min(len(left), len(right)):  # one begins the other: no token differs
        assert short == rejected
    else:
        assert short.ids[:-1] == left[: n - 1] and short.ids != left[:n]


def test_where_the_pages_differ_first_no_token_is_the_mistake_and_the_rejected_stays_whole():
    chosen, rejected = (
        Dialogue([1, 5, 7, 8], [-1, 0, -1, 1]),
        Dialogue([1, 5, 6, 9], [-1, 0, -1, 1]),
    )
    assert cut_at_token(chosen, rejected) == rejected


def test_another_seed_draws_other_pairs_in_another_order():
    played = [
        tiny.episode(str(i), OUTCOMES[i % 2 * 2], seed=s, index=i)
        for s in range(4)
        for i in range(6)
    ]
    assert made(played, 2, seed=1) != made(played, 2, seed=2)
    instances = [pair.chosen.seed for pair in made(played, 2, seed=1)]
    assert sorted(instances) == [0, 0, 1, 1, 2, 2, 3, 3] != instances


def test_groups_that_were_always_solved_or_never_say_what_to_try():
    played = [
        tiny.episode("a", "solved"),
        tiny.episode("b", "solved", index=1),
        tiny.episode("a", "failed", seed=2),
        tiny.episode("", "limit", seed=3),
    ]
    with pytest.raises(
        ValueError, match=r"no pair in 3 groups \(1 solved every time, 2 never\): .*; try m"
    ):
        made(played, 4, seed=1)


def test_episodes_that_were_sampled_otherwise_are_others_though_all_else_is_alike():
    """So of two successes and two failures each is used once before one is used twice."""
    played = [
        replace(tiny.episode((f"{hot}{word}",), outcome, index=n), sampling={"temperature": hot})
        for hot in (0.7, 1.0)
        for n, (word, outcome) in enumerate([("a", "solved"), ("b", "failed")])
    ]
    for seed in range(5):
        sides = [
            side.said for pair in made(played, 2, seed) for side in (pair.chosen, pair.rejected)
        ]
        assert len(set(sides)) == 4


def test_a_pair_across_instances_or_verdicts_cannot_be_made():
    solved, failed = tiny.episode("a"), tiny.episode("b", "failed", index=1)
    with pytest.raises(
        ValueError, match="one instance, got click-button seed 1 and click-button seed 2"
    ):
        Pair(solved, tiny.episode("b", "failed", seed=2))
    for chosen, rejected in [(failed, solved), (solved, solved), (failed, failed)]:
        with pytest.raises(ValueError, match="the chosen must be solved and the rejected not"):
            Pair(chosen, rejected)


def test_pairs_that_are_cut_to_the_same_words_are_one():
    played = [
        tiny.episode(said, outcome, index=n)
        for n, (said, outcome) in enumerate(
            [("ab", "solved"), ("ac", "solved"), ("xb", "failed"), ("xc", "failed")]
        )
    ]
    found = made(played, 9, 1, "turn")
    assert [(pair.chosen.said, pair.rejected.said) for pair in found] == [(("a",), ("x",))]


# ---- where pairs come from ----


def spoken(episode):
    """The same episode, whose actions are its words."""
    return replace(
        episode, turns=tuple(replace(turn, action=turn.answer) for turn in episode.turns)
    )


GOLDEN = [
    spoken(tiny.episode("aab", seed=seed, task=task, policy="expert"))
    for task in "pq"
    for seed in (0, 1)
]


@st.composite
def explorations(draw):
    """Groups in which the first turns of some episodes were those of the golden one."""
    played = []
    for episode in draw(groups()):
        forced = draw(st.integers(0, 2))
        said = ("aab"[:forced] + "".join(episode.said) + "c")[:4]
        progress = None if episode.solved else draw(st.sampled_from([None, 0.0, 0.5, 1.0]))
        played.append(
            spoken(
                tiny.episode(
                    said,
                    episode.outcome,
                    seed=episode.seed,
                    index=episode.index,
                    task=episode.task,
                    forced=forced,
                    progress=progress,
                )
            )
        )
    return played


@given(explorations(), st.integers(1, 4), ends)
def test_expert_pairs_prefer_a_golden_episode_to_a_failure_that_was_the_agents_own(
    played, cap, until
):
    for pair in pairs_of(played, cap, until=until, source="expert", golden=GOLDEN):
        assert (pair.source, pair.chosen.policy) == ("expert", "expert")
        assert (
            not pair.rejected.solved and pair.rejected.policy == "tiny" and not pair.rejected.forced
        )


@given(explorations(), st.sampled_from(["outcome", "efficient"]))
def test_what_began_with_given_steps_is_no_whole_episode_of_the_agents(played, source):
    pairs = pairs_of(played, 10**6, source=source)
    with suppress(NothingToLearn):  # without both outcomes
        pairs += unpaired(played, 0)
    assert not any(side.forced for pair in pairs for side in (pair.chosen, pair.rejected))


@given(explorations())
def test_stepwise_pairs_are_two_ways_on_from_the_same_step_of_which_one_never_led_to_a_solution(
    played,
):
    for pair in pairs_of(played, 10**6, source="stepwise", golden=GOLDEN):
        t = pair.rejected.forced
        assert pair.chosen.said[:t] == pair.rejected.said[:t] == tuple("aab"[:t])
        assert len(pair.chosen.turns) == len(pair.rejected.turns) == t + 1
        mistake = pair.rejected.said[t]
        assert mistake != "aab"[t]  # the golden way on is one
        assert not any(
            e.solved
            and e.forced == t
            and e.instance == pair.chosen.instance
            and e.said[t : t + 1] == (mistake,)
            for e in played
        )


@given(explorations())
def test_a_mixture_has_the_pairs_of_all_three_sources(played):
    def said(source):
        found = pairs_of(played, 10**6, source=source, golden=GOLDEN)
        return Counter((p.source, p.chosen.instance, p.chosen.said, p.rejected.said) for p in found)

    assert said("mixture") == said("outcome") + said("expert") + said("stepwise")


def test_another_thought_before_an_action_that_leads_to_a_solution_is_no_mistake():
    failed = tiny.episode("x", "failed", seed=0, task="p")
    assert not pairs_of([failed, tiny.episode("a", index=1, seed=0, task="p")], source="stepwise")
    assert pairs_of([spoken(failed)], source="stepwise", golden=GOLDEN)


def test_a_golden_episode_that_began_in_another_way_is_no_way_on_from_these_steps():
    golden = [*GOLDEN, spoken(tiny.episode("bac", seed=0, index=1, task="p", policy="expert"))]
    failed = [
        spoken(tiny.episode(said, "failed", index=n, seed=0, task="p", forced=1))
        for n, said in enumerate(("ax", "bx"))
    ]
    found = pairs_of(failed, 9, source="stepwise", golden=golden)
    assert {(p.chosen.said, p.rejected.said) for p in found} == {
        (("a", "a"), ("a", "x")),
        (("b", "a"), ("b", "x")),
    }


@pytest.mark.parametrize("source", ["stepwise", "segments"])
def test_an_episode_that_ended_within_its_given_steps_chose_nothing(source):
    ended = spoken(tiny.episode("a", "failed", index=1, forced=1))
    failed = spoken(tiny.episode("ax", "failed", index=2, forced=1))
    golden = [spoken(tiny.episode("ab", index=0, policy="expert"))]
    found = pairs_of([ended, failed], 9, source=source, golden=golden)
    assert {p.rejected.index for p in found} == {2}


@pytest.mark.parametrize("source", ["stepwise", "dagger"])
def test_an_unusable_answer_is_a_mistake_though_a_success_had_one_too(source):
    """Both said what was no action; one of them solved the page later."""

    def unusable_first(said, outcome, index):
        episode = spoken(tiny.episode(said, outcome, index=index))
        return replace(episode, turns=(replace(episode.turns[0], action=None), *episode.turns[1:]))

    played = [unusable_first("xb", "solved", 1), unusable_first("y", "failed", 2)]
    golden = [
        answered("ac", 0) if source == "dagger" else spoken(tiny.episode("ac", policy="expert"))
    ]
    found = pairs_of(played, 9, source=source, golden=golden)
    assert ("a", "y") in {(p.chosen.said[0], p.rejected.said[0]) for p in found}


def test_sources_take_turns():
    """One instance: 3 x 3 outcome pairs, 3 expert pairs, 2 ways on from the first step that failed."""
    played = [
        tiny.episode(said, index=n, seed=0, task="p") for n, said in enumerate(("ab", "ac", "abc"))
    ]
    played += [
        tiny.episode(said, "failed", index=3 + n, seed=0, task="p") for n, said in enumerate("xyx")
    ]
    played = list(map(spoken, played))
    for cap, counts in ((3, [1, 1, 1]), (6, [2, 2, 2]), (12, [2, 3, 7])):
        found = Counter(
            pair.source for pair in made(played, cap, 1, source="mixture", golden=GOLDEN)
        )
        assert sorted(found.values()) == counts


@given(explorations(), st.integers(1, 3), st.integers(1, 9))
def test_a_tasks_pairs_are_limited_and_taken_evenly_from_its_instances(played, cap, per_task):
    everything = Counter(pair.chosen.instance for pair in pairs_of(played, cap))
    limited = Counter(pair.chosen.instance for pair in pairs_of(played, cap, per_task=per_task))
    for task in {task for task, _ in everything}:
        there = {instance: n for instance, n in everything.items() if instance[0] == task}
        taken = {instance: limited[instance] for instance in there}
        assert sum(taken.values()) == min(per_task, sum(there.values()))
        most = max(taken.values())
        assert all(n >= min(most - 1, there[instance]) for instance, n in taken.items())


def acted(*steps, outcome="failed"):
    """An episode of (page, action, error)."""
    bare = tiny.episode(["x"] * len(steps), outcome)
    return replace(
        bare,
        turns=tuple(
            replace(turn, observation=page, action=action, error=error)
            for turn, (page, action, error) in zip(bare.turns, steps)
        ),
    )


@pytest.mark.parametrize(
    "steps, is_noisy",
    [
        (
            [("p", "CLICK", None), ("q", "CLICK", None)],
            False,
        ),  # the same button on a page that has changed
        ([("p", "CLICK", None), ("p", "TYPE", None)], False),
        ([("p", "CLICK", None), ("p", "CLICK", None)], True),
        ([("p", None, "no action found")], True),
        ([("p", "CLICK", "there is no such element"), ("p", "TYPE", None)], True),
        ([("p", "CLICK", None), ("p", "TYPE", None), ("p", "CLICK", None)], False),
        ([("p", "WAIT()", None), ("p", "WAIT()", None)], False),
        (
            [("p", 'PRESS(key="ArrowUp")', None), ("p", 'PRESS(key="ArrowUp")', None)],
            False,
        ),  # a slider may move
        ([("p", 'PRESS(key="Enter")', None), ("p", 'PRESS(key="Enter")', None)], True),
    ],
)
def test_noisy_is_an_action_that_was_unusable_or_repeated_on_an_unchanged_page(steps, is_noisy):
    assert noisy(acted(*steps)) == is_noisy


def test_clean_pairs_have_no_noisy_loser_and_keep_the_winners_as_they_are():
    twice = [("p", "CLICK", None)] * 2
    winner, stuck = (
        acted(*twice, outcome="solved"),
        replace(acted(*twice, ("p", "TYPE", None)), index=1),
    )
    wrong = replace(acted(("p", "TYPE", None)), index=2)
    found = made([winner, stuck, wrong], 9, 1, clean=True)
    assert [(pair.chosen.index, pair.rejected.index) for pair in found] == [(0, 2)]
    assert len(made([winner, stuck, wrong], 9, 1)) == 2
    with pytest.raises(NothingToLearn, match="without clean there would be pairs: drop it"):
        made([winner, stuck], 9, 1, clean=True)
    with pytest.raises(NothingToLearn, match="without noisy there would be pairs"):
        made([winner, wrong], 9, 1, noisy=True)
    with pytest.raises(NothingToLearn, match="1 solved every time, 0 never"):
        made([winner], 9, 1, clean=True)


@given(explorations())
def test_dense_pairs_rank_the_failures_of_groups_that_were_never_solved(played):
    dense = pairs_of(played, 10**6, dense=True)
    for pair in dense:
        if pair.source == "progress":
            assert not pair.chosen.solved and not pair.rejected.solved
            assert pair.chosen.progress > pair.rejected.progress
    others = Counter(map(repr, (pair for pair in dense if pair.source != "progress")))
    assert others == Counter(map(repr, pairs_of(played, 10**6)))
    solved = {e.instance for e in played if e.solved and e.turns}
    ranked = {
        (e.instance, e.said, f.said)
        for e in played
        for f in played
        if e.instance == f.instance
        and e.instance not in solved
        and not (e.forced or f.forced)
        and None not in (e.progress, f.progress)
        and e.progress > f.progress
        and e.said != f.said
    }
    assert ranked == {
        (p.chosen.instance, p.chosen.said, p.rejected.said) for p in dense if p.source == "progress"
    }


def test_progress_never_ranks_a_failure_above_a_success_or_above_its_equal():
    near, far = (tiny.episode("a", "failed", progress=p) for p in (0.8, 0.2))
    assert Pair(near, far, "progress").source == "progress"
    for chosen, rejected in [
        (far, near),
        (near, near),
        (tiny.episode("b"), far),
        (near, tiny.episode("b")),
        (near, tiny.episode("b", "failed")),
    ]:
        with pytest.raises(ValueError, match="both must have failed, the chosen come nearer"):
            Pair(chosen, rejected, "progress")


@given(groups(), st.integers(0, 5))
def test_unpaired_outcomes_are_all_there_as_many_of_each_kind_and_the_commoner_kind_once(
    played, seed
):
    sides = {kind: [e for e in played if e.solved == kind and e.turns] for kind in (True, False)}
    if not all(sides.values()):
        with pytest.raises(NothingToLearn, match="KTO needs both kinds"):
            unpaired(played, seed)
        return
    found = unpaired(played, seed)
    assert found == unpaired(list(played), seed)
    chosen, rejected = (
        Counter(map(repr, (getattr(duo, side) for duo in found))) for side in ("chosen", "rejected")
    )
    for kind, counts in ((True, chosen), (False, rejected)):
        assert counts.keys() == set(map(repr, sides[kind]))
    matched = sum(
        min(
            len([e for e in sides[True] if e.instance == i]),
            len([e for e in sides[False] if e.instance == i]),
        )
        for i in {e.instance for e in played}
    )
    assert sum(duo.chosen.instance == duo.rejected.instance for duo in found) >= matched
    commoner = chosen if len(sides[True]) >= len(sides[False]) else rejected
    assert max(commoner.values()) == 1
    assert all(max(counts.values()) - min(counts.values()) <= 1 for counts in (chosen, rejected))


def test_a_pair_says_where_it_came_from():
    rejected = tiny.episode("ax", "limit", index=3, forced=1)
    pair = Pair(tiny.episode("ab", policy="expert"), rejected, "stepwise")
    told = pair.provenance()
    assert (told["chosen"]["policy"], told["source"]) == ("expert", "stepwise")
    assert told["rejected"] == {
        "task": "click-button",
        "seed": 1,
        "policy": "tiny",
        "index": 3,
        "forced": 1,
        "sampling": {},
        "outcome": "limit",
        "reward": 0.0,
        "progress": None,
        "turns": 2,
    }
    apart = Pair(pair.chosen, tiny.episode("b", "failed", seed=5), "unpaired").provenance()
    assert (apart["source"], apart["chosen"]["seed"], apart["rejected"]["seed"]) == (
        "unpaired",
        1,
        5,
    )


# ---- rewards as numbers ----


@st.composite
def paid(draw):
    """Groups with rewards in between; the page judges from 1 on, what ran out of steps was not judged."""
    return [
        replace(
            e,
            reward=1.0
            if e.solved
            else draw(st.sampled_from([-1.0, -0.4, 0.0, 0.25, 0.7]))
            if e.outcome == "failed"
            else 0.0,
        )
        for e in draw(groups())
    ]


def keys_of(pairs):
    return Counter((p.source, p.chosen.key, p.rejected.key) for p in pairs)


own_sources = st.sampled_from(["outcome", "expert", "eto"])


@given(explorations(), st.integers(1, 4), st.floats(0, 0.99), own_sources, st.booleans(), ends)
def test_where_rewards_are_0_and_1_a_margin_changes_no_pair(
    played, cap, margin, source, clean, until
):
    rules = {"source": source, "golden": GOLDEN if source != "outcome" else (), "clean": clean}
    assert pairs_of(played, cap, until=until, margin=margin, **rules) == pairs_of(
        played, cap, until=until, **rules
    )


@given(paid(), st.sampled_from([0.0, 0.3, 0.7, 1.5]), own_sources)
def test_by_reward_no_tie_is_a_pair_and_every_gap_above_the_margin_is_one(played, margin, source):
    golden = GOLDEN if source != "outcome" else ()
    found = pairs_of(played, 10**6, margin=margin, source=source, golden=golden)
    assert all(
        p.chosen.reward - p.rejected.reward > margin and p.chosen.outcome != "limit" for p in found
    )
    sides = {"outcome": [(played, played)], "expert": [(GOLDEN, played), (played, GOLDEN)]}
    wanted = Counter(
        (kind, a.key, b.key)
        for kind in (("outcome", "expert") if source == "eto" else (source,))
        for left, right in sides[kind]
        for a in left
        for b in right
        if a.instance == b.instance
        and a.said != b.said
        and a.turns
        and b.turns
        and a.outcome != "limit"
        and a.reward - b.reward > margin
    )
    assert keys_of(found) == wanted


@given(paid(), st.floats(0.01, 100), st.floats(-5, 5), st.integers(1, 4), own_sources)
def test_pairs_of_margin_0_do_not_change_when_rewards_are_stretched_bent_or_moved(
    played, scale, shift, cap, source
):
    def transformed(episodes):
        return [replace(e, reward=scale * (e.reward + 2) ** 3 + shift) for e in episodes]

    golden = GOLDEN if source != "outcome" else ()
    before, after = (
        keys_of(pairs_of(own, cap, margin=0.0, source=source, golden=shown))
        for own, shown in ((played, golden), (transformed(played), transformed(golden)))
    )
    assert before == after


@given(paid(), st.sampled_from([0.0, 0.3]), st.sampled_from([0.0, 0.5]))
def test_a_larger_margin_leaves_a_part_of_the_pairs(played, margin, more):
    assert keys_of(pairs_of(played, 10**6, margin=margin + more)) <= keys_of(
        pairs_of(played, 10**6, margin=margin)
    )


def test_two_failures_pair_by_what_they_were_paid_and_an_agent_may_be_paid_more_than_the_golden_episode():
    played = [("a", "failed", 0.4), ("b", "failed", -1.0), ("c", "limit", 0.0)]
    near, far, late = (
        replace(tiny.episode(said, outcome, index=n), reward=reward)
        for n, (said, outcome, reward) in enumerate(played)
    )
    assert keys_of(made([near, far, late], 9, 1, margin=0.0)) == Counter(
        {("outcome", near.key, far.key): 1, ("outcome", near.key, late.key): 1}
    )
    golden = replace(tiny.episode("g", policy="expert"), reward=0.92)
    better = replace(tiny.episode("a", index=4), reward=0.95)
    assert [
        (p.chosen, p.rejected)
        for p in made([better], 9, 1, source="expert", golden=[golden], margin=0.0)
    ] == [(better, golden)]
    assert not pairs_of([better], source="expert", golden=[golden], margin=0.05)


def test_a_margin_that_leaves_no_pair_says_what_to_change():
    played = [
        replace(tiny.episode(said, "failed", index=n), reward=reward)
        for n, (said, reward) in enumerate([("a", -1.0), ("b", -0.5)])
    ]
    says = (
        "^no two rewards of an instance are more than 0.75 apart, at most they are 0.5: "
        "set the margin below that$"
    )
    with pytest.raises(NothingToLearn, match=says):
        made(played, 4, 1, margin=0.75)
    with pytest.raises(NothingToLearn, match="no pair in 1 groups"):
        made(played[:1], 4, 1, margin=0.75)


@given(groups(), st.integers(1, 4), ends)
def test_efficient_pairs_are_two_successes_of_which_the_chosen_took_fewer_turns(played, cap, until):
    for pair in pairs_of(played, cap, until=until, source="efficient"):
        assert pair.chosen.solved and pair.rejected.solved
        full = {e.key: len(e.turns) for e in played}
        assert full[pair.chosen.key] < full[pair.rejected.key]
    lengths = {
        (a.key, b.key)
        for a in played
        for b in played
        if a.solved
        and b.solved
        and a.turns
        and a.instance == b.instance
        and len(a.turns) < len(b.turns)
    }
    assert {
        (p.chosen.key, p.rejected.key) for p in pairs_of(played, 10**6, source="efficient")
    } == lengths


def test_a_longer_success_is_never_preferred_to_a_shorter_one():
    long, short = tiny.episode("abc"), tiny.episode("a", index=1)
    for chosen, rejected in [(long, short), (short, tiny.episode("abc", "failed"))]:
        with pytest.raises(ValueError, match="both must be solved, the rejected in no fewer turns"):
            Pair(chosen, rejected, "efficient")


def test_noisy_pairs_have_noisy_losers_alone():
    twice = [("p", "CLICK", None)] * 2
    winner, stuck = (
        acted(*twice, outcome="solved"),
        replace(acted(*twice, ("p", "TYPE", None)), index=1),
    )
    wrong = replace(acted(("p", "TYPE", None)), index=2)
    found = made([winner, stuck, wrong], 9, 1, noisy=True)
    assert [(pair.chosen.index, pair.rejected.index) for pair in found] == [(0, 1)]
    assert keys_of(found) + keys_of(made([winner, stuck, wrong], 9, 1, clean=True)) == keys_of(
        made([winner, stuck, wrong], 9, 1)
    )


# ---- segments ----


@given(st.integers(1, 40), st.integers(1, 5))
def test_the_parts_of_an_episode_begin_at_its_first_turn_and_differ_by_a_turn_at_most(turns, parts):
    starts = segment_starts(turns, parts)
    lengths = [b - a for a, b in zip(starts, [*starts[1:], turns])]
    assert starts[0] == 0 and len(starts) == min(parts, turns)
    assert sum(lengths) == turns and max(lengths) - min(lengths) <= 1


@given(explorations())
def test_segments_are_golden_thirds_over_what_was_done_there_beside_whole_episodes(played):
    found = pairs_of(played, 10**6, source="segments", golden=GOLDEN)
    whole = [pair for pair in found if pair.source == "expert"]
    assert keys_of(whole) == keys_of(pairs_of(played, 10**6, source="expert", golden=GOLDEN))
    for pair in (pair for pair in found if pair.source == "segments"):
        start = pair.rejected.forced
        assert pair.chosen.said == tuple("aab"[: start + 1]) and pair.chosen.policy == "expert"
        assert pair.rejected.said[:start] == pair.chosen.said[:start] != pair.rejected.said
        assert len(pair.rejected.turns) == start + 1  # three turns: thirds of one turn each
        assert not any(
            e.solved
            and e.forced == start
            and e.instance == pair.chosen.instance
            and e.said[: start + 1] == pair.rejected.said
            for e in played
        )

    def begun(e):
        """What an episode did in the third that its forced steps lead to."""
        return e.instance, e.forced, e.said[: e.forced + 1]

    here = [
        e
        for e in played
        if len(e.turns) > e.forced and e.said[: e.forced] == tuple("aab"[: e.forced])
    ]
    there = {
        (instance, said)
        for instance, start, said in {begun(e) for e in here if not e.solved}
        - {begun(e) for e in here if e.solved}
        if said != tuple("aab"[: start + 1])
    }
    assert there == {(p.chosen.instance, p.rejected.said) for p in found if p.source == "segments"}


def test_segments_by_hand():
    """A golden episode of seven turns has thirds 0-1, 2-3 and 4-6."""
    golden = [spoken(tiny.episode("abcdefg", policy="expert"))]
    late = spoken(tiny.episode("abcdxyzw", "limit", index=2, forced=4))
    short = spoken(tiny.episode("abq", "failed", index=1, forced=2))
    between = spoken(tiny.episode("abcx", "failed", index=3, forced=3))  # where no third begins
    found = made([late, short, between], 9, 1, source="segments", golden=golden)
    assert {("".join(p.chosen.said), "".join(p.rejected.said)) for p in found} == {
        ("abcdefg", "abcdxyz"),
        ("abcd", "abq"),
    }


def test_what_another_golden_episode_does_is_no_mistake():
    golden = [
        spoken(tiny.episode(words, policy="expert", index=i))
        for i, words in enumerate(("ab", "cb"))
    ]
    failed = [
        spoken(tiny.episode(words, "failed", index=i)) for i, words in enumerate(("cx", "dx"))
    ]
    found = made(failed, 9, 1, source="segments", golden=golden)
    cut = {
        "".join(p.rejected.said)
        for p in found
        if p.source == "segments" and len(p.rejected.turns) == 1
    }
    assert cut == {"d"}


def test_an_action_that_is_right_is_no_mistake_behind_another_thought():
    """Unlike words before the golden action do not make the third that it is a rejected one."""

    def thinking(words, outcome, **changes):
        episode = tiny.episode(words, outcome, **changes)
        actions = zip(episode.turns, ('CLICK(ref="1")', 'CLICK(ref="2")', 'CLICK(ref="3")'))
        return replace(
            episode,
            turns=tuple(
                replace(turn, answer=word, action=action)
                for word, (turn, action) in zip(words, actions)
            ),
        )

    golden = [thinking("abc", "solved", policy="expert")]
    failed = [
        thinking("Abc", "failed"),
        replace(
            thinking("x", "failed", index=1),
            turns=tuple(replace(turn, action=None) for turn in thinking("x", "failed").turns),
        ),
    ]
    found = made(failed, 9, 1, source="segments", golden=golden)
    assert ["".join(p.rejected.said) for p in found if p.source == "segments"] == ["x"]


# ---- DAgger ----


def answered(said, forced, outcome="solved", index=0, **changes):
    """The expert's episode from the state that the first `forced` words lead to."""
    return spoken(
        tiny.episode(said, outcome, policy="dagger", forced=forced, index=index, **changes)
    )


@st.composite
def relabelled(draw):
    """Groups, and for some of the states that their episodes reached an expert from there on."""
    played = [spoken(e) for e in draw(groups())]
    reached = sorted({(*e.instance, e.said[:t]) for e in played for t in range(len(e.turns))})
    return played, [
        answered(
            (*said, *draw(st.text("abc", min_size=1, max_size=2))),
            len(said),
            draw(st.sampled_from(["solved", "solved", "limit"])),
            n,
            task=task,
            seed=seed,
        )
        for n, (task, seed, said) in enumerate(reached)
        if draw(st.booleans())
    ]


@given(relabelled())
def test_dagger_pairs_are_an_experts_answer_that_solves_and_a_failures_in_the_same_state(both):
    played, experts = both
    found = pairs_of(played, 10**6, source="dagger", golden=experts)
    for pair in found:
        t, chosen = pair.chosen.forced, pair.chosen
        assert len(chosen.turns) == len(pair.rejected.turns) == t + 1
        assert chosen.said[:t] == pair.rejected.said[:t] and chosen.said[t] != pair.rejected.said[t]
        assert pair.rejected.policy == "tiny" and chosen.policy == "dagger"
        assert any(
            e.solved
            and e.forced == t
            and e.instance == chosen.instance
            and e.said[: t + 1] == chosen.said
            for e in experts
        )
        assert not any(
            e.solved and e.instance == chosen.instance and e.said[: t + 1] == pair.rejected.said
            for e in (*played, *experts)
        )
    missed = {
        (a.instance, a.said[: a.forced + 1], b.said[: a.forced + 1])
        for a in experts
        if a.solved
        for b in played
        if b.instance == a.instance
        and not b.solved
        and len(b.turns) > a.forced
        and b.said[: a.forced] == a.said[: a.forced]
    }
    begun = {
        (e.instance, e.said[:t])
        for e in (*played, *experts)
        if e.solved
        for t in range(len(e.turns) + 1)
    }
    assert said_in(found) == {
        (instance, a, b) for instance, a, b in missed if (instance, b) not in begun
    }


def test_dagger_pairs_by_hand():
    """The agent did x and then y, which failed, another time z, which failed too, and w, which solved. After
    x the expert did b and solved, so x can be repaired and y cannot. The failure's own turn stands before the
    expert's answer, with its tokens as sampled."""
    own = [
        spoken(tiny.episode(said, outcome, index=n))
        for n, (said, outcome) in enumerate([("xy", "failed"), ("z", "limit"), ("w", "solved")])
    ]
    own[0] = replace(
        own[0], turns=tuple(replace(turn, ids=(n,)) for n, turn in enumerate(own[0].turns))
    )
    experts = [answered("ac", 0), answered("xbc", 1, index=1)]
    found = {
        ("".join(p.chosen.said), "".join(p.rejected.said)): p
        for p in made(own, 9, 1, source="dagger", golden=experts)
    }
    assert found.keys() == {("a", "z"), ("xb", "xy")}
    pair = found["xb", "xy"]
    assert pair.chosen.turns == (own[0].turns[0], experts[1].turns[1]) and pair.source == "dagger"
    # where the expert did not solve from x on, x itself is rejected, and nobody is preferred there
    lost = [experts[0], replace(experts[1], outcome="limit")]
    assert {
        ("".join(p.chosen.said), "".join(p.rejected.said))
        for p in made(own, 9, 1, source="dagger", golden=lost)
    } == {("a", "x"), ("a", "z")}
    with pytest.raises(NothingToLearn, match="or let the experts answer in more states$"):
        made(own, 9, 1, source="dagger", golden=[answered("qa", 1)])


def test_what_was_given_to_a_failure_is_not_its_own_answer():
    given_x = spoken(tiny.episode("xy", "failed", forced=1))
    assert not pairs_of([given_x], source="dagger", golden=[answered("a", 0)])
    assert pairs_of([given_x], source="dagger", golden=[answered("xa", 1)])


# ---- values ----


@st.composite
def continued(draw):
    """Groups in which any number of first steps were given, by whatever was said."""
    return [
        spoken(replace(episode, forced=draw(st.integers(0, len(episode.turns)))))
        for episode in draw(groups()) + draw(groups())
    ]


def value_of(played, instance, given):
    """The share of the instance's continuations from there that solved; None without any."""
    here = [
        e.solved
        for e in played
        if (e.instance, e.said[: e.forced]) == (instance, given) and e.forced == len(given)
    ]
    return sum(here) / len(here) if here else None


@given(continued(), st.sampled_from([None, 0.0, 0.3, 0.6]))
def test_value_pairs_are_another_way_that_solved_and_the_step_that_lost_more_than_the_margin(
    played, margin
):
    expected = set()
    for failed in (e for e in played if not e.solved):
        for t in range(failed.forced, len(failed.turns)):
            before, after = (value_of(played, failed.instance, failed.said[:n]) for n in (t, t + 1))
            after = 0.0 if t + 1 == len(failed.turns) else after
            if None not in (before, after) and before - after > (margin or 0):
                expected |= {
                    (e.instance, e.said, failed.said)
                    for e in played
                    if e.solved
                    and e.instance == failed.instance
                    and e.forced == t < len(e.turns)
                    and e.said[:t] == failed.said[:t]
                    and e.said[t] != failed.said[t]
                }
    found = pairs_of(played, 10**6, source="value", margin=margin)
    assert {(p.chosen.instance, p.chosen.said, p.rejected.said) for p in found} == expected
    for pair in pairs_of(played, 10**6, until="turn", source="value", margin=margin):
        assert len(pair.rejected.turns) == common(pair.chosen.said, pair.rejected.said) + 1


def test_value_pairs_by_hand():
    """From the first page one of two solves, behind "a" two of two, behind "ab" none: "b" was the slip."""
    failed = spoken(tiny.episode("abc", "failed"))
    failed = replace(
        failed, turns=tuple(replace(turn, ids=(n,)) for n, turn in enumerate(failed.turns))
    )
    onward = [
        tiny.episode(said, outcome, index=n, forced=forced)
        for n, (said, outcome, forced) in enumerate(
            [("xy", "solved", 0), ("ad", "solved", 1), ("abd", "solved", 1), ("abe", "failed", 2)],
            start=1,
        )
    ]
    (pair,) = made([failed, *map(spoken, onward)], 9, 1, source="value")
    assert ("".join(pair.chosen.said), "".join(pair.rejected.said), pair.source) == (
        "ad",
        "abc",
        "value",
    )
    assert (
        pair.chosen.turns[0] == failed.turns[0] and pair.chosen.index == 2
    )  # the tokens as sampled
    with pytest.raises(
        NothingToLearn, match="no step of a failure in 1 groups lost more than 1 in value"
    ):
        made([failed, *map(spoken, onward)], 9, 1, source="value", margin=1.0)


def test_an_action_that_was_also_the_way_to_the_solution_is_no_slip_whatever_was_thought():
    failed, solved = (
        tiny.episode("b", "failed"),
        tiny.episode("a", index=1),
    )  # one action, two thoughts
    assert not pairs_of([failed, solved], source="value")
    assert pairs_of([spoken(failed), spoken(solved)], source="value")


def said_in(pairs):
    return {(pair.chosen.instance, pair.chosen.said, pair.rejected.said) for pair in pairs}


@given(groups(), groups(), st.sampled_from([None, 0.0, 0.5]), st.booleans(), ends)
def test_earlier_failures_are_rejected_too_and_never_chosen(played, before, margin, dense, until):
    """Earlier ones were paid in between: by reward alone they would be preferred to a failure."""
    played = [replace(e, progress=None if e.solved else 0.5) for e in played]
    before = [
        replace(
            e,
            index=e.index + 90,
            policy="before",
            reward=e.reward / 2 + 0.3,
            progress=None if e.solved else 0.9,
        )
        for e in before
    ]
    rules = {"margin": margin, "dense": dense and margin is None, "until": until}
    plain, kept = (pairs_of(played, 10**6, failures=failures, **rules) for failures in ((), before))
    assert all(pair.chosen.policy == "tiny" for pair in kept)
    assert all(pair.rejected.policy == "tiny" or not pair.rejected.solved for pair in kept)
    assert said_in(plain) <= said_in(kept)
    rejected = {
        e.key
        for e in before
        if not e.solved
        and e.turns
        and any(
            a.solved and a.instance == e.instance and a.turns and a.said != e.said for a in played
        )
    }
    assert until == "turn" or rejected <= {pair.rejected.key for pair in kept}


def test_an_instance_that_is_always_solved_now_still_has_its_earlier_failures():
    played = [tiny.episode("a", index=n) for n in range(2)]
    before = [
        tiny.episode("b", "failed", policy="before"),
        tiny.episode("c", policy="before", index=1),
    ]
    with pytest.raises(NothingToLearn, match="1 solved every time"):
        made(played, 4, 1)
    pairs = made(played, 4, 1, failures=before)
    assert {(p.chosen.policy, *p.rejected.said) for p in pairs} == {("tiny", "b")}
    elsewhere = [replace(e, seed=99) for e in before]
    with pytest.raises(NothingToLearn):
        made(played, 4, 1, failures=elsewhere)
