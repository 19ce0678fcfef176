"""A layer station as a service: a frame in, through its layers, on to the next station, and the tail's answer back.

A step's frame is computed once however often it is asked for; the caller's leaving ends it within a phase, here and on
every station behind. Source: man knot-service(5), NODES.
"""

from __future__ import annotations

import asyncio
import secrets
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from knotctl.core.engine.choose import Ask, choose_all, parse_asks, sampled_frame, wanted_rows
from knotctl.core.engine.hop import PATIENCE_HEADER, RemoteError, send_frame
from knotctl.core.errors import BudgetError, Conflict, UsageError, WrongIdentity, printable
from knotctl.core.kernels.threads import rest
from knotctl.core.knot.reader import Knot
from knotctl.core.model.runs import Serving, wrong_layers
from knotctl.core.model.station import Station
from knotctl.core.source.http_call import Peer, TransportError
from knotctl.core.spans import LayerSpan
from knotctl.core.strict_json import parse_json_object
from knotctl.core.wire.frame import Frame, Segment, encode_frame
from knotctl.core.wire.layout import WIRE_LIMITS, Kind
from knotctl.services.node import FrameEndpoint, FrameReply, Node, until_left
from knotctl.services.replies import JsonReply
from knotctl.services.station_jobs import MAX_JOBS, Job, Jobs, Turns

# The longest that a caller may let a step take.
MAX_SECONDS = 600.0
# A session that nothing was heard of for so long belongs to nobody any more; one that comes back is replayed.
SESSION_SECONDS = 900.0
# Where room is short, after so long already.
_SHORT_SESSION_SECONDS = 30.0
_MAX_ROUTE = 64
# Sessions remembered as dropped; an id is never given to another session.
_ENDED_SESSIONS = 4096
# Each is the size of the vocabulary, and a frame holds them all.
MAX_LOGITS = 64
_DROP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Next:
    """The station that a frame goes on to, and the layers that it must have."""

    url: str
    layers: list[int]


