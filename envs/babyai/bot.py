"""minigrid's bot as an adviser: what to do next, whatever the agent did before."""

from minigrid.core.actions import Actions
from minigrid.utils.baby_ai_bot import BabyAIBot, DisappearedBoxError

ACTIONS = {
    "turn left": Actions.left,
    "turn right": Actions.right,
    "move forward": Actions.forward,
    "pick up": Actions.pickup,
    "drop": Actions.drop,
    "toggle": Actions.toggle,
}
NAMES = {number: action for action, number in ACTIONS.items()}
SEARCHES = 100  # for one action; the bot's walks through 87 levels, 20 seeds each, took at most 6


class Lost(Exception):
    """The bot plans without end."""


class Bot(BabyAIBot):
    """The bot of the BabyAI paper. It sees the mission and remembers every cell that the agent has seen.

    Where the agent did not follow it, it may fail or swap the same two subgoals for ever. Then it has no advice.
    """

    is_lost = False

    def advise(self, done: str | None) -> str | None:
        """The next action after the one done; None where the bot knows none."""
        self.searches = 0
        try:
            action = None if self.is_lost else NAMES.get(self.replan(ACTIONS.get(done)))
        except (Lost, DisappearedBoxError, AssertionError):
            action = None
        self.is_lost = action is None
        return action

    def _breadth_first_search(self, *args, **options):
        self.searches += 1
        if self.searches > SEARCHES:
            raise Lost
        return super()._breadth_first_search(*args, **options)
