"""Who is to hold which layers: the state that the planner and the tracker change, with the coverage it gives."""

from __future__ import annotations

from dataclasses import dataclass

from knotctl.core.cluster.capacity import Capacity
from knotctl.core.cluster.coverage import CoverageMap
from knotctl.core.cluster.layers import ModelLayers
from knotctl.core.spans import LayerSpan


@dataclass(frozen=True, slots=True)
class Place:
    """A node's layers, and in words why it has them."""

    capacity: Capacity
    span: LayerSpan
    why: str


class Placement:
    """At most one run of layers a node; `coverage` and the boundaries follow every change."""

    def __init__(self, model: ModelLayers) -> None:
        self.model = model
        self.coverage = CoverageMap(model.n_layers)
        self.places: dict[str, Place] = {}
        self._edges = [0] * (model.n_layers + 1)

    def put(self, capacity: Capacity, span: LayerSpan, why: str) -> None:
        """Give a node these layers, in place of those it had."""
        self.remove(capacity.node_id)
        self.places[capacity.node_id] = Place(capacity, span, why)
        self.coverage.add(span, capacity.rate_of(span))
        self._edges[span.start] += 1
        self._edges[span.end] += 1

    def remove(self, node_id: str) -> None:
        """Take a node's layers from it, if it has any."""
        place = self.places.pop(node_id, None)
        if place is not None:
            self.coverage.remove(place.span, place.capacity.rate_of(place.span))
            self._edges[place.span.start] -= 1
            self._edges[place.span.end] -= 1

    def span_of(self, node_id: str) -> LayerSpan | None:
        """Return a node's layers, None where it has none."""
        place = self.places.get(node_id)
        return None if place is None else place.span

    def is_edge(self, layer: int) -> bool:
        """Say whether some node's layers begin or end at this layer: routes can change nodes there."""
        return layer in (0, self.model.n_layers) or self._edges[layer] > 0

    def needless(self, node_id: str) -> bool:
        """Say whether every layer of a node stays covered without it."""
        place = self.places[node_id]
        return self.coverage.least(place.span) > 1

    def spans(self) -> dict[str, LayerSpan]:
        """Return every node's layers."""
        return {i: p.span for i, p in self.places.items()}

    def copy(self) -> Placement:
        """Return the same placement, to try changes on."""
        new = Placement(self.model)
        new.places = dict(self.places)
        new.coverage = self.coverage.copy()
        new._edges = list(self._edges)
        return new

    def become(self, other: Placement) -> None:
        """Take over a placement that was tried, which is not used any more."""
        self.coverage, self.places, self._edges = other.coverage, other.places, other._edges


def window(placement: Placement, c: Capacity, must: LayerSpan) -> LayerSpan:
    """Return the layers that a node should hold so that it has those of `must` which fit, and fills its memory.

    What is left after `must` goes to the layers behind, then to those before; ends are drawn back to where other nodes
    begin or end, where that costs little, so that routes can change there. Empty where not even the first layer fits.
    """
    start, end = must.start, min(must.end, c.end_from(must.start))
    if end < must.end:
        return LayerSpan(start, end)
    end = _drawn_back(placement, end, c.end_from(start), -1)
    return LayerSpan(_drawn_back(placement, start, c.start_to(end), 1), end)


def _drawn_back(placement: Placement, near: int, far: int, step: int) -> int:
    """The furthest boundary from `far` back to `near`; `far` itself where that would waste more than half of it."""
    at = far
    while at != near and not placement.is_edge(at):
        at += step
    return far if 2 * abs(far - at) > abs(far - near) else at


def rates_text(rate: int) -> str:
    """Return a rate of a coverage map as tokens a second, for people."""
    return f"{rate / 10**6:.3g} tokens/s"
