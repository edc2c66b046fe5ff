"""Pairs: what is preferred to what, within one task instance and nowhere else.

Reward differences across instances say how hard a page is, not how well it was played. So episodes are
grouped by (task, seed). SOURCES says where the pairs of a group come from: the agent's own successes and
failures (EF-DPO), a golden episode against its failures (ETO), two ways on from one step (ETO's step-wise
contrast), a way that solved against the step at which the value dropped (IPR), an expert's answer against
what failed in the same state (DAgger), a short success against a longer one, or several of them. The verdict,
or with a margin the reward, says which is better. What both sides have in common cancels in the loss. A pair
can be cut behind the first place where they differ: the decision that the verdict is about, unless it is but
another way to put a thought. `cut_at_turn` does so when pairs are made or read, `cut_at_token` when they are
tokenised. Step-wise pairs and DAgger's end with the action compared anyway.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, pairwise, product, zip_longest

from minidpo.data.episodes import Episode, by_instance, grouped, is_silent
from minidpo.data.tree import common
from minidpo.data.values import step_values
from minidpo.model.chat import Dialogue


def cut_at_turn(chosen, rejected) -> tuple:
    """Both sides, episodes or conversations, up to the first turn in which the agent said something else.
    What came later has other causes."""
    turns = common(chosen.said, rejected.said) + 1
    return chosen.up_to(turns), rejected.up_to(turns)


def cut_at_token(chosen: Dialogue, rejected: Dialogue) -> Dialogue:
    """The rejected up to the first token that differs.

    All before it is the same in both and cancels. What follows is well-formed text after a wrong word, and
    pushing that down unlearns writing. Where the pages differ first, nothing is cut.

    >>> cut_at_token(Dialogue([1, 5, 7, 8], [-1, 0, 0, 0]), Dialogue([1, 5, 6, 8], [-1, 0, 0, 0]))
    Dialogue(ids=[1, 5, 6], turns=[-1, 0, 0])
    """
    t = common(chosen.ids, rejected.ids)
    if t < min(len(chosen.ids), len(rejected.ids)) and rejected.turns[t] >= 0:
        return Dialogue(rejected.ids[: t + 1], rejected.turns[: t + 1])
    return rejected


def is_better(a: Episode, b: Episode, margin: float | None = None) -> bool:
    """Whether a is to be preferred: by the verdict or, with a margin, by a reward that is higher by more than
    it. An episode that ran out of steps was not judged, so it is never the better one.

    Where failures pay 0 and successes 1, a margin below 1 says what the verdict says. ETO (Song et al. 2024,
    arXiv:2403.02502, Algorithm 1) prefers whatever has the higher reward: margin 0.
    """
    if margin is None:
        return a.solved and not b.solved
    return a.outcome in ("solved", "failed") and a.reward - b.reward > margin


class NothingToLearn(ValueError):
    """These episodes have no two sides to prefer one of, or none to imitate."""


@dataclass(frozen=True)
class Pair:
    """chosen ≻ rejected on one instance: only the chosen is solved, or paid more or, failures both, it
    came nearer or, successes both, it is shorter. Of the source "unpaired" the two stand side by side and
    are not compared: KTO judges each alone."""

    chosen: Episode
    rejected: Episode
    source: str = "outcome"

    def __post_init__(self):
        c, r = self.chosen, self.rejected
        if c.instance != r.instance and self.source != "unpaired":
            raise ValueError(
                f"a pair needs one instance, got {c.task} seed {c.seed} and {r.task} seed {r.seed}"
            )
        if self.source == "progress":
            if c.solved or r.solved or None in (c.progress, r.progress) or c.progress <= r.progress:
                raise ValueError(
                    f"{c.task} seed {c.seed}: both must have failed, the chosen come nearer, "
                    f"got {c.outcome} at {c.progress} and {r.outcome} at {r.progress}"
                )
        elif self.source == "efficient":
            if not (c.solved and r.solved and len(c.turns) <= len(r.turns)):
                raise ValueError(
                    f"{c.task} seed {c.seed}: both must be solved, the rejected in no fewer "
                    f"turns, got {c.outcome} in {len(c.turns)}, {r.outcome} in {len(r.turns)}"
                )
        elif not (is_better(c, r) or is_better(c, r, margin=0.0)):
            raise ValueError(
                f"{c.task} seed {c.seed}: the chosen must be solved and the rejected not, or "
                f"its reward higher, got {c.outcome} at {c.reward}, {r.outcome} at {r.reward}"
            )

    def provenance(self) -> dict:
        """Where it came from, for the record: which two episodes, by whom, and by which rule."""
        sides = (
            {
                "task": e.task,
                "seed": e.seed,
                "policy": e.policy,
                "index": e.index,
                "forced": e.forced,
                "sampling": e.sampling,
                "outcome": e.outcome,
                "reward": e.reward,
                "progress": e.progress,
                "turns": len(e.turns),
            }
            for e in (self.chosen, self.rejected)
        )
        return {"source": self.source, **dict(zip(("chosen", "rejected"), sides))}


def different(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs without repeats: of those whose two sides say the same, one."""
    return list({(pair.chosen.said, pair.rejected.said): pair for pair in pairs}.values())


