"""Why an episode failed, by rule: the last thing the agent did that the task's expert would not have done.

Nearly all experts look at the page and do what is missing. So each page that the agent saw can be shown to
the expert, whatever came before. In an episode that failed, another order of the same steps counts as a slip.
A task without an expert is judged by what the episode itself tells.
"""

from collections import Counter
from collections.abc import Sequence

from envs.protocol import MISTAKES, Action, Observation, Outcome, World
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
    last = [
        (turn.action, turn.observation)
        for turn in turns[-2:]
        if turn.action and not is_silent(turn)
    ]
    if at_limit and (in_a_loop(turns) or len(last) > len(set(last))):
        return "repeated itself"
    if at_limit and len(turns) < world.step_limit(episode.task) and not episode.relabelled:
        return "too long"
    reached_nothing = at_limit and episode.task in world.experts
    return last_slip(world, episode) or ("never reached" if reached_nothing else "not known")


def last_slip(world: World, episode: Episode) -> str | None:
    """What kind of mistake the last action was that differs from the expert's; None if there is none."""
    actions = [world.parse(turn.action) if turn.action else None for turn in episode.turns]
    for n in range(len(actions) - 1, -1, -1):
        done = actions[n]
        wanted = expert_action(world, episode, n, [a for a in actions[:n] if a is not None])
        if wanted is not None and done is not None and done != wanted:
            seen = Observation(episode.instruction, episode.turns[n].observation)
            ended = n == len(actions) - 1 and episode.outcome == Outcome.FAILED
            return world.mistake(seen, done, wanted, ended)
    return None


def expert_action(world: World, episode: Episode, n: int, before: list[Action]) -> Action | None:
    """What the expert would do in turn n; None without an expert, or where the page is none that it knows."""
    seen = Observation(episode.instruction, episode.turns[n].observation)
    decision = expert_decision(world.experts.get(episode.task), seen, before)
    return decision and decision.action


def causes(world: World, episodes: Sequence[Episode]) -> dict[str, int]:
    """How many episodes failed for each cause, the most frequent first."""
    failed = (episode for episode in episodes if not episode.solved)
    return dict(Counter(cause(world, episode) for episode in failed).most_common())
