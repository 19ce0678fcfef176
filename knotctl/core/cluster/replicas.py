"""Copies once every layer is covered: spare nodes go where a token takes longest, or where copies are fewest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from knotctl.core.cluster.capacity import Capacity
from knotctl.core.cluster.placement import Placement, rates_text, window
from knotctl.core.cluster.policy import Policy
from knotctl.core.spans import LayerSpan


def add_copies(placement: Placement, idle: Iterable[Capacity], policy: Policy) -> Iterator[str]:
    """Give each idle node the layers that most need a copy, the largest fit first; yield each node given layers."""
    for c in idle:
        run = needy(placement, policy, c)
        if run is None:
            continue
        span = window(placement, c, run)
        if not len(span):
            continue
        which = "slowest" if policy.spare == "hotspots" else "least copied"
        why = f"copies layers {span}: of all layers {run} were the {which}, {_state(placement, run.start)}"
        placement.put(c, span, why)
        yield c.node_id


def needy(placement: Placement, policy: Policy, c: Capacity | None = None) -> LayerSpan | None:
    """Return the run of layers that most need a copy, and of which the node can hold the first."""
    coverage = placement.coverage
    rates, counts = coverage.rates, coverage.counts
    # Rates are far below the factor: counts decide, rates among equals.
    copies = policy.spare == "copies"
    need = [(n << 200) + rate for n, rate in zip(counts, rates, strict=True)] if copies else rates
    first = need.index(min(need))
    if c is not None and c.end_from(first) <= first:
        able = [k for k in range(len(need)) if c.end_from(k) > k]
        if not able:
            return None
        first = min(able, key=need.__getitem__)
    end = first + 1
    while end < len(need) and need[end] == need[first]:
        end += 1
    return LayerSpan(first, end)


def _state(placement: Placement, layer: int) -> str:
    count, rate = placement.coverage.counts[layer], placement.coverage.rates[layer]
    return f"{rates_text(rate)} by {count} node{'' if count == 1 else 's'}"


def level(placement: Placement, policy: Policy, route: Collection[str], most: int) -> Iterator[str]:
    """Move copies from where they are needless to where they are needed; yield each node that was moved.

    A copy moves where the layers it leaves stay `policy.level` times as fast as the layers it goes to were; where the
    policy counts copies, where they keep more of them. The neediest layers rise with every move and none falls to
    where they were, so that this comes to an end.
    """
    for _ in range(most):
        moved = _level_once(placement, policy, route)
        if moved is None:
            return
        yield moved


def _level_once(placement: Placement, policy: Policy, route: Collection[str]) -> str | None:
    run = needy(placement, policy)
    if run is None:
        return None
    coverage = placement.coverage
    by_rate = policy.spare == "hotspots"
    have = coverage.rates if by_rate else coverage.counts
    enough = policy.level * have[run.start] if by_rate else have[run.start] + 1
    least: dict[LayerSpan, int] = {}
    best: tuple[tuple[int, str], Capacity, LayerSpan] | None = None
    for node_id, place in placement.places.items():
        c, span = place.capacity, place.span
        if run.start in span or node_id in route:
            continue
        if span not in least:
            least[span] = min(have[span.start : span.end])
        left = least[span] - (c.rate_of(span) if by_rate else 1)
        if left <= 0 or left < enough or (best is not None and (-left, node_id) >= best[0]):
            continue
        target = window(placement, c, run)
        if run.start in target:
            best = (-left, node_id), c, target
    if best is None:
        return None
    _, c, target = best
    old, left = placement.places[c.node_id].span, -best[0][0]
    rest = f"others serve at {rates_text(left)}" if by_rate else f"{left} others have"
    why = f"moved from {old}, which {rest}, to copy {target}: {_state(placement, run.start)} so far"
    placement.put(c, target, why)
    return c.node_id
