"""What is told of a page is what a person sees of it: eyes.js judges by pixels, and asks the debugger who
listens. And what an expert does arrives, as real input, at the element that it names."""

import asyncio
import random
import re
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_reset import anything

from envs.miniwob.browser.driver import Browser
from envs.miniwob.experts.by_task import EXPERTS
from envs.miniwob.experts.elements import element
from envs.miniwob.tasks import BY_THE_CLOCK, SEEDS, STEP_LIMIT, SUITES
from envs.protocol import Outcome

EYES = Path(__file__).parents[1].joinpath("eyes.js").read_text()
HEAR = "for (const node of document.querySelectorAll('*')) eyes.hear(node, getEventListeners(node))"
STOP = "for (let id = setInterval(() => 0, 1e9); id; id--) clearInterval(id)"
SEED = SEEDS["validation"][0]
SEEN = 0.25
"Of a text of which this share is seen, it must be told; of which none is seen, it must not."
EXCEPTIONS = {
    "daily-calendar": (
        "half-hour|told, not seen: ",
        "an empty half hour has no pixels of its own, a sliver "
        "shows beside an event, and what is scrolled away may lie under an event",
    ),
    "drag-cube": ("not told: [1-6]$", "the far sides of the cube shine through the near ones"),
    "form-sequence-3": ("not seen: icon ", "the first line of its list is empty"),
    "hot-cold": ('not seen: icon "display"', "a click beside the area loses, seen or not"),
    "navigate-tree": ('not seen: icon "hitarea', "the last sign of a tree is drawn twice"),
    "text-editor": ('not seen: icon "ql-picker-item white"', "white paint on a white ground"),
    "email-inbox": (
        "not seen: input text ",
        "an empty field without a frame, beside the words `to:`",
    ),
}
"Tasks, or how they begin, of which these complaints are none, and why."
ARRIVING = {
    "CLICK": ("mousedown",), "DOUBLE_CLICK": ("mousedown",), "TYPE": ("mousedown",), "DRAG": ("mousedown",),
    "HOVER": ("mousemove",), "SCROLL": ("wheel",), "SELECT": ("mousedown", "keydown"), "PRESS": ("keydown",),
    "CLICK_AT": ("mousedown",),
}  # fmt: skip
"Of these events the first there is must be a real one, and meet the element."
SWIFT = (
    "click-menu-2",
    "drag-circle",
    "grid-coordinate",
    "tic-tac-toe",
    "use-spinner",
)


@dataclass
class Eyes:
    """Looks at the page of an environment by other means than the environment's own."""

    env: object

    async def send(self, method: str, **options) -> dict:
        answer = await self.env._page._devtools.send(method, options)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer

    async def variable(self, function: str, name: str) -> str:
        """A variable that the function's script keeps to itself, as a debugger finds it."""
        found = await self.send("Runtime.evaluate", expression=function)
        parts = await self.send("Runtime.getProperties", objectId=found["result"]["objectId"])
        for part in ("[[Scopes]]", "0", name):
            every = [*parts.get("internalProperties", []), *parts["result"]]
            value = next(each["value"] for each in every if each["name"] == part)
            parts = await self.send("Runtime.getProperties", objectId=value["objectId"])
        return value["objectId"]

    async def call(self, code: str, *values):
        """The result of a JavaScript function of the nodes, by reference, and the values."""
        await self.send(
            "Runtime.evaluate", expression=f"{EYES}; {HEAR}", includeCommandLineAPI=True
        )
        nodes = await self.variable("mini.locate", "nodes")
        answer = await self.send(
            "Runtime.callFunctionOn", objectId=nodes, arguments=[{"value": each} for each in values],
            functionDeclaration=f"function(...values) {{ return ({code})(this, ...values) }}",
            awaitPromise=True, returnByValue=True)  # fmt: skip
        return answer["result"].get("value")

    async def complaints(self, instruction: str, text: str) -> list[str]:
        """What is told and not seen, seen and not told."""
        lines = {thing.ref: thing.line for thing in map(element, text.split("\n")) if thing.ref}
        found = await self.call("eyes.judge", [*lines])
        return [*(f"not seen: {lines[ref]}" for ref in found["unseen"]),
                *(f"not listed: {node}" for node in found["missed"]),
                *about_texts(instruction, text, found["texts"])]  # fmt: skip


def bare(text: str) -> str:
    return re.sub(r"\s+", "", text)


def about_texts(instruction: str, text: str, found: list[dict]) -> list[str]:
    """Both ways: each text that is seen is told, and whatever is told as a text is seen, in that order."""
    things, cut = [element(line) for line in text.split("\n")], "more lines" in text
    told = [bare(part) for thing in things for part in (thing.text, *thing.options)]
    complaints = []
    for each in found:
        words, where = bare(each["words"]), [bare(instruction)] if each["asked"] else told
        if each["share"] >= SEEN and not cut and not any(words in part for part in where):
            complaints.append(f"not told: {each['words'].strip()}")
    seen = "".join(bare(each["words"]) for each in found if each["share"] and not each["asked"])
    for thing in things:
        words = re.sub(r"icon-[a-z-]+", "", thing.text).removesuffix("...")
        if thing.role in ("text", "item", "link", "tab", "editor") and bare(words) not in seen:
            complaints.append(f"told, not seen: {thing.line}")
    return complaints


def excused(task: str, complaint: str) -> bool:
    return any(
        task.startswith(name) and re.search(pattern, complaint)
        for name, (pattern, _) in EXCEPTIONS.items()
    )


