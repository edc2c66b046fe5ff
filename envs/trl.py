"""Worlds as environment classes for TRL, whose GRPOTrainer plays instances by calling tools.

    from datasets import Dataset
    from trl import GRPOTrainer
    from envs.trl import environment, rows

    trainer = GRPOTrainer(..., train_dataset=Dataset.from_list(rows("miniwob", "click-button", 100)),
                          environment_factory=environment("miniwob"))

In a world of pages each command is a tool, `click(ref="3")`; in others there is one tool, `act`, for any action of the
world's grammar. `get_reward` gives the world's own reward, or None, which TRL does not count, if the world broke.
"""

import inspect
from typing import Any

import envs
from envs import actions
from envs.gym import Place, Tab
from envs.protocol import Action as AnyAction
from envs.protocol import EnvError, Observation, World

ABOUT = {
    "CLICK": "Click on an element.",
    "DOUBLE_CLICK": "Double-click on an element.",
    "HOVER": "Move the mouse onto an element.",
    "TYPE": "Write text into a field, in place of what it holds.",
    "SELECT": "Choose an option of a list.",
    "PRESS": "Press a key, such as Enter, or Control+a.",
    "SCROLL": "Scroll an element by some pixels.",
    "DRAG": "Drag an element onto another one.",
    "CLICK_AT": "Click at a place of the page, in pixels.",
    "WAIT": "Wait for a moment.",
}
ARGUMENTS = {
    "ref": "The number in brackets behind an element.",
    "to": "The number in brackets behind the other element.",
    "text": "The text.",
    "option": "The option, as the page shows it.",
    "key": "The key.",
    "dx": "Pixels to the right.",
    "dy": "Pixels downwards.",
    "x": "Pixels from the left.",
    "y": "Pixels from the top.",
}
PAGES = "You do a task on a web page by calling functions, one a turn. Each answers with the page after it."
TRIES = 3  # of a reset


class Environment:
    """An instance of a world, played by calling methods. The first `reset` opens an environment."""

    world: World

    def __init__(self):
        self._place: Place | Tab | None = None

    def reset(self, task: str, seed: int, **row: Any) -> str:
        """Begin the instance. Raises EnvError if that is impossible."""
        if self._place is None:
            self._place = Tab() if self.world.name == "miniwob" else Place(self.world)
        self._task, self._steps, self._broke = task, 0, False
        for left in reversed(range(TRIES)):
            try:
                self._seen = self._place.run(self._place.env.reset(task, seed))
                break
            except EnvError:
                if not left:
                    raise
        return f"task: {self._seen.instruction}\n{self._page()}"

    def get_reward(self) -> float | None:
        """The world's reward so far; None if the world broke."""
        return None if self._broke else self._seen.reward

    def _step(self, action: AnyAction) -> str:
        """The page after the action. TRL passes the text of an exception to the agent."""
        if self._seen.outcome or self._steps >= self.world.step_limit(self._task):
            raise ValueError("the episode has ended")
        self._steps += 1
        try:
            self._seen: Observation = self._place.run(self._place.env.step(action))
        except EnvError:
            self._broke = True
            raise
        return "The episode has ended." if self._seen.outcome else self._page()

    def _page(self) -> str:
        trouble = f"error: {self._seen.error}\n" if self._seen.error else ""
        return f"{trouble}page:\n{self._seen.text}"


def environment(name: str) -> type[Environment]:
    """The class for TRL's `environment_factory`. Raises ValueError if the world is unknown or cannot be played on this
    machine."""
    world = envs.world(name)
    world.require()
    if world.parse is actions.parse:
        methods = {command.lower(): _method(command) for command in actions.FORMS}
    else:
        methods = {"act": _act}
    return type(world.name.title(), (Environment,), {"world": world, **methods})


def rows(name: str, tasks: str, count: int, split: str = "rollouts") -> list[dict[str, Any]]:
    """The first `count` instances of each task, as rows of a data set. TRL adds the page after each prompt."""
    world = envs.world(name)
    system = PAGES if world.parse is actions.parse else world.system_prompt
    prompt = [{"role": "system", "content": system}, {"role": "user", "content": ""}]
    return [
        {"prompt": prompt, "task": task, "seed": seed}
        for task in envs.resolve(world, tasks)
        for seed in world.instances(task, split)[:count]
    ]


def _act(self: Environment, action: str) -> str:
    """Do one thing.

    Args:
        action: The action, as it would stand behind "action:".
    """
    return self._step(self.world.parse(action))


def _method(command: str):
    """A command of the page's grammar as a method with types and docstring. A drag always ends on an element."""
    form = actions.FORMS[command][0]

    def method(self: Environment, **arguments: Any) -> str:
        return self._step(actions.Action(command, **arguments))

    words = "".join(f"    {name}: {ARGUMENTS[name]}\n" for name in form)
    method.__name__ = method.__qualname__ = command.lower()
    method.__doc__ = f"{ABOUT[command]}\n\nArgs:\n{words}" if form else ABOUT[command]
    method.__annotations__ = {**form, "return": str}
    kinds = inspect.Parameter
    method.__signature__ = inspect.Signature(
        [kinds("self", kinds.POSITIONAL_OR_KEYWORD)]
        + [kinds(name, kinds.KEYWORD_ONLY, annotation=kind) for name, kind in form.items()],
        return_annotation=str,
    )
    return method
