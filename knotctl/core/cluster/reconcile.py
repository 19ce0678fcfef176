"""From what nodes hold to what they should hold, in steps of which none takes a layer's last copy away."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from knotctl.core.cluster.capacity import Capacity
from knotctl.core.cluster.coverage import CoverageMap, subtract, union
from knotctl.core.cluster.placement import Place
from knotctl.core.spans import LayerSpan


class Kind(StrEnum):
    """What a node is told."""

    LOAD = "LOAD_SHARD"
    DROP = "DROP_SHARD"


@dataclass(frozen=True, slots=True)
class Order:
    """One step of a node. closes_gap: nobody serves these layers now. forced: see `schedule`."""

    kind: Kind
    node_id: str
    span: LayerSpan
    quantization: str
    why: str
    closes_gap: bool = False
    forced: bool = False


class Holdings:
    """What nodes hold, are loading and dropping, and the coverage that follows: changed by orders alone.

    A DROP stops counting when it is given, a LOAD counts when it is done: so two nodes never drop the same layers,
    each relying on the other, and nobody relies on what may not arrive. Units: none; spans of layers.
    """

    def __init__(self, n_layers: int) -> None:
        self.coverage = CoverageMap(n_layers)
        self.expected = CoverageMap(n_layers)  # with what is being loaded
        self.held: dict[str, list[LayerSpan]] = {}
        self.loading: dict[str, list[LayerSpan]] = {}
        self.dropping: dict[str, list[LayerSpan]] = {}

    def join(self, node_id: str, spans: Iterable[LayerSpan] = ()) -> None:
        """Take up a node with what it holds."""
        self.held[node_id], self.loading[node_id], self.dropping[node_id] = union(spans), [], []
        for span in self.held[node_id]:
            self.coverage.add(span)
            self.expected.add(span)

    def leave(self, node_id: str) -> None:
        """Forget a node and all it held."""
        for span in self.held.pop(node_id):
            self.coverage.remove(span)
            self.expected.remove(span)
        for span in self.loading.pop(node_id):
            self.expected.remove(span)
        del self.dropping[node_id]

    def settled(self, node_id: str, place: Place | None) -> bool:
        """Say whether a node holds what it should, and nothing is under way."""
        if self.loading[node_id] or self.dropping[node_id]:
            return False
        return self.held[node_id] == ([place.span] if place else [])

    def begin(self, order: Order) -> None:
        """Book an order that is given to its node."""
        if order.kind is Kind.LOAD:
            self.loading[order.node_id].append(order.span)
            self.expected.add(order.span)
        else:
            self.held[order.node_id] = subtract(self.held[order.node_id], [order.span])
            self.dropping[order.node_id].append(order.span)
            self.coverage.remove(order.span)
            self.expected.remove(order.span)

    def finish(self, order: Order, *, done: bool = True) -> None:
        """Book the end of an order; a LOAD that failed leaves nothing, a DROP is over either way."""
        if order.kind is Kind.DROP:
            self.dropping[order.node_id].remove(order.span)
            return
        self.loading[order.node_id].remove(order.span)
        if done:
            self.held[order.node_id] = union([*self.held[order.node_id], order.span])
            self.coverage.add(order.span)
        else:
            self.expected.remove(order.span)

    def withdraw(self, order: Order) -> None:
        """Undo a DROP that was given and not carried out: the node goes on serving."""
        self.dropping[order.node_id].remove(order.span)
        self.held[order.node_id] = union([*self.held[order.node_id], order.span])
        self.coverage.add(order.span)
        self.expected.add(order.span)

    def orders_for(self, place: Place | None, c: Capacity) -> list[Order]:
        """Return what a node can be told now to come nearer to its place: loads that fit, else drops that are safe."""
        node_id = c.node_id
        held, loading = self.held[node_id], self.loading[node_id]
        # What it is dropping it may yet keep, where the drop is taken back: that is known when the drop is over.
        missing = subtract([place.span] if place else [], [*held, *loading, *self.dropping[node_id]])
        orders = self._loads(place, missing, whole=True) if place and missing else []
        if not subtract(missing, [o.span for o in orders]) and (orders or loading):
            return orders  # what it has too much stays until it has what it should: the last copy may be its own
        goal = f"; {node_id} is to hold {place.span}" if place else ""
        surplus = subtract(held, [place.span] if place else [])
        safe = [part for span in surplus for part in self.coverage.kept_without(span)]
        orders += [Order(Kind.DROP, node_id, s, c.quantization, f"others serve {s}{goal}") for s in safe]
        if orders or loading or self.dropping[node_id]:
            return orders
        # Full to the last layer and relied upon: what fits is loaded, so that others can let go in turn.
        return self._loads(place, missing, whole=False) if place and missing else []

    def _loads(self, place: Place, missing: Iterable[LayerSpan], *, whole: bool) -> list[Order]:
        c = place.capacity
        node_id = c.node_id
        present = union([*self.held[node_id], *self.loading[node_id], *self.dropping[node_id]])
        orders = []
        for part, closes in self._gaps_first(missing):
            # Embedding and head count with the run that has the first or the last layer.
            while _bytes(c, [*present, part]) > c.usable_bytes:
                if whole or len(part) == 1:
                    break
                part = LayerSpan(part.start, part.end - 1)
            else:
                present = union([*present, part])
                orders.append(Order(Kind.LOAD, node_id, part, c.quantization, place.why, closes))
        return orders

    def _gaps_first(self, missing: Iterable[LayerSpan]) -> list[tuple[LayerSpan, bool]]:
        """Runs to load, gaps that nobody closes yet cut out and put first: a node serves them before the rest comes."""
        gaps: list[LayerSpan] = []
        rest: list[LayerSpan] = []
        holes = self.expected.gaps()
        for span in missing:
            cut = [
                LayerSpan(max(g.start, span.start), min(g.end, span.end))
                for g in holes
                if g.start < span.end and span.start < g.end
            ]
            gaps += cut
            rest += subtract([span], cut)
        return [*((g, True) for g in gaps), *((r, False) for r in rest)]


def _bytes(c: Capacity, spans: Iterable[LayerSpan]) -> int:
    return sum(c.bytes_of(s.start, s.end) for s in union(spans))


def schedule(
    before: Mapping[str, Sequence[LayerSpan]],
    places: Mapping[str, Place],
    capacities: Mapping[str, Capacity],
    n_layers: int,
    *,
    first: Collection[str] = (),
    force: bool = False,
) -> tuple[list[list[Order]], bool]:
    """Return rounds of orders from what nodes hold to their places, and whether they all get there.

    Orders of a round may be given when those of earlier rounds are done; nodes in `first` close gaps before others.
    With `force`, where the model has a gap and no safe order is left, a node drops what only it has, as nothing can be
    served either way; never else.
    """
    books = Holdings(n_layers)
    for node_id in capacities:
        books.join(node_id, before.get(node_id, ()))
    moving = [i for i in capacities if not books.settled(i, places.get(i))]
    moving.sort(key=lambda i: (i not in first, places[i].span if i in places else LayerSpan(0, 0), i))
    rounds: list[list[Order]] = []
    while moving:
        step = []
        for node_id in moving:
            for order in books.orders_for(places.get(node_id), capacities[node_id]):
                books.begin(order)
                step.append(order)
        if not step and force and not books.coverage.covered:
            step = forced_drop(books, moving, places, capacities)
            for order in step:
                books.begin(order)
        if not step:
            return rounds, False
        for order in step:
            books.finish(order)
        rounds.append(sorted(step, key=lambda o: (not o.closes_gap, o.kind is Kind.DROP, o.span, o.node_id)))
        moving = [i for i in moving if not books.settled(i, places.get(i))]
    return rounds, True


def forced_drop(
    books: Holdings, moving: Iterable[str], places: Mapping[str, Place], capacities: Mapping[str, Capacity]
) -> list[Order]:
    """Return the smallest drop that lets a node go on, although it has the only copy, as the model has a gap as it is.

    For where nodes wait for each other: none can load before it has let go of what only it has.
    """
    options = [
        (capacities[i].bytes_of(part.start, part.end), i, part)
        for i in moving
        for part in subtract(books.held[i], [places[i].span] if i in places else [])
    ]
    if not options:
        return []
    _, node_id, part = min(options)
    why = "the only copy, but the model has a gap and no order of moves keeps it: nothing can be served either way"
    return [Order(Kind.DROP, node_id, part, capacities[node_id].quantization, why, forced=True)]
