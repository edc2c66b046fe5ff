"""Why an episode failed, by rule: the last action that the task's expert would not have taken.

Nearly all experts look at the page and do the next thing that is missing, so any page that the agent saw can be
shown to the expert, whatever happened before. If the agent took the right steps in another order than the
expert, that counts as a mistake, too. Without an expert only the episode itself is used.
"""

from collections import Counter
from collections.abc import Sequence

from envs.protocol import MISTAKES, Expert, Observation, Outcome, World
from minidpo.acting.policies import expert_decision
from minidpo.data.episodes import Episode, in_a_loop, is_silent

CAUSES = {
    "unusable answer": "at least half of the answers held no action",
    "too long": "the conversation no longer fitted the model's context",
    "repeated itself": "its last action had changed nothing, or was done on that page for the third time",
    **MISTAKES,
    "never reached": "it did nothing wrong and was not done within the steps allowed",
    "not known": "the task has no expert, or the expert would have done the same",
}


def cause(world: World, episode: Episode) -> str:
    """A key of CAUSES for an episode that was not solved."""
    turns, at_limit = episode.turns, episode.outcome == Outcome.LIMIT
    unusable = sum(turn.action is None for turn in turns)
    if 2 * unusable >= len(turns) > 0:
        return "unusable answer"
    last = [(t.action, t.observation) for t in turns[-2:] if t.action and not is_silent(t)]
    if at_limit and (in_a_loop(turns) or len(last) > len(set(last))):
        return "repeated itself"
    if at_limit and len(turns) < world.step_limit(episode.task) and not episode.relabelled:
        return "too long"
    expert = world.expert(*episode.instance) if episode.task in world.experts else None
    unreached = "never reached" if at_limit and expert else "not known"
    return (expert and last_slip(world, expert, episode)) or unreached


def last_slip(world: World, expert: Expert, episode: Episode) -> str | None:
    """The kind of mistake in the last action that differs from the expert's; None if no action differs."""
    actions = [world.parse(turn.action) if turn.action else None for turn in episode.turns]
    for n, done in reversed(list(enumerate(actions))):
        seen = Observation(episode.instruction, episode.turns[n].observation)
        wanted = expert_decision(expert, seen, [a for a in actions[:n] if a is not None])
        if wanted is not None and done is not None and done != wanted.action:
            ended = n == len(actions) - 1 and episode.outcome == Outcome.FAILED
            return world.mistake(seen, done, wanted.action, ended)
    return None


def causes(world: World, episodes: Sequence[Episode]) -> dict[str, int]:
    """The number of failed episodes for each cause, the most frequent first."""
    failed = (episode for episode in episodes if not episode.solved)
    return dict(Counter(cause(world, episode) for episode in failed).most_common())
