"""The plan explains itself: what is lost where a node leaves, and what its owner should be told."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from knotctl.core.cluster.capacity import beside_weights
from knotctl.core.cluster.coverage import subtract
from knotctl.core.cluster.planner import Plan
from knotctl.core.cluster.predict import fastest_route, times_of
from knotctl.core.cluster.reasons import layers
from knotctl.core.cluster.reconcile import Kind
from knotctl.core.cluster.speed import parameters_in, time_text
from knotctl.core.cluster.steps import mend, stages_of
from knotctl.core.errors import printable
from knotctl.core.sizes import format_size

# Above this many nodes a whole plan without each one of them would take too long.
_MOST_REPLANNED = 12
# Less context than this is not enough for a chat; a model's own limit where that is shorter.
_FAIR_CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class Warning:
    """One thing to know, with a stable code."""

    code: str
    message: str


def if_it_leaves(plan: Plan, node_id: str) -> str:
    """Return in words what is lost where a node leaves, and whether the others can make it good."""
    coverage, place = plan.placement.coverage, plan.placement.places[node_id]
    lost = coverage.lost_without(place.span)
    if not lost:
        copies = coverage.least(place.span) - 1
        return f"no layer is lost: each has {copies} more cop{'y' if copies == 1 else 'ies'}"
    where = f"layers {', '.join(map(str, lost))} are served by nobody"
    if not plan.covered:
        return f"{where} either"
    others = [c for i, c in plan.capacities.items() if i != node_id]
    if len(others) > _MOST_REPLANNED:
        room = sum(c.most_layers for c in others)
        return f"{where}; the others have room for {room} layers of {plan.model.n_layers}"
    after = plan.placement.copy()
    after.remove(node_id)
    before = after.spans()
    mend(after, {c.node_id: c for c in others}, plan.policy)
    route = fastest_route(stages_of(after), plan.model, plan.policy.hop(plan.model.hidden_size))
    if route is None:
        missing = layers(after.coverage.gap_layers)
        return f"{where}, and the others have no room for {missing}: the model stops until a node joins"
    loads = [
        sum(p.capacity.bytes_of(s.start, s.end) for s in subtract([p.span], [before[i]] if i in before else []))
        for i, p in after.places.items()
    ]
    seconds = max(loads) / plan.policy.link_bytes_per_s
    token = time_text(times_of(route, plan.model, plan.policy).token)
    return f"{where} for about {_duration(seconds)}, until the others have loaded them; then {token} a token"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def warnings_of(plan: Plan) -> list[Warning]:
    """Return what a reader of the plan must know, the gravest first."""
    return [Warning(code, message) for code, message in _warnings(plan)]


def _warnings(plan: Plan) -> Iterator[tuple[str, str]]:
    if not plan.covered:
        yield "gaps", _gaps(plan)
    if any(o.forced for step in plan.rounds for o in step):
        yield "forced-drop", "some layers are dropped although nobody else has them: see the directives marked forced"
    if not plan.completes:
        yield "unfinished", "some moves wait for coverage that is not there: they are left out until nodes join"
    yield from _memory(plan)
    if plan.covered:
        yield from _faster_with_fewer(plan)
        yield from _resilience(plan)
    if plan.held_back is not None and plan.times is not None:
        token = time_text(times_of(plan.held_back.stages, plan.model, plan.policy).token)
        names = ", ".join(c.node_id for c, _ in plan.held_back.stages[:4])
        yield (
            "held-back",
            f"a route over {names} would take {token} a token, now {time_text(plan.times.token)}: "
            f"not worth the moves, or out of reach without a gap (hysteresis {plan.policy.hysteresis:.0%})",
        )
    yield from _speeds(plan)


def _gaps(plan: Plan) -> str:
    gaps = ", ".join(map(str, plan.placement.coverage.gaps()))
    text = f"layers {gaps} have no node: the model cannot be served"
    if not plan.capacities:
        return f"{text}; no node can hold any of its layers"
    need = min(c.sizes.total for c in plan.capacities.values())
    room = sum(c.usable_bytes for c in plan.capacities.values())
    raw = sum(n.vram_bytes for n in plan.nodes)
    if need <= room:
        return f"{text}; the memory would do in sum, but whole layers do not fit into what each node has"
    text += f"; it takes {format_size(need)}, the nodes have {format_size(room)} beside their headroom"
    if raw < need:
        text += f" and {format_size(raw)} with it"
    return f"{text}: {format_size(need - room)} more are needed"


def _memory(plan: Plan) -> Iterator[tuple[str, str]]:
    over = [i for i, p in plan.placement.places.items() if not p.capacity.fits(p.span.start, p.span.end)]
    if over:
        yield "over-full", f"{_names(over)}: more weights than the headroom allows, and nobody else has the room"
    tight = context_tokens(plan)
    enough = min(plan.model.context_length or _FAIR_CONTEXT, _FAIR_CONTEXT)
    if tight is not None and tight < enough:
        yield "short-context", f"keys and values of {tight:,} tokens fit on the tightest node of the route"
    mixed = _mixed(plan)
    if mixed is not None:
        yield (
            "mixed-quantization",
            f"layer {mixed[0]} is served at {' and '.join(mixed[1])}: a stream that changes nodes may change its words",
        )
    native = plan.model.native
    if native is not None:
        others = [i for i, p in plan.placement.places.items() if p.capacity.quantization != native]
        if others:
            yield "not-stored", f"{_names(others)}: the knot is stored as {native}, and would have to be encoded anew"


def _mixed(plan: Plan) -> tuple[int, list[str]] | None:
    """The first layer that is served at two quantisations, and which."""
    found: dict[str, set[int]] = {}
    for p in plan.placement.places.values():
        found.setdefault(p.capacity.quantization, set()).update(range(p.span.start, p.span.end))
    if len(found) < 2:
        return None
    for k in range(plan.model.n_layers):
        names = sorted(q for q, owned in found.items() if k in owned)
        if len(names) > 1:
            return k, names
    return None


def _faster_with_fewer(plan: Plan) -> Iterator[tuple[str, str]]:
    assert plan.route is not None and plan.times is not None
    token, stages = plan.times.token, len(plan.route)
    placed = [p.capacity for p in plan.placement.places.values()]
    others = len(placed) - stages
    if others and len(placed) <= plan.model.n_layers:
        part = plan.model.total_work // len(placed)
        spread = sum(c.step * part for c in placed) + len(placed) * plan.policy.hop(plan.model.hidden_size)
        if spread > token:
            code, who = ("one-node-is-faster", plan.route[0][0].node_id + " alone") if stages == 1 else (
                "fewer-nodes-are-faster", f"a route of {stages}")  # fmt: skip
            yield (
                code,
                f"{who} takes {time_text(token)} a token, a route through all {len(placed)} nodes "
                f"{time_text(spread)}: {others} {'holds a copy' if others == 1 else 'hold copies'}, no stage of it",
            )
    if stages > 1:
        yield from _larger_node(plan, token, stages)


def _larger_node(plan: Plan, token: int, stages: int) -> Iterator[tuple[str, str]]:
    model = plan.model
    quicker = [c for c in plan.capacities.values() if c.step * model.total_work < token]
    quicker.sort(key=lambda c: (c.step, c.node_id))
    roomy = [c for c in quicker if c.node.vram_bytes - beside_weights(c.node, model) >= c.sizes.total]
    if roomy:
        c = roomy[0]
        left = c.node.vram_bytes - beside_weights(c.node, model) - c.sizes.total
        share = math.floor(100 * left / c.node.vram_bytes) / 100
        yield (
            "one-node-is-faster",
            f"{c.node_id} alone would take {time_text(c.step * model.total_work)} a token, the route of {stages} "
            f"{time_text(token)}: it holds the model where --kv-headroom is at most {share:g}",
        )
    elif quicker and plan.times is not None and plan.times.hops * plan.policy.hop(model.hidden_size) * 2 > token:
        c = quicker[0]
        alone = time_text(c.step * model.total_work)
        yield (
            "hops-dominate",
            f"more than half of the {time_text(token)} a token are hops between {stages} nodes: one node as fast as "
            f"{c.node_id} with {format_size(c.sizes.total)} for weights would take {alone}",
        )


def _resilience(plan: Plan) -> Iterator[tuple[str, str]]:
    single = [s for s, count in plan.placement.coverage.runs() if count == 1]
    if single:
        ids = [i for i, p in plan.placement.places.items() if plan.placement.coverage.least(p.span) == 1]
        yield (
            "single-copy",
            f"layers {', '.join(map(str, single))} have one copy: the model stops if {_names(ids, 'or')} leaves",
        )


def _speeds(plan: Plan) -> Iterator[tuple[str, str]]:
    named = [(n.node_id, n.benchmark_model) for n in plan.nodes if n.benchmark_model not in (None, plan.model.name)]
    unknown = [(i, name) for i, name in named if name and parameters_in(name) is None]
    if unknown:
        ids, name = _names([i for i, _ in unknown]), printable(unknown[0][1], 40)
        yield "unknown-benchmark", f"{ids}: {name!r} states no size; taken as measured on this model"
    slow = [n for n in plan.nodes if n.planned_tokens_per_s < n.tokens_per_s * plan.policy.lie_ratio]
    if slow:
        claim = f"{slow[0].tokens_per_s:g} claimed, {slow[0].planned_tokens_per_s:g} measured"
        yield "slower-than-claimed", f"{_names([n.node_id for n in slow])}: {claim}; planned with what was measured"


def context_tokens(plan: Plan) -> int | None:
    """Return how many tokens of keys and values fit on every node of the route, None where that is unknown."""
    if not plan.route or not plan.model.kv_token_bytes:
        return None
    return min(c.kv_bytes // (len(span) * plan.model.kv_token_bytes) for c, span in plan.route)


def directive_bytes(plan: Plan) -> int:
    """Return the bytes of weights that the plan's orders load."""
    return sum(
        plan.capacities[o.node_id].bytes_of(o.span.start, o.span.end)
        for step in plan.rounds
        for o in step
        if o.kind is Kind.LOAD
    )


def _names(ids: Sequence[str], last: str = "and") -> str:
    shown = list(ids[:3])
    if len(ids) > 3:
        return f"{', '.join(shown)} {last} {len(ids) - 3} more"
    return f" {last} ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
