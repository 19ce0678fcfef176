"""A scenario to simulate: groups of nodes that come and go, events, and the policies to compare.

Source: man knot-cluster(7), SCENARIOS.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from knotctl.core.cluster.fields import Fields, parse_document
from knotctl.core.cluster.layers import MAX_BYTES, ModelLayers
from knotctl.core.cluster.nodes import MAX_TOKENS_PER_S, Node
from knotctl.core.cluster.policy import Policy
from knotctl.core.cluster.presets import preset_of
from knotctl.core.cluster.quantizations import CATALOGUE, NATIVE, canonical

MAX_SCENARIO_BYTES = 16 << 20
MAX_SIMULATED = 10_000
MAX_HOURS = 24 * 28
MAX_POLICIES = 16
_MAX_S = MAX_HOURS * 3600
_GROUP = (
    "name", "count", "vram_bytes", "quantizations", "tokens_per_s", "benchmark_model", "join_s", "up_s", "down_s",
    "keeps_s", "liars", "lie_factor", "mute",
)  # fmt: skip
_EVENT = ("at_s", "kind", "count", "group", "for_s", "factor")


@dataclass(frozen=True, slots=True)
class Actor:
    """A node as it is, beside what it says. Units: seconds; factors of the claimed speed.

    up_s and down_s are means of exponential stays and absences, None for a node that stays. A mute node never answers
    a LOAD. One that is away for keeps_s or less comes back with its layers.
    """

    node: Node
    group: str
    joins_at: float
    up_s: float | None
    down_s: float
    keeps_s: float
    true_factor: float
    mute: bool


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens to some nodes of a group (or of all): `leave` or `slow`, for a time or for good."""

    at_s: float
    kind: str
    node_ids: tuple[str, ...]
    for_s: float | None
    factor: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """What happens, the same under every policy."""

    name: str
    seed: int
    hours: float
    model: ModelLayers
    actors: tuple[Actor, ...]
    events: tuple[Event, ...]
    policies: tuple[tuple[str, Policy], ...]


def parse_scenario(data: bytes, base: Policy, model: ModelLayers | None = None, name: str = "scenario") -> Scenario:
    """Return the scenario of a JSON file; `model`, where given, stands for its own, and `base` for each default.

    Raises: FormatError bad-json, duplicate-key, bad-scenario, bad-preset, bad-policy.
    """
    fields = Fields(parse_document(data, name), name, "bad-scenario")
    title = fields.text("name")
    seed = fields.integer("seed", 0, (1 << 53) - 1, 0)
    hours = fields.number("hours", 0.01, MAX_HOURS)
    document = fields.take("model") if fields.has("model") or model is None else None
    fields.drop(("model",))
    planned = model if model is not None else preset_of(document, f"{name}: model")
    actors: list[Actor] = []
    for i, item in enumerate(fields.items("nodes", 1000)):
        actors += _group(item, planned, seed, f"{name}: nodes {i}", MAX_SIMULATED - len(actors))
    if len({a.node.node_id for a in actors}) < len(actors):
        fields.refuse("nodes: expected groups with different names")
    events = [
        _event(item, actors, seed, i, f"{name}: events {i}")
        for i, item in enumerate(fields.items("events", 10_000, []))
    ]
    policies = [
        _policy(item, base, f"{name}: policies {i}")
        for i, item in enumerate(fields.items("policies", MAX_POLICIES, []))
    ] or [("default", base)]
    if len({p for p, _ in policies}) < len(policies):
        fields.refuse("policies: expected different names")
    fields.done(("name", "seed", "hours", "model", "nodes", "events", "policies"))
    return Scenario(title, seed, hours, planned, tuple(actors), tuple(events), tuple(policies))


