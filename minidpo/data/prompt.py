"""The prompt: what the model is told, and how its answer is understood.

A task instance becomes a conversation: the world's system prompt, then the task and the page, the agent's
answer, the page after it, and so on. If a long page hardly changed, only its changes are shown. An answer is a
thought and an action. The action goes through the world's closed grammar and is never run as code. An answer
without a usable action costs a turn; the next says why.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import cycle

from tqdm import tqdm

from envs.protocol import Action, ActionError, World
from minidpo.data.episodes import Episode, Turn
from minidpo.model.chat import Chat, Dialogue, Message

_ACTION = re.compile(r"^[ \t*_`]*action[ \t*_`]*:[ \t]*(.*)$", re.IGNORECASE | re.MULTILINE)
_THOUGHT = re.compile(
    r"^[ \t*_`]*thought[ \t*_`]*:[ \t]*(.*?)(?=^[ \t*_`]*action[ \t*_`]*:|\Z)",
    re.IGNORECASE | re.MULTILINE | re.DOTALL,
)


def write(thought: str, action: str) -> str:
    """The answer in canonical form.

    >>> write('button "OK" [1]', 'CLICK(ref="1")')
    'thought: button "OK" [1]\\naction: CLICK(ref="1")'
    """
    return f"thought: {thought}\naction: {action}"


def thought(answer: str) -> str:
    """The thought in an answer; empty when it has none."""
    found = _THOUGHT.search(answer)
    return found.group(1).rstrip() if found else ""


def understand(answer: str, world: World) -> Action:
    """The one action in an answer. Raises ActionError with a sentence the agent can act on. Forgives spacing,
    case, `Action :`, Markdown marks around it and a trailing full stop; more than one action, or none, is
    refused, because guessing would act where the agent did not say so."""
    found = _ACTION.findall(answer)
    if not found:
        example = _ACTION.search(world.system_prompt)
        line = example[0] if example else "action: ..."
        raise ActionError(f"no action found: end the answer with a line like {line}")
    if len(found) > 1:
        raise ActionError(f"{len(found)} actions found: give exactly one a turn")
    return world.parse(found[0].strip().strip("*_").strip())


FOLD_FROM_LINES = 12  # shorter pages are always shown whole


@lru_cache(1024)
def changes(observation: str, before: str) -> str | None:
    """What changed on a long page since the page before, so that the page could be told from it exactly:
    "... 7" for seven unchanged lines, and new lines. These took the place of as many others; after "(new)"
    of none, after "(gone: 2)" of two. None if the page is short, or if not half of the two pages is the same.

    It depends on these two pages alone, so earlier messages never change and the KV cache stays valid.
    """
    old, new, shown, same = before.split("\n"), observation.split("\n"), [], 0
    if len(new) < FOLD_FROM_LINES:
        return None
    for change, i, j, start, end in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if change == "equal":
            same += j - i
            shown.append(f"... {j - i}")
            continue
        if j - i != end - start:
            shown.append(f"(gone: {j - i})" if i < j else "(new)")
        shown += new[start:end]
    is_worth_it = 2 * len(shown) <= len(new) and 2 * same >= max(len(old), len(new))
    return "\n".join(shown) if is_worth_it else None


def page(observation: str, turn_before: Turn | None, instruction: str) -> Message:
    """What the agent is shown: at first task and page, later the last error, if any, and page or changes."""
    if turn_before is None:
        return Message("user", f"task: {instruction}\npage:\n{observation}")
    trouble = "" if turn_before.error is None else f"error: {turn_before.error}\n"
    changed = changes(observation, turn_before.observation)
    shown = f"page:\n{observation}" if changed is None else f"page, what changed:\n{changed}"
    return Message("user", trouble + shown)


def exchanges(instruction: str, turns: Sequence[Turn]) -> list[Message]:
    """Page and answer of each turn."""
    messages = []
    for turn_before, turn in zip((None, *turns), turns):
        messages.append(page(turn.observation, turn_before, instruction))
        messages.append(Message("assistant", turn.answer, turn.ids))
    return messages


def conversation(
    instruction: str, turns: Sequence[Turn], system: str, shots: Sequence[str] = ()
) -> list[Message]:
    """The messages of an episode's turns so far: system, solved examples, then page and answer in turn."""
    examples = map(Message, cycle(("user", "assistant")), shots)
    return [Message("system", system), *examples, *exchanges(instruction, turns)]


def next_prompt(
    instruction: str,
    turns: Sequence[Turn],
    observation: str,
    system: str,
    shots: Sequence[str] = (),
) -> list[Message]:
    """The messages of the turns so far and the page that waits for an answer."""
    shown = page(observation, turns[-1] if turns else None, instruction)
    return [*conversation(instruction, turns, system, shots), shown]


