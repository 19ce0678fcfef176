"""The stages of one route as the node at its head runs them: rows from the knot, then station after station.

A route is lost with any node of it; whoever gave it is asked for another, over which every stream is replayed.
"""

from __future__ import annotations

import json
import queue
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any

from knotctl.core.engine.choose import Ask, Chosen
from knotctl.core.engine.hop import RemoteError
from knotctl.core.engine.recovery import Pace, Replicas, RouteLost
from knotctl.core.engine.remote import ClusterSpec, RemoteStages
from knotctl.core.errors import KnotctlError, UsageError, printable
from knotctl.core.knot.reader import Knot
from knotctl.core.model.embed import Shard
from knotctl.core.source.http_call import Peer, TransportError
from knotctl.core.spans import LayerSpan
from knotctl.core.wire.frame import Frame
from knotctl.core.wire.merge import merge_partials

_ASK_SECONDS = 5.0
# Chunks on their way at once, of so many tokens at least: as remote.py.
_PASSES, _CHUNK_TOKENS = 8, 64


@dataclass(frozen=True, slots=True)
class Hop:
    """A node of a route and its layers."""

    node_id: str
    url: str
    span: LayerSpan

    @classmethod
    def parse(cls, entry: object) -> Hop:
        """Return the hop of a JSON entry. Raises: UsageError bad-route."""
        match entry:
            case {"node_id": str(node_id), "url": str(url), "layers": [int(a), int(b)]} if 0 <= a < b:
                return cls(node_id, url, LayerSpan(a, b))
        raise UsageError("bad-route", f"route: {printable(entry)}: expected node_id, url and layers")


def parse_route(entries: object, n_layers: int) -> tuple[Hop, ...]:
    """Return the hops of a route that passes every layer once. Raises: UsageError bad-route."""
    hops = tuple(Hop.parse(e) for e in entries) if isinstance(entries, list) else ()
    edges = [0, *(h.span.end for h in hops)]
    if not hops or [h.span.start for h in hops] != edges[:-1] or edges[-1] != n_layers:
        raise UsageError("bad-route", f"route: expected runs of layers that meet end to end from 0 to {n_layers}")
    return hops


# Another route in place of one: the URLs of the nodes that failed it, each with how; none where it was slow. May raise.
Reroute = Callable[[tuple[Hop, ...], Mapping[str, str]], tuple[Hop, ...]]


class RouteEnded(KnotctlError):
    """The route is lost and there is to be no other: its streams end. `failed` are the URLs that failed, and how."""

    http_status = 503

    def __init__(self, message: str, failed: Mapping[str, str]) -> None:
        super().__init__("route-ended", message, hint="take another route")
        self.failed = dict(failed)


class RouteStages(RemoteStages):
    """The stations of a route, which changes when a node of it is lost. One pass at a time."""

    def __init__(
        self, knot: Knot, shard: Shard, hops: tuple[Hop, ...], reroute: Reroute, *, token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:  # fmt: skip
        self._knot = knot
        self._spec = ClusterSpec((), (), token, tls)
        self._peers: dict[str, Peer] = {}
        self._mesh = _Rows(shard)  # type: ignore[assignment]
        self._reroute = reroute
        self._failed: dict[str, str] = {}
        self._pace = Pace()
        self._before: tuple[Hop, ...] = ()
        self.version = 0
        self._pool = ThreadPoolExecutor(2 * _PASSES, "knotctl-route")
        self._engine_id = secrets.token_hex(6)
        self._steps = count()
        self._retries = 0
        self.zeroed: list[tuple[bytes, int, int]] = []
        self._dropped: queue.SimpleQueue[tuple[str, bytes] | None] = queue.SimpleQueue()
        self._abouts: list[Any] = []
        self._closed = threading.Event()
        self._chores = [threading.Thread(target=self._drop_all, name="knotctl-drop", daemon=True)]
        try:
            self._use(hops)
        except BaseException:
            self._pool.shutdown()
            self._close_peers()
            raise
        self._chores[0].start()

    def run(self, tokens: Frame, asks: Sequence[Ask], check: Callable[[], None]) -> list[Chosen]:
        """Return the tokens asked for behind a frame of ids, over another route where the last one was lost.

        Raises: as that of RemoteStages; RouteEnded.
        """
        if self._failed:
            self._take_another()
        elif self._pace.is_slow:
            self._pace.is_slow = False
            before = self.version
            self._take_another()
            if self.version != before:
                raise RouteLost(RemoteError("slow", "the route had become slow", url=self.hops[0].url, status=503))
        return super().run(tokens, asks, check)

    def drop(self, request_id: bytes) -> None:
        """Have a session forgotten by every station, those of the route before too."""
        for url in {h.url for h in (*self.hops, *self._before)}:
            self._dropped.put((url, request_id))

    def stats(self) -> dict[str, int]:
        """Return what is counted here; bytes are the nodes' own."""
        held = dict.fromkeys(("peak_weight_bytes", "weight_bytes", "kv_bytes", "activation_bytes"), 0)
        return held | {"hop_retries": self._retries}

    def _use(self, hops: tuple[Hop, ...]) -> None:
        limits = [self._limits(h.url) for h in hops]
        self.hops = hops
        self.spans = [h.span for h in hops]
        self.kv_tokens = min(kv for kv, _ in limits)
        self._frame_tokens = min(batch for _, batch in limits)
        self.pass_tokens = _PASSES * len(hops) * _CHUNK_TOKENS
        self._stages = [Replicas([h.url], time.monotonic) for h in hops]
        self._pace.begin()

    def _limits(self, url: str) -> tuple[int, int]:
        """Return the tokens that a node has room for, and those of a frame."""
        try:
            reply = self._peer(url).call("GET", "/health", seconds=_ASK_SECONDS)
        except TransportError as e:
            raise RemoteError(e.code, e.message, url=url, down=True) from e
        try:
            document = json.loads(reply.body)
            if document["knot_id"] == self._knot.id:
                return int(document["kv_tokens"]), int(document["batch_tokens"])
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        raise RemoteError("bad-answer", f"{url}: /health: not a worker with layers of this model", url=url, status=503)

    def _take_another(self) -> None:
        """Ask for another route, and use it. Raises: RouteLost where there is none now; RouteEnded."""
        try:
            hops = self._reroute(self.hops, self._failed)
            if hops != self.hops:
                self._before = self.hops
                self._use(hops)
                self.version += 1
        except RouteEnded:
            raise
        except RemoteError as e:
            self._failed[e.url] = e.code
            raise RouteLost(e) from e
        except KnotctlError as e:
            raise RouteLost(e) from e
        self._failed = {}

    def _lost(self, error: RemoteError) -> KnotctlError:
        lost = super()._lost(error)
        # What a node says of a session is no fault of its.
        its_own = error.down or error.status in (502, 503, 504) or error.code in ("wrong-identity", "internal")
        if isinstance(lost, RouteLost) and its_own:
            self._failed[error.url] = error.code
        return lost


class _Rows:
    """The embedding of a head: rows of the knot, as the mesh of shards gives them."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def embed(self, tokens: Frame, check: Callable[[], None]) -> Frame:
        """Return the hidden states of a frame of ids."""
        return merge_partials([self._shard.embed(tokens)])

    def close(self) -> None:
        """Hold nothing."""
