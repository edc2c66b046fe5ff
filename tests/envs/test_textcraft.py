"""TextCraft: the book of recipes, what can be done, the solver, and that a seed is one instance everywhere."""

import asyncio
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise, permutations
from pathlib import Path

import pytest

import envs
from envs.protocol import SPLITS, ActionError

try:
    WORLD = envs.world("textcraft")
    WORLD.require()
except ValueError as missing:
    pytest.skip(str(missing), allow_module_level=True)

from envs import textcraft
from envs.textcraft.crafting import Impossible, carry_out, parse, render
from envs.textcraft.recipes import Book
from envs.textcraft.solver import plan


def card(makes, *inputs, count=1, group=""):
    slots = [{"tag" if slot.startswith("#") else "item": slot.strip("#")} for slot in inputs]
    result = {"item": makes, "count": count}
    return {
        "type": "minecraft:crafting_shapeless",
        "group": group,
        "ingredients": slots,
        "result": result,
    }


WOOD = Book(
    [
        card("birch_planks", "birch_log", count=4, group="planks"),
        card("oak_planks", "oak_log", count=4, group="planks"),
        card("stick", "#planks", "#planks", count=4),
        card("sign", *6 * ["oak_planks"], "stick", count=3),
    ]
)


def test_a_plan_uses_what_is_left_over():
    """Six planks need two logs, which give eight; the stick takes the other two. That is 4 crafts. With a stick
    there already the planks alone are missing: 3 crafts."""
    steps = [render(step) for step in plan(WOOD, "sign", Counter())]
    planks, stick = "craft 4 oak planks using 1 oak log", "craft 4 stick using 2 oak planks"
    sign = "craft 3 sign using 6 oak planks, 1 stick"
    assert steps == ["get 2 oak log", planks, planks, stick, sign]
    steps = [render(step) for step in plan(WOOD, "sign", Counter({"stick": 1}))]
    assert steps == ["get 2 oak log", planks, planks, sign]


@pytest.mark.parametrize(
    "text, has",
    [
        ("get 1 stick", {}),  # it can be crafted
        ("get 1 planks", {}),  # a group is no thing
        ("get 1 moon", {}),
        ("craft 4 stick using 2 planks", {"oak planks": 2}),
        ("craft 4 stick using 2 oak planks", {"oak planks": 1}),
        ("craft 4 stick using 1 oak planks, 1 birch planks", {"oak planks": 1, "birch planks": 1}),
        ("craft 4 stick using 3 oak planks", {"oak planks": 3}),
        ("craft 4 stick using 2 oak planks, 1 oak log", {"oak planks": 2, "oak log": 1}),
        ("craft 1 oak log using 1 stick", {"stick": 1}),
    ],
)
def test_what_is_impossible_changes_nothing_and_says_why(text, has):
    stock = Counter(has)
    with pytest.raises(Impossible) as why:
        carry_out(WOOD, stock, parse(text))
    assert stock == Counter(has) and "\n" not in str(why.value)


def test_planks_of_any_one_kind_make_sticks_in_any_order_of_inputs():
    for kind in ("oak planks", "birch planks"):
        stock = Counter({kind: 3})
        carry_out(WOOD, stock, parse(f"Craft stick using 2 {kind}"))
        assert stock == {kind: 1, "stick": 4}
    stock = Counter({"stick": 1, "oak planks": 6})
    carry_out(WOOD, stock, parse("craft 3 sign using 1 stick, 6 oak planks"))
    assert stock == {"sign": 3}


@pytest.mark.parametrize(
    "text", ["", "get oak logs", "get 0 oak logs", "craft stick", "craft stick using", "dig"]
)
def test_other_text_is_refused_in_one_line(text):
    with pytest.raises(ActionError) as error:
        parse(text)
    assert "\n" not in str(error.value)


def test_no_item_is_made_of_itself_in_whatever_order_the_recipes_come():
    circle = [card("b", "a"), card("c", "b"), card("a", "c")]
    for cards in permutations(circle):
        book = Book(cards)
        assert sorted(map(book.depth, book.items)) == [0, 1, 2]  # one of the three is left out


def test_every_goal_has_its_split_and_is_crafted_within_the_limit():
    """ADaPT has 419 goals of depth 2 to 4; one of them takes too long here."""
    counts = Counter()
    for task in textcraft.DEPTHS:
        of_split = textcraft.goals(task)
        assert of_split["demos"] == of_split["rollouts"]
        training, validation, test = ({*of_split[split]} for split in SPLITS[1:])
        assert training and validation and test
        goals = training | validation | test
        counts[task] = len(goals)
        assert len(training) + len(validation) + len(test) == len(goals)
        for goal in goals:
            stock, steps = Counter(), 0
            while not stock[goal]:  # each step is planned anew, as the expert does
                carry_out(textcraft.book(), stock, plan(textcraft.book(), goal, stock)[0])
                steps += 1
            assert steps <= WORLD.step_limit(task)
    assert sum(counts[task] for task in WORLD.suites["adapt"]) == 418


def episode(task, seed, waste=()):
    """What the expert sees, whose first actions are others."""
    table = textcraft.Table()

    async def play():
        seen, done = [await table.reset(task, seed)], []
        while seen[-1].outcome is None:
            expert = textcraft.expert(seen[-1], done).action
            done.append(waste[len(done)] if len(done) < len(waste) else expert)
            seen.append(await table.step(done[-1]))
        return seen

    return asyncio.run(play())


@pytest.mark.parametrize("task", textcraft.DEPTHS)
def test_the_reward_is_the_largest_share_of_the_crafting_so_far(task):
    for seed in range(3):
        seen = episode(task, seed)
        rewards = [page.reward for page in seen]
        assert rewards[0] == 0 and rewards[-1] == 1 and all(a <= b for a, b in pairwise(rewards))
        assert len({*rewards}) > textcraft.DEPTHS[task]  # each depth adds to it
        wasteful = episode(task, seed, [parse("get 3 stone"), parse("craft moon using 3 stone")])
        assert [page.reward for page in wasteful] == [0, 0, *rewards]
        assert wasteful[2].error and wasteful[2].text == wasteful[1].text


def test_a_seed_outside_the_splits_is_refused():
    with pytest.raises(ValueError, match="400000"):
        asyncio.run(textcraft.Table().reset("depth-2", 400_000))


def test_a_seed_is_the_same_instance_in_every_process():
    code = (
        "import asyncio; from envs.textcraft import Table\n"
        "for seed in range(20): print(asyncio.run(Table().reset('depth-3', seed)))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(outputs) == 1
