"""What `/metrics` tells Prometheus; names in base units, labels from small sets only.

Source: man knot-service(5), METRICS; Prometheus' naming rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from knotctl import __version__
from knotctl.services.token_metrics import CONTENT_TYPE, SECONDS, TokenMetrics

__all__ = ["CONTENT_TYPE", "Metrics"]


class Metrics(TokenMetrics):
    """The metrics of one server; `stats` is asked for the engine's gauges at each scrape."""

    def __init__(self, model: str, routes: Iterable[str], stats: Callable[[], Mapping[str, int]]) -> None:
        self._routes = frozenset(routes)
        self._model = model
        super().__init__()
        self._requests = Counter(
            "knot_requests", "Requests answered.", ("route", "code", "model"), registry=self.registry
        )
        self._duration = Histogram(
            "knot_request_duration_seconds", "From a request's head to the end of its reply.", ("route",),
            registry=self.registry, buckets=SECONDS,
        )  # fmt: skip
        Gauge("knot_build_info", "Always 1.", ("version",), registry=self.registry).labels(__version__).set(1)
        self.registry.register(_EngineGauges(stats))

    def request(self, path: str, status: int, seconds: float) -> None:
        """Count a request that was answered, or left by its client (code 499)."""
        route = path if path in self._routes else "/v1/models" if path.startswith("/v1/models/") else "other"
        self._requests.labels(route, str(status), self._model).inc()
        self._duration.labels(route).observe(seconds)


class _EngineGauges(Collector):
    """The engine's own counts, read when scraped."""

    _NAMES: Mapping[str, tuple[str, str]] = {
        "running": ("knot_requests_running", "Requests that the engine works on."),
        "waiting": ("knot_requests_waiting", "Requests that wait for room."),
        "weight_bytes": ("knot_weight_bytes", "Weights held in memory."),
        "peak_weight_bytes": ("knot_peak_weight_bytes", "Most weights ever held at once."),
        "kv_bytes": ("knot_kv_bytes", "Keys and values held."),
    }

    # Of engines over other nodes; zero where everything runs here.
    _COUNTS: Mapping[str, tuple[str, str]] = {
        "recoveries": ("knot_route_recoveries", "Passes lost with a node, replayed over another route."),
        "hop_retries": ("knot_hop_retries", "Frames sent twice because the way spoiled them."),
        "shard_failures": ("knot_shard_failures", "Frames that a shard did not answer."),
        "direct_reads": ("knot_shard_direct_reads", "Frames embedded from the knot because no shard answered."),
        "degraded_rows": ("knot_degraded_rows", "Rows of zeros in place of a lost shard's."),
    }

    def __init__(self, stats: Callable[[], Mapping[str, int]]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        for key, (name, help_text) in self._COUNTS.items():
            yield CounterMetricFamily(name, help_text, value=stats.get(key, 0))
        for key, (name, help_text) in self._NAMES.items():
            yield GaugeMetricFamily(name, help_text, value=stats[key])
