"""Let an agent act on any page. Each action is shown, and the user is asked before it is carried out.

    python evaluate.py --url https://docs.python.org/3/ --goal "Open the tutorial"
    python evaluate.py --url file:///tmp/form.html --goal "Enter Lina and press Submit" --yes

The agent is confined to the page's origin (envs/web/visit.py), and there is no verdict. The episode is added
to OUT/episode.jsonl, with a picture before each action and one at the end. Read docs/any-page.md first.
"""

import asyncio
import contextlib
import os
import signal
import sys
import termios
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from envs import web_page
from envs.protocol import Action, ActionError, EnvError, Observation, Outcome, World
from minidpo.acting.jobs import Job
from minidpo.acting.policies import Policy, Reply, RunningEpisode, Sampling, model_policy
from minidpo.data.episodes import Episode, Turn, Writer
from minidpo.data.prompt import thought, understand
from minidpo.memory.context import Context
from minidpo.system import processes
from minidpo.system.ranges import Checked, NotNegative, Positive

Ask = Callable[[str], Awaitable[str]]
QUESTION = "Enter acts, s skips, q quits: "
MAX_UNUSABLE = 2
"The visit ends after this many answers in a row without a usable action."
PAUSE_S = 1.0
"How long each action is shown before it is carried out, if the user watches and is not asked."


@dataclass(frozen=True, kw_only=True)
class Browse(Checked):
    """Let an agent act on a page outside the benchmark, confined to the page's origin."""

    url: str
    "http://, https:// or file://; the agent stays within this origin, or this file's folder"
    goal: str
    "what the agent should do, worded like a task"
    adapter: Path | None = None
    "folder or hub id of a LoRA adapter"
    steps: Positive[int] = 10
    "most answers that the agent may give"
    yes: bool = False
    "act without asking before each action"
    watch: bool = False
    "open a browser window that shows what the agent does"
    temperature: NotNegative[float] = 0.0
    "sampling temperature; 0 is greedy"
    max_new_tokens: Positive[int] = 96
    "most tokens in an answer"
    out: Path = Path("runs/page")
    "folder for the pictures and for episode.jsonl, to which each visit is added"


def browse(options: Browse, context: Context) -> dict:
    """Make one visit. Prompt and actions are those of the context's world, which must be a world of web pages.
    Returns the outcome and the number of steps."""
    processes.refuse_torchrun("a page is not visited")
    context.world.require(options.watch)
    if not (options.yes or sys.stdin.isatty()):
        raise ValueError(
            "you are asked before each action, but there is no terminal to ask in: run this in one, "
            "or add --yes to let the agent act without asking"
        )
    web = web_page(options.url, options.goal, options.watch)
    asyncio.run(web.bounds.reach())  # before the weights are read
    sampling = Sampling(options.temperature, max_new_tokens=options.max_new_tokens)
    policy = model_policy(context, options.adapter, sampling, pages=1)
    ask = ask_user
    if options.yes:
        ask = pause if options.watch else None
    for number in (signal.SIGTERM, signal.SIGHUP):
        # even if the terminal is closed, the turns so far are written
        signal.signal(number, signal.default_int_handler)
    try:
        episode = asyncio.run(visit(options, context.world, policy, ask))
    except EnvError as error:
        raise ValueError(f"{options.url}: {plain(str(error), 1000)}") from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            "actions on the page are not undone; the same command makes another visit"
        ) from None
    print(
        f"{episode.outcome} after {len(episode.turns)} steps (there is no verdict): "
        f"{options.out / 'episode.jsonl'}, pictures {options.out}/{episode.index}-*.png"
    )
    return {"outcome": episode.outcome, "steps": len(episode.turns)}


async def visit(options: Browse, world: World, policy: Policy, ask: Ask | None) -> Episode:
    """Act on the page until the limit, or until the user or the agent stops. The turns are always written."""
    web = web_page(options.url, options.goal, options.watch)
    url = web.bounds.url
    if os.geteuid() == 0:
        print("you are root, so Chromium runs without its sandbox: visit only pages that you trust")
    with Writer(options.out / "episode.jsonl") as writer:
        index = 1 + max((key[2] for key in writer.done), default=-1)  # also names the pictures
        turns: list[Turn] = []
        outcome = "stopped"  # by the user, the agent, a full context or the browser
        try:
            async with web as env:
                running = RunningEpisode(Job(url, 0, index, options.steps), await env.reset())
                while len(turns) < options.steps:
                    picture = options.out / f"{index}-{len(turns) + 1:02}.png"
                    if not await take_turn(env, world, policy, running, turns, ask, picture):
                        break
                else:
                    outcome = str(Outcome.LIMIT)
                (options.out / f"{index}-end.png").write_bytes(await env.page.screenshot())
                if options.watch:
                    await ask("Press Enter to close the window: ")
        finally:
            episode = Episode(
                url,
                0,
                index,
                options.goal,
                tuple(turns),
                outcome,
                0.0,
                policy.name,
                policy.sampling,
            )
            if turns:
                writer.add(episode)
    return episode


