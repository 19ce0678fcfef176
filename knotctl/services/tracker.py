"""The tracker: nodes register, beat and are told what to hold; clients are sent over routes of what they hold.

It never loads weights. Several trackers may share a database: each serves clients, one leads the nodes, and the others
pass on to it what nodes say. Source: man knot-service(5), TRACKER.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Scope

from knotctl.core.cluster.figures import figures_of
from knotctl.core.cluster.fleet import Beat, Fleet
from knotctl.core.cluster.forfeits import slash
from knotctl.core.cluster.layers import ModelLayers
from knotctl.core.cluster.registry import NodeRow, Registry
from knotctl.core.cluster.slashing import Evidence, SpeedSample
from knotctl.core.cluster.store import Database
from knotctl.core.cluster.sweeper import Sweeper
from knotctl.core.errors import KnotctlError, RequestError, UsageError, as_error
from knotctl.core.source.http_call import Peer, TransportError
from knotctl.core.spans import LayerSpan
from knotctl.core.strict_json import parse_json_object
from knotctl.services.access import Access
from knotctl.services.dashboard import dashboard_routes
from knotctl.services.dispatch import Dispatch, hops_json
from knotctl.services.edge import Edge, EdgeConfig
from knotctl.services.flights import Flights
from knotctl.services.gateway import Gateway, ServedModel
from knotctl.services.head_calls import HeadCalls
from knotctl.services.leadership import Leadership, TrackerSpec
from knotctl.services.replies import JsonReply
from knotctl.services.speed_probe import measure
from knotctl.services.tracker_metrics import CONTENT_TYPE, TrackerMetrics
from knotctl.services.tracker_status import TrackerStatus

log = logging.getLogger("knotctl.tracker")
T = TypeVar("T")

_PASS_SECONDS = 10.0
_SWEEP_SECONDS = 5.0
# Measurements may take so long: those that are due, and those that a stream waits for.
_MEASURE_SECONDS, _SLOW_SECONDS = 60.0, 5.0


class Tracker:
    """The tracker of one model. `bills` says that accounts are kept in the database."""

    def __init__(
        self, model: ModelLayers, served: ServedModel, database: Database, spec: TrackerSpec, access: Access, *,
        bills: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.served, self.spec = model, served, spec
        self._access, self._database, self._bills = access, database, bills
        self._registry = Registry(database, served.knot_id)
        self._lead = Leadership(model, served.knot_id, database, self._registry, spec)
        self._draining = False
        self.metrics = TrackerMetrics(self._stats)
        self.calls = HeadCalls(token=spec.token, tls=spec.tls)
        self.dispatch = Dispatch(model, spec.policy, self._registry, self.calls, self._gone)
        books = database if bills else None
        flights = Flights(served.name, self.metrics)
        self.gateway = Gateway(served, self.dispatch, access, flights, self.metrics, books)
        about = asdict(served) | {"n_layers": model.n_layers, "hidden_size": model.hidden_size}
        status = TrackerStatus(
            about, self._lead, self.dispatch, flights, self.metrics, books, lambda: self._draining
        )  # fmt: skip
        routes = [
            *self.gateway.routes,
            *dashboard_routes(status.document, access.viewer),
            Route("/nodes", self._register, methods=["POST"]),
            Route("/nodes/{node_id:path}/heartbeat", self._heartbeat, methods=["POST"]),
            Route("/nodes/{node_id:path}/confirm", self._confirm, methods=["POST"]),
            Route("/nodes/{node_id:path}", self._leave, methods=["DELETE"]),
            Route("/coverage", self._coverage, methods=["GET"]),
            Route("/routes", self._reroute, methods=["POST"]),
            Route("/livez", self._livez, methods=["GET"]),
            Route("/readyz", self._readyz, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
        ]
        self._router = Router(routes, redirect_slashes=False, lifespan=self._lifespan)

    def app(self, config: EdgeConfig) -> ASGIApp:
        """Return the ASGI application, behind its edge."""

        def observe(scope: Scope, status: int, seconds: float) -> None:
            self.metrics.request(scope["path"], status, seconds)

        return Edge(self._router, config, observe)

    def drain(self) -> None:
        """Be not ready from now on; what runs goes on."""
        self._draining = True

    @asynccontextmanager
    async def _lifespan(self, _: ASGIApp) -> AsyncIterator[None]:
        await self._lead.keep()
        chores = [
            asyncio.create_task(_every(self.spec.lease_s / 5, self._lead.keep)),
            asyncio.create_task(_every(min(1.0, self.spec.silent_s / 4), self._look)),
            asyncio.create_task(_every(self.spec.policy.monitor_s, self._monitor)),
        ]
        if self._bills:
            sweeper = Sweeper(self.gateway.ledger)  # type: ignore[arg-type]
            chores.append(asyncio.create_task(_every(_SWEEP_SECONDS, lambda: asyncio.to_thread(sweeper.sweep))))
        try:
            yield
        finally:
            for chore in chores:
                chore.cancel()
            await asyncio.gather(*chores, return_exceptions=True)
            await self.calls.close()
            await self._lead.close()

    async def _look(self) -> None:
        """See who has fallen silent, and who answered wrongly."""
        if self._lead.fleet is None:
            return
        wrong, self.dispatch.wrong = self.dispatch.wrong, []
        for node_id in wrong:
            log.warning("%s: answered otherwise than others: quarantined", node_id)
            await self._lead.with_fleet(lambda f, i=node_id: f.quarantine(i, "wrong-answer"))  # type: ignore[misc]
        for node_id in await self._lead.with_fleet(Fleet.expire):
            log.warning("%s: silent for too long: it has left", node_id)

    async def _monitor(self) -> None:
        """Look at everything, and measure every node."""
        if self._lead.fleet is None:
            return
        await self._lead.with_fleet(Fleet.tick)
        for row in await asyncio.to_thread(self._registry.nodes):
            name = row.document.get("benchmark_model")
            if row.held and row.quarantine is None and name in (None, self.model.name):
                with contextlib.suppress(KnotctlError):
                    sample = await self._measured(row, _MEASURE_SECONDS)
                    node_id = row.node_id
                    evidence = await self._lead.with_fleet(lambda f, i=node_id, s=sample: f.measured(i, s))  # type: ignore[misc]
                    if evidence is not None:
                        await self._convict(evidence)

    async def _convict(self, evidence: Evidence) -> None:
        claimed, delivered = evidence.claimed / 1000, evidence.delivered / 1000
        log.warning("%s: claims %.3g tokens/s, delivers %.3g", evidence.node_id, claimed, delivered)
        if self._bills:
            operation = f"{self.served.knot_id}/{evidence.node_id}/{self._lead.lease.fence}/{time.monotonic_ns()}"
            verdict = await asyncio.to_thread(slash, self._database, operation, evidence)
            log.warning("%s: forfeits %d micro-credits", evidence.node_id, verdict.forfeited)

    async def _register(self, request: Request) -> Response:
        """Take up a node: what it is, where it is, and the layers that it holds already."""
        await self._access.worker(request)
        if (passed := await self._lead.passed_on(request)) is not None:
            return passed
        document = await _object(request)
        node, url, boot = document.get("node"), document.get("url"), document.get("boot")
        if not isinstance(node, dict) or not isinstance(url, str) or not isinstance(boot, str):
            raise UsageError("usage", "register: expected node, url, boot and layers")
        Peer(url)  # raises where it is none
        held = self._spans(document.get("layers", []))
        node_id = await self._lead.with_fleet(lambda f: f.register(node, url, boot, held))
        log.info("%s: registered from %s", node_id, url)
        return JsonReply(
            {"node_id": node_id, "interval_s": self.spec.heartbeat_s, "fence": self._lead.lease.fence}, 201
        )

    async def _heartbeat(self, request: Request) -> Response:
        await self._access.worker(request)
        if (passed := await self._lead.passed_on(request)) is not None:
            return passed
        document = await _object(request)
        answers: dict[int, bool] = {}
        for entry in document.get("answers", []):
            match entry:
                case [int(epoch), bool(done)]:
                    answers[epoch] = done
                case _:
                    raise UsageError("usage", "heartbeat: answers: expected [epoch, done]")
        said = document.get("figures")
        figures = None if said is None else figures_of(said)
        beat = Beat(str(document.get("boot", "")), self._spans(document.get("layers", [])), answers, figures)
        node_id = request.path_params["node_id"]
        told, why = await self._lead.with_fleet(lambda f: (f.heartbeat(node_id, beat), f.why(node_id)))
        directives = [
            {
                "epoch": d.epoch, "kind": str(d.order.kind), "layers": [d.order.span.start, d.order.span.end],
                "quantization": d.order.quantization, "why": d.order.why,
            }
            for d in told
        ]  # fmt: skip
        return JsonReply({"directives": directives, "interval_s": self.spec.heartbeat_s, "why": why})

    async def _confirm(self, request: Request) -> Response:
        """Say whether a node may still carry out what it was told."""
        await self._access.worker(request)
        if (passed := await self._lead.passed_on(request)) is not None:
            return passed
        match await _object(request):
            case {"epoch": int(epoch)}:
                node_id = request.path_params["node_id"]
                allowed = await self._lead.with_fleet(lambda f: f.confirm(node_id, epoch))
                return JsonReply({"confirmed": allowed})
        raise UsageError("usage", "confirm: expected epoch")

    async def _leave(self, request: Request) -> Response:
        await self._access.worker(request)
        if (passed := await self._lead.passed_on(request)) is not None:
            return passed
        node_id = request.path_params["node_id"]
        known = await self._lead.with_fleet(lambda f: f.leave(node_id))
        if known:
            log.info("%s: left", node_id)
        return JsonReply({"left": known})

    async def _coverage(self, request: Request) -> Response:
        await self._access.reader(request)
        if (passed := await self._lead.passed_on(request)) is not None:
            return passed
        about = await self._lead.with_fleet(Fleet.to_json)
        return JsonReply(about | {"streams": self.dispatch.load, "fence": self._lead.lease.fence})

    async def _reroute(self, request: Request) -> Response:
        """Give a head another route in place of one that failed it."""
        await self._access.worker(request)
        document = await _object(request)
        match document:
            case {"route": [{"node_id": str(head)}, *_] as hops, "failed": {**failed}}:
                pass
            case _:
                raise UsageError("usage", "routes: expected route and failed")
        nodes = [(str(h.get("node_id")), str(h.get("url"))) for h in hops if isinstance(h, dict)]
        avoid = await self.dispatch.blame(nodes, {str(url): str(how) for url, how in failed.items()})
        if not failed:
            slow = await self._slowest({node_id for node_id, _ in nodes})
            if slow is None:
                return JsonReply({"route": hops})
            self.dispatch.failed(slow)
            avoid.add(slow)
        try:
            route = await self.dispatch.choose(head=head, avoid=avoid)
        except RequestError:
            if failed:
                raise
            return JsonReply({"route": hops})  # slow is better than none
        return JsonReply({"route": hops_json(route)})

    async def _slowest(self, node_ids: Collection[str]) -> str | None:
        """Return which of these nodes is far slower now than it was found to be, the worst; None where none is."""
        rows = [r for r in await asyncio.to_thread(self._registry.nodes) if r.node_id in node_ids and r.held]

        async def share(row: NodeRow) -> float:
            usual = row.measured or float(row.document["benchmark_tokens_per_sec"])
            try:
                sample = await self._measured(row, _SLOW_SECONDS)
            except KnotctlError:
                return 0.0
            return sample.rate / 1000 / usual

        shares = await asyncio.gather(*map(share, rows))
        worst = min(zip(shares, (r.node_id for r in rows), strict=True), default=(1.0, ""))
        return worst[1] if worst[0] < self.spec.policy.lie_ratio else None

    async def _measured(self, row: NodeRow, seconds: float) -> SpeedSample:
        peer, knot_id = self._lead.peer(row.url), self.served.knot_id
        return await asyncio.to_thread(measure, peer, self.model, knot_id, row.held[0], seconds)

    async def _gone(self, node_id: str, url: str) -> None:
        """Forget a node whose port refuses connections: its process has ended. One that hangs may come back."""
        try:
            await asyncio.to_thread(self._lead.peer(url).call, "GET", "/livez", seconds=1.0)
        except TransportError as e:
            if e.code != "unreachable":
                return
        else:
            return
        with contextlib.suppress(KnotctlError):
            if self._lead.fleet is not None:
                await self._lead.with_fleet(lambda f: f.leave(node_id))
            elif self._lead.lease.leader_url:
                leader = self._lead.peer(self._lead.lease.leader_url)
                await asyncio.to_thread(leader.call, "DELETE", f"/nodes/{node_id}", seconds=_PASS_SECONDS)

    def _spans(self, entries: object) -> tuple[LayerSpan, ...]:
        spans = []
        for entry in entries if isinstance(entries, list) else [None]:
            match entry:
                case [int(a), int(b)] if 0 <= a < b <= self.model.n_layers:
                    spans.append(LayerSpan(a, b))
                case _:
                    raise UsageError("usage", "layers: expected runs [A, B) of the model")
        return tuple(spans)

    def _stats(self) -> Mapping[str, float]:
        fleet = self._lead.fleet
        stats: dict[str, float] = {
            "knot_tracker_leading": float(fleet is not None),
            "knot_tracker_streams": max(self.dispatch.load.values(), default=0),
        }
        if fleet is not None:
            members = fleet.controller.members.values()
            stats |= {
                "knot_tracker_nodes": len(fleet.seen),
                "knot_tracker_quarantined": sum(s.row.quarantine is not None for s in list(fleet.seen.values())),
                "knot_tracker_flagged": sum(m.flagged for m in list(members)),
                "knot_tracker_gap_layers": fleet.controller.books.coverage.gap_layers,
                "knot_tracker_directive_timeouts": fleet.controller.timeouts,
            }
        return stats

    async def _livez(self, _: Request) -> Response:
        return JsonReply({"status": "ok"})

    async def _readyz(self, _: Request) -> Response:
        """Ready is a tracker that could send a request on its way."""
        if self._draining:
            return JsonReply({"status": "draining"}, 503)
        listed = await self.dispatch.listed()
        return JsonReply({"status": "ok" if listed else "uncovered"}, 200 if listed else 503)

    async def _health(self, _: Request) -> Response:
        document = {
            "status": "draining" if self._draining else "ok", "role": "tracker", "model": self.served.name,
            "knot_id": self.served.knot_id, "n_layers": self.model.n_layers, "leading": self._lead.fleet is not None,
            "leader": self._lead.lease.leader_url,
        }  # fmt: skip
        return JsonReply(document, 503 if self._draining else 200)

    async def _metrics(self, request: Request) -> Response:
        await self._access.reader(request)
        return Response(self.metrics.exposition(), headers={"content-type": CONTENT_TYPE})


async def _every(seconds: float, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Do the work again and again; what it fails with is logged, and does not end it."""
    while True:
        await asyncio.sleep(seconds)
        try:
            await work()
        except Exception as e:
            error = as_error(e)
            log.warning("%s: %s", error.code, error.message, exc_info=error.code == "internal")


async def _object(request: Request) -> dict[str, Any]:
    return parse_json_object(await request.body(), lambda code, what: UsageError(code, f"request: {what}"))
