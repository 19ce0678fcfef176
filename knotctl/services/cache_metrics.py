"""Cache levels and the store below them in `/metrics`: hits, misses, poisoned entries and bytes, a tier each.

Many misses with few entries mean that a level is bypassed; many store reads for warm tokens, that all are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from knotctl.core.source.base import ByteSource
from knotctl.core.source.cache_counts import COUNTS, CacheCounts, Count
from knotctl.core.source.counted import CountedSource

_HELP: dict[Count, str] = {
    "hits": "Entries found.",
    "misses": "Entries looked for in vain.",
    "poisoned": "Entries found bad when they were read, and deleted.",
    "evictions": "Entries given up for want of room.",
    "errors": "Failures of what lies behind a level.",
    "dropped": "Writes given up without trying.",
}


class CacheCollector(Collector):
    """The counts of levels, in the order in which they are asked, and of the store; read when scraped."""

    def __init__(self, levels: Callable[[], Sequence[CacheCounts]], store: Callable[[], ByteSource]) -> None:
        self._levels = levels
        self._store = store

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of all levels."""
        levels = self._levels()
        for name in COUNTS:
            counter = CounterMetricFamily(f"knot_cache_{name}", _HELP[name], labels=["tier"])
            for level in levels:
                counter.add_metric([level.tier], level[name])
            yield counter
        held = GaugeMetricFamily("knot_cache_bytes", "Bytes held.", labels=["tier"])
        for level in levels:
            held.add_metric([level.tier], level.bytes)
        yield held
        store = self._store()
        if isinstance(store, CountedSource):
            yield CounterMetricFamily("knot_store_reads", "Reads of the knot itself.", value=store.reads)
            yield CounterMetricFamily("knot_store_read_bytes", "Bytes read of the knot.", value=store.bytes)
