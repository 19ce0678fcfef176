"""The steps that a plan is made of, each on a placement: what is there, gaps closed, a faster chain, finer weights.

Source: man knot-cluster(7), POLICY.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from knotctl.core.cluster.capacity import Capacity, at_sizes, sizes_of
from knotctl.core.cluster.chain import Chain, Terms, cheapest
from knotctl.core.cluster.gaps import close_gaps
from knotctl.core.cluster.layers import ModelLayers
from knotctl.core.cluster.optimum import affordable, bound, optimum
from knotctl.core.cluster.placement import Placement
from knotctl.core.cluster.policy import Policy
from knotctl.core.cluster.predict import Stage, fastest_route, times_of
from knotctl.core.cluster.reasons import reasons
from knotctl.core.cluster.reconcile import schedule
from knotctl.core.cluster.speed import SECOND
from knotctl.core.spans import LayerSpan

KEPT = "keeps what it holds"


def as_it_is(
    model: ModelLayers, capacities: Mapping[str, Capacity], before: Mapping[str, Sequence[LayerSpan]]
) -> Placement:
    """Return what nodes hold, cut down to what fits; of several runs, as a move half done leaves them, the longest."""
    placement = Placement(model)
    for node_id, spans in before.items():
        for span in sorted(spans, key=lambda s: (-len(s), s))[:1]:
            c = capacities[node_id]
            fitting = LayerSpan(span.start, min(span.end, c.end_from(span.start)))
            if not len(fitting):
                fitting = LayerSpan(max(span.start, c.start_to(span.end)), span.end)
            if len(fitting):
                placement.put(c, fitting, KEPT if fitting == span else f"keeps {fitting} of {span}: more does not fit")
    return placement


def stages_of(placement: Placement) -> Iterable[Stage]:
    """Return every node with its layers."""
    return ((p.capacity, p.span) for p in placement.places.values())


def best_chain(capacities: Iterable[Capacity], model: ModelLayers, terms: Terms, *, thorough: bool = True) -> Chain:
    """Return the cheapest chain found; for a few nodes the cheapest there is, unless quick will do and covers."""
    pool = list(capacities)
    found = cheapest(pool, model, terms)
    if not thorough and not found.gap_layers:
        return found
    if affordable(len(pool), model.n_layers):
        exact = optimum(pool, model, terms)
        # Of equals the first is kept, whose order is the largest fit first.
        if exact is not None and exact.cost < found.cost:
            return exact
    return found


def adopt(placement: Placement, chain: Chain) -> None:
    """Put a chain's nodes into their places."""
    for (c, span), why in zip(chain.stages, reasons(chain, placement.model), strict=True):
        if placement.span_of(c.node_id) != span:
            placement.put(c, span, why)


def mend(placement: Placement, able: Mapping[str, Capacity], policy: Policy) -> None:
    """Close gaps: by single moves, else by the chain that moves the fewest bytes."""
    idle = sorted((c for i, c in able.items() if i not in placement.places), key=lambda c: c.order)
    deque(close_gaps(placement, idle), 0)
    if not placement.coverage.covered:
        _take_chain(placement, able, policy)


def mend_smaller(placement: Placement, able: Mapping[str, Capacity], policy: Policy) -> None:
    """Close gaps with every node at the smallest of its quantisations, where it is not planned at that already."""
    smallest = {}
    for node_id, c in able.items():
        sizes = min(sizes_of(c.node, c.model), key=lambda s: s.total)
        smallest[node_id] = c if sizes is c.sizes else at_sizes(c, sizes, policy)
    if any(smallest[i] is not able[i] for i in able):
        _take_chain(placement, smallest, policy)


def _take_chain(placement: Placement, capacities: Mapping[str, Capacity], policy: Policy) -> None:
    """Take the chain that moves the fewest bytes, where it covers more."""
    terms = Terms(policy.hop(placement.model.hidden_size), placement.spans(), (SECOND, 1))
    trial = placement.copy()
    adopt(trial, best_chain(capacities.values(), placement.model, terms))
    if trial.coverage.gap_layers < placement.coverage.gap_layers:
        placement.become(trial)


def improve(
    placement: Placement,
    capacities: Mapping[str, Capacity],
    policy: Policy,
    before: Mapping[str, Sequence[LayerSpan]],
    leave_alone: Collection[str] = (),
    *,
    thorough: bool = True,
) -> None:
    """Take a faster chain where it pays and can be reached without a gap.

    It pays where a token takes less time by `policy.hysteresis`, the bytes to be moved weighed in: moving the whole
    model must buy that much again. `thorough` searches exactly where nodes are few.
    """
    model, hop = placement.model, policy.hop(placement.model.hidden_size)
    while True:
        route = fastest_route(stages_of(placement), model, hop)
        if route is None:
            return
        now = times_of(route, model, policy).token
        price = round(now * policy.hysteresis), max(1, max(c.sizes.total for c, _ in route))
        free = [c for i, c in capacities.items() if i not in leave_alone]
        least = bound(free, model, hop)
        if least is None or least * (1 + policy.hysteresis) > now:
            return
        chain = best_chain(free, model, Terms(hop, placement.spans(), price), thorough=thorough)
        token = now if chain.gap_layers else times_of(chain.stages, model, policy).token
        if token >= now or token * (1 + policy.hysteresis) > now:
            return
        trial = placement.copy()
        adopt(trial, chain)
        if not schedule(before, trial.places, capacities, model.n_layers)[1]:
            return
        placement.become(trial)


def refine(placement: Placement, before: Mapping[str, Sequence[LayerSpan]], policy: Policy) -> None:
    """Hold layers that must be loaded anyway at the finest of a node's quantisations in which they fit."""
    for node_id, place in sorted(placement.places.items()):
        if before.get(node_id):
            continue
        c, span = place.capacity, place.span
        for sizes in sorted(sizes_of(c.node, placement.model), key=lambda s: -s.total):
            if sizes.span_bytes(span.start, span.end) <= c.usable_bytes:
                if sizes is not c.sizes:
                    why = f"{place.why}; at {sizes.quantization}, the finest that fits"
                    placement.put(at_sizes(c, sizes, policy), span, why)
                break
