"""The plan: gaps closed first, then a faster route where it pays, then copies; what nodes hold is kept where it can.

Source: man knot-cluster(7), POLICY.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from knotctl.core.cluster.capacity import Capacity, capacities_of
from knotctl.core.cluster.chain import Chain, Terms
from knotctl.core.cluster.coverage import CoverageMap
from knotctl.core.cluster.layers import ModelLayers
from knotctl.core.cluster.nodes import Node
from knotctl.core.cluster.optimum import affordable, bound, optimum
from knotctl.core.cluster.placement import Placement
from knotctl.core.cluster.policy import Policy
from knotctl.core.cluster.predict import Stage, Times, fastest_route, times_of
from knotctl.core.cluster.reconcile import Kind, Order, schedule
from knotctl.core.cluster.replicas import add_copies, level
from knotctl.core.cluster.steps import adopt, as_it_is, best_chain, improve, mend, mend_smaller, refine, stages_of
from knotctl.core.spans import LayerSpan

# Of one plan: more copies than this are not moved at once, however uneven things are.
MOST_LEVELLED = 64


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


def best_possible(capacities: Iterable[Capacity], model: ModelLayers, hop: int) -> tuple[int | None, bool]:
    """Return the time of the best chain and True, or for many nodes a time that no plan beats and False."""
    pool = list(capacities)
    if affordable(len(pool), model.n_layers):
        exact = optimum(pool, model, Terms(hop, {}))
        return (None if exact is None else exact.cost), True
    return bound(pool, model, hop), False


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


def _restore(placement: Placement, able: Mapping[str, Capacity], before: Mapping[str, Sequence[LayerSpan]]) -> None:
    """Leave nodes over their headroom where a gap would be the alternative: they do serve those layers."""
    for node_id, spans in before.items():
        for span in spans:
            if any(placement.coverage.least(LayerSpan(k, k + 1)) == 0 for k in range(span.start, span.end)):
                placement.put(able[node_id], span, "holds more than its headroom allows, and nobody else has the room")
