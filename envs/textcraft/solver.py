"""How to craft something, step by step, from what there is: the expert, and the measure of progress."""

from collections import Counter

from envs.textcraft.crafting import Action
from envs.textcraft.recipes import Book


def plan(book: Book, goal: str, stock: Counter[str]) -> list[Action]:
    """The steps to one more of the goal, inputs first, by each item's best recipe. What there is, is used up."""
    stock, steps = stock.copy(), []

    def make(name: str, count: int) -> str:
        """Plan for so many of an input and set them aside. Returns the kind that was chosen."""
        there = (kind for kind in book.kinds(name) if stock[kind] >= count)
        item = next(there, None) or book.easiest(name)
        missing = count - stock[item]
        if missing > 0 and item in book.recipes:
            recipe = book.best(item)
            times = -(-missing // recipe.count)
            inputs = tuple((make(name, times * n), n) for name, n in recipe.inputs)
            steps.extend(times * [Action("craft", recipe.count, item, inputs)])
            stock[item] += times * recipe.count
        elif missing > 0:
            steps.append(Action("get", missing, item))
            stock[item] += missing
        stock[item] -= count
        return item

    make(goal, 1)
    return steps


def crafts(steps: list[Action]) -> int:
    """How often something is crafted."""
    return sum(step.verb == "craft" for step in steps)


def thought(steps: list[Action]) -> str:
    """What the first step is for: the next thing to be crafted.

    >>> thought([Action("get", 2, "oak logs"), Action("craft", 4, "oak planks", (("oak logs", 1),))])
    'I need 2 oak logs for oak planks'
    >>> thought([Action("craft", 4, "oak planks", (("oak logs", 1),))])
    'I have what oak planks needs'
    """
    step = steps[0]
    if step.verb == "craft":
        return f"I have what {step.item} needs"
    use = next(later for later in steps if step.item in dict(later.inputs))
    return f"I need {step.count} {step.item} for {use.item}"
