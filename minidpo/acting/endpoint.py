"""The chat endpoint behind `acting/serve`: a request's messages as ids, its answer as text, both recorded.

Where a prompt holds what the model answered before, it is read as the very ids that were sampled. So a
conversation is one growing row of ids, and training reads what was said (`data/recorded`).
"""

import fcntl
import hashlib
import json
import re
import select
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any, NamedTuple

from minidpo.acting.answering import Answering, Asked, Full
from minidpo.acting.policies import uniform_stream
from minidpo.data.recorded import Call, Verdict, parse_lines
from minidpo.data.trl_files import calls_of, messages_of, tools_of
from minidpo.model.chat import Chat, Message
from minidpo.model.sampling import Answer, Request

REMEMBERED = 2**14  # answers whose ids are known, and prompts that were counted
LOOK_S = 0.25  # how often a client whose answer is awaited is looked after
CALLS = "<tool_call>"
CALL = re.compile(rf"{CALLS}\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
READ = {
    *("model", "messages", "tools", "temperature", "top_p", "max_tokens", "max_completion_tokens"),
    *("stop", "seed", "stream", "stream_options", "logprobs"),
}
NOTES = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
# what is not done here may be asked for only as what is done
UNDONE = {
    "n": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "top_logprobs": 0,
    "response_format": {"type": "text"},
    "tool_choice": "auto",
    "parallel_tool_calls": True,
}


class Refused(Exception):
    """What a request is answered in place of what it wanted, as OpenAI says it."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ):
        super().__init__(message)
        self.status = status
        kind = {429: "rate_limit_error", 500: "server_error"}.get(status, "invalid_request_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Record(AbstractContextManager):
    """A file of calls and verdicts, to which they are added. A last line that a kill tore is cut off. Raises
    ValueError if the file holds anything else, or if another server writes to it."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.file = path, open(path, "ab+")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{path}: another process is writing to it") from None
        self.file.seek(0)
        *lines, torn = self.file.read().split(b"\n")
        self.conversations = {said.conversation for said in parse_lines(path, lines)}
        self.file.truncate(self.file.tell() - len(torn))

    def add(self, said: Call | Verdict) -> None:
        """Write a line. Raises Refused if the disk does not take it."""
        try:
            self.file.write(said.to_json().encode() + b"\n")
            self.file.flush()
        except OSError as error:
            raise Refused(500, f"not recorded: {self.path}: {error.strerror}") from None
        self.conversations.add(said.conversation)

    def __exit__(self, *_) -> None:
        self.file.close()


# ---- what is asked ----


class Wanted(NamedTuple):
    """A request, as read."""

    messages: tuple[Message, ...]
    tools: str | None  # JSON
    temperature: float
    top_p: float
    most: int | None  # tokens of the answer
    stops: list[str]
    seed: int | None
    stream: bool
    conversation: str | None  # as its header names it


def wanted(body: dict, conversation: str | None) -> Wanted:
    """What a body asks for. Raises Refused, which names the field."""
    for key, value in body.items():
        if key not in READ | NOTES and value is not None and UNDONE.get(key, ...) != value:
            hint = f" other than {json.dumps(UNDONE[key])}" if key in UNDONE else ""
            raise Refused(400, f"{key}{hint} is not supported: leave it out", param=key)
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise Refused(400, "stop should be text, or a list of texts", param="stop")
    try:
        said = body.get("messages")
        said = [_plain(message) for message in said] if isinstance(said, list) else said
        messages = messages_of({"messages": said}, "messages", "the request")
        tools = tools_of(body, "the request")
    except ValueError as error:
        raise Refused(400, str(error), param="messages") from None
    most = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    temperature = _number(body, "temperature", float, 0, 2)
    return Wanted(
        messages,
        tools,
        1.0 if temperature is None else float(temperature),
        float(_number(body, "top_p", float, 1e-6, 1) or 1),
        _number(body, most, int, 1, 2**31),
        stops,
        _number(body, "seed", int, -(2**63), 2**63),
        body.get("stream") is True,
        conversation,
    )


