"""Which tracker leads: it has the fleet; the others pass on to it what nodes say.

Source: man knot-cluster(7), TRACKERS.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from knotctl.core.cluster.fleet import Fleet
from knotctl.core.cluster.layers import ModelLayers
from knotctl.core.cluster.policy import Policy
from knotctl.core.cluster.registry import LEASE_S, Lease, Registry
from knotctl.core.cluster.store import Database
from knotctl.core.engine.hop import remote_error
from knotctl.core.errors import Conflict, KnotctlError, RequestError
from knotctl.core.source.http_call import Peer, TransportError

log = logging.getLogger("knotctl.tracker")
T = TypeVar("T")

_PASS_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class TrackerSpec:
    """How a tracker runs. Units: seconds; a node that is silent for `silent_s` has left.

    `url` is where other trackers reach this one; token and tls are for calls to nodes and trackers.
    """

    url: str
    policy: Policy = field(default_factory=Policy)
    heartbeat_s: float = 2.0
    silent_s: float = 12.0
    lease_s: float = LEASE_S
    token: str | None = None
    tls: Any = None


class Leadership:
    """One tracker's part in it: `fleet` is there while this one leads. On the event loop."""

    def __init__(
        self, model: ModelLayers, knot_id: str, database: Database, registry: Registry, spec: TrackerSpec
    ) -> None:
        self.fleet: Fleet | None = None
        self.lease = Lease(database, knot_id, spec.url, ttl_s=spec.lease_s)
        self._model, self._registry, self._spec = model, registry, spec
        self._peers: dict[str, Peer] = {}
        # The fleet has one thread: what nodes say comes one after the other.
        self._thread = ThreadPoolExecutor(1, "knotctl-fleet")

    async def close(self) -> None:
        """Let another tracker lead."""
        self._thread.shutdown()
        for peer in self._peers.values():
            peer.close()
        with contextlib.suppress(KnotctlError):
            await asyncio.to_thread(self.lease.release)

    async def keep(self) -> None:
        """Renew the lease, or take it; to be called every few seconds."""
        led = self.fleet is not None
        try:
            leading = await asyncio.to_thread(self.lease.tick)
        except KnotctlError as e:
            log.warning("lease: %s", e.message)
            leading = self.lease.leading
        if leading and not led:
            spec = self._spec
            make = functools.partial(
                Fleet, self._model, spec.policy, self._registry, self.lease, silent_s=spec.silent_s
            )
            self.fleet = await asyncio.get_running_loop().run_in_executor(self._thread, make)
            log.info("leading, under fence %d", self.lease.fence)
        elif led and not leading:
            self.fleet = None
            log.warning("not leading any more")

    async def with_fleet(self, work: Callable[[Fleet], T]) -> T:
        """Return what the fleet says, in its thread. Raises: RequestError not-leading; what work raises."""
        fleet = self.fleet
        if fleet is None or not self.lease.leading:
            raise RequestError("not-leading", "tracker: another one leads", status=503, hint="retry later")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, fleet)
        except Conflict as e:
            if e.code != "lease-lost":
                raise
            self.fleet = None
            raise RequestError("not-leading", e.message, status=503, hint="retry later") from e

    async def passed_on(self, request: Request) -> Response | None:
        """Return the answer of the tracker that leads, None where that is this one.

        Raises: RequestError not-leading where nobody leads now.
        """
        if self.fleet is not None and self.lease.leading:
            return None
        url = self.lease.leader_url
        if not url or url == self._spec.url or "x-knot-passed-on" in request.headers:
            raise RequestError("not-leading", "tracker: nobody leads now", status=503, hint="retry later")
        body = await request.body()
        kept = ("authorization", "x-api-key", "content-type")
        headers = {k: request.headers[k] for k in kept if k in request.headers} | {"x-knot-passed-on": "1"}
        path = request.scope.get("raw_path", request.url.path.encode()).decode("ascii")
        peer = self.peer(url, own_token=False)
        try:
            reply = await asyncio.to_thread(
                peer.call, request.method, path, body, seconds=_PASS_SECONDS, headers=headers
            )
        except TransportError as e:
            raise RequestError("not-leading", f"tracker that leads: {e.message}", status=503) from e
        if reply.status >= 400:
            error = remote_error(url, reply)
            raise RequestError(error.code, error.message, status=error.status, hint=error.hint)
        return Response(reply.body, reply.status, media_type="application/json")

    def peer(self, url: str, *, own_token: bool = True) -> Peer:
        """Return the node or tracker at a URL, asked with this tracker's token or its caller's."""
        key = f"{own_token} {url}"
        if key not in self._peers:
            self._peers[key] = Peer(url, token=self._spec.token if own_token else None, tls=self._spec.tls)
        return self._peers[key]
