"""A model's stages on other processes or machines, with the signature of those in this one.

A pass goes to the shards, then to the first station, which sends it on along the route in its frame; the tail's answer
comes back the same way. A long prompt goes in chunks, several on their way at once, so that a station works on one
chunk while the next station works on the one before.
"""

from __future__ import annotations

import queue
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, count, pairwise
from typing import Any

import numpy as np

from knotctl.core.engine.choose import Ask, Chosen, parse_sampled
from knotctl.core.engine.hop import Answer, RemoteError, send_frame
from knotctl.core.engine.mesh import Mesh
from knotctl.core.engine.nodes import NodeAbout, discover
from knotctl.core.engine.recovery import Pace, Replicas, RouteLost
from knotctl.core.errors import Cancelled, FrameError, KnotctlError
from knotctl.core.knot.reader import Knot
from knotctl.core.source.http_call import Peer, TransportError
from knotctl.core.spans import LayerSpan
from knotctl.core.wire.frame import Frame, Segment, encode_frame
from knotctl.core.wire.layout import WIRE_LIMITS, Kind

# The longest that a pass may take; a node that hangs is found long before, because it answers no probe.
PASS_SECONDS = 300.0
# A pass that has no answer yet: after how long, and how often, the route's nodes are asked whether they live.
_PROBE_AFTER, _PROBE_EVERY, _PROBE_SECONDS, _PROBE_MISSES = 1.0, 1.0, 1.0, 2
# Chunks on their way for each station: the more, the smaller the part of the time in which a station has none.
_CHUNKS_PER_STATION = 4
# Shorter chunks would read the weights more often than the overlap saves.
_LEAST_CHUNK = 64
_HOLD_MS = 10_000
_POLL_SECONDS = 5.0
# What to do about a refusal: these may be otherwise elsewhere or later, all others are the request's own fault.
_LOST = frozenset(
    (
        "position-gap",
        "session-ended",
        "wrong-identity",
        "not-ready",
        "overloaded",
        "kv-full",
        "shutting-down",
        "internal",
    )
)


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Where a model's shards and stations are: of each, in order, the URLs of its replicas.

    `head_on_shards` has the logits made by the shards, each of its own ids, in place of the last station, which then
    needs no memory for the head. `direct` lets rows be read from the knot where a shard fails, `degrade` lets them be
    zeros where that fails too. Without `pipelined` a frame waits for the answer to the one before: to measure by.
    """

    shards: Sequence[Sequence[str]]
    stations: Sequence[Sequence[str]]
    token: str | None = None
    tls: ssl.SSLContext | None = None
    degrade: bool = False
    direct: bool = True
    head_on_shards: bool = False
    pipelined: bool = True
    wait_seconds: float = 120.0


class RemoteStages:
    """Shards and stations elsewhere. One pass at a time, from the engine's thread."""

    def __init__(self, knot: Knot, spec: ClusterSpec) -> None:
        self._knot = knot
        self._spec = spec
        self._peers: dict[str, Peer] = {}
        try:
            shards, stations = discover(knot, spec.shards, spec.stations, self._peer, spec.wait_seconds)
        except BaseException:
            self._close_peers()
            raise
        self.spans: list[LayerSpan] = [abouts[0].span for abouts in stations]
        self.kv_tokens = min(a.kv_tokens for abouts in stations for a in abouts)
        self._frame_tokens = min(a.batch_tokens for abouts in stations for a in abouts)
        self.pass_tokens = 2 * _CHUNKS_PER_STATION * len(stations) * _LEAST_CHUNK
        self._stages = [Replicas([a.url for a in abouts], time.monotonic) for abouts in stations]
        self._mesh = Mesh(
            knot,
            [(abouts[0].vocab, Replicas([a.url for a in abouts], time.monotonic)) for abouts in shards],
            self._peer,
            degrade=spec.degrade,
            direct=spec.direct,
        )
        self._pool = ThreadPoolExecutor(2 * _CHUNKS_PER_STATION * len(stations), "knotctl-route")
        self._pace = Pace()
        self._engine_id = secrets.token_hex(6)
        self._steps = count()
        self._retries = 0
        self.zeroed: list[tuple[bytes, int, int]] = []
        self._dropped: queue.SimpleQueue[tuple[str, bytes] | None] = queue.SimpleQueue()
        self._abouts = [{a.url: a for a in abouts} for abouts in stations]
        self._closed = threading.Event()
        self._chores = [
            threading.Thread(target=self._drop_all, name="knotctl-drop", daemon=True),
            threading.Thread(target=self._poll, name="knotctl-poll", daemon=True),
        ]
        for chore in self._chores:
            chore.start()

    def run(self, tokens: Frame, asks: Sequence[Ask], check: Callable[[], None]) -> list[Chosen]:
        """Return the tokens asked for behind a frame of ids.

        Raises: RouteLost where a replay may help; what a node said where it will not; Cancelled.
        """
        if self._pace.is_slow:
            self._leave_slow_route()
        route = [stage.order()[0] for stage in self._stages]
        self.zeroed = []
        try:
            chosen = self._chosen(self._pass(tokens, asks, route, check), tokens, asks, route[-1], check)
        except RemoteError as e:
            raise self._lost(e) from e
        for stage, url in zip(self._stages, route, strict=True):
            stage.restore(url)
        return chosen

    def _leave_slow_route(self) -> None:
        """Pass over the nodes in use that have a replica: which one is slow is not known, and all replay anyway."""
        slow = [(stage, stage.order()[0]) for stage in self._stages if len(stage.usable()) > 1]
        self._pace.begin()
        if slow:
            for stage, url in slow:
                stage.ban(url)
            raise RouteLost(RemoteError("slow", "the route had become slow", url=slow[0][1], status=503))

    def _chosen(
        self, answer: Frame | None, tokens: Frame, asks: Sequence[Ask], tail: str, check: Callable[[], None]
    ) -> list[Chosen]:
        """Return the tokens asked for out of the tail's answer. Raises: RemoteError bad-answer."""
        if not asks:
            return []
        if self._spec.head_on_shards:
            return self._mesh.choose(self._hidden_of(answer, tokens, asks, tail), asks, check)
        if answer is None or answer.kind is not Kind.SAMPLED or answer.knot_id != tokens.knot_id:
            raise RemoteError("bad-answer", f"{tail}: not the tokens that were asked for", url=tail)
        try:
            return parse_sampled(answer, asks, tokens.segments)
        except FrameError as e:
            raise RemoteError(e.code, f"{tail}: {e.message}", url=tail) from e

    def drop(self, request_id: bytes) -> None:
        """Have a session forgotten by every station, soon: nobody waits for it."""
        for stage in self._stages:
            for url in stage.urls:
                self._dropped.put((url, request_id))

    def stats(self) -> dict[str, int]:
        """Return the bytes that the stations said they held, at most some seconds ago, and counts of what failed."""
        return _held(self._abouts) | {
            "shard_failures": sum(self._mesh.failures),
            "direct_reads": self._mesh.direct_reads,
            "degraded_rows": self._mesh.degraded_rows,
            "hop_retries": self._retries,
        }

    def nodes(self) -> list[list[tuple[str, NodeAbout | None]]]:
        """Return each station's replicas with what they last said, None where they did not answer."""
        return [[(url, said.get(url)) for url in s.urls] for s, said in zip(self._stages, self._abouts, strict=True)]

    def close(self) -> None:
        """Drop what is still to be dropped, end the threads and close the connections."""
        self._closed.set()
        self._dropped.put(None)
        for chore in self._chores:
            chore.join()
        self._pool.shutdown()
        self._mesh.close()
        self._close_peers()

    def _close_peers(self) -> None:
        for peer in list(self._peers.values()):
            peer.close()

    def _pass(self, tokens: Frame, asks: Sequence[Ask], route: list[str], check: Callable[[], None]) -> Frame | None:
        """Send a pass, whole or in chunks, and return the answer to the last one."""
        chunks = self._chunks(tokens, asks)
        if len(chunks) == 1 or not self._spec.pipelined:
            for chunk in chunks[:-1]:
                self._send(self._embed(chunk, check), (), route, check, hold=False)
            hidden = self._embed(chunks[-1], check)
            started = time.monotonic()
            answer = self._send(hidden, asks, route, check, hold=False)
            if tokens.rows <= len(tokens.segments):
                self._pace.note(time.monotonic() - started)
            return answer.frame
        abandoned = threading.Event()

        def check_all() -> None:
            check()
            if abandoned.is_set():
                raise Cancelled("cancelled", "another chunk failed")

        answers: list[Future[Answer]] = []
        try:
            for i, chunk in enumerate(chunks):
                hidden = self._embed(chunk, check)
                wanted = asks if i == len(chunks) - 1 else ()
                sent = threading.Event()
                answers.append(self._pool.submit(self._send, hidden, wanted, route, check_all, hold=True, sent=sent))
                # the next chunk goes once this one is on the wire, so that the station seldom has to hold one back
                while not sent.wait(0.05) and not answers[-1].done():
                    check()
                if any(a.done() and a.exception() for a in answers):
                    break
            wait(answers, return_when=FIRST_EXCEPTION)
        finally:
            abandoned.set()
            wait(answers)
        errors = [e for a in answers if (e := a.exception()) is not None]
        for error in sorted(errors, key=lambda e: isinstance(e, Cancelled)):
            raise error
        return answers[-1].result().frame

    def _embed(self, tokens: Frame, check: Callable[[], None]) -> Frame:
        hidden = self._mesh.embed(tokens, check)
        self.zeroed += [(bytes.fromhex(r), a, b) for r, a, b in hidden.meta.get("zeroed", [])]
        return hidden

    def _chunks(self, tokens: Frame, asks: Sequence[Ask]) -> list[Frame]:
        """Return the pass as it goes over the wire: a lone prompt in chunks, anything else whole."""
        size = self._frame_tokens
        if len(self._stages) > 1 and self._spec.pipelined:
            size = min(size, max(_LEAST_CHUNK, -(-tokens.rows // (_CHUNKS_PER_STATION * len(self._stages)))))
        if len(tokens.segments) != 1 or tokens.rows <= size:
            return [tokens]
        (segment,) = tokens.segments
        # the rows whose logits are wanted stay together
        last = tokens.rows - (asks[0].rows if asks else 1)
        cuts = [0, *range(size, last + 1, size), tokens.rows]
        return [
            replace(
                tokens,
                segments=(replace(segment, position=segment.position + a, n_tokens=b - a),),
                payload=tokens.payload[a:b],
            )
            for a, b in pairwise(cuts)
        ]

    def _send(
        self,
        hidden: Frame,
        asks: Sequence[Ask],
        route: list[str],
        check: Callable[[], None],
        *,
        hold: bool,
        sent: threading.Event | None = None,
    ) -> Answer:
        step = f"{self._engine_id}-{next(self._steps)}"
        spans = [[s.start, s.end] for s in self.spans]
        meta: dict[str, Any] = dict(hidden.meta) | {
            "step": step,
            "layers": spans[0],
            "route": [{"url": u, "layers": s} for u, s in zip(route[1:], spans[1:], strict=True)],
            "sample": [ask.to_json() for ask in asks],
        }
        if asks and self._spec.head_on_shards:
            del meta["sample"]
            meta["logits"] = "none"
        if hold:
            meta["hold_ms"] = _HOLD_MS
        body = encode_frame(replace(hidden, meta=meta), limits=WIRE_LIMITS)
        return send_frame(
            self._peer(route[0]),
            "/forward",
            body,
            seconds=PASS_SECONDS,
            check=_Watch(check, [self._peer(url) for url in route]),
            request_id=step,
            on_sent=sent.set if sent is not None else lambda: None,
            on_retry=self._retried,
        )

    def _hidden_of(self, answer: Frame | None, tokens: Frame, asks: Sequence[Ask], url: str) -> Frame:
        """Return the hidden states of the tokens whose logits are wanted, out of the last station's answer."""
        width = self._knot.header.config.hidden_size
        # where a prompt went in chunks, the answer is to the last one, which holds all that is wanted
        first = tokens.rows - (0 if answer is None else answer.rows)
        if answer is None or answer.kind is not Kind.HIDDEN or answer.width != width or first < 0:
            raise RemoteError("bad-answer", f"{url}: not the hidden states that were asked for", url=url)
        ends = list(accumulate(s.n_tokens for s in tokens.segments))
        rows = np.concatenate([np.arange(ends[a.segment] - a.rows, ends[a.segment]) for a in asks]) - first
        segments = tuple(Segment(tokens.segments[a.segment].request_id, a.position, a.rows) for a in asks)
        return Frame(Kind.HIDDEN, tokens.knot_id, segments, answer.payload[rows])

    def _lost(self, error: RemoteError) -> KnotctlError:
        """Return what the engine is to hear of a failure, after passing over the node that failed."""
        for stage in self._stages:
            if error.url in stage.urls:
                stage.ban(error.url)
        died = error.down and error.sent and error.code in ("closed-early", "closed-midway")
        if error.down or error.code in _LOST or error.status in (502, 503, 504):
            return RouteLost(error, crash=died and not self._answers(error.url))
        if error.code in ("bad-activation", "bad-answer") and any(len(s.urls) > 1 for s in self._stages):
            return RouteLost(error)
        return error

    def _answers(self, url: str) -> bool:
        """Return whether a node that broke a connection is there: then it was the connection that failed."""
        try:
            return self._peer(url).call("GET", "/livez", seconds=_PROBE_SECONDS).status == 200
        except TransportError:
            return False

    def _retried(self) -> None:
        self._retries += 1

    def _peer(self, url: str) -> Peer:
        peer = self._peers.get(url)
        if peer is None:
            peer = self._peers[url] = Peer(url, token=self._spec.token, tls=self._spec.tls)
        return peer

    def _drop_all(self) -> None:
        while (item := self._dropped.get()) is not None:
            url, request_id = item
            # a node that is gone has forgotten it, one that hangs lets it expire
            with suppress(TransportError):
                self._peer(url).call("DELETE", f"/sessions/{request_id.hex()}", seconds=2.0)

    def _poll(self) -> None:
        urls = [stage.urls for stage in self._stages]
        while not self._closed.wait(_POLL_SECONDS):
            abouts = []
            for replicas in urls:
                found = {}
                for url in replicas:
                    try:
                        found[url] = NodeAbout.ask(self._peer(url), _PROBE_SECONDS)
                    except KnotctlError:
                        continue
                abouts.append(found)
            self._abouts = abouts


class _Watch:
    """Asks the nodes of a route whether they live while a pass has no answer; raises for one that does not answer."""

    def __init__(self, check: Callable[[], None], nodes: Sequence[Peer]) -> None:
        self._check = check
        self._nodes = nodes
        self._next = time.monotonic() + _PROBE_AFTER
        self._misses: dict[str, int] = {}

    def __call__(self) -> None:
        self._check()
        if time.monotonic() < self._next:
            return
        for node in self._nodes:
            try:
                node.call("GET", "/livez", seconds=_PROBE_SECONDS, check=self._check)
                self._misses[node.url] = 0
            except TransportError as e:
                self._misses[node.url] = self._misses.get(node.url, 0) + 1
                if self._misses[node.url] >= _PROBE_MISSES or e.code == "unreachable":
                    raise RemoteError(
                        "hung" if e.code == "timeout" else e.code, f"{node.url}: answers no probe", url=node.url,
                        down=True, sent=True,
                    ) from e  # fmt: skip
        self._next = time.monotonic() + _PROBE_EVERY


def _held(stations: Sequence[Mapping[str, NodeAbout]]) -> dict[str, int]:
    abouts = [a for stage in stations for a in stage.values()]
    return {
        "peak_weight_bytes": sum(a.held.get("peak_weights", 0) for a in abouts),
        "weight_bytes": sum(a.held.get("weights", 0) for a in abouts),
        "kv_bytes": sum(a.held.get("kv", 0) for a in abouts),
        "activation_bytes": max((a.held.get("activations", 0) for a in abouts), default=0),
    }