def _number(body: dict, key: str, kind: type, low: float, high: float) -> Any:
    value = body.get(key)
    if value is not None and (type(value) not in (int, kind) or not low <= value <= high):
        words = {int: "a whole number", float: "a number"}[kind]
        raise Refused(400, f"{key} should be {words} from {low:g} to {high:g}", param=key)
    return value


def _plain(message: object) -> object:
    """A message of several texts as one of one text; a developer is the system."""
    if not isinstance(message, dict):
        return message
    content, role = message.get("content"), message.get("role")
    parts = content if isinstance(content, list) else []
    if parts and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts):
        content = "\n".join(part["text"] for part in parts)
    return {**message, "content": content, "role": "system" if role == "developer" else role}


# ---- what is answered ----


class Told(NamedTuple):
    """An answer as its client sees it, and what of it was sampled."""

    message: dict
    ids: tuple[int, ...]
    logps: tuple[float, ...]
    reason: str  # why it ended, OpenAI's finish_reason
    prompt_tokens: int
    conversation: str


def message_of(text: str, tools: bool) -> dict:
    """An answer's text as a message, its calls of tools by themselves where they can be read.

    >>> message_of('I look.\\n<tool_call>\\n{"name": "f", "arguments": {"x": 1}}\\n</tool_call>', True)["content"]
    'I look.'
    """
    plain = {"role": "assistant", "content": text}
    if not tools or CALLS not in text:
        return plain
    try:
        read = [json.loads(call) for call in CALL.findall(text)]
        calls = json.loads(calls_of({"role": "assistant", "tool_calls": read}, "") or "")
    except (ValueError, RecursionError):
        return plain
    for n, call in enumerate(calls):
        call["id"] = f"call_{uuid.uuid4().hex[:16]}"
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls[n]["function"]["arguments"] = arguments
    words = text.partition(CALLS)[0].rstrip()
    return {"role": "assistant", "content": words or None, "tool_calls": calls}


def settled(text: str, stops: Sequence[str], tools: bool) -> str:
    """Of an answer that is still being written, what nothing to come can cut off or make a call.

    >>> settled("I look. <tool", [], tools=True), settled("1, 2, EN", ["END"], tools=False)
    ('I look.', '1, 2, ')
    """
    marks = [*stops, CALLS] if tools else stops
    ends = [text.find(CALLS)] if tools and CALLS in text else []
    for mark in marks:
        begun = (n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n]))
        ends.append(len(text) - next(begun, 0))
    text = text[: min(ends, default=len(text))].rstrip("\ufffd")  # half a character
    return text.rstrip() if tools else text


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the first of these texts begins."""
    return min((n for n in map(text.find, stops) if n >= 0), default=None)


def is_gone(client: socket.socket) -> bool:
    """Whether the client has hung up."""
    poll = select.poll()
    poll.register(client, select.POLLIN | select.POLLHUP)
    try:
        return bool(poll.poll(0)) and not client.recv(1, socket.MSG_PEEK)
    except ConnectionError:
        return True


# ---- what is remembered ----


@dataclass(eq=False)
class Given:
    """An answer that was given: what a prompt that holds it reads, and goes on from."""

    call: str
    conversation: str
    before: "Given | None"
    place: int  # among the messages of a prompt that holds it
    message: Message  # as sampled, with calls as text
    length: int  # tokens of its prompt and itself
    fingerprint: int  # of these
    goes_on: bool = False


class Prompt(NamedTuple):
    """A request's prompt: its ids, and the last answer in it that was given here."""

    ids: tuple[int, ...]
    after: Given | None
    marks: list[str]  # of the conversation up to each message
    number: int  # how often it was asked before


