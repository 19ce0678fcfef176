"""The cheapest chain of nodes through all layers, each node at most once: the route that coverage rests on.

For a given order of nodes the boundaries are found exactly, by dynamic programming over (nodes used so far, layers
done): a node may be left out, a layer may stay uncovered at a price above everything else. So gaps come first, then
time; and as time is linear in layers, the fastest nodes are filled and the slowest takes what remains. Which order is
best only matters where layers, embedding and head do not fit alike; several are tried, largest fit first among equals.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from knotctl.core.cluster.capacity import Capacity
from knotctl.core.cluster.layers import ModelLayers, sums
from knotctl.core.spans import LayerSpan

# Above the time of any chain: a gap is never worth its speed.
UNCOVERED = 10**60
_SKIPPED, _GAP = -1, -2
# Nodes per order: beyond those that twice cover the model, more only cost time.
_LEAST_CANDIDATES = 24
_ENDS_TRIED = 4


@dataclass(frozen=True, slots=True)
class Chain:
    """Nodes with their layers, in order of the layers. cost is what was minimised: gaps, time, hops, moves."""

    stages: tuple[tuple[Capacity, LayerSpan], ...]
    gap_layers: int
    cost: int


@dataclass(frozen=True, slots=True)
class Terms:
    """What a chain costs beside the time on its nodes.

    hop is the time of a stage; held the layers that nodes have now, and move_price what a byte not held costs.
    Units: of SECOND; move_price as a fraction (numerator, denominator).
    """

    hop: int
    held: dict[str, LayerSpan]
    move_price: tuple[int, int] = (0, 1)


def price_list(c: Capacity, terms: Terms) -> list[int]:
    """Return the price of layers [0, k) on a node, for each k: time, and what must be moved there."""
    step = c.step
    prices = [step * w for w in c.model.work]
    numerator, denominator = terms.move_price
    if numerator:
        held = terms.held.get(c.node_id)
        a, b = (held.start, held.end) if held else (0, 0)
        prefix = c.sizes.prefix
        for k in range(1, len(prices)):
            kept = prefix[min(k, b)] - prefix[a] if k > a else 0
            prices[k] += (prefix[k] - kept) * numerator // denominator
    return prices


def extend(before: Sequence[int], c: Capacity, prices: Sequence[int], hop: int) -> tuple[list[int], list[int]]:
    """Return the cheapest cost of layers [0, k) for each k where this node may take the last run, and its start there.

    `before` is the same without the node. The start is -1 where the node is better left out. Of equal starts the
    largest wins: nodes that come earlier in the order are filled first.
    """
    n = len(before) - 1
    after, came = list(before), [_SKIPPED] * (n + 1)
    value = [b - p for b, p in zip(before, prices, strict=True)]
    window: deque[int] = deque()
    low = 0
    prefix, room, embedding = c.sizes.prefix, c.usable_bytes, c.sizes.embedding
    for end in range(1, n + 1):
        new = end - 1
        while window and value[window[-1]] >= value[new]:
            window.pop()
        window.append(new)
        head = 0
        if end == n:
            head = c.step * c.model.head_work
            while low < end and not c.fits(low, end):
                low += 1
        else:
            floor = prefix[end] - room
            if low == 0 and floor + embedding > 0:
                low = 1
            while low < end and prefix[low] < floor:
                low += 1
        while window and window[0] < low:
            window.popleft()
        if window and (total := value[window[0]] + prices[end] + head + hop) < after[end]:
            after[end], came[end] = total, window[0]
    return after, came


class _Search:
    """Chains of one model's nodes under the same terms; a node's prices are worked out once."""

    def __init__(self, model: ModelLayers, terms: Terms) -> None:
        self.model, self.terms = model, terms
        self._prices: dict[str, list[int]] = {}
        n = model.n_layers
        # Of two places for a gap the later is cheaper by a hair: the layers a user fills last are the last ones.
        self._gap = [UNCOVERED + n - k for k in range(n)]

    def along(self, order: Sequence[Capacity], *, gaps: bool = False) -> Chain:
        """Return the cheapest chain whose nodes come in this order, some left out; without `gaps` it must cover."""
        n, hop = self.model.n_layers, self.terms.hop
        row = [0] + [UNCOVERED * n] * n
        if gaps:
            row = list(sums(self._gap))
        history = []
        for c in order:
            row, came = extend(row, c, self._price_list(c), hop)
            if gaps:
                self._relax(row, came)
            history.append(came)
        stages: list[tuple[Capacity, LayerSpan]] = []
        end, i = n, len(order) - 1
        while i >= 0 and end > 0:
            start = history[i][end]
            if start == _GAP:
                end -= 1
                continue
            if start != _SKIPPED:
                stages.append((order[i], LayerSpan(start, end)))
                end = start
            i -= 1
        # A single stage sends nothing to another: it pays no hop.
        return Chain(tuple(reversed(stages)), row[n] // UNCOVERED, row[n] - (hop if len(stages) == 1 else 0))

    def _relax(self, row: list[int], came: list[int]) -> None:
        """Let each layer stay uncovered where that is cheaper, as it is where nobody can take it."""
        for k, price in enumerate(self._gap):
            if row[k] + price < row[k + 1]:
                row[k + 1], came[k + 1] = row[k] + price, _GAP

    def _price_list(self, c: Capacity) -> list[int]:
        if c.node_id not in self._prices:
            self._prices[c.node_id] = price_list(c, self.terms)
        return self._prices[c.node_id]


def cheapest(capacities: Iterable[Capacity], model: ModelLayers, terms: Terms) -> Chain:
    """Return the cheapest chain found among nodes: deterministic, independent of the order they are given in.

    Where none covers the model, the one that leaves the fewest layers out.
    """
    pool = candidates(capacities, model, terms.hop)
    search = _Search(model, terms)
    orders = list(_orders(pool, terms)) + [[c] for c in pool if c.fits(0, model.n_layers)]
    best = min((search.along(order) for order in orders), key=lambda chain: chain.cost)
    if best.gap_layers:
        best = min((search.along(order, gaps=True) for order in orders), key=lambda chain: chain.cost)
    return _with_ends_tried(best, search)


def _with_ends_tried(best: Chain, search: _Search) -> Chain:
    """The chain with some of its nodes tried as head and as tail, which hold the embedding and the output matrix."""
    used = [c for c, _ in best.stages]
    ends = sorted(used, key=lambda c: (c.step, c.node_id))
    ends = list(dict.fromkeys(ends[:_ENDS_TRIED] + ends[-_ENDS_TRIED:]))
    gaps = best.gap_layers > 0
    for head in ends:
        for tail in ends:
            if head is not tail:
                middle = [c for c in used if c is not head and c is not tail]
                other = search.along([head, *middle, tail], gaps=gaps)
                best = min(best, other, key=lambda chain: chain.cost)
    return best


def _orders(pool: list[Capacity], terms: Terms) -> Iterable[list[Capacity]]:
    largest = sorted(pool, key=lambda c: c.order)
    yield largest
    yield sorted(pool, key=lambda c: (c.step, c.order))
    yield sorted(pool, key=lambda c: worth(c, terms.hop))
    yield largest[::-1]
    if terms.held:
        idle = [c for c in largest if c.node_id not in terms.held]
        placed = sorted((c for c in pool if c.node_id in terms.held), key=lambda c: (terms.held[c.node_id], c.node_id))
        yield [*placed, *idle]
        yield [*idle, *placed]


def worth(c: Capacity, hop: int) -> tuple[int, str]:
    """Return the time of a unit of work on a full node, its hop shared out over what it holds; smaller is better."""
    return c.step + hop // max(1, work_bound(c)), c.node_id


def work_bound(c: Capacity) -> int:
    """Return an amount of work that no run of layers which fits the node exceeds."""
    return c.model.most_work[c.most_layers]


def candidates(capacities: Iterable[Capacity], model: ModelLayers, hop: int) -> list[Capacity]:
    """Return the nodes worth trying: the best by worth and the largest, each until they cover the model twice."""
    every = list(capacities)
    if len(every) <= _LEAST_CANDIDATES:
        return every
    chosen: dict[str, Capacity] = {}
    for ranked in (sorted(every, key=lambda c: worth(c, hop)), sorted(every, key=lambda c: c.order)):
        layers = 0
        for i, c in enumerate(ranked):
            if layers >= 2 * model.n_layers and i >= _LEAST_CANDIDATES // 2:
                break
            layers += c.most_layers
            chosen[c.node_id] = c
    return list(chosen.values())