class StationService(Node):
    """Layers [A, B) behind HTTP. `make` opens a station of a span; `boot` lets the one there go first."""

    role = "station"

    def __init__(
        self, knot: Knot, make: Callable[[LayerSpan], Station], span: LayerSpan, *,
        token: str | None = None, tls: ssl.SSLContext | None = None, batch_tokens: int = 512,
        more: Sequence[BaseRoute] = (),
    ) -> None:  # fmt: skip
        self.knot = knot
        self.station: Station | None = make(span)
        self._make = make
        self._token = token
        self._tls = tls
        self._batch_tokens = batch_tokens
        self._used: dict[bytes, float] = {}
        self._next: dict[bytes, str] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        self._peers: dict[str, Peer] = {}
        self._peers_lock = threading.Lock()
        self._compute = ThreadPoolExecutor(1, "knotctl-station")
        self._hops = ThreadPoolExecutor(MAX_JOBS, "knotctl-hop")
        self._jobs = Jobs(lambda: self.metrics.duplicate())
        self._turns = Turns(self._length)
        super().__init__(
            [
                Route("/forward", FrameEndpoint(self._forward), methods=["POST"]),
                Route("/sessions/{session}", self._drop, methods=["DELETE"]),
                Route("/boot", self._boot, methods=["POST"]),
                *more,
            ]
        )

    def probe(self) -> None:
        """Run one token through the layers, from the thread that has them."""
        self._compute.submit(self._probe).result()

    def describe(self) -> dict[str, Any]:
        """Return the model, the span and its role, the bytes held and what it has room for."""
        station = self.station
        about: dict[str, Any] = {"knot_id": self.knot.id, "n_layers": self.knot.header.config.n_layers}
        if station is None:
            return about | {"spans": [], "bytes": {}}
        return about | {
            "role": station.role,
            "spans": [[station.span.start, station.span.end]],
            "residency": station.plan.residency,
            "kv_tokens": station.plan.kv_tokens,
            "batch_tokens": self._batch_tokens,
            "sessions": len(station.sessions),
            "bytes": {
                "weights": station.weights.ledger.held, "peak_weights": station.weights.ledger.peak,
                "kv": _kv_bytes(station), "activations": station.plan.activation_bytes + station.plan.frame_bytes,
                "budget": station.plan.budget_bytes,
            },
        }  # fmt: skip

    def stats(self) -> Mapping[str, float]:
        """Return the gauges."""
        station = self.station
        queued = self._jobs.running
        if station is None:
            return {"knot_sessions": 0, "knot_frames_queued": queued}
        return {
            "knot_sessions": len(station.sessions),
            "knot_frames_queued": queued,
            "knot_weight_bytes": station.weights.ledger.held,
            "knot_peak_weight_bytes": station.weights.ledger.peak,
            "knot_kv_bytes": _kv_bytes(station),
        }

    def close(self) -> None:
        """End the threads and close the connections to other stations."""
        self._compute.shutdown()
        self._hops.shutdown()
        for peer in self._peers.values():
            peer.close()

    async def _forward(self, frame: Frame, body: bytes, request: Request) -> Response:
        self.check_ready()
        route = self._check(frame)
        patience = request.headers.get(PATIENCE_HEADER, "")
        seconds = min(MAX_SECONDS, int(patience) / 1000) if patience.isdecimal() else MAX_SECONDS
        request_id = request.state.request_id
        return await self._jobs.answer(
            frame.meta.get("step"), frame, body, seconds,
            lambda job: self._work(job, route, request_id), lambda: until_left(request),
        )  # fmt: skip

    async def _work(self, job: Job, route: list[Next], request_id: str) -> Response:
        loop = asyncio.get_running_loop()
        segments = job.frame.segments
        await self._turns.enter(segments, job.frame.meta.get("hold_ms"))
        try:
            self._expire(SESSION_SECONDS)
            now = time.monotonic()
            for s in segments:
                self._used[s.request_id] = now
                if route:
                    self._next[s.request_id] = route[0].url
            try:
                out = await loop.run_in_executor(self._compute, self._run, job)
            except BudgetError as e:
                # sessions whose owner died without a word give way to those that live
                if e.code != "kv-full" or not self._expire(_SHORT_SESSION_SECONDS):
                    raise
                out = await loop.run_in_executor(self._compute, self._run, job)
        finally:
            self._turns.leave(segments)
        if isinstance(out, bytes):
            return FrameReply(out)
        if out is None:
            return Response(status_code=204)
        return await loop.run_in_executor(self._hops, self._hop, job, out, route, request_id)

    def _run(self, job: Job) -> Frame | bytes | None:
        """Return the hidden states for the next station, or the bytes of the answer; None where none is wanted."""
        job.check()
        frame = job.frame
        station = self._serving(frame)
        asks: list[Ask] | None = None
        last = station.span.end == station.config.n_layers
        if last and (asks := parse_asks(frame)) is not None:
            frame = replace(frame, meta=dict(frame.meta) | {"logits": wanted_rows(asks)})
        started = time.perf_counter()
        out = station.forward(frame, job.check)
        if self._jobs.running == 1:
            rest()
        self.metrics.computed(frame.rows, time.perf_counter() - started)
        if not last and frame.meta.get("route"):
            return out
        if asks is not None:
            return encode_frame(sampled_frame(frame, choose_all(out.payload, asks), asks)) if asks else None
        return encode_frame(replace(out, meta=_public(out.meta)), limits=WIRE_LIMITS)

    def _hop(self, job: Job, out: Frame, route: list[Next], request_id: str) -> Response:
        """Send hidden states to the next station and return what comes back from the tail."""
        job.check()
        step = route[0]
        meta = {k: v for k, v in out.meta.items() if k not in ("route", "layers")} | {"layers": step.layers}
        if route[1:]:
            meta["route"] = [{"url": n.url, "layers": n.layers} for n in route[1:]]
        body = encode_frame(replace(out, meta=meta), limits=WIRE_LIMITS)
        try:
            answer = send_frame(
                self._peer(step.url), "/forward", body, seconds=job.seconds_left, check=job.check,
                request_id=request_id, on_retry=self.metrics.hop_retried,
            )  # fmt: skip
        except RemoteError:
            self.metrics.hop_failed()
            raise
        return Response(status_code=204) if answer.frame is None else FrameReply(answer.body)

    def _serving(self, frame: Frame) -> Serving:
        """Return what computes the layers that a frame is for, which `_here` found to be here."""
        if self.station is None:
            raise WrongIdentity("wrong-identity", "station: no layers are loaded", hint="POST /boot")
        return self.station

    def _here(self, frame: Frame) -> list[int] | None:
        """Return the layers that a frame is for, which must be those here; None where there are none."""
        station = self.station
        here = None if station is None else [station.span.start, station.span.end]
        layers = frame.meta.get("layers", here)
        if layers != here:
            raise wrong_layers(layers, here)
        return here

    def _check(self, frame: Frame) -> list[Next]:
        """Return the rest of the route, after checking that the frame is meant for these layers."""
        here = self._here(frame)
        ended = next((s.request_id for s in frame.segments if s.request_id in self._ended), None)
        if ended is not None:
            raise Conflict("session-ended", f"session {ended.hex()}: was dropped")
        if frame.rows > self._batch_tokens:
            raise UsageError("batch-too-long", f"frame: {frame.rows} tokens; expected at most {self._batch_tokens}")
        if _logits_rows(frame) > MAX_LOGITS:
            raise UsageError("batch-too-long", f"frame: logits of at most {MAX_LOGITS} tokens can be had at once")
        entries = frame.meta.get("route", [])
        if not isinstance(entries, list) or len(entries) > _MAX_ROUTE:
            raise UsageError("bad-route", f"frame: route: expected a list of at most {_MAX_ROUTE} stations")
        route, end = [], 0 if here is None else here[1]
        for entry in entries:
            match entry:
                case {"url": str(url), "layers": [int(a), int(b)]} if a == end < b:
                    route.append(Next(url, [a, b]))
                    end = b
                case _:
                    raise UsageError("bad-route", f"frame: route: {printable(entry)} does not go on at layer {end}")
        return route

    async def _drop(self, request: Request) -> Response:
        """Forget a session here and on the stations that its frames went on to."""
        try:
            session = bytes.fromhex(request.path_params["session"])
        except ValueError:
            session = b""
        if len(session) != 16:
            raise UsageError("usage", "session: expected 32 hexadecimal digits")
        loop = asyncio.get_running_loop()
        following, behind = self._next.get(session), False
        # a frame of it that still comes in, late or again, must not bring it back
        self._ended[session] = None
        while len(self._ended) > _ENDED_SESSIONS:
            self._ended.popitem(last=False)
        # behind what the station is working on, which may be a frame of it that its caller has given up
        self._used.pop(session, None)
        self._next.pop(session, None)
        here = await loop.run_in_executor(self._compute, self._drop_here, session)
        if following is not None:
            behind = await loop.run_in_executor(self._hops, self._drop_at, following, session)
        return JsonReply({"dropped": here, "behind": behind})

    def _drop_at(self, url: str, session: bytes) -> bool:
        try:
            return self._peer(url).call("DELETE", f"/sessions/{session.hex()}", seconds=_DROP_SECONDS).status == 200
        except TransportError:
            return False  # whoever is gone has forgotten it too

    async def _boot(self, request: Request) -> Response:
        """Load another span in place of the one there; sessions end, and callers of the old span hear 409."""
        document = parse_json_object(await request.body(), lambda code, what: UsageError(code, f"request: {what}"))
        match document:
            case {"layers": [int(a), int(b)]} if 0 <= a < b <= self.knot.header.config.n_layers:
                span = LayerSpan(a, b)
            case _:
                raise UsageError("usage", 'request: expected {"layers": [A, B]} within the model')
        self.ready = False
        await asyncio.get_running_loop().run_in_executor(self._compute, self._load, span)
        await self.run_probe()
        self.check_ready()
        return JsonReply(self.describe())

    def _load(self, span: LayerSpan) -> None:
        before = self.station
        self.station = None  # its weights go before the new ones come
        self._used.clear()
        self._next.clear()
        self.boot_id = secrets.token_hex(8)
        try:
            self.station = self._make(span)
        except Exception:
            if before is not None:
                self.station = self._make(before.span)
                self.ready = True
            raise

    def _probe(self) -> None:
        station = self.station
        if station is None:
            raise UsageError("usage", "station: no layers are loaded")
        request_id = secrets.token_bytes(16)
        x = np.zeros((1, station.config.hidden_size), np.float32)
        x[0, 0] = 1.0
        meta: dict[str, Any] = {} if station.has_head else {"logits": "none"}
        try:
            station.forward(Frame(Kind.HIDDEN, bytes.fromhex(self.knot.id), (Segment(request_id, 0, 1),), x, meta))
        finally:
            station.drop(request_id)

    def _length(self, request_id: bytes) -> int:
        kv = None if self.station is None else self.station.sessions.get(request_id)
        return 0 if kv is None else kv.length

    def _drop_here(self, session: bytes) -> bool:
        return self.station is not None and self.station.drop(session)

    def _expire(self, seconds: float) -> bool:
        """Forget sessions that nothing was heard of for so long; returns whether there were any."""
        oldest = time.monotonic() - seconds
        gone = [s for s, used in self._used.items() if used < oldest and not self._turns.busy(s)]
        for session in gone:
            del self._used[session]
            self._next.pop(session, None)
            self._drop_here(session)
        return bool(gone)

    def _peer(self, url: str) -> Peer:
        with self._peers_lock:
            if url not in self._peers:
                self._peers[url] = Peer(url, token=self._token, tls=self._tls)
            return self._peers[url]


def _logits_rows(frame: Frame) -> int:
    """Return how many tokens' logits a frame asks for; what makes no sense the station refuses."""
    asked = frame.meta.get("logits", "last")
    if isinstance(asked, list):
        return sum(i[1] for i in asked if isinstance(i, list) and len(i) == 2 and type(i[1]) is int)
    return {"all": frame.rows, "none": 0}.get(str(asked), len(frame.segments))


def _kv_bytes(station: Station) -> int:
    return sum(kv.nbytes for kv in list(station.sessions.values()))


def _public(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata less what was for the stations."""
    inner = ("route", "layers", "logits", "sample", "step", "hold_ms")
    return {k: v for k, v in meta.items() if k not in inner}
