"""uvicorn's HTTP protocol with what it lacks: deadlines and caps on a request's head, before any code of ours runs.

What follows the head (body cap and deadline, Host's name, keys) is checked in `edge.py`, with the request in hand.
"""

from __future__ import annotations

import asyncio
import json
import resource
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from knotctl.core.errors import RequestError
from knotctl.services.replies import error_document

HEAD_SECONDS = 10.0
HEAD_BYTES = 32 << 10
HEAD_FIELDS = 100
URL_BYTES = 8 << 10
# A chunk of one byte costs six more; anything beyond that is a body of chunk extensions or a trailer without end.
_CHUNK_OVERHEAD = 8
# How long a refused client may go on sending, so that it reads the answer instead of a reset.
_LINGER_SECONDS = 1.0
# Leaves half of the descriptors for the model, the stores and the parties that requests are passed on to.
MAX_CONNECTIONS = min(2048, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class GuardedProtocol(HttpToolsProtocol):
    """One connection; a head that is late, large, many or ambiguous is answered and the connection closed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.url = b""
        self._refusal: RequestError | None = None
        self._refused = False
        # Whether the next bytes belong to a head, or to nothing yet; the timer runs only then.
        self._awaits_head = True
        self._began = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = self._body_bytes = self._fed_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection and start its head's clock; beyond MAX_CONNECTIONS refuse it."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(RequestError("overloaded", "too many connections", status=503, hint="retry later"))
        else:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what arrived, within the caps."""
        if self._refused or self.transport.is_closing():
            return
        awaited, self._began = self._awaits_head, False
        super().data_received(data)
        if self._refused or self.transport.is_closing():
            return
        if awaited and self._awaits_head:
            # Fields are counted as they are parsed; this counts one that does not end, and blanks before a head.
            if not self._began:
                self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self._refuse(_too_large(f"head of more than {HEAD_BYTES} bytes"))
            self._start_timer()
        elif not awaited and not self._awaits_head:
            self._fed_bytes += len(data)
            if self._fed_bytes > HEAD_BYTES + self._body_bytes * _CHUNK_OVERHEAD:
                self._refuse(RequestError("bad-request", "body: more chunk framing than content"))

    def on_message_begin(self) -> None:
        """Start a head."""
        super().on_message_begin()
        self._awaits_head = self._began = True
        self._head_bytes = self._body_bytes = self._fed_bytes = 0
        self._start_timer()

    def on_url(self, url: bytes) -> None:
        """Take a piece of the target."""
        super().on_url(url)
        if len(self.url) > URL_BYTES:
            self._stop_parsing(RequestError("uri-too-long", f"request target: over {URL_BYTES} bytes", status=414))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a field."""
        if not self._awaits_head:
            self._stop_parsing(RequestError("bad-request", "body: trailer fields are not accepted"))
        super().on_header(name, value)
        self._head_bytes += len(name) + len(value) + 4
        if len(self.headers) > HEAD_FIELDS:
            self._stop_parsing(_too_large(f"more than {HEAD_FIELDS} header fields"))
        if self._head_bytes > HEAD_BYTES:
            self._stop_parsing(_too_large(f"head of more than {HEAD_BYTES} bytes"))

    def on_headers_complete(self) -> None:
        """Check the whole head and hand the request to the application."""
        self._awaits_head = False
        self._stop_timer()
        if not self.url.startswith(b"/") and self.url != b"*":
            self._stop_parsing(RequestError("bad-request", "request target: expected a path"))
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts != 1 and (hosts or self.parser.get_http_version() != "1.0"):
            self._stop_parsing(RequestError("bad-request", f"Host: expected one field, found {hosts}"))
        if any(name == b"transfer-encoding" and value.lower() != b"chunked" for name, value in self.headers):
            self._stop_parsing(RequestError("bad-request", "Transfer-Encoding: expected chunked or none"))
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that a request is whole: what comes next is another head."""
        self._awaits_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what the parser, or one of its callbacks above, refused."""
        self._refuse(self._refusal or RequestError("bad-request", "this is not HTTP/1.1"))

    def _stop_parsing(self, error: RequestError) -> None:
        # The parser turns any error of a callback into its own, upon which uvicorn calls send_400_response.
        self._refusal = error
        raise error

    def _refuse(self, error: RequestError) -> None:
        self._stop_timer()
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started or self.pipeline:
                # Words in the middle of another reply would be taken for part of it.
                self.transport.close()
                return
            # The application waits for a body that will not come: let it go, unheard.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = json.dumps(error_document(self.url.decode("latin-1"), error)).encode()
        status = HTTPStatus(error.status)
        self.transport.write(
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
            + body
        )
        self.transport.write_eof()
        self.loop.call_later(_LINGER_SECONDS, self.transport.close)

    def _start_timer(self) -> None:
        if self._head_timer is None and not self._refused:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        self._head_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            # A head sent ahead of its turn may wait until the reply before it is finished.
            self._start_timer()
        else:
            self._refuse(RequestError("timeout", f"no whole head within {HEAD_SECONDS:g} s", status=408))


def _too_large(what: str) -> RequestError:
    return RequestError("head-too-large", f"request: {what}", status=431)
