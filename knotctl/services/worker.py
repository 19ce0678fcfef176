"""A worker: a station whose layers its tracker chooses, loaded and dropped while it serves.

Frames name the layers that they are for, any part of what is held. Source: man knot-service(5), WORKERS.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from knotctl.core.errors import Conflict
from knotctl.core.knot.reader import Knot
from knotctl.core.model.runs import Runs, Serving, wrong_layers
from knotctl.core.model.station import Station
from knotctl.core.source.cache_counts import CacheCounts
from knotctl.core.spans import LayerSpan
from knotctl.core.wire.frame import Frame, Segment
from knotctl.core.wire.layout import Kind
from knotctl.services.station import StationService

# A session that nothing was heard of for so long keeps no layers here: its head has died, or will replay it elsewhere.
_PIN_SECONDS = 10.0


class WorkerService(StationService):
    """Runs of layers behind HTTP. `load` and `drop` come from the agent's thread."""

    role = "worker"

    def __init__(
        self, knot: Knot, make: Callable[[LayerSpan], Station], *, routes: Sequence[BaseRoute] = (),
        token: str | None = None, tls: ssl.SSLContext | None = None, batch_tokens: int = 512,
        caches: Callable[[], Iterable[CacheCounts]] = tuple,
    ) -> None:  # fmt: skip
        self.runs = Runs(make)
        self._caches = caches
        self._leave: Callable[[], None] = lambda: None
        super().__init__(knot, _nothing, LayerSpan(0, 0), token=token, tls=tls, batch_tokens=batch_tokens, more=routes)

    def when_draining(self, leave: Callable[[], None]) -> None:
        """Have `leave` called when the service is to end: from a signal's handler, so it must not wait."""
        self._leave = leave

    def drain(self) -> None:
        """Take leave of the tracker, so that no stream is sent here any more; what runs goes on."""
        super().drain()
        self._leave()

    def load(self, span: LayerSpan) -> None:
        """Hold and prove these layers too. Raises: what keeps it from that; nothing is held then."""

        made = self.runs.made(span)

        def take() -> None:
            self.runs.add(made)
            try:
                self._probe_layers(span)
            except BaseException:
                self.runs.drop(span)
                raise

        self._compute.submit(take).result()

    def pins(self, span: LayerSpan) -> bool:
        """Return whether a session that somebody has a use for holds on to these layers."""
        heard, now = dict(self._used), time.monotonic()
        return any(
            self._turns.busy(session) or now - heard.get(session, 0.0) < _PIN_SECONDS
            for session in self.runs.pinned(span)
        )

    def drop(self, span: LayerSpan) -> bool:
        """Hold these layers no more, unless a session is pinned to them; return whether they are gone."""

        def let_go() -> bool:
            if self.pins(span):
                return False
            self.runs.drop(span)
            return True

        return self._compute.submit(let_go).result()

    def describe(self) -> dict[str, Any]:
        """Return the model, the runs held, and what there is room for."""
        stations = self.runs.stations
        ledgers = {id(s.weights): s.weights.ledger for s in stations}.values()  # runs that were one share theirs
        return {
            "knot_id": self.knot.id,
            "n_layers": self.knot.header.config.n_layers,
            "spans": [[s.start, s.end] for s in self.runs.spans],
            "kv_tokens": min((s.plan.kv_tokens for s in stations), default=0),
            "batch_tokens": self._batch_tokens,
            "sessions": len(self.runs.sessions()),
            "bytes": {
                "weights": sum(ledger.held for ledger in ledgers),
                "peak_weights": sum(ledger.peak for ledger in ledgers),
                "kv": sum(kv.nbytes for s in stations for kv in list(s.sessions.values())),
                "planned": sum(s.plan.total_bytes for s in stations),
            },
        }

    def figures(self) -> dict[str, Any]:
        """Return what a heartbeat tells the tracker, for people: bytes held, and the cache levels."""
        held = self.describe()["bytes"]
        return {
            "weight_bytes": held["weights"],
            "peak_weight_bytes": held["peak_weights"],
            "kv_bytes": held["kv"],
            "caches": [{"tier": level.tier, **level.to_json()} for level in self._caches()],
        }

    def stats(self) -> Mapping[str, float]:
        """Return the gauges."""
        about = self.describe()
        return {
            "knot_sessions": about["sessions"],
            "knot_frames_queued": self._jobs.running,
            "knot_weight_bytes": about["bytes"]["weights"],
            "knot_peak_weight_bytes": about["bytes"]["peak_weights"],
            "knot_kv_bytes": about["bytes"]["kv"],
        }

    def _serving(self, frame: Frame) -> Serving:
        return self.runs.serving(LayerSpan(*frame.meta["layers"]))

    def _here(self, frame: Frame) -> list[int] | None:
        layers = frame.meta.get("layers")
        here = [[s.start, s.end] for s in self.runs.spans]
        match layers:
            case [int(a), int(b)] if any(s <= a < b <= e for s, e in here):
                return [a, b]
        raise wrong_layers(layers, here)

    async def _boot(self, _: Request) -> Response:
        raise Conflict("tracker-decides", "worker: its layers are chosen by its tracker")

    def _probe(self) -> None:
        for span in self.runs.spans:
            self._probe_layers(span)

    def _probe_layers(self, span: LayerSpan) -> None:
        """Run one token through layers; what is not finite is refused on the way."""
        serving = self.runs.serving(span)
        request_id = bytes(16)
        x = np.zeros((1, serving.config.hidden_size), np.float32)
        x[0, 0] = 1.0
        frame = Frame(Kind.HIDDEN, bytes.fromhex(self.knot.id), (Segment(request_id, 0, 1),), x, {"logits": "none"})
        try:
            serving.forward(frame)
        finally:
            self.runs.forget(request_id)

    def _length(self, request_id: bytes) -> int:
        return self.runs.length(request_id)

    def _drop_here(self, session: bytes) -> bool:
        return self.runs.forget(session)


def _nothing(_: LayerSpan) -> Any:
    """A worker begins without layers."""
    return None
