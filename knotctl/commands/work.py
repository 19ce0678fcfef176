"""`knotctl run-station --tracker`: a worker whose layers its tracker chooses."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from knotctl.commands.console import say
from knotctl.commands.options import kv_type_of, residency_of
from knotctl.commands.serving import Door, run_node, trusted
from knotctl.core.errors import BudgetError, UsageError
from knotctl.core.sizes import format_size

if TYPE_CHECKING:
    from pathlib import Path

    from knotctl.core.knot.reader import Knot

# What a worker tells its trackers who it is, where they ask for more than the token between nodes.
KEY_VARIABLE = "KNOTCTL_NODE_KEY"


def work(
    knot: Knot, at: Door, trackers: Sequence[str], *, node_id: str | None, memory_budget: int | None,
    residency: str, kv_type: str, context: int, batch: int, benchmark: float | None, tls_ca: Path | None,
    advertise: str | None,
    json: bool, log_json: bool, log_requests: bool, until_eof: bool,
) -> None:  # fmt: skip
    """Register with the trackers, hold what they say, and serve it, until a signal."""
    from knotctl.core.engine.hop import RemoteError
    from knotctl.core.engine.route import Hop, RouteEnded, parse_route
    from knotctl.core.errors import RequestError
    from knotctl.core.knot.layer_bytes import model_layers
    from knotctl.core.model.benchmark import measure_speed
    from knotctl.core.model.budget import RUNTIME_BYTES, Residency, available_memory
    from knotctl.core.model.frame_room import frame_room
    from knotctl.core.model.station import Station, StationSpec
    from knotctl.core.source.base import SharedSource
    from knotctl.core.spans import LayerSpan
    from knotctl.core.tensor.digests import CheckedSource
    from knotctl.services.agent import Agent
    from knotctl.services.head_work import HeadWork
    from knotctl.services.station import MAX_LOGITS
    from knotctl.services.tracker_client import Trackers
    from knotctl.services.worker import WorkerService

    # What a warden passes on is checked already.
    if "://" in knot.source.name and not isinstance(knot.source, SharedSource):
        knot.source = CheckedSource(knot)
    model = model_layers(knot.header, _name_of(knot))
    room = (memory_budget if memory_budget is not None else available_memory() // 2) - RUNTIME_BYTES
    if room <= 0:
        raise BudgetError(
            "budget-too-small", f"memory budget: the program itself takes {format_size(RUNTIME_BYTES)}",
            hint="raise --memory-budget",
        )  # fmt: skip
    batch, overhead = frame_room(knot, room, batch, MAX_LOGITS, context)
    sizes = model.sizes_at(model.native or "")
    assert sizes is not None
    if benchmark is None:
        say("knotctl: measuring this machine …")
        layer = sizes.prefix[-1] // model.n_layers
        benchmark = measure_speed(knot, layer, sizes.head, room)

    def make(span: LayerSpan) -> Station:
        # What the planner keeps free of weights is for keys and values; it knows none smaller than a token each.
        kv = max(1, min(context, room // 5 // max(1, model.kv_token_bytes * len(span))))
        mode = residency_of(residency)
        mode = Residency.RESIDENT if mode is Residency.AUTO else mode
        spec = StationSpec(
            span, mode, memory_budget if mode is Residency.PINNED else None, kv_tokens=kv, batch_tokens=batch,
            logits_rows=MAX_LOGITS, kv_type=kv_type_of(kv_type),
        )  # fmt: skip
        return Station(knot, spec)

    tls = trusted(tls_ca)
    talks = Trackers(trackers, token=os.environ.get(KEY_VARIABLE) or at.keys.own, tls=tls)
    document: dict[str, Any] = {
        "node_id": node_id or f"{_host()}:{at.listener.getsockname()[1]}", "vram_bytes": room,
        "quantizations": [model.native], "benchmark_tokens_per_sec": round(max(benchmark, 1e-6), 6),
        "benchmark_model": model.name, "overhead_bytes": overhead,
    }  # fmt: skip

    def reroute(hops: tuple[Hop, ...], failed: Mapping[str, str]) -> tuple[Hop, ...]:
        route = [{"node_id": h.node_id, "url": h.url, "layers": [h.span.start, h.span.end]} for h in hops]
        try:
            reply = talks.call("POST", "/routes", {"route": route, "failed": dict(failed)}, seconds=60.0)
        except RemoteError as e:
            if e.code == "no-route":
                # None from here: the tracker may have one from another head, and waits for it.
                raise RouteEnded(e.message, {}) from e
            raise RequestError(e.code, e.message, status=503) from e
        return parse_route(reply.get("route"), model.n_layers)

    head = HeadWork(knot, reroute, context=context, token=at.keys.own, tls=tls)
    node = WorkerService(
        knot, make, routes=head.routes, token=at.keys.own, tls=tls, batch_tokens=batch, caches=head.caches
    )
    agent = Agent(node, talks, document, advertise or at.url)

    def leave() -> None:
        agent.leave()
        head.drain()

    node.when_draining(leave)
    agent.start()
    about = {"node_id": document["node_id"], "knot_id": knot.id, "benchmark_tokens_per_sec": benchmark}
    try:
        run_node(node, at, about, json=json, log_json=log_json, log_requests=log_requests, until_eof=until_eof)
    finally:
        agent.leave()
        head.close()
        agent.join()
        talks.close()


def check_options(layers: str | None, trackers: Sequence[str]) -> None:
    """Refuse what does not go together. Raises: UsageError."""
    if (layers is None) == (not trackers):
        raise UsageError("usage", "run-station: give --layers A:B, or --tracker URL, which chooses them")


def _name_of(knot: Knot) -> str:
    return knot.source.name.rsplit("/", 1)[-1].removesuffix(".knot")


def _host() -> str:
    name = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).strip("._-")
    return name or "node"
