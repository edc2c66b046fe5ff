"""A chat endpoint like OpenAI's for the agents of other programs. It records the conversations.

    python evaluate.py --serve 8000 --model smollm2 --adapter minidpo/miniwob --record runs/talk.jsonl

POST /v1/chat/completions and GET /v1/models are OpenAI's. Each answer names its `conversation`; in a stream the last
chunk does. POST /v1/verdicts {"conversation": ID, "solved": true} judges it. A prompt that begins with an earlier prompt
and its answer continues that conversation. If it could continue several, the answer gets a new name. With the header
X-Conversation-Id a client gives its own name. `train.py` learns from the record.
"""

import json
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from urllib.parse import unquote

from minidpo.acting.endpoint import Endpoint, Record, Refused, Serve, Told
from minidpo.data.episodes import json_object
from minidpo.system import processes

MOST_BYTES = 2**24  # in a request


def serve(options: Serve) -> None:
    """Answer until somebody stops the program."""
    processes.refuse_torchrun("an endpoint is not shared")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with listening(options) as server:
        host, port = server.server_address[:2]
        print(f"{server.endpoint.name} answers at http://{host}:{port}/v1")
        reach = "only this machine reaches it"
        if not host.startswith("127."):
            reach = "anybody who reaches this address can use it, because it needs no key"
        kept = f"recorded in {options.record}" if options.record else "not recorded (--record)"
        print(f"{reach}; what is said is {kept}", flush=True)
        try:
            server.endpoint.answering.run()
        except KeyboardInterrupt:
            raise KeyboardInterrupt("the same command continues the record") from None


@contextmanager
def listening(options: Serve) -> Iterator["Server"]:
    """A server that puts requests into the queue of its endpoint. Raises ValueError if it cannot listen."""
    with ExitStack() as stack:
        record = stack.enter_context(Record(options.record)) if options.record else None
        try:
            server = stack.enter_context(Server((options.host, options.serve), Handler))
        except OSError as error:
            raise ValueError(
                f"cannot listen at {options.host}, port {options.serve} ({error.strerror}): give "
                "another port to --serve, or another --host"
            ) from None
        server.endpoint = Endpoint(options, record)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.shutdown)
        yield server


class Server(ThreadingHTTPServer):
    """A thread for each connection. A client's mistake ends only its own."""

    daemon_threads = True
    request_queue_size = 1024  # connections that wait to be accepted
    endpoint: Endpoint

    def handle_error(self, request, client_address) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """The requests of a connection."""

    protocol_version = "HTTP/1.1"  # a connection may carry several requests
    timeout = 60  # seconds of silence
    disable_nagle_algorithm = True  # otherwise an answer would wait 40 ms for an acknowledgement
    server: Server

    def do_GET(self) -> None:
        name = self.server.endpoint.name
        model = {"id": name, "object": "model", "created": 0, "owned_by": "minidpo"}
        found = {"/v1/models": {"object": "list", "data": [model]}, f"/v1/models/{name}": model}
        self._send(found.get(self._path()) or self._nothing())

    def do_POST(self) -> None:
        try:
            body = self._body()
            if self._path() == "/v1/chat/completions":
                self._complete(body)
            elif self._path() == "/v1/verdicts":
                self._send(self.server.endpoint.judge(body))
            else:
                raise self._nothing()
        except Refused as refused:
            self._send(refused)

    def log_message(self, *_) -> None:
        """Nothing is printed."""

    def _path(self) -> str:
        return unquote(self.path.partition("?")[0]).rstrip("/")

    def _nothing(self) -> Refused:
        return Refused(404, f"nothing is at {self._path()!r:.80}")

    def _body(self) -> dict:
        """The JSON of the request. Raises Refused if it is not usable."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MOST_BYTES:
            self.close_connection = True  # the body is not read
            raise Refused(413, f"a request has Content-Length, at most {MOST_BYTES} bytes")
        text = self.rfile.read(int(length))
        # a page in a browser can send other types to any address, also to this machine
        if "json" not in self.headers.get("Content-Type", ""):
            raise Refused(400, "a request has Content-Type: application/json")
        try:
            return json_object(text)
        except ValueError as error:
            raise Refused(400, f"the body should be a JSON object: {error}") from None

    def _send(self, answer: dict | Refused) -> None:
        status, body = 200, answer
        if isinstance(answer, Refused):
            status, body = answer.status, answer.body
        text = json.dumps(body).encode()
        self._begin(status, {"Content-Type": "application/json", "Content-Length": str(len(text))})
        self.wfile.write(text)

    def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def _complete(self, body: dict) -> None:
        """Answer a chat request. Raises Refused before anything is sent."""
        endpoint, name = self.server.endpoint, f"chatcmpl-{uuid.uuid4().hex[:20]}"
        head = {"id": name, "created": int(time.time()), "model": endpoint.name}
        conversation = self.headers.get("X-Conversation-Id")
        with closing(endpoint.answers(body, conversation, name, self.connection)) as answers:
            if body.get("stream") is True:
                self._stream(body, head, chain([next(answers)], answers))
                return
            (said,) = answers
        head |= {"object": "chat.completion", "conversation": said.call.conversation}
        choice = {"index": 0, "message": said.message, "finish_reason": said.reason}
        choice["logprobs"] = self._logprobs(body, said)
        self._send({**head, "choices": [choice], "usage": usage(said)})

    def _stream(self, body: dict, head: dict, answers: Iterable[str | Told]) -> None:
        """Send an answer as it grows, as server-sent events."""
        self.close_connection = True  # the stream ends with the connection
        self._begin(200, {"Content-Type": "text/event-stream"})
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
        if calls := said.message.get("tool_calls", []):
            send({"tool_calls": [{"index": n, **call} for n, call in enumerate(calls)]})
        head["conversation"] = said.call.conversation
        send({}, said.reason, logprobs=self._logprobs(body, said))
        options = body.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage") is True:
            self._event({**head, "choices": [], "usage": usage(said)})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, body: dict) -> None:
        self.wfile.write(b"data: " + json.dumps(body).encode() + b"\n\n")

    def _logprobs(self, body: dict, said: Told) -> dict | None:
        """log π of each token at temperature 1, if the request asks for it."""
        if body.get("logprobs") is not True:
            return None
        decode, entries = self.server.endpoint.chat.tokenizer.decode, []
        for id, logp in zip(said.call.ids, said.call.logps):
            token = decode([id], skip_special_tokens=False)
            written = {"token": token, "bytes": list(token.encode())}
            entries.append({**written, "logprob": logp, "top_logprobs": []})
        return {"content": entries}


def usage(said: Told) -> dict:
    read, written = said.prompt_tokens, len(said.call.ids)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
