"""Servers for tests: one that only writes down who calls, and small web sites."""

import contextlib
import http.server
import socket
import threading
from dataclasses import dataclass, field


@contextlib.contextmanager
def nobody_should_call():
    """(TCP port, UDP port, calls): each connection and each datagram is written down; HTTP gets an answer."""
    calls: list[bytes] = []
    tcp, udp = (
        socket.create_server(("127.0.0.1", 0)),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    )
    udp.bind(("127.0.0.1", 0))

    def answer():
        with contextlib.suppress(OSError):  # closed
            while True:
                call, _ = tcp.accept()
                calls.append(b"connected")
                call.settimeout(1)
                with call, contextlib.suppress(OSError):
                    calls[-1] += b" " + call.recv(200)
                    call.sendall(
                        b"HTTP/1.1 200 OK\r\nAccess-Control-Allow-Origin: *\r\n"
                        b"Content-Length: 9\r\n\r\nTOPSECRET"
                    )

    def hear():
        with contextlib.suppress(OSError):
            while datagram := udp.recv(2000):
                calls.append(b"datagram " + datagram[:100])

    for work in (answer, hear):
        threading.Thread(target=work, daemon=True).start()
    try:
        yield tcp.getsockname()[1], udp.getsockname()[1], calls
    finally:
        for listener in (tcp, udp):
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()


@dataclass
class Site:
    """A web site: path -> HTML, or where it redirects to; `seen` is what was asked of it."""

    pages: dict[str, str] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    silent: tuple[str, ...] = ()  # paths that get no answer before the site is closed

    def __enter__(self) -> "Site":
        site, self._closing = self, threading.Event()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
                site.seen.append(f"{self.command} {self.path} {body}".strip())
                path = self.path.split("?")[0]
                if path in site.silent:
                    site._closing.wait()
                self.send_response(
                    302 if path in site.redirects else 200 if path in site.pages else 404
                )
                if path in site.redirects:
                    self.send_header("Location", site.redirects[path])
                content = site.pages.get(path, "nothing here").encode()
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Access-Control-Allow-Origin", "*")
                self.end_headers()
                self.wfile.write(content)

            do_POST = do_GET

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.origin = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
