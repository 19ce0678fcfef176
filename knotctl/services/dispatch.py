"""Which route a request takes: the registry's nodes less those that failed lately, over a route that was proved.

A route is proved by a probe that it must answer as every other route did: so nodes with other bytes are found before a
client meets them. Source: man knot-service(5), TRACKER.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from knotctl.core.cluster.capacity import Capacity, capacity_of
from knotctl.core.cluster.layers import ModelLayers
from knotctl.core.cluster.nodes import node_of
from knotctl.core.cluster.policy import Policy
from knotctl.core.cluster.quantizations import CATALOGUE, NATIVE
from knotctl.core.cluster.registry import NodeRow, Registry
from knotctl.core.cluster.routes import Route, Server, Stop, choose_route, edges_of
from knotctl.core.errors import KnotctlError, RequestError, printable
from knotctl.services.head_calls import HeadCalls, HeadLost, RouteFailed

log = logging.getLogger("knotctl.tracker")

# A node that failed is passed over for so long, doubled each time in a row up to the most; a way between two, longer.
_FIRST_BAN, _MOST_BAN = 1.0, 30.0
_MOST_EDGE_BAN = 120.0
# How long a request that nobody can serve now waits for a route, and between looks.
_WAIT_SECONDS, _LOOK_SECONDS = 10.0, 0.25
# Routes that are tried for one request.
_TRIES = 8
_PROBE_TOKENS = 2
_PROBE_SECONDS = 30.0
# How a node failed where it was the way to it that did; all else it said itself, and so was reached.
_ON_THE_WAY = frozenset(("unreachable", "timeout", "closed-early", "closed-midway", "hung"))


class Dispatch:
    """Routes for the requests of one model. On the event loop."""

    def __init__(
        self, model: ModelLayers, policy: Policy, registry: Registry, calls: HeadCalls,
        on_lost: Callable[[str, str], Awaitable[None]],
    ) -> None:  # fmt: skip
        self._model, self._policy, self._registry, self.calls = model, policy, registry, calls
        self._on_lost = on_lost
        self._known = frozenset((*CATALOGUE, *model.quantizations, NATIVE))
        self._hop = policy.hop(model.hidden_size)
        self._banned: dict[str, tuple[float, int]] = {}  # node -> until, failures in a row
        self._broken: dict[tuple[str, str], tuple[float, int]] = {}
        self._load: Counter[str] = Counter()
        # Routes that passed, by nodes, their starts and layers; and the nodes that were on one.
        self._proved: set[tuple[tuple[str, str, str], ...]] = set()
        self._trusted: set[tuple[str, str]] = set()
        self._proving: dict[tuple[tuple[str, str, str], ...], asyncio.Lock] = {}
        self.wrong: list[str] = []  # nodes that answered otherwise, to be quarantined

    @property
    def load(self) -> dict[str, int]:
        """The streams that pass each node."""
        return {n: count for n, count in self._load.items() if count}

    async def choose(self, *, head: str | None = None, avoid: Collection[str] = ()) -> Route:
        """Return a proved route. Raises: RequestError no-route (503)."""
        for n in range(_TRIES):
            route = await self._find(head, avoid)
            if route is None:
                break
            if await self._prove(route):
                return route
            # A node that is being told to load and drop may be itself again in a moment.
            await asyncio.sleep(min(1.0, 0.05 * (2**n - 1)))
        raise RequestError(
            "no-route", f"model {self._model.name}: not every layer has a node that answers", status=503,
            hint="retry later",
        )  # fmt: skip

    async def likely(self) -> Route | None:
        """Return the route that a request would try first now, proved or not; None where there is none."""
        return await self._find(None, ())

    async def listed(self) -> bool:
        """Return whether the model can be had: a whole route passed its probe, or passes it now."""
        try:
            await self.choose()
        except KnotctlError:
            return False
        return True

    @contextmanager
    def passing(self, nodes: Sequence[str]) -> Iterator[None]:
        """Count a stream on the nodes of its route."""
        self._load.update(nodes)
        try:
            yield
        finally:
            self._load.subtract(nodes)

    async def prepared(self, chat: bool, body: Mapping[str, Any]) -> tuple[Route, list[int], int]:
        """Return a route, the ids of a request's prompt, and the most tokens that may follow.

        Raises: RequestError: the request's own fault, or no-route.
        """
        lost: HeadLost | RouteFailed | None = None
        for _ in range(_TRIES):
            route = await self._awaited()
            try:
                return route, *await self.calls.prepare(route, chat, body)
            except HeadLost as e:
                lost = e
                await self.lost(route[0])
            except RouteFailed as e:
                lost = e
                await self.blame([(s.node_id, s.url) for s in route], e.failed)
        assert lost is not None
        raise RequestError("no-route", lost.message, status=503, hint="retry later")

    async def _awaited(self) -> Route:
        """Return a proved route, waiting a while for one: layers that move from node to node are soon there again."""
        end = time.monotonic() + _WAIT_SECONDS
        while True:
            try:
                return await self.choose()
            except RequestError:
                if time.monotonic() > end:
                    raise
            await asyncio.sleep(_LOOK_SECONDS)

    async def lost(self, head: Stop) -> None:
        """Pass over a head that did not do its part, and have it looked for."""
        self.failed(head.node_id)
        await self._on_lost(head.node_id, head.url)

    async def blame(self, nodes: Sequence[tuple[str, str]], failed: Mapping[str, str]) -> set[str]:
        """Take note of who failed a route, given as ids and URLs in order; return those that do not answer here either.

        Units: failed are URLs, each with how.
        """
        gone = set()
        for i, (node_id, url) in enumerate(nodes):
            if url not in failed:
                continue
            log.warning("%s: failed a route: %s", node_id, printable(failed[url], 60))
            self.failed(node_id)
            if not await self.calls.is_alive(url):
                gone.add(node_id)
                await self._on_lost(node_id, url)
            elif i and (failed[url] in _ON_THE_WAY or failed[url].startswith("bad-")):
                log.warning("%s cannot reach %s", nodes[i - 1][0], node_id)
                self.edge_failed(nodes[i - 1][0], node_id)
        return gone

    def failed(self, node_id: str) -> None:
        """Pass over a node that failed, longer each time."""
        failures = self._banned.get(node_id, (0.0, 0))[1] + 1
        self._banned[node_id] = time.monotonic() + min(_MOST_BAN, _FIRST_BAN * 2 ** (failures - 1)), failures

    def worked(self, route: Route) -> None:
        """Note that the nodes of a route did their work."""
        for stop in route:
            self._banned.pop(stop.node_id, None)
        for edge in edges_of(route):
            self._broken.pop(edge, None)

    def edge_failed(self, a: str, b: str) -> None:
        """Pass over the way from one node to another, both of which are there."""
        failures = self._broken.get((a, b), (0.0, 0))[1] + 1
        self._broken[a, b] = time.monotonic() + min(_MOST_EDGE_BAN, _FIRST_BAN * 2**failures), failures

    async def node_at(self, url: str) -> NodeRow | None:
        """Return the node that is reached at a URL."""
        rows = await asyncio.to_thread(self._registry.nodes)
        return next((r for r in rows if r.url == url), None)

    async def _find(self, head: str | None, avoid: Collection[str]) -> Route | None:
        rows = await asyncio.to_thread(self._registry.nodes)
        now = time.monotonic()
        servers = [s for row in rows if (s := self._server(row)) is not None]
        broken = {edge for edge, (until, _) in self._broken.items() if until > now}
        banned = {i for i, (until, _) in self._banned.items() if until > now}
        for passed_over in ({*banned, *avoid}, set(avoid)):
            # Where all are banned the fault may be ours, and none is left out.
            route = choose_route(servers, self._model, self._hop, head=head, avoid=passed_over, broken=broken)
            if route is not None:
                return route
        return None

    def _server(self, row: NodeRow) -> Server | None:
        if row.quarantine is not None or not row.held:
            return None
        document = dict(row.document) | ({"measured_tokens_per_sec": row.measured} if row.measured else {})
        c = capacity_of(node_of(document, self._model, self._known, "node"), self._model, self._policy)
        if not isinstance(c, Capacity):
            return None
        return Server(row.node_id, row.url, row.boot, row.held, c.step, self._load[row.node_id])

    async def _prove(self, route: Route) -> bool:
        key = tuple((s.node_id, s.boot, str(s.span)) for s in route)
        if key in self._proved:
            return True
        async with self._proving.setdefault(key, asyncio.Lock()):
            if key in self._proved:
                return True
            try:
                answer = await self.calls.probe(route, _PROBE_TOKENS, _PROBE_SECONDS)
            except RouteFailed as e:
                await self.blame([(s.node_id, s.url) for s in route], e.failed)
                return False
            except KnotctlError as e:
                log.warning("%s: probe: %s", route[0].node_id, e.message)
                await self.lost(route[0])
                return False
            finally:
                self._proving.pop(key, None)
            if answer != await asyncio.to_thread(self._registry.known_answer, answer):
                new = [s.node_id for s in route if (s.node_id, s.boot) not in self._trusted]
                for node_id in new or [s.node_id for s in route]:
                    self.failed(node_id)
                    self.wrong.append(node_id)
                return False
            self._proved.add(key)
            self._trusted |= {(s.node_id, s.boot) for s in route}
            return True


def hops_json(route: Route) -> list[dict[str, Any]]:
    """Return a route as heads are told it."""
    return [s.to_json() for s in route]
