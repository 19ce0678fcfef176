"""HTTP/1.1 calls between nodes: persistent connections, one deadline for a whole call, a way out while it waits.

Written for the station hop, of which a token pays one a station: measured over loopback with a frame of one token,
medians of 500, this client takes 0.10 ms of CPU and 0.20 ms in all, httpx2 0.38 and 0.64. No redirects, no proxies, no
cookies.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools

from knotctl.core.errors import SourceError, UsageError, printable

# How long a wait goes on before `check` is asked again whether it is still wanted.
_TICK_SECONDS = 0.05
_CONNECT_SECONDS = 2.0
_READ_BYTES = 1 << 18
_HEAD_FIELDS = 100
# Below the 10 s after which our own servers give up a connection that nothing came over.
_IDLE_SECONDS = 8.0


class TransportError(SourceError):
    """A call that has no whole answer. `sent` says whether the other side may have begun to work on it."""

    http_status = 502

    def __init__(self, code: str, url: str, what: str, *, sent: bool) -> None:
        super().__init__(code, f"{url}: {what}")
        self.url = url
        self.sent = sent


@dataclass(slots=True)
class Reply:
    """An answer: its status, headers (names in lower case) and body."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class _Parser:
    """Collects one reply; httptools calls the on_ methods."""

    def __init__(self, cap: int) -> None:
        self.reply = Reply()
        self.done = False
        self.keep = False
        self._cap = cap
        self._size = self._fields = 0
        self._parts: list[bytes] = []
        self._http = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        self._http.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        if self._fields > _HEAD_FIELDS:
            raise ValueError("too many header fields")
        self.reply.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._cap:
            raise ValueError(f"a body over {self._cap} bytes")
        self._parts.append(data)

    def on_message_complete(self) -> None:
        self.reply.status = self._http.get_status_code()
        self.reply.body = b"".join(self._parts)
        self.keep = self._http.should_keep_alive()
        self.done = True


class Peer:
    """Another node's HTTP service. Calls come from any thread; each has a connection for itself.

    Units: body_cap in bytes, of an answer.
    """

    def __init__(
        self, url: str, *, token: str | None = None, tls: ssl.SSLContext | None = None, body_cap: int = 64 << 20
    ) -> None:
        self.url = url.rstrip("/")
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.path or parts.query:
            raise UsageError("bad-url", f"{printable(url)}: expected http://HOST:PORT or https://HOST:PORT")
        self._host = parts.hostname
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self._cap = body_cap
        authority = parts.netloc.rpartition("@")[2]
        self._fields = f"host: {authority}\r\n" + (f"authorization: Bearer {token}\r\n" if token else "")
        self._idle: list[tuple[socket.socket, float]] = []
        self._lock = threading.Lock()

    def call(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        seconds: float,
        check: Callable[[], None] = lambda: None,
        headers: Mapping[str, str] | None = None,
        on_sent: Callable[[], None] = lambda: None,
    ) -> Reply:
        """Return the answer, whatever its status; `check` is asked while waiting and may raise to give the call up.

        A connection given up is closed, which is how the other side learns that nobody waits any more.
        Raises: TransportError; what `check` raises.
        """
        end = time.monotonic() + seconds
        extra = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        head = f"{method} {path} HTTP/1.1\r\n{self._fields}{extra}content-length: {len(body)}\r\n\r\n".encode("latin-1")
        closed: TransportError | None = None
        while True:
            connection = self._kept()
            fresh = connection is None
            if connection is None:
                try:
                    connection = self._connect(end)
                except TransportError as e:
                    # It is gone: then it had not just closed the connection before, but died with the request in hand.
                    raise closed or e from e
            try:
                return self._exchange(connection, (head, body), end, check, on_sent)
            except TransportError as e:
                # The server may have closed a kept connection just then; it has not seen the request in that case.
                if fresh or e.code != "closed-early":
                    raise
                closed = e

    def close(self) -> None:
        """Close the connections that are kept."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            connection.close()

    def _kept(self) -> socket.socket | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection, since = self._idle.pop()
            if time.monotonic() - since < _IDLE_SECONDS and not _spoke(connection):
                return connection
            connection.close()

    def _connect(self, end: float) -> socket.socket:
        left = min(_CONNECT_SECONDS, max(0.001, end - time.monotonic()))
        try:
            connection = socket.create_connection((self._host, self._port), timeout=left)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return self._tls.wrap_socket(connection, server_hostname=self._host) if self._tls else connection
        except OSError as e:
            raise TransportError("unreachable", self.url, e.strerror or str(e), sent=False) from e

    def _exchange(
        self,
        connection: socket.socket,
        request: Sequence[bytes],
        end: float,
        check: Callable[[], None],
        on_sent: Callable[[], None],
    ) -> Reply:
        keep = False
        parser = _Parser(self._cap)
        heard = False
        try:
            self._send(connection, request, end, check)
            on_sent()
            while not parser.done:
                data = self._receive(connection, end, check)
                if not data:
                    code = "closed-midway" if heard else "closed-early"
                    raise TransportError(code, self.url, "the connection ended without a whole answer", sent=True)
                heard = True
                parser.feed(data)
            keep = parser.keep
            return parser.reply
        except (httptools.HttpParserError, ValueError) as e:
            raise TransportError("bad-reply", self.url, printable(e.__context__ or e), sent=True) from e
        except OSError as e:
            code = "closed-midway" if heard else "closed-early"
            raise TransportError(code, self.url, e.strerror or str(e), sent=True) from e
        finally:
            if keep:
                with self._lock:
                    self._idle.append((connection, time.monotonic()))
            else:
                connection.close()

    def _send(self, connection: socket.socket, request: Sequence[bytes], end: float, check: Callable[[], None]) -> None:
        # One segment where it fits: a head sent alone would cost the other side a wake-up.
        small = len(request[0]) + len(request[1]) <= _READ_BYTES
        for part in (b"".join(request),) if small else request:
            view = memoryview(part)
            while view:
                connection.settimeout(_TICK_SECONDS)
                try:
                    view = view[connection.send(view) :]
                except TimeoutError:
                    self._late(end, check, sent=False)

    def _receive(self, connection: socket.socket, end: float, check: Callable[[], None]) -> bytes:
        while True:
            connection.settimeout(_TICK_SECONDS)
            try:
                return connection.recv(_READ_BYTES)
            except TimeoutError:
                self._late(end, check, sent=True)

    def _late(self, end: float, check: Callable[[], None], *, sent: bool) -> None:
        check()
        if time.monotonic() > end:
            raise TransportError("timeout", self.url, "no whole answer in time", sent=sent)


def _spoke(connection: socket.socket) -> bool:
    """Return whether bytes, or the end, came over a connection that nothing was asked on: no answer to what is next.

    A server that has waited too long for another request says so (408) before it closes.
    """
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))
