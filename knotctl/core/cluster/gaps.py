"""Closing gaps: idle nodes first, the largest fit first; then neighbours with room; then nodes that are needless."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from knotctl.core.cluster.capacity import Capacity
from knotctl.core.cluster.placement import Placement, window
from knotctl.core.spans import LayerSpan

# Of a large pool, more than the largest few need not be looked at: they are in the order of fit.
MOST_IDLE_LOOKED_AT = 64
_IDLE, _NEIGHBOUR, _NEEDLESS = range(3)


def close_gaps(placement: Placement, idle: Sequence[Capacity], fixed: Iterable[str] = ()) -> Iterator[str]:
    """Give gaps to nodes until none is left or nobody can take one; yield each node that was given layers.

    idle are nodes without layers, in the order of fit. Nodes in `fixed` are left as they are.
    """
    pool, untouchable = list(idle), set(fixed)
    while not placement.coverage.covered:
        for gap in sorted(placement.coverage.gaps(), key=lambda g: (-len(g), g.start)):
            found = _taker(placement, pool, gap, untouchable)
            if found is not None:
                break
        else:
            return
        kind, c, span = found
        part = LayerSpan(max(span.start, gap.start), min(span.end, gap.end))
        if kind == _IDLE:
            pool.remove(c)
            why = f"fills the gap {part}: {_whole(part, gap)} among idle nodes"
        elif kind == _NEIGHBOUR:
            why = f"grows over the gap {part} beside its own layers: it has the room"
        else:
            old = placement.places[c.node_id].span
            why = f"fills the gap {part}: {_whole(part, gap)} among nodes whose layers others serve too (it had {old})"
        placement.put(c, span, why)
        yield c.node_id


def _whole(part: LayerSpan, gap: LayerSpan) -> str:
    return "the fastest that fits all of it" if part == gap else "the largest fit"


def _taker(
    placement: Placement, pool: Sequence[Capacity], gap: LayerSpan, fixed: set[str]
) -> tuple[int, Capacity, LayerSpan] | None:
    """The best node for a gap: one that fits all of it before one that fits a part, idle before others."""
    best: tuple[tuple[object, ...], int, Capacity, LayerSpan] | None = None
    for kind, c, span in _offers(placement, pool, gap, fixed):
        covered = min(span.end, gap.end) - max(span.start, gap.start)
        if covered > 0:
            key = (covered < len(gap), kind, -covered, c.step, c.node_id)
            if best is None or key < best[0]:
                best = key, kind, c, span
    return best[1:] if best else None


def _offers(
    placement: Placement, pool: Sequence[Capacity], gap: LayerSpan, fixed: set[str]
) -> Iterator[tuple[int, Capacity, LayerSpan]]:
    for c in pool[:MOST_IDLE_LOOKED_AT]:
        yield _IDLE, c, _window_over(placement, c, gap)
    for node_id, place in placement.places.items():
        if node_id in fixed:
            continue
        c, span = place.capacity, place.span
        if span.end == gap.start:
            yield _NEIGHBOUR, c, LayerSpan(span.start, min(gap.end, c.end_from(span.start)))
        elif span.start == gap.end:
            yield _NEIGHBOUR, c, LayerSpan(max(gap.start, c.start_to(span.end)), span.end)
        if placement.needless(node_id):
            yield _NEEDLESS, c, _window_over(placement, c, gap)


def _window_over(placement: Placement, c: Capacity, gap: LayerSpan) -> LayerSpan:
    """A node's layers over a gap, from whichever end of it more fit: the first and the last layer carry tables."""
    from_start = window(placement, c, gap)
    if from_start.end >= gap.end:
        return from_start
    start = max(gap.start, c.start_to(gap.end))
    return LayerSpan(start, gap.end) if gap.end - start > len(from_start) else from_start