class Memory:
    """The answers that were given, by the conversation up to each."""

    def __init__(self, chat: Chat):
        self.chat, self.lock = chat, threading.Lock()
        self.given: dict[str, list[Given]] = {}
        self.times: dict[str, int] = {}  # how often each prompt was asked

    def prompt(self, want: Wanted) -> Prompt:
        """The prompt as ids, of which earlier answers are those that were sampled. Raises ValueError with the
        template's reason."""
        marks = marks_of(want.messages, want.tools)
        with self.lock:
            found = (self._given(mark, want.conversation) for mark in reversed(marks))
            after = next(filter(None, found), None)
            number = self.times.get(marks[-1], 0)
            _put(self.times, marks[-1], number + 1)
        messages, given = list(want.messages), after
        while given:
            messages[given.place] = given.message
            given = given.before
        ids = tuple(self.chat.prompt(messages, want.tools))
        if after and hash(ids[: after.length]) != after.fingerprint:
            after = None
        return Prompt(ids, after, marks, number)

    def _given(
        self, mark: str, conversation: str | None, same: Given | None = None
    ) -> Given | None:
        """An answer that was given there, the same ids as `same`: of the conversation that is named, else one
        from which no other goes on."""
        found = self.given.get(mark, [])
        found = [g for g in found if same is None or g.fingerprint == same.fingerprint]
        return min(found, key=lambda g: (g.conversation != conversation, g.goes_on), default=same)

    def next(self, want: Wanted, prompt: Prompt, ids: tuple[int, ...], call: str) -> Given:
        """An answer in its conversation. The caller of this and of `add` holds the lock meanwhile."""
        after = prompt.after
        if after:
            after = self._given(prompt.marks[after.place], want.conversation, after)
        name = want.conversation or (after.conversation if after else uuid.uuid4().hex[:16])
        message = Message("assistant", self.chat.decode(ids), ids)
        whole, place = prompt.ids + ids, len(want.messages)
        return Given(call, name, after, place, message, len(whole), hash(whole))

    def add(self, want: Wanted, given: Given, shown: dict) -> None:
        """Remember an answer, which its client was shown so."""
        if given.before:
            given.before.goes_on = True
        messages = messages_of({"messages": [shown]}, "messages", "the answer")
        mark = marks_of((*want.messages, *messages), want.tools)[-1]
        _put(self.given, mark, [*self.given.get(mark, []), given][-REMEMBERED:])


def _put(known: dict, key: str, value: Any) -> None:
    """Remember it; of too many the one is forgotten that has stayed longest."""
    known.pop(key, None)
    known[key] = value
    if len(known) > REMEMBERED:
        del known[next(iter(known))]


def marks_of(messages: Sequence[Message], tools: str | None) -> list[str]:
    """A fingerprint of the conversation up to each message."""
    sha256, marks = hashlib.sha256(repr(tools).encode()), []
    for message in messages:
        sha256.update(repr((message.role, message.content, message.calls)).encode())
        marks.append(sha256.hexdigest())
    return marks


