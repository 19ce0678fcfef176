"""The streams that a tracker sends on now, as its dashboard and metrics see them: counts, routes and times, no text."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from knotctl.services.token_metrics import TokenMetrics

# Streams that are listed one by one.
MAX_STREAMS = 64
# A stream of which nothing came for so long: its head may be waiting for another route.
_STALLED_SECONDS = 3.0
# The nodes of a route in order, each with its number of layers.
_Nodes = Sequence[tuple[str, int]]


class Flight:
    """One stream: what it has come to so far, and over which nodes. On the event loop. Units: monotonic seconds."""

    def __init__(self, metrics: TokenMetrics, n_prompt: int) -> None:
        # not the request's id, which its client may have chosen
        self.id = secrets.token_hex(4)
        self.n_prompt, self.n_tokens = n_prompt, 0
        self.nodes: _Nodes = ()
        self.recoveries = 0
        self._metrics = metrics
        self._started = self._last = time.monotonic()
        self._first: float | None = None
        self._had_route = False

    def passes(self, nodes: _Nodes) -> None:
        """Note the nodes that it passes from now on; none while it waits for a route."""
        self.recoveries += self._had_route and bool(nodes) and nodes != self.nodes
        self._had_route = self._had_route or bool(nodes)
        self.nodes = nodes

    def generated(self, n_tokens: int) -> None:
        """Note tokens that have come, of several together each an equal part of the wait."""
        now = time.monotonic()
        each = (now - self._last) / max(1, n_tokens)
        for _ in range(n_tokens):
            self._metrics.step(each, first=self._first is None)
            self._first = self._first or now
        if n_tokens:
            self._last = now
        self.n_tokens += n_tokens

    def _state(self) -> str:
        if not self.nodes:
            return "waiting"
        if not self.n_tokens:
            return "prompt"
        return "generating" if time.monotonic() - self._last < _STALLED_SECONDS else "stalled"

    def to_json(self, model: str) -> dict[str, Any]:
        """Return its entry in the dashboard's document."""
        took = self._last - self._first if self._first is not None else 0.0
        return {
            "id": self.id,
            "state": self._state(),
            "model": model,
            "route": [node_id for node_id, _ in self.nodes],
            "prompt_tokens": self.n_prompt,
            "generated_tokens": self.n_tokens,
            "tokens_per_s": round((self.n_tokens - 1) / took, 3) if took else None,
            "seconds": round(time.monotonic() - self._started, 3),
        }


class Flights:
    """All streams of one tracker. On the event loop."""

    def __init__(self, model: str, metrics: TokenMetrics) -> None:
        self._model, self._metrics = model, metrics
        self._flying: dict[str, Flight] = {}
        self._recovered = 0

    def begin(self, n_prompt: int) -> Flight:
        """Return the record of a stream that begins."""
        flight = Flight(self._metrics, n_prompt)
        self._flying[flight.id] = flight
        return flight

    def end(self, flight: Flight) -> None:
        """List a stream no more."""
        del self._flying[flight.id]
        self._recovered += flight.recoveries

    def sections(self) -> dict[str, Any]:
        """Return the sections `requests`, `streams` and `routes` of the dashboard's document."""
        flights = list(self._flying.values())
        waiting = sum(not f.nodes for f in flights)
        routes = Counter(tuple(f.nodes) for f in flights if f.nodes)
        return {
            "requests": {
                "running": len(flights) - waiting,
                "waiting": waiting,
                "recoveries": self._recovered + sum(f.recoveries for f in flights),
            },
            "streams": [f.to_json(self._model) for f in flights[:MAX_STREAMS]],
            "routes": [{"stages": stages(nodes), "streams": count} for nodes, count in routes.most_common()],
        }


def stages(nodes: _Nodes) -> list[dict[str, Any]]:
    """Return the stages of a route: its nodes have all layers between them, in order."""
    found, at = [], 0
    for node_id, n_layers in nodes:
        found.append({"node_id": node_id, "start_layer": at, "end_layer": at + n_layers})
        at += n_layers
    return found
