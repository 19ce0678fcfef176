"""What `/metrics` of a tracker tells Prometheus. Source: man knot-service(5), TRACKER; Prometheus' naming rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from knotctl import __version__
from knotctl.services.token_metrics import CONTENT_TYPE, SECONDS, TokenMetrics

__all__ = ["CONTENT_TYPE", "GAUGES", "TrackerMetrics"]
GAUGES: Mapping[str, str] = {
    "knot_tracker_leading": "1 on the tracker that leads.",
    "knot_tracker_nodes": "Nodes that are registered.",
    "knot_tracker_quarantined": "Nodes that answered wrongly, and get no streams.",
    "knot_tracker_flagged": "Nodes that deliver far less than they claim.",
    "knot_tracker_gap_layers": "Layers that no node serves.",
    "knot_tracker_directive_timeouts": "Directives that were not answered in time.",
    "knot_tracker_streams": "Streams in flight.",
}


class TrackerMetrics(TokenMetrics):
    """The metrics of one tracker; `stats` is asked for the gauges at each scrape."""

    def __init__(self, stats: Callable[[], Mapping[str, float]]) -> None:
        super().__init__()
        self._requests = Counter("knot_requests", "Requests answered.", ("route", "code"), registry=self.registry)
        self._duration = Histogram(
            "knot_request_duration_seconds", "From a request's head to the end of its reply.", ("route",),
            registry=self.registry, buckets=SECONDS,
        )  # fmt: skip
        self._recoveries = Counter(
            "knot_head_recoveries", "Streams that another head went on with.", registry=self.registry
        )
        Gauge("knot_build_info", "Always 1.", ("version", "role"), registry=self.registry).labels(
            __version__, "tracker"
        ).set(1)
        self.registry.register(_Gauges(stats))

    def request(self, path: str, status: int, seconds: float) -> None:
        """Count a request that was answered, or left by its client (code 499)."""
        route = "/nodes" if path.startswith("/nodes/") else "/v1/models" if path.startswith("/v1/models/") else path
        known = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/usage", "/nodes", "/coverage", "/routes")
        route = route if route in known else "other"
        self._requests.labels(route, str(status)).inc()
        self._duration.labels(route).observe(seconds)

    def recovered(self) -> None:
        """Count a stream whose head was lost."""
        self._recoveries.inc()


class _Gauges(Collector):
    """The tracker's own counts, read when scraped."""

    def __init__(self, stats: Callable[[], Mapping[str, float]]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[GaugeMetricFamily]:
        for name, value in self._stats().items():
            yield GaugeMetricFamily(name, GAUGES[name], value=value)
