"""What the agent sees, in words, and a thought that goes with its next action.

    red ball: 3 ahead, 2 left
    closed green door: 4 ahead
    wall: 5 ahead
    wall: 1 right
    facing: east
    walked: 12
    carrying: nothing

minigrid shows 7 x 7 cells, with the agent in the middle of the near edge; what is behind walls and closed doors
is hidden. Each thing there is a line, the nearest first, after that the walls straight ahead, left and right.
minigrid tells the direction, too. The steps walked are ours: in a hall without a thing in sight the agent would
else not see that it moves. So the text tells where things stand, and who turns in a circle is seen to be in a loop.
"""

import re

from minigrid.core.world_object import WorldObj
from minigrid.minigrid_env import MiniGridEnv

_WANTED = re.compile(r"\b(?:(red|green|blue|purple|yellow|grey) )?(ball|box|key|door|object)\b")
_LINES = ((1, 0), (0, -1), (0, 1))  # a step ahead, left, right
_COMPASS = ("east", "south", "west", "north")  # by minigrid's number of the direction


def look(grid: MiniGridEnv, walked: int) -> str:
    """The text of what the agent sees now."""
    view, is_visible = grid.gen_obs_grid()
    middle, near = view.width // 2, view.height - 1
    cells = {
        (near - row, column - middle): view.get(column, row)
        for column in range(view.width)
        for row in range(view.height)
        if is_visible[column, row]
    }
    del cells[0, 0]  # the agent's own, where minigrid puts what it carries
    places = sorted(cells, key=lambda place: (place[0] + abs(place[1]), place))
    things = [place for place in places if cells[place] and cells[place].type != "wall"]
    for ahead, right in _LINES:
        line = [(n * ahead, n * right) for n in range(1, near + 1)]
        stop = next((place for place in line if cells.get(place)), None)
        if stop and cells[stop].type == "wall":
            things.append(stop)
    lines = [f"{name(cells[place])}: {where(*place)}" for place in things]
    lines += [f"facing: {_COMPASS[grid.agent_dir]}", f"walked: {walked}"]
    return "\n".join([*lines, f"carrying: {name(grid.carrying)}"])


def name(thing: WorldObj | None) -> str:
    """`red ball`, `closed green door`, `wall`, `nothing`."""
    if thing is None:
        return "nothing"
    if thing.type == "wall":
        return "wall"
    if thing.type == "door":
        state = "open" if thing.is_open else "locked" if thing.is_locked else "closed"
        return f"{state} {thing.color} door"
    return f"{thing.color} {thing.type}"


def where(ahead: int, right: int) -> str:
    """The steps to a place.

    >>> where(3, -2), where(0, 1)
    ('3 ahead, 2 left', '1 right')
    """
    steps = [f"{ahead} ahead"] if ahead else []
    if right:
        steps.append(f"{right} right" if right > 0 else f"{-right} left")
    return ", ".join(steps)


def thought(instruction: str, text: str, action: str) -> str:
    """Where the things are that the task names, then the action and what it is done to.

    >>> thought("go to the red ball", "red ball: 3 ahead, 2 left\\ncarrying: nothing", "move forward")
    'red ball: 3 ahead, 2 left. I move forward'
    >>> thought("open a door", "blue box: 1 ahead\\ncarrying: nothing", "pick up")
    'no door in sight. I pick up blue box'
    """
    lines, said = text.split("\n"), {}
    for colour, kind in _WANTED.findall(instruction):
        wanted = f"{colour} {kind}".strip()
        pattern = re.compile(rf"\b{wanted.replace('object', '(ball|box|key)')}\b")
        line = next(filter(pattern.search, lines), f"no {wanted} in sight")
        said[line] = None  # once, where the task names it twice
    used = {"pick up": r"(.+): 1 ahead$", "toggle": r"(.+): 1 ahead$", "drop": r"carrying: (.+)$"}
    thing = re.search("^" + used[action], text, re.MULTILINE) if action in used else None
    return f"{'; '.join(said)}. I {action}" + (f" {thing[1]}" if thing else "")
