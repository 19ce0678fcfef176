"""Clusters to plan for: small random ones, the plan's directives carried out, and what a plain search finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from knotctl.core.cluster.capacity import Capacity, capacities_of
from knotctl.core.cluster.layers import ModelLayers
from knotctl.core.cluster.nodes import Held, Node
from knotctl.core.cluster.planner import Plan
from knotctl.core.cluster.policy import Policy
from knotctl.core.cluster.presets import preset_of
from knotctl.core.cluster.reconcile import Kind
from knotctl.core.spans import LayerSpan

FIXTURES = Path(__file__).parents[3] / "fixtures" / "cluster"
GB = 10**9


def a_model(n_layers: int = 100, layer: int | list[int] = GB, **more: Any) -> ModelLayers:
    """A model of so many layers of so many bytes; by default nothing but layers counts."""
    document = {"model": "m", "n_layers": n_layers, "bytes_per_layer": {"nf4": layer}, "parameters": 10**9}
    return preset_of(document | {"activation_bytes": 0, **more}, "preset")


def a_node(node_id: str, gigabytes: float, tokens_per_s: float = 10.0, held: str | None = None, **more: Any) -> Node:
    """A node at nf4 that holds layers `held`, written 0:14."""
    current = () if held is None else (Held(LayerSpan.parse(held), "nf4"),)
    return Node(
        node_id, round(gigabytes * GB), more.pop("quantizations", ("nf4",)), tokens_per_s, current=current, **more
    )


# Everything given fits: headroom and hops are tested by themselves.
PLAIN = Policy(kv_headroom=0.0, hop_ms=0.0, link_mbit=1e6)


def a_deadlock() -> tuple[ModelLayers, list[Node]]:
    """Two nodes that together fit a model whose last layer nobody has, each holding what the other must have.

    Layers of 1, 2 and 1 GB, an embedding of 3 and a head of 2: "a" must go to 1:3 and "b" to 0:1, and neither can
    load before it has let go of the only copy.
    """
    model = a_model(3, [GB, 2 * GB, GB], embedding_bytes=3 * GB, head_bytes=2 * GB)
    return model, [a_node("a", 5, held="0:1"), a_node("b", 4, held="1:2")]


def spans(plan: Plan) -> dict[str, str]:
    """Node -> its layers as text."""
    return {i: str(p.span) for i, p in sorted(plan.placement.places.items())}


@st.composite
def models(draw: st.DrawFn) -> ModelLayers:
    n_layers = draw(st.integers(1, 24))
    sizes = st.integers(1, 6).map(lambda n: n * GB)
    layers = draw(sizes) if draw(st.booleans()) else draw(st.lists(sizes, min_size=n_layers, max_size=n_layers))
    double = 2 * layers if isinstance(layers, int) else [2 * n for n in layers]
    return a_model(
        n_layers,
        embedding_bytes=draw(st.sampled_from([0, GB, 3 * GB])),
        head_bytes=draw(st.sampled_from([0, GB, 3 * GB])),
        hidden_size=4096,
        bytes_per_layer={"nf4": layers, "int8": double},
    )


policies = st.builds(
    Policy,
    kv_headroom=st.sampled_from([0.0, 0.2]),
    hop_ms=st.sampled_from([0.0, 5.0, 100.0]),
    hysteresis=st.sampled_from([0.0, 0.1, 0.5]),
    spare=st.sampled_from(["hotspots", "copies"]),
    precision=st.sampled_from(["smallest", "finest"]),
)


@st.composite
def nodes(draw: st.DrawFn, model: ModelLayers, policy: Policy, most: int = 6) -> list[Node]:
    """Nodes of very unequal size and speed, some of which hold layers that fit them."""
    sizes = model.sizes_at("nf4")
    assert sizes is not None
    found = []
    for i in range(draw(st.integers(0, most))):
        share = draw(st.sampled_from([0.05, 0.2, 0.4, 0.7, 1.3]))
        kinds = draw(st.sampled_from([("nf4",), ("int8",), ("nf4", "int8")]))
        node = Node(
            f"n{i}", max(1, int(share * sizes.total)), kinds, draw(st.sampled_from([1.0, 2.0, 5.5, 20.0, 60.0]))
        )
        c = capacities_of([node], model, policy)[0].get(node.node_id)
        start = draw(st.integers(0, model.n_layers - 1))
        if c is not None and draw(st.booleans()) and (end := c.end_from(start)) > start:
            span = LayerSpan(start, draw(st.integers(start + 1, end)))
            node = replace(node, current=(Held(span, c.quantization),))
        found.append(node)
    return found


@st.composite
def clusters(draw: st.DrawFn, most: int = 6) -> tuple[ModelLayers, Policy, list[Node]]:
    model, policy = draw(models()), draw(policies)
    return model, policy, draw(nodes(model, policy, most))


class Replay:
    """A plan's directives carried out one round after another, every promise of theirs checked on the way."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.held: dict[str, set[int]] = {i: set() for i in plan.capacities}
        for node in plan.nodes:
            for h in node.current:
                if node.node_id in self.held:
                    self.held[node.node_id] |= set(range(h.span.start, h.span.end))
        self.forced = 0
        for orders in plan.rounds:
            self._round(orders)

    def copies(self, layer: int) -> int:
        return sum(layer in held for held in self.held.values())

    @property
    def covered(self) -> bool:
        return all(self.copies(k) for k in range(self.plan.model.n_layers))

    def _round(self, orders: Sequence[Any]) -> None:
        # Within a round nothing is waited for: drops must be safe before any of its loads is done.
        for o in orders:
            layers = set(range(o.span.start, o.span.end))
            if o.kind is Kind.DROP:
                assert layers <= self.held[o.node_id], f"{o}: drops what it has not"
                if o.forced:
                    assert not self.covered
                    self.forced += 1
                else:
                    assert all(self.copies(k) > 1 for k in layers), f"{o}: opens a gap"
                self.held[o.node_id] -= layers
        for o in orders:
            if o.kind is Kind.LOAD:
                layers = set(range(o.span.start, o.span.end))
                assert not layers & self.held[o.node_id], f"{o}: loads what it has"
                self.held[o.node_id] |= layers
                self.check_memory(o.node_id)

    def check_memory(self, node_id: str) -> None:
        c = self.plan.capacities[node_id]
        runs = runs_of(self.held[node_id])
        assert sum(c.bytes_of(a, b) for a, b in runs) <= c.usable_bytes, f"{node_id}: over its memory"

    def nodes_after(self) -> list[Node]:
        """The same nodes as they would register after this, with what they hold."""
        after = []
        for node in self.plan.nodes:
            runs = runs_of(self.held.get(node.node_id, set()))
            c = self.plan.capacities.get(node.node_id)
            current = tuple(Held(LayerSpan(a, b), c.quantization) for a, b in runs if c is not None)
            after.append(replace(node, current=current))
        return after


def runs_of(layers: set[int]) -> list[tuple[int, int]]:
    starts = sorted(k for k in layers if k - 1 not in layers)
    ends = sorted(k + 1 for k in layers if k + 1 not in layers)
    return list(zip(starts, ends, strict=True))


def least_time(capacities: Mapping[str, Capacity], model: ModelLayers, hop: int) -> int | None:
    """The time of a token over the best chain, by trying every order and every boundary; None if none covers."""

    @cache
    def rest(start: int, order: tuple[str, ...]) -> int | None:
        if start == model.n_layers:
            return 0
        best: int | None = None
        for i, node_id in enumerate(order):
            c = capacities[node_id]
            for end in range(start + 1, model.n_layers + 1):
                if c.fits(start, end) and (after := rest(end, order[i + 1 :])) is not None:
                    time = c.time_of(LayerSpan(start, end)) + hop + after
                    best = time if best is None else min(best, time)
        return best

    times = [t for order in permutations(capacities) if (t := rest(0, order)) is not None]
    alone = [c.time_of(model.span) for c in capacities.values() if c.fits(0, model.n_layers)]
    return min(times + alone, default=None)
