"""The chat endpoint behind `acting/serve`: turns messages into ids and answers into text, and records both.

If a prompt contains earlier answers of the model, they are read as the ids that were sampled, not tokenised again. So
a conversation is one growing row of ids, and training reads what the model really wrote (`data/recorded`).
"""

import fcntl
import hashlib
import json
import re
import select
import socket
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Full
from typing import Annotated, Any, NamedTuple

from minidpo.acting.answering import Answering, Asked
from minidpo.acting.policies import uniform_stream
from minidpo.data.recorded import Call, Verdict, parse_lines
from minidpo.data.trl_files import calls_of, messages_of, tools_of
from minidpo.memory.context import ModelOptions
from minidpo.memory.loading import open_policy
from minidpo.memory.packing import pack, saves_time
from minidpo.model.chat import Chat, Message
from minidpo.model.sampling import Answer, Request
from minidpo.system.ranges import Positive, Range

REMEMBERED = 2**14  # most answers whose ids are remembered, and most prompts that are counted
LOOK_S = 0.25  # how often it is checked that a waiting client is still there
CALLS = "<tool_call>"
CALL = re.compile(rf"{CALLS}\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
# fields that are read in a request, and fields that change no answer
READ = "model messages tools temperature top_p max_tokens max_completion_tokens stop seed stream"
NOTES = (
    "stream_options logprobs user metadata store service_tier safety_identifier prompt_cache_key"
)
# Fields of features that are missing here, with the values that need none of them. "required" does not force a call:
# the client has to check that there is one.
UNDONE: dict[str, list] = {"n": [1], "frequency_penalty": [0], "presence_penalty": [0]}
UNDONE |= {"logit_bias": [{}], "top_logprobs": [0], "response_format": [{"type": "text"}]}
UNDONE |= {"tool_choice": ["auto", "required"], "parallel_tool_calls": [True]}


@dataclass(frozen=True, kw_only=True)
class Serve(ModelOptions):
    """Answer chat requests of other programs' agents like OpenAI's endpoint, and record them."""

    serve: Annotated[int, Range("from 0 to 65535", lambda x: 0 <= x < 2**16)]
    "port to listen at; 0 takes any free one"
    host: str = "127.0.0.1"
    "address to listen at; by default only this machine can reach it"
    adapter: Path | None = None
    "folder or hub id of a LoRA adapter"
    record: Path | None = None
    "file to which answers (with token ids) and verdicts are added; --data of train.py reads it"
    max_new_tokens: Positive[int] = 512
    "most tokens in an answer if the request does not say"
    waiting: Positive[int] = 64
    "requests that may wait while --machine.pages others are answered; one more gets status 429"


class Refused(Exception):
    """An error as the answer to a request, in OpenAI's form."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status = status
        kind = {429: "rate_limit_error", 500: "server_error"}.get(status, "invalid_request_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Record(AbstractContextManager):
    """A file to which calls and verdicts are added. A last line that a kill left incomplete is cut off. Raises
    ValueError if the file holds anything else or another server writes to it."""

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
        """Write a line. Raises Refused if that fails."""
        try:
            self.file.write(said.to_json().encode() + b"\n")
            self.file.flush()
        except OSError as error:
            raise Refused(500, f"not recorded: {self.path}: {error.strerror}") from None
        self.conversations.add(said.conversation)

    def __exit__(self, *_) -> None:
        self.file.close()


# ---- the request ----


class Wanted(NamedTuple):
    """A request after reading."""

    messages: tuple[Message, ...]
    tools: str | None  # JSON
    temperature: float
    top_p: float
    most: int | None  # tokens in the answer
    stops: list[str]
    seed: int | None
    stream: bool
    conversation: str | None  # the client's name for it
    call: str  # the name of its answer


def wanted(body: dict, conversation: str | None, call: str) -> Wanted:
    """The request in a body. Raises Refused, which names the field, if it is not supported."""
    for key, value in body.items():
        if key not in f"{READ} {NOTES}".split() and value not in [None, *UNDONE.get(key, [])]:
            done = " or ".join(map(json.dumps, UNDONE.get(key, [])))
            hint = done and f" other than {done}"
            raise Refused(400, f"{key}{hint} is not supported: leave it out", key)
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise Refused(400, "stop should be text, or a list of texts", "stop")
    try:
        said = body.get("messages")
        said = [_plain(message) for message in said] if isinstance(said, list) else said
        messages = messages_of({"messages": said}, "messages", "the request")
        tools = tools_of(body, "the request")
    except ValueError as error:
        raise Refused(400, str(error), "messages") from None
    most = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    numbers = _number(body, "temperature", 1.0, 0, 2), _number(body, "top_p", 1.0, 1e-6, 1)
    most, seed = _number(body, most, None, 1, 2**31), _number(body, "seed", None, -(2**63), 2**63)
    stream = body.get("stream") is True
    return Wanted(messages, tools, *numbers, most, stops, seed, stream, conversation, call)


def _number(body: dict, key: str, default: float | None, low: float, high: float) -> Any:
    """A number, or the default. Without a default it must be a whole number."""
    value, kind = body.get(key), int if default is None else float
    if value is None:
        return default
    if type(value) not in (int, kind) or not low <= value <= high:
        words = "a whole number" if kind is int else "a number"
        raise Refused(400, f"{key} should be {words} from {low:g} to {high:g}", key)
    return kind(value)


def _plain(message: object) -> object:
    """A message with its texts joined into one; the role "developer" becomes "system"."""
    if not isinstance(message, dict):
        return message
    content, role = message.get("content"), message.get("role")
    parts = content if isinstance(content, list) else []
    if parts and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts):
        content = "\n".join(part["text"] for part in parts)
    return {**message, "content": content, "role": "system" if role == "developer" else role}


# ---- the answer ----


class Told(NamedTuple):
    """An answer as the client sees it, why it ended, the number of tokens in its prompt, and its call."""

    message: dict
    reason: str
    prompt_tokens: int
    call: Call


def message_of(text: str, tools: bool) -> dict:
    """The text of an answer as a message. Tool calls that can be read are separated from the text.

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
    for call in calls:
        called = call["function"]
        called["arguments"] = json.dumps(called["arguments"], ensure_ascii=False)
        call["id"] = f"call_{uuid.uuid4().hex[:16]}"
    return {**plain, "content": text.partition(CALLS)[0].rstrip() or None, "tool_calls": calls}


def settled(text: str, stops: Sequence[str], tools: bool) -> str:
    """The part of a growing answer that no later token can cut off or turn into a tool call.

    >>> settled("I look. <tool_call>", [], tools=True), settled("1, 2, EN", ["END"], tools=False)
    ('I look.', '1, 2, ')
    """
    longest = max(map(len, [*stops, *[CALLS] * tools]), default=1)
    end = max(0, len(text) + 1 - longest)
    if tools and CALLS in text:
        end = min(end, text.index(CALLS))
    text = text[:end].rstrip("\ufffd")  # half a character
    return text.rstrip() if tools else text


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the first of these texts begins; None if there is none."""
    return min((n for n in map(text.find, stops) if n >= 0), default=None)


def heard(asked: Asked, client: socket.socket) -> Iterator[tuple[Answer, bool]]:
    """The answer as it grows, and whether it is complete. Raises Refused if the model fails, ConnectionError if the
    client is gone."""
    while not is_gone(client):
        try:
            news = asked.told.get(timeout=LOOK_S)
        except Empty:
            continue
        if isinstance(news, Exception):
            raise Refused(500, f"the model gave no answer: {news}")
        yield news
    raise ConnectionError("the client has hung up")


def is_gone(client: socket.socket) -> bool:
    """Whether the client has hung up."""
    poll = select.poll()
    poll.register(client, select.POLLIN)
    try:
        return bool(poll.poll(0)) and not client.recv(1, socket.MSG_PEEK)
    except ConnectionError:
        return True


# ---- the memory ----


@dataclass(eq=False)
class Given:
    """An answer that was given, to be found again in later prompts."""

    call: Call
    before: "Given | None"
    place: int  # its index among the messages of a prompt that contains it
    length: int  # tokens of its prompt and itself
    fingerprint: int  # of these tokens
    goes_on: bool = False


class Prompt(NamedTuple):
    """A prompt as ids, and the answer that it continues."""

    ids: tuple[int, ...]
    after: Given | None  # the last answer in it that was given here
    alone: bool  # whether no other conversation had the same text up to that answer
    number: int  # how often the same prompt came before


class Memory:
    """The answers that were given, found by the conversation up to them."""

    def __init__(self, chat: Chat):
        self.chat, self.lock = chat, threading.Lock()
        self.given: dict[str, list[Given]] = {}
        self.times: dict[str, int] = {}  # how often each prompt came

    def prompt(self, want: Wanted) -> Prompt:
        """The prompt as ids, with the sampled ids for earlier answers. Raises ValueError if the template refuses it."""
        marks = marks_of(want.messages, want.tools)
        with self.lock:
            number = self.times.get(marks[-1], 0)
            _put(self.times, marks[-1], number + 1)
            found = next(filter(None, map(self.given.get, reversed(marks))), [])
        named = (given for given in found if given.call.conversation == want.conversation)
        after = given = next(named, found[0] if found else None)
        messages = list(want.messages)
        while given:
            messages[given.place] = Message("assistant", given.call.answer, given.call.ids)
            given = given.before
        ids = tuple(self.chat.prompt(messages, want.tools))
        if after and hash(ids[: after.length]) != after.fingerprint:
            after = None
        return Prompt(ids, after, len(found) == 1, number)

    def conversation(self, want: Wanted, prompt: Prompt) -> str:
        """The name of the conversation of an answer. It is new if the conversation could continue in two ways."""
        if want.conversation:
            return want.conversation
        if prompt.after and prompt.alone and not prompt.after.goes_on:
            return prompt.after.call.conversation
        return uuid.uuid4().hex[:16]

    def add(self, want: Wanted, prompt: Prompt, call: Call, shown: dict) -> None:
        """Remember an answer. shown: the message as the client saw it."""
        if prompt.after:
            prompt.after.goes_on = True
        ids = prompt.ids + call.ids
        given = Given(call, prompt.after, len(want.messages), len(ids), hash(ids))
        messages = messages_of({"messages": [shown]}, "messages", "the answer")
        mark = marks_of((*want.messages, *messages), want.tools)[-1]
        _put(self.given, mark, [*self.given.get(mark, []), given][-REMEMBERED:])


def _put(known: dict, key: str, value: Any) -> None:
    """Remember a value. If there are too many, the oldest is forgotten."""
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


# ---- the endpoint ----


class Endpoint:
    """Answers the requests. Its methods are called from many threads, `answering.run` from one."""

    def __init__(self, options: Serve, record: Record | None):
        rows = options.machine.page_count()
        model, self.chat, identity = open_policy(options.model, options.adapter, options.machine)
        if saves_time(model, rows):
            model = pack(model)
        self.options, self.record, self.memory = options, record, Memory(self.chat)
        self.name = str(options.adapter or options.model)
        self.policy = f"{self.name}@{identity}"
        self.limit = model.config.max_position_embeddings
        self.answering = Answering(model, self.chat.end, rows, options.waiting)

    def judge(self, body: dict) -> dict:
        """Record a verdict. Raises Refused if it has no conversation to judge."""
        name, solved = body.get("conversation"), body.get("solved")
        if not isinstance(name, str) or not isinstance(solved, bool):
            raise Refused(400, 'a verdict is {"conversation": ID, "solved": true or false}')
        if self.record is None:
            raise Refused(400, "nothing is recorded here: start the server with --record FILE")
        with self.memory.lock:
            if name not in self.record.conversations:
                raise Refused(404, f"no conversation {name!r:.80} was recorded", "conversation")
            self.record.add(Verdict(name, solved))
        return {"object": "verdict", "conversation": name, "solved": solved}

    def answers(
        self, body: dict, conversation: str | None, call: str, client: socket.socket
    ) -> Iterator[str | Told]:
        """If the request streams, yields text as the answer grows. Then yields the whole answer, recorded as `call`.
        Raises Refused, or ConnectionError if the client is gone, whose row is then free."""
        if body.get("model") != self.name:
            told = f"no model is called {body.get('model')!r:.80} here, but {self.name!r}"
            raise Refused(404, told, "model", "model_not_found")
        want = wanted(body, conversation, call)
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
        said = self._keep(want, prompt, answer)
        if want.stream and (rest := (said.message["content"] or "")[len(told) :]):
            yield rest
        yield said

    def _ask(self, want: Wanted) -> tuple[Prompt, Asked]:
        """Put a request into the queue. Raises Refused if the queue is full or the prompt does not fit."""
        full = Refused(429, "too many requests wait for an answer: ask later", code="queue_full")
        if self.answering.is_full:  # before it is tokenised
            raise full
        try:
            prompt = self.memory.prompt(want)
        except ValueError as error:
            raise Refused(400, str(error), "messages") from None
        used = len(prompt.ids)
        most = want.most or max(1, min(self.options.max_new_tokens, self.limit - used))
        if used + most > self.limit:
            told = f"This model's maximum context length is {self.limit} tokens. However, you requested "
            told += f"{used + most} tokens ({used} in the messages, {most} in the completion)."
            raise Refused(400, told, "messages", "context_length_exceeded")
        # without a seed, the same prompt gets another answer each time
        seeds = (self.options.seed, prompt.number) if want.seed is None else (want.seed,)
        request = Request(prompt.ids, uniform_stream(most, *seeds, prompt.ids), want.temperature)
        asked = Asked(request, want.top_p, want.stream or bool(want.stops))
        try:
            self.answering.ask(asked)
        except Full:
            raise full from None
        return prompt, asked

    def _keep(self, want: Wanted, prompt: Prompt, answer: Answer) -> Told:
        """Record and remember an answer. Returns it as the client sees it."""
        ids, text = answer.ids, self.chat.decode(answer.ids)
        cut = first_stop(text, want.stops)
        reason = "length" if cut is None and ids[-1] != self.chat.end else "stop"
        text = text[:cut]
        while cut is not None and len(ids) > 1 and self.chat.decode(ids[:-1]).startswith(text):
            ids = ids[:-1]  # tokens that the client does not see are not recorded
        message = message_of(text, want.tools is not None)
        reason = "tool_calls" if "tool_calls" in message else reason
        after = prompt.after
        new = want.messages[after.place + 1 :] if after else want.messages
        with self.memory.lock:
            call = Call(
                conversation=self.memory.conversation(want, prompt),
                call=want.call,
                after=after.call.call if after else None,
                heard="\n".join(message.content for message in new),
                answer=self.chat.decode(ids),
                read=prompt.ids[after.length :] if after else prompt.ids,
                ids=ids,
                logps=tuple(round(logp, 6) for logp in answer.logps[: len(ids)]),
                policy=self.policy,
                temperature=want.temperature,
                top_p=want.top_p,
            )
            if self.record:
                self.record.add(call)
            self.memory.add(want, prompt, call, message)
        return Told(message, reason, len(prompt.ids), call)
