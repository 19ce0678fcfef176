"""The plan as a JSON document.

Source: CONTRACT section 2; man knot-cluster(7), THE PLAN.
"""

from __future__ import annotations

from typing import Any

from knotctl.core.cluster.explain import context_tokens, directive_bytes, if_it_leaves, warnings_of
from knotctl.core.cluster.placement import Place
from knotctl.core.cluster.planner import Plan
from knotctl.core.cluster.predict import Stage
from knotctl.core.cluster.reconcile import Order
from knotctl.core.cluster.speed import SECOND, milliseconds


def document_of(plan: Plan) -> dict[str, Any]:
    """Return the document of `plan-coverage --json`."""
    coverage = plan.placement.coverage
    return {
        "model": plan.model.name,
        "n_layers": plan.model.n_layers,
        "covered": plan.covered,
        "gaps": [[g.start, g.end] for g in coverage.gaps()],
        "coverage_map": coverage.to_json(),
        "assignments": assignments(plan),
        "idle": [{"node_id": i, "reason": why} for i, why in idle(plan)],
        "directives": [directive(plan, order, number) for number, step in enumerate(plan.rounds) for order in step],
        "predicted": predicted(plan),
        "warnings": [{"code": w.code, "message": w.message} for w in warnings_of(plan)],
    }


def assignments(plan: Plan) -> list[dict[str, Any]]:
    """Return every node with its layers, in the order of the layers."""
    rows = []
    for place in sorted(plan.placement.places.values(), key=lambda p: (p.span, p.capacity.node_id)):
        c, span = place.capacity, place.span
        node_id = c.node_id
        token_bytes = plan.model.kv_token_bytes * len(span)
        rows.append({
            "node_id": node_id,
            "start_layer": span.start,
            "end_layer": span.end,
            "quantization": c.quantization,
            "is_head": span.start == 0,
            "is_tail": span.end == plan.model.n_layers,
            "weight_bytes": c.bytes_of(span.start, span.end),
            "kv_bytes": c.kv_bytes,
            "role": role(plan, place),
            "kv_tokens": c.kv_bytes // token_bytes if token_bytes else None,
            "stage_ms": milliseconds(c.time_of(span)),
            "reason": place.why,
            "if_it_leaves": if_it_leaves(plan, node_id),
        })  # fmt: skip
    return rows


def role(plan: Plan, place: Place) -> str:
    """Return what a node is to the plan: on the `route` of a token, a `copy`, or a `stage` while there is no route."""
    if plan.route is None:
        return "stage"
    return "route" if any(c.node_id == place.capacity.node_id for c, _ in plan.route) else "copy"


def in_order(plan: Plan) -> list[Place]:
    """Return the places as people read them: the route from head to tail, then the copies by their layers."""
    order = {c.node_id: i for i, (c, _) in enumerate(plan.route or ())}
    return sorted(
        plan.placement.places.values(),
        key=lambda p: (order.get(p.capacity.node_id, len(order)), p.span, p.capacity.node_id),
    )


def with_rows(plan: Plan, most: int) -> tuple[list[Place], list[Place]]:
    """Return the places that a picture shows by a row each, and those it shows in sum: copies, where they are many."""
    every = in_order(plan)
    stages = [p for p in every if role(plan, p) != "copy"][:most]
    return (every, []) if len(every) <= most else (stages, [p for p in every if p not in stages])


def idle(plan: Plan) -> list[tuple[str, str]]:
    """Return the nodes without layers, and why they have none."""
    found = dict(plan.unable)
    for node_id in plan.capacities:
        if node_id not in plan.placement.places:
            found[node_id] = "every layer that fits it has its node" if plan.covered else "fits into none of the gaps"
    return sorted(found.items())


def directive(plan: Plan, order: Order, number: int) -> dict[str, Any]:
    """Return an order as the document shows it; orders of a round wait for those of the rounds before."""
    sizes = plan.model.sizes_at(order.quantization) or plan.capacities[order.node_id].sizes
    return {
        "round": number,
        "kind": order.kind.value,
        "node_id": order.node_id,
        "model": plan.model.name,
        "start_layer": order.span.start,
        "end_layer": order.span.end,
        "quantization": order.quantization,
        "bytes": sizes.span_bytes(order.span.start, order.span.end),
        "closes_gap": order.closes_gap,
        "forced": order.forced,
        "reason": order.why,
    }


def predicted(plan: Plan) -> dict[str, Any]:
    """Return the predicted times; null where a layer is uncovered."""
    loads = directive_bytes(plan)
    times, policy = plan.times, plan.policy
    per_node: dict[str, int] = {}
    for step in plan.rounds:
        for o in step:
            if o.kind.value == "LOAD_SHARD":
                size = plan.capacities[o.node_id].bytes_of(o.span.start, o.span.end)
                per_node[o.node_id] = per_node.get(o.node_id, 0) + size
    return {
        "token_ms": milliseconds(times.token) if times else None,
        "tokens_per_s": round(SECOND / times.token, 6) if times else None,
        "ttft_ms": milliseconds(times.first_token) if times else None,
        "prompt_tokens": policy.prompt_tokens,
        "hops": times.hops if times else None,
        "hop_ms": milliseconds(policy.hop(plan.model.hidden_size)),
        "pipeline_tokens_per_s": round(min(plan.placement.coverage.rates) / 10**6, 6) if times else None,
        "context_tokens": context_tokens(plan),
        "route": [_stage(s) for s in plan.route] if plan.route else None,
        "best_token_ms": milliseconds(plan.best_token) if plan.best_token else None,
        "best_is_exact": plan.proved,
        "distance": round(times.token / plan.best_token - 1, 6) if times and plan.best_token else None,
        "load_bytes": loads,
        "load_s": round(max(per_node.values(), default=0) / policy.link_bytes_per_s, 3),
    }


def _stage(stage: Stage) -> dict[str, Any]:
    c, span = stage
    return {
        "node_id": c.node_id,
        "start_layer": span.start,
        "end_layer": span.end,
        "stage_ms": milliseconds(c.time_of(span)),
    }