async def looked_at(env, task: str, seed: int, steps: int) -> list[str]:
    """The complaints about an episode of random actions."""
    rng, seen, found = random.Random(seed), await env.reset(task, seed), []
    for step in range(steps + 1):
        if task in BY_THE_CLOCK:
            await env._page._tab.evaluate(STOP)
        text = (await env._page.look()).text
        complaints = await Eyes(env).complaints(seen.instruction, text)
        if (await env._page.look()).text != text:
            complaints.append("a look changed the page")
        found += [
            f"{task} {seed} after {step}: {each}" for each in complaints if not excused(task, each)
        ]
        seen = await env.step(anything(seen, rng)) if step < steps else seen
        if seen.outcome is not None:
            break
    env._page.task = None if task in BY_THE_CLOCK else env._page.task
    return found


async def used(env, task: str, seed: int) -> list[str]:
    """The complaints about what arrives of an expert's actions."""
    seen, done, found = await env.reset(task, seed), [], []
    while seen.outcome is None and len(done) < STEP_LIMIT(task):
        action = EXPERTS[task](seen, done).action
        refs = [
            action[name] for name in ("ref", "to") if name in action and action[name] is not None
        ]
        listed = [element(line).ref for line in seen.text.split("\n")]
        found += [f"{task} {seed}: {action} is of no line" for ref in refs if ref not in listed]
        await Eyes(env).call("(nodes, ref) => eyes.expect(nodes[ref])", int(refs[0]) if refs else 0)
        seen = await env.step(action)
        done.append(action)
        events = await Eyes(env).call("() => eyes.events()")
        kinds = ARRIVING[action.command]
        came = [event for kind in kinds for event in events if event["type"] == kind]
        if (not came and action.command != "HOVER") or any(
            not event["isTrusted"] for event in came[:1]
        ):
            found.append(f"{task} {seed}: nothing real came of {action}")
        elif refs and came and not came[0]["met"]:
            found.append(f"{task} {seed}: {action} met something else")
    if seen.outcome is not Outcome.SOLVED:
        found.append(f"{task} {seed}: not solved")
    return found


def all_complaints(look, instances) -> list[str]:
    """What `look` finds on each instance (task, seed), on two pages at once."""
    waiting, found = deque(instances), []

    async def work_together():
        async with Browser(pages=2) as browser:

            async def shoot(source):
                env = next(
                    env for env in browser.envs if env._page and env._page._tab is source["page"]
                )
                options = {"format": "png", "optimizeForSpeed": True}
                return (await env._page._devtools.send("Page.captureScreenshot", options))["data"]

            async def work(env):
                while waiting:
                    found.extend(await look(env, *waiting.popleft()))

            await browser._context.expose_binding("shoot", shoot)
            await asyncio.gather(*map(work, browser.envs))

    asyncio.run(work_together())
    return found


def instances(tasks, seeds: int, *rest) -> list[tuple]:
    return [(task, SEED + seed, *rest) for task in sorted(tasks) for seed in range(seeds)]


# ---- that the eyes see: pages that change after they were told ----

WAYS = (
    "opacity: 0", "color: white; background: white; border: 0", "position: absolute; left: -99px",
    "position: absolute; clip-path: circle(0)",
)  # fmt: skip
CHANGES = [
    # the change, what is then wrong; p and b are a text and a button
    ("", []),
    *((f"p.style = b.style = '{way}'", ["not seen: button", 'told, not seen: text "plain"']) for way in WAYS),
    ("p.textContent = 'new'", ["not told: new", 'told, not seen: text "plain"']),
    ("area.insertAdjacentHTML('beforeend', '<img alt=dog width=9 height=9>')", ["not told: dog"]),
    ("p.style = 'height: 999px'", []),
    ("p.onclick = () => 0", ["not listed: <p"]),
    ("p.addEventListener('mousedown', () => 0)", ["not listed: <p"]),
    ("p.style.cursor = 'pointer'", ["not listed: <p"]),
    ("area.append(document.createElement('input'))", ["not listed: <input"]),
    ("area.insertAdjacentHTML('beforeend', '<svg><text y=9>art</text></svg>')", ["not told: art"]),
    ("area.style = 'height: 9px; overflow: auto'", []),
    ("area.style = 'height: 9px; overflow: hidden'", ["not seen: button", 'told, not seen: text "plain"']),
    ("query.textContent = 'Do.'", ["not told: Do."]),
]  # fmt: skip


def test_the_eyes_see_what_was_told_wrongly():
    async def judged(env, change, expected):
        instruction = (await env.reset("click-option", 0)).instruction
        await env._page._tab.evaluate(
            "area.style = ''; area.innerHTML = '<p id=p>plain</p><div><button id=b>go</button></div>'"
        )
        text = (await env._page.look()).text
        await env._page._tab.evaluate(f"() => {{ {change} }}")
        found = await Eyes(env).complaints(instruction, text)
        right = len(found) == len(expected) and all(
            map(str.startswith, sorted(found), sorted(expected))
        )
        return [] if right else [(change, expected, found)]

    assert all_complaints(judged, CHANGES) == []


# ---- all tasks ----


def tasks(some):
    """The tasks that the quick tests look at, and all others."""
    others = pytest.param(tuple(set(SUITES["all"]) - set(some)), marks=pytest.mark.slow)
    return pytest.mark.parametrize("tasks", [some, others], ids=["some tasks", "all others"])


@tasks(SWIFT)
def test_what_is_told_is_what_a_person_sees(tasks):
    some = tasks == SWIFT
    found = all_complaints(looked_at, instances(tasks, 1 if some else 3, 1 if some else 3))
    assert not found, "\n".join(found)


@tasks(SWIFT)
def test_what_an_expert_does_arrives_at_the_element_that_it_names(tasks):
    found = all_complaints(used, instances(set(tasks) & set(EXPERTS), 1 if tasks == SWIFT else 3))
    assert not found, "\n".join(found)
