"""An environment class of TRL's kind, with which the adapter is tried."""

from typing import Literal


class Walk:
    """Walk along a street of ten houses.

    Say that you are there with finish.
    """

    step_limit = 6
    rows = [
        {
            "prompt": [{"role": "user", "content": f"From house {start} go to {goal}."}],
            "start": start,
            "goal": goal,
            "solution": [
                f'go(way="left", houses={start})',
                "look()",
                f'go(way="right", houses={goal})',
                "finish()",
            ],
        }
        for start in range(10)
        for goal in range(2, 9, 2)
    ]

    def reset(self, start: int, goal: int, **row) -> str:
        self.at, self.goal = start, goal
        return f"This is house {start}."

    def go(self, way: Literal["left", "right"], houses: int = 1) -> str:
        """Go along the street.

        Args:
            way: Where to.
            houses: How far.
        """
        to = self.at + (houses if way == "right" else -houses)
        if not 0 <= to < 10:
            raise ValueError("the street ends before that")
        self.at = to
        return f"You went {way} by {houses}."

    async def look(self) -> str:
        """Read the number of the house."""
        return f"This is house {self.at}."

    def get_reward(self) -> float:
        return float(self.at == self.goal) if self.at == self.goal else 0.1

    def _private(self, anything):
        raise AssertionError("not a tool")
