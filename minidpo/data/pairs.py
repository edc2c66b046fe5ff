"""Pairs: which episode is preferred to which, always within one task instance.

Reward differences across instances say how hard a page is, not how well it was played. So a rule looks at the
episodes of one (task, seed) at a time. `outcome_pairs` is EF-DPO's rule, `contrast` ETO's, `stepwise_pairs`
ETO's step-wise one. A rule gives every pair it finds; `choose` takes a few of each instance. What both sides
have in common cancels in DPO's loss, so a pair can be cut where the two first differ.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise, product, zip_longest

from minidpo.data.episodes import Episode, by_instance, grouped, is_silent
from minidpo.data.tree import common
from minidpo.model.chat import Dialogue


class NothingToLearn(ValueError):
    """These episodes contain no pair, or none to imitate."""


def is_better(a: Episode, b: Episode) -> bool:
    """Whether a is better than b: it solved the page and b did not, or it got more reward.

    An episode that ran out of steps was not judged, so it never wins by its reward.
    """
    return (a.solved and not b.solved) or (
        a.outcome in ("solved", "failed") and a.reward > b.reward
    )


@dataclass(frozen=True)
class Pair:
    """chosen ≻ rejected on one instance. With source "unpaired" the two are not compared: KTO judges each alone."""

    chosen: Episode
    rejected: Episode
    source: str = "outcome"

    def __post_init__(self):
        c, r = self.chosen, self.rejected
        if self.source != "unpaired" and (c.instance != r.instance or not is_better(c, r)):
            raise ValueError(
                "the chosen of a pair is solved and the rejected not, or its reward higher, on one instance; "
                f"got {c.name}, {c.outcome} at {c.reward}, and {r.name}, {r.outcome} at {r.reward}"
            )

    def provenance(self) -> dict:
        """Where the pair came from, for the record: which two episodes, by whom, and by which rule."""
        return {
            "source": self.source,
            "chosen": _origin(self.chosen),
            "rejected": _origin(self.rejected),
        }


def _origin(episode: Episode) -> dict:
    names = ["task", "seed", "policy", "index", "forced", "sampling", "outcome", "reward"]
    return {**{name: getattr(episode, name) for name in names}, "turns": len(episode.turns)}


# ---- rules: from episodes to pairs ----


def outcome_pairs(played: Sequence[Episode]) -> list[Pair]:
    """The agent's successes ≻ its failures on the same instance (EF-DPO)."""
    pairs = []
    for group in by_instance(whole(played)).values():
        pairs += [Pair(a, b) for a, b in product(group, group) if a.solved and not b.solved]
    return pairs


def contrast(golden: Sequence[Episode], played: Sequence[Episode]) -> list[Pair]:
    """A golden episode against the agent's on its instance: the one with more reward ≻ the other.

    ETO: Song et al. 2024, arXiv:2403.02502, Algorithm 1 and the authors' construct_preference.py; ties give no
    pair. Differs from the paper: a solved episode beats one that was not, whatever their rewards.
    """
    shown = by_instance(whole(golden))
    pairs = []
    for instance, group in by_instance(whole(played)).items():
        for expert, episode in product(shown.get(instance, []), group):
            if is_better(expert, episode):
                pairs.append(Pair(expert, episode, "expert"))
            elif is_better(episode, expert):
                pairs.append(Pair(episode, expert, "expert"))
    return pairs


def stepwise_pairs(golden: Sequence[Episode], played: Sequence[Episode]) -> list[Pair]:
    """After the same golden steps, an action that led to a solution ≻ one that did not.

    `played` began with golden steps that were given (`Episode.forced`); the agent chose the next action and all
    later ones. The golden episode's own next action counts as one that led to a solution. Both sides end with
    the action compared. ETO, appendix C. Differs from the paper: an action that also led to a success is not
    rejected.
    """
    shown = by_instance(golden)
    pairs = []
    for instance, group in by_instance(played).items():
        chose = [e for e in group if len(e.turns) > e.forced]
        by_start = grouped(chose, lambda e: e.said[: e.forced])
        for start in sorted(by_start, key=len):
            t = len(start)
            golden_here = shown.get(instance, [])
            good = [e for e in by_start[start] if e.solved]
            good += [e for e in golden_here if len(e.turns) > t and e.said[:t] == start]
            right = {e.turns[t].action for e in good} - {None}
            failed = [e for e in by_start[start] if not e.solved]
            bad = [e for e in failed if e.turns[t].action not in right]
            for a, b in product(good, bad):
                pairs.append(Pair(a.up_to(t + 1), b.up_to(t + 1), "stepwise"))
    return different(pairs)


