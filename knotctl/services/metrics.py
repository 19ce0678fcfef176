"""What `/metrics` tells Prometheus; names in base units, labels from small sets only.

Source: man knot-service(5), METRICS; Prometheus' naming rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from knotctl import __version__

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The metrics of one server; `stats` is asked for the engine's gauges at each scrape."""

    def __init__(self, model: str, routes: Iterable[str], stats: Callable[[], Mapping[str, int]]) -> None:
        self._routes = frozenset(routes)
        self._model = model
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "knot_requests", "Requests answered.", ("route", "code", "model"), registry=self.registry
        )
        self._duration = Histogram(
            "knot_request_duration_seconds", "From a request's head to the end of its reply.", ("route",),
            registry=self.registry, buckets=_SECONDS,
        )  # fmt: skip
        self._first = Histogram(
            "knot_time_to_first_token_seconds", "From submission to the first token.",
            registry=self.registry, buckets=_SECONDS,
        )  # fmt: skip
        self._next = Histogram(
            "knot_time_per_output_token_seconds", "From one token to the next.",
            registry=self.registry, buckets=_SECONDS,
        )  # fmt: skip
        self._prompt = Counter("knot_prompt_tokens", "Tokens of prompts.", registry=self.registry)
        self._generation = Counter("knot_generation_tokens", "Tokens generated.", registry=self.registry)
        Gauge("knot_build_info", "Always 1.", ("version",), registry=self.registry).labels(__version__).set(1)
        self.registry.register(_EngineGauges(stats))

    def request(self, path: str, status: int, seconds: float) -> None:
        """Count a request that was answered, or left by its client (code 499)."""
        route = path if path in self._routes else "/v1/models" if path.startswith("/v1/models/") else "other"
        self._requests.labels(route, str(status), self._model).inc()
        self._duration.labels(route).observe(seconds)

    def step(self, seconds: float, *, first: bool) -> None:
        """Note the wait for a token."""
        (self._first if first else self._next).observe(seconds)

    def generated(self, n_prompt: int, n_tokens: int) -> None:
        """Count the tokens of a generation that has ended, however it did."""
        self._prompt.inc(n_prompt)
        self._generation.inc(n_tokens)

    def totals(self) -> dict[str, Any]:
        """Return tokens and waits so far, for the dashboard; rates follow from two of them. Units: seconds."""
        read = self.registry.get_sample_value
        waits = {
            name: {"count": int(read(f"{metric}_count") or 0), "seconds": read(f"{metric}_sum") or 0}
            for name, metric in (
                ("first_token", "knot_time_to_first_token_seconds"),
                ("next_token", "knot_time_per_output_token_seconds"),
            )
        }
        # those of requests that still run are counted too, unlike in knot_generation_tokens_total
        generated = sum(wait["count"] for wait in waits.values())
        tokens = {"prompt": int(read("knot_prompt_tokens_total") or 0), "generated": generated}
        return {"tokens": tokens, "latency": waits}

    def exposition(self) -> bytes:
        """Return the text that Prometheus scrapes."""
        return generate_latest(self.registry)


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
