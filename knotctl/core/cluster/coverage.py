"""The coverage map: how many nodes serve each layer, and how fast together."""

from __future__ import annotations

from collections.abc import Iterable

from knotctl.core.spans import LayerSpan


class CoverageMap:
    """Counts and rates of each layer; sums are whole numbers, so that what is added and removed leaves no trace."""

    __slots__ = ("_gap_layers", "counts", "rates")

    def __init__(self, n_layers: int) -> None:
        self.counts = [0] * n_layers
        self.rates = [0] * n_layers
        self._gap_layers = n_layers

    @property
    def covered(self) -> bool:
        """Whether every layer has a node."""
        return self._gap_layers == 0

    @property
    def gap_layers(self) -> int:
        """Layers without a node."""
        return self._gap_layers

    def add(self, span: LayerSpan, rate: int = 0) -> None:
        """Count a node that serves these layers at this rate."""
        counts, rates = self.counts, self.rates
        for k in range(span.start, span.end):
            if not counts[k]:
                self._gap_layers -= 1
            counts[k] += 1
            rates[k] += rate

    def remove(self, span: LayerSpan, rate: int = 0) -> None:
        """Take back what `add` counted."""
        counts, rates = self.counts, self.rates
        for k in range(span.start, span.end):
            counts[k] -= 1
            rates[k] -= rate
            if not counts[k]:
                self._gap_layers += 1

    def copy(self) -> CoverageMap:
        """Return the same map, to try changes on."""
        new = CoverageMap(0)
        new.counts, new.rates, new._gap_layers = list(self.counts), list(self.rates), self._gap_layers
        return new

    def least(self, span: LayerSpan) -> int:
        """Return the smallest count among these layers."""
        return min(self.counts[span.start : span.end], default=0)

    def gaps(self) -> list[LayerSpan]:
        """Return the runs of layers that no node serves, in order."""
        return [span for span, count in self.runs() if count == 0] if self._gap_layers else []

    def runs(self) -> list[tuple[LayerSpan, int]]:
        """Return the map as runs of layers with the same count, in order."""
        return [(LayerSpan(a, b), n) for a, b, n in _runs(self.counts)]

    def to_json(self) -> list[dict[str, int]]:
        """Return the `coverage_map` of the plan document."""
        return [{"start_layer": s.start, "end_layer": s.end, "node_count": n} for s, n in self.runs()]

    def lost_without(self, span: LayerSpan) -> list[LayerSpan]:
        """Return the runs among these layers that would be served by nobody if one node that serves all left."""
        return self._runs_where(span, alone=True)

    def kept_without(self, span: LayerSpan) -> list[LayerSpan]:
        """Return the runs among these layers that others serve too."""
        return self._runs_where(span, alone=False)

    def _runs_where(self, span: LayerSpan, *, alone: bool) -> list[LayerSpan]:
        flags = [int((n <= 1) is alone) for n in self.counts[span.start : span.end]]
        return [LayerSpan(span.start + a, span.start + b) for a, b, yes in _runs(flags) if yes]


def _runs(values: list[int]) -> Iterable[tuple[int, int, int]]:
    start = 0
    for k in range(1, len(values) + 1):
        if k == len(values) or values[k] != values[start]:
            yield start, k, values[start]
            start = k


def subtract(spans: Iterable[LayerSpan], taken: Iterable[LayerSpan]) -> list[LayerSpan]:
    """Return what is left of some spans without others, in order."""
    left = sorted(spans)
    for hole in taken:
        parts = []
        for s in left:
            if hole.end <= s.start or s.end <= hole.start:
                parts.append(s)
                continue
            if s.start < hole.start:
                parts.append(LayerSpan(s.start, hole.start))
            if hole.end < s.end:
                parts.append(LayerSpan(hole.end, s.end))
        left = parts
    return left


def union(spans: Iterable[LayerSpan]) -> list[LayerSpan]:
    """Return the same layers as disjoint spans, neighbours joined, in order."""
    joined: list[LayerSpan] = []
    for s in sorted(spans):
        if joined and s.start <= joined[-1].end:
            joined[-1] = LayerSpan(joined[-1].start, max(joined[-1].end, s.end))
        elif s.start < s.end:
            joined.append(s)
    return joined