def unpaired(played: Sequence[Episode], seed: int) -> list[Pair]:
    """All successes as desirable and all failures as undesirable examples (KTO), in two columns."""
    return [Pair(good, bad, "unpaired") for good, bad in side_by_side(whole(played), seed)]


def side_by_side(attempts: Sequence, seed: int) -> list[tuple]:
    """Episodes or conversations in two columns: those that solved their instance, and those that failed.

    The rarer kind is repeated until both are equally frequent. The loss does not depend on which two stand side
    by side; we put those of one instance together where possible, because they share tokens. Raises
    NothingToLearn if one kind is missing.
    """
    solved = [e for e in attempts if e.solved]
    failed = [e for e in attempts if not e.solved]
    if not solved or not failed:
        raise NothingToLearn("all episodes were solved, or none: KTO needs both kinds")
    columns, lone_solved, lone_failed = [], [], []
    for group in by_instance([*solved, *failed]).values():
        good = [e for e in group if e.solved]
        bad = [e for e in group if not e.solved]
        columns += zip(good, bad)
        lone_solved += good[len(bad) :]
        lone_failed += bad[len(good) :]
    draw = random.Random(seed)
    good_again, bad_again = (cycle(draw.sample(kind, len(kind))) for kind in (solved, failed))
    for good, bad in zip_longest(lone_solved, lone_failed):
        columns.append((good or next(good_again), bad or next(bad_again)))
    draw.shuffle(columns)
    return columns


