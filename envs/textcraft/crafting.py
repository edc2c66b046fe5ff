"""What an agent may do: take, craft, look at what it has.

get 2 oak logs
craft 4 stick using 2 oak planks
inventory
"""

import re
from collections import Counter
from typing import NamedTuple

from envs.protocol import ActionError
from envs.textcraft.recipes import Book, Recipe

MOST = 200  # characters of an action; the longest that the solver needs has 93
_ITEM = r"[a-z][a-z']*(?: [a-z][a-z']*)*"
_GET = re.compile(rf"get ([1-9][0-9]{{0,2}}) ({_ITEM})")
_CRAFT = re.compile(rf"craft (?:([1-9][0-9]{{0,2}}) )?({_ITEM}) using (.+)")
_INPUT = re.compile(rf"([1-9][0-9]{{0,2}}) ({_ITEM})")


class Action(NamedTuple):
    """`get COUNT ITEM`, or `craft COUNT ITEM using INPUTS`."""

    verb: str
    count: int
    item: str
    inputs: tuple[tuple[str, int], ...] = ()


def parse(text: str) -> Action:
    """The action that a text means. Raises ActionError and nothing else.

    >>> parse("Craft stick using 2 oak planks.")
    Action(verb='craft', count=1, item='stick', inputs=(('oak planks', 2),))
    """
    line = " ".join(text.strip(" \t\r\n`.").split()).lower()
    if found := _GET.fullmatch(line):
        return Action("get", int(found[1]), found[2])
    found = _CRAFT.fullmatch(line) if len(line) <= MOST else None
    inputs = [_INPUT.fullmatch(part.strip()) for part in found[3].split(",")] if found else [None]
    if None in inputs:
        raise ActionError(
            f"an action is `get 2 ITEM` or `craft 4 ITEM using 1 ITEM, 2 ITEM`, got {text.strip()[:60]!r}"
        )
    return Action("craft", int(found[1] or 1), found[2], tuple((i[2], int(i[1])) for i in inputs))


def render(action: Action) -> str:
    """The one canonical text of an action.

    >>> render(Action("get", 2, "oak logs"))
    'get 2 oak logs'
    """
    if action.verb == "craft":
        return str(Recipe(action.item, action.count, action.inputs))
    return f"get {action.count} {action.item}"


class Impossible(ValueError):
    """The action cannot be done; the message says why, in one line that the agent reads."""


def carry_out(book: Book, stock: Counter[str], action: Action) -> str:
    """Change the stock. Returns what happened; raises Impossible, and then nothing did.

    As in ADaPT a recipe makes what it makes, whatever count the action names, and any recipe of the book will
    do, also one that was not shown.
    """
    if action.verb == "get":
        if action.item not in book.items:
            raise Impossible(f"there is no {action.item}")
        if action.item in book.recipes:
            raise Impossible(f"{action.item} cannot be found, it must be crafted")
        stock[action.item] += action.count
        return f"Got {action.count} {action.item}"
    recipe = matching(book, action)
    for item, count in action.inputs:
        if stock[item] < count:
            raise Impossible(f"{action.item} needs {count} {item}, you have {stock[item]}")
    stock.subtract(dict(action.inputs))
    stock[recipe.item] += recipe.count
    for item in [item for item, count in stock.items() if not count]:
        del stock[item]
    return f"Crafted {recipe.count} {recipe.item}"


def matching(book: Book, action: Action) -> Recipe:
    """The recipe that makes the action's item from its inputs. Raises Impossible."""
    for item, _ in action.inputs:
        if item in book.groups:
            raise Impossible(
                f"{item} may be of any kind: name the kind, such as {book.groups[item][0]}"
            )
    for recipe in book.recipes.get(action.item, []):
        if uses(book, recipe, action.inputs):
            return recipe
    raise Impossible(f"no recipe makes {action.item} from that")


def uses(book: Book, recipe: Recipe, inputs: tuple[tuple[str, int], ...]) -> bool:
    """Whether the inputs are the recipe's, in any order."""
    left = list(inputs)
    for name, count in recipe.inputs:
        fitting = [pair for pair in left if pair[0] in book.kinds(name) and pair[1] == count]
        if not fitting:
            return False
        left.remove(fitting[0])
    return not left
