"""A chat endpoint for the agents of other programs, as OpenAI's, which records what is said.

    python evaluate.py --serve 8000 --model smollm2 --adapter minidpo/miniwob --record runs/talk.jsonl

POST /v1/chat/completions and GET /v1/models are OpenAI's. Each answer names its `conversation`, in a stream the last
chunk does; POST /v1/verdicts {"conversation": ID, "solved": true} judges it. A conversation goes on where a prompt begins
with an earlier one and its answer. Where several begin alike, the header X-Conversation-Id keeps them apart.
`train.py` learns from the record.
"""

import json
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote

import torch

from minidpo.acting.answering import Answering
from minidpo.acting.endpoint import Endpoint, Memory, Record, Refused, Told
from minidpo.data.episodes import json_object
from minidpo.memory.context import ModelOptions
from minidpo.memory.loading import open_policy
from minidpo.memory.packing import pack
from minidpo.system import processes
from minidpo.system.ranges import Positive, Range

MOST_BYTES = 2**24  # of a request


@dataclass(frozen=True, kw_only=True)
class Serve(ModelOptions):
    """Answer the chat requests of other programs' agents, as OpenAI's endpoint does, and record them."""

    serve: Annotated[int, Range("from 0 to 65535", lambda x: 0 <= x < 2**16)]
    "port to listen at; 0: any that is free"
    host: str = "127.0.0.1"
    "address to listen at; the default is reached from this machine alone"
    adapter: Path | None = None
    "folder or hub id of a LoRA adapter"
    record: Path | None = None
    "file to which each answer is added with its token ids, and each verdict: --data of train.py"
    max_new_tokens: Positive[int] = 512
    "tokens an answer may have where the request does not say"
    waiting: Positive[int] = 64
    "requests that may wait while as many as --machine.pages are answered; one more gets 429"


def serve(options: Serve) -> None:
    """Answer until somebody stops it."""
    processes.refuse_torchrun("an endpoint is not shared")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with listening(options) as server:
        host, port = server.server_address[:2]
        print(f"{server.endpoint.name} answers at http://{host}:{port}/v1")
        reach = "only this machine reaches it"
        if not host.startswith("127."):
            reach = "whoever reaches this address may ask, because no key is wanted"
        kept = f"recorded in {options.record}" if options.record else "not recorded (--record)"
        print(f"{reach}; what is said is {kept}", flush=True)
        try:
            server.endpoint.answering.run()
        except KeyboardInterrupt:
            raise KeyboardInterrupt("the same command goes on recording") from None


@contextmanager
def listening(options: Serve) -> Iterator["Server"]:
    """A server that listens, and asks a model that is ready. Raises ValueError."""
    with ExitStack() as stack:
        record = stack.enter_context(Record(options.record)) if options.record else None
        server = stack.enter_context(open_server(options))
        server.endpoint = open_endpoint(options, record)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.shutdown)
        yield server


def open_server(options: Serve) -> "Server":
    """A server at the address that the options name."""
    try:
        return Server((options.host, options.serve), Handler)
    except OSError as error:
        raise ValueError(
            f"cannot listen at {options.host}, port {options.serve} ({error.strerror}): give another "
            "port to --serve, or another --host"
        ) from None


def open_endpoint(options: Serve, record: Record | None) -> Endpoint:
    """The model, and what it needs to answer."""
    rows = options.machine.page_count()
    model, chat, identity = open_policy(options.model, options.adapter, options.machine)
    if rows > 1 or model.head_weight.dtype == torch.bfloat16:
        model = pack(model)
    name = str(options.adapter or options.model)
    return Endpoint(
        name=name,
        policy=f"{name}@{identity}",
        chat=chat,
        limit=model.config.max_position_embeddings,
        answering=Answering(model, chat.end, rows, options.waiting),
        memory=Memory(chat),
        record=record,
        seed=options.seed,
        max_new_tokens=options.max_new_tokens,
    )


