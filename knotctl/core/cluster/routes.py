"""The route of a request: which nodes its tokens pass, each with the run of layers that it does of those it holds.

Quickest by measured speed, load and hops; never over an edge that was reported broken, never over a node that is
avoided. Pure, like the planner: what it knows comes in.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from knotctl.core.cluster.layers import ModelLayers
from knotctl.core.spans import LayerSpan

# A stream that a node works on slows the next one by this share of its time: batches share the weights they read.
LOAD_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Server:
    """A node as a route sees it. Units: step, the planner's time of a unit of work; load, streams that pass it."""

    node_id: str
    url: str
    boot: str
    spans: tuple[LayerSpan, ...]
    step: int
    load: int = 0


@dataclass(frozen=True, slots=True)
class Stop:
    """One node of a route and its layers."""

    node_id: str
    url: str
    boot: str
    span: LayerSpan

    def to_json(self) -> dict[str, Any]:
        """Return the entry of a route as heads are told it."""
        return {"node_id": self.node_id, "url": self.url, "layers": [self.span.start, self.span.end]}


Route = tuple[Stop, ...]


@dataclass(slots=True)
class _Visit:
    """The quickest way to have a node at work on a run of its layers: where it came in, and from whom."""

    server: Server
    span: LayerSpan
    entered: int = 0
    cost: float = 0.0
    before: _Visit | None = None
    is_open: bool = False


def choose_route(
    servers: Sequence[Server],
    model: ModelLayers,
    hop: int,
    *,
    head: str | None = None,
    avoid: Collection[str] = (),
    broken: Collection[tuple[str, str]] = (),
) -> Route | None:
    """Return the quickest route, None where some layer has no node; from `head` where one is named.

    Units: hop in the planner's time; avoid are node ids, broken pairs of them, from and to.
    """
    visits = [_Visit(s, span) for s in servers if s.node_id not in avoid for span in s.spans]
    ends: list[_Visit] = []  # the quickest ways to have done the layers so far
    for layer in range(model.n_layers):
        now = []
        for v in visits:
            if not v.span.start <= layer < v.span.end:
                continue
            _enter(v, layer, ends, hop, head, broken)
            if v.is_open:
                slow = v.server.step * (1 + LOAD_SHARE * v.server.load)
                v.cost += slow * model.work_of(layer, layer + 1)
                now.append(_Visit(v.server, v.span, v.entered, v.cost, v.before, True))
        if not now:
            return None
        ends = sorted(now, key=lambda v: (v.cost, v.server.node_id))
    return _route(ends[0], model.n_layers)


def _enter(
    v: _Visit, layer: int, ends: Sequence[_Visit], hop: int, head: str | None, broken: Collection[tuple[str, str]]
) -> None:
    """Let a node take over at a layer where that is quicker than having been at work before."""
    node_id = v.server.node_id
    if layer == 0:
        v.is_open, v.entered, v.cost, v.before = head in (None, node_id), 0, 0.0, None
        return
    for end in ends:
        if v.is_open and end.cost + hop >= v.cost:
            return
        # A node that a route came by already cannot be passed again: a session is at one place of it.
        if (end.server.node_id, node_id) not in broken and not _passed(end, node_id):
            v.is_open, v.entered, v.cost, v.before = True, layer, end.cost + hop, end
            return


def _passed(end: _Visit | None, node_id: str) -> bool:
    while end is not None:
        if end.server.node_id == node_id:
            return True
        end = end.before
    return False


def _route(end: _Visit | None, at: int) -> Route:
    stops: list[Stop] = []
    while end is not None:
        s = end.server
        stops.append(Stop(s.node_id, s.url, s.boot, LayerSpan(end.entered, at)))
        at, end = end.entered, end.before
    return tuple(reversed(stops))


def edges_of(route: Route) -> list[tuple[str, str]]:
    """Return the pairs of nodes that a route goes over."""
    return [(a.node_id, b.node_id) for a, b in pairwise(route)]