def noisy(episode: Episode) -> bool:
    """Whether an action was unusable, impossible or, but for waiting and arrow keys, repeated on a page as it
    was: DMPO's noisy setting trains on such losers, its clean one does not (2024, arXiv:2406.14868)."""
    return any(turn.error is not None for turn in episode.turns) or any(
        a.action == b.action and a.observation == b.observation and not is_silent(b)
        for a, b in pairwise(episode.turns)
    )


def outcome(
    group: Sequence[Episode], golden: Sequence[Episode], margin: float | None
) -> list[Pair]:
    """The agent's successes ≻ its failures (EF-DPO) or, with a margin, the higher reward ≻ the lower."""
    played = [e for e in group if not e.forced]
    return [Pair(a, b) for a, b in product(played, played) if is_better(a, b, margin)]


def expert(group: Sequence[Episode], golden: Sequence[Episode], margin: float | None) -> list[Pair]:
    """A golden episode of the instance ≻ the agent's failures. ETO: Song et al. 2024, arXiv:2403.02502. By
    their rewards the agent may be the better one, as in the authors' construct_preference.py."""
    played = [e for e in group if not e.forced]
    return [
        Pair(a, b, "expert")
        for a, b in (*product(golden, played), *product(played, golden))
        if is_better(a, b, margin)
    ]


def efficient(
    group: Sequence[Episode], golden: Sequence[Episode], margin: float | None
) -> list[Pair]:
    """A success in fewer turns ≻ a success in more."""
    solved = [e for e in group if e.solved and not e.forced]
    return [
        Pair(a, b, "efficient") for a, b in product(solved, solved) if len(a.turns) < len(b.turns)
    ]


def stepwise(
    group: Sequence[Episode], golden: Sequence[Episode], margin: float | None
) -> list[Pair]:
    """After the same golden steps, an action from which the page was solved ≻ one from which it was not.

    ETO, appendix C, as configs/papers/eto-stepwise.toml has it: `forced` steps were given, the next was the
    agent's own choice and the rest its own doing. The golden episode's next action also leads to a solution.
    Both sides end with the action compared. Differs from the paper: an action that also led to a success is
    no mistake and is not rejected; unless `golden_steps` is "every", one step is drawn.
    """
    by_prefix = grouped((e for e in group if len(e.turns) > e.forced), lambda e: e.said[: e.forced])
    pairs = []
    for prefix, episodes in sorted(by_prefix.items(), key=lambda item: len(item[0])):
        t = len(prefix)
        shown = [
            e for e in golden if len(e.turns) > t and e.said[:t] == prefix
        ]  # there may be several ways
        good = [e for e in episodes if e.solved] + shown
        right_actions = {e.turns[t].action for e in good} - {None}
        bad = [e for e in episodes if not e.solved and e.turns[t].action not in right_actions]
        pairs += [Pair(a.up_to(t + 1), b.up_to(t + 1), "stepwise") for a, b in product(good, bad)]
    return different(pairs)


