"""What every request passes before it is routed: request id, Host, key, body cap and deadline; and every error after.

A plain ASGI wrapper: the application behind it finds the body whole, and may raise any error of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from knotctl.core.errors import Cancelled, KnotctlError, RequestError, printable
from knotctl.services.keys import ApiKeys, is_loopback
from knotctl.services.replies import error_reply

log = logging.getLogger("knotctl.http")

BODY_BYTES = 4 << 20
BODY_SECONDS = 30.0
# So much more of a refused request is read and dropped, for so long at most.
_DRAIN_BYTES = 16 << 20
_DRAIN_SECONDS = 2.0
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class EdgeConfig:
    """What the edge lets pass. `public` are the paths that need no key; all others do."""

    host: str = "127.0.0.1"
    keys: ApiKeys = field(default_factory=lambda: ApiKeys(()))
    public: frozenset[str] = frozenset(("/livez", "/readyz", "/health"))
    body_bytes: int = BODY_BYTES
    body_seconds: float = BODY_SECONDS


class Edge:
    """Wraps an application; `observe(scope, status, seconds)` is told of every reply."""

    def __init__(
        self, app: ASGIApp, config: EdgeConfig, observe: Callable[[Scope, int, float], None] = lambda *_: None
    ) -> None:
        self._app = app
        self._config = config
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the server's start and stop."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id
        # Starlette's router raises what it cannot route, instead of answering in plain text, where this is set.
        scope["app"] = self
        body = _Body(receive, headers, self._config)
        status = 0

        async def reply(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                fields = MutableHeaders(raw=message.setdefault("headers", []))
                fields["x-request-id"] = request_id
                if not body.whole:
                    # What is left of the body would be taken for the next request.
                    fields["connection"] = "close"
            await send(message)

        try:
            self._check(scope["path"], headers)
            await body.read()
            await self._app(scope, body.receive, reply)
        except Cancelled:
            status = status or 499
        except Exception as e:
            error = _named(e, request_id)
            if status:
                # Too late for words: the closed connection says that this is not the end of the reply.
                raise error from e
            await body.drop()
            await error_reply(scope["path"], error, getattr(e, "headers", None))(scope, receive, reply)
        finally:
            seconds = time.perf_counter() - started
            self._observe(scope, status, seconds)
            path = printable(scope["path"], 100)
            log.info("%s %s %d %.1f ms", scope["method"], path, status, seconds * 1e3, extra={"request_id": request_id})

    def _check(self, path: str, headers: Headers) -> None:
        config = self._config
        if not config.keys and not _is_local_name(headers.get("host", ""), config.host):
            # A page of some site whose name was made to point here must not get to talk to an open API.
            raise RequestError("bad-host", "Host: this server answers to its own name only", status=421)
        if path not in config.public and not config.keys.accept(headers):
            raise RequestError(
                "invalid_api_key", "API key: missing or wrong", status=401, hint="Authorization: Bearer KEY"
            )


class _Body:
    """A request's body, read whole before the application runs; then it only tells of the client's leaving."""

    def __init__(self, receive: Receive, headers: Headers, config: EdgeConfig) -> None:
        self._receive = receive
        self._headers = headers
        self._config = config
        self._content: bytes | None = None
        self.whole = False

    async def read(self) -> None:
        """Read it. Raises: RequestError 408, 413, 415; Cancelled."""
        cap = self._config.body_bytes
        too_large = RequestError("too-large", f"request body: expected at most {cap} bytes", status=413)
        if self._headers.get("content-encoding", "identity").lower() != "identity":
            raise RequestError("bad-coding", "Content-Encoding: expected none", status=415)
        if int(self._headers.get("content-length", "0")) > cap:
            raise too_large
        content = bytearray()
        try:
            async with asyncio.timeout(self._config.body_seconds):
                async for piece in self._pieces():
                    content += piece
                    if len(content) > cap:
                        raise too_large
        except TimeoutError:
            raise RequestError(
                "timeout", f"request body: not whole within {self._config.body_seconds:g} s", status=408
            ) from None
        self._content = bytes(content)

    async def drop(self) -> None:
        """Read on for a while what a refused client still sends, so that it reads the refusal and not a reset."""
        if "expect" in self._headers:
            return  # it asked first, and has sent nothing
        dropped = 0
        with contextlib.suppress(TimeoutError, Cancelled):
            async with asyncio.timeout(_DRAIN_SECONDS):
                async for piece in self._pieces():
                    dropped += len(piece)
                    if dropped > _DRAIN_BYTES:
                        return

    async def receive(self) -> Message:
        """Give the body once, then wait for the client to leave."""
        if self._content is not None:
            content, self._content = self._content, None
            return {"type": "http.request", "body": content, "more_body": False}
        return await self._receive()

    async def _pieces(self) -> AsyncIterator[bytes]:
        while not self.whole:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Cancelled("cancelled", "the client left within its request")
            self.whole = not message.get("more_body", False)
            yield message.get("body", b"")


def _is_local_name(host: str, own: str) -> bool:
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    return is_loopback(name.strip("[]").lower()) or name.lower() == own.lower()


def _named(error: Exception, request_id: str) -> KnotctlError:
    """Return the error as one of ours; what is not, is our bug: logged whole, answered without its words."""
    if isinstance(error, KnotctlError):
        return error
    if isinstance(error, HTTPException):
        code = {404: "not-found", 405: "method-not-allowed"}.get(error.status_code, "bad-request")
        return RequestError(code, error.detail, status=error.status_code)
    log.error("%s", printable(error), exc_info=error, extra={"request_id": request_id})
    return KnotctlError("internal", "this is a bug in knotctl; its log has the traceback", hint=f"request {request_id}")
