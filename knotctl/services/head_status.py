"""What the dashboard shows of a head: its model, where the layers are, what they take, and what is in flight.

Counts only: no prompt, no answer and no key is in it. Source: man knot-service(5), DASHBOARD.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from knotctl.core.cluster.coverage import CoverageMap
from knotctl.core.cluster.overview import coverage_section
from knotctl.core.engine.pipeline import LocalStages
from knotctl.core.engine.remote import RemoteStages
from knotctl.core.engine.session import Engine
from knotctl.core.engine.stream import Stream
from knotctl.core.knot.reader import Knot
from knotctl.core.model.station import Station
from knotctl.core.source.cache_counts import CacheCounts
from knotctl.core.spans import LayerSpan
from knotctl.services.metrics import Metrics

# Streams that are listed one by one.
MAX_STREAMS = 64


def engine_sections(engine: Engine, metrics: Metrics) -> dict[str, Any]:
    """Return the sections of the dashboard's document that an engine of this process fills."""
    stats, stages = engine.stats(), engine.stages
    nodes = _local(stages.stations) if isinstance(stages, LocalStages) else []
    if isinstance(stages, RemoteStages):
        nodes = _remote(stages)
    document = {
        "models": [_model(engine)],
        "requests": {"running": stats["running"], "waiting": stats["waiting"], "recoveries": stats["recoveries"]},
        **metrics.totals(),
        "memory": _memory(stages, stats),
        "coverage": _coverage(engine.knot.header.config.n_layers, [n["spans"] for n in nodes]),
        "nodes": nodes,
        "routes": [{"stages": _route(stages.spans, nodes), "streams": stats["running"]}],
        "streams": [_stream(s, waiting=s.timings.started is None) for s in engine.streams()[:MAX_STREAMS]],
    }
    if isinstance(stages, LocalStages):
        document["caches"] = cache_section(stages.caches())
        document["weights"] = [row for station in stages.stations for row in _weights(station)]
    return document


def cache_section(levels: Iterable[CacheCounts]) -> list[dict[str, Any]]:
    """Return the counts of cache levels, those of the same tier added up."""
    tiers: dict[str, Counter[str]] = {}
    for level in levels:
        tiers.setdefault(level.tier, Counter()).update(level.to_json())
    return [{"tier": tier, **counts} for tier, counts in tiers.items()]


def _model(engine: Engine) -> dict[str, Any]:
    return {"name": engine.model_name, "context_length": engine.context_length, **_of_knot(engine.knot)}


def _of_knot(knot: Knot) -> dict[str, Any]:
    config, types = knot.header.config, Counter[str]()
    for tensor in knot.header.tensors:
        types[tensor.qtype.name] += tensor.length
    return {
        "knot_id": knot.id,
        "architecture": config.architecture,
        "n_layers": config.n_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "bytes": knot.header.file_bytes,
        "types": dict(types.most_common()),
    }


def _memory(stages: object, stats: dict[str, int]) -> dict[str, int | None]:
    keys = ("weight_bytes", "peak_weight_bytes", "kv_bytes", "peak_kv_bytes", "activation_bytes")
    memory: dict[str, int | None] = {key: stats[key] for key in keys}
    if isinstance(stages, LocalStages):
        plans = [s.plan for s in stages.stations]
        budgets = [p.budget_bytes for p in plans if p.budget_bytes is not None]
        memory["budget_bytes"] = sum(budgets) if len(budgets) == len(plans) else None
        memory["planned_bytes"] = sum(p.total_bytes for p in plans)
        memory["program_bytes"] = sum(p.frame_bytes + p.scratch_bytes + p.runtime_bytes for p in plans)
        memory["model_bytes"] = sum(p.weight_bytes for p in plans)
    return memory


def _local(stations: Iterable[Station]) -> list[dict[str, Any]]:
    return [
        {
            "node_id": f"station {i}",
            "state": "serving",
            "spans": [[s.span.start, s.span.end]],
            "residency": str(s.plan.residency),
            "weight_bytes": s.weights.ledger.held,
            "peak_weight_bytes": s.weights.ledger.peak,
            "kv_bytes": sum(kv.nbytes for kv in list(s.sessions.values())),
            "memory_bytes": s.plan.budget_bytes,
        }
        for i, s in enumerate(stations)
    ]


def _remote(stages: RemoteStages) -> list[dict[str, Any]]:
    found = []
    for span, replicas in zip(stages.spans, stages.nodes(), strict=True):
        for url, about in replicas:
            held = about.held if about else {}
            found.append(
                {
                    "node_id": url,
                    "state": "lost" if about is None else "serving" if about.ready else "loading",
                    "spans": [] if about is None else [[span.start, span.end]],
                    "weight_bytes": held.get("weights"),
                    "peak_weight_bytes": held.get("peak_weights"),
                    "kv_bytes": held.get("kv"),
                }
            )
    return found


def _coverage(n_layers: int, nodes: Iterable[list[list[int]]]) -> dict[str, Any]:
    coverage = CoverageMap(n_layers)
    for spans in nodes:
        for start, end in spans:
            coverage.add(LayerSpan(start, end))
    return coverage_section(coverage)


def _route(spans: Iterable[LayerSpan], nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the way of a token: of each span the first node that has it."""
    stages = []
    for span in spans:
        node_id = next((n["node_id"] for n in nodes if [span.start, span.end] in n["spans"]), None)
        stages.append({"node_id": node_id, "start_layer": span.start, "end_layer": span.end})
    return stages


def _stream(stream: Stream, *, waiting: bool) -> dict[str, Any]:
    times = stream.timings
    return {
        "id": stream.request_id.hex()[:8],
        "state": "waiting" if waiting else "prompt" if times.first is None else "generating",
        "prompt_tokens": len(stream.prompt),
        "generated_tokens": len(stream.tokens),
        "seconds": round(time.perf_counter() - times.submitted, 3),
        "tokens_per_s": times.report(len(stream.prompt), len(stream.tokens))["decode_tokens_per_s"],
    }


def _weights(station: Station) -> Iterable[dict[str, Any]]:
    pinned = {id(use) for use in station.weights.pinned}
    for use in station.uses:
        yield {
            "layer": use.layer,
            "phase": use.phase,
            "bytes": use.bytes,
            "pinned": id(use) in pinned,
            "load_ms": round(use.load_ms, 2),
            "compute_ms": round(use.compute_ms, 2),
        }
