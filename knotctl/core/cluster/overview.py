"""What the dashboard shows of a cluster: coverage, nodes and directives of a controller, and the ledger's totals.

Source: man knot-service(5), DASHBOARD.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from knotctl.core.cluster.controller import Controller
from knotctl.core.cluster.coverage import CoverageMap
from knotctl.core.cluster.fleet import Fleet
from knotctl.core.cluster.usage import EarningsRow, UsageRow
from knotctl.core.spans import LayerSpan

# Beyond these a picture of rows says nothing more, and the document would be made and sent every second.
MAX_NODES = 256
MAX_DIRECTIVES = 256
# What `fleet_sections` returns.
SECTIONS = ("coverage", "nodes", "more_nodes", "directives", "caches")


def fleet_sections(fleet: Fleet) -> dict[str, Any]:
    """Return the sections of a cluster whose nodes beat: those that are silent or under quarantine say so."""
    controller, now = fleet.controller, fleet.now
    nodes = {i: _node(controller, i, now) for i in controller.members}
    tiers: dict[str, Counter[str]] = {}
    for node_id, seen in fleet.seen.items():
        node = nodes.setdefault(node_id, _without_layers(node_id, seen.row.document))
        if seen.row.quarantine is not None:
            node |= {"state": "quarantined", "reason": seen.row.quarantine}
        elif now - seen.at > fleet.silent_s / 3:
            # several heartbeats; it has not left yet, and may come back
            node["state"] = "silent"
        if seen.figures is not None:
            for name in ("weight_bytes", "peak_weight_bytes", "kv_bytes"):
                node[name] = getattr(seen.figures, name)
            for tier, counts in seen.figures.caches:
                tiers.setdefault(tier, Counter()).update(counts)
    caches = {"caches": [{"tier": tier, **counts} for tier, counts in tiers.items()]} if tiers else {}
    return _sections(controller, nodes.values(), now) | caches


def cluster_sections(controller: Controller, now: float) -> dict[str, Any]:
    """Return the sections `coverage`, `nodes` and `directives`, of what nodes serve now, not of what is planned."""
    return _sections(controller, (_node(controller, i, now) for i in controller.members), now)


def _sections(controller: Controller, found: Iterable[dict[str, Any]], now: float) -> dict[str, Any]:
    nodes = sorted(found, key=_order)
    directives = [d for i in sorted(controller.members) for d in controller.directives.open_for(i)]
    return {
        "coverage": coverage_section(controller.books.coverage),
        "nodes": nodes[:MAX_NODES],
        "more_nodes": max(0, len(nodes) - MAX_NODES),
        "directives": [
            {
                "epoch": d.epoch,
                "kind": d.order.kind.value,
                "node_id": d.order.node_id,
                "start_layer": d.order.span.start,
                "end_layer": d.order.span.end,
                "closes_gap": d.order.closes_gap,
                "state": "open",
                "seconds_left": round(d.deadline - now, 1),
                "reason": d.order.why,
            }
            for d in sorted(directives, key=lambda d: d.epoch)[:MAX_DIRECTIVES]
        ],
    }


def coverage_section(coverage: CoverageMap) -> dict[str, Any]:
    """Return a coverage map with the names that the plan document has."""
    return {
        "n_layers": len(coverage.counts),
        "covered": coverage.covered,
        "gaps": [[g.start, g.end] for g in coverage.gaps()],
        "coverage_map": coverage.to_json(),
    }


def ledger_section(usage: Iterable[UsageRow], earnings: Iterable[EarningsRow]) -> dict[str, Any]:
    """Return totals by model and by node; whose requests they were is for the owners of accounts alone.

    Units: micro-credits.
    """
    models: dict[str, dict[str, Any]] = {}
    for row in usage:
        total = models.setdefault(
            row.model, {"model": row.model, "requests": 0, "prompt_tokens": 0, "generated_tokens": 0, "charged": 0}
        )
        for name in ("requests", "prompt_tokens", "generated_tokens", "charged"):
            total[name] += getattr(row, name)
    nodes = [
        {"account_id": r.account_id, "requests": r.requests, "layer_tokens": r.layer_tokens, "earned": r.earned}
        | {"balance": r.balance}
        for r in earnings
    ]
    return {"models": list(models.values()), "nodes": nodes[:MAX_NODES]}


def _node(controller: Controller, node_id: str, now: float) -> dict[str, Any]:
    member, books = controller.members[node_id], controller.books
    node, c = member.node, member.capacity
    held, loading, dropping = books.held[node_id], books.loading[node_id], books.dropping[node_id]
    place = controller.placement.places.get(node_id)
    waits = not held and controller.holds.until(node_id) > now
    state = "loading" if loading else "serving" if held else "held down" if waits else "idle"
    return {
        "node_id": node_id,
        "state": state,
        "spans": _pairs(held),
        "loading": _pairs(loading),
        "dropping": _pairs(dropping),
        "quantization": c.quantization,
        "memory_bytes": node.vram_bytes,
        "weight_bytes": sum(c.bytes_of(s.start, s.end) for s in held),
        "kv_bytes": c.kv_bytes if held else 0,
        "claimed_tokens_per_s": node.tokens_per_s,
        "measured_tokens_per_s": node.measured_tokens_per_s,
        "flagged": member.flagged,
        "reason": place.why if place else None,
    }


def _without_layers(node_id: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of a node that has no part in the plan: it has no room for a layer, or is under quarantine."""
    return {
        "node_id": node_id,
        "state": "idle",
        "spans": [],
        "loading": [],
        "dropping": [],
        "memory_bytes": document.get("vram_bytes"),
        "claimed_tokens_per_s": document.get("benchmark_tokens_per_sec"),
        "flagged": False,
        "reason": "no room for a layer",
    }


def _pairs(spans: Iterable[LayerSpan]) -> list[list[int]]:
    return [[s.start, s.end] for s in spans]


def _order(node: dict[str, Any]) -> tuple[bool, list[list[int]], str]:
    """Those that hold or load layers first, in the order of the layers."""
    spans = node["spans"] or node["loading"]
    return not spans, spans, node["node_id"]
