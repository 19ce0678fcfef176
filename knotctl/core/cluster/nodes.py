"""Nodes as they register: memory, quantisations, benchmark, and what they hold now.

Source: CONTRACT section 2 (`plan-coverage`); man knot-cluster(7), NODES.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

from knotctl.core.cluster.fields import Fields, parse_document
from knotctl.core.cluster.layers import MAX_BYTES, ModelLayers
from knotctl.core.cluster.quantizations import CATALOGUE, NATIVE, canonical
from knotctl.core.errors import FormatError, printable
from knotctl.core.spans import LayerSpan

MAX_NODES = 100_000
MAX_NODES_BYTES = 64 << 20
MAX_TOKENS_PER_S = 1e6
FIELDS = (
    "node_id", "vram_bytes", "quantizations", "benchmark_tokens_per_sec", "benchmark_model",
    "benchmark_prefill_tokens_per_sec", "measured_tokens_per_sec", "overhead_bytes", "current",
)  # fmt: skip
# What an assignment of a plan says besides: plans can be fed back as `current` as they were printed.
_OF_A_PLAN = (
    "node_id",
    "role",
    "is_head",
    "is_tail",
    "kv_bytes",
    "kv_tokens",
    "stage_ms",
    "load_s",
    "reason",
    "if_it_leaves",
)
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/+-]{0,127}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Held:
    """A run of layers that a node serves now. model is None for the one being planned.

    Units: weight_bytes of another model's layers, which this plan leaves alone.
    """

    span: LayerSpan
    quantization: str
    model: str | None = None
    weight_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Node:
    """A worker as it registered. Units: bytes; tokens a second, prefill_tokens_per_s None where it did not say.

    overhead_bytes is what it needs beside weights, keys and values; None: what the model's preset or knot says.

    measured_tokens_per_s is what the tracker saw it deliver, in tokens of the benchmark model: it is believed instead.
    """

    node_id: str
    vram_bytes: int
    quantizations: tuple[str, ...]
    tokens_per_s: float
    benchmark_model: str | None = None
    prefill_tokens_per_s: float | None = None
    measured_tokens_per_s: float | None = None
    current: tuple[Held, ...] = ()
    overhead_bytes: int | None = None

    @property
    def planned_tokens_per_s(self) -> float:
        """The speed to plan with: the claim, unless less was measured."""
        return min(self.tokens_per_s, self.measured_tokens_per_s or self.tokens_per_s)


def parse_nodes(data: bytes, model: ModelLayers, name: str = "nodes") -> tuple[Node, ...]:
    """Return the nodes of a JSON file: a list, or an object with the list under `nodes`; order does not matter.

    Raises: FormatError bad-json, duplicate-key, bad-nodes, bad-node, duplicate-node, unknown-quantization.
    """
    document = parse_document(data, name)
    if isinstance(document, dict):
        fields = Fields(document, name, "bad-nodes")
        document = fields.items("nodes", MAX_NODES)
        fields.done(("nodes",))
    if not isinstance(document, list) or len(document) > MAX_NODES:
        found = f"{len(document):,}" if isinstance(document, list) else "no list"
        raise FormatError("bad-nodes", f"{name}: expected a list of at most {MAX_NODES:,} nodes, found {found}")
    known = frozenset((*CATALOGUE, *model.quantizations, NATIVE))
    nodes: dict[str, Node] = {}
    for i, item in enumerate(document):
        node = node_of(item, model, known, f"{name}: node {i}")
        if node.node_id in nodes:
            raise FormatError("duplicate-node", f"{name}: node {i}: node_id {node.node_id!r} appears twice")
        nodes[node.node_id] = node
    return tuple(nodes[i] for i in sorted(nodes))


def node_of(document: object, model: ModelLayers, known: Collection[str], place: str) -> Node:
    """Return the node of a registration. Raises: FormatError bad-node, unknown-quantization."""
    fields = Fields(document, place, "bad-node")
    node_id = fields.text("node_id")
    if not _ID.fullmatch(node_id):
        fields.refuse(f"node_id: expected letters, digits and any of ._:@/+- after the first, found {node_id!r}")
    fields.place = f"{place} ({node_id})"
    names = [_quantization(fields, q, model, known) for q in fields.items("quantizations", 64)]
    if not names or len(set(names)) < len(names):
        fields.refuse(f"quantizations: expected at least one, each once, found {len(names)}")
    vram = fields.integer("vram_bytes", 1, MAX_BYTES)
    current = fields.items("current", 64, [])
    held = tuple(_held(fields, h, model, known, vram) for h in current)
    runs = sorted(h.span for h in held if h.model is None)
    if any(a.end >= b.start for a, b in pairwise(runs)):
        fields.refuse(f"current: runs of {model.name} touch or overlap: expected them as one")
    node = Node(
        node_id,
        vram,
        tuple(names),
        _speed(fields, "benchmark_tokens_per_sec") or 0.0,
        fields.optional_text("benchmark_model"),
        _speed(fields, "benchmark_prefill_tokens_per_sec", required=False),
        _speed(fields, "measured_tokens_per_sec", required=False),
        held,
        fields.integer("overhead_bytes", 0, MAX_BYTES, 0) if fields.has("overhead_bytes") else None,
    )
    fields.done(FIELDS)
    return node


def _speed(fields: Fields, name: str, *, required: bool = True) -> float | None:
    """A speed above a token in eleven days: slower is broken, and zero would make every time infinite."""
    if not required and not fields.has(name):
        fields.number(name, 0, 0, 0)
        return None
    return fields.number(name, 1e-6, MAX_TOKENS_PER_S)


def _quantization(fields: Fields, value: object, model: ModelLayers, known: Collection[str]) -> str:
    if type(value) is not str or (name := canonical(value)) not in known:
        some = dict.fromkeys((*model.quantizations, "nf4", "int8", "bfloat16", "Q4_K", "Q8_0"))
        raise FormatError(
            "unknown-quantization",
            f"{fields.place}: expected quantisations such as {', '.join(some)}, found {printable(repr(value), 60)}",
        )
    return name


def _held(fields: Fields, item: object, model: ModelLayers, known: Collection[str], vram: int) -> Held:
    inner = Fields(item, f"{fields.place}: current", "bad-node")
    other = inner.optional_text("model")
    limit = model.n_layers if other in (None, model.name) else 1 << 20
    start = inner.integer("start_layer", 0, limit - 1)
    end = inner.integer("end_layer", start + 1, limit)
    quantization = inner.take("quantization")
    if other in (None, model.name):
        inner.integer("weight_bytes", 0, MAX_BYTES, 0)  # as plans show it; what counts is the model's own table
        held = Held(LayerSpan(start, end), _quantization(inner, quantization, model, known))
        if model.sizes_at(held.quantization if held.quantization != NATIVE else model.native or "") is None:
            inner.refuse(f"quantization: {model.name} has none called {held.quantization}")
    else:
        held = Held(LayerSpan(start, end), str(quantization), other, inner.integer("weight_bytes", 0, vram))
    inner.drop(_OF_A_PLAN)
    inner.done(("model", "start_layer", "end_layer", "quantization", "weight_bytes"))
    return held