class Server(ThreadingHTTPServer):
    """A thread for each connection. What a client does wrong ends its own."""

    daemon_threads = True
    request_queue_size = 1024  # connections that wait to be accepted
    endpoint: Endpoint

    def handle_error(self, request, client_address) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """A connection's requests."""

    protocol_version = "HTTP/1.1"  # a connection has many
    timeout = 60  # seconds without a word
    server: Server

    def do_GET(self) -> None:
        models, path = self.server.endpoint.models(), self._path()
        if path == "/v1/models":
            self._send(200, models)
        elif path == f"/v1/models/{self.server.endpoint.name}":
            self._send(200, models["data"][0])
        else:
            self._refuse(Refused(404, f"nothing is at {path!r:.80}", code="not_found"))

    def do_POST(self) -> None:
        path = self._path()
        try:
            body = self._body()
            if path == "/v1/chat/completions":
                self._complete(body)
            elif path == "/v1/verdicts":
                self._send(200, self.server.endpoint.judge(body))
            else:
                raise Refused(404, f"nothing is at {path!r:.80}", code="not_found")
        except Refused as refused:
            self._refuse(refused)

    def log_message(self, *_) -> None:
        """Nothing is printed."""

    def _path(self) -> str:
        return unquote(self.path.partition("?")[0]).rstrip("/")

    def _body(self) -> dict:
        """The request's JSON. Raises Refused."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MOST_BYTES:
            self.close_connection = True  # what it sends is not read
            raise Refused(413, f"a request has Content-Length, at most {MOST_BYTES} bytes")
        text = self.rfile.read(int(length))
        # a page in a browser may send other types to any address, this machine's, too
        if "json" not in self.headers.get("Content-Type", ""):
            raise Refused(400, "a request has Content-Type: application/json")
        try:
            return json_object(text)
        except ValueError as error:
            raise Refused(400, f"the body should be a JSON object: {error}") from None

    def _send(self, status: int, body: dict) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(text)

    def _refuse(self, refused: Refused) -> None:
        self._send(refused.status, refused.body)

    def _complete(self, body: dict) -> None:
        """Answer a chat request. Raises Refused before anything is sent."""
        endpoint, call = self.server.endpoint, f"chatcmpl-{uuid.uuid4().hex[:20]}"
        head = {"id": call, "created": int(time.time()), "model": endpoint.name}
        conversation = self.headers.get("X-Conversation-Id")
        with closing(endpoint.answers(body, call, conversation, self.connection)) as answers:
            if body.get("stream") is True:
                self._stream(body, head, chain([next(answers)], answers))
                return
            (said,) = answers
        head |= {"object": "chat.completion", "conversation": said.conversation}
        choice = {"index": 0, "message": said.message, "finish_reason": said.reason}
        choice["logprobs"] = self._logprobs(body, said)
        self._send(200, {**head, "choices": [choice], "usage": usage(said)})

    def _stream(self, body: dict, head: dict, answers: Iterable[str | Told]) -> None:
        """Send an answer as it grows, as server-sent events."""
        self.close_connection = True  # its end is the end of the connection
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        head["object"] = "chat.completion.chunk"

        def send(delta: dict, reason: str | None = None, **more) -> None:
            choice = {"index": 0, "delta": delta, "finish_reason": reason, **more}
            self._event({**head, "choices": [choice]})

        send({"role": "assistant", "content": ""})
        try:
            for said in answers:
                if isinstance(said, str):
                    send({"content": said})
        except Refused as refused:
            self._event(refused.body)
            return
        calls = said.message.get("tool_calls", [])
        if calls:
            send({"tool_calls": [{"index": n, **call} for n, call in enumerate(calls)]})
        head["conversation"] = said.conversation
        send({}, said.reason, logprobs=self._logprobs(body, said))
        options = body.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage") is True:
            self._event({**head, "choices": [], "usage": usage(said)})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, body: dict) -> None:
        self.wfile.write(b"data: " + json.dumps(body).encode() + b"\n\n")

    def _logprobs(self, body: dict, said: Told) -> dict | None:
        """log π of each token at temperature 1, if that is asked for."""
        if body.get("logprobs") is not True:
            return None
        decode = self.server.endpoint.chat.tokenizer.decode
        entries = []
        for id, logp in zip(said.ids, said.logps):
            token = decode([id], skip_special_tokens=False)
            entry = {"token": token, "logprob": logp, "bytes": list(token.encode())}
            entries.append({**entry, "top_logprobs": []})
        return {"content": entries}


def usage(said: Told) -> dict:
    read, written = said.prompt_tokens, len(said.ids)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