def _group(document: object, model: ModelLayers, seed: int, place: str, most: int) -> list[Actor]:
    fields = Fields(document, place, "bad-scenario")
    name = fields.text("name")
    if not name.isascii() or not name.replace("-", "").replace("_", "").isalnum() or len(name) > 64:
        fields.refuse("name: expected at most 64 letters, digits, - and _")
    count = fields.integer("count", 1, most)
    sizes = _choices(fields, "vram_bytes")
    known = {*CATALOGUE, *model.quantizations, NATIVE}
    names = [canonical(q) if isinstance(q, str) else "" for q in fields.items("quantizations", 64)]
    if not names or not set(names) <= known:
        fields.refuse("quantizations: expected at least one, all known")
    low, high = _range(fields, "tokens_per_s")
    benchmark = fields.optional_text("benchmark_model")
    join_s = fields.number("join_s", 0, _MAX_S, 0)
    up_s = fields.number("up_s", 1, _MAX_S, 0) or None
    down_s = fields.number("down_s", 1, _MAX_S, 600)
    keeps_s = fields.number("keeps_s", 0, 86_400, 0)
    liars, factor = fields.number("liars", 0, 1, 0), fields.number("lie_factor", 1e-4, 1, 0.02)
    mute = fields.number("mute", 0, 1, 0)
    fields.done(_GROUP)
    found = []
    for i in range(count):
        # A generator a node: what one does not depend on how many others there are, nor on the policy.
        draw = random.Random(f"{seed}/{name}/{i}")
        speed = low * (high / low) ** draw.random()
        vram = sizes[draw.randrange(len(sizes))]
        node = Node(f"{name}-{i:0{len(str(count - 1))}}", vram, tuple(names), round(speed, 3), benchmark)
        joins_at, lies, silent = draw.uniform(0, join_s), draw.random() < liars, draw.random() < mute
        found.append(Actor(node, name, joins_at, up_s, down_s, keeps_s, factor if lies else 1.0, silent))
    return found


def _choices(fields: Fields, name: str) -> list[int]:
    value = fields.take(name)
    sizes: list[Any] = value if isinstance(value, list) else [value]
    if not 0 < len(sizes) <= 64 or not all(type(n) is int and 0 < n <= MAX_BYTES for n in sizes):
        fields.refuse(f"{name}: expected bytes from 1 to {MAX_BYTES:,}, or a list to draw from")
    return sizes


def _range(fields: Fields, name: str) -> tuple[float, float]:
    value = fields.take(name)
    ends: list[Any] = value if isinstance(value, list) else [value, value]
    good = len(ends) == 2 and all(type(n) in (int, float) and 1e-6 <= n <= MAX_TOKENS_PER_S for n in ends)
    if not good or ends[0] > ends[1]:
        fields.refuse(f"{name}: expected a speed, or [lowest, highest]")
    return float(ends[0]), float(ends[1])


def _event(document: object, actors: Sequence[Actor], seed: int, index: int, place: str) -> Event:
    fields = Fields(document, place, "bad-scenario")
    at_s = fields.number("at_s", 0, _MAX_S)
    kind = fields.choice("kind", ("leave", "slow"), "")
    group = fields.optional_text("group")
    pool = [a.node.node_id for a in actors if group is None or a.group == group]
    count = fields.integer("count", 1, max(1, len(pool)))
    if not pool:
        fields.refuse(f"group: no nodes called {group}")
    for_s = fields.number("for_s", 1, _MAX_S, 0) or None
    factor = fields.number("factor", 1e-4, 1, 0.1)
    fields.done(_EVENT)
    chosen = random.Random(f"{seed}/event/{index}").sample(pool, count)
    return Event(at_s, kind, tuple(sorted(chosen)), for_s, factor)


def _policy(document: object, base: Policy, place: str) -> tuple[str, Policy]:
    if not isinstance(document, dict):
        Fields(document, place, "bad-policy")
        raise AssertionError
    named = Fields({"name": document.get("name")}, place, "bad-policy")
    rest = {key: value for key, value in document.items() if key != "name"}
    return named.text("name"), base.changed(rest, place)
