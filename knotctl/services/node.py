"""What shards and stations have in common as services: health, a probe, metrics, frames in and out, an end.

Source: man knot-service(5), NODES.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from knotctl.core.engine.hop import FRAME_TYPE
from knotctl.core.errors import KnotctlError, RequestError, as_error
from knotctl.core.wire.frame import Frame, parse_frame
from knotctl.core.wire.layout import HEADER, SEGMENT, WIRE_LIMITS
from knotctl.services.edge import Edge, EdgeConfig
from knotctl.services.node_metrics import CONTENT_TYPE, NodeMetrics
from knotctl.services.replies import JsonReply

# A body that holds the largest frame that is taken from a connection.
FRAME_BODY_BYTES = HEADER.size + WIRE_LIMITS.segments * SEGMENT.size + WIRE_LIMITS.meta + WIRE_LIMITS.stored
# Frames over this are checked in a thread: their CRC and copy take milliseconds that other connections need.
_SMALL_FRAME = 1 << 20


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """How long a frame's body may take to arrive. Units: seconds."""

    body_seconds: float = 30.0


class Node:
    """A worker's service: `ready` once its probe went through, until `drain()`.

    A subclass gives its routes and overrides `probe`, `describe` and `stats`.
    """

    role = "node"

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        # another one at each start, so that a caller knows a node that was away from one that was slow
        self.boot_id = secrets.token_hex(8)
        self.ready = False
        self.failure: KnotctlError | None = None
        self._draining = False
        own = [
            Route("/livez", self._livez, methods=["GET"]),
            Route("/readyz", self._readyz, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
        ]
        self.routes = [*routes, *own]
        self.metrics = NodeMetrics(self.role, [r.path for r in self.routes if isinstance(r, Route)], self.stats)
        self._router = Router(self.routes, redirect_slashes=False, lifespan=self._lifespan)

    def app(self, config: EdgeConfig, limits: NodeLimits | None = None) -> ASGIApp:
        """Return the ASGI application, behind an edge that takes bodies as large as a frame may be."""
        limits = limits or NodeLimits()

        def observe(scope: Scope, status: int, seconds: float) -> None:
            self.metrics.request(scope["path"], status, seconds)

        config = replace(config, body_bytes=FRAME_BODY_BYTES, body_seconds=limits.body_seconds)
        return Edge(self._router, config, observe)

    def drain(self) -> None:
        """Be not ready from now on; what runs goes on."""
        self._draining = True

    def close(self) -> None:
        """Let go of threads and connections; called when the server has stopped."""

    def probe(self) -> None:
        """Do once what the node is for; raises what keeps it from that. Runs in a thread."""

    def describe(self) -> dict[str, Any]:
        """Return what /health says beside the status."""
        return {}

    def stats(self) -> Mapping[str, float]:
        """Return gauges for /metrics by their names there."""
        return {}

    def check_ready(self) -> None:
        """Raise RequestError not-ready (503) while the node cannot do its work."""
        if not self.ready:
            raise RequestError("not-ready", f"{self.role}: {self._state()[0]}", status=503, hint="retry later")

    async def run_probe(self) -> None:
        """Probe in a thread; the node is ready if it went through."""
        try:
            await asyncio.to_thread(self.probe)
        except Exception as e:
            self.failure = as_error(e)
        else:
            self.failure = None
            self.ready = True

    @asynccontextmanager
    async def _lifespan(self, _: ASGIApp) -> AsyncIterator[None]:
        probing = asyncio.create_task(self.run_probe())
        try:
            yield
        finally:
            await probing
            await asyncio.to_thread(self.close)

    def _state(self) -> tuple[str, int]:
        if self._draining:
            return "draining", 503
        if self.failure is not None:
            return "failed", 503
        return ("ok", 200) if self.ready else ("loading", 503)

    async def _livez(self, _: Request) -> Response:
        return JsonReply({"status": "ok", "boot": self.boot_id})

    async def _readyz(self, _: Request) -> Response:
        state, status = self._state()
        reason = {} if self.failure is None else {"reason": self.failure.message}
        return JsonReply({"status": state} | reason, status)

    async def _health(self, _: Request) -> Response:
        state, status = self._state()
        return JsonReply({"status": state, "role": self.role, "boot": self.boot_id} | self.describe(), status)

    async def _metrics(self, _: Request) -> Response:
        return Response(self.metrics.exposition(), headers={"content-type": CONTENT_TYPE})


class FrameEndpoint:
    """An endpoint that takes a frame, as an ASGI application: it must hear its caller leave.

    `work(frame, body, request)` returns the reply; it is cancelled when the caller leaves.
    """

    def __init__(self, work: Callable[[Frame, bytes, Request], Any]) -> None:
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        request = Request(scope, receive)
        body = await request.body()
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != FRAME_TYPE:
            raise RequestError("bad-content-type", f"Content-Type: expected {FRAME_TYPE}", status=415)
        frame = parse_frame(body) if len(body) <= _SMALL_FRAME else await asyncio.to_thread(parse_frame, body)
        reply: Response = await self._work(frame, body, request)
        await reply(scope, receive, send)


class FrameReply(Response):
    """A frame's bytes."""

    media_type = FRAME_TYPE


async def until_left(request: Request) -> None:
    """Return when the caller has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
