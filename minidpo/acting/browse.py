"""An agent on any page: each action is shown, and asked for before it is carried out.

    python evaluate.py --url https://docs.python.org/3/ --goal "Open the tutorial"
    python evaluate.py --url file:///tmp/form.html --goal "Enter Lina and press Submit" --yes

The page is confined to its origin (envs/web/visit.py), and nobody judges what becomes of it. What happened
stands in OUT/episode.jsonl, with a picture before each action and one of the end. Read docs/any-page.md
first.
"""

import asyncio
import contextlib
import os
import sys
import termios
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from envs.actions import Action, ActionError, render
from envs.miniwob.browser.remote import PAUSE_S, check_display
from envs.protocol import EnvError, Observation, Outcome
from envs.web.gate import Bounds
from envs.web.visit import Web
from minidpo.acting.policies import Job, Live, ModelPolicy, Policy, Said
from minidpo.config import BrowseCommand
from minidpo.data.episodes import Episode, Turn, Writer
from minidpo.data.prompt import thought, understand
from minidpo.memory.loading import open_policy, policy_name
from minidpo.system import processes

STOPPED = "stopped"  # this outcome beside Outcome.LIMIT: by the user, the agent, its context or the browser
QUESTION = "Enter acts, s skips, q quits: "
VAIN = 2  # so many answers in a row without a usable action, and the agent has stopped


def plain(text: str) -> str:
    """A text that pages and models had a hand in, on one line that can't steer a terminal.

    >>> plain("a\\x1b[2Jb\\nc")
    'a?[2Jb c'
    """
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))[:300]


async def ask(question: str) -> str:
    """What the user types; the browser goes on meanwhile. At the end of the input: q."""
    with contextlib.suppress(termios.error):  # no terminal
        termios.tcflush(sys.stdin, termios.TCIFLUSH)  # what was typed before the question is no answer to it
    print(question, end="", flush=True)
    loop = asyncio.get_running_loop()
    line = loop.create_future()
    loop.add_reader(sys.stdin, lambda: line.done() or line.set_result(os.read(sys.stdin.fileno(), 4096)))
    try:
        return ((await line).decode(errors="replace") or "q").strip().lower()
    finally:
        loop.remove_reader(sys.stdin)


async def pause(_: str) -> str:
    """In place of a question, where somebody only watches: time to look."""
    await asyncio.sleep(PAUSE_S)
    return ""


@contextlib.contextmanager
def thinking() -> Iterator[None]:
    """A line in the terminal while the model writes, which takes a large one minutes; then it is gone."""
    shown = "     thinking ..." if sys.stdout.isatty() else ""
    print(shown, end="", flush=True)
    try:
        yield
    finally:
        print(shown and f"\r{' ' * len(shown)}\r", end="", flush=True)


async def answer(policy: Policy, live: Live) -> Said | None:
    """What the agent says. Where the visit has become too long for its context it forgets the first turns."""
    forgotten = 0
    with thinking():
        while (said := await policy.answer(0, live)) is None and live.turns:
            del live.turns[0]
            forgotten += 1
    if forgotten and said is not None:
        print(f"     the visit is too long for the model's context, which begins {forgotten} turns later now")
    return said


async def visit(config: BrowseCommand, policy: Policy,
                ask: Callable[[str], Awaitable[str]] | None) -> Episode:
    """Act on the page until the limit, or until somebody stops; what happened is written in any case."""
    bounds = Bounds(config.url)
    if os.geteuid() == 0:
        print("you are root: Chromium runs without its sandbox, so visit no page that might attack it")
    with Writer(config.out / "episode.jsonl") as writer:
        index = len(writer.done)  # of all visits, whatever their page: the pictures are named by it alone
        turns: list[Turn] = []
        outcome = STOPPED
        try:
            async with Web(bounds, config.goal, headless=not config.watch) as env:
                live = Live(Job(bounds.url, 0, index, config.steps), await env.reset())
                while len(turns) < config.steps:
                    picture = config.out / f"{index}-{len(turns) + 1:02}.png"
                    if not await turn(env, policy, live, turns, ask, picture):
                        break
                else:
                    outcome = str(Outcome.LIMIT)
                (config.out / f"{index}-end.png").write_bytes(await env.screenshot())
                if config.watch:
                    await ask("Enter closes the window: ")
        finally:
            episode = Episode(bounds.url, 0, index, config.goal, tuple(turns), outcome, 0.0, policy.name,
                              policy.sampling)
            if turns:
                writer.add(episode)
    return episode


async def turn(env: Web, policy: Policy, live: Live, turns: list[Turn], ask, picture: Path) -> bool:
    """One turn; False if it was the last, because somebody has stopped."""
    said = await answer(policy, live)
    if said is None:
        print("this page alone is too long for the model's context")
        return False
    before, name = live.observation, None
    print(f"{len(turns) + 1:3}  {plain(thought(said.answer)) or '(no thought)'}")
    try:
        action = understand(said.answer)
        name = render(action)
        chosen = await preview(env, before, action, picture, ask)
        if chosen == "q":
            return False
        if chosen == "s":
            live.observation = Observation(before.instruction, before.text, error="the user said no to this")
        else:
            live.observation = await env.step(action)
        error = live.observation.error
    except ActionError as problem:
        error = str(problem)
    if error:
        print(f"     -> {plain(error)}")
    turns.append(Turn(before.text, said.answer, name, error, said.ids, said.logps))
    live.turns.append(turns[-1])
    if len(turns) >= VAIN and not any(turn.action for turn in turns[-VAIN:]):
        print(f"the agent has stopped: {VAIN} answers without an action")
        return False
    return True


async def preview(env: Web, seen: Observation, action: Action, picture: Path, ask) -> str:
    """Show the action, in words, in the page and as a picture; what the user says to it."""
    ref = str(action["ref"]) if "ref" in action else ""
    line = next((line for line in seen.text.split("\n") if ref and line.endswith(f" [{ref}]")), "")
    print(f"     {plain(render(action))}   {plain(line)}".rstrip())
    await env.page.mark(ref)
    picture.write_bytes(await env.screenshot())
    chosen = await ask(QUESTION) if ask else ""
    while chosen not in ("", "s", "q"):  # a `no` is not a yes, and a click can't be taken back
        chosen = await ask(QUESTION)
    await env.page.mark("")
    return chosen


def browse(config: BrowseCommand) -> dict:
    """One visit. Returns its outcome and how many steps it took."""
    processes.refuse_torchrun("a page is not visited")
    if config.watch:
        check_display()
    if not (config.yes or sys.stdin.isatty()):
        raise ValueError("each action is asked for before it is carried out, but there is no terminal to ask "
                         "at: run this in one, or let the agent act unasked with --yes")
    asyncio.run(Bounds(config.url).reach())  # before the weights are read
    model, chat = open_policy(config.model, config.adapter, config.machine)
    name = policy_name(config.adapter or config.model, model)
    policy = ModelPolicy(model, chat, name, config.temperature, 1.0, config.seed, config.max_new_tokens,
                         model.config.max_position_embeddings, pages=1)
    asking = ask if not config.yes else pause if config.watch else None
    try:
        episode = asyncio.run(visit(config, policy, asking))
    except EnvError as error:
        raise ValueError(f"{config.url}: {error}") from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt("what was done there is done; the same command is another visit") from None
    print(f"{episode.outcome} after {len(episode.turns)} steps; nobody has judged what came of it: "
          f"{config.out / 'episode.jsonl'}, pictures {config.out}/{episode.index}-*.png")
    return {"outcome": episode.outcome, "steps": len(episode.turns)}