def whole(episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes that were played from the first page on and have at least one turn."""
    return [e for e in episodes if e.turns and not e.forced]


def is_noisy(episode: Episode) -> bool:
    """Whether an action was unusable, impossible, or repeated on an unchanged page (waiting and arrow keys may be
    repeated). DMPO (arXiv:2406.14868) trains on such losers in its noisy setting and not in its clean one."""
    if any(turn.error is not None for turn in episode.turns):
        return True
    return any(
        a.action == b.action and a.observation == b.observation and not is_silent(b)
        for a, b in pairwise(episode.turns)
    )


def different(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs without duplicates: pairs with the same answers on both sides count once."""
    return list({(pair.chosen.said, pair.rejected.said): pair for pair in pairs}.values())


# ---- which pairs train, and where they are cut ----


def choose(
    pairs: Sequence[Pair],
    per_instance: int,
    seed: int,
    *,
    per_task: int | None = None,
    until: str = "end",
) -> list[Pair]:
    """At most `per_instance` pairs of each instance and `per_task` of each task, in a seeded random order.

    Within an instance, sources take turns, and the episodes used least so far come first. Duplicates are kept,
    so frequent behaviour counts more. With until="turn" pairs are cut here, and those that differed only after
    the cut become one. KTO's unpaired examples all stay, in their order. Raises NothingToLearn if no pair is
    left.
    """
    if pairs and pairs[0].source == "unpaired":
        return list(pairs)
    pairs = [pair for pair in pairs if pair.chosen.said != pair.rejected.said]
    if not pairs:
        raise NothingToLearn("no two episodes of one instance differ in their verdict")
    ranked: list[tuple[int, Pair]] = []  # each pair with its rank in its instance
    for group in grouped(pairs, lambda pair: pair.chosen.instance).values():
        found = _shuffled(group, seed)
        if until == "turn":
            found = different([Pair(*cut_at_turn(p.chosen, p.rejected), p.source) for p in found])
        ranked += enumerate(_in_turn(found, per_instance))
    if per_task is not None:
        by_task = grouped(ranked, lambda item: item[1].chosen.task)
        ranked = []
        for task, of_task in by_task.items():  # best ranks first, so that all instances get a share
            random.Random(f"{seed} {task}").shuffle(of_task)
            ranked += sorted(of_task, key=lambda item: item[0])[:per_task]
    chosen = [pair for _, pair in ranked]
    random.Random(seed).shuffle(chosen)
    return chosen


def _shuffled(pairs: Sequence[Pair], seed: int) -> list[Pair]:
    """An instance's pairs, ordered by source, then by the chosen, then by the rejected, both shuffled."""
    draw = random.Random(f"{seed} {pairs[0].chosen.instance}")
    place: dict[int, int] = {}  # of each episode, by its id
    for side in ([pair.chosen for pair in pairs], [pair.rejected for pair in pairs]):
        episodes = list(dict.fromkeys(map(id, side)))
        draw.shuffle(episodes)
        place |= {episode: n for n, episode in enumerate(episodes)}
    sources = [pair.source for pair in pairs]
    return sorted(
        pairs, key=lambda p: (sources.index(p.source), place[id(p.chosen)], place[id(p.rejected)])
    )


def _in_turn(candidates: list[Pair], count: int) -> list[Pair]:
    """`count` pairs of an instance: sources take turns, and of each the least used episodes come first."""
    used: Counter = Counter()
    taken: list[Pair] = []

    def episodes(pair: Pair) -> list[tuple]:
        return [
            (pair.source, e.policy, repr(e.sampling), e.forced, e.index)
            for e in (pair.chosen, pair.rejected)
        ]

    def uses(pair: Pair) -> tuple[int, int]:
        return used[pair.source], sum(used[episode] for episode in episodes(pair))

    for _ in range(min(count, len(candidates))):
        least_used = min(candidates, key=uses)
        used.update([least_used.source, *episodes(least_used)])
        candidates.remove(least_used)
        taken.append(least_used)
    return taken


def unpaired_successes(episodes: Sequence[Episode], pairs: Sequence, seed: int) -> list[Episode]:
    """One random solved episode of each instance without a pair."""
    paired = {pair.chosen.instance for pair in pairs}
    solved = by_instance([e for e in whole(episodes) if e.solved])
    return [
        random.Random(f"{seed} {instance}").choice(group)
        for instance, group in solved.items()
        if instance not in paired
    ]


def cut_at_turn(chosen, rejected) -> tuple:
    """Both sides, episodes or conversations, up to the first turn in which their answers differ. Later
    differences follow from the first one."""
    turns = common(chosen.said, rejected.said) + 1
    return chosen.up_to(turns), rejected.up_to(turns)


def cut_at_token(chosen: Dialogue, rejected: Dialogue) -> Dialogue:
    """The rejected answer, cut after its first token that differs from the chosen one.

    All earlier tokens are the same in both and cancel. The later ones are well-formed text after a wrong word:
    pushing them down would unlearn writing. If the pages differ before the answers do, nothing is cut.

    >>> cut_at_token(Dialogue([1, 5, 7, 8], [-1, 0, 0, 0]), Dialogue([1, 5, 6, 8], [-1, 0, 0, 0]))
    Dialogue(ids=[1, 5, 6], turns=[-1, 0, 0])
    """
    t = common(chosen.ids, rejected.ids)
    if t < min(len(chosen.ids), len(rejected.ids)) and rejected.turns[t] >= 0:
        return Dialogue(rejected.ids[: t + 1], rejected.turns[: t + 1])
    return rejected


def check_prompts(episodes: Sequence[Episode]) -> None:
    """Raises ValueError if episodes of one instance had different instructions or examples."""
    for first, *others in by_instance(episodes).values():
        for other in others:
            if (other.shots, other.instruction) != (first.shots, first.instruction):
                raise ValueError(
                    f"{other.name} of {other.policy}: played behind other examples, or told another "
                    f"task, than episode {first.index} of {first.policy}: train on each alone"
                )
