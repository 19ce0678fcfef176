"""What one node can hold of one model, and how long a token takes there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from knotctl.core.cluster.layers import LayerSizes, ModelLayers
from knotctl.core.cluster.nodes import Node
from knotctl.core.cluster.policy import Policy
from knotctl.core.cluster.quantizations import NATIVE
from knotctl.core.cluster.speed import SECOND, parameters_in, token_time
from knotctl.core.sizes import format_size
from knotctl.core.spans import LayerSpan


@dataclass(frozen=True, slots=True)
class Capacity:
    """A node's room for layers of a model at one quantisation, and its speed.

    most_layers is a number that no run of layers which fits exceeds; step is the time of a unit of the model's work,
    prefill_step that of a prompt's token.
    Units: bytes; steps of SECOND a unit of ModelLayers.work.
    """

    node: Node
    model: ModelLayers
    sizes: LayerSizes
    usable_bytes: int
    kv_bytes: int
    most_layers: int
    step: int
    prefill_step: int

    @property
    def node_id(self) -> str:
        """The node's id."""
        return self.node.node_id

    @property
    def quantization(self) -> str:
        """The quantisation that its layers are held at."""
        return self.sizes.quantization

    def bytes_of(self, start: int, end: int) -> int:
        """Return the bytes of weights that owning layers [start, end) takes."""
        return self.sizes.span_bytes(start, end)

    def fits(self, start: int, end: int) -> bool:
        """Say whether layers [start, end) fit."""
        return self.sizes.span_bytes(start, end) <= self.usable_bytes

    def end_from(self, start: int) -> int:
        """Return the furthest end of a run of layers from `start` that fits."""
        return self.sizes.end_from(start, self.usable_bytes)

    def start_to(self, end: int) -> int:
        """Return the furthest start of a run of layers to `end` that fits."""
        return self.sizes.start_to(end, self.usable_bytes)

    def time_of(self, span: LayerSpan) -> int:
        """Return the time of a decoded token through these layers, the output matrix with the last."""
        return self.step * self.model.work_of(span.start, span.end)

    def rate_of(self, span: LayerSpan) -> int:
        """Return the tokens that pass these layers in a million seconds: whole, so that rates add up exactly."""
        return 10**6 * SECOND // max(1, self.time_of(span))

    @property
    def order(self) -> tuple[int, int, str]:
        """Sort key: largest fit first, then fastest, then by name."""
        return (-self.most_layers, self.step, self.node_id)


def capacity_of(node: Node, model: ModelLayers, policy: Policy) -> Capacity | str:
    """Return a node's capacity, or why it has none.

    The quantisation is the one that the node holds the model at now, else the model's own where the node knows it,
    else the node's smallest.
    """
    usable = sizes_of(node, model)
    if not usable:
        return f"declares {', '.join(node.quantizations)}, none of which {model.name} has"
    sizes = usable[0]
    held = next((h.quantization for h in node.current if h.model is None), None)
    if held is not None:
        sizes = model.sizes_at(_named(held, model) or "") or sizes
    return _capacity(node, model, policy, sizes, usable[0])


def beside_weights(node: Node, model: ModelLayers) -> int:
    """Return the bytes that a node needs beside weights, keys and values: by its own account, else the model's."""
    return model.activation_bytes if node.overhead_bytes is None else node.overhead_bytes


def too_small(c: Capacity) -> str | None:
    """Return why not one layer fits a node, and what would help; None where one fits."""
    if c.most_layers >= 1:
        return None
    least = c.sizes.smallest[1]
    share = c.node.vram_bytes - c.kv_bytes
    return (
        f"no layer fits: of {format_size(c.node.vram_bytes)} its program takes "
        f"{format_size(beside_weights(c.node, c.model))} and keys and values {format_size(c.kv_bytes)}; "
        f"{format_size(c.usable_bytes)} are left, the smallest layer takes {format_size(least)}"
        + (f": with {format_size(_enough(c, least))} it would have one" if share else "")
    )


def _enough(c: Capacity, least: int) -> int:
    """Return the memory with which one layer would fit, the same share of it kept for keys and values."""
    need = least + beside_weights(c.node, c.model)
    return -(-need * c.node.vram_bytes // (c.node.vram_bytes - c.kv_bytes))


def at_sizes(capacity: Capacity, sizes: LayerSizes, policy: Policy) -> Capacity:
    """Return the same node's capacity at another quantisation."""
    return _capacity(capacity.node, capacity.model, policy, sizes, sizes_of(capacity.node, capacity.model)[0])


def sizes_of(node: Node, model: ModelLayers) -> list[LayerSizes]:
    """Return the model's sizes at the node's quantisations: its own first, then from small to large."""
    names = dict.fromkeys(_named(q, model) for q in node.quantizations)
    found = [s for q in names if q is not None and (s := model.sizes_at(q)) is not None]
    return sorted(found, key=lambda s: (s.quantization != model.native, s.total, s.quantization))


def _named(quantization: str, model: ModelLayers) -> str | None:
    return model.native if quantization == NATIVE else quantization


def _capacity(node: Node, model: ModelLayers, policy: Policy, sizes: LayerSizes, reference: LayerSizes) -> Capacity:
    kv = policy.reserve(node.vram_bytes)
    others = sum(h.weight_bytes for h in node.current if h.model is not None)
    room = max(0, node.vram_bytes - kv - beside_weights(node, model) - others)
    # The benchmark is taken to be at the quantisation planned by default; decoding reads every byte of weights once a
    # token, so that at twice the bytes it takes twice the time.
    whole = token_time(node.planned_tokens_per_s, model.parameters, _benchmark(node, model))
    whole = whole * sizes.total // max(1, reference.total)
    step = max(1, whole // max(1, model.total_work))
    speedup = policy.prefill_speedup
    if node.prefill_tokens_per_s is not None:
        speedup = max(1.0, node.prefill_tokens_per_s / node.tokens_per_s)
    return Capacity(node, model, sizes, room, kv, sizes.most_layers(room), step, max(1, round(step / speedup)))


def _benchmark(node: Node, model: ModelLayers) -> int | None:
    name = node.benchmark_model
    return None if name is None or name == model.name else parameters_in(name)


def capacities_of(
    nodes: Iterable[Node], model: ModelLayers, policy: Policy
) -> tuple[dict[str, Capacity], dict[str, str]]:
    """Return the capacities of the nodes that can hold a layer, and why each other one cannot, by id in order."""
    able: dict[str, Capacity] = {}
    unable: dict[str, str] = {}
    for node in sorted(nodes, key=lambda n: n.node_id):
        found = capacity_of(node, model, policy)
        if isinstance(found, str):
            unable[node.node_id] = found
        elif (why := too_small(found)) is not None:
            unable[node.node_id] = why
        else:
            able[node.node_id] = found
    return able, unable
