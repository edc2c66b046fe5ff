"""What a page of the web may reach: its own origin, or the folder of a file.

Some of Chromium's requests pass no filter: redirects, sockets, workers, links that connect in advance. So Chromium's
only network is a proxy of ours, which connects to the page's host and port and nowhere else.
"""

import asyncio
import contextlib
import ipaddress
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

REACH_S = 10.0


class Bounds:
    """What a page may reach. Raises ValueError if the URL is not the address of a page or its file does not exist."""

    def __init__(self, url: str):
        self.url, self.host, self.port = url, None, None
        try:
            parts = urlsplit(url)
            if parts.scheme == "file":
                if parts.netloc.lower() not in ("", "localhost") or not parts.path.startswith("/"):
                    raise ValueError("a file's address begins with file:/// and its whole path")
                path = Path(url2pathname(parts.path)).resolve(strict=True)
                folder = path if path.is_dir() else path.parent
                origin = folder.as_uri().rstrip("/") + "/"
                self.url = origin if path.is_dir() else path.as_uri()
                if parts.query:
                    self.url += f"?{parts.query}"
                if parts.fragment:
                    self.url += f"#{parts.fragment}"
            elif parts.username is not None:
                raise ValueError(
                    "an address with a user name in it is not visited: leave the name out"
                )
            elif parts.scheme in ("http", "https") and parts.hostname:
                usual = {"http": 80, "https": 443}[parts.scheme]
                self.host = _as_chromium_writes(parts.hostname)
                self.port = usual if parts.port is None else parts.port
                name = f"[{self.host}]" if ":" in self.host else self.host
                origin = f"{parts.scheme}://{name}{'' if self.port == usual else f':{self.port}'}/"
            else:
                raise ValueError("a page's address begins with http://, https:// or file://")
        except (ValueError, OSError) as error:
            raise ValueError(f"{url}: {getattr(error, 'strerror', None) or error}") from None
        self.origin = origin
        # a URL that matches may be shown in the tab
        self.page = re.compile(f"(blob:)?{re.escape(origin)}")
        self.outside = re.compile(f"^(?!(blob:)?{re.escape(origin)}|data:|about:)")

    async def reach(self) -> None:
        """Raise ValueError in one line if the host does not answer."""
        if self.host is not None:
            try:
                call = asyncio.open_connection(self.host, self.port)
                (await asyncio.wait_for(call, REACH_S))[1].close()
            except TimeoutError:
                raise ValueError(
                    f"{self.url}: {self.host} did not answer within {REACH_S:g} s"
                ) from None
            except OSError as error:
                raise ValueError(
                    f"{self.url}: no way to {self.host}: {error.strerror or error}"
                ) from None


def _as_chromium_writes(host: str) -> str:
    """The host in the spelling of a browser's address line.

    >>> [_as_chromium_writes(host) for host in ("127.1", "0:0:0:0:0:0:0:1", "bücher.example")]
    ['127.0.0.1', '::1', 'xn--bcher-kva.example']
    """
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host))
    with contextlib.suppress(OSError):
        return socket.inet_ntoa(socket.inet_aton(host))  # "127.1", "0x7f.1"
    if differ := {*host} & {*"ßς\u200c\u200d"}:  # Python's codec is IDNA 2003, for which ß is ss
        letters = ", ".join(map(ascii, sorted(differ)))
        raise ValueError(f"write the host as xn--..., as {letters} in it can be read in two ways")
    return host.encode("idna").decode()


@contextlib.asynccontextmanager
async def gate(bounds: Bounds) -> AsyncIterator[int]:
    """The port of a SOCKS proxy (RFC 1928) that connects to one host and port only, for a file to none."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError), contextlib.closing(writer):
            await reader.readexactly((await reader.readexactly(2))[1])
            writer.write(b"\5\0")  # version 5, no password
            _, command, _, kind = await reader.readexactly(4)
            if kind == 3:
                (length,) = await reader.readexactly(1)
                host = (await reader.readexactly(length)).decode("latin-1").lower()
            else:
                host = str(ipaddress.ip_address(await reader.readexactly(4 if kind == 1 else 16)))
            port = int.from_bytes(await reader.readexactly(2), "big")
            reply = b"\5%c\0\1" + bytes(6)
            if command != 1 or (host, port) != (bounds.host, bounds.port):
                writer.write(reply % 2)  # not allowed
                return
            try:
                there, back = await asyncio.open_connection(host, port)
            except OSError:
                writer.write(reply % 4)  # unreachable
                return
            with contextlib.closing(back):
                writer.write(reply % 0)
                both_ways = (reader, back), (there, writer)
                flows = [asyncio.ensure_future(pass_on(*ends)) for ends in both_ways]
                # the other may never end
                await asyncio.wait(flows, return_when=asyncio.FIRST_COMPLETED)
                for flow in flows:
                    flow.cancel()
                await asyncio.gather(*flows, return_exceptions=True)

    with contextlib.closing(await asyncio.start_server(serve, "127.0.0.1", 0)) as server:
        yield server.sockets[0].getsockname()[1]


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy everything from reader to writer until the input ends."""
    while data := await reader.read(2**16):
        writer.write(data)
        await writer.drain()
    writer.write_eof()