# ---- all together ----


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """What the addresses lead to. Its methods are called from many threads."""

    name: str  # of the model
    policy: str  # and with the fingerprints of weights and chat
    chat: Chat
    limit: int  # tokens that the model reads
    answering: Answering
    memory: Memory
    record: Record | None
    seed: int
    max_new_tokens: int

    def models(self) -> dict:
        model = {"id": self.name, "object": "model", "created": int(time.time())}
        return {"object": "list", "data": [{**model, "owned_by": "minidpo"}]}

    def judge(self, body: dict) -> dict:
        """Record a verdict. Raises Refused."""
        name, solved = body.get("conversation"), body.get("solved")
        if not isinstance(name, str) or not isinstance(solved, bool):
            raise Refused(400, 'a verdict is {"conversation": ID, "solved": true or false}')
        if self.record is None:
            raise Refused(400, "nothing is recorded here: start the server with --record FILE")
        with self.memory.lock:
            if name not in self.record.conversations:
                raise Refused(404, f"no conversation {name!r:.80} was recorded", code="not_found")
            self.record.add(Verdict(name, solved))
        return {"object": "verdict", "conversation": name, "solved": solved}

    def answers(
        self, body: dict, call: str, conversation: str | None, client: socket.socket
    ) -> Iterator[str | Told]:
        """Of a stream the answer's text as it grows; then the whole answer, which is recorded as `call`. Raises
        Refused, or ConnectionError if the client is gone; its row is then free."""
        if body.get("model") != self.name:
            told = f"no model is called {body.get('model')!r:.80} here, but {self.name!r}"
            raise Refused(404, told, code="model_not_found", param="model")
        want = wanted(body, conversation)
        prompt, asked = self._ask(want)
        told = ""
        try:
            for answer, ended in heard(asked, client):
                text = self.chat.decode(answer.ids)
                if ended or first_stop(text, want.stops) is not None:
                    break
                text = settled(text, want.stops, want.tools is not None)
                if want.stream and len(text) > len(told):
                    yield text[len(told) :]
                    told = text
        finally:
            asked.dropped = True
        said = self._keep(want, prompt, asked, answer, call)
        if rest := (said.message["content"] or "")[len(told) :] if want.stream else "":
            yield rest
        yield said

    def _ask(self, want: Wanted) -> tuple[Prompt, Asked]:
        """Put a request into the queue. Raises Refused."""
        full = Refused(429, "too many requests wait for an answer: ask later", code="queue_full")
        if self.answering.is_full:  # before it is tokenised
            raise full
        try:
            prompt = self.memory.prompt(want)
        except ValueError as error:
            raise Refused(400, str(error), param="messages") from None
        used = len(prompt.ids)
        most = want.most or max(1, min(self.max_new_tokens, self.limit - used))
        if used + most > self.limit:
            raise Refused(
                400,
                f"This model's maximum context length is {self.limit} tokens. However, you requested "
                f"{used + most} tokens ({used} in the messages, {most} in the completion).",
                code="context_length_exceeded",
                param="messages",
            )
        # without a seed a prompt that is asked again has another answer
        seeds = (self.seed, prompt.number) if want.seed is None else (want.seed,)
        uniforms = uniform_stream(most, *seeds, prompt.ids)
        request = Request(prompt.ids, uniforms, want.temperature)
        asked = Asked(request, want.top_p, want.stream or bool(want.stops))
        try:
            self.answering.ask(asked)
        except Full:
            raise full from None
        return prompt, asked

    def _keep(self, want: Wanted, prompt: Prompt, asked: Asked, answer: Answer, call: str) -> Told:
        """The answer as its client sees it, remembered and recorded."""
        ids, text = answer.ids, self.chat.decode(answer.ids)
        cut = first_stop(text, want.stops)
        reason = "length" if cut is None and ids[-1] != self.chat.end else "stop"
        while cut is not None and len(ids) > 1 and self._spells(ids[:-1], text[:cut]):
            ids = ids[:-1]  # what the client does not see is not kept
        message = message_of(text[:cut], want.tools is not None)
        if "tool_calls" in message:
            reason = "tool_calls"
        logps = tuple(round(logp, 6) for logp in answer.logps[: len(ids)])
        with self.memory.lock:
            given = self.memory.next(want, prompt, ids, call)
            if self.record:
                self.record.add(self._call(want, prompt, asked, logps, given))
            self.memory.add(want, given, message)
        return Told(message, ids, logps, reason, len(prompt.ids), given.conversation)

    def _spells(self, ids: tuple[int, ...], text: str) -> bool:
        return self.chat.decode(ids).startswith(text)

    def _call(
        self, want: Wanted, prompt: Prompt, asked: Asked, logps: tuple[float, ...], given: Given
    ) -> Call:
        """The line of a call."""
        after = given.before
        new = want.messages[after.place + 1 :] if after else want.messages
        return Call(
            given.conversation,
            given.call,
            after.call if after else None,
            "\n".join(message.content for message in new),
            given.message.content,
            prompt.ids[after.length :] if after else prompt.ids,
            given.message.ids,
            logps,
            self.policy,
            {
                "temperature": asked.request.temperature,
                "top_p": asked.top_p,
                "seed": self.seed if want.seed is None else want.seed,
                "max_new_tokens": len(asked.request.uniforms),
            },
        )


def heard(asked: Asked, client: socket.socket) -> Iterator[tuple[Answer, bool]]:
    """How an answer grows, and whether it has ended. Raises Refused, or ConnectionError if the client is gone."""
    while True:
        if is_gone(client):
            raise ConnectionError("the client has hung up")
        try:
            news = asked.told.get(timeout=LOOK_S)
        except Empty:
            continue
        if isinstance(news, Exception):
            raise Refused(500, f"the model gave no answer: {news}")
        yield news