async def take_turn(
    env,
    world: World,
    policy: Policy,
    running: RunningEpisode,
    turns: list[Turn],
    ask: Ask | None,
    picture: Path,
) -> bool:
    """Take one turn and add it to `turns`. Returns False if the user or the agent has stopped.

    `running` holds the turns that still fit into the model's context, `turns` holds all of them.
    """
    if (reply := await answer(policy, running)) is None:
        print("this page alone does not fit into the model's context")
        return False
    seen, name = running.observation, None
    print(f"{len(turns) + 1:3}  {plain(thought(reply.text)) or '(no thought)'}")
    try:
        action = understand(reply.text, world)
        name = world.render(action)
        if (choice := await preview(env, seen, action, name, picture, ask)) == "q":
            return False
        if choice == "s":
            running.observation = Observation(
                seen.instruction, seen.text, error="the user refused this action"
            )
        else:
            turns.append(
                Turn(seen.text, reply.text, name, "the visit ended here", reply.ids, reply.logps)
            )
            running.observation = await env.step(action)
            del turns[-1]  # was there so that the file has this action even if the step raises
        error = running.observation.error
    except ActionError as problem:
        error = str(problem)
    if error:
        print(f"     -> {plain(error)}")
    turns.append(Turn(seen.text, reply.text, name, error, reply.ids, reply.logps))
    running.turns.append(turns[-1])
    if len(turns) >= MAX_UNUSABLE and not any(turn.action for turn in turns[-MAX_UNUSABLE:]):
        print(f"the agent stops: {MAX_UNUSABLE} answers in a row had no usable action")
        return False
    return True


async def answer(policy: Policy, running: RunningEpisode) -> Reply | None:
    """The agent's answer; None if the page alone is too long. Early turns are dropped if the visit is too long."""
    shown = "     thinking ..." if sys.stdout.isatty() else ""  # a large model takes minutes
    before = running.forgotten
    print(shown, end="", flush=True)
    try:
        while (reply := await policy.answer(0, running)) is None and running.turns:
            del running.turns[0]
            running.forgotten += 1
    finally:
        print(shown and f"\r{' ' * len(shown)}\r", end="", flush=True)
    if (forgotten := running.forgotten - before) and reply is not None:
        print(
            f"     the visit is too long for the model's context: the agent forgets its first {forgotten} turns"
        )
    return reply


async def preview(
    env, seen: Observation, action: Action, name: str, picture: Path, ask: Ask | None
) -> str:
    """Show the action as text, as a frame in the page and as a picture. Returns the choice: "", "s" or "q"."""
    refs = [str(action[of]) for of in ("ref", "to") if of in action]
    lines = [line for ref in refs for line in seen.text.split("\n") if line.endswith(f" [{ref}]")]
    # the user must see all that they agree to
    told = "   ".join([plain(name, most=9_999), *map(plain, lines)])
    print(f"     {told}")
    await env.page.mark(action)
    picture.write_bytes(await env.page.screenshot())
    choice = await ask(QUESTION) if ask else ""
    while choice not in ("", "s", "q"):  # "no" must not count as yes, for a click cannot be undone
        choice = await ask(QUESTION)
    await env.page.mark(None)
    return choice


async def ask_user(question: str) -> str:
    """The user's answer, "q" at the end of the input. The browser keeps running meanwhile."""
    with contextlib.suppress(termios.error):  # no terminal
        termios.tcflush(
            sys.stdin, termios.TCIFLUSH
        )  # so that keys pressed before the question do not answer it
    print(question, end="", flush=True)
    loop = asyncio.get_running_loop()
    line = loop.create_future()
    loop.add_reader(
        sys.stdin, lambda: line.done() or line.set_result(os.read(sys.stdin.fileno(), 4096))
    )
    try:
        return ((await line).decode(errors="replace") or "q").strip().lower()
    finally:
        loop.remove_reader(sys.stdin)


async def pause(_: str) -> str:
    """Wait for a second instead of asking, so that a user who only watches can look."""
    await asyncio.sleep(PAUSE_S)
    return ""


def plain(text: str, most: int = 300) -> str:
    """Text from a page or a model in one line, without characters that control a terminal.

    >>> plain("a\\x1b[2Jb\\nc")
    'a?[2Jb c'
    """
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))[:most]
