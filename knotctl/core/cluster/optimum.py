"""How good a plan can be at all: exactly for a few nodes, by a bound that no plan can beat for any number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from knotctl.core.cluster.capacity import Capacity
from knotctl.core.cluster.chain import UNCOVERED, Chain, Terms, extend, price_list, work_bound, worth
from knotctl.core.cluster.layers import ModelLayers
from knotctl.core.spans import LayerSpan

# Sets of nodes times nodes times layers: below this the exact search takes a quarter of a second.
_MOST_STEPS = 250_000


def affordable(n_nodes: int, n_layers: int) -> bool:
    """Say whether the exact search is quick for so many nodes and layers."""
    return n_nodes <= 16 and (1 << n_nodes) * n_nodes // 2 * n_layers <= _MOST_STEPS


def optimum(capacities: Sequence[Capacity], model: ModelLayers, terms: Terms) -> Chain | None:
    """Return the cheapest chain over every set and order of nodes, None where no chain covers the model.

    best[set] holds, for each k, the cheapest way to do layers [0, k) with nodes of that set, each used at most once:
    2^nodes rows, each made from the rows with one node less.
    """
    n, nodes = model.n_layers, sorted(capacities, key=lambda c: c.order)
    prices = [price_list(c, terms) for c in nodes]
    start = [0] + [UNCOVERED] * n
    best: list[list[int]] = [start]
    came: list[list[tuple[int, int]]] = [[(-1, -1)] * (n + 1)]
    for members in range(1, 1 << len(nodes)):
        row, origin = start, [(-1, -1)] * (n + 1)
        for i, c in enumerate(nodes):
            if members >> i & 1:
                before = best[members ^ (1 << i)]
                after, starts = extend(before, c, prices[i], terms.hop)
                if row is start:
                    row = list(start)
                for k in range(1, n + 1):
                    if after[k] < row[k]:
                        row[k] = after[k]
                        # A start of -1: the node is left out, the set without it does as well.
                        origin[k] = (i, starts[k])
        best.append(row)
        came.append(origin)
    members, end = len(best) - 1, n
    if best[members][n] >= UNCOVERED:
        return None
    stages: list[tuple[Capacity, LayerSpan]] = []
    while end > 0:
        i, first = came[members][end]
        members ^= 1 << i
        if first >= 0:
            stages.append((nodes[i], LayerSpan(first, end)))
            end = first
    multi = Chain(tuple(reversed(stages)), 0, best[-1][n] - (terms.hop if len(stages) == 1 else 0))
    alone = _alone(nodes, model, terms)
    return alone if alone is not None and alone.cost < multi.cost else multi


def _alone(nodes: Sequence[Capacity], model: ModelLayers, terms: Terms) -> Chain | None:
    """The cheapest node that holds the model by itself and pays no hop."""
    chains = [
        Chain(((c, model.span),), 0, price_list(c, terms)[-1] + c.step * model.head_work)
        for c in nodes
        if c.fits(0, model.n_layers)
    ]
    return min(chains, key=lambda chain: chain.cost, default=None)


def bound(capacities: Iterable[Capacity], model: ModelLayers, hop: int) -> int | None:
    """Return a time of a token that no plan can beat, None where no plan covers.

    The relaxation lets layers be cut anywhere, an embedding and a head take no room, and charges a node's hop by the
    share of it that is used: filling the nodes in the order of their worth is then optimal.
    """
    nodes = list(capacities)
    left, time = model.work[-1], 0
    for c in sorted(nodes, key=lambda c: worth(c, hop)):
        part = min(left, work_bound(c))
        time += part * worth(c, hop)[0]
        left -= part
        if not left:
            break
    if left:
        return None
    time += model.head_work * min(c.step for c in nodes)
    alone = [c.step * model.total_work for c in nodes if c.fits(0, model.n_layers)]
    return min([time, *alone])