def episode_messages(episode: Episode, system: str) -> list[Message]:
    """An episode as the conversation it was."""
    return conversation(episode.instruction, episode.turns, system, episode.shots)


def as_shots(episodes: Sequence[Episode]) -> tuple[str, ...]:
    """What examples show, one after the other: their pages and answers, in turn."""
    return tuple(
        message.content
        for episode in episodes
        for message in exchanges(episode.instruction, episode.turns)
    )


@dataclass(frozen=True)
class Conversation:
    """Messages from another trainer's file, of which those by the assistant count from number `given` on, but
    for those numbered in `context`: they are read and not learned."""

    messages: tuple[Message, ...]
    given: int
    name: str
    instance: tuple[str, int]  # conversations with the same prompt share it, and a tree
    solved: bool = True  # a chosen one may be imitated as well, unless it is known to have failed
    context: frozenset[int] = frozenset()
    tools: str | None = None  # the functions that the agent may call, JSON

    @property
    def learned(self) -> list[int]:
        """The numbers of the messages that count."""
        answers = [n for n, m in enumerate(self.messages) if m.role == "assistant"]
        return [n for n in answers if n >= self.given and n not in self.context]

    @property
    def first_prompt(self) -> tuple[str, int]:
        """Stands for its prompt, as an episode's own does."""
        return self.instance

    @property
    def said(self) -> list[Message]:
        """The answers that count."""
        return [self.messages[n] for n in self.learned]

    def up_to(self, turns: int) -> "Conversation":
        """The same conversation without what came behind its first answers that count."""
        learned = self.learned[:turns]
        return replace(self, messages=self.messages[: learned[-1] + 1]) if learned else self

    def dialogue(self, chat: Chat) -> Dialogue:
        """Token ids, and which are to be learned; only those turns are counted."""
        if self.context and not self.learned:
            raise ValueError(f"{self.name}: no answer in it is to be learned: leave the row out")
        try:
            ids, turns = chat.dialogue(self.messages, self.tools)
        except ValueError as error:  # the template's own reason
            raise ValueError(f"{self.name}: {error}") from None
        roles = [message.role for message in self.messages]
        place = {n: turn for turn, n in enumerate(self.learned)}
        of_answer = [place.get(n, -1) for n, role in enumerate(roles) if role == "assistant"]
        return Dialogue(ids, [of_answer[turn] if turn >= 0 else -1 for turn in turns])


def dialogue_of(trajectory: Episode | Conversation, chat: Chat, system: str) -> Dialogue:
    """Token ids and turns. What the agent did not say itself is given: examples that it was shown, and of a
    relabelled episode all that stood before the expert's answer."""
    if type(trajectory) is Episode:  # one of `data/recorded` knows its ids
        given = 1 + len(trajectory.shots)  # the system prompt and the examples
        given += 2 * trajectory.forced * trajectory.relabelled  # a page and an answer for each step
        messages = tuple(episode_messages(trajectory, system))
        trajectory = Conversation(messages, given, trajectory.name, trajectory.instance)
    return trajectory.dialogue(chat)


def dialogues_of(
    trajectories: Sequence[Episode] | Sequence[Conversation], chat: Chat, limit: int, system: str
) -> tuple[list[Dialogue], list[str]]:
    """Token ids and turns of each, and its name; refuses, by name, what cannot be learned from."""
    dialogues = []
    for trajectory in tqdm(trajectories, "tokenising", unit="episode", delay=2, leave=False):
        ids, turns = dialogue_of(trajectory, chat, system)
        if (
            max(turns[limit:], default=-1) < 0
        ):  # nothing that is read follows the agent's last token
            ids, turns = ids[:limit], turns[:limit]
        dialogues.append(Dialogue(ids, turns))
    names = [trajectory.name for trajectory in trajectories]
    check_trajectories(dialogues, names, limit)
    return dialogues, names


def check_trajectories(dialogues: Sequence[Dialogue], names: Sequence[str], limit: int) -> None:
    """Refuse, by name, a trajectory in which the agent wrote nothing or that is too long for the model."""
    for dialogue, name in zip(dialogues, names, strict=True):
        if not dialogue.written:
            raise ValueError(
                f"{name}: the agent wrote nothing in it, so there is nothing to learn from"
            )
        if dialogue.turns[0] >= 0:
            raise ValueError(
                f"{name}: it begins with a token of the agent, which nothing can predict; "
                "a trajectory begins with a prompt"
            )
        if len(dialogue.ids) > limit:
            raise ValueError(
                f"{name}: {len(dialogue.ids)} tokens, but the model reads at most {limit}: leave it "
                "out, or ask for fewer --shots if it was played behind examples"
            )