def segment_starts(turns: int, parts: int = 3) -> list[int]:
    """The turns at which the parts of an episode begin, as equal as can be; a short one has fewer.

    >>> segment_starts(7), segment_starts(2)
    ([0, 2, 4], [0, 1])
    """
    return sorted({part * turns // parts for part in range(parts)})


def segments(
    group: Sequence[Episode], golden: Sequence[Episode], margin: float | None
) -> list[Pair]:
    """After the same golden steps, the golden episode's next third ≻ what the agent did in place of it, where
    the page was not solved. Both sides end with the third.

    HPL, arXiv:2510.03253, with three fixed segments (start, middle, end) beside whole episodes. Differs from
    the paper: no curriculum, the parts weigh alike, and actions that also began a success are not rejected.
    """
    pairs = []
    for shown in golden:
        for start, end in pairwise([*segment_starts(len(shown.turns)), len(shown.turns)]):
            given = shown.said[:start]
            here = [
                e for e in group if e.forced == start < len(e.turns) and e.said[:start] == given
            ]
            right = {
                e.acted[:end] for e in (*here, *golden) if e.solved and e.said[:start] == given
            }
            pairs += [
                Pair(shown.up_to(end), e.up_to(end), "segments")
                for e in here
                if not e.solved and e.acted[:end] not in right
            ]
    return different(pairs)


def on_from(failed: Episode, onward: Episode) -> Episode:
    """The way on, behind the failure's own turns: these know their tokens as sampled, given ones do not."""
    return replace(onward, turns=failed.turns[: onward.forced] + onward.turns[onward.forced :])


def value(group: Sequence[Episode], golden: Sequence[Episode], margin: float | None) -> list[Pair]:
    """Where the value dropped by more than the margin (default 0), a continuation that solved from before
    that step ≻ the failure that took it.

    The two have all before the step in common, and the continuation did something else there. So a pair that
    is cut ends, on its rejected side, with the step that lost the value. IPR: Xiong et al. 2024,
    arXiv:2406.11176. Differs from the paper: no expert, the chosen is the agent's own as well; and no losses
    of whole episodes and of imitation are added.
    """
    pairs = []
    for failed in (e for e in group if not e.solved):
        for t, (before, after) in enumerate(pairwise(step_values(failed, group))):
            if t < failed.forced or None in (before, after) or before - after <= (margin or 0.0):
                continue
            onward = [
                e for e in group if e.solved and e.forced == t and e.said[:t] == failed.said[:t]
            ]
            pairs += [
                Pair(on_from(failed, e), failed, "value")
                for e in onward
                if len(e.turns) > t and e.turns[t].action != failed.turns[t].action
            ]
    return different(pairs)


def dagger(group: Sequence[Episode], golden: Sequence[Episode], margin: float | None) -> list[Pair]:
    """In a state that the agent reached, the expert's answer ≻ what a failure answered there. Both end there.

    golden: the expert from such states on, solved; its `forced` steps are the agent's. DAgger: Ross et al.
    2011, arXiv:1011.0686. Differs from the paper: the answer is preferred, not imitated; and an action with
    which a success began is not rejected, not even if only the expert went on from there to solve the page.
    """
    pairs = []
    for shown in (e for e in golden if len(e.turns) > e.forced):
        t = shown.forced
        here = [e for e in (*group, *golden) if len(e.turns) > t and e.said[:t] == shown.said[:t]]
        right_actions = {e.turns[t].action for e in here if e.solved} - {None}
        bad = [
            e
            for e in here
            if not e.solved and e.forced <= t and e.turns[t].action not in right_actions
        ]
        pairs += [Pair(on_from(e, shown.up_to(t + 1)), e.up_to(t + 1), "dagger") for e in bad]
    return different(pairs)


def progress(
    group: Sequence[Episode], golden: Sequence[Episode], margin: float | None
) -> list[Pair]:
    """Where nothing was solved: the failure that came nearer ≻ the other, if page or form say how near."""
    if any(e.solved for e in group):
        return []
    failed = [e for e in group if e.progress is not None and not e.forced]
    return [Pair(a, b, "progress") for a, b in product(failed, failed) if a.progress > b.progress]


SOURCES = {
    "outcome": (outcome,),
    "expert": (expert,),
    "eto": (outcome, expert),
    "stepwise": (stepwise,),
    "mixture": (outcome, expert, stepwise),
    "efficient": (efficient,),
    "segments": (expert, segments),
    "value": (value,),
    "dagger": (dagger,),
}
NEEDS_GOLDEN = ("expert", "eto", "stepwise", "mixture", "segments", "dagger")


def is_about_successes(source: str, dense: bool) -> bool:
    """Whether failures of an instance, without what solved it, would say nothing or something wrong."""
    return source in ("stepwise", "mixture", "segments", "value", "dagger") or (
        source == "efficient" and not dense
    )


@dataclass(frozen=True)
class PairRules:
    """Which pairs are made of a group, and how many."""

    per_instance: int
    per_task: int | None = None  # as evenly from its instances as can be; None: no limit
    source: str = "outcome"  # a key of SOURCES
    until: str = "end"  # where they are cut: "end", "turn" or "token"
    clean: bool = False  # without `noisy` failures
    dense: bool = False  # `progress` is a source, too
    noisy: bool = False  # of failures the `noisy` ones alone
    margin: float | None = None  # as in `is_better`; of `value` the least drop


def make_pairs(
    episodes: Sequence[Episode],
    rules: PairRules,
    seed: int,
    golden: Sequence[Episode] = (),
    failures: Sequence[Episode] = (),
) -> list[Pair]:
    """The pairs of all instances that have two sides, in a seeded random order.

    Sources take turns; within one, the episodes used least so far come first. Two episodes that say the same
    are two, so one pair may come again: what was often done weighs more.
    `golden`: solved episodes of the same instances, for the sources that need them. `failures`: earlier ones
    on these instances, which are rejected, too, and never chosen. Pairs cut at a token stay whole: no token
    is known yet. Raises NothingToLearn if there is no pair.
    """
    golden_of = by_instance([episode for episode in golden if episode.solved and episode.turns])
    earlier_of = by_instance(failures)
    groups = [
        (group, golden_of.get(instance, []), earlier_of.get(instance, []))
        for instance, group in by_instance(episodes).items()
    ]
    ranked: list[tuple[int, Pair]] = []  # each pair with its place among those of its instance
    for sides in groups:
        ranked += enumerate(_in_turn(_candidates(*sides, rules, seed), rules.per_instance))
    if not ranked:
        raise NothingToLearn(_why_none(groups, rules, seed))
    pairs = (
        [pair for _, pair in ranked]
        if rules.per_task is None
        else _capped(ranked, rules.per_task, seed)
    )
    random.Random(seed).shuffle(pairs)
    return pairs


def _why_none(groups: Sequence[tuple[list[Episode], ...]], rules: PairRules, seed: int) -> str:
    """Why these groups gave no pair, and what to change."""
    if rules.source == "value":
        return (
            f"no step of a failure in {len(groups)} groups lost more than {rules.margin or 0:g} in value "
            "where another way solved: --data takes the continuations by collect.py --values, too; play "
            "more, or lower the margin"
        )
    if rules.margin and (
        close := [
            pair
            for sides in groups
            for pair in _candidates(*sides, replace(rules, margin=0.0), seed)
        ]
    ):
        widest = max(pair.chosen.reward - pair.rejected.reward for pair in close)
        return (
            f"no two rewards of an instance are more than {rules.margin:g} apart, at most they are "
            f"{widest:g}: set the margin below that"
        )
    if (rules.clean or rules.noisy) and any(
        _candidates(*sides, replace(rules, clean=False, noisy=False), seed) for sides in groups
    ):
        return f"without {'clean' if rules.clean else 'noisy'} there would be pairs: drop it"
    always = sum(all(e.solved for e in group) for group, _, _ in groups)
    never = sum(not any(e.solved for e in group) for group, _, _ in groups)
    return (
        f"no pair in {len(groups)} groups ({always} solved every time, {never} never): nothing to prefer;"
        " try more instances, larger groups, a higher temperature, or a better start (more SFT)"
        + "; or let the experts answer in more states"
        * (rules.source == "dagger" and always < len(groups))
    )


def unpaired_successes(
    episodes: Sequence[Episode], pairs: Sequence[Pair], seed: int
) -> list[Episode]:
    """One random solved episode of each instance without a pair."""
    paired = {pair.chosen.instance for pair in pairs}
    solved = by_instance([e for e in episodes if e.solved and e.turns and not e.forced])
    return [
        random.Random(f"{seed} {instance}").choice(group)
        for instance, group in solved.items()
        if instance not in paired
    ]


def _candidates(
    group: Sequence[Episode],
    golden: Sequence[Episode],
    earlier: Sequence[Episode],
    rules: PairRules,
    seed: int,
) -> list[Pair]:
    """All pairs of an instance, cut where it is to be done by turns, and different then."""
    shuffle = random.Random(f"{seed} {group[0].instance}").shuffle
    solved = [e for e in group if e.solved and e.turns]
    unsolved = [
        e
        for e in (*group, *earlier)  # clean leaves out the noisy failures, noisy the others
        if not e.solved and e.turns and not (rules.clean if noisy(e) else rules.noisy)
    ]
    never_chosen = set(map(id, earlier))
    shuffle(solved)
    shuffle(unsolved)
    sources = SOURCES[rules.source] + ((progress,) if rules.dense else ())
    pairs = [
        pair
        for source in sources
        for pair in source(solved + unsolved, golden, rules.margin)
        if pair.chosen.said != pair.rejected.said and id(pair.chosen) not in never_chosen
    ]
    if rules.until == "turn":  # cut short, pairs that differed only later have become one
        pairs = different(
            [Pair(*cut_at_turn(pair.chosen, pair.rejected), pair.source) for pair in pairs]
        )
    return pairs


def _in_turn(candidates: list[Pair], count: int) -> list[Pair]:
    """The first `count` of an instance's pairs: sources in turn, of each what was used least so far."""
    used: Counter = Counter()
    taken: list[Pair] = []

    def episodes(p: Pair) -> list[tuple]:
        return [
            (p.source, e.policy, repr(e.sampling), e.forced, e.index)
            for e in (p.chosen, p.rejected)
        ]

    def wear(pair: Pair) -> tuple[int, int]:
        return used[pair.source], sum(used[episode] for episode in episodes(pair))

    for _ in range(min(count, len(candidates))):
        best = min(candidates, key=wear)
        used.update([best.source, *episodes(best)])
        candidates.remove(best)
        taken.append(best)
    return taken


def _capped(ranked: list[tuple[int, Pair]], per_task: int, seed: int) -> list[Pair]:
    """At most `per_task` pairs of each task: those ranked first in their instance come first."""
    pairs = []
    for task, of_task in grouped(ranked, lambda item: item[1].chosen.task).items():
        random.Random(f"{seed} {task}").shuffle(of_task)
        pairs += [pair for _, pair in sorted(of_task, key=lambda item: item[0])[:per_task]]
    return pairs


def check_prompts(episodes: Sequence[Episode]) -> None:
    """Raises ValueError where those of an instance answer different prompts: another task, other examples."""
    for first, *others in by_instance(episodes).values():
        if other := next(
            (e for e in others if (e.shots, e.instruction) != (first.shots, first.instruction)),
            None,
        ):
            raise ValueError(
                f"{other.name} of {other.policy}: played behind other examples, or told another "
                f"task, than episode {first.index} of {first.policy}: train on each alone"
            )


def unpaired(episodes: Sequence[Episode], seed: int) -> list[Pair]:
    """All successes as desirable and all failures as undesirable examples, side by side in two columns. The
    rarer kind is repeated until there are as many as of the other, so both have the same weight. The loss
    does not care which two meet; those of one instance do where they can, because they share tokens."""
    played = [e for e in episodes if e.turns and not e.forced]
    solved, failed = [e for e in played if e.solved], [e for e in played if not e.solved]
    if not solved or not failed:
        raise NothingToLearn("all episodes were solved, or none: KTO needs both kinds")
    columns, lone_solved, lone_failed = [], [], []
    for group in by_instance([*solved, *failed]).values():
        good, bad = [e for e in group if e.solved], [e for e in group if not e.solved]
        columns += zip(good, bad)
        lone_solved += good[len(bad) :]
        lone_failed += bad[len(good) :]
    draw = random.Random(seed)
    good_again, bad_again = (cycle(draw.sample(kind, len(kind))) for kind in (solved, failed))
    for good, bad in zip_longest(lone_solved, lone_failed):
        columns.append((good or next(good_again), bad or next(bad_again)))
    draw.shuffle(columns)
    return [Pair(good, bad, "unpaired") for good, bad in columns]
