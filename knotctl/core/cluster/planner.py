"""The plan: gaps closed first, then a faster route where it pays, then copies; what nodes hold is kept where it can.

Source: man knot-cluster(7), POLICY.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from knotctl.core.cluster.capacity import Capacity, at_sizes, capacities_of, sizes_of
from knotctl.core.cluster.chain import Chain, Terms, cheapest
from knotctl.core.cluster.coverage import CoverageMap
from knotctl.core.cluster.gaps import close_gaps
from knotctl.core.cluster.layers import ModelLayers
from knotctl.core.cluster.nodes import Node
from knotctl.core.cluster.optimum import affordable, bound, optimum
from knotctl.core.cluster.placement import Placement
from knotctl.core.cluster.policy import Policy
from knotctl.core.cluster.predict import Stage, Times, fastest_route, times_of
from knotctl.core.cluster.reasons import reasons
from knotctl.core.cluster.reconcile import Kind, Order, schedule
from knotctl.core.cluster.replicas import add_copies, level
from knotctl.core.cluster.speed import SECOND
from knotctl.core.spans import LayerSpan

# Of one plan: more copies than this are not moved at once, however uneven things are.
MOST_LEVELLED = 64
KEPT = "keeps what it holds"


@dataclass(frozen=True, slots=True)
class Plan:
    """Where every layer is to be, how to get there, and what that gives.

    route is the fastest way of a token when all orders are done, None where a layer is uncovered. best_token is the
    time of the best chain of these nodes, exact where `proved`, else a time that no plan beats (None: no plan covers).
    """

    model: ModelLayers
    policy: Policy
    nodes: tuple[Node, ...]
    capacities: Mapping[str, Capacity]
    unable: Mapping[str, str]
    placement: Placement
    rounds: Sequence[Sequence[Order]]
    completes: bool
    route: Sequence[Stage] | None
    times: Times | None
    route_before: Sequence[Stage] | None
    best_token: int | None
    proved: bool
    held_back: Chain | None = None

    @property
    def covered(self) -> bool:
        """Whether every layer has a node when all orders are done."""
        return self.placement.coverage.covered


def make_plan(model: ModelLayers, nodes: Iterable[Node], policy: Policy) -> Plan:
    """Return the plan for these nodes: the same for the same nodes, whatever their order."""
    every = tuple(sorted(nodes, key=lambda n: n.node_id))
    able, unable = capacities_of(every, model, policy)
    before = {n.node_id: [h.span for h in n.current if h.model is None] for n in every if n.node_id in able}
    hop = policy.hop(model.hidden_size)
    placement = as_it_is(model, able, before)
    route_before = fastest_route(stages_of(placement), model, hop)
    if not placement.places:
        adopt(placement, best_chain(able.values(), model, Terms(hop, {})))
    if not placement.coverage.covered:
        mend(placement, able, policy)
    if not placement.coverage.covered:
        mend_smaller(placement, able, policy)
    capacities = able | {i: p.capacity for i, p in placement.places.items()}
    if placement.coverage.covered:
        if any(before.values()):
            improve(placement, capacities, policy, before)
        idle = sorted((c for i, c in capacities.items() if i not in placement.places), key=lambda c: c.order)
        deque(add_copies(placement, idle, policy), 0)
        used = {c.node_id for c, _ in fastest_route(stages_of(placement), model, hop) or ()}
        deque(level(placement, policy, used, MOST_LEVELLED), 0)
        if policy.precision == "finest":
            refine(placement, before, policy)
            capacities |= {i: p.capacity for i, p in placement.places.items()}
    else:
        _restore(placement, able, before)
    route = fastest_route(stages_of(placement), model, hop)
    given_up = _given_up(placement, able, before)
    rounds, completes = schedule(
        {i: spans for i, spans in before.items() if i not in {o.node_id for o in given_up}},
        placement.places,
        capacities,
        model.n_layers,
        first={c.node_id for c, _ in route or ()},
        force=placement.coverage.covered,
    )
    times = times_of(route, model, policy) if route else None
    best, proved = best_possible(able.values(), model, hop)
    return Plan(
        model=model,
        policy=policy,
        nodes=every,
        capacities=capacities,
        unable=unable,
        placement=placement,
        rounds=[given_up, *rounds] if given_up else rounds,
        completes=completes,
        route=route,
        times=times,
        route_before=route_before,
        best_token=best,
        proved=proved,
        held_back=_held_back(capacities, model, times, hop) if any(before.values()) else None,
    )


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


def best_possible(capacities: Iterable[Capacity], model: ModelLayers, hop: int) -> tuple[int | None, bool]:
    """Return the time of the best chain and True, or for many nodes a time that no plan beats and False."""
    pool = list(capacities)
    if affordable(len(pool), model.n_layers):
        exact = optimum(pool, model, Terms(hop, {}))
        return (None if exact is None else exact.cost), True
    return bound(pool, model, hop), False


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


def _given_up(
    placement: Placement, able: Mapping[str, Capacity], before: Mapping[str, Sequence[LayerSpan]]
) -> list[Order]:
    """What nodes hold at another quantisation than the one that a gap made them change to: they begin anew."""
    coverage = CoverageMap(placement.model.n_layers)
    for span in (s for spans in before.values() for s in spans):
        coverage.add(span)
    orders = []
    for node_id, place in sorted(placement.places.items()):
        old, new = able[node_id].quantization, place.capacity.quantization
        for span in before[node_id] if old != new else ():
            why = f"held at {old}, and is to hold {place.span} at {new}, without which the model is not covered"
            orders.append(Order(Kind.DROP, node_id, span, old, why, forced=coverage.least(span) < 2))
            coverage.remove(span)
    return orders


def _held_back(capacities: Mapping[str, Capacity], model: ModelLayers, times: Times | None, hop: int) -> Chain | None:
    """The chain that would be faster if nothing had to be moved."""
    chain = best_chain(capacities.values(), model, Terms(hop, {}))
    return chain if times is not None and chain.gap_layers == 0 and chain.cost < times.token else None


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


def _restore(placement: Placement, able: Mapping[str, Capacity], before: Mapping[str, Sequence[LayerSpan]]) -> None:
    """Leave nodes over their headroom where a gap would be the alternative: they do serve those layers."""
    for node_id, spans in before.items():
        for span in spans:
            if any(placement.coverage.least(LayerSpan(k, k + 1)) == 0 for k in range(span.start, span.end)):
                placement.put(able[node_id], span, "holds more than its headroom allows, and nobody else has the room")
