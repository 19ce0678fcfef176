"""What `/metrics` of a shard or station tells Prometheus; names in base units, labels from small sets only.

Source: man knot-service(5), NODES; Prometheus' naming rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from knotctl import __version__

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

GAUGES: Mapping[str, str] = {
    "knot_sessions": "Sessions whose keys and values are held.",
    "knot_frames_queued": "Frames that wait or are worked on.",
    "knot_weight_bytes": "Weights held in memory.",
    "knot_peak_weight_bytes": "Most weights ever held at once.",
    "knot_kv_bytes": "Keys and values held.",
}


class NodeMetrics:
    """The metrics of one node; `stats` is asked for the gauges at each scrape."""

    def __init__(self, role: str, routes: Iterable[str], stats: Callable[[], Mapping[str, float]]) -> None:
        self._routes = frozenset(routes)
        self.registry = CollectorRegistry()
        self._requests = Counter("knot_requests", "Requests answered.", ("route", "code"), registry=self.registry)
        self._duration = Histogram(
            "knot_request_duration_seconds", "From a request's head to the end of its reply.", ("route",),
            registry=self.registry, buckets=_SECONDS,
        )  # fmt: skip
        self._tokens = Counter("knot_tokens", "Tokens embedded, or carried through the layers.", registry=self.registry)
        self._compute = Counter("knot_compute_seconds", "Time spent on computing.", registry=self.registry)
        self._memo = Counter("knot_duplicate_steps", "Steps answered from memory.", registry=self.registry)
        self._retries = Counter("knot_hop_retries", "Frames sent to the next node twice.", registry=self.registry)
        self._failures = Counter("knot_hop_failures", "Frames the next node did not answer.", registry=self.registry)
        Gauge("knot_build_info", "Always 1.", ("version", "role"), registry=self.registry).labels(
            __version__, role
        ).set(1)
        self.registry.register(_Gauges(stats))

    def request(self, path: str, status: int, seconds: float) -> None:
        """Count a request that was answered, or left by its caller (code 499)."""
        route = path if path in self._routes else "/sessions" if path.startswith("/sessions/") else "other"
        self._requests.labels(route, str(status)).inc()
        self._duration.labels(route).observe(seconds)

    def computed(self, tokens: int, seconds: float) -> None:
        """Count the tokens of a frame and the time they took."""
        self._tokens.inc(tokens)
        self._compute.inc(seconds)

    def duplicate(self) -> None:
        """Count a step that was asked for again."""
        self._memo.inc()

    def hop_retried(self) -> None:
        """Count a frame sent on twice."""
        self._retries.inc()

    def hop_failed(self) -> None:
        """Count a frame that got no answer."""
        self._failures.inc()

    def exposition(self) -> bytes:
        """Return the text that Prometheus scrapes."""
        return generate_latest(self.registry)


class _Gauges(Collector):
    """A node's own counts, read when scraped."""

    def __init__(self, stats: Callable[[], Mapping[str, float]]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[GaugeMetricFamily]:
        for name, value in self._stats().items():
            yield GaugeMetricFamily(name, GAUGES[name], value=value)
