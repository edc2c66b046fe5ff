"""Why an episode failed, by rule: the last thing the agent did that the task's expert would not have done.

Nearly all experts look at the page and do what is missing. So each page that the agent saw can be shown to
the expert, whatever came before. In an episode that failed, another order of the same steps counts as a slip.
A task without an expert is judged by what the episode itself tells.
"""

from collections import Counter
from collections.abc import Sequence

from envs.actions import Action, parse
from envs.miniwob.experts.by_task import EXPERTS
from envs.miniwob.experts.elements import element
from envs.miniwob.tasks import STEP_LIMIT
from envs.protocol import Observation, Outcome
from minidpo.acting.policies import expert_decision
from minidpo.data.episodes import Episode, in_a_loop, is_silent

CAUSES = {
    "unusable answer": "at least half of the answers held no action",
    "too long": "the conversation no longer fitted the model's context",
    "repeated itself": "its last action had changed nothing, or was done on that page for the third time",
    "ended too early": "it pressed a button that ended the task where a field was still to be filled",
    "wrong text": "it typed or chose something else in the right element",
    "wrong action": "it did something else to the right element",
    "wrong element": "it used another element than the expert would have",
    "never reached": "it did nothing wrong and was not done within the steps allowed",
    "not known": "the task has no expert, or the expert would have done the same",
}


def cause(episode: Episode) -> str:
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
    if at_limit and (in_a_loop(turns) or len(last) > len({*last})):
        return "repeated itself"
    if at_limit and len(turns) < STEP_LIMIT(episode.task) and not episode.relabelled:
        return "too long"
    return last_slip(episode) or (
        "never reached" if at_limit and episode.task in EXPERTS else "not known"
    )


def last_slip(episode: Episode) -> str | None:
    """What kind of mistake the last action was that differs from the expert's; None if there is none."""
    actions = [parse(turn.action) if turn.action else None for turn in episode.turns]
    for n in range(len(actions) - 1, -1, -1):
        wanted = expert_action(episode, n, [action for action in actions[:n] if action])
        if wanted is None or actions[n] in (None, wanted):
            continue
        done, ended = actions[n], n == len(actions) - 1 and episode.outcome == Outcome.FAILED
        if "ref" in done and "ref" in wanted and done["ref"] == wanted["ref"]:
            return (
                "wrong text"
                if done.command == wanted.command in ("TYPE", "SELECT")
                else "wrong action"
            )
        by, role = (role_of(action, episode.turns[n].observation) for action in (done, wanted))
        to_fill = wanted.command != "CLICK" or role in ("checkbox", "radio")
        return "ended too early" if ended and by == "button" and to_fill else "wrong element"
    return None


def expert_action(episode: Episode, n: int, before: list[Action]) -> Action | None:
    """What the expert would do in turn n; None without an expert, or where the page is none that it knows."""
    seen = Observation(episode.instruction, episode.turns[n].observation)
    decision = expert_decision(EXPERTS.get(episode.task), seen, before)
    return decision and decision.action


def role_of(action: Action, page: str) -> str:
    """The role of the element that the action uses; "" without one."""
    lines = [element(line) for line in page.split("\n")] if "ref" in action else []
    return next((thing.role for thing in lines if thing.ref == action["ref"]), "")


def causes(episodes: Sequence[Episode]) -> dict[str, int]:
    """How many episodes failed for each cause, the most frequent first."""
    return dict(Counter(cause(episode) for episode in episodes if not episode.solved).most_common())
