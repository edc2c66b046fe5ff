"""Why an episode failed, by rule: the last thing the agent did that the task's expert would not have done.

Nearly all experts look at the page and do what is missing. So each page that the agent saw can be shown to
the expert, whatever came before. In an episode that failed, another order of the same steps counts as a slip.
A task without an expert is judged by what the episode itself tells.
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
    """What kind of mistake the last action was that differs from the expert's; None if there is none."""
    actions = [world.parse(turn.action) if turn.action else None for turn in episode.turns]
    for n, done in reversed(list(enumerate(actions))):
        seen = Observation(episode.instruction, episode.turns[n].observation)
        wanted = expert_decision(expert, seen, [a for a in actions[:n] if a is not None])
        if wanted is not None and done is not None and done != wanted.action:
            ended = n == len(actions) - 1 and episode.outcome == Outcome.FAILED
            return world.mistake(seen, done, wanted.action, ended)
    return None


def causes(world: World, episodes: Sequence[Episode]) -> dict[str, int]:
    """How many episodes failed for each cause, the most frequent first."""
    failed = (episode for episode in episodes if not episode.solved)
    return dict(Counter(cause(world, episode) for episode in failed).most_common())
